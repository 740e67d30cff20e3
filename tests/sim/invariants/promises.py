"""I11: nothing that promises durability leaves a node before the disk has it.

The core splits its messages into ``send_now`` and ``send_after_persist``; this checks the outcome, on the
wire, against what the simulated disk has really synced (``Ledger.durable``), whichever list a message came
from. It also compares what a restart finds with what had been promised."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sava.metadata.durable import LogState
from sava.metadata.peer import PeerMessage
from sava.raft.core import Status
from sava.raft.messages import AppendReply, VoteReply
from sava.raft.types import NodeId
from tests.sim.history import Violation
from tests.sim.invariants import Invariant
from tests.sim.invariants.election import became_leader

if TYPE_CHECKING:
    from tests.sim.node import SimNode
    from tests.sim.world import World


class DurablePromises(Invariant):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._acknowledged: dict[NodeId, tuple[int, int]] = {}
        """(term, index) of the furthest acknowledgement that each node has given in its latest term."""

    def sent(self, node: SimNode, message: PeerMessage) -> None:
        if isinstance(message, VoteReply):
            if message.granted and not message.pre:
                self._check_vote(node, message.term, message.dst)
        elif isinstance(message, AppendReply) and message.accepted:
            self._check_append(node, message)

    def _check_vote(self, node: SimNode, term: int, candidate: int) -> None:
        durable = node.ledger.durable.hard_state
        if durable.term < term or (durable.term == term and durable.vote != candidate):
            raise Violation(
                "I11",
                f"node {node.id} gives its vote of term {term} to {candidate}, but durable is term "
                f"{durable.term}, "
                f"vote {durable.vote}",
            )

    def _check_append(self, node: SimNode, reply: AppendReply) -> None:
        image = node.ledger.durable
        if image.hard_state.term < reply.term:
            raise Violation(
                "I11",
                f"node {node.id} acknowledges {reply.index} in term {reply.term}, but durable is term "
                f"{image.hard_state.term}",
            )
        # Once a newer term is durable its leader may have cut the log; the late reply belongs to a term that
        # is over.
        if image.hard_state.term == reply.term and image.last < reply.index:
            raise Violation(
                "I11", f"node {node.id} acknowledges {reply.index}, but its durable log ends at {image.last}"
            )

        if (reply.term, reply.index) > self._acknowledged.get(node.id, (0, 0)):
            self._acknowledged[node.id] = (reply.term, reply.index)

    def durable(self, node: SimNode) -> None:
        """What was acknowledged to a leader stays until a leader of a later term says otherwise."""
        term, index = self._acknowledged.get(node.id, (0, 0))
        image = node.ledger.durable
        if image.hard_state.term == term and image.last < index:
            raise Violation(
                "I11",
                f"node {node.id} acknowledged {index} in term {term} and dropped it: its log ends at "
                f"{image.last}",
            )

    def passed(self, node: SimNode, before: Status | None, after: Status) -> None:
        if became_leader(before, after):
            self._check_vote(node, after.term, node.id)
        image = node.ledger.durable
        # A snapshot may be on disk already that the node has not heard of: until then its old log is in
        # force, whose end was cut with it. It takes nothing meanwhile, and so promises nothing of that end.
        is_replaced = image.base > after.commit
        if after.durable_index > image.last and after.term == image.hard_state.term and not is_replaced:
            raise Violation(
                "I11",
                f"node {node.id} counts {after.durable_index} as durable; the disk has {image.last}",
            )

    def recovered(self, node: SimNode, state: LogState) -> None:
        node.ledger.recovered(node.id, state)
