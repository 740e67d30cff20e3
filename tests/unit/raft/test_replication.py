"""Replication: S19–S29."""

from __future__ import annotations

import pytest

from sava.raft import (
    Append,
    AppendReply,
    Busy,
    CoreConfig,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatReply,
    InvariantError,
    NodeId,
    NotLeader,
    Role,
    VoteReply,
    encode_membership,
)
from tests.unit.raft.harness import (
    CONFIG,
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

# Figure 7 of the paper: the leader of term 8 and six possible followers.
FIGURE_7_LEADER = [1, 1, 1, 4, 4, 5, 5, 6, 6, 6]
FIGURE_7_FOLLOWERS = [
    [1, 1, 1, 4, 4, 5, 5, 6, 6],
    [1, 1, 1, 4],
    [1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 6],
    [1, 1, 1, 4, 4, 5, 5, 6, 6, 6, 7, 7],
    [1, 1, 1, 4, 4, 4, 4],
    [1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3],
]


def test_s19_figure_7_the_leader_makes_all_six_logs_its_own():
    logs = {1: FIGURE_7_LEADER} | {n + 2: log for n, log in enumerate(FIGURE_7_FOLLOWERS)}
    cluster = Cluster(range(1, 8), logs=logs, terms=dict.fromkeys(range(1, 8), 7))
    cluster.elect(1)
    cluster.tick(5)
    for node in range(2, 8):
        assert cluster[node].terms() == [*FIGURE_7_LEADER, 8]
        assert cluster[node].disk.terms() == [*FIGURE_7_LEADER, 8]
        assert cluster[node].commit == 11


@pytest.mark.parametrize("follower", FIGURE_7_FOLLOWERS)
def test_s19_each_of_them_is_found_in_few_probes(follower):
    """One probe per distinct term at most, whichever side has the odd entries."""
    cluster = Cluster(
        logs={1: FIGURE_7_LEADER, 2: follower, 3: FIGURE_7_LEADER}, terms=dict.fromkeys((1, 2, 3), 7)
    )
    cluster.elect(1)
    rejected = [m for m in cluster.delivered if isinstance(m, AppendReply) and m.src == 2 and not m.accepted]
    assert len(rejected) <= 3


def test_s20_figure_8_an_old_entry_is_not_committed_by_counting():
    """Leader 1 of term 4 has replicated entry 2 of term 2 to a majority, but nothing of term 4 yet: 5 with an
    entry of term 3 could still win and replace it."""
    cluster = Cluster(
        [1, 2, 3, 4, 5],
        logs={1: [1, 2], 2: [1], 3: [1], 4: [1], 5: [1, 3]},
        terms=dict.fromkeys(range(1, 6), 3),
        config=CoreConfig(max_append_bytes=1, keep_entries=0),
    )
    # The followers of term 4 take only the old entry: the no-op (index 3) is kept from them.
    cluster.drop = lambda m: (
        isinstance(m, Append) and any(e.index == 3 for e in m.entries) and cluster[m.dst].last >= 2
    )
    cluster.isolate(5)
    cluster[1].core.campaign()
    cluster.run()
    cluster.tick(2)
    assert cluster[1].role is Role.LEADER
    assert [cluster[n].disk.terms() for n in (2, 3, 4)] == [[1, 2]] * 3
    assert cluster[1].peer(2).match == cluster[1].peer(3).match == 2
    assert cluster[1].commit == 0, "entry 2 is on a majority and still not committed"
    cluster.heal()
    cluster.tick(3)
    assert cluster[1].commit == 3, "the no-op commits, and entry 2 with it"


@pytest.mark.parametrize(
    ("leader", "follower", "hint", "next_prev"),
    [
        # (leader's log, follower's log, follower's hint (index, term), leader's next prev) after probing at
        # the end
        ([1, 3, 3, 3, 5, 5, 5, 5, 5], [1, 1, 1, 1, 2, 2], (6, 2), 1),
        ([1, 2, 2], [1, 1, 1, 1], (3, 1), 1),
        ([1, 1, 1, 1, 4, 4], [1, 1, 1, 1, 3, 3, 3, 3], (6, 3), 4),
        ([1, 1], [], (0, 0), 0),
        ([1, 1, 1, 1, 1], [1, 1], (2, 1), 2),
        ([2, 2, 2], [1, 3, 3], (1, 1), 0),
    ],
)
def test_s21_fast_reject_skips_whole_terms_on_both_sides(leader, follower, hint, next_prev):
    prev = len(leader)
    core = make_core(2, THREE, follower, term=6)
    core.step(Append(N1, N2, 6, prev, leader[-1], (), 0))
    reply = only(drain(core), AppendReply)
    assert (reply.accepted, reply.index, reply.hint_index, reply.hint_term) == (False, prev, *hint)

    head = _leader(leader, term=6)
    head.step(HeartbeatReply(N2, N1, 6, 0))
    drain(head)
    head.step(AppendReply(N2, N1, 6, False, prev, *hint))
    probe = sent(drain(head), Append)[-1]
    assert probe.prev_index == next_prev


def _leader(log, term, config=CONFIG, members=THREE):
    """Node 1 as leader of ``term`` over ``log``, its no-op out to the others."""
    core = make_core(1, members, log, term=term - 1, config=config)
    core.campaign()
    for voter in (2, 3):
        core.step(VoteReply(NodeId(voter), N1, term, True, pre=True))
    drain(core)
    core.step(VoteReply(N2, N1, term, True))
    assert core.status().role is Role.LEADER
    drain(core)
    return core


def test_s22_duplicate_appends_never_truncate_a_matching_suffix():
    """The second of two pipelined appends has arrived; then the first comes again, late. It ends earlier than
    our log, which says nothing about what follows."""
    core = make_core(2, THREE, term=1)
    first = Append(N1, N2, 1, 0, 0, entries_of([1, 1]), 0)
    both = Append(N1, N2, 1, 0, 0, entries_of([1, 1, 1, 1]), 0)
    core.step(both)
    drain(core)
    for late in (first, Append(N1, N2, 1, 1, 1, (), 0), first):
        core.step(late)
        outputs = drain(core)
        assert core.status().last_index == 4
        assert all(out.truncate_from is None for out in outputs)
        reply = only(outputs, AppendReply)
        assert reply.accepted
        assert reply.index == late.prev_index + len(late.entries), "acknowledges no more than it compared"


def test_s22_reordered_appends_converge():
    """Every append to 2 is held back and delivered in reverse order."""
    cluster = Cluster()
    cluster.elect(1)
    cluster.hold = lambda m: isinstance(m, Append) and m.dst == 2
    for n in range(6):
        cluster.propose(1, b"%d" % n)
    cluster.held.reverse()
    cluster.release()
    cluster.tick(5)
    assert cluster[2].machine == cluster[1].machine == [b"%d" % n for n in range(6)]


def test_s22_a_conflicting_suffix_is_replaced_from_its_first_entry():
    core = make_core(2, THREE, [1, 1, 2, 2], term=3, commit=1)
    core.step(Append(N1, N2, 3, 1, 1, entries_of([1, 3], start=2), 0))
    (output,) = drain(core)
    assert output.truncate_from == 3
    assert [e.term for e in output.entries] == [3]
    assert core.status().last_index == 3


def test_s22_previous_term_must_match():
    """Same index, other term: not our predecessor."""
    core = make_core(2, THREE, [1, 1], term=3)
    core.step(Append(N1, N2, 3, 2, 2, entries_of([3], start=3), 3))
    reply = only(drain(core), AppendReply)
    assert not reply.accepted
    assert (core.status().last_index, core.status().commit) == (2, 0)


def test_s23_an_append_below_commit_is_answered_at_commit():
    """The log stays untouched."""
    core = make_core(2, THREE, [1, 1, 1, 1], term=1, commit=3)
    core.step(Append(N1, N2, 1, 1, 1, entries_of([1], start=2), 2))
    outputs = drain(core)
    reply = only(outputs, AppendReply)
    assert (reply.accepted, reply.index) == (True, 3)
    assert core.status().last_index == 4
    assert core.status().commit == 3


@pytest.mark.parametrize(("leader_commit", "expected"), [(1, 1), (2, 2), (5, 2)])
def test_s24_commit_goes_no_further_than_what_the_append_compared(leader_commit, expected):
    """Our log continues with entries of an old leader beyond what this append has checked."""
    core = make_core(2, THREE, [1, 1, 1, 1, 1], term=2)
    core.step(Append(N1, N2, 2, 2, 1, (), leader_commit))
    drain(core)
    assert core.status().commit == expected


def test_s24_truncation_below_commit_stops_the_node():
    core = make_core(2, THREE, [1, 1, 1], term=3, commit=3)
    log = core._state.log
    with pytest.raises(InvariantError):
        log.truncate_from(3)


def test_s25_heartbeat_never_carries_commit_above_match():
    """2 has an unrelated entry at index 2, left from an old leader, and cannot be reached by appends. A
    heartbeat with the raw commit would make it apply that entry."""
    cluster = Cluster(logs={1: [1], 2: [1, 1, 1], 3: [1]}, terms=dict.fromkeys((1, 2, 3), 2))
    cluster.drop = lambda m: isinstance(m, Append) and m.dst == 2
    cluster[2].crash()
    cluster.elect(3)
    cluster[2].restart()
    cluster.propose(3, b"x", b"y")
    cluster.tick(5)
    assert cluster[3].commit == 4
    told = [m.commit for m in cluster.delivered if isinstance(m, Heartbeat) and m.dst == 2]
    assert told
    assert set(told) == {0}
    assert cluster[2].commit == 0
    cluster.heal()
    cluster.tick(5)
    assert cluster[2].machine == cluster[1].machine


def test_s25_late_rejection_is_not_taken_for_lost_data():
    """A rejection from before the logs met arrives after 2 has acknowledged more (openraft #1500):
    ignored."""
    head = _leader([1, 1], term=2)
    head.step(AppendReply(N2, N1, 2, True, 3))
    drain(head)
    before = head.status()
    head.step(AppendReply(N2, N1, 2, False, 2, 0, 0))
    head.step(AppendReply(N2, N1, 2, False, 3, 1, 1))
    assert sent(drain(head)) == []
    assert head.status() == before


def test_s25_stale_rejection_while_probing_is_ignored():
    head = _leader([1, 1, 1], term=2)
    head.step(AppendReply(N3, N1, 2, False, 3, 1, 1))
    drain(head)
    (peer,) = [p for p in head.status().peers if p.node == 3]
    assert peer.next == 2
    head.step(AppendReply(N3, N1, 2, False, 3, 0, 0))
    (peer,) = [p for p in head.status().peers if p.node == 3]
    assert peer.next == 2, "we do not probe at 3 any more"


def _window(count=1 << 20, size=1 << 30):
    return CoreConfig(
        keep_entries=0,
        max_inflight=count,
        max_inflight_bytes=size,
        max_append_bytes=100,
        snapshot_chunk_bytes=16,
    )


@pytest.mark.parametrize("config", [_window(count=2), _window(size=150)])
def test_s26_full_window_lost_recovers_by_an_empty_append(config):
    """The window to 2 fills (by count, or by bytes) and every append in it is lost. The answer to the next
    heartbeat brings one empty append; its rejection shows where 2 stands."""
    cluster = Cluster(config=config)
    cluster.elect(1)
    cluster.drop = lambda m: isinstance(m, Append) and m.dst == 2
    for n in range(10):
        cluster.propose(1, b"%09d" % n * 9)
    lost_next = cluster[1].peer(2).next
    assert lost_next < cluster[1].last, "the window stopped the leader"
    cluster.heal()
    cluster.tick(1)
    empties = [m for m in cluster.delivered if isinstance(m, Append) and m.dst == 2 and not m.entries]
    assert any(m.prev_index == lost_next - 1 for m in empties)
    cluster.tick(5)
    assert cluster[2].machine == cluster[1].machine
    assert len(cluster[2].machine) == 10


def test_s26_window_bounds_what_is_in_flight():
    head = _leader([], term=1, config=_window(count=3))
    head.step(AppendReply(N2, N1, 1, True, 1))
    drain(head)
    for n in range(10):
        head.propose([b"%090d" % n])
        drain(head)
    (peer,) = [p for p in head.status().peers if p.node == 2]
    assert peer.next == 1 + 1 + 3
    head.step(AppendReply(N2, N1, 1, True, 2))
    assert len(sent(drain(head), Append)) == 1, "one acknowledged, one more sent"


def test_s27_probing_peer_returns_to_replicate_on_a_heartbeat_reply():
    """The peer was reported unreachable and its probe was lost. Each answered heartbeat allows one more
    probe."""
    cluster = Cluster()
    cluster.elect(1)
    cluster.drop = lambda m: isinstance(m, Append) and m.dst == 2
    cluster[1].core.peer_unreachable(N2)
    cluster.propose(1, b"x")
    assert cluster[1].peer(2).state == "probe"
    cluster.propose(1, b"y")
    cluster.heal()
    cluster.tick(1)
    assert cluster[1].peer(2).state == "replicate"
    cluster.tick(1)
    assert cluster[2].machine == [b"x", b"y"]


def test_s27_one_probe_per_heartbeat():
    head = _leader([], term=1)
    for n in range(5):
        head.propose([b"%d" % n])
        drain(head)
    head.tick()
    probes = [m for m in sent(drain(head), Append) if m.dst == 3]
    assert probes == [], "a probe is out; nothing more before an answer"
    head.step(HeartbeatReply(N3, N1, 1, 1))
    assert len([m for m in sent(drain(head), Append) if m.dst == 3]) == 1


def test_s28_followers_learn_of_a_commit_before_the_next_proposal():
    cluster = Cluster()
    cluster.elect(1)
    cluster.propose(1, b"x")
    assert [cluster[n].commit for n in (1, 2, 3)] == [2, 2, 2]


def test_s28_a_lost_commit_notice_is_made_good_by_a_heartbeat():
    cluster = Cluster()
    cluster.elect(1)
    cluster.drop = lambda m: isinstance(m, Append) and not m.entries
    cluster.propose(1, b"x")
    assert cluster[2].commit == 1
    cluster.tick(1)
    assert cluster[2].commit == 2


def test_s29_uncommitted_bytes_are_capped_and_empty_entries_are_not():
    """Followers are gone: the leader takes what fits and refuses the rest, before any effect."""
    config = CoreConfig(max_uncommitted_bytes=100, keep_entries=0)
    cluster = Cluster(config=config)
    cluster.elect(1)
    cluster.isolate(1)
    cluster[1].core.propose([b"a" * 60])
    last = cluster[1].last
    with pytest.raises(Busy):
        cluster[1].core.propose([b"b" * 60])
    assert cluster[1].last == last
    assert cluster[1].core.propose([b"", b""]) == range(last + 1, last + 3), "empty commands are exempt"
    cluster.heal()
    cluster.tick(3)
    assert cluster[1].commit == last + 2
    cluster.propose(1, b"c" * 60)
    assert cluster[1].machine == [b"a" * 60, b"", b"", b"c" * 60]


def test_s29_a_proposal_larger_than_the_cap_passes_if_it_is_alone():
    cluster = Cluster(config=CoreConfig(max_uncommitted_bytes=10, keep_entries=0))
    cluster.elect(1)
    cluster.propose(1, b"x" * 50)
    assert cluster[1].commit == 2


def test_s29_a_new_leader_counts_the_uncommitted_tail_it_inherits():
    core = make_core(1, membership([1]), [1, 1, 1], term=1, config=CoreConfig(max_uncommitted_bytes=10))
    core.campaign()
    core.persisted(core.poll().number)
    with pytest.raises(Busy):
        core.propose([b"1234567890"])
    drain(core)
    core.propose([b"1234567890"])


def test_an_append_is_cut_by_bytes_but_carries_at_least_one_entry():
    config = CoreConfig(max_append_bytes=300, keep_entries=0)
    cluster = Cluster(config=config)
    cluster.elect(1)
    cluster.propose(1, *[b"%0100d" % n for n in range(7)], b"x" * 1000)
    sizes = [len(m.entries) for m in cluster.delivered if isinstance(m, Append) and m.dst == 2 and m.entries]
    assert sizes == [1, 2, 2, 2, 1, 1]
    assert cluster[2].machine == cluster[1].machine


def test_applying_is_paginated():
    config = CoreConfig(max_apply_bytes=300, keep_entries=0)
    cluster = Cluster(config=config)
    cluster.elect(1)
    cluster.propose(1, *[b"%0100d" % n for n in range(7)])
    pages = [len(out.apply) for out in cluster[2].outputs if out.apply]
    assert pages == [1, 2, 2, 2, 1]


def test_proposals_between_two_polls_share_one_message_per_peer():
    cluster = Cluster()
    cluster.elect(1)
    for n in range(50):
        cluster[1].core.propose([b"%d" % n])
    output = cluster[1].core.poll()
    appends = [m for m in output.send_now if isinstance(m, Append)]
    assert [len(m.entries) for m in appends] == [50, 50]
    assert len(output.entries) == 50
    payload = output.entries[0].data
    assert payload is appends[0].entries[0].data, "one bytes object from proposal to disk and wire"


def test_proposals_are_refused_by_followers_with_a_hint():
    cluster = Cluster()
    cluster.elect(1)
    with pytest.raises(NotLeader) as refusal:
        cluster[2].core.propose([b"x"])
    assert refusal.value.leader == 1


def test_propose_returns_the_indexes():
    cluster = Cluster()
    cluster.elect(1)
    assert cluster[1].core.propose([b"a", b"b"]) == range(2, 4)
    assert cluster[1].core.propose([]) == range(4, 4)


def test_leader_overwrites_nothing_of_its_own():
    """An acknowledgement beyond the leader's end means that the leader lost entries: it must stop."""
    head = _leader([], term=1)
    with pytest.raises(InvariantError):
        head.step(AppendReply(N2, N1, 1, True, 99))


def test_commit_beyond_the_log_stops_the_follower():
    core = make_core(2, THREE, [1], term=1)
    with pytest.raises(InvariantError):
        core.step(Heartbeat(N1, N2, 1, 5, 1))


def test_membership_entry_of_an_append_takes_effect_when_appended():
    core = make_core(4, membership([]), term=1)
    entry = Entry(1, 1, EntryKind.MEMBERSHIP, encode_membership(membership([1, 2, 3, 4])))
    core.step(Append(N1, N4, 1, 0, 0, (entry,), 0))
    assert core.status().role is Role.FOLLOWER
    assert core.status().membership == membership([1, 2, 3, 4])
    assert core.status().commit == 0
