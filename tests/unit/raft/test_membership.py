"""Membership changes: the ways they go, S30–S35 and S42."""

from __future__ import annotations

import pytest

from sava.raft import (
    Append,
    AppendReply,
    CoreConfig,
    Heartbeat,
    HeartbeatReply,
    LearnerLagging,
    MembershipBusy,
    MembershipChange,
    MembershipRefused,
    NotLeader,
    Role,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from tests.unit.raft.changes import add_learner, change, promote, remove, with_learner
from tests.unit.raft.harness import N1, N2, N3, N4, N5, Cluster, drain, make_core, membership


def test_s30_learner_is_added_while_writing():
    """The learner starts from nothing while proposals go on; it ends with the same log and address book."""
    cluster = Cluster()
    cluster.elect(1)
    cluster.propose(1, *[b"%d" % n for n in range(20)])
    cluster.join(4)
    cluster[1].core.change_membership(add_learner(4))
    for n in range(20, 30):
        cluster.propose(1, b"%d" % n)
    cluster.tick(3)
    assert cluster[4].machine == cluster[1].machine == [b"%d" % n for n in range(30)]
    assert cluster[4].role is Role.LEARNER
    assert cluster[4].status.membership.learners == (4,)
    assert cluster[1].status.membership.address(N4) == "host-4:7650"
    assert not cluster[1].status.membership.is_joint


def test_s30_learners_are_not_counted_in_the_quorum():
    """Two of three voters are gone. Leader and two learners are three of five, and commit nothing."""
    cluster = Cluster([1, 2, 3], learners=[4, 5])
    cluster.elect(1)
    cluster.tick(3)
    cluster.isolate(2)
    cluster.isolate(3)
    before = cluster[1].commit
    cluster.propose(1, b"x")
    cluster.tick(2)
    assert cluster[4].last == cluster[5].last == cluster[1].last
    assert cluster[1].commit == before


def test_s31_promote_runs_through_joint_and_ends_plain():
    cluster = with_learner()
    index = change(cluster, 1, promote(4))
    assert cluster[1].status.membership == cluster[4].status.membership
    assert cluster[1].status.membership.voters == (1, 2, 3, 4)
    assert not cluster[1].status.membership.is_joint
    assert cluster[1].status.membership_index == index + 1
    joint = cluster[1].core.membership_at(index)
    assert (joint.voters, joint.outgoing) == ((1, 2, 3, 4), (1, 2, 3))
    assert cluster[4].role is Role.FOLLOWER


def test_s31_learner_votes_before_it_knows_that_it_is_a_voter():
    """Voter 2 knows the joint configuration, learner 4 does not yet. With 1 and 3 gone for good, 2 needs 4's
    vote... and gets it, for votes are given without looking at the own configuration."""
    cluster = with_learner(voters=(1, 2))
    cluster.hold = lambda m: isinstance(m, Append) and m.dst == 4
    cluster[1].core.change_membership(promote(4))
    cluster.run()
    assert cluster[2].status.membership.voters == (1, 2, 4)
    assert cluster[4].role is Role.LEARNER
    cluster[1].crash()
    cluster.hold, cluster.held = None, []
    for node in (2, 4):
        for _ in range(10):
            cluster[node].core._state.election_elapsed += 1
    cluster[2].core.campaign()
    cluster.run()
    # joint {1,2,4} x {1,2}: the old half needs 1 too, so nobody can win yet; but 4 has voted for 2
    assert any(isinstance(m, VoteReply) and m.src == 4 and m.granted for m in cluster.delivered)
    cluster[1].restart()
    cluster.converge()
    assert cluster[4].status.membership.voters == (1, 2, 4)


def test_s32_joint_commit_needs_both_halves_new_majority_missing():
    """{1} plus two promoted learners: with the learners gone, the old majority {1} alone commits nothing."""
    cluster = Cluster([1], learners=[2, 3])
    cluster.elect(1)
    cluster.tick(3)
    cluster.cut([1], [2, 3])
    index = change(cluster, 1, promote(2, 3))
    assert cluster[1].commit < index
    cluster.tick(3)
    assert cluster[1].commit < index
    cluster.heal()
    cluster.tick(3)
    assert cluster[1].status.membership == membership([1, 2, 3])
    assert cluster[1].commit >= index + 1


def test_s32_joint_commit_needs_both_halves_old_majority_missing():
    """Replace 2 and 3 by 4 and 5 while 2 and 3 are silent: {1, 4, 5} is a majority of the new half only."""
    cluster = Cluster([1, 2, 3], learners=[4, 5])
    cluster.elect(1)
    cluster.tick(3)
    cluster.cut([2, 3], [1, 4, 5])
    index = change(cluster, 1, promote(4, 5, remove=(2, 3)))
    cluster.tick(5)
    assert cluster[4].last >= index
    assert cluster[1].commit < index
    assert cluster[1].status.membership.is_joint


def test_s32_joint_election_needs_both_halves():
    """In joint {1,4,5} x {1,2,3}, candidate 4 has 4 and 5 on its side and nobody of the old half but itself
    none."""
    joint = membership([1, 4, 5], outgoing=[1, 2, 3])
    core = make_core(4, joint)
    core.campaign()
    drain(core)
    core.step(VoteReply(N5, N4, 1, True, pre=True))
    drain(core)
    assert core.status().role is Role.PRE_CANDIDATE
    core.step(VoteReply(N2, N4, 1, True, pre=True))
    core.step(VoteReply(N3, N4, 1, True, pre=True))
    drain(core)
    assert core.status().role is Role.CANDIDATE
    core.step(VoteReply(N5, N4, 1, True))
    assert core.status().role is Role.CANDIDATE
    core.step(VoteReply(N2, N4, 1, True))
    core.step(VoteReply(N3, N4, 1, True))
    assert core.status().role is Role.LEADER


def test_s33_remove_a_follower():
    cluster = Cluster()
    cluster.elect(1)
    change(cluster, 1, remove(3))
    assert cluster[1].status.membership == membership([1, 2])
    cluster.propose(1, b"x")
    assert cluster[2].machine == [b"x"]
    assert cluster[3].role is Role.LEARNER, "it learned of its removal and stays quiet"
    assert cluster[3].machine == []


def test_removed_follower_hears_that_it_is_and_stops_campaigning():
    cluster = Cluster()
    cluster.elect(1)
    change(cluster, 1, remove(3))
    assert cluster[3].commit == cluster[1].commit
    cluster[3].core.campaign()
    cluster.tick(60)
    assert not any(isinstance(m, VoteRequest) and m.src == 3 for m in cluster.delivered)


def test_s34_a_leader_outside_its_uncommitted_c_new_may_campaign_again():
    """{1,2} -> {2}. Leader 1 has appended C_new, which 2 does not have, and restarts. 2 needs 1's vote
    (joint) and cannot get it against the longer log; 1 is no voter in its own newest configuration. Only 1
    can end this (thesis §4.2.2): it wins by 2's vote, commits C_new and hands over."""
    cluster = Cluster([1, 2])
    cluster.elect(1)
    index = cluster[1].last + 1
    cluster.drop = lambda m: isinstance(m, Append) and any(e.index > index for e in m.entries)
    change(cluster, 1, remove(1))
    assert cluster[2].status.membership.is_joint
    assert cluster[1].status.membership == membership([2])
    cluster[1].crash()
    cluster[1].restart()
    cluster.heal()
    leader = cluster.converge()
    assert leader == 2
    assert cluster[2].status.membership == membership([2])
    cluster[1].core.campaign()
    assert cluster[1].role is Role.LEARNER, "now it knows that C_new is committed"


def test_s33_remove_an_unreachable_follower():
    cluster = Cluster()
    cluster.elect(1)
    cluster.isolate(3)
    cluster.tick(40)
    change(cluster, 1, remove(3))
    assert cluster[1].status.membership == membership([1, 2])
    assert cluster[1].commit == cluster[1].last


def test_s33_remove_a_hung_follower_that_takes_but_never_answers():
    cluster = Cluster()
    cluster.elect(1)
    cluster.cut_one_way(3, 1)
    change(cluster, 1, remove(3))
    assert cluster[1].status.membership == membership([1, 2])


def test_s33_remove_a_learner_is_one_plain_entry():
    cluster = with_learner()
    index = change(cluster, 1, remove(4))
    assert cluster[1].status.membership == membership([1, 2, 3])
    assert cluster[1].status.membership_index == index
    assert cluster[1].status.membership.addresses == ()


def test_s34_removed_leader_leads_until_c_new_commits_and_then_hands_over():
    cluster = Cluster()
    cluster.elect(1)
    cluster.hold = lambda m: isinstance(m, AppendReply) and m.index >= 3
    index = change(cluster, 1, remove(1))
    cluster.release(lambda m: isinstance(m, AppendReply) and m.index == index)
    cluster.hold = lambda m: isinstance(m, AppendReply) and m.index > index
    cluster.run()
    assert cluster[1].role is Role.LEADER, "C_new is appended, not committed"
    cluster.release()
    assert cluster[1].status.role is Role.LEARNER
    assert any(isinstance(m, TimeoutNow) and m.src == 1 for m in cluster.delivered)
    assert cluster.leader() in (2, 3), "without waiting for an election timeout"
    assert cluster[cluster.leader()].status.membership == membership([2, 3])
    cluster.propose(cluster.leader(), b"x")
    assert cluster[2].machine == cluster[3].machine == [b"x"]


def test_s34_a_leader_outside_c_new_does_not_count_itself():
    """{1,2,3} -> {2,3}: in C_new the leader 1 is no voter. With 3 cut off, 1 and 2 hold C_new; that is one of
    two."""
    cluster = Cluster()
    cluster.elect(1)
    cluster.hold = lambda m: m.src == 3 and isinstance(m, AppendReply) and m.index >= 3
    change(cluster, 1, remove(1))
    assert cluster[1].role is Role.LEADER
    assert cluster[2].last == cluster[1].last
    assert cluster[1].commit < cluster[1].last


def test_s35_replace_the_leader_and_add_a_node_in_one_change():
    cluster = with_learner()
    change(cluster, 1, promote(4, remove=(1,)))
    cluster.tick(30)
    leader = cluster.converge()
    assert leader in (2, 3, 4)
    assert cluster[leader].status.membership.voters == (2, 3, 4)
    assert cluster[1].role is Role.LEARNER


def test_change_on_a_follower_is_refused_with_a_hint():
    cluster = Cluster()
    cluster.elect(1)
    with pytest.raises(NotLeader) as refusal:
        cluster[2].core.change_membership(add_learner(4))
    assert refusal.value.leader == 1


def test_s42_a_member_is_not_added_again_under_its_id():
    """The core's part of "ids are never reused": an id that votes cannot join as a newcomer."""
    cluster = Cluster()
    cluster.elect(1)
    with pytest.raises(MembershipRefused):
        cluster[1].core.change_membership(add_learner(2))


def test_promotion_of_a_stopped_learner_is_refused():
    cluster = with_learner()
    cluster.isolate(4)
    cluster.tick(30)
    with pytest.raises(LearnerLagging) as refusal:
        cluster[1].core.change_membership(promote(4))
    assert refusal.value.node == 4
    cluster.heal()
    cluster.tick(3)
    change(cluster, 1, promote(4))


def test_promotion_of_a_lagging_learner_is_refused_until_two_checks_pass():
    cluster = with_learner(config=CoreConfig(promote_max_lag=5, keep_entries=0, snapshot_chunk_bytes=16))
    cluster.drop = lambda m: isinstance(m, Append) and m.dst == 4
    cluster.propose(1, *[b"%d" % n for n in range(10)])
    cluster.tick(2)
    with pytest.raises(LearnerLagging) as refusal:
        cluster[1].core.change_membership(promote(4))
    assert refusal.value.lag == 10
    cluster.heal()
    cluster.tick(1)  # the answer to this heartbeat's probe brings it up to date
    with pytest.raises(LearnerLagging):
        cluster[1].core.change_membership(promote(4))
    cluster.tick(1)
    with pytest.raises(LearnerLagging):
        cluster[1].core.change_membership(promote(4))
    cluster.tick(1)
    change(cluster, 1, promote(4))


def test_a_learner_that_never_answered_is_not_caught_up_by_a_short_log():
    cluster = Cluster()
    cluster.elect(1)
    change(cluster, 1, add_learner(4))
    cluster.tick(3)
    with pytest.raises(LearnerLagging):
        cluster[1].core.change_membership(promote(4))


def test_after_promotion_the_old_voter_may_die():
    cluster = with_learner()
    change(cluster, 1, promote(4, remove=(3,)))
    cluster[2].crash()
    cluster.propose(1, b"x")
    assert cluster[4].machine == [b"x"]


def test_change_whose_new_majority_is_silent_is_refused_unless_forced():
    """{1,2,3} -> {1,2} while 2 is silent: the new group could not decide anything."""
    cluster = Cluster()
    cluster.elect(1)
    cluster.isolate(2)
    cluster.tick(30)
    with pytest.raises(MembershipRefused):
        cluster[1].core.change_membership(remove(3))
    index = change(cluster, 1, remove(3, forced=True))
    assert cluster[1].status.membership.is_joint
    assert cluster[1].last == index


def test_leaving_joint_keeps_the_new_half_as_it_is():
    """Learners and addresses survive the second phase; only the old half goes."""
    cluster = with_learner()
    change(cluster, 1, MembershipChange(add_learners=((N5, "five"),), promote=(N4,), remove=(N2,)))
    final = cluster[1].status.membership
    assert (final.voters, final.outgoing, final.learners) == ((1, 3, 4), (), (5,))
    assert final.addresses == ((4, "host-4:7650"), (5, "five"))


def test_change_during_a_transfer_is_refused():
    cluster = Cluster()
    cluster.elect(1)
    cluster.isolate(2)
    cluster[1].core.transfer_leadership(N2)
    with pytest.raises(MembershipBusy):
        cluster[1].core.change_membership(add_learner(4))


def test_a_new_member_does_not_cost_the_leader_its_quorum():
    """A freshly added member starts active. {1} -> {1,2}: check-quorum falls right after the change."""
    core = make_core(1, membership([1], [2]), term=0)
    core.campaign()
    drain(core)
    core.step(AppendReply(N2, N1, 1, True, 1))
    for _ in range(3):
        core.tick()
        drain(core)
        core.step(HeartbeatReply(N2, N1, 1, 1))
    core.change_membership(promote(2))
    drain(core)
    for _ in range(8):
        core.tick()
        drain(core)
    assert core.status().role is Role.LEADER


def test_answers_of_nodes_that_left_are_dropped():
    cluster = Cluster()
    cluster.elect(1)
    change(cluster, 1, remove(3))
    before = cluster[1].status
    cluster[1].core.step(AppendReply(N3, N1, 1, True, cluster[1].last))
    cluster[1].core.step(HeartbeatReply(N3, N1, 1, 99))
    assert cluster[1].status == before
    assert 3 not in [peer.node for peer in cluster[1].status.peers]


def test_heartbeats_reach_learners_and_both_halves_only():
    cluster = with_learner()
    change(cluster, 1, remove(3))
    cluster.delivered.clear()
    cluster.tick(1)
    assert {m.dst for m in cluster.delivered if isinstance(m, Heartbeat)} == {2, 4}
