"""Leadership transfer: S43, S44."""

from __future__ import annotations

import pytest

from sava.raft import (
    Append,
    MembershipChange,
    NodeId,
    NotLeader,
    Role,
    TimeoutNow,
    TransferRefused,
    Transferring,
    VoteReply,
    VoteRequest,
)
from tests.unit.raft.harness import N1, N2, N3, N4, Cluster, drain, make_core, membership, sent

THREE = membership([1, 2, 3])


def leading(**options) -> Cluster:
    cluster = Cluster(**options)
    cluster.elect(1)
    return cluster


def transfer(cluster: Cluster, to: int) -> None:
    cluster[1].core.transfer_leadership(NodeId(to))
    cluster.run()


def test_s43_transfer_to_an_up_to_date_voter():
    cluster = leading()
    transfer(cluster, 2)
    assert (cluster.leader(), cluster[2].term) == (2, 2)
    assert cluster[1].role is Role.FOLLOWER
    cluster.propose(2, b"x")
    assert cluster[1].machine == [b"x"]


def test_s43_transfer_to_a_slow_voter_catches_it_up_first():
    """2 misses an entry: no TimeoutNow before it has the whole log, or it could not win."""
    cluster = leading()
    cluster.drop = lambda m: isinstance(m, Append) and m.dst == 2
    cluster.propose(1, b"x")
    transfer(cluster, 2)
    assert cluster[1].status.transferring_to == 2
    assert not any(isinstance(m, TimeoutNow) for m in cluster.delivered)
    cluster.heal()
    cluster.tick(1)
    assert cluster.leader() == 2
    assert cluster[2].machine == [b"x"]


def test_s43_transfer_to_a_voter_that_needs_a_snapshot():
    cluster = leading()
    cluster.isolate(3)
    cluster.propose(1, *[b"%d" % n for n in range(10)])
    cluster[1].snapshot()
    cluster.heal()
    cluster.tick(1)
    transfer(cluster, 3)
    cluster.tick(2)
    assert cluster.leader() == 3
    assert cluster[3].machine == [b"%d" % n for n in range(10)]


def test_s43_transfer_to_a_learner_an_unknown_node_or_oneself_is_refused():
    cluster = leading(learners=[4])
    for target in (4, 9, 1):
        with pytest.raises(TransferRefused):
            cluster[1].core.transfer_leadership(NodeId(target))
    assert cluster[1].status.transferring_to == 0


def test_s43_transfer_asked_of_a_follower_is_refused():
    cluster = leading()
    with pytest.raises(NotLeader):
        cluster[2].core.transfer_leadership(N3)


def test_s43_target_removed_meanwhile_aborts_the_transfer():
    """The joint entry that removes 3 was appended before; 3 leaves the voters while leadership is on its way
    to it."""
    cluster = leading()
    cluster.hold = lambda m: isinstance(m, Append) and m.dst == 3
    cluster.propose(1, b"x")
    cluster.hold = lambda m: m.dst == 3 or not isinstance(m, Append)
    cluster[1].core.change_membership(MembershipChange(remove=(N3,)))
    with pytest.raises(TransferRefused):
        cluster[1].core.transfer_leadership(N3)


def test_s43_demoted_target_aborts_a_running_transfer():
    """Transfer to 3 begins while the joint configuration still has 3 in both halves... C_new without it ends
    that."""
    core = make_core(1, THREE)
    state = core._state
    core.campaign()
    core.step(VoteReply(N2, N1, 1, True, pre=True))
    drain(core)
    core.step(VoteReply(N2, N1, 1, True))
    drain(core)
    core.transfer_leadership(N3)
    assert core.status().transferring_to == 3
    state.history.push(state.log.last_index + 1, membership([1, 2]))
    state.membership_changed()
    assert core.status().transferring_to == 0


def test_s43_a_transfer_times_out_and_proposals_are_welcome_again():
    """The time is one election timeout."""
    cluster = leading()
    cluster.isolate(2)
    transfer(cluster, 2)
    with pytest.raises(Transferring) as refusal:
        cluster[1].core.propose([b"x"])
    assert refusal.value.target == 2
    cluster.tick(9)
    assert cluster[1].status.transferring_to == 2
    cluster.tick(1)
    assert cluster[1].status.transferring_to == 0
    cluster.propose(1, b"x")
    assert cluster[3].machine == [b"x"]


def test_s43_a_second_target_replaces_the_first():
    cluster = leading()
    cluster.isolate(2)
    transfer(cluster, 2)
    transfer(cluster, 3)
    assert cluster.leader() == 3


def test_s43_the_same_target_again_changes_nothing():
    cluster = leading()
    cluster.isolate(2)
    transfer(cluster, 2)
    cluster.tick(5)
    transfer(cluster, 2)
    cluster.tick(5)
    assert cluster[1].status.transferring_to == 0, "the first request's timeout counts"


def test_s43_timeout_now_reaches_a_node_that_is_no_voter():
    core = make_core(4, membership([1, 2, 3], [4]), term=1)
    core.step(TimeoutNow(N1, N4, 1))
    assert core.status().role is Role.LEARNER
    assert sent(drain(core)) == []


def test_s44_transfer_works_under_stickiness():
    """Everyone has just heard leader 1, so ordinary requests are ignored. The target's carry ``transfer`` and
    skip the pre-vote."""
    cluster = leading()
    cluster.tick(1)
    transfer(cluster, 3)
    requests = [m for m in cluster.delivered if isinstance(m, VoteRequest) and m.src == 3]
    assert requests
    assert all(m.transfer and not m.pre for m in requests)
    assert cluster.leader() == 3
