"""Every message that one node's core sends to another's.

``src``, ``dst`` and ``term`` open each of them. Encoding: one tagged msgpack array (see ``codec``).
"""

from __future__ import annotations

import msgspec

from sava.raft.types import Entry, NodeId, SnapshotMeta


class VoteRequest(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """``pre``: a dry run at ``term`` that changes nothing on either side. ``transfer``: the leader asked for
    this election, so leader stickiness does not apply."""

    src: NodeId
    dst: NodeId
    term: int
    last_index: int
    last_term: int
    pre: bool = False
    transfer: bool = False


class VoteReply(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A granted pre-vote carries the *requested* term, a refusal carries the replier's own term."""

    src: NodeId
    dst: NodeId
    term: int
    granted: bool
    pre: bool = False


class Append(msgspec.Struct, frozen=True, array_like=True, tag=3):
    src: NodeId
    dst: NodeId
    term: int
    prev_index: int
    prev_term: int
    entries: tuple[Entry, ...]
    commit: int


class AppendReply(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Accepted: ``index`` is the follower's match. Refused: ``index`` is the ``prev_index`` that did not
    match, and (``hint_index``, ``hint_term``) is the largest entry of the follower that may still match."""

    src: NodeId
    dst: NodeId
    term: int
    accepted: bool
    index: int
    hint_index: int = 0
    hint_term: int = 0


class Heartbeat(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """``round`` is the leader's private, ever growing number of this confirmation round."""

    src: NodeId
    dst: NodeId
    term: int
    commit: int
    round: int


class HeartbeatReply(msgspec.Struct, frozen=True, array_like=True, tag=6):
    src: NodeId
    dst: NodeId
    term: int
    round: int


class TimeoutNow(msgspec.Struct, frozen=True, array_like=True, tag=7):
    src: NodeId
    dst: NodeId
    term: int


class SnapshotChunk(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Bytes ``offset .. offset+len(data)`` of the snapshot named by ``meta``. Idempotent."""

    src: NodeId
    dst: NodeId
    term: int
    meta: SnapshotMeta
    offset: int
    data: bytes
    crc: int


class SnapshotReply(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The follower holds the bytes before ``next_offset`` of the snapshot at ``index`` and wants what
    follows."""

    src: NodeId
    dst: NodeId
    term: int
    index: int
    digest: bytes
    next_offset: int


Message = (
    VoteRequest
    | VoteReply
    | Append
    | AppendReply
    | Heartbeat
    | HeartbeatReply
    | TimeoutNow
    | SnapshotChunk
    | SnapshotReply
)
