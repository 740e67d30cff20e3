"""Invariants: what must hold after every event, one small file per property.

I1   at most one leader per term, ever
I2   a leader never removes or overwrites an entry in its own term
I3   same index and term, same log before it
I4   a leader holds every entry committed before its term
I5   same applied index, same state
I6   what a leader commits is durable on a majority (of both halves while joint)
I7   what is committed at an index never changes
I8   compacted ≤ durable snapshot ≤ applied ≤ commit ≤ last, on every node
I9   term, vote, revision and lease generation never go back, over restarts too
I10  one candidate per node and term, by the votes that were really sent
I11  no message leaves before the batch that it depends on is durable
I12  at most one uncommitted configuration; consecutive ones overlap or are joined
I13  each request of a session has effect once
I14  snapshot plus tail gives the same state as the whole log
I15  what is decoded is what was encoded; snapshots are equal bytes on all nodes
I16  the history of each key is linearizable, compare-and-swap and deletes included
I17  an acknowledged write is there after healing
I18  so is a value that a linearizable read has shown
I19  every value was written by a client
I20  the predecessor that a write reports is the newest committed one below it
I21  an unknown outcome is never taken for absence
I22  a watcher sees growing revisions without gaps, or learns that it must read again

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
