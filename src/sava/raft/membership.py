"""Configurations as values: what a change turns them into, and which one is in force at which index.

Rules, after Ongaro's thesis (chapter 4):

* A configuration is in force **from the moment its entry is appended**, committed or not. When the entry is
  truncated away, the one before it is in force again: ``History`` is the stack that makes this a pop.
* Every change of the voter set goes through a joint configuration. Entering sets ``outgoing`` to the old
  voters; leaving clears it. Leaving applies *no* change to the new half: re-applying the original one could
  keep a group joint for good (openraft before 2025-04).
* A change of learners alone is one plain entry: it moves no majority.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise

from sava.raft.types import InvariantError, Membership, MembershipChange, MembershipRefused, NodeId

__all__ = ["History", "apply_change", "enter_joint", "find_flaw", "leave_joint", "with_learners"]


def _sorted_ids(nodes: Iterable[NodeId]) -> tuple[NodeId, ...]:
    return tuple(sorted(set(nodes)))


def _addresses_of(members: tuple[NodeId, ...], known: dict[NodeId, str]) -> tuple[tuple[NodeId, str], ...]:
    return tuple((node, known[node]) for node in members if node in known)


def enter_joint(
    current: Membership, voters: tuple[NodeId, ...], learners: tuple[NodeId, ...], known: dict[NodeId, str]
) -> Membership:
    """Old and new voters decide together; learners change at once, for they decide nothing."""
    joint = Membership(voters=voters, outgoing=current.voters, learners=learners)
    return Membership(voters, current.voters, learners, _addresses_of(joint.members, known))


def leave_joint(joint: Membership) -> Membership:
    if not joint.is_joint:
        raise InvariantError("cannot leave a joint configuration that was never entered")
    final = Membership(voters=joint.voters, learners=joint.learners)
    return Membership(joint.voters, (), joint.learners, _addresses_of(final.members, dict(joint.addresses)))


def with_learners(current: Membership, learners: tuple[NodeId, ...], known: dict[NodeId, str]) -> Membership:
    plain = Membership(voters=current.voters, learners=learners)
    return Membership(current.voters, (), learners, _addresses_of(plain.members, known))


def apply_change(current: Membership, change: MembershipChange) -> Membership:
    """The configuration that starts ``change``: joint when voters change, plain otherwise. Raises
    MembershipRefused."""
    if current.is_joint:
        raise InvariantError("a change cannot start from a joint configuration")
    _check_change(current, change)
    removed = change.remove
    added = tuple(node for node, _ in change.add_learners)
    voters = _sorted_ids(node for node in (*current.voters, *change.promote) if node not in removed)
    learners = _sorted_ids(
        node for node in (*current.learners, *added) if node not in removed and node not in change.promote
    )
    if not voters:
        raise MembershipRefused("the change would leave no voter")
    known = {**dict(current.addresses), **dict(change.add_learners)}
    if voters == current.voters:
        return with_learners(current, learners, known)
    return enter_joint(current, voters, learners, known)


def _check_change(current: Membership, change: MembershipChange) -> None:
    added = tuple(node for node, _ in change.add_learners)
    named = (*added, *change.promote, *change.remove)
    if not named:
        raise MembershipRefused("the change is empty")
    if len(set(named)) != len(named):
        raise MembershipRefused("the change names a node twice")
    for node in named:
        if node < 1:
            raise MembershipRefused(f"{node} is not a node id")
    for node in added:
        if node in current.voters:
            raise MembershipRefused(f"node {node} is a voter already")
    for node in change.promote:
        if node not in current.learners:
            raise MembershipRefused(f"node {node} is not a learner")
    for node in change.remove:
        if node not in current.voters and node not in current.learners:
            raise MembershipRefused(f"node {node} is not a member")


def find_flaw(membership: Membership) -> str | None:
    """What makes a decoded configuration unusable, or None. The core relies on all of it."""
    for name, nodes in (
        ("voters", membership.voters),
        ("outgoing", membership.outgoing),
        ("learners", membership.learners),
    ):
        if any(node < 1 for node in nodes) or any(a >= b for a, b in pairwise(nodes)):
            return f"{name} are not sorted positive ids"
    voters = (*membership.voters, *membership.outgoing)
    if any(node in voters for node in membership.learners):
        return "a node both votes and learns"
    if not membership.voters and (membership.outgoing or membership.learners):
        return "members without voters"
    located = [node for node, _ in membership.addresses]
    if any(a >= b for a, b in pairwise(located)):
        return "addresses are not sorted by node"
    return None


class History:
    """The configurations of the log, oldest first, as (index of entry, configuration).

    The first one is the configuration at the snapshot; it can never be popped, for what a snapshot holds is
    committed.
    """

    __slots__ = ("_indexes", "_memberships", "current")

    def __init__(self, index: int, membership: Membership) -> None:
        self._indexes = [index]
        self._memberships = [membership]
        self.current = membership
        """The newest of them."""

    @property
    def current_index(self) -> int:
        return self._indexes[-1]

    def push(self, index: int, membership: Membership) -> None:
        if index <= self._indexes[-1]:
            raise InvariantError(f"configuration at {index} follows one at {self._indexes[-1]}")
        self._indexes.append(index)
        self._memberships.append(membership)
        self.current = membership

    def truncate_from(self, index: int) -> bool:
        """Forget configurations at or after ``index``; says whether the one in force changed."""
        changed = False
        while self._indexes[-1] >= index:
            if len(self._indexes) == 1:
                raise InvariantError(f"truncation at {index} would remove the configuration of the snapshot")
            self._indexes.pop()
            self._memberships.pop()
            changed = True
        self.current = self._memberships[-1]
        return changed

    def at(self, index: int) -> Membership:
        position = bisect_right(self._indexes, index) - 1
        if position < 0:
            raise InvariantError(f"the configuration at {index} is not known any more")
        return self._memberships[position]

    def has_voter_since(self, index: int, node: NodeId) -> bool:
        """Whether a configuration in force at or after ``index`` gives ``node`` a vote."""
        position = max(bisect_right(self._indexes, index) - 1, 0)
        return any(node in m.voters or node in m.outgoing for m in self._memberships[position:])

    def compact(self, index: int) -> None:
        """Forget what was in force before ``index``; the one in force at ``index`` stays, under its own
        index."""
        keep = bisect_right(self._indexes, index) - 1
        if keep > 0:
            del self._indexes[:keep], self._memberships[:keep]
