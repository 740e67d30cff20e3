"""Invariants: what must hold after every event, one small file per property. Their numbers are those of
docs/testing.md.

Each invariant listens to the moments that can break it and looks only at the node that moved, so checking
costs what changed and not what exists. The moments:

* ``submitted``  a node hands records to its log writer        * ``sent``      a message leaves a node
* ``durable``    records of a node have been synced            * ``passed``    a node finished a pass of its
  loop
* ``recovered``  a node read its log back at a start           * ``snapshot``  a snapshot file became complete
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sava.metadata.durable import DurableBatch, LogState
from sava.metadata.peer import PeerMessage
from sava.raft.core import Status
from sava.raft.types import Membership, SnapshotMeta

if TYPE_CHECKING:
    from tests.sim.node import SimNode
    from tests.sim.world import World


class Invariant:
    """Listens to nothing; each property overrides the moments that concern it."""

    def __init__(self, world: World) -> None:
        self.world = world

    def submitted(self, node: SimNode, batches: Sequence[DurableBatch | None]) -> None:
        pass

    def durable(self, node: SimNode) -> None:
        pass

    def recovered(self, node: SimNode, state: LogState) -> None:
        pass

    def sent(self, node: SimNode, message: PeerMessage) -> None:
        pass

    def passed(self, node: SimNode, before: Status | None, after: Status) -> None:
        pass

    def stopped(self, node: SimNode) -> None:
        pass

    def snapshot(self, node: SimNode, meta: SnapshotMeta) -> None:
        pass

    def founded(self, membership: Membership) -> None:
        pass


MOMENTS = ("submitted", "durable", "recovered", "sent", "stopped", "snapshot", "founded")


class Checks:
    """All invariants of one world. For each moment, only those are called that listen to it."""

    def __init__(self, world: World) -> None:
        from tests.sim.invariants.commitment import CommittedLog, CommittedOnQuorum
        from tests.sim.invariants.completeness import LeaderCompleteness
        from tests.sim.invariants.election import ElectionSafety, VoteUniqueness
        from tests.sim.invariants.images import SameImages
        from tests.sim.invariants.matching import LeaderAppendOnly, LogMatching
        from tests.sim.invariants.membership import MembershipChain
        from tests.sim.invariants.order import Monotone, Ordering
        from tests.sim.invariants.promises import DurablePromises

        self.world = world
        self.committed = CommittedLog(world)
        self.all: list[Invariant] = [
            ElectionSafety(world),
            VoteUniqueness(world),
            DurablePromises(world),
            LogMatching(world),
            LeaderAppendOnly(world),
            Ordering(world),
            Monotone(world),
            CommittedOnQuorum(world),
            LeaderCompleteness(world),
            self.committed,
            MembershipChain(world),
            SameImages(world),
        ]
        self._passed = [i.passed for i in self.all if type(i).passed is not Invariant.passed]
        for moment in MOMENTS:
            setattr(self, f"_{moment}", self._listeners(moment))

    def _listeners(self, moment: str) -> list[object]:
        plain = getattr(Invariant, moment)
        return [getattr(i, moment) for i in self.all if getattr(type(i), moment) is not plain]

    def passed(self, node: SimNode) -> None:
        core = node.core
        if node.ghost or core is None:
            return
        before, after = node.status, core.status()
        node.status = after
        for check in self._passed:
            check(node, before, after)
        self.world.observed(node, before, after)

    def submitted(self, node: SimNode, batches: Sequence[DurableBatch | None]) -> None:
        if not node.ghost:
            for check in self._submitted:  # type: ignore[attr-defined]
                check(node, batches)

    def durable(self, node: SimNode) -> None:
        if not node.ghost:
            for check in self._durable:  # type: ignore[attr-defined]
                check(node)

    def recovered(self, node: SimNode, state: LogState) -> None:
        for check in self._recovered:  # type: ignore[attr-defined]
            check(node, state)

    def sent(self, node: SimNode, message: PeerMessage) -> None:
        for check in self._sent:  # type: ignore[attr-defined]
            check(node, message)

    def stopped(self, node: SimNode) -> None:
        for check in self._stopped:  # type: ignore[attr-defined]
            check(node)

    def snapshot(self, node: SimNode, meta: SnapshotMeta) -> None:
        for check in self._snapshot:  # type: ignore[attr-defined]
            check(node, meta)

    def founded(self, membership: Membership) -> None:
        for check in self._founded:  # type: ignore[attr-defined]
            check(membership)
