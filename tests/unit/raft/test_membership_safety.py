"""Membership changes when things go wrong: crashes, truncation, rival leaders. S36–S41."""

from __future__ import annotations

from random import Random

import pytest

from sava.raft import (
    Append,
    AppendReply,
    CoreConfig,
    Entry,
    EntryKind,
    MembershipBusy,
    RaftCore,
    Role,
    VoteRequest,
)
from tests.unit.raft.changes import add_learner, change, membership_entry, promote, remove, with_learner
from tests.unit.raft.harness import (
    N1,
    N2,
    N3,
    N4,
    Cluster,
    Disk,
    drain,
    make_core,
    membership,
    recovered,
    sent,
)

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
    index = cluster[1].last + 1
    cluster.drop = lambda m: (
        isinstance(m, Append) and any(e.kind is EntryKind.MEMBERSHIP and e.index > index for e in m.entries)
    )
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


def test_s37_truncating_a_configuration_restores_the_previous_one():
    """Follower 2 holds an uncommitted joint entry of term 1. The leader of term 2 replaces it by a
    command."""
    plain = membership([1, 2, 3])
    core = make_core(2, plain, term=1)
    joint = membership([1, 2, 4], outgoing=[1, 2, 3])
    core.step(Append(N1, N2, 1, 0, 0, (membership_entry(1, 1, joint),), 0))
    drain(core)
    assert core.status().membership == joint
    core.step(Append(N3, N2, 2, 0, 0, (Entry(1, 2, EntryKind.COMMAND, b"x"),), 0))
    (output,) = drain(core)
    assert output.truncate_from == 1
    assert core.status().membership == plain
    assert core.status().membership_index == 0


def test_s37_a_node_truncated_out_of_the_voters_stops_campaigning():
    core = make_core(4, membership([1, 2, 3], [4]), term=1)
    core.step(
        Append(N1, N4, 1, 0, 0, (membership_entry(1, 1, membership([1, 2, 3, 4], outgoing=[1, 2, 3])),), 0)
    )
    drain(core)
    assert core.status().role is Role.FOLLOWER
    core.step(Append(N3, N4, 2, 0, 0, (Entry(1, 2, EntryKind.NOOP, b""),), 0))
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
    core = RaftCore(N2, CoreConfig(), disk.recover(), Random(1).randrange)
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
    """Leader 2 inherits a committed configuration, so only the missing no-op stands in the way."""
    cluster = Cluster()
    cluster.elect(1)
    cluster.hold = lambda m: isinstance(m, AppendReply)
    cluster.elect(2)
    assert cluster[2].status.membership_index <= cluster[2].commit
    with pytest.raises(MembershipBusy):
        cluster[2].core.change_membership(add_learner(4))
    cluster.release()
    change(cluster, 2, add_learner(4))
