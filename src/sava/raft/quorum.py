"""Majorities, computed the plain way.

Every decision of the group (a vote, a commit, a confirmed read, staying leader) is one of the functions
below. They sort a handful of numbers each time on purpose: an incremental structure for the commit index once
let openraft commit on 2 of 5 voters (#1802), and nothing is won by being clever over five integers.

While a configuration is joint, a decision needs a majority of *both* halves. A half that is empty decides
nothing; a configuration without voters never decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from sava.raft.types import Membership, NodeId

__all__ = ["Tally", "count_votes", "has_majority", "has_quorum", "majority", "majority_index", "quorum_index"]


class Tally(Enum):
    PENDING = "pending"
    WON = "won"
    LOST = "lost"


def majority(voters: int) -> int:
    return voters // 2 + 1


def majority_index(voters: Sequence[NodeId], reached: Mapping[NodeId, int]) -> int:
    """The largest number that a majority of ``voters`` has reached; a voter that is not in ``reached`` counts
    as 0."""
    ascending = sorted([reached.get(voter, 0) for voter in voters])
    return ascending[len(ascending) - majority(len(ascending))]


def quorum_index(membership: Membership, reached: Mapping[NodeId, int]) -> int:
    """The largest number reached by a majority of every half of ``membership``."""
    if not membership.voters:
        return 0
    index = majority_index(membership.voters, reached)
    if membership.outgoing:
        index = min(index, majority_index(membership.outgoing, reached))
    return index


def has_majority(voters: Sequence[NodeId], present: Mapping[NodeId, bool]) -> bool:
    return sum(1 for voter in voters if present.get(voter, False)) >= majority(len(voters))


def has_quorum(membership: Membership, present: Mapping[NodeId, bool]) -> bool:
    if not membership.voters or not has_majority(membership.voters, present):
        return False
    return not membership.outgoing or has_majority(membership.outgoing, present)


def _count_half(voters: Sequence[NodeId], votes: Mapping[NodeId, bool]) -> Tally:
    granted = sum(1 for voter in voters if votes.get(voter) is True)
    refused = sum(1 for voter in voters if votes.get(voter) is False)
    needed = majority(len(voters))
    if granted >= needed:
        return Tally.WON
    # Lost as soon as the votes still out cannot make a majority any more.
    return Tally.LOST if len(voters) - refused < needed else Tally.PENDING


def count_votes(membership: Membership, votes: Mapping[NodeId, bool]) -> Tally:
    """An election is won when every half is won, and lost as soon as one half is lost."""
    if not membership.voters:
        return Tally.PENDING
    halves = [_count_half(membership.voters, votes)]
    if membership.outgoing:
        halves.append(_count_half(membership.outgoing, votes))
    if Tally.LOST in halves:
        return Tally.LOST
    return Tally.WON if all(half is Tally.WON for half in halves) else Tally.PENDING
