"""I1 Election Safety and I10 vote uniqueness.

I1 asks the nodes, I10 asks the wire: a vote that was sent cannot be taken back, whatever the node believes
after a restart."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sava.metadata.peer import PeerMessage
from sava.raft.core import Role, Status
from sava.raft.messages import VoteReply
from sava.raft.types import NodeId
from tests.sim.history import Violation
from tests.sim.invariants import Invariant

if TYPE_CHECKING:
    from tests.sim.node import SimNode
    from tests.sim.world import World


def became_leader(before: Status | None, after: Status) -> bool:
    if after.role is not Role.LEADER:
        return False
    return before is None or before.role is not Role.LEADER or before.term != after.term


class ElectionSafety(Invariant):
    """I1: at most one leader per term, ever."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._leaders: dict[int, NodeId] = {}

    def passed(self, node: SimNode, before: Status | None, after: Status) -> None:
        if not became_leader(before, after):
            return
        other = self._leaders.setdefault(after.term, node.id)
        if other != node.id:
            raise Violation("I1", f"nodes {other} and {node.id} both lead term {after.term}")


class VoteUniqueness(Invariant):
    """I10: in one term a node votes for one candidate; leading a term means having voted for oneself in
    it."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._votes: dict[tuple[NodeId, int], NodeId] = {}

    def sent(self, node: SimNode, message: PeerMessage) -> None:
        if isinstance(message, VoteReply) and message.granted and not message.pre:
            self._vote(node.id, message.term, message.dst)

    def passed(self, node: SimNode, before: Status | None, after: Status) -> None:
        if became_leader(before, after):
            self._vote(node.id, after.term, node.id)

    def _vote(self, voter: NodeId, term: int, candidate: NodeId) -> None:
        other = self._votes.setdefault((voter, term), candidate)
        if other != candidate:
            raise Violation("I10", f"node {voter} voted for {other} and for {candidate} in term {term}")
