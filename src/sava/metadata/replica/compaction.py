"""Compaction: when to take a snapshot, and what may be forgotten once it is durable.

    freeze the state -> saver writes the file -> durable under its name -> core drops entries
    -> CHECKPOINT in a fresh file of the log -> older files of the log go -> older snapshots go

Each step relies on the one before it being durable. Dropping entries first would, after a power cut, leave a
log that begins after a snapshot which does not exist: the node could never start again, and with it
went its share of every majority.

The trigger counts entries and bytes since the last snapshot, and is looked at again when a build ends: one
that came while a build was running must not be lost in a quiet time afterwards (openraft #1829).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sava.metadata.durable import checkpoint_records, write_checkpoint
from sava.metadata.errors import Unavailable
from sava.metadata.machine.state_machine import SNAPSHOT_FORMAT, FrozenState, StateMachine
from sava.metadata.peer import Bootstrap
from sava.metadata.replica.persister import Persister, Task
from sava.raft.core import RaftCore
from sava.raft.types import SnapshotMeta
from sava.wal.errors import DiskFull
from sava.wal.log import Log

OnSaved = Callable[[SnapshotMeta | BaseException], None]


class SnapshotSaver(Protocol):
    """Writes an image of the state to disk in the background. ``done`` gets the meta once the file is durable
    under its final name, or what went wrong; it is called on the replica's own thread."""

    def save(self, base: SnapshotMeta, frozen: FrozenState, done: OnSaved) -> None:
        """``base`` has index, term and membership; size and digest are filled in."""
        ...


class HeldFiles(Protocol):
    def latest(self) -> SnapshotMeta | None: ...

    def prune(self, keep: SnapshotMeta) -> None: ...


class Compaction:
    def __init__(
        self,
        saver: SnapshotSaver,
        persister: Persister,
        files: HeldFiles,
        *,
        max_entries: int,
        max_bytes: int,
    ) -> None:
        self._saver = saver
        self._persister = persister
        self._files = files
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries = 0
        self._bytes = 0
        self._asked: list[OnSaved] = []
        self._is_building = False
        self._result: SnapshotMeta | BaseException | None = None
        self._wants_checkpoint = False
        self._is_checkpointing = False
        self._must_pause = False
        """The disk was full: wait for the next tick."""

    def applied(self, entries: int, size: int) -> None:
        self._entries += entries
        self._bytes += size

    def ask(self, done: OnSaved) -> None:
        self._asked.append(done)

    def tick(self) -> None:
        self._must_pause = False

    def installed(self) -> None:
        """A snapshot of the leader replaced everything: count from there, and let the log begin there too."""
        self._entries = self._bytes = 0
        self._wants_checkpoint = True

    @property
    def _is_due(self) -> bool:
        return bool(self._asked) or self._entries >= self._max_entries or self._bytes >= self._max_bytes

    @property
    def has_result(self) -> bool:
        return self._result is not None

    def step(self, core: RaftCore, machine: StateMachine, bootstrap: Bootstrap, applied: int) -> None:
        """Called once per pump, when the core's outputs are all on their way."""
        if self._result is not None:
            self._finish(core)
        if self._is_due and not self._is_building and not self._must_pause:
            self._begin(core, machine, applied)
        if (
            self._wants_checkpoint
            and not self._is_checkpointing
            and not self._must_pause
            and core.can_checkpoint()
        ):
            self._checkpoint(core, bootstrap)

    def _begin(self, core: RaftCore, machine: StateMachine, applied: int) -> None:
        self._entries = self._bytes = 0
        if core.status().snapshot_index >= applied:
            self._tell(
                self._files.latest() or Unavailable("nothing was applied yet: there is nothing to save")
            )
            return
        membership = core.membership_at(applied)
        if not membership.voters:
            # A node that joined replays the log from its beginning and learns who the members are from the
            # first change of membership. A snapshot taken before it would tell another node that there are
            # none (tests/sim seed 1147); the trigger stays, and the entry is on its way.
            self._entries, self._must_pause = self._max_entries, True
            self._tell(Unavailable("the members at this point of the log are not known here yet"))
            return
        base = SnapshotMeta(applied, core.term_at(applied), membership, 0, b"", SNAPSHOT_FORMAT)
        self._is_building = True
        self._saver.save(base, machine.freeze(), self._saved)

    def _saved(self, result: SnapshotMeta | BaseException) -> None:
        self._result = result

    def _finish(self, core: RaftCore) -> None:
        result, self._result = self._result, None
        self._is_building = False
        assert result is not None
        if isinstance(result, SnapshotMeta):
            core.snapshot_taken(result)
            self._wants_checkpoint = True
        elif isinstance(result, DiskFull):
            self._entries, self._must_pause = self._max_entries, True
        else:
            raise result
        self._tell(result)

    def _tell(self, result: SnapshotMeta | BaseException) -> None:
        asked, self._asked = self._asked, []
        for done in asked:
            done(result)

    def _checkpoint(self, core: RaftCore, bootstrap: Bootstrap) -> None:
        checkpoint = core.checkpoint()
        self._wants_checkpoint = False
        self._is_checkpointing = True

        def action(log: Log) -> None:
            write_checkpoint(log, checkpoint_records(bootstrap, checkpoint))
            self._files.prune(checkpoint.snapshot)

        self._persister.add_task(Task(action, self._checkpointed))

    def _checkpointed(self, error: BaseException | None) -> None:
        self._is_checkpointing = False
        if isinstance(error, DiskFull):
            self._wants_checkpoint = self._must_pause = True
        elif error is not None:
            raise error
