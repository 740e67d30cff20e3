"""I6 committed on a quorum and I7 committed is final."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sava.raft.core import Role, Status
from sava.raft.types import Entry, EntryKind, Membership, NodeId
from tests.sim.history import Violation
from tests.sim.invariants import Invariant

if TYPE_CHECKING:
    from tests.sim.node import SimNode
    from tests.sim.world import World


class CommittedLog(Invariant):
    """I7: the table of what any node has ever regarded as committed. No line of it changes."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.entries: dict[int, Entry] = {}
        self.seen_in_term: dict[int, int] = {}
        """The term of the node that first regarded the index as committed: its leader's term or a later
        one."""
        self.last = 0
        self.configurations: list[Entry] = []

    def passed(self, node: SimNode, before: Status | None, after: Status) -> None:
        start = before.commit if before is not None else after.snapshot_index
        if after.commit == start:
            return
        for index in range(start + 1, after.commit + 1):
            entry = node.entry(index)
            if entry is not None:
                self._commit(node, entry, after.term)

    def _commit(self, node: SimNode, entry: Entry, term: int) -> None:
        known = self.entries.get(entry.index)
        if known is None:
            self.entries[entry.index] = entry
            self.seen_in_term[entry.index] = term
            self.last = max(self.last, entry.index)
            if entry.kind is EntryKind.MEMBERSHIP:
                self.configurations.append(entry)
        elif known != entry:
            raise Violation(
                "I7",
                f"index {entry.index} was committed as {known.term}/{known.kind.name}, node {node.id} "
                "commits "
                f"{entry.term}/{entry.kind.name}",
            )


class CommittedOnQuorum(Invariant):
    """I6: when a leader moves its commit index, a majority (of both halves, when joint) has the entry on
    disk."""

    def passed(self, node: SimNode, before: Status | None, after: Status) -> None:
        if after.role is not Role.LEADER or before is None or after.commit <= before.commit:
            return
        entry = node.entry(after.commit)
        if entry is None:
            return
        if entry.term != after.term:
            raise Violation(
                "I6",
                f"node {node.id} leads term {after.term} and commits {entry.index}@{entry.term} by counting "
                "(Figure 8)",
            )
        # A membership entry appended in this very pass decides nothing that was committed before it.
        memberships = {after.membership, before.membership} if before.membership else {after.membership}
        if not any(self._has_quorum(membership, entry) for membership in memberships):
            raise Violation(
                "I6",
                f"node {node.id} commits {entry.index}@{entry.term} under voters {after.membership.voters} "
                "and "
                f"{after.membership.outgoing}, durable only on {self._holders(after.membership, entry)}",
            )

    def _holders(self, membership: Membership, entry: Entry) -> list[NodeId]:
        return [node for node in membership.members if self._holds(node, entry)]

    def _holds(self, node: NodeId, entry: Entry) -> bool:
        known = self.world.nodes.get(node)
        return known is not None and known.ledger.durable.holds(entry.index, entry.term)

    def _has_quorum(self, membership: Membership, entry: Entry) -> bool:
        for half in (membership.voters, membership.outgoing):
            if half and 2 * sum(self._holds(voter, entry) for voter in half) <= len(half):
                return False
        return True
