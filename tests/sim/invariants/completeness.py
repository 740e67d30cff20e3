"""I4 Leader Completeness: the leader of a term holds every entry that was committed in an earlier one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sava.raft.core import Status
from tests.sim.history import Violation
from tests.sim.invariants import Invariant
from tests.sim.invariants.election import became_leader

if TYPE_CHECKING:
    from tests.sim.node import SimNode


class LeaderCompleteness(Invariant):
    def passed(self, node: SimNode, before: Status | None, after: Status) -> None:
        if not became_leader(before, after):
            return
        committed = self.world.checks.committed
        for index in range(after.first_index, committed.last + 1):
            entry = committed.entries.get(index)
            if entry is None or committed.seen_in_term[index] >= after.term:
                continue
            held = node.entry(index)
            if held is None or held.term != entry.term:
                raise Violation(
                    "I4",
                    f"node {node.id} leads term {after.term} without {index}@{entry.term}, committed by term "
                    f"{committed.seen_in_term[index]}; its log ends at {after.last_index}",
                )
