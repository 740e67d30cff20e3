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

**Applying.** Every committed entry is applied exactly once per state: the machine begins as the snapshot at
index s, and takes s+1, s+2, … without a gap. Nothing else about it is stored, so after a restart the machine
is rebuilt from snapshot and log, and index and state cannot disagree. An entry that is not the next one is a
state that cannot be, and stops the node.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from sava.metadata.commands import Result, decode_proposal
from sava.metadata.durable import batch_records, checkpoint_records, has_durable_part, write_checkpoint
from sava.metadata.errors import SnapshotCorrupt, Unavailable
from sava.metadata.machine.limits import Limits
from sava.metadata.machine.state_machine import SNAPSHOT_FORMAT, Applied, StateMachine
from sava.metadata.peer import Bootstrap
from sava.metadata.replica.config import Done, OnSaved, ReplicaConfig, ReplicaDisk
from sava.metadata.replica.proposals import LeaseKeeper, Proposals
from sava.metadata.snapshots import SnapshotStore
from sava.metadata.watch import WatchHub
from sava.raft.core import RaftCore
from sava.raft.output import Output
from sava.raft.types import Entry, EntryKind, InvariantError, NodeId, SnapshotMeta
from sava.wal.errors import DiskFull, Fullness, LogBusy
from sava.wal.log import Buffers, Log

OnApplied = Callable[[Entry, Applied], None]
Callback = Callable[[], None]


class Applier:
    def __init__(self, node: NodeId, limits: Limits, snapshots: SnapshotStore) -> None:
        self._node = node
        self._limits = limits
        self._snapshots = snapshots
        self.machine = StateMachine(limits)
        self.hub = WatchHub(0)
        self.index = 0
        self.term = 0
        """Of the entry at ``index``."""
        self.queue: list[Entry] = []
        self.by_index = ApplyWait()
        self.by_revision = ApplyWait()
        self.on_applied: OnApplied | None = None
        self._was_member = False
        self.is_removed = False

    def restore(self, meta: SnapshotMeta) -> StateMachine:
        return StateMachine.restore(self._snapshots.load(meta), self._limits)

    def begin(self, meta: SnapshotMeta) -> None:
        """Start from the snapshot that the log continues (index 0: from nothing)."""
        self.adopt(meta, self.restore(meta) if meta.index else self.machine)

    def adopt(self, meta: SnapshotMeta, machine: StateMachine) -> None:
        """The state is now ``machine``, at ``meta.index``. Events up to there can no longer be sent one by
        one."""
        self.machine = machine
        self.index, self.term = meta.index, meta.term
        self.hub.reset(machine.revision)
        self._note_membership(self._node in meta.membership.members)

    def apply(
        self, core: RaftCore, proposals: Proposals, leases: LeaseKeeper, now_ms: int
    ) -> tuple[int, int]:
        """Apply what is queued; returns how many entries and bytes that was."""
        entries, self.queue = self.queue, []
        machine, publish, answer = self.machine, self.hub.publish, proposals.applied
        on_applied, is_leading = self.on_applied, leases.is_leading
        size = 0
        for entry in entries:
            index, term = entry.index, entry.term
            if index != self.index + 1:
                raise InvariantError(f"entry {index} is to be applied after entry {self.index}")
            self.index = index
            result: Result | None = None
            if entry.kind is EntryKind.COMMAND:
                data = entry.data
                size += len(data)
                proposal = decode_proposal(data)
                applied = machine.apply(proposal, term)
                result = applied.result
                if applied.events:
                    publish(applied.events)
                if on_applied is not None:
                    on_applied(entry, applied)
                if is_leading:
                    leases.observe(proposal.command, result, now_ms)
            elif entry.kind is EntryKind.MEMBERSHIP:
                self._note_membership(self._node in core.membership_at(index).members)
            answer(index, term, result)
        self.term = entries[-1].term
        core.applied(self.index)
        return len(entries), size

    def reach(self) -> None:
        """Call back those whose index or revision has come."""
        if self.by_index.callbacks:
            self.by_index.reached(self.index)
        if self.by_revision.callbacks:
            self.by_revision.reached(self.machine.revision)

    def _note_membership(self, is_member: bool) -> None:
        if is_member:
            self._was_member, self.is_removed = True, False
        elif self._was_member:
            self.is_removed = True


class ApplyWait:
    """Who waits for a number that only grows (an applied index, a revision)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self.callbacks: dict[int, Callback] = {}
        """By ticket."""

    def add(self, number: int, ticket: int, callback: Callback) -> None:
        """``ticket`` names it for ``cancel``."""
        heapq.heappush(self._heap, (number, ticket))
        self.callbacks[ticket] = callback

    def cancel(self, ticket: int) -> None:
        if self.callbacks.pop(ticket, None) is not None and len(self._heap) > 2 * len(self.callbacks) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self.callbacks]
            heapq.heapify(self._heap)

    def reached(self, number: int) -> None:
        """Call back, in order, what waited for ``number`` or less."""
        heap, ready = self._heap, []
        while heap and heap[0][0] <= number:
            callback = self.callbacks.pop(heapq.heappop(heap)[1], None)
            if callback is not None:
                ready.append(callback)
        for callback in ready:
            callback()


# -- applying ------------------------------------------------------------------------------------------------


MAX_GROUP = 256
"""Outputs per submission; each is at most a few megabytes (the core's limits), most are a few hundred bytes.
"""
MAX_WAITING = 1024
"""Outputs behind which one that has nothing durable does not wait any more."""


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
    def __init__(self, disk: ReplicaDisk, restore: Callable[[SnapshotMeta], StateMachine]) -> None:
        self._writer = disk.writer
        self._snapshots = disk.snapshots
        self._restore = restore
        self.queue: deque[Output | Task] = deque()
        """What waits to be submitted."""
        self._in_flight: list[Output] | Task | None = None
        self._restored: StateMachine | None = None
        self.completion: tuple[BaseException | None] | None = None
        """How the submission ended, until ``collect``."""
        self.full: DiskFull | LogBusy | None = None
        """Why nothing can be written at present; until a write succeeds."""
        self._may_try = True
        self._fullness = Fullness("raft", "nothing can be changed")

    @property
    def is_idle(self) -> bool:
        return self._in_flight is None and not self.queue

    def add(self, output: Output) -> bool:
        """Queue an output; True when there is nothing to wait for: no durable part, and nothing earlier
        under way."""
        if not output.chunks and not has_durable_part(output):
            if self.is_idle:
                return True
            if not output.send_after_persist or len(self.queue) >= MAX_WAITING:
                # It promises nothing, or no member will hear it: no need to know when its turn comes.
                return False
        self.queue.append(output)
        return False

    def retry(self) -> None:
        """Time has passed: there may be room again."""
        self._may_try = True

    # -- submitting --------------------------------------------------------------------------------------

    def submit(self) -> None:
        if self._in_flight is not None or not self.queue or not self._may_try:
            return
        head = self.queue[0]
        if isinstance(head, Task):
            self.queue.popleft()
            self._in_flight = head
            self._writer.run(head.action, self._completed)
        elif head.chunks or head.install is not None:
            self.queue.popleft()
            self._in_flight = [head]
            self._writer.run(lambda log: self._receive(log, head), self._completed)
        else:
            self._submit_group()

    def _submit_group(self) -> None:
        group: list[Output] = []
        records: list[tuple[int, Buffers]] = []
        queue = self.queue
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
            self.completion = (None,)
            return
        try:
            self._writer.append(records, self._completed)
        except LogBusy as busy:
            self.completion = (busy,)

    def _receive(self, log: Log, output: Output) -> None:
        """On the writer's thread: bytes of a snapshot, and perhaps its installation. The file is durable
        under its name before the record that names it is, and both before the machine is replaced."""
        for chunk in output.chunks:
            self._snapshots.write_chunk(chunk.meta, chunk.offset, chunk.data)
        if output.install is not None:
            self._snapshots.install(output.install)
            self._restored = self._restore(output.install)
        if has_durable_part(output):
            log.append_many(batch_records(output))
            log.sync()

    def _completed(self, error: BaseException | None) -> None:
        self.completion = (error,)

    # -- completing --------------------------------------------------------------------------------------

    def collect(self) -> list[Persisted]:
        """Outputs that are durable now, in order. Raises what forbids going on."""
        if self.completion is None:
            return []
        (error,) = self.completion
        self.completion = None
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
        self.queue.extendleft(reversed(finished))
        return []


# -- snapshots, and what may be forgotten --------------------------------------------------------------------


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

    def __init__(self, config: ReplicaConfig, disk: ReplicaDisk, persister: Persister) -> None:
        self._max_entries = config.snapshot_entries
        self._max_bytes = config.snapshot_bytes
        self._save = disk.save
        self._snapshots = disk.snapshots
        self._persister = persister
        self._entries = 0
        self._bytes = 0
        self.asked: list[OnSaved] = []
        """Operators who wait for a snapshot, however little has been applied since the last one."""
        self._is_building = False
        self.result: SnapshotMeta | BaseException | None = None
        """How the last build ended, until the next ``step``."""
        self._wants_checkpoint = False
        self._is_checkpointing = False
        self._must_pause = False
        """The disk was full: wait for the next tick."""

    def applied(self, entries: int, size: int) -> None:
        self._entries += entries
        self._bytes += size

    def tick(self) -> None:
        self._must_pause = False

    def installed(self) -> None:
        """A snapshot of the leader replaced everything: count from there, and let the log begin there too."""
        self._entries = self._bytes = 0
        self._wants_checkpoint = True

    def step(self, core: RaftCore, bootstrap: Bootstrap, applier: Applier) -> bool:
        """Called in each turn, when the core's outputs are on their way. Says whether the core changed."""
        has_finished = self.result is not None
        if has_finished:
            self._finish(core)
        is_due = self.asked or self._entries >= self._max_entries or self._bytes >= self._max_bytes
        if is_due and not self._is_building and not self._must_pause:
            self._begin(core, applier.machine, applier.index)
        if (
            self._wants_checkpoint
            and not self._is_checkpointing
            and not self._must_pause
            and core.can_checkpoint()
        ):
            self._checkpoint(core, bootstrap)
        return has_finished

    def _begin(self, core: RaftCore, machine: StateMachine, applied: int) -> None:
        self._entries = self._bytes = 0
        if core.status().snapshot_index >= applied:
            nothing = Unavailable("nothing was applied yet: there is nothing to save")
            self._answer(self._snapshots.latest() or nothing)
            return
        membership = core.membership_at(applied)
        if not membership.voters:
            # A node that joined replays the log from its beginning and learns who the members are from the
            # first change of membership. A snapshot taken before it would tell another node that there are
            # none (tests/sim seed 1147); the trigger stays, and the entry is on its way.
            self._entries, self._must_pause = self._max_entries, True
            self._answer(Unavailable("the members at this point of the log are not known here yet"))
            return
        base = SnapshotMeta(applied, core.term_at(applied), membership, 0, b"", SNAPSHOT_FORMAT)
        self._is_building = True
        self._save(base, machine.freeze(), self._saved)

    def _saved(self, result: SnapshotMeta | BaseException) -> None:
        self.result = result

    def _finish(self, core: RaftCore) -> None:
        result, self.result = self.result, None
        self._is_building = False
        assert result is not None
        if isinstance(result, SnapshotMeta):
            core.snapshot_taken(result)
            self._wants_checkpoint = True
        elif isinstance(result, DiskFull):
            self._entries, self._must_pause = self._max_entries, True
        else:
            raise result
        self._answer(result)

    def _answer(self, result: SnapshotMeta | BaseException) -> None:
        asked, self.asked = self.asked, []
        for done in asked:
            done(result)

    def _checkpoint(self, core: RaftCore, bootstrap: Bootstrap) -> None:
        checkpoint = core.checkpoint()
        self._wants_checkpoint = False
        self._is_checkpointing = True

        def action(log: Log) -> None:
            write_checkpoint(log, checkpoint_records(bootstrap, checkpoint))
            self._snapshots.prune(checkpoint.snapshot)

        self._persister.queue.append(Task(action, self._checkpointed))

    def _checkpointed(self, error: BaseException | None) -> None:
        self._is_checkpointing = False
        if isinstance(error, DiskFull):
            self._wants_checkpoint = self._must_pause = True
        elif error is not None:
            raise error
