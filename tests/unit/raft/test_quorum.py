"""Majorities: tables, and a cross-check against definitions too slow to be wrong."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sava.raft.progress import (
    Tally,
    count_votes,
    has_quorum,
    majority,
    majority_index,
    quorum_index,
)
from sava.raft.types import Membership
from tests.unit.raft.harness import N1, N2, N3, N4, N5, membership

NODES = st.integers(1, 9)
VOTERS = st.sets(NODES, min_size=1, max_size=7).map(lambda s: tuple(sorted(s)))
MEMBERSHIPS = st.builds(
    lambda voters, outgoing: Membership(voters, outgoing),
    VOTERS,
    st.one_of(st.just(()), VOTERS),
)


@pytest.mark.parametrize(("size", "expected"), [(1, 1), (2, 2), (3, 2), (4, 3), (5, 3), (7, 4)])
def test_majority(size, expected):
    assert majority(size) == expected


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        ({1: 5}, 0),
        ({1: 5, 2: 3}, 3),
        ({1: 5, 2: 3, 3: 4}, 4),
        ({1: 9, 2: 9, 3: 0}, 9),
        ({}, 0),
    ],
)
def test_majority_index_of_three(reached, expected):
    assert majority_index((N1, N2, N3), reached) == expected


def test_m26_two_of_five_are_no_majority():
    """openraft #1802: a clever structure let commit advance on two of five."""
    assert majority_index((N1, N2, N3, N4, N5), {N1: 7, N2: 7, N3: 1, N4: 1, N5: 1}) == 1
    assert majority_index((N1, N2, N3, N4, N5), {N1: 7, N2: 7, N3: 6, N4: 1, N5: 1}) == 6


def test_joint_takes_the_smaller_of_both_halves():
    joint = membership([1, 4, 5], outgoing=[1, 2, 3])
    assert quorum_index(joint, {N1: 9, N2: 9, N3: 9, N4: 2, N5: 1}) == 2
    assert quorum_index(joint, {N1: 9, N2: 3, N3: 1, N4: 9, N5: 9}) == 3


def test_learners_decide_nothing():
    members = membership([1, 2, 3], learners=[4, 5])
    assert quorum_index(members, {N1: 9, N4: 9, N5: 9}) == 0
    assert not has_quorum(members, {N1: True, N4: True, N5: True})
    assert count_votes(members, {N1: True, N4: True, N5: True}) is Tally.PENDING


def test_a_configuration_without_voters_never_decides():
    assert quorum_index(Membership(), {N1: 9}) == 0
    assert count_votes(Membership(), {N1: True}) is Tally.PENDING
    assert not has_quorum(Membership(), {N1: True})


def _halves(members):
    return [half for half in (members.voters, members.outgoing) if half]


def _is_majority(subset, half):
    return 2 * len(set(subset) & set(half)) > len(half)


@settings(max_examples=300, deadline=None)
@given(MEMBERSHIPS, st.dictionaries(NODES, st.integers(0, 12)))
def test_quorum_index_equals_brute_force(members, reached):
    """The largest n for which the nodes at or beyond n hold a majority of each half."""
    best = max(
        n
        for n in range(14)
        if n == 0
        or all(_is_majority([v for v in half if reached.get(v, 0) >= n], half) for half in _halves(members))
    )
    assert quorum_index(members, reached) == best


@settings(max_examples=300, deadline=None)
@given(MEMBERSHIPS, st.dictionaries(NODES, st.booleans()))
def test_count_votes_equals_brute_force(members, votes):
    """Won: a majority of each half has granted. Lost: even if all others granted, it would not be won."""

    def won(ballots):
        return all(_is_majority([v for v in half if ballots.get(v)], half) for half in _halves(members))

    best_case = dict.fromkeys(members.all_voters, True) | votes
    expected = Tally.WON if won(votes) else Tally.PENDING if won(best_case) else Tally.LOST
    assert count_votes(members, votes) is expected
    assert has_quorum(members, votes) == won(votes)


@settings(max_examples=100, deadline=None)
@given(MEMBERSHIPS)
def test_any_two_quorums_meet(members):
    nodes = members.all_voters
    quorums = [
        set(subset)
        for size in range(1, len(nodes) + 1)
        for subset in combinations(nodes, size)
        if has_quorum(members, dict.fromkeys(subset, True))
    ]
    smallest = [q for q in quorums if not any(other < q for other in quorums)][:40]
    assert all(a & b for a in smallest for b in smallest)
