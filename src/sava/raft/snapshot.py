"""Snapshots in chunks, for members that need entries which are compacted away.

The leader keeps one chunk in flight per member and follows the member's ``next_offset``; a chunk is sent
again at a heartbeat when nothing has moved since the one before. The member's word decides where to go on, so
a transfer resumes after a lost chunk, a restart of either side, or a change of leader.

The follower hands bytes to the driver as they come. After the last one it emits ``install`` and waits: **the
old log stays in force until the driver says that the snapshot is durable**. Only then does the core switch
over and acknowledge. Should the file not verify, nothing has happened and the transfer starts anew. In
between, appends are ignored (they would grow a log that is about to vanish) and the node does not campaign.
"""

from __future__ import annotations

from sava.raft.errors import InvariantError
from sava.raft.membership import History
from sava.raft.messages import AppendReply, SnapshotChunk, SnapshotReply
from sava.raft.output import ChunkWrite, Role
from sava.raft.progress import ProgressState
from sava.raft.replication import send_chunk
from sava.raft.state import CoreState, Incoming
from sava.raft.types import NO_NODE, NodeId, SnapshotMeta

__all__ = [
    "abandon_install",
    "finish_install",
    "on_snapshot_chunk",
    "on_snapshot_reply",
    "peer_unreachable",
    "snapshot_failed",
    "snapshot_taken",
    "tick_transfers",
]


# -- leader --------------------------------------------------------------------------------------------------


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


# -- follower ------------------------------------------------------------------------------------------------


def on_snapshot_chunk(state: CoreState, message: SnapshotChunk) -> None:
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
