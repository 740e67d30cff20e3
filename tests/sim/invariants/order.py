"""I8 ordering of a node's indexes and I9 what never goes back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sava.raft.core import Status
from sava.raft.types import NO_NODE, NodeId
from tests.sim.history import Violation
from tests.sim.invariants import Invariant

if TYPE_CHECKING:
    from tests.sim.node import SimNode
    from tests.sim.world import World


class Ordering(Invariant):
    """I8: compacted <= durable snapshot <= applied <= commit <= last, and the durable tail <= last."""

    def passed(self, node: SimNode, before: Status | None, after: Status) -> None:
        if not (
            after.first_index - 1 <= after.snapshot_index <= after.commit <= after.last_index
            and after.applied <= after.commit
            and after.durable_index <= after.last_index
        ):
            raise Violation("I8", f"node {node.id}: {after}")
        if before is None or before.snapshot_index != after.snapshot_index:
            self._check_file(node, after)

    def _check_file(self, node: SimNode, status: Status) -> None:
        """Whatever the log is compacted below must be in a file that a restart will find."""
        if status.snapshot_index == 0:
            return
        held = node.store.latest() if node.store is not None else None
        if held is None or held.index < status.snapshot_index:
            raise Violation(
                "I8", f"node {node.id} regards {status.snapshot_index} as snapshotted; on disk is {held}"
            )


class Monotone(Invariant):
    """I9: term, vote within a term, commit and applied within a life, revision over all lives at equal or
    later index."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._votes: dict[NodeId, tuple[int, NodeId]] = {}
        self._revisions: dict[NodeId, tuple[int, int]] = {}

    def passed(self, node: SimNode, before: Status | None, after: Status) -> None:
        if before is not None and (
            after.term < before.term or after.commit < before.commit or after.applied < before.applied
        ):
            raise Violation("I9", f"node {node.id} went back: {before} -> {after}")
        self._check_vote(node, after)
        self._check_revision(node, after)

    def _check_vote(self, node: SimNode, status: Status) -> None:
        durable = node.ledger.durable.hard_state
        if status.term < durable.term:
            raise Violation("I9", f"node {node.id} is in term {status.term} after {durable.term} was durable")
        term, vote = self._votes.get(node.id, (0, NO_NODE))
        if status.term == term == durable.term and vote not in (NO_NODE, status.vote):
            raise Violation(
                "I9", f"node {node.id} changed its vote of term {term} from {vote} to {status.vote}"
            )
        if durable.term == status.term and durable.vote:
            self._votes[node.id] = (durable.term, durable.vote)

    def _check_revision(self, node: SimNode, status: Status) -> None:
        assert node.replica is not None
        applied, revision = self._revisions.get(node.id, (0, 0))
        now = node.replica.machine.revision
        if status.applied >= applied:
            if now < revision:
                raise Violation(
                    "I9", f"node {node.id}: revision {now} at {status.applied}, was {revision} at {applied}"
                )
            self._revisions[node.id] = (status.applied, now)
