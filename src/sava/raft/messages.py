"""Every message that one node's core sends to another's.

``src``, ``dst`` and ``term`` open each of them. Encoding: one tagged msgpack array (see ``codec``).

Bytes of configurations, and what a message must be like.

A membership entry holds an encoded ``Membership``. Messages travel in envelopes that are not the core's
(``metadata.peer``); the receiver calls ``check_message``, which checks, besides the types, what the core
takes for granted about its peers (ids, contiguous entries, bounds). So hostile or damaged bytes end there, in
``MalformedMessage``: neither as an ``InvariantError`` that stops the node, nor as entries in a log that
cannot be read back.
"""

from __future__ import annotations

import msgspec

from sava.raft.membership import find_flaw
from sava.raft.types import Entry, EntryKind, MalformedMessage, Membership, NodeId, SnapshotMeta


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


# -- encoding ------------------------------------------------------------------------------------------------


__all__ = ["check_message", "decode_membership", "encode_membership"]

_MAX_INT = (1 << 63) - 1
_MAX_DIGEST = 128
"""Room for any digest in use (SHA-512 has 64 bytes)."""

_encoder = msgspec.msgpack.Encoder()
_membership_decoder = msgspec.msgpack.Decoder(Membership)


# -- configurations ------------------------------------------------------------------------------------------


def encode_membership(membership: Membership) -> bytes:
    return _encoder.encode(membership)


def decode_membership(data: bytes) -> Membership:
    """Raises MalformedMessage."""
    try:
        membership = _membership_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec.ValidationError is a DecodeError.
        raise MalformedMessage(f"membership: {error}") from error
    _check_membership(membership)
    return membership


def _check_membership(membership: Membership) -> None:
    flaw = find_flaw(membership)
    if flaw is not None:
        raise MalformedMessage(f"membership: {flaw}")


# -- messages ------------------------------------------------------------------------------------------------


def check_message(message: Message) -> None:
    """Raises MalformedMessage."""
    if not (0 < message.src <= _MAX_INT and 0 < message.dst <= _MAX_INT):
        raise MalformedMessage(f"ids {message.src} and {message.dst} are not both nodes")
    if message.src == message.dst:
        raise MalformedMessage(f"node {message.src} writes to itself")
    term = message.term
    match message:
        case Append():
            _check_append(message)
        case AppendReply():
            _check_numbers(term, message.index, message.hint_index, message.hint_term)
        case Heartbeat():
            _check_numbers(term, message.commit, message.round)
        case HeartbeatReply():
            _check_numbers(term, message.round)
        case VoteRequest():
            _check_numbers(term, message.last_index, message.last_term)
        case SnapshotChunk():
            _check_chunk(message)
        case SnapshotReply():
            _check_numbers(term, message.index, message.next_offset)
        case _:
            _check_numbers(term)  # VoteReply and TimeoutNow carry nothing more


def _check_append(message: Append) -> None:
    _check_numbers(message.term, message.prev_index, message.prev_term, message.commit)
    if (message.prev_index == 0) != (message.prev_term == 0):
        raise MalformedMessage(f"previous entry {message.prev_index} of term {message.prev_term}")
    index, term = message.prev_index, message.prev_term
    for entry in message.entries:
        index += 1
        if entry.index != index:
            raise MalformedMessage(f"entry {entry.index} where {index} must follow")
        if not term <= entry.term <= message.term:
            raise MalformedMessage(f"entry of term {entry.term} after {term} from a leader of {message.term}")
        term = entry.term
        _check_entry(entry)
    if term > message.term:
        raise MalformedMessage(f"previous term {term} is after the leader's {message.term}")


def _check_chunk(message: SnapshotChunk) -> None:
    _check_snapshot_meta(message.meta)
    _check_numbers(message.term, message.offset, message.crc)
    meta = message.meta
    if meta.index < 1 or not 1 <= meta.term <= message.term or not meta.membership.voters:
        raise MalformedMessage(
            f"a snapshot at {meta.index} of term {meta.term} from a leader of {message.term}"
        )
    if message.offset + len(message.data) > meta.size:
        raise MalformedMessage(f"bytes beyond the snapshot's end {meta.size}")


def _check_entry(entry: Entry) -> None:
    _check_numbers(entry.index - 1, entry.term - 1)
    if entry.kind is EntryKind.MEMBERSHIP:
        membership = decode_membership(entry.data)
        if not membership.voters:
            raise MalformedMessage("a membership entry without voters")


def _check_snapshot_meta(meta: SnapshotMeta) -> None:
    _check_numbers(meta.index, meta.term, meta.size, meta.format)
    if len(meta.digest) > _MAX_DIGEST:
        raise MalformedMessage(f"a digest of {len(meta.digest)} bytes")
    _check_membership(meta.membership)


def _check_numbers(*numbers: int) -> None:
    for number in numbers:
        if not 0 <= number <= _MAX_INT:
            raise MalformedMessage(f"{number} is out of range")
