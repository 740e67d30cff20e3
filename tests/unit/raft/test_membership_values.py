"""Configurations as values: what a change makes of them, and the history that rolls them back."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sava.raft import NO_NODE, NodeId
from sava.raft.membership import History, apply_change, find_flaw, leave_joint
from sava.raft.progress import has_quorum
from sava.raft.types import InvariantError, Membership, MembershipChange, MembershipRefused
from tests.unit.raft.harness import N1, N2, N3, N4, N5, membership

BASE = Membership((N1, N2, N3), (), (N4, N5), ((N1, "one"), (N4, "four")))


@pytest.mark.parametrize(
    ("change", "voters", "outgoing", "learners"),
    [
        (MembershipChange(add_learners=((NodeId(6), "six"),)), (1, 2, 3), (), (4, 5, 6)),
        (MembershipChange(remove=(N5,)), (1, 2, 3), (), (4,)),
        (MembershipChange(promote=(N4,)), (1, 2, 3, 4), (1, 2, 3), (5,)),
        (MembershipChange(remove=(N1,)), (2, 3), (1, 2, 3), (4, 5)),
        (MembershipChange(promote=(N4, N5), remove=(N1, N2)), (3, 4, 5), (1, 2, 3), ()),
        (MembershipChange(((NodeId(6), "six"),), (N4,), (N1, N5)), (2, 3, 4), (1, 2, 3), (6,)),
    ],
)
def test_change_enters_joint_only_when_voters_change(change, voters, outgoing, learners):
    result = apply_change(BASE, change)
    assert (result.voters, result.outgoing, result.learners) == (voters, outgoing, learners)
    assert find_flaw(result) is None
    if result.is_joint:
        final = leave_joint(result)
        assert (final.voters, final.outgoing, final.learners) == (voters, (), learners)


def test_addresses_follow_the_members():
    result = apply_change(BASE, MembershipChange(((NodeId(6), "six"),), (N4,), (N1,)))
    assert result.addresses == ((1, "one"), (4, "four"), (6, "six")), "1 still votes in the old half"
    assert leave_joint(result).addresses == ((4, "four"), (6, "six"))


def test_adding_a_known_learner_updates_its_address():
    assert apply_change(BASE, MembershipChange(((N4, "moved"),))).address(N4) == "moved"


@pytest.mark.parametrize(
    "change",
    [
        MembershipChange(),
        MembershipChange(add_learners=((N2, "x"),)),
        MembershipChange(promote=(N1,)),
        MembershipChange(promote=(NodeId(9),)),
        MembershipChange(add_learners=((NodeId(9), "x"),), promote=(NodeId(9),)),
        MembershipChange(remove=(NodeId(9),)),
        MembershipChange(remove=(N1, N2, N3)),
        MembershipChange(promote=(N4,), remove=(N4,)),
        MembershipChange(remove=(N1, N1)),
        MembershipChange(add_learners=((NO_NODE, "x"),)),
    ],
)
def test_changes_that_make_no_sense_are_refused(change):
    with pytest.raises(MembershipRefused):
        apply_change(BASE, change)


def test_all_voters_may_be_replaced_at_once_through_joint():
    result = apply_change(BASE, MembershipChange(promote=(N4, N5), remove=(N1, N2, N3)))
    assert (result.voters, result.outgoing) == ((4, 5), (1, 2, 3))


def test_a_joint_configuration_is_neither_changed_nor_left_twice():
    joint = apply_change(BASE, MembershipChange(promote=(N4,)))
    with pytest.raises(InvariantError):
        apply_change(joint, MembershipChange(remove=(N5,)))
    with pytest.raises(InvariantError):
        leave_joint(leave_joint(joint))


@pytest.mark.parametrize(
    "flawed",
    [
        Membership((N2, N1)),
        Membership((N1, N1)),
        Membership((NO_NODE, N1)),
        Membership((N1,), (), (N1,)),
        Membership((N1,), (N2,), (N2,)),
        Membership((), (N1,)),
        Membership((), (), (N1,)),
        Membership((N1, N2), (), (), ((N2, "b"), (N1, "a"))),
    ],
)
def test_flaws_are_found(flawed):
    assert find_flaw(flawed)


def test_history_rolls_back_to_what_was_in_force():
    history = History(5, membership([1]))
    history.push(7, membership([1, 2]))
    history.push(9, membership([1, 2, 3]))
    assert history.current_index == 9
    assert history.at(8) == membership([1, 2])
    assert not history.truncate_from(10)
    assert history.truncate_from(7)
    assert history.current == membership([1])
    with pytest.raises(InvariantError):
        history.truncate_from(5)
    with pytest.raises(InvariantError):
        history.at(4)
    with pytest.raises(InvariantError):
        history.push(5, membership([2]))


def test_history_compaction_keeps_what_is_in_force_at_the_snapshot():
    history = History(0, membership([1]))
    history.push(7, membership([1, 2]))
    history.push(9, membership([1, 2, 3]))
    history.compact(8)
    assert history.at(8) == membership([1, 2])
    assert history.at(9) == membership([1, 2, 3])
    with pytest.raises(InvariantError):
        history.at(6)


@st.composite
def _changes(draw, voters, learners):
    fresh = draw(st.sets(st.integers(10, 13), max_size=2))
    promote = draw(st.sets(st.sampled_from(sorted(learners)), max_size=2)) if learners else set()
    rest = sorted((set(voters) | set(learners)) - promote)
    remove = draw(st.sets(st.sampled_from(rest), max_size=3)) if rest else set()
    return MembershipChange(
        tuple((node, f"a{node}") for node in sorted(fresh)), tuple(sorted(promote)), tuple(sorted(remove))
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_step_of_a_change_keeps_quorums_meeting(data):
    """Brute force: any quorum of one configuration meets any quorum of the next, through joint and out of
    it."""
    voters = tuple(sorted(data.draw(st.sets(st.integers(1, 5), min_size=1, max_size=4))))
    learners = tuple(sorted(data.draw(st.sets(st.integers(6, 9), max_size=3))))
    current = Membership(voters, (), learners)
    try:
        planned = apply_change(current, data.draw(_changes(voters, learners)))
    except MembershipRefused:
        return
    chain = [current, planned] + ([leave_joint(planned)] if planned.is_joint else [])
    nodes = sorted({node for config in chain for node in config.all_voters})
    subsets = [
        dict.fromkeys(subset, True)
        for size in range(1, len(nodes) + 1)
        for subset in combinations(nodes, size)
    ]
    for before, after in pairwise(chain):
        first = [set(s) for s in subsets if has_quorum(before, s)]
        second = [set(s) for s in subsets if has_quorum(after, s)]
        assert all(a & b for a in first for b in second)
        assert find_flaw(after) is None
