"""Persister: carries out what the core wants durable, in order, and reports each output exactly when it is.

One submission is at the log's writer at a time; what comes meanwhile is collected and becomes the next one,
so a busy node writes groups and syncs once for each. Having only one at a time is what makes a full disk
harmless:

    output 7 does not fit · output 8 is smaller and does · it is acknowledged · crash: a log with a hole

A refused submission stays at the head of the queue and is tried again with every tick; nothing later passes
it. Meanwhile the node reads and takes part in elections as far as that needs no disk, and refuses proposals.

An output without anything durable costs no write. Its messages may still depend on earlier outputs, so it
waits its turn behind them. A node whose disk stands still answers every heartbeat with such an output, ten a
second for hours: of these only ``MAX_WAITING`` wait. The others are lost, as a network would lose them, and
the leader asks again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sava.metadata.durable import batch_records, checkpoint_records, has_durable_part, write_checkpoint
from sava.metadata.errors import SnapshotCorrupt, Unavailable
from sava.metadata.machine.state_machine import SNAPSHOT_FORMAT, FrozenState, StateMachine
from sava.metadata.peer import Bootstrap
from sava.raft.core import RaftCore
from sava.raft.output import Output
from sava.raft.types import SnapshotMeta
from sava.wal.errors import DiskFull, Fullness, LogBusy
from sava.wal.log import Buffers, Log

MAX_GROUP = 256
"""Outputs per submission; each is at most a few megabytes (the core's limits), most are a few hundred bytes.
"""
MAX_WAITING = 1024
"""Outputs behind which one that has nothing durable does not wait any more."""

Done = Callable[[BaseException | None], None]


class LogWriter(Protocol):
    """``sava.wal.Writer``, or its twin in the simulator. ``done`` is called on the replica's own thread."""

    def append(self, records: Sequence[tuple[int, Buffers]], done: Done) -> None: ...

    def run(self, action: Callable[[Log], None], done: Done) -> None: ...


class ReceivedFiles(Protocol):
    """The part of ``SnapshotStore`` that receives snapshots."""

    def write_chunk(self, meta: SnapshotMeta, offset: int, data: bytes) -> None: ...

    def install(self, meta: SnapshotMeta) -> None: ...


@dataclass(slots=True)
class Task:
    """Work on the log that is no output (checkpoint, bootstrap); not tried again when the disk is full."""

    action: Callable[[Log], None]
    done: Done


@dataclass(slots=True)
class Persisted:
    output: Output
    machine: StateMachine | None = None
    """What an installed snapshot was restored to."""
    install_error: SnapshotCorrupt | None = None


class Persister:
    def __init__(
        self, writer: LogWriter, restore: Callable[[SnapshotMeta], StateMachine], files: ReceivedFiles
    ) -> None:
        self._writer = writer
        self._restore = restore
        self._files = files
        self._queue: deque[Output | Task] = deque()
        self._in_flight: list[Output] | Task | None = None
        self._restored: StateMachine | None = None
        self._completion: tuple[BaseException | None] | None = None
        self.full: DiskFull | LogBusy | None = None
        """Why nothing can be written at present; until a write succeeds."""
        self._may_try = True
        self._fullness = Fullness("raft", "nothing can be changed")

    @property
    def is_idle(self) -> bool:
        return self._in_flight is None and not self._queue

    @property
    def has_completion(self) -> bool:
        return self._completion is not None

    def add(self, output: Output) -> bool:
        """Queue an output; True when there is nothing to wait for: no durable part, and nothing earlier
        under way."""
        if not output.chunks and not has_durable_part(output):
            if self.is_idle:
                return True
            if not output.send_after_persist or len(self._queue) >= MAX_WAITING:
                # It promises nothing, or no peer will hear it: no need to know when its turn would have come.
                return False
        self._queue.append(output)
        return False

    def add_task(self, task: Task) -> None:
        self._queue.append(task)

    def retry(self) -> None:
        """Time has passed: there may be room again."""
        self._may_try = True

    # -- submitting --------------------------------------------------------------------------------------

    def submit(self) -> None:
        if self._in_flight is not None or not self._queue or not self._may_try:
            return
        head = self._queue[0]
        if isinstance(head, Task):
            self._queue.popleft()
            self._in_flight = head
            self._writer.run(head.action, self._completed)
        elif head.chunks or head.install is not None:
            self._queue.popleft()
            self._in_flight = [head]
            self._writer.run(lambda log: self._receive(log, head), self._completed)
        else:
            self._submit_group()

    def _submit_group(self) -> None:
        group: list[Output] = []
        records: list[tuple[int, Buffers]] = []
        queue = self._queue
        while queue and len(group) < MAX_GROUP:
            head = queue[0]
            if isinstance(head, Task) or head.chunks or head.install is not None:
                break
            queue.popleft()
            group.append(head)
            if has_durable_part(head):
                records += batch_records(head)
        self._in_flight = group
        if not records:
            self._completion = (None,)
            return
        try:
            self._writer.append(records, self._completed)
        except LogBusy as busy:
            self._completion = (busy,)

    def _receive(self, log: Log, output: Output) -> None:
        """On the writer's thread: bytes of a snapshot, and perhaps its installation. The file is durable
        under its name before the record that names it is, and both before the machine is replaced."""
        for chunk in output.chunks:
            self._files.write_chunk(chunk.meta, chunk.offset, chunk.data)
        if output.install is not None:
            self._files.install(output.install)
            self._restored = self._restore(output.install)
        if has_durable_part(output):
            log.append_many(batch_records(output))
            log.sync()

    def _completed(self, error: BaseException | None) -> None:
        self._completion = (error,)

    # -- completing --------------------------------------------------------------------------------------

    def collect(self) -> list[Persisted]:
        """Outputs that are durable now, in order. Raises what forbids going on."""
        if self._completion is None:
            return []
        (error,) = self._completion
        self._completion = None
        finished, self._in_flight = self._in_flight, None
        if isinstance(finished, Task):
            finished.done(error)
            return []
        assert finished is not None
        if error is None:
            self.full = None
            self._fullness.passed()
            machine, self._restored = self._restored, None
            return [Persisted(output, machine if output.install is not None else None) for output in finished]
        if isinstance(error, SnapshotCorrupt):
            return [Persisted(finished[0], install_error=error)]
        if not isinstance(error, DiskFull | LogBusy):
            raise error
        self.full, self._may_try = error, False
        if isinstance(error, DiskFull):
            self._fullness.refused(error)
        self._queue.extendleft(reversed(finished))
        return []


# -- snapshots, and what may be forgotten --------------------------------------------------------------------


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
    """When to take a snapshot, and what may be forgotten once it is durable.

        freeze the state -> saver writes the file -> durable under its name -> core drops entries
        -> CHECKPOINT in a fresh file of the log -> older files of the log go -> older snapshots go

    Each step relies on the one before it being durable. Dropping entries first would, after a power cut,
    leave a log that begins after a snapshot which does not exist: the node could never start again, and with
    it went its share of every majority.

    The trigger counts entries and bytes since the last snapshot, and is looked at again when a build ends:
    one that came while a build was running must not be lost in a quiet time afterwards (openraft #1829).
    """

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
