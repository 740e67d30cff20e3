"""Snapshots on their way: S49–S53, S55, and the core's part of S54."""

from __future__ import annotations

import hashlib

from sava.raft import (
    NO_NODE,
    Append,
    AppendReply,
    CoreConfig,
    Entry,
    EntryKind,
    HardState,
    Heartbeat,
    HeartbeatReply,
    MembershipChange,
    Message,
    Role,
    SnapshotChunk,
    SnapshotMeta,
    SnapshotReply,
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
CONTENT = b"0123456789abcdef" * 3


def meta_of(index=10, term=2, members=THREE, content=CONTENT) -> SnapshotMeta:
    return SnapshotMeta(index, term, members, len(content), hashlib.sha256(content).digest())


def chunk(meta, offset, *, src=1, dst=2, term=2, content=CONTENT, length=16) -> SnapshotChunk:
    return SnapshotChunk(src, dst, term, meta, offset, content[offset : offset + length], 0)


def behind(count: int = 30, **options) -> Cluster:
    """Leader 1 has compacted everything; follower 3 was away and has nothing."""
    cluster = Cluster(**options)
    cluster.elect(1)
    cluster.isolate(3)
    for n in range(count):
        cluster.propose(1, b"%04d" % n)
    cluster[1].snapshot()
    assert cluster[1].status.first_index == cluster[1].last + 1
    return cluster


def test_s49_a_follower_behind_the_log_gets_the_snapshot_then_the_log():
    cluster = behind()
    cluster.propose(1, b"after")
    cluster.heal()
    cluster.tick(3)
    assert cluster[3].machine == cluster[1].machine
    assert cluster[3].machine[-1] == b"after"
    assert cluster[3].disk.snapshot == cluster[1].disk.snapshot
    assert cluster[1].peer(3).state == "replicate"
    chunks = [m for m in cluster.delivered if isinstance(m, SnapshotChunk)]
    assert len(chunks) > 5
    assert [m.offset for m in chunks] == sorted({m.offset for m in chunks}), "each chunk once, in order"


def test_s49_nothing_leaves_or_applies_before_the_install_is_durable():
    """The order on the follower: chunks, install, durable, then acknowledgement. Its disk is slow at
    install."""
    cluster = behind()
    cluster[3].auto_persist = False
    cluster.heal()
    for _ in range(40):
        if cluster[3].core._state.install_number is not None:
            break
        cluster[3].persist()
        cluster.tick(1)
    assert cluster[3].core._state.install_number is not None
    cluster.tick(1)
    assert cluster[3].applied == 1
    assert cluster[3].status.commit == 1, "the old log stays in force"
    assert not any(
        isinstance(m, AppendReply) and m.src == 3 and m.index > 1 and m.accepted for m in cluster.delivered
    )
    cluster[3].persist()
    cluster[3].auto_persist = True
    cluster.tick(2)
    assert cluster[3].machine == cluster[1].machine


def test_s50_a_snapshot_at_the_last_index_returns_to_replicate():
    cluster = behind()
    cluster.heal()
    cluster.tick(3)
    assert cluster[1].peer(3).state == "replicate"
    assert cluster[1].peer(3).match == cluster[1].last
    cluster.propose(1, b"x")
    assert cluster[3].machine[-1] == b"x"


def test_s50_a_snapshot_behind_our_log_is_followed_by_the_next_one():
    """While 3 installs, the leader compacts beyond that snapshot. The acknowledgement does not reconnect:
    probe, and the newer snapshot follows."""
    cluster = behind()
    cluster[3].auto_persist = False
    cluster.heal()
    for _ in range(40):
        if cluster[3].core._state.install_number is not None:
            break
        cluster[3].persist()
        cluster.tick(1)
    for n in range(5):
        cluster.propose(1, b"more%d" % n)
    cluster[1].snapshot()
    cluster[3].auto_persist = True
    cluster[3].persist()
    cluster.tick(5)
    assert cluster[1].peer(3).state == "replicate"
    assert cluster[3].machine == cluster[1].machine


def test_s50_an_append_reply_that_reconnects_ends_the_snapshot_state():
    """3's log was complete all along and its old acknowledgement arrives during the transfer."""
    cluster = behind(count=3)
    cluster.heal()
    cluster.hold = lambda m: isinstance(m, SnapshotChunk)
    cluster.tick(2)
    assert cluster[1].peer(3).state == "snapshot"
    cluster[1].core.step(AppendReply(N3, N1, 1, True, cluster[1].last))
    assert cluster[1].peer(3).state == "replicate"


def test_s51_failed_transfer_returns_to_probe_and_starts_again():
    cluster = behind()
    cluster.heal()
    cluster.hold = lambda m: isinstance(m, SnapshotChunk)
    cluster.tick(1)
    cluster[1].core.snapshot_failed(N3)
    assert cluster[1].peer(3).state == "probe"
    cluster.hold, cluster.held = None, []
    cluster.tick(3)
    assert cluster[3].machine == cluster[1].machine


def test_s51_transfer_without_progress_times_out_and_blocks_nobody():
    config = CoreConfig(keep_entries=0, snapshot_chunk_bytes=16, snapshot_timeout_ticks=20)
    cluster = behind(config=config)
    cluster.heal()
    cluster.drop = lambda m: isinstance(m, SnapshotChunk)
    cluster.tick(1)
    old = cluster[1].disk.snapshot
    for n in range(45):
        cluster.propose(1, b"%d" % n)
        if n == 5:
            cluster[1].snapshot()
        cluster.tick(1)
    assert cluster[2].machine == cluster[1].machine
    assert len(cluster[2].machine) == 30 + 45
    tried = [c.meta for out in cluster[1].outputs for c in out.send_chunks]
    assert tried[0] == old
    assert tried[-1].index > old.index, "back at probing, the transfer begins anew with the newest snapshot"
    cluster.drop = None
    cluster.tick(60)
    assert cluster[3].machine == cluster[1].machine


def test_s51_no_transfer_to_a_peer_that_was_never_heard():
    """A dead peer costs one probe per heartbeat answer it does not give, not a snapshot."""
    cluster = behind()
    cluster.tick(40)
    assert not any(out.send_chunks for out in cluster[1].outputs)
    assert cluster[1].peer(3).state in ("probe", "replicate")


def test_s51_lost_chunk_is_sent_again_at_a_heartbeat():
    cluster = behind()
    cluster.heal()
    lost: list[Message] = []

    def lose_one(message):
        if isinstance(message, SnapshotChunk) and message.offset == 32 and not lost:
            lost.append(message)
            return True
        return False

    cluster.drop = lose_one
    cluster.tick(4)
    assert lost
    assert cluster[3].machine == cluster[1].machine


def test_s52_duplicate_chunks_are_idempotent_and_a_gap_is_asked_for():
    core = make_core(2, THREE, term=2)
    meta = meta_of()
    core.step(chunk(meta, 0))
    core.step(chunk(meta, 0))
    core.step(chunk(meta, 32))
    outputs = drain(core)
    assert [(c.offset, c.data) for out in outputs for c in out.chunks] == [(0, CONTENT[:16])]
    assert [m.next_offset for m in sent(outputs, SnapshotReply)] == [16, 16, 16]


def test_s52_leader_does_not_multiply_duplicated_answers():
    cluster = behind()
    cluster.heal()
    cluster.hold = lambda m: isinstance(m, SnapshotReply)
    cluster.tick(1)
    (answer,) = [m for m in cluster.held if isinstance(m, SnapshotReply)]
    before = len(cluster[1].outputs)
    for _ in range(5):
        cluster[1].core.step(answer)
    cluster[1].pump()
    assert sum(len(out.send_chunks) for out in cluster[1].outputs[before:]) == 1


def test_s52_a_newer_snapshot_resets_the_receiver_and_stragglers_do_not():
    core = make_core(2, THREE, term=2)
    old, new = meta_of(index=10), meta_of(index=20, content=CONTENT[::-1])
    core.step(chunk(old, 0))
    core.step(chunk(new, 0, content=CONTENT[::-1]))
    core.step(chunk(old, 16))
    core.step(chunk(new, 16, content=CONTENT[::-1]))
    outputs = drain(core)
    written = [(c.meta.index, c.offset) for out in outputs for c in out.chunks]
    assert written == [(10, 0), (20, 0), (20, 16)]


def test_s52_new_leader_resumes_the_old_ones_transfer_by_offset():
    """(index, term, digest) names the content: leader 3 of term 3 sends the same snapshot and is told to go
    on at 32."""
    core = make_core(2, THREE, term=2)
    meta = meta_of()
    core.step(chunk(meta, 0))
    core.step(chunk(meta, 16))
    drain(core)
    core.step(chunk(meta, 0, src=3, term=3))
    (reply,) = sent(drain(core), SnapshotReply)
    assert (reply.dst, reply.term, reply.next_offset) == (3, 3, 32)
    core.step(chunk(meta, 32, src=3, term=3))
    outputs = drain(core)
    assert [out.install for out in outputs if out.install] == [meta]
    assert core.status().commit == 10


def test_s52_new_leader_with_an_older_snapshot_starts_over():
    core = make_core(2, THREE, term=2)
    core.step(chunk(meta_of(index=20), 0))
    core.step(chunk(meta_of(index=10), 0, src=3, term=3))
    written = [(c.meta.index, c.offset) for out in drain(core) for c in out.chunks]
    assert written == [(20, 0), (10, 0)]


def test_s52_follower_restart_mid_transfer_starts_over():
    cluster = behind()
    cluster.heal()
    cluster.hold = lambda m: isinstance(m, SnapshotChunk) and m.offset >= 64
    cluster.tick(1)
    cluster[3].crash()
    cluster[3].restart()
    cluster.release()
    cluster.tick(5)
    assert cluster[3].machine == cluster[1].machine


def test_s53_a_snapshot_up_to_commit_is_ignored_and_answered():
    core = make_core(2, THREE, [1] * 12, term=2, commit=11)
    core.step(chunk(meta_of(index=10, term=1), 0))
    outputs = drain(core)
    assert not any(out.chunks or out.install for out in outputs)
    assert sent(outputs) == [AppendReply(N2, N1, 2, True, 11)]


def test_s53_only_commit_moves_when_the_log_holds_the_snapshots_entry():
    """The log goes beyond the snapshot, in entries this node has acknowledged. They must stay."""
    core = make_core(2, THREE, [1] * 12, term=2, commit=3)
    core.step(chunk(meta_of(index=10, term=1), 0))
    outputs = drain(core)
    assert not any(out.chunks or out.install or out.truncate_from for out in outputs)
    assert sent(outputs) == [AppendReply(N2, N1, 2, True, 10)]
    status = core.status()
    assert (status.commit, status.last_index, status.snapshot_index) == (10, 12, 0)


def test_s53_a_snapshot_of_another_term_replaces_the_uncommitted_tail():
    core = make_core(2, THREE, [1] * 12, term=2, commit=3)
    meta = meta_of(index=10, term=2)
    for offset in (0, 16, 32):
        core.step(chunk(meta, offset))
    outputs = drain(core)
    (install,) = [out for out in outputs if out.install]
    assert install.truncate_from == 4, "conflicting entries leave the disk with it"
    status = core.status()
    assert (status.commit, status.applied, status.last_index, status.first_index) == (10, 10, 10, 11)
    assert core.term_at(10) == 2
    assert sent(outputs)[-1] == AppendReply(N2, N1, 2, True, 10)


def _pending_install():
    """A voter with a complete snapshot whose install is not durable yet."""
    core = make_core(2, THREE, [1], term=2)
    meta = meta_of()
    for offset in (0, 16, 32):
        core.step(chunk(meta, offset))
    outputs = drain(core, persist=False)
    (install,) = [out for out in outputs if out.install]
    return core, install


def test_m30_node_with_a_pending_snapshot_does_not_campaign():
    core, install = _pending_install()
    for _ in range(60):
        core.tick()
    core.campaign()
    assert core.status().role is Role.FOLLOWER
    assert sent(drain(core, persist=False), VoteRequest) == []
    core.persisted(install.number)
    drain(core)
    core.campaign()
    assert core.status().role is Role.PRE_CANDIDATE


def test_s54_a_pending_install_ignores_appends_and_votes_by_the_old_log():
    core, _ = _pending_install()
    core.step(Append(N1, N2, 2, 1, 1, entries_of([2], start=2), 1))
    assert core.status().last_index == 1
    for _ in range(20):
        core.tick()
    core.step(VoteRequest(N3, N2, 3, 1, 1))
    outputs = drain(core, persist=False)
    vote = only(outputs, VoteReply)
    assert vote.granted, "what was never acknowledged binds nobody"
    core.persisted(outputs[-1].number)
    assert core.status().last_index == 10
    assert core.status().snapshot_index == 10


def test_s54_heartbeats_are_answered_while_an_install_is_pending():
    core, _ = _pending_install()
    core.step(Heartbeat(N1, N2, 2, 0, 9))
    assert sent(drain(core, persist=False)) == [HeartbeatReply(N2, N1, 2, 9)]


def test_s54_install_travels_apart_from_votes_and_entries():
    """A vote and the last chunk come between the same two polls: the vote's batch first, the install after
    it."""
    core = make_core(2, THREE, term=1)
    meta = meta_of()
    for offset in (0, 16, 32):
        core.step(chunk(meta, offset, term=2))
    first, second = core.poll(), core.poll()
    assert first.hard_state == HardState(2, NO_NODE, 0)
    assert first.install is None
    assert second.install == meta
    assert second.hard_state is None
    assert not second.send_after_persist
    assert not core.has_output()


def test_s54_a_snapshot_that_does_not_verify_is_asked_for_again():
    cluster = behind()
    cluster[3].disk.corrupt_next_install = True
    cluster.heal()
    cluster.tick(6)
    assert cluster[3].machine == cluster[1].machine
    offsets = [m.offset for m in cluster.delivered if isinstance(m, SnapshotChunk)]
    assert offsets.count(0) == 2


def test_s54_install_failed_keeps_the_old_log_in_force():
    core, install = _pending_install()
    core.install_failed(install.number)
    status = core.status()
    assert (status.last_index, status.commit, status.snapshot_index) == (1, 0, 0)
    (reply,) = sent(drain(core), SnapshotReply)
    assert reply.next_offset == 0
    core.persisted(install.number)
    assert core.status().snapshot_index == 0, "a failed install is not revived by a later completion"


def test_s54_crash_before_the_install_is_durable_leaves_the_old_state():
    cluster = behind()
    cluster[3].auto_persist = False
    cluster.heal()
    for _ in range(40):
        if cluster[3].core._state.install_number is not None:
            break
        cluster[3].persist()
        cluster.tick(1)
    cluster[3].crash()
    cluster[3].auto_persist = True
    cluster[3].restart()
    assert cluster[3].status.snapshot_index == 0
    cluster.tick(6)
    assert cluster[3].machine == cluster[1].machine


def test_s54_crash_after_the_install_recovers_from_it():
    cluster = behind()
    cluster.heal()
    cluster.tick(3)
    cluster[3].crash()
    cluster[3].restart()
    assert cluster[3].status.snapshot_index == cluster[3].status.commit
    assert cluster[3].machine == cluster[1].machine
    cluster.propose(1, b"x")
    cluster.tick(2)
    assert cluster[3].machine[-1] == b"x"


def test_s55_snapshot_carries_joint_membership_and_learners():
    joint = membership([1, 2, 4], learners=[5], outgoing=[1, 2, 3])
    core = make_core(2, THREE, term=2)
    meta = meta_of(members=joint)
    for offset in (0, 16, 32):
        core.step(chunk(meta, offset))
    drain(core)
    assert core.status().membership == joint
    assert core.status().membership_index == 10
    assert core.membership_at(10) == joint
    for _ in range(20):
        core.tick()
    assert {m.dst for m in sent(drain(core), VoteRequest)} == {1, 3, 4}


def test_s55_newcomer_learns_the_group_from_the_snapshot():
    cluster = behind(count=5)
    cluster.heal()
    cluster.join(4)
    cluster[1].core.change_membership(MembershipChange(add_learners=((N4, "four"),)))
    cluster.run()
    cluster[1].snapshot()
    cluster.tick(5)
    assert cluster[4].status.membership.voters == (1, 2, 3)
    assert cluster[4].machine == cluster[1].machine


def test_empty_snapshot_is_one_empty_chunk():
    core = make_core(2, THREE, term=2)
    meta = meta_of(content=b"")
    core.step(chunk(meta, 0, content=b""))
    outputs = drain(core)
    assert [out.install for out in outputs if out.install] == [meta]


def test_snapshot_entry_kinds_after_install_continue_the_log():
    core = make_core(2, THREE, term=2)
    meta = meta_of()
    for offset in (0, 16, 32):
        core.step(chunk(meta, offset))
    drain(core)
    core.step(Append(N1, N2, 2, 10, 2, (Entry(11, 2, EntryKind.COMMAND, b"x"),), 11))
    applied = [entry for out in drain(core) for entry in out.apply]
    assert [entry.index for entry in applied] == [11]
