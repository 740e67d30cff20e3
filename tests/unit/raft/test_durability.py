"""Persistence: S57, S58, S60, S61, and the core's part of S63, S64."""

from __future__ import annotations

import pytest

from sava.metadata.durable import has_durable_part
from sava.raft import (
    NO_NODE,
    Append,
    AppendReply,
    EntryKind,
    HardState,
    Heartbeat,
    HeartbeatReply,
    InvariantError,
    Role,
    VoteReply,
    VoteRequest,
    decode_membership,
)
from tests.unit.raft.harness import N1, N2, N3, N4, Cluster, drain, entries_of, make_core, membership

THREE = membership([1, 2, 3])


def test_s57_a_vote_leaves_only_with_the_batch_that_makes_it_durable():
    core = make_core(1, THREE)
    core.step(VoteRequest(N2, N1, 1, 0, 0))
    output = core.poll()
    assert output.hard_state == HardState(1, N2, 0)
    assert output.send_now == ()
    assert output.send_after_persist == (VoteReply(N1, N2, 1, True),)
    assert has_durable_part(output)


def test_s57_even_a_refusal_waits_for_the_new_term():
    core = make_core(1, THREE, [5], term=5)
    core.step(VoteRequest(N2, N1, 6, 0, 0))
    output = core.poll()
    assert output.hard_state == HardState(6, NO_NODE, 0)
    assert output.send_after_persist == (VoteReply(N1, N2, 6, False),)


def test_s57_crash_before_the_vote_is_durable_gives_no_second_vote():
    """Node 1 votes for 2 and crashes before the disk has it: the answer never left. It may vote for 3 now."""
    cluster = Cluster()
    cluster[1].auto_persist = False
    cluster[1].core.step(VoteRequest(N2, N1, 1, 0, 0))
    cluster[1].pump()
    assert cluster.wire == []
    cluster[1].crash()
    cluster[1].auto_persist = True
    cluster[1].restart()
    assert cluster[1].status.vote == 0
    cluster[1].core.step(VoteRequest(N3, N1, 1, 0, 0))
    cluster[1].pump()
    assert cluster.wire == [VoteReply(N1, N3, 1, True)]


def test_s57_crash_after_the_vote_is_durable_remembers_it():
    cluster = Cluster()
    cluster[1].core.step(VoteRequest(N2, N1, 1, 0, 0))
    cluster[1].pump()
    cluster[1].crash()
    cluster[1].restart()
    cluster.wire.clear()
    cluster[1].core.step(VoteRequest(N3, N1, 1, 9, 9))
    cluster[1].pump()
    assert cluster.wire == [VoteReply(N1, N3, 1, False)]


def test_s57_a_repeated_vote_whose_batch_is_in_flight_waits_for_it():
    """The vote was polled, its disk is slow, the candidate asks again: the second answer must not overtake
    the disk."""
    core = make_core(1, THREE)
    core.step(VoteRequest(N2, N1, 1, 0, 0))
    first = core.poll()
    core.step(VoteRequest(N2, N1, 1, 0, 0))
    second = core.poll()
    assert second.send_now == ()
    assert second.send_after_persist == (VoteReply(N1, N2, 1, True),)
    core.persisted(first.number)
    core.step(VoteRequest(N2, N1, 1, 0, 0))
    assert core.poll().send_now == (VoteReply(N1, N2, 1, True),)


def test_the_own_vote_counts_only_when_durable():
    """Candidate 1 of three has 2's vote but not its own on disk: one of three."""
    core = make_core(1, THREE)
    core.campaign()
    core.step(VoteReply(N2, N1, 1, True, pre=True))
    output = core.poll()
    assert output.hard_state == HardState(1, N1, 0)
    assert has_durable_part(output)
    core.step(VoteReply(N2, N1, 1, True))
    assert core.status().role is Role.CANDIDATE
    core.persisted(output.number)
    assert core.status().role is Role.LEADER


def test_an_earlier_batchs_completion_does_not_count_the_own_vote():
    """Entries are in flight when the node campaigns. Their completion says nothing about the vote."""
    core = make_core(1, THREE, term=1)
    core.step(Append(N3, N1, 1, 0, 0, entries_of([1]), 0))
    entries = core.poll()
    core.campaign()
    core.step(VoteReply(N2, N1, 2, True, pre=True))
    vote = core.poll()
    core.step(VoteReply(N2, N1, 2, True))
    core.persisted(entries.number)
    assert core.status().role is Role.CANDIDATE
    core.persisted(vote.number)
    assert core.status().role is Role.LEADER


def test_single_voter_is_no_leader_before_its_vote_is_durable():
    core = make_core(1, membership([1]))
    core.campaign()
    assert core.status().role is Role.CANDIDATE
    output = core.poll()
    assert core.status().role is Role.CANDIDATE
    core.persisted(output.number)
    assert core.status().role is Role.LEADER


def test_vote_requests_wait_for_the_candidates_own_disk():
    """Sent earlier, a request could outlive a crash that takes the term and the log's end with it."""
    core = make_core(1, THREE)
    core.campaign()
    core.step(VoteReply(N2, N1, 1, True, pre=True))
    outputs = drain(core, persist=False)
    real = [m for out in outputs for m in out.send_after_persist]
    assert {(m.dst, m.pre) for m in real if isinstance(m, VoteRequest)} == {(2, False), (3, False)}
    assert len(real) == 2
    assert all(isinstance(m, VoteRequest) and m.pre for out in outputs for m in out.send_now)


def test_s58_leader_sends_before_its_disk_has_the_entry():
    """It counts itself only when its own disk has the entry."""
    cluster = Cluster([1, 2])
    cluster.elect(1)
    cluster[1].auto_persist = False
    cluster.propose(1, b"x")
    assert cluster[2].last == 2, "sent before the leader's own sync"
    assert cluster[1].commit == 1, "one of two: the leader does not count itself yet"
    cluster[1].persist()
    cluster.run()
    assert cluster[1].commit == 2


def test_s58_an_unsynced_leaders_entry_survives_iff_a_quorum_had_it():
    for reaches_quorum in (True, False):
        cluster = Cluster()
        cluster.elect(1)
        cluster[1].auto_persist = False
        if not reaches_quorum:
            cluster.isolate(1)
        cluster.propose(1, b"x")
        cluster[1].crash()
        cluster[1].auto_persist = True
        cluster.heal()
        cluster.tick_until_leader(only=[2, 3])
        cluster[1].restart()
        leader = cluster.converge()
        assert cluster[1].machine == cluster[leader].machine == ([b"x"] if reaches_quorum else [])


def test_s58_an_append_is_acknowledged_only_with_the_batch_that_stores_it():
    core = make_core(2, THREE, term=1)
    core.step(Append(N1, N2, 1, 0, 0, entries_of([1, 1]), 0))
    output = core.poll()
    assert [e.index for e in output.entries] == [1, 2]
    assert output.send_now == ()
    assert output.send_after_persist == (AppendReply(N2, N1, 1, True, 2),)


def test_s58_a_duplicate_append_waits_for_the_first_copy_to_be_durable():
    core = make_core(2, THREE, term=1)
    append = Append(N1, N2, 1, 0, 0, entries_of([1, 1]), 0)
    core.step(append)
    first = core.poll()
    core.step(append)
    second = core.poll()
    assert second.entries == ()
    assert second.send_now == ()
    assert second.send_after_persist == (AppendReply(N2, N1, 1, True, 2),)
    core.persisted(first.number)
    core.step(append)
    assert core.poll().send_now == (AppendReply(N2, N1, 1, True, 2),), "all of it is durable: no sync needed"


def test_the_term_is_never_durable_after_entries_of_it():
    """A follower learns term 4 and entries of term 4 from one append: one batch holds both."""
    core = make_core(2, THREE, [1], term=1)
    core.step(Append(N1, N2, 4, 1, 1, entries_of([4, 4], start=2), 0))
    output = core.poll()
    assert output.hard_state is not None
    assert output.hard_state.term == 4
    assert [e.term for e in output.entries] == [4, 4]


def test_a_new_terms_heartbeat_is_answered_when_the_term_is_stored():
    core = make_core(2, THREE)
    core.step(Heartbeat(N1, N2, 3, 0, 7))
    output = core.poll()
    assert output.hard_state == HardState(3, NO_NODE, 0)
    assert output.send_after_persist == (HeartbeatReply(N2, N1, 3, 7),)
    core.persisted(output.number)
    core.step(Heartbeat(N1, N2, 3, 0, 8))
    output = core.poll()
    assert output.send_now == (HeartbeatReply(N2, N1, 3, 8),)
    assert not has_durable_part(output), "nothing new: no sync for a heartbeat"


def test_commit_alone_forces_no_sync_and_rides_along_with_entries():
    core = make_core(2, THREE, [1, 1], term=1)
    core.step(Heartbeat(N1, N2, 1, 1, 1))
    output = core.poll()
    assert output.hard_state is None
    assert not has_durable_part(output)
    core.step(Append(N1, N2, 1, 2, 1, entries_of([1], start=3), 2))
    output = core.poll()
    assert output.hard_state == HardState(1, NO_NODE, 2)
    core.step(Append(N1, N2, 1, 3, 1, entries_of([1], start=4), 2))
    assert core.poll().hard_state is None


def test_s60_completion_of_a_truncated_batch_does_not_count_aba():
    """etcd's async_storage_writes_append_aba_race, stretched to a full ABA:

    batch 1 writes 2@t1, batch 2 (leader of t2) replaces it by 2@t2, batch 3 (leader of t3) brings 2@t1 back.
    Then batch 1 completes. What stands in memory is what batch 1 wrote, but batch 2 may reach the disk next:
    a crash there leaves 2@t2. So entry 2 is not durable before batch 3 is."""
    core = make_core(2, membership([1, 2, 3, 4, 5]), [1], term=1)
    old = entries_of([1], start=2)
    core.step(Append(N1, N2, 1, 1, 1, old, 0))
    first = core.poll()
    core.step(Append(N3, N2, 2, 1, 1, entries_of([2], start=2), 0))
    second = core.poll()
    core.step(Append(N4, N2, 3, 1, 1, old, 0))
    third = core.poll()
    assert [(out.truncate_from, [e.term for e in out.entries]) for out in (first, second, third)] == [
        (None, [1]),
        (2, [2]),
        (2, [1]),
    ]
    core.persisted(first.number)
    assert core.status().durable_index == 1
    core.persisted(second.number)
    assert core.status().durable_index == 1
    core.step(Append(N4, N2, 3, 1, 1, old, 2))
    (output,) = drain(core, persist=False)
    assert output.send_now == ()
    assert [e.index for e in output.apply] == [1], "2 is committed, but not durable here"
    core.persisted(third.number)
    assert core.status().durable_index == 2


def test_s60_completion_still_counts_for_what_was_not_truncated():
    """Batch 1 wrote 2, 3 and 4; a new leader replaces 4. Batch 1's completion makes 2 and 3 durable."""
    core = make_core(2, THREE, [1], term=1)
    core.step(Append(N1, N2, 1, 1, 1, entries_of([1, 1, 1], start=2), 0))
    first = core.poll()
    core.step(Append(N3, N2, 2, 3, 1, entries_of([2], start=4), 0))
    second = core.poll()
    assert second.truncate_from == 4
    core.persisted(first.number)
    assert core.status().durable_index == 3
    core.persisted(second.number)
    assert core.status().durable_index == 4


def test_s60_stale_self_acknowledgement_commits_nothing():
    """The old leader of term 1 has its own entry in flight when it is deposed and elected again. Group of
    two."""
    cluster = Cluster([1, 2])
    cluster.elect(1)
    cluster[1].auto_persist = False
    cluster.isolate(1)
    cluster.propose(1, b"lost")
    core = cluster[1].core
    core.step(Append(N2, N1, 2, 1, 1, entries_of([2], start=2), 0))
    cluster[1].pump()
    (first, second) = cluster[1].unwritten
    assert second.truncate_from == 2
    core.persisted(first.number)
    assert core.status().durable_index == 1
    core.persisted(second.number)
    assert core.status().durable_index == 2


def test_s60_completions_are_cumulative_and_older_ones_are_ignored():
    """Openraft #1960: out-of-order completions left a single voter stuck. A later number covers the earlier
    ones."""
    core = make_core(1, membership([1]))
    core.campaign()
    core.persisted(core.poll().number)
    numbers = []
    for n in range(3):
        core.propose([b"%d" % n])
        numbers.append(core.poll().number)
    core.persisted(numbers[2])
    assert core.status().commit == 4
    core.persisted(numbers[0])
    core.persisted(numbers[1])
    assert (core.status().commit, core.status().durable_index) == (4, 4)


def test_s60_a_completion_acknowledges_its_own_batch_and_nothing_after_it():
    """The leader counts itself as far as its disk is, not as far as its log is."""
    core = make_core(1, membership([1]))
    core.campaign()
    drain(core)
    core.propose([b"x"])
    first = core.poll()
    core.propose([b"y"])
    second = core.poll()
    core.persisted(first.number)
    assert (core.status().commit, core.status().durable_index) == (2, 2)
    core.persisted(second.number)
    assert core.status().commit == 3


def test_s60_entries_truncated_before_a_poll_never_reach_the_disk():
    core = make_core(2, THREE, [1], term=1)
    core.step(Append(N1, N2, 1, 1, 1, entries_of([1, 1], start=2), 0))
    core.step(Append(N3, N2, 2, 1, 1, entries_of([2], start=2), 0))
    output = core.poll()
    assert output.truncate_from is None
    assert [(e.index, e.term) for e in output.entries] == [(2, 2)]


def test_s60_two_truncations_between_polls_are_told_as_the_lower_one():
    core = make_core(2, THREE, [1, 1, 1, 1], term=1)
    core.step(Append(N1, N2, 2, 3, 1, entries_of([2], start=4), 0))
    core.step(Append(N3, N2, 3, 1, 1, entries_of([3, 3, 3, 3], start=2), 0))
    output = core.poll()
    assert output.truncate_from == 2
    assert [(e.index, e.term) for e in output.entries] == [(2, 3), (3, 3), (4, 3), (5, 3)]


def test_s61_slow_disk_on_the_leader_only():
    """Commit proceeds through the followers; the leader applies nothing that it does not hold durably
    itself."""
    cluster = Cluster()
    cluster.elect(1)
    cluster[1].auto_persist = False
    cluster.propose(1, b"x")
    assert cluster[1].commit == 2
    assert cluster[1].machine == []
    assert cluster[2].machine == [b"x"]
    cluster[1].persist()
    cluster.run()
    assert cluster[1].machine == [b"x"]
    assert cluster[1].peer(1).match == 2


def test_s63_full_power_loss_keeps_what_was_acknowledged():
    cluster = Cluster()
    cluster.elect(1)
    cluster.propose(1, b"a", b"b")
    for node in (1, 2, 3):
        cluster[node].crash()
    for node in (1, 2, 3):
        cluster[node].restart()
    leader = cluster.converge()
    assert cluster[leader].machine == [b"a", b"b"]


def test_s64_restart_hands_out_each_committed_entry_once():
    cluster = Cluster([1])
    cluster.elect(1)
    cluster.propose(1, b"a", b"b")
    cluster[1].crash()
    cluster[1].restart()
    cluster.tick(2)
    assert cluster[1].machine == [b"a", b"b"]


def test_checkpoint_is_the_state_after_all_polled_outputs():
    core = make_core(2, THREE, [1], term=1)
    core.step(Append(N1, N2, 3, 1, 1, entries_of([3, 3], start=2), 2))
    assert not core.can_checkpoint()
    with pytest.raises(InvariantError):
        core.checkpoint()
    core.poll()
    checkpoint = core.checkpoint()
    assert checkpoint.hard_state == HardState(3, NO_NODE, 2)
    assert [(e.index, e.term) for e in checkpoint.entries] == [(1, 1), (2, 3), (3, 3)]
    assert checkpoint.compacted_term == 0


def test_checkpoint_and_disk_agree_on_every_node():
    cluster = Cluster()
    cluster.elect(1)
    cluster.propose(1, b"a", b"b")
    cluster.tick(3)
    for node in cluster.nodes.values():
        checkpoint = node.core.checkpoint()
        assert list(checkpoint.entries) == node.disk.entries
        assert (checkpoint.hard_state.term, checkpoint.hard_state.vote) == (
            node.disk.hard_state.term,
            node.disk.hard_state.vote,
        )


def test_outputs_are_numbered_without_gaps():
    cluster = Cluster()
    cluster.elect(1)
    cluster.propose(1, b"a")
    cluster.tick(3)
    numbers = [out.number for out in cluster[1].outputs]
    assert numbers == list(range(1, len(numbers) + 1))


def test_acknowledging_what_was_never_asked_for_stops_the_node():
    core = make_core(1, THREE)
    with pytest.raises(InvariantError):
        core.persisted(1)
    with pytest.raises(InvariantError):
        core.applied(1)


def test_every_term_opens_with_an_entry_of_its_own():
    """Empty, except for the first of all: it carries the group's bootstrap configuration."""
    cluster = Cluster()
    cluster.elect(1)
    cluster.propose(1, b"x")
    cluster.elect(2)
    kinds = [(e.term, e.kind) for e in cluster[2].disk.entries]
    assert kinds == [(1, EntryKind.MEMBERSHIP), (1, EntryKind.COMMAND), (2, EntryKind.NOOP)]
    assert decode_membership(cluster[2].disk.entries[0].data) == THREE
