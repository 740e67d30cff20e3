"""Membership changes: S30–S42 as far as they live in the core. Rules R12–R15, R20."""

from __future__ import annotations

import pytest

from sava.raft import (
    Append,
    AppendReply,
    CoreConfig,
    Entry,
    EntryKind,
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
    encode_membership,
)
from tests.unit.raft.harness import Cluster, Disk, drain, make_core, membership, recovered, sent


def add_learner(node: int) -> MembershipChange:
    return MembershipChange(add_learners=((node, f"host-{node}:7650"),))


def promote(*nodes: int, remove: tuple[int, ...] = (), forced: bool = False) -> MembershipChange:
    return MembershipChange(promote=nodes, remove=remove, forced=forced)


def remove(*nodes: int, forced: bool = False) -> MembershipChange:
    return MembershipChange(remove=nodes, forced=forced)


def change(cluster: Cluster, node: int, what: MembershipChange) -> int:
    index = cluster[node].core.change_membership(what)
    cluster.run()
    return index


def with_learner(node: int = 4, voters=(1, 2, 3), **options) -> Cluster:
    """A cluster led by 1 with a learner that has caught up."""
    cluster = Cluster(voters, **options)
    cluster.elect(1)
    cluster.join(node)
    change(cluster, 1, add_learner(node))
    cluster.tick(3)
    return cluster


def membership_entry(index: int, term: int, members) -> Entry:
    return Entry(index, term, EntryKind.MEMBERSHIP, encode_membership(members))


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
    assert cluster[1].status.membership.address(4) == "host-4:7650"
    assert not cluster[1].status.membership.is_joint


def test_s30_learner_is_not_counted_in_the_quorum():
    """Two of three voters are gone. A learner's acknowledgement commits nothing."""
    cluster = with_learner()
    cluster.isolate(2)
    cluster.isolate(3)
    before = cluster[1].commit
    cluster.propose(1, b"x")
    cluster.tick(2)
    assert cluster[4].last == cluster[1].last
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
    core.step(VoteReply(5, 4, 1, True, pre=True))
    drain(core)
    assert core.status().role is Role.PRE_CANDIDATE
    core.step(VoteReply(2, 4, 1, True, pre=True))
    core.step(VoteReply(3, 4, 1, True, pre=True))
    drain(core)
    assert core.status().role is Role.CANDIDATE
    core.step(VoteReply(5, 4, 1, True))
    assert core.status().role is Role.CANDIDATE
    core.step(VoteReply(2, 4, 1, True))
    core.step(VoteReply(3, 4, 1, True))
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


def test_r20_removed_follower_hears_that_it_is_and_stops_campaigning():
    cluster = Cluster()
    cluster.elect(1)
    change(cluster, 1, remove(3))
    assert cluster[3].commit == cluster[1].commit
    cluster[3].core.campaign()
    cluster.tick(60)
    assert not any(isinstance(m, VoteRequest) and m.src == 3 for m in cluster.delivered)


def test_s34_leader_outside_its_own_uncommitted_c_new_may_campaign_once_more():
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
    cluster.release(lambda m: m.index == index)
    cluster.hold = lambda m: isinstance(m, AppendReply) and m.index > index
    cluster.run()
    assert cluster[1].role is Role.LEADER, "C_new is appended, not committed"
    cluster.release()
    assert cluster[1].role is Role.LEARNER
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


# S36: {1,2,3} -> {1,2,4}, and leader 1 crashes at every step of it.


def _replace_3_by_4() -> Cluster:
    return with_learner(seed=3)


def test_s36_leader_crash_before_the_joint_entry_left_it():
    cluster = _replace_3_by_4()
    cluster[1].auto_persist = False
    cluster.isolate(1)
    change(cluster, 1, promote(4, remove=(3,)))
    cluster[1].crash()
    cluster.heal()
    leader = cluster.tick_until_leader(only=[2, 3, 4])
    assert cluster[leader].status.membership.voters == (1, 2, 3)
    cluster[1].auto_persist = True
    cluster[1].restart()
    leader = cluster.converge()
    assert cluster[leader].status.membership.voters == (1, 2, 3)


def test_s36_leader_crash_with_the_joint_entry_on_a_minority():
    """Only the crashed leader and node 3 hold the joint entry. Whatever the rest decides, it must be one
    history."""
    cluster = _replace_3_by_4()
    cluster.cut([1, 3], [2, 4])
    index = change(cluster, 1, promote(4, remove=(3,)))
    assert cluster[3].last >= index
    assert cluster[1].commit < index
    cluster[1].crash()
    cluster.heal()
    cluster.converge()
    cluster[1].restart()
    leader = cluster.converge()
    assert not cluster[leader].status.membership.is_joint


def test_s36_leader_crash_with_the_joint_entry_committed():
    """C_new was never appended. The next leader finds the joint entry, commits its no-op, and leaves joint
    itself."""
    cluster = _replace_3_by_4()
    cluster.drop = lambda m: (
        isinstance(m, Append) and any(e.kind is EntryKind.MEMBERSHIP and e.index > index for e in m.entries)
    )
    index = cluster[1].last + 1
    change(cluster, 1, promote(4, remove=(3,)))
    assert cluster[1].commit >= index
    assert cluster[2].status.membership.is_joint
    cluster[1].crash()
    cluster.heal()
    cluster.tick_until_leader(only=[2, 3, 4])
    leader = cluster.converge()
    assert cluster[leader].status.membership.voters == (1, 2, 4)


def test_s36_leader_crash_with_c_new_appended():
    cluster = _replace_3_by_4()
    index = cluster[1].last + 1
    cluster.drop = lambda m: isinstance(m, AppendReply) and m.index > index
    change(cluster, 1, promote(4, remove=(3,)))
    assert not cluster[2].status.membership.is_joint
    assert cluster[1].commit <= index
    cluster[1].crash()
    cluster.heal()
    leader = cluster.tick_until_leader(only=[2, 4])
    cluster.converge()
    assert cluster[leader].status.membership.voters == (1, 2, 4)


def test_s36_leader_crash_with_c_new_committed():
    cluster = _replace_3_by_4()
    change(cluster, 1, promote(4, remove=(3,)))
    cluster[1].crash()
    leader = cluster.tick_until_leader(only=[2, 4])
    cluster.converge()
    assert cluster[leader].status.membership.voters == (1, 2, 4)


def test_s37_truncating_an_uncommitted_configuration_restores_the_previous_one():
    """Follower 2 holds an uncommitted joint entry of term 1. The leader of term 2 replaces it by a
    command."""
    plain = membership([1, 2, 3])
    core = make_core(2, plain, term=1)
    joint = membership([1, 2, 4], outgoing=[1, 2, 3])
    core.step(Append(1, 2, 1, 0, 0, (membership_entry(1, 1, joint),), 0))
    drain(core)
    assert core.status().membership == joint
    core.step(Append(3, 2, 2, 0, 0, (Entry(1, 2, EntryKind.COMMAND, b"x"),), 0))
    (output,) = drain(core)
    assert output.truncate_from == 1
    assert core.status().membership == plain
    assert core.status().membership_index == 0


def test_s37_a_node_truncated_out_of_the_voters_stops_campaigning():
    core = make_core(4, membership([1, 2, 3], [4]), term=1)
    core.step(
        Append(1, 4, 1, 0, 0, (membership_entry(1, 1, membership([1, 2, 3, 4], outgoing=[1, 2, 3])),), 0)
    )
    drain(core)
    assert core.status().role is Role.FOLLOWER
    core.step(Append(3, 4, 2, 0, 0, (Entry(1, 2, EntryKind.NOOP, b""),), 0))
    drain(core)
    assert core.status().role is Role.LEARNER
    for _ in range(50):
        core.tick()
    assert not core.has_output()


def test_s38_restart_with_only_an_appended_configuration_uses_it():
    """The joint entry is on disk and not committed; the commit hint is before it (Camunda #57389)."""
    joint = membership([1, 2, 4], outgoing=[1, 2, 3])
    found = recovered(membership([1, 2, 3]), [1, 1], commit=2)
    disk = Disk(found)
    disk.entries.append(membership_entry(3, 1, joint))
    from random import Random

    from sava.raft import RaftCore

    core = RaftCore(2, CoreConfig(), disk.recover(), Random(1))
    assert core.status().commit == 2
    assert core.status().membership == joint
    assert core.status().membership_index == 3
    for _ in range(20):
        core.tick()
    asked = {m.dst for m in sent(drain(core), VoteRequest)}
    assert asked == {1, 3, 4}


def test_s39_recovered_joint_is_left_only_after_the_own_noop_committed():
    """Leader 1 finds a joint entry that the commit hint calls committed. Its own no-op is not committed yet:
    no C_new (Camunda #60086)."""
    joint = membership([1, 2, 4], outgoing=[1, 2, 3])
    cluster = Cluster([1, 2, 3, 4])
    for node in (1, 2, 3, 4):
        found = recovered(membership([1, 2, 3]), (), term=1, commit=1)
        disk = Disk(found)
        disk.entries.append(membership_entry(1, 1, joint))
        cluster[node].disk = disk
        cluster[node].restart()
    cluster.hold = lambda m: isinstance(m, AppendReply)
    cluster.elect(1)
    assert cluster[1].commit == 1
    assert cluster[1].terms() == [1, 2], "joint entry and no-op, nothing more"
    cluster.tick(3)
    assert cluster[1].last == 2
    cluster.release()
    assert cluster[1].status.membership == membership([1, 2, 4])


def test_s40_bug_2015_two_leaders_each_add_a_node():
    """1 (term 1) appends a change that reaches nobody; 2 becomes leader (term 2). Before its no-op is
    committed 2 must refuse a change of its own: it does not know whether 1's change is decided."""
    cluster = Cluster([1, 2, 3, 4], learners=[5, 6])
    cluster.elect(1)
    cluster.tick(3)
    cluster.isolate(1)
    change(cluster, 1, promote(5))
    cluster.hold = lambda m: isinstance(m, AppendReply) and m.term == 2
    cluster.elect(2)
    with pytest.raises(MembershipBusy):
        cluster[2].core.change_membership(add_learner(7))
    with pytest.raises(MembershipBusy):
        cluster[2].core.change_membership(promote(6))
    cluster.release()
    change(cluster, 2, add_learner(7))
    assert cluster[2].status.membership.learners == (5, 6, 7)


def test_s40_bug_2015_add_and_remove():
    cluster = Cluster([1, 2, 3, 4], learners=[5])
    cluster.elect(1)
    cluster.tick(3)
    cluster.isolate(1)
    change(cluster, 1, promote(5))
    cluster.hold = lambda m: isinstance(m, AppendReply) and m.term == 2
    cluster.elect(2)
    with pytest.raises(MembershipBusy):
        cluster[2].core.change_membership(remove(1))


def test_s40_bug_2015_remove_and_remove():
    """1 removes 4, 2 would remove 3; 1 comes back: with both allowed, {1,2,3} and {1,2,4} could decide
    apart."""
    cluster = Cluster([1, 2, 3, 4])
    cluster.elect(1)
    cluster.isolate(1)
    change(cluster, 1, remove(4))
    cluster.hold = lambda m: isinstance(m, AppendReply) and m.term == 2
    cluster.elect(2)
    with pytest.raises(MembershipBusy):
        cluster[2].core.change_membership(remove(3))
    cluster.heal()
    cluster.release()
    leader = cluster.converge()
    assert cluster[leader].status.membership == membership([1, 2, 3, 4])


def test_s41_second_change_while_one_is_pending_is_refused():
    cluster = with_learner()
    cluster.isolate(1)
    change(cluster, 1, promote(4))
    assert cluster[1].status.membership.is_joint
    with pytest.raises(MembershipBusy):
        cluster[1].core.change_membership(remove(2))
    cluster.heal()
    cluster.tick(3)
    change(cluster, 1, remove(2))
    assert cluster[1].status.membership.voters == (1, 3, 4)


def test_s41_second_learner_change_while_one_is_uncommitted_is_refused():
    cluster = Cluster()
    cluster.elect(1)
    cluster.isolate(1)
    change(cluster, 1, add_learner(4))
    with pytest.raises(MembershipBusy):
        cluster[1].core.change_membership(add_learner(5))


def test_s41_change_right_after_election_waits_for_the_noop():
    cluster = Cluster()
    cluster.hold = lambda m: isinstance(m, AppendReply)
    cluster.elect(1)
    with pytest.raises(MembershipBusy):
        cluster[1].core.change_membership(add_learner(4))
    cluster.release()
    change(cluster, 1, add_learner(4))


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


def test_r13_promotion_of_a_stopped_learner_is_refused():
    cluster = with_learner()
    cluster.isolate(4)
    cluster.tick(30)
    with pytest.raises(LearnerLagging) as refusal:
        cluster[1].core.change_membership(promote(4))
    assert refusal.value.node == 4
    cluster.heal()
    cluster.tick(3)
    change(cluster, 1, promote(4))


def test_r13_promotion_of_a_lagging_learner_is_refused_until_two_checks_pass():
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


def test_r13_a_learner_that_never_answered_is_not_caught_up_by_a_short_log():
    cluster = Cluster()
    cluster.elect(1)
    change(cluster, 1, add_learner(4))
    cluster.tick(3)
    with pytest.raises(LearnerLagging):
        cluster[1].core.change_membership(promote(4))


def test_r13_after_promotion_the_old_voter_may_die():
    cluster = with_learner()
    change(cluster, 1, promote(4, remove=(3,)))
    cluster[2].crash()
    cluster.propose(1, b"x")
    assert cluster[4].machine == [b"x"]


def test_r14i_change_whose_new_majority_is_silent_is_refused_unless_forced():
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


def test_r14g_leaving_joint_keeps_the_new_half_as_it_is():
    """Learners and addresses survive the second phase; only the old half goes."""
    cluster = with_learner()
    change(cluster, 1, MembershipChange(add_learners=((5, "five"),), promote=(4,), remove=(2,)))
    final = cluster[1].status.membership
    assert (final.voters, final.outgoing, final.learners) == ((1, 3, 4), (), (5,))
    assert final.addresses == ((4, "host-4:7650"), (5, "five"))


def test_change_during_a_transfer_is_refused():
    cluster = Cluster()
    cluster.elect(1)
    cluster.isolate(2)
    cluster[1].core.transfer_leadership(2)
    with pytest.raises(MembershipBusy):
        cluster[1].core.change_membership(add_learner(4))


def test_new_member_does_not_cost_the_leader_its_quorum_before_it_could_answer():
    """R3: a freshly added member starts active. {1} -> {1,2}: check-quorum falls right after the change."""
    core = make_core(1, membership([1], [2]), term=0)
    core.campaign()
    drain(core)
    core.step(AppendReply(2, 1, 1, True, 1))
    for _ in range(3):
        core.tick()
        drain(core)
        core.step(HeartbeatReply(2, 1, 1, 1))
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
    cluster[1].core.step(AppendReply(3, 1, 1, True, cluster[1].last))
    cluster[1].core.step(HeartbeatReply(3, 1, 1, 99))
    assert cluster[1].status == before
    assert 3 not in [peer.node for peer in cluster[1].status.peers]


def test_heartbeats_reach_learners_and_both_halves_only():
    cluster = with_learner()
    change(cluster, 1, remove(3))
    cluster.delivered.clear()
    cluster.tick(1)
    assert {m.dst for m in cluster.delivered if isinstance(m, Heartbeat)} == {2, 4}
