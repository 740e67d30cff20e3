"""I2 Leader Append-Only and I3 Log Matching, seen where entries enter a log.

Log Matching says that two logs with the same (index, term) are equal up to there. By induction it is enough
that an entry written anywhere under (index, term) always is the same entry with the same predecessor, which
one table answers in O(1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sava.metadata.durable import DurableBatch
from sava.raft.core import Role, Status
from sava.raft.types import Entry
from tests.sim.history import Violation
from tests.sim.invariants import Invariant

if TYPE_CHECKING:
    from tests.sim.node import SimNode
    from tests.sim.world import World


class LogMatching(Invariant):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._entries: dict[tuple[int, int], tuple[int, Entry, int]] = {}

    def submitted(self, node: SimNode, batches: Sequence[DurableBatch | None]) -> None:
        for batch, previous in zip(batches, node.ledger.previous_terms, strict=True):
            if batch is None:
                continue
            for entry in batch.entries:
                self._check(node, entry, previous)
                previous = entry.term

    def _check(self, node: SimNode, entry: Entry, previous: int | None) -> None:
        known = self._entries.get((entry.index, entry.term))
        if known is None:
            if previous is not None:
                self._entries[entry.index, entry.term] = (previous, entry, node.id)
            return
        other_previous, other, by = known
        if other != entry:
            raise Violation(
                "I3", f"nodes {by} and {node.id} hold different entries at {entry.index}@{entry.term}"
            )
        if previous is not None and previous != other_previous:
            raise Violation(
                "I3",
                f"{entry.index}@{entry.term} follows term {other_previous} on node {by}, {previous} on "
                f"{node.id}",
            )


class LeaderAppendOnly(Invariant):
    """I2: a leader never removes or overwrites what is in its log."""

    def submitted(self, node: SimNode, batches: Sequence[DurableBatch | None]) -> None:
        status = node.status
        core = node.core
        if (
            status is None
            or core is None
            or status.role is not Role.LEADER
            or core.status().term != status.term
        ):
            return
        for batch in batches:
            if batch is not None and (batch.truncate_from is not None or batch.install is not None):
                raise Violation(
                    "I2", f"node {node.id} leads term {status.term} and rewrites its log: {batch}"
                )

    def passed(self, node: SimNode, before: Status | None, after: Status) -> None:
        if (
            before is not None
            and before.role is Role.LEADER
            and after.role is Role.LEADER
            and before.term == after.term
            and after.last_index < before.last_index
        ):
            raise Violation(
                "I2",
                f"node {node.id} leads and its log shrank from {before.last_index} to {after.last_index}",
            )
