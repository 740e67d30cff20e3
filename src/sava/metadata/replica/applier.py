"""Applier: the state machine at the end of the log, and the callers that wait for an index.

Every committed entry is applied exactly once per state: the machine begins as the snapshot at index s, and
takes s+1, s+2, … without a gap. Nothing else about it is stored, so after a restart the machine is rebuilt
from snapshot and log, and index and state cannot disagree. An entry that is not the next one is a
state that cannot be, and stops the node.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from sava.metadata.commands import Result, decode_proposal
from sava.metadata.machine.limits import Limits
from sava.metadata.machine.state_machine import Applied, StateMachine
from sava.metadata.replica.proposals import LeaseKeeper, Proposals
from sava.metadata.snapshots import SnapshotStore
from sava.metadata.watch import WatchHub
from sava.raft.core import RaftCore
from sava.raft.types import Entry, EntryKind, InvariantError, NodeId, SnapshotMeta

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
        """The state is now ``machine``, at ``meta.index``. Events up to there can no longer be told one by
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
