"""A leader whose process is gone is not waited for; a leader that is there is not disturbed."""

from __future__ import annotations

from sava.raft import NO_NODE, Heartbeat, NodeId, Role, VoteReply, VoteRequest
from sava.raft.core import RaftCore
from tests.unit.raft.harness import N1, N2, N3, Cluster, drain, make_core, membership, sent

THREE = membership([1, 2, 3])
SHORT = 4
"""Ticks: one, and a third of the election timeout at most."""


def follower() -> tuple[RaftCore, int]:
    core = make_core(1, THREE)
    core.step(Heartbeat(N2, N1, 1, 0, 1))
    drain(core)
    return core, core.term


def test_a_follower_whose_leader_is_gone_campaigns_after_a_short_wait():
    """2 leads and dies; 1 gets evidence of it. It asks for pre-votes within 4 ticks, not 10 to 19."""
    core, _ = follower()
    core.leader_unreachable(N2)
    assert core.leader == NO_NODE
    ticks = 0
    while core.status().role is Role.FOLLOWER:
        core.tick()
        ticks += 1
    assert ticks <= SHORT


def test_two_followers_do_not_campaign_in_the_same_tick_every_time():
    """Both get the evidence at once: the wait is random, or they would split every vote."""
    waits = set()
    for seed in range(20):
        cluster = Cluster([1, 2, 3], seed=seed)
        cluster.elect(3)
        core = cluster[1].core
        core.leader_unreachable(N3)
        waits.add(core._state.hurried_timeout - core._state.election_elapsed)
    assert len(waits) > 1


def test_a_follower_with_the_evidence_grants_a_pre_vote():
    core, _ = follower()
    core.step(VoteRequest(N3, N1, 2, 9, 1, pre=True))
    assert not sent(drain(core)), "it hears its leader"
    core.leader_unreachable(N2)
    core.step(VoteRequest(N3, N1, 2, 9, 1, pre=True))
    assert sent(drain(core)) == [VoteReply(N1, N3, 2, True, pre=True)]


def test_wrong_evidence_ends_with_the_next_message_of_the_leader():
    """2 leads and lives; 1 gets wrong evidence, then hears it. From then on 1 waits the whole timeout again:
    with the short one it would campaign after every pause of four heartbeats."""
    core, term = follower()
    core.leader_unreachable(N2)
    core.step(Heartbeat(N2, N1, 1, 0, 2))
    drain(core)
    for _ in range(9):
        core.tick()
    assert (core.status().role, core.leader, core.term) == (Role.FOLLOWER, N2, term)


def test_evidence_about_another_node_than_the_leader_changes_nothing():
    core, _ = follower()
    core.leader_unreachable(N3)
    core.leader_unreachable(NO_NODE)
    assert core.leader == N2
    for _ in range(9):
        core.tick()
    assert core.status().role is Role.FOLLOWER


def test_evidence_in_every_tick_does_not_keep_a_candidate_from_its_turn():
    core, _ = follower()
    for _ in range(SHORT + 1):
        core.leader_unreachable(N2)
        core.tick()
    assert core.status().role is Role.PRE_CANDIDATE


def test_a_leader_ignores_it():
    cluster = Cluster([1, 2, 3])
    cluster.elect(1)
    cluster[1].core.leader_unreachable(NodeId(1))
    assert cluster[1].role is Role.LEADER


def test_a_healthy_leader_stays_when_one_follower_is_wrong():
    """1 leads, 2 is told that it is gone and asks for pre-votes; 3 hears the leader and does not answer."""
    cluster = Cluster([1, 2, 3])
    cluster.elect(1)
    cluster[2].core.leader_unreachable(N1)
    for _ in range(30):
        cluster.tick()
    assert (cluster[1].role, cluster[1].term) == (Role.LEADER, 1)
