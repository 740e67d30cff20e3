"""I12: one configuration change at a time, each linked to the one before, and none by a leader that does not
know yet what earlier leaders committed (the 2015 single-server bug)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from sava.raft.core import Role, Status
from sava.raft.types import Entry, EntryKind, Membership
from tests.sim.history import Violation
from tests.sim.invariants import Invariant

if TYPE_CHECKING:
    from tests.sim.node import SimNode
    from tests.sim.world import World

decode_membership = msgspec.msgpack.Decoder(Membership).decode


class MembershipChain(Invariant):
    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._current: Membership | None = None
        self._checked = 0

    def founded(self, membership: Membership) -> None:
        self._current = membership

    def passed(self, node: SimNode, before: Status | None, after: Status) -> None:
        if before is None or before.membership_index != after.membership_index:
            self._check_in_force(node, after)
            if (
                before is not None
                and before.role is after.role is Role.LEADER
                and before.term == after.term
                and after.membership_index > before.membership_index
            ):
                self._check_appended(node, after)
        configurations = self.world.checks.committed.configurations
        while self._checked < len(configurations):
            entry = configurations[self._checked]
            self._checked += 1
            self._follow(entry)

    def _check_in_force(self, node: SimNode, status: Status) -> None:
        """On append, rolled back on truncation, and after a restart: always the newest one in the log
        ."""
        image = node.ledger.submitted
        if status.membership_index > status.last_index:
            raise Violation("I12", f"node {node.id} follows a configuration beyond its log: {status}")
        newest = image.configurations[-1] if image.configurations else 0
        # The ledger may be behind the core while the disk is slow; equal ends mean equal logs (log matching).
        last = node.entry(status.last_index)
        is_current = last is not None and image.entry(last.index) == last
        if is_current and status.membership_index < newest > status.snapshot_index:
            raise Violation(
                "I12",
                f"node {node.id} follows the configuration at {status.membership_index}; the newest in its "
                "log "
                f"is at {newest}",
            )
        held = node.entry(status.membership_index)
        if status.membership_index <= status.snapshot_index:
            return  # the one that the snapshot holds
        if held is not None and held.kind is not EntryKind.MEMBERSHIP:
            raise Violation("I12", f"node {node.id} follows a configuration that is not in its log: {held}")

    def _check_appended(self, node: SimNode, status: Status) -> None:
        committed = node.entry(status.commit)
        if committed is not None and committed.term != status.term:
            raise Violation(
                "I12",
                f"node {node.id} changes the membership in term {status.term}; committed is only term "
                f"{committed.term}",
            )
        known = max(status.commit, self.world.checks.committed.last)
        undecided = [
            index for index in node.ledger.submitted.configurations if known < index < status.membership_index
        ]
        if undecided:
            raise Violation("I12", f"node {node.id} changes the membership while {undecided} are undecided")

    def _follow(self, entry: Entry) -> None:
        new, old = decode_membership(entry.data), self._current
        self._current = new
        if old is None:
            return
        same_voters = (new.voters, new.outgoing) == (old.voters, old.outgoing)
        enters = not old.is_joint and new.outgoing == old.voters
        leaves = old.is_joint and not new.is_joint and new.voters == old.voters
        if not (same_voters or enters or leaves):
            raise Violation("I12", f"configuration {old} is followed by {new} at {entry.index}")
