"""Replication: what a leader sends (appends, heartbeats, snapshots), how the log grows, and what a follower
takes.

Appends leave before the leader's own disk has them: only *counting* the leader itself waits for its
disk. They are built at ``poll``, so that all proposals between two polls share one message per peer.

Snapshots in chunks, for members that need entries which are compacted away.

The leader keeps one chunk in flight per member and follows the member's ``next_offset``; a chunk is sent
again at a heartbeat when nothing has moved since the one before. The member's word decides where to continue,
so a transfer resumes after a lost chunk, a restart of either side, or a change of leader.

The follower hands bytes to the driver as they come. After the last one it emits ``install`` and waits: **the
old log stays in force until the driver says that the snapshot is durable**. Only then does the core switch
over and acknowledge. Should the file not verify, nothing has happened and the transfer starts again. In
between, appends are ignored (they would grow a log that is about to vanish) and the node does not campaign.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sava.raft.membership import History
from sava.raft.messages import Append, AppendReply, Heartbeat, HeartbeatReply, SnapshotChunk, SnapshotReply
from sava.raft.output import ChunkSend, ChunkWrite, Role
from sava.raft.progress import Progress, ProgressState
from sava.raft.state import CoreState, Incoming
from sava.raft.types import NO_NODE, Entry, EntryKind, InvariantError, NodeId, SnapshotMeta

__all__ = [
    "abandon_install",
    "append_entry",
    "append_payloads",
    "broadcast_heartbeat",
    "finish_install",
    "flush_appends",
    "on_append",
    "on_heartbeat",
    "on_snapshot",
    "on_snapshot_reply",
    "payload_size",
    "peer_unreachable",
    "send_append",
    "send_chunk",
    "send_pending_appends",
    "snapshot_failed",
    "snapshot_taken",
    "tick_transfers",
]


def payload_size(entries: Iterable[Entry]) -> int:
    """What counts against the cap on uncommitted bytes. Entries that the core itself needs to make progress
    (no-op, leaving a joint configuration) cost nothing, so the cap can never block them."""
    return sum([len(entry.data) for entry in entries if entry.kind is EntryKind.COMMAND])


def append_payloads(state: CoreState, payloads: Iterable[bytes]) -> range:
    start = state.log.last_index + 1
    term = state.term
    kind = EntryKind.COMMAND
    state.log.append([Entry(index, term, kind, data) for index, data in enumerate(payloads, start)])
    state.append_wanted = True
    return range(start, state.log.last_index + 1)


def append_entry(state: CoreState, kind: EntryKind, data: bytes) -> Entry:
    entry = Entry(state.log.last_index + 1, state.term, kind, data)
    state.log.append((entry,))
    state.append_wanted = True
    return entry


def flush_appends(state: CoreState) -> None:
    """Send every member what it misses, as far as its window allows."""
    state.append_wanted = False
    for peer, progress in state.progress.items():
        if peer != state.node:
            send_pending_appends(state, peer, progress)


def send_pending_appends(state: CoreState, peer: NodeId, progress: Progress) -> None:
    # An empty append is worth sending when it lets the peer commit entries that it was sent without that
    # knowledge.
    tell_commit = progress.wants_commit(state.log.commit)
    while send_append(state, peer, progress, even_if_empty=tell_commit):
        tell_commit = False


def send_append(state: CoreState, peer: NodeId, progress: Progress, *, even_if_empty: bool) -> bool:
    """Send one append, or start a snapshot when the entries are gone. Says whether there may be more to
    send."""
    if progress.is_paused:
        return False
    log = state.log
    prev = progress.next - 1
    if prev + 1 < log.first_index:
        _start_snapshot(state, peer, progress)
        return False
    is_window_full = progress.state is ProgressState.REPLICATE and progress.inflights.is_full
    entries = (
        () if is_window_full else log.slice(progress.next, log.last_index + 1, state.config.max_append_bytes)
    )
    if not entries and not even_if_empty:
        return False
    state.send(Append(state.node, peer, state.term, prev, log.term(prev), entries, log.commit))
    progress.sent(len(entries), payload_size(entries))
    progress.sent_commit = min(log.commit, prev + len(entries))
    return bool(entries)


def _start_snapshot(state: CoreState, peer: NodeId, progress: Progress) -> None:
    if not progress.recently_active:
        # Whether it is there at all is not known; the next answer to a heartbeat starts the transfer.
        progress.wait_for_reply = True
        return
    meta = state.log.snapshot
    progress.become_snapshot(meta)
    send_chunk(state, peer, progress, meta)


def send_chunk(state: CoreState, peer: NodeId, progress: Progress, meta: SnapshotMeta) -> None:
    offset = progress.chunk_offset
    length = min(state.config.snapshot_chunk_bytes, meta.size - offset)
    state.outbox.chunk_sends.append(ChunkSend(peer, state.term, meta, offset, length))


def broadcast_heartbeat(state: CoreState) -> None:
    """Start a new confirmation round: leadership, reads, liveness, and the peers' flow control hang on its
    answers."""
    state.round += 1
    state.heartbeat_elapsed = 0
    commit = state.log.commit
    for peer, progress in state.progress.items():
        if peer == state.node:
            progress.round = state.round
        else:
            # Never above what this peer is known to hold: its log may end in entries that will be truncated,
            # and it would take them for committed.
            known = min(progress.match, commit)
            state.send(Heartbeat(state.node, peer, state.term, known, state.round))


# -- snapshots: the leader -----------------------------------------------------------------------------------


def on_snapshot_reply(state: CoreState, message: SnapshotReply) -> None:
    progress = state.progress.get(message.src)
    if state.role is not Role.LEADER or progress is None:
        return
    progress.active = True
    meta = progress.snapshot
    if meta is None or (meta.index, meta.digest) != (message.index, message.digest):
        return  # about an earlier transfer
    # The chunk at chunk_offset is on its way: answering every duplicate with it again would multiply
    # duplicates.
    if message.next_offset == progress.chunk_offset or message.next_offset > meta.size:
        return
    if message.next_offset > progress.chunk_offset:
        progress.idle_ticks = 0
    progress.chunk_offset = message.next_offset
    if progress.chunk_offset < meta.size:
        send_chunk(state, message.src, progress, meta)


def tick_transfers(state: CoreState, *, resend: bool) -> None:
    for peer, progress in state.progress.items():
        meta = progress.snapshot
        if meta is None:
            continue
        progress.idle_ticks += 1
        if progress.idle_ticks >= state.config.snapshot_timeout_ticks:
            progress.become_probe()
            progress.wait_for_reply = True
        elif resend and progress.idle_ticks > state.config.heartbeat_ticks:
            send_chunk(state, peer, progress, meta)


def snapshot_failed(state: CoreState, peer: NodeId) -> None:
    progress = state.progress.get(peer)
    if progress is not None and progress.state is ProgressState.SNAPSHOT:
        progress.become_probe()
        progress.wait_for_reply = (
            True  # the next heartbeat's answer tries again, perhaps with a newer snapshot
        )


def peer_unreachable(state: CoreState, peer: NodeId) -> None:
    """What was sent is probably lost: find out where the peer stands instead of filling its window."""
    progress = state.progress.get(peer)
    if progress is not None and progress.state is ProgressState.REPLICATE and peer != state.node:
        progress.become_probe()


def snapshot_taken(state: CoreState, meta: SnapshotMeta) -> None:
    """Compact below a snapshot that is durable on this node, never below anything else."""
    log = state.log
    if meta.index <= log.snapshot.index:
        return  # overtaken by an installed one while it was being built
    if meta.index > log.applied:
        raise InvariantError(f"a snapshot at {meta.index} of a state machine that has applied {log.applied}")
    if meta.term != log.term(meta.index) or meta.membership != state.history.at(meta.index):
        raise InvariantError(f"the snapshot at {meta.index} does not describe the log at its own index")
    log.compact(meta, state.config.keep_entries)
    state.history.compact(meta.index)


# -- snapshots: the follower ---------------------------------------------------------------------------------


def _take_chunk(state: CoreState, message: SnapshotChunk) -> None:
    """The caller has recognised the leader and restarted the election timer."""
    if state.install is not None:
        return  # answered once it is durable
    meta = message.meta
    if meta.index <= state.log.commit:
        _acknowledge(state, state.log.commit)  # everything in it is here already
        return
    if state.log.matches(meta.index, meta.term):
        # The log already holds what the snapshot covers, and more: dropping it would lose entries that this
        # node has acknowledged. Being in a snapshot, the entry is committed; that is all there is to learn.
        state.log.commit_to(meta.index)
        _acknowledge(state, meta.index)
        return
    incoming = _select_transfer(state, message)
    if incoming is None:
        return
    if message.offset == incoming.next_offset and message.offset + len(message.data) <= meta.size:
        state.outbox.chunk_writes.append(ChunkWrite(meta, message.offset, message.data))
        incoming.next_offset += len(message.data)
        if incoming.next_offset == meta.size:
            state.install = meta
            state.incoming = None
            return
    _ask_for_chunk(state, meta, incoming.next_offset)


def _select_transfer(state: CoreState, message: SnapshotChunk) -> Incoming | None:
    """The transfer that this chunk belongs to; a new one resets the receiver. None: late chunk of an older
    one.

    Within a term a leader's snapshots only get newer, so an older one is a straggler. Taking it would throw
    away the newer transfer's bytes, whose next chunk would throw away this one's, and so on.
    """
    incoming = state.incoming
    if incoming is not None and incoming.is_same(message.meta):
        incoming.term = message.term
        return incoming
    if incoming is not None and message.term == incoming.term and message.meta.index < incoming.meta.index:
        return None
    state.incoming = Incoming(message.meta, message.term)
    return state.incoming


def _ask_for_chunk(state: CoreState, meta: SnapshotMeta, next_offset: int) -> None:
    # Bytes that a crash takes are simply asked for again, so this answer waits for no disk (only for the
    # term).
    state.reply(SnapshotReply(state.node, state.leader, state.term, meta.index, meta.digest, next_offset))


def _acknowledge(state: CoreState, index: int) -> None:
    if state.leader != NO_NODE:
        state.reply(AppendReply(state.node, state.leader, state.term, True, index), index)


def finish_install(state: CoreState) -> None:
    """The snapshot is durable: it is now the log's beginning, and whatever followed the old commit is
    gone."""
    meta = state.install
    if meta is None:
        raise InvariantError("no snapshot is being installed")
    if meta.index <= state.log.commit:
        raise InvariantError(
            f"commit {state.log.commit} overtook the snapshot at {meta.index} without its entry"
        )
    state.install = None
    state.install_number = None
    state.log.restore(meta)
    state.history = History(meta.index, meta.membership)
    state.membership_changed()
    _acknowledge(state, meta.index)


def abandon_install(state: CoreState) -> None:
    meta = state.install
    state.install = None
    state.install_number = None
    if meta is not None and state.leader != NO_NODE:
        state.incoming = Incoming(meta, state.term)
        _ask_for_chunk(state, meta, 0)


# -- appends and heartbeats: the follower --------------------------------------------------------------------


def _recognise_leader(state: CoreState, leader: NodeId) -> None:
    """A message that only a term's leader sends: follow it, and restart the election timer."""
    if state.role is Role.LEADER or state.leader not in (NO_NODE, leader):
        other = state.node if state.role is Role.LEADER else state.leader
        raise InvariantError(f"nodes {other} and {leader} both lead term {state.term}")
    if state.role is not Role.FOLLOWER:
        state.become_follower(state.term, leader)
    state.leader = leader
    state.election_elapsed = 0
    # If there was evidence against it, it was wrong; kept, it would make this follower campaign after every
    # short pause.
    state.hurried_timeout = 0


def on_heartbeat(state: CoreState, message: Heartbeat) -> None:
    _recognise_leader(state, message.src)
    state.log.commit_to(message.commit)
    state.reply(HeartbeatReply(state.node, message.src, state.term, message.round))


def on_snapshot(state: CoreState, message: SnapshotChunk) -> None:
    _recognise_leader(state, message.src)
    _take_chunk(state, message)


def on_append(state: CoreState, message: Append) -> None:
    _recognise_leader(state, message.src)
    if state.install is not None:
        return  # the log is about to be replaced
    log = state.log
    if message.prev_index < log.commit:
        # Late or duplicated: what is committed here matches the leader by definition. Say how far that goes.
        _accept(state, message.src, log.commit)
    elif log.matches(message.prev_index, message.prev_term):
        checked = message.prev_index + len(message.entries)
        _take_entries(state, message.prev_index, message.entries)
        # Neither commit nor the answer may go beyond what this message has compared: whatever follows in our
        # log may be another leader's.
        log.commit_to(min(message.commit, checked))
        _accept(state, message.src, checked)
    else:
        _reject(state, message)


def _take_entries(state: CoreState, prev_index: int, entries: Sequence[Entry]) -> None:
    log = state.log
    position = log.first_conflict(prev_index, entries)
    if position == len(entries):
        return
    news = entries[position:] if position else entries
    changed = False
    if news[0].index <= log.last_index:
        log.truncate_from(news[0].index)
        # Configurations go with their entries; the one before is in force again.
        changed = state.history.truncate_from(news[0].index)
    log.append(news)
    if state.note_memberships(news) or changed:
        state.membership_changed()


def _accept(state: CoreState, leader: NodeId, index: int) -> None:
    state.reply(AppendReply(state.node, leader, state.term, True, index), index)


def _reject(state: CoreState, message: Append) -> None:
    log = state.log
    # What is committed matches any leader, so the hint never points below it.
    hint = max(log.probe_point(min(message.prev_index, log.last_index), message.prev_term), log.commit)
    reply = AppendReply(state.node, message.src, state.term, False, message.prev_index, hint, log.term(hint))
    state.reply(reply)
