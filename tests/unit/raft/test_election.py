"""Elections: S1–S18."""

from __future__ import annotations

import pytest

from sava.raft import (
    NO_NODE,
    Append,
    AppendReply,
    CoreConfig,
    EntryKind,
    Heartbeat,
    HeartbeatReply,
    InvariantError,
    Membership,
    MembershipChange,
    NodeId,
    Role,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    VoteRequest,
)
from tests.unit.raft.harness import (
    N1,
    N2,
    N3,
    N4,
    Cluster,
    drain,
    entries_of,
    make_core,
    membership,
    only,
    sent,
)

THREE = membership([1, 2, 3])


def test_s01_single_voter_leads_at_once_by_campaign():
    """One voter campaigns: its own durable vote is the majority, and its no-op commits once durable."""
    cluster = Cluster([1])
    cluster[1].core.campaign()
    cluster.run()
    assert (cluster[1].role, cluster[1].term, cluster[1].commit) == (Role.LEADER, 1, 1)
    assert cluster[1].applied == 1


def test_s01_single_voter_leads_at_its_first_tick():
    cluster = Cluster([1])
    cluster.tick()
    assert (cluster[1].role, cluster[1].commit) == (Role.LEADER, 1)


def test_s01_single_voter_restarts_and_leads_again_in_a_new_term():
    cluster = Cluster([1])
    cluster.tick()
    cluster.propose(1, b"x")
    cluster[1].crash()
    cluster[1].restart()
    cluster.tick()
    assert (cluster[1].role, cluster[1].term, cluster[1].machine) == (Role.LEADER, 2, [b"x"])


def test_s02_three_voters_elect_one_leader_and_commit_its_noop():
    cluster = Cluster()
    cluster.elect(1)
    assert [cluster[n].role for n in (1, 2, 3)] == [Role.LEADER, Role.FOLLOWER, Role.FOLLOWER]
    assert [cluster[n].status.leader for n in (1, 2, 3)] == [1, 1, 1]
    assert [cluster[n].commit for n in (1, 2, 3)] == [1, 1, 1]
    assert cluster[1].disk.entries[0].kind is EntryKind.MEMBERSHIP, (
        "the first term opens with the bootstrap group"
    )


def test_s03_all_start_as_followers_and_wait_for_the_first_timeout():
    cores = [make_core(n, THREE) for n in (1, 2, 3)]
    for core in cores:
        assert core.status().role is Role.FOLLOWER
        assert not core.has_output()
        for _ in range(9):
            core.tick()
            assert not core.has_output()


def test_s03_learners_and_unnamed_nodes_never_campaign():
    """A learner, and a node that no configuration names, stay silent however long they hear nothing."""
    for node, members in ((4, membership([1, 2, 3], [4])), (9, THREE), (9, Membership())):
        core = make_core(node, members)
        assert core.status().role is Role.LEARNER
        for _ in range(100):
            core.tick()
        core.campaign()
        assert not core.has_output()
        assert core.status().term == 0


def test_s04_timeouts_are_spread_over_t_to_2t_and_redrawn():
    """Over many resets every value of T..2T-1 occurs, and nothing else."""
    core = make_core(1, THREE)
    drawn = []
    for _ in range(300):
        ticks = 0
        while not core.has_output():
            core.tick()
            ticks += 1
        drain(core)
        drawn.append(ticks)
    assert set(drawn) == set(range(10, 20))
    assert len(set(drawn[:10])) > 1, "the timeout is redrawn each time"


@pytest.mark.parametrize("seed", range(20))
def test_s04_split_votes_resolve(seed):
    cluster = Cluster([1, 2, 3, 4, 5], seed=seed)
    assert cluster.tick_until_leader()
    cluster.converge()


@pytest.mark.parametrize(
    ("last_index", "last_term", "granted"),
    [(0, 0, False), (3, 1, False), (2, 2, False), (3, 2, True), (4, 2, True), (1, 3, True), (9, 1, False)],
)
@pytest.mark.parametrize("pre", [False, True])
def test_s05_vote_refused_to_shorter_or_older_log(last_index, last_term, granted, pre):
    """My log ends (3, term 2). Later term first, then length; the same order for votes and pre-votes."""
    core = make_core(1, THREE, [1, 1, 2], term=2)
    core.step(VoteRequest(N2, N1, 3, last_index, last_term, pre=pre))
    (reply,) = sent(drain(core))
    assert reply == VoteReply(N1, N2, 3 if granted or not pre else 2, granted, pre=pre)


def test_s06_a_terms_second_candidate_is_refused_not_the_first_again():
    core = make_core(1, THREE)
    for candidate, granted in ((2, True), (3, False), (2, True)):
        core.step(VoteRequest(NodeId(candidate), N1, 1, 0, 0))
        (reply,) = sent(drain(core))
        assert reply == VoteReply(N1, NodeId(candidate), 1, granted)
    assert core.status().vote == 2


def test_s06_no_vote_in_a_term_whose_leader_is_known():
    """Node 1 has not voted in term 1 but heard its leader 2: candidate 3 of term 1 has lost already."""
    core = make_core(1, THREE)
    core.step(Heartbeat(N2, N1, 1, 0, 1))
    drain(core)
    core.step(VoteRequest(N3, N1, 1, 5, 1))
    reply = only(drain(core), VoteReply)
    assert reply.granted is False


def _candidate(term: int = 1):
    """Node 1 as candidate in ``term``, its vote durable."""
    core = make_core(1, THREE, term=term - 1)
    core.campaign()
    drain(core)
    core.step(VoteReply(N2, N1, term, True, pre=True))
    drain(core)
    assert core.status().role is Role.CANDIDATE
    assert core.status().term == term
    return core


def test_s07_candidate_hearing_an_append_of_its_term_follows():
    core = _candidate()
    core.step(Append(N3, N1, 1, 0, 0, (), 0))
    assert (core.status().role, core.status().leader, core.status().term) == (Role.FOLLOWER, 3, 1)


def test_s07_candidate_hearing_an_append_of_an_earlier_term_does_not():
    core = _candidate(term=3)
    core.step(Append(N3, N1, 2, 0, 0, (), 0))
    assert (core.status().role, core.status().term) == (Role.CANDIDATE, 3)


@pytest.mark.parametrize(
    "message",
    [
        Append(N2, N1, 2, 3, 2, entries_of([2], start=4), 4),
        Heartbeat(N2, N1, 2, 3, 1),
        VoteRequest(N2, N1, 2, 99, 2),
        VoteReply(N2, N1, 2, True),
        AppendReply(N2, N1, 2, True, 3),
        HeartbeatReply(N2, N1, 2, 7),
        TimeoutNow(N2, N1, 2),
        SnapshotReply(N2, N1, 2, 3, b"", 9),
    ],
)
def test_s08_messages_of_an_earlier_term_change_nothing(message):
    core = make_core(1, THREE, [1, 2, 2], term=3)
    before = core.status()
    core.step(message)
    outputs = drain(core)
    assert core.status() == before
    assert not any(out.entries or out.hard_state or out.apply for out in outputs)


def test_s08_messages_to_another_node_or_from_oneself_are_dropped():
    core = make_core(1, THREE)
    core.step(Heartbeat(N2, N3, 5, 0, 1))
    core.step(Heartbeat(N1, N1, 5, 0, 1))
    assert core.status().term == 0
    assert not core.has_output()


def test_s09_dueling_candidates_the_better_log_wins():
    """1 and 3 cannot hear each other; 1 wins with 2's vote. 3 asks too late and disturbs nobody."""
    cluster = Cluster()
    cluster.cut([1], [3])
    cluster[1].core.campaign()
    cluster.run()
    cluster[3].core.campaign()
    cluster.run()
    assert cluster[1].role is Role.LEADER
    assert (cluster[3].role, cluster[3].term) == (Role.FOLLOWER, 1), "refused, and told the term"
    cluster.heal()
    leader = cluster.converge()
    assert leader == 1
    assert cluster[3].term == cluster[1].term == 1


def test_s09_real_candidates_of_one_term_split_and_then_one_wins():
    """Both win their pre-vote before either asks for a vote: the voters' first come, first served decides."""
    cluster = Cluster()
    cluster.hold = lambda m: isinstance(m, VoteRequest) and not m.pre
    cluster[1].core.campaign()
    cluster[3].core.campaign()
    cluster.run()
    assert [cluster[n].role for n in (1, 3)] == [Role.CANDIDATE, Role.CANDIDATE]
    cluster.release()
    assert [cluster[n].role for n in (1, 2, 3)].count(Role.LEADER) <= 1
    cluster.converge()


def test_s10_lagging_node_cannot_raise_anyones_term():
    """Node 3 misses entries and is cut off for a long time. Its term does not move, and its return deposes
    nobody."""
    cluster = Cluster()
    cluster.elect(1)
    cluster.isolate(3)
    cluster.propose(1, b"a", b"b")
    cluster.tick(100)
    assert cluster[3].role is Role.PRE_CANDIDATE
    assert cluster[3].term == 1
    cluster.heal()
    cluster.tick(30)
    assert (cluster.leader(), cluster[1].term) == (1, 1)
    assert cluster[3].machine == [b"a", b"b"]


def test_s10_pre_vote_changes_neither_term_nor_vote_nor_timer_of_the_voter():
    core = make_core(1, THREE)
    for _ in range(5):
        core.tick()
    before = (core.status(), core._state.election_elapsed, core._state.election_timeout)
    core.step(VoteRequest(N2, N1, 7, 0, 0, pre=True))
    (output,) = drain(core)
    assert sent([output]) == [VoteReply(N1, N2, 7, True, pre=True)]
    assert output.send_now, "a pre-vote promises nothing, so its answer waits for no disk"
    assert output.hard_state is None
    assert (core.status(), core._state.election_elapsed, core._state.election_timeout) == before


def test_s11_pre_vote_is_granted_only_after_the_leaders_silence():
    """Within T of hearing the leader a follower does not even answer; after T it does."""
    core = make_core(2, THREE)
    core.step(Heartbeat(N1, N2, 1, 0, 1))
    drain(core)
    for tick in range(1, 11):
        core.tick()
        core.step(VoteRequest(N3, N2, 2, 0, 0, pre=True))
        replies = [m for m in sent(drain(core), VoteReply) if m.pre]
        assert bool(replies) == (tick >= 10), f"at tick {tick}"


def test_s11_stickiness_ignores_a_real_vote_of_a_higher_term_too():
    core = make_core(2, THREE)
    core.step(Heartbeat(N1, N2, 1, 0, 1))
    drain(core)
    core.step(VoteRequest(N3, N2, 9, 50, 8))
    assert not core.has_output()
    assert core.status().term == 1
    core.step(VoteRequest(N3, N2, 9, 50, 8, transfer=True))
    assert core.status().term == 9


def test_s12_node_with_smaller_term_can_complete_an_election():
    """2 has the longest log and the smallest term, 3 ran ahead in terms; with 1 gone, one of them must still
    win.

    3's higher-term votes are refused for its log; 2's lower-term pre-votes must be *answered* (with the term
    to catch up to), not dropped."""
    cluster = Cluster(logs={1: [1, 1], 2: [1, 1], 3: [1]}, terms={1: 1, 2: 1, 3: 3})
    cluster[1].crash()
    leader = cluster.tick_until_leader(only=[2, 3])
    assert leader == 2
    cluster.tick(5)
    assert cluster[3].terms() == cluster[2].terms()


def test_s12_pre_vote_of_a_lower_term_is_refused_with_our_term():
    core = make_core(1, THREE, term=5)
    core.step(VoteRequest(N2, N1, 3, 9, 2, pre=True))
    assert sent(drain(core)) == [VoteReply(N1, N2, 5, False, pre=True)]
    asker = make_core(2, THREE, term=2)
    asker.campaign()
    drain(asker)
    asker.step(VoteReply(N1, N2, 5, False, pre=True))
    assert (asker.status().term, asker.status().role) == (5, Role.FOLLOWER)


def test_s13_late_self_vote_after_a_lost_election_is_harmless():
    """The candidate's disk is slow: it has lost to 2 by the time its own vote is durable."""
    cluster = Cluster()
    cluster[1].auto_persist = False
    cluster[1].core.campaign()
    cluster.run()
    assert cluster[1].role is Role.CANDIDATE
    cluster[1].core.step(Heartbeat(N2, N1, 1, 0, 1))
    cluster[1].persist()
    cluster[1].auto_persist = True
    assert (cluster[1].role, cluster[1].status.leader) == (Role.FOLLOWER, 2)


def test_s14_late_pre_vote_grant_is_no_vote():
    """In a group of five, three pre-votes make a candidate. The other two pre-grants arrive late: not
    votes."""
    core = make_core(1, membership([1, 2, 3, 4, 5]))
    core.campaign()
    for voter in (2, 3):
        core.step(VoteReply(NodeId(voter), N1, 1, True, pre=True))
    drain(core)
    assert core.status().role is Role.CANDIDATE
    for voter in (4, 5):
        core.step(VoteReply(NodeId(voter), N1, 1, True, pre=True))
    drain(core)
    assert core.status().role is Role.CANDIDATE


def test_s15_leader_without_a_quorum_steps_down_within_two_windows():
    cluster = Cluster()
    cluster.elect(1)
    cluster.isolate(1)
    cluster.tick(20, only=[1])
    assert cluster[1].role is not Role.LEADER
    assert cluster[1].term == 1


def test_s15_leader_with_a_quorum_stays():
    cluster = Cluster([1, 2, 3, 4, 5])
    cluster.elect(1)
    cluster.cut([4, 5], [1, 2, 3])
    cluster.tick(60)
    assert (cluster[1].role, cluster[1].term) == (Role.LEADER, 1)


def test_s15_learners_do_not_keep_a_leader_alive():
    cluster = Cluster([1, 2, 3], learners=[4, 5])
    cluster.elect(1)
    cluster.cut([2, 3], [1, 4, 5])
    cluster.tick(25, only=[1, 4, 5])
    assert cluster[1].role is not Role.LEADER


def test_s16_stuck_member_with_a_higher_term_frees_itself():
    """Node 3 reached a higher term that nobody else has seen. Its votes are ignored (stickiness), the
    leader's appends are of an old term to it. Its answer carries its term: the leader steps down once, and
    all meet again."""
    cluster = Cluster()
    cluster.elect(1)
    cluster[3].crash()
    cluster[3].disk.hard_state = type(cluster[3].disk.hard_state)(7, NO_NODE, 0)
    cluster[3].restart()
    cluster.tick(1)
    assert cluster[1].role is not Role.LEADER
    leader = cluster.converge()
    assert cluster[leader].term > 7


@pytest.mark.parametrize("message", [Heartbeat(N2, N1, 1, 0, 1), Append(N2, N1, 1, 0, 0, (), 0)])
def test_s16_the_hatch_answers_an_old_leader_with_our_term(message):
    core = make_core(1, THREE, term=4)
    core.step(message)
    (reply,) = sent(drain(core))
    assert (reply.dst, reply.term) == (2, 4)


def test_s16_a_removed_node_with_a_high_term_deposes_nobody():
    """Answers of non-members are dropped before their term is looked at."""
    cluster = Cluster()
    cluster.elect(1)
    for reply in (
        AppendReply(NodeId(9), N1, 50, False, 0),
        HeartbeatReply(NodeId(9), N1, 50, 1),
        VoteReply(NodeId(9), N1, 50, False),
    ):
        cluster[1].core.step(reply)
    assert (cluster[1].role, cluster[1].term) == (Role.LEADER, 1)


def test_s17_inbound_heartbeats_alone_prevent_a_campaign():
    """Node 3 hears everyone and is heard by no one. It hears its leader, so it has no reason to campaign."""
    cluster = Cluster()
    cluster.elect(1)
    cluster.cut_one_way(3, 1)
    cluster.cut_one_way(3, 2)
    cluster.tick(60)
    assert cluster[3].role is Role.FOLLOWER
    assert (cluster.leader(), cluster[1].term) == (1, 1)


def test_s18_partial_partition_leaves_the_cluster_writable():
    """Cloudflare, 2020: 3 cannot reach leader 1 but reaches 2. It campaigns for ever; 2 hears 1 and does not
    listen."""
    cluster = Cluster()
    cluster.elect(1)
    cluster.cut([1], [3])
    for round_ in range(10):
        cluster.tick(20)
        cluster.propose(1, b"%d" % round_)
    assert (cluster.leader(), cluster[1].term) == (1, 1)
    assert len(cluster[1].machine) == len(cluster[2].machine) == 10


def test_learner_votes_when_asked():
    """The asker may know a newer configuration in which this learner is a voter."""
    core = make_core(4, membership([1, 2, 3], [4]))
    core.step(VoteRequest(N1, N4, 1, 0, 0))
    reply = only(drain(core), VoteReply)
    assert reply.granted


def test_votes_are_given_without_looking_at_the_own_configuration():
    """Candidate 9 is in no configuration that node 1 knows. Refusing could lock up the group (Camunda
    #57386)."""
    core = make_core(1, THREE)
    core.step(VoteRequest(NodeId(9), N1, 1, 3, 1, pre=True))
    core.step(VoteRequest(NodeId(9), N1, 1, 3, 1))
    assert [m.granted for m in sent(drain(core), VoteReply)] == [True, True]


def test_removed_node_campaigns_in_vain():
    """A removed node that never heard of its removal, with a longer log, keeps asking. The leader is
    unaffected."""
    cluster = Cluster([1, 2, 3, 4])
    cluster.elect(1)
    cluster.isolate(4)
    cluster[1].core.change_membership(MembershipChange(remove=(N4,)))
    cluster.run()
    assert cluster[1].status.membership == membership([1, 2, 3])
    cluster.heal()
    cluster.tick(100)
    assert (cluster.leader(), cluster[1].term) == (1, 1)


def test_two_leaders_of_one_term_stop_the_node():
    core = make_core(1, THREE)
    core.step(Heartbeat(N2, N1, 1, 0, 1))
    with pytest.raises(InvariantError):
        core.step(Heartbeat(N3, N1, 1, 0, 1))


def test_election_timeout_configuration_is_checked():
    with pytest.raises(ValueError, match="election_ticks"):
        CoreConfig(election_ticks=1, heartbeat_ticks=1)
    with pytest.raises(ValueError, match="node id"):
        make_core(0, THREE)
