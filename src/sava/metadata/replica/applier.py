"""Applier: the state machine at the end of the log, and the callers that wait for an index.

Every committed entry is applied exactly once per state: the machine begins as the snapshot at index s, and
takes s+1, s+2, … without a gap. Nothing else about it is stored, so after a restart the machine is rebuilt
from snapshot and log, and index and state cannot disagree. An entry that is not the next one is a
state that cannot be, and stops the node.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from sava.metadata.commands import Result, decode_proposal
from sava.metadata.machine.limits import Limits
from sava.metadata.machine.state_machine import Applied, StateMachine
from sava.metadata.replica.proposals import LeaseKeeper, Proposals
from sava.metadata.watch import WatchHub
from sava.raft.core import RaftCore
from sava.raft.types import Entry, EntryKind, InvariantError, NodeId, SnapshotMeta

OnApplied = Callable[[Entry, Applied], None]


class Applier:
    def __init__(self, node: NodeId, limits: Limits, load: Callable[[SnapshotMeta], Iterable[bytes]]) -> None:
        self._node = node
        self._limits = limits
        self._load = load
        self.machine = StateMachine(limits)
        self.hub = WatchHub(0)
        self.index = 0
        self.term = 0
        """Of the entry at ``index``."""
        self.queue: list[Entry] = []
        self.by_index: ApplyWait[Callback] = ApplyWait()
        self.by_revision: ApplyWait[Callback] = ApplyWait()
        self.on_applied: OnApplied | None = None
        self._was_member = False
        self.is_removed = False

    def restore(self, meta: SnapshotMeta) -> StateMachine:
        return StateMachine.restore(self._load(meta), self._limits)

    def begin(self, meta: SnapshotMeta) -> None:
        """Start from the snapshot that the log continues (index 0: from nothing)."""
        self.adopt(meta, self.restore(meta) if meta.index else self.machine)

    def adopt(self, meta: SnapshotMeta, machine: StateMachine) -> None:
        """The state is now ``machine``, at ``meta.index``. Watchers no longer get the events up to there one
        by one."""
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
        if len(self.by_index):
            _call(self.by_index.reached(self.index))
        if len(self.by_revision):
            _call(self.by_revision.reached(self.machine.revision))

    def _note_membership(self, is_member: bool) -> None:
        if is_member:
            self._was_member, self.is_removed = True, False
        elif self._was_member:
            self.is_removed = True


def _call(callbacks: Sequence[Callback]) -> None:
    for callback in callbacks:
        callback()


T = TypeVar("T")


class ApplyWait(Generic[T]):
    """Who waits for a number that only grows (an applied index, a revision)."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._items: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, number: int, ticket: int, item: T) -> None:
        """``ticket`` names it for ``cancel``."""
        heapq.heappush(self._heap, (number, ticket))
        self._items[ticket] = item

    def cancel(self, ticket: int) -> None:
        if self._items.pop(ticket, None) is not None and len(self._heap) > 2 * len(self._items) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._items]
            heapq.heapify(self._heap)

    def reached(self, number: int) -> list[T]:
        """What waited for ``number`` or less, in order."""
        heap, ready = self._heap, []
        while heap and heap[0][0] <= number:
            item = self._items.pop(heapq.heappop(heap)[1], None)
            if item is not None:
                ready.append(item)
        return ready


Callback = Callable[[], None]
