"""The leader's sending side: appends, heartbeats, and how the log grows.

Appends leave before the leader's own disk has them: only *counting* the leader itself waits for its
disk. They are built at ``poll``, so that all proposals between two polls share one message per peer.
"""

from __future__ import annotations

from collections.abc import Iterable

from sava.raft.messages import Append, Heartbeat
from sava.raft.output import ChunkSend
from sava.raft.progress import Progress, ProgressState
from sava.raft.state import CoreState
from sava.raft.types import Entry, EntryKind, NodeId, SnapshotMeta

__all__ = [
    "append_entry",
    "append_payloads",
    "broadcast_heartbeat",
    "flush_appends",
    "payload_size",
    "send_append",
    "send_chunk",
    "send_pending_appends",
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
    if prev < log.compacted_index:
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
            told = min(progress.match, commit)
            state.send(Heartbeat(state.node, peer, state.term, told, state.round))
