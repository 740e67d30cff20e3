"""I15: replicas that take a snapshot at the same index write the same bytes. (I5, I13 and I14 live in
``History``, which sees every single apply.)"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sava.raft.types import NodeId, SnapshotMeta
from tests.sim.history import Violation
from tests.sim.invariants import Invariant

if TYPE_CHECKING:
    from tests.sim.node import SimNode
    from tests.sim.world import World


class SameImages(Invariant):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._metas: dict[int, tuple[SnapshotMeta, NodeId]] = {}

    def snapshot(self, node: SimNode, meta: SnapshotMeta) -> None:
        known, by = self._metas.setdefault(meta.index, (meta, node.id))
        if known != meta:
            raise Violation(
                "I15", f"snapshots at {meta.index}: node {by} has {known}, node {node.id} has {meta}"
            )
