"""Linearizable reads: S45–S47."""

from __future__ import annotations

import pytest

from sava.raft import (
    Append,
    AppendReply,
    Busy,
    CoreConfig,
    Heartbeat,
    HeartbeatReply,
    MembershipChange,
    NotLeader,
    Role,
)
from tests.unit.raft.harness import N1, N2, N3, N4, N5, Cluster


def leading(**options) -> Cluster:
    cluster = Cluster(**options)
    cluster.elect(1)
    return cluster


def test_s45_read_on_the_leader_is_answered_at_its_commit_index():
    cluster = leading()
    cluster.propose(1, b"x")
    cluster[1].core.request_read(7)
    cluster.run()
    assert cluster[1].reads_ready == [(7, 2)]


def test_s45_follower_and_learner_refuse_with_a_hint():
    cluster = leading(learners=[4])
    cluster.tick(2)
    for node in (2, 4):
        with pytest.raises(NotLeader) as refusal:
            cluster[node].core.request_read(1)
        assert refusal.value.leader == 1


def test_s45_new_leader_answers_only_after_its_noop_committed():
    """Leader 2 of term 2 holds entry 2 of term 1, which leader 1 had committed and acknowledged; 2's own
    commit index is still before it. An answer at that index would miss an acknowledged write (etcd#7331)."""
    cluster = leading()
    cluster.drop = lambda m: m.dst != 1 and isinstance(m, Append) and not m.entries
    cluster.propose(1, b"acknowledged")
    assert cluster[1].commit == 2
    assert cluster[2].commit == 1
    cluster[1].crash()
    cluster.hold = lambda m: isinstance(m, AppendReply)
    cluster.elect(2)
    cluster[2].core.request_read(7)
    cluster.run()
    cluster.tick(2)
    assert cluster[2].reads_ready == []
    cluster.release()
    assert cluster[2].reads_ready == [(7, 3)]


def test_s45_single_voter_answers_at_once():
    cluster = Cluster([1])
    cluster.elect(1)
    cluster[1].core.request_read(7)
    cluster.run()
    assert cluster[1].reads_ready == [(7, 1)]


def test_s45_joint_configuration_needs_both_halves_to_confirm():
    cluster = Cluster([1, 2, 3], learners=[4, 5])
    cluster.elect(1)
    cluster.tick(3)
    cluster.cut([4, 5], [1, 2, 3])
    cluster[1].core.change_membership(MembershipChange(promote=(N4, N5), remove=(N2, N3)))
    cluster.run()
    cluster[1].core.request_read(7)
    cluster.run()
    assert cluster[1].reads_ready == [], "the old half alone does not confirm"
    cluster.heal()
    cluster.tick(1)
    assert [token for token, _ in cluster[1].reads_ready] == [7]


def test_s46_retry_with_the_same_token_is_not_confirmed_by_late_answers():
    """etcd#20418. Read 7 goes out; the answers are late. The caller retries with the same token after more
    was committed (by the leader's own account). Answers to the *first* round confirm the first read only, at
    its older index; the retry waits for a round sent after its arrival."""
    cluster = leading()
    cluster.hold = lambda m: isinstance(m, HeartbeatReply)
    cluster[1].core.request_read(7)
    cluster.run()
    first_round = list(cluster.held)
    cluster.propose(1, b"x")
    cluster[1].core.request_read(7)
    cluster.run()
    for message in first_round * 3:
        cluster[1].core.step(message)
    cluster.run()
    assert cluster[1].reads_ready == [(7, 1)], "only the first one, however often its answers are repeated"
    cluster.release()
    assert cluster[1].reads_ready == [(7, 1), (7, 2)]


def test_s46_an_answer_to_a_round_before_the_read_confirms_nothing():
    """A heartbeat of the ordinary tick is on its way when the read arrives; the leader may be deposed in
    between."""
    cluster = leading()
    cluster.hold = lambda m: isinstance(m, HeartbeatReply)
    cluster.tick(1)
    old = list(cluster.held)
    cluster[1].core.request_read(12345)
    cluster.run()
    for message in old:
        cluster[1].core.step(message)
    cluster.run()
    assert cluster[1].reads_ready == []


def test_s46_rounds_are_the_leaders_own_and_only_grow():
    cluster = leading()
    for token in (900, 5, 900):
        cluster[1].core.request_read(token)
        cluster.run()
    cluster.tick(2)
    rounds = [m.round for m in cluster.delivered if isinstance(m, Heartbeat) and m.dst == 2]
    assert rounds == sorted(set(rounds))
    assert max(rounds) < 900, "not the callers' tokens"


def test_s46_reads_between_two_polls_share_one_round():
    cluster = leading()
    cluster.delivered.clear()
    for token in range(100):
        cluster[1].core.request_read(token)
    cluster.run()
    assert len([m for m in cluster.delivered if isinstance(m, Heartbeat)]) == 2
    assert cluster[1].reads_ready == [(token, 1) for token in range(100)]


def test_s47_a_partitioned_leader_fails_its_reads_when_it_steps_down():
    """Until then it answers nothing."""
    cluster = leading()
    cluster.isolate(1)
    cluster[1].core.request_read(7)
    cluster.run()
    cluster.elect(2)
    cluster.propose(2, b"new")
    cluster.tick(25)
    assert cluster[1].reads_ready == []
    assert cluster[1].reads_failed == [7]
    assert cluster[1].role is not Role.LEADER


def test_s47_reads_waiting_for_the_noop_fail_with_the_leadership():
    cluster = Cluster()
    cluster.hold = lambda m: isinstance(m, AppendReply)
    cluster.elect(1)
    cluster[1].core.request_read(7)
    cluster[1].core.step(Heartbeat(N2, N1, 9, 0, 1))
    cluster.run()
    assert cluster[1].reads_failed == [7]
    cluster.release()
    assert cluster[1].reads_ready == []


def test_pending_reads_are_bounded():
    cluster = leading(config=CoreConfig(max_pending_reads=3, keep_entries=0))
    cluster.isolate(1)
    for token in range(3):
        cluster[1].core.request_read(token)
    with pytest.raises(Busy):
        cluster[1].core.request_read(3)
    cluster.heal()
    cluster.tick(1)
    assert len(cluster[1].reads_ready) == 3
    cluster[1].core.request_read(3)
