"""Bytes of messages, entries and configurations.

One tagged msgpack array per message; a membership entry holds an encoded ``Membership``. Decoding checks,
besides the types, what the core takes for granted about its peers (ids, contiguous entries, bounds), so that
hostile or damaged bytes end here, in ``MalformedMessage``, and never as an ``InvariantError`` that stops the
node.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sava.raft.errors import MalformedMessage
from sava.raft.membership import find_flaw
from sava.raft.messages import (
    Append,
    AppendReply,
    Heartbeat,
    HeartbeatReply,
    Message,
    SnapshotChunk,
    SnapshotReply,
    VoteRequest,
)
from sava.raft.types import Entry, EntryKind, HardState, Membership, SnapshotMeta

__all__ = [
    "decode_entry",
    "decode_hard_state",
    "decode_membership",
    "decode_message",
    "decode_snapshot_meta",
    "encode_entry",
    "encode_hard_state",
    "encode_membership",
    "encode_message",
    "encode_snapshot_meta",
]

_MAX_INT = (1 << 63) - 1
_MAX_DIGEST = 128
"""Room for any digest in use (SHA-512 has 64 bytes)."""

_encoder = msgspec.msgpack.Encoder()
_message_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)
_entry_decoder = msgspec.msgpack.Decoder(Entry)
_membership_decoder = msgspec.msgpack.Decoder(Membership)
_hard_state_decoder = msgspec.msgpack.Decoder(HardState)
_snapshot_meta_decoder = msgspec.msgpack.Decoder(SnapshotMeta)


def _refuse(what: str) -> MalformedMessage:
    return MalformedMessage(what)


def _decode(decoder: Any, data: bytes, what: str) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec.ValidationError is a DecodeError.
        raise _refuse(f"{what}: {error}") from error


def _check_numbers(*numbers: int) -> None:
    for number in numbers:
        if not 0 <= number <= _MAX_INT:
            raise _refuse(f"{number} is out of range")


# -- configurations ------------------------------------------------------------------------------------------


def encode_membership(membership: Membership) -> bytes:
    return _encoder.encode(membership)


def decode_membership(data: bytes) -> Membership:
    membership: Membership = _decode(_membership_decoder, data, "membership")
    _check_membership(membership)
    return membership


def _check_membership(membership: Membership) -> None:
    flaw = find_flaw(membership)
    if flaw is not None:
        raise _refuse(f"membership: {flaw}")


# -- entries and durable records -----------------------------------------------------------------------------


def encode_entry(entry: Entry) -> bytes:
    return _encoder.encode(entry)


def decode_entry(data: bytes) -> Entry:
    entry: Entry = _decode(_entry_decoder, data, "entry")
    _check_entry(entry)
    return entry


def _check_entry(entry: Entry) -> None:
    _check_numbers(entry.index - 1, entry.term - 1)
    if entry.kind is EntryKind.MEMBERSHIP:
        membership = decode_membership(entry.data)
        if not membership.voters:
            raise _refuse("a membership entry without voters")


def encode_hard_state(hard_state: HardState) -> bytes:
    return _encoder.encode(hard_state)


def decode_hard_state(data: bytes) -> HardState:
    hard_state: HardState = _decode(_hard_state_decoder, data, "hard state")
    _check_numbers(hard_state.term, hard_state.vote, hard_state.commit)
    return hard_state


def encode_snapshot_meta(meta: SnapshotMeta) -> bytes:
    return _encoder.encode(meta)


def decode_snapshot_meta(data: bytes) -> SnapshotMeta:
    meta: SnapshotMeta = _decode(_snapshot_meta_decoder, data, "snapshot meta")
    _check_snapshot_meta(meta)
    return meta


def _check_snapshot_meta(meta: SnapshotMeta) -> None:
    _check_numbers(meta.index, meta.term, meta.size, meta.format)
    if len(meta.digest) > _MAX_DIGEST:
        raise _refuse(f"a digest of {len(meta.digest)} bytes")
    _check_membership(meta.membership)


# -- messages ------------------------------------------------------------------------------------------------


def encode_message(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_message(data: bytes) -> Message:
    message: Message = _decode(_message_decoder, data, "message")
    if not (0 < message.src <= _MAX_INT and 0 < message.dst <= _MAX_INT):
        raise _refuse(f"ids {message.src} and {message.dst} are not both nodes")
    if message.src == message.dst:
        raise _refuse(f"node {message.src} writes to itself")
    _check_numbers(message.term)
    _check_body(message)
    return message


def _check_body(message: Message) -> None:
    match message:
        case Append():
            _check_append(message)
        case AppendReply():
            _check_numbers(message.index, message.hint_index, message.hint_term)
        case Heartbeat():
            _check_numbers(message.commit, message.round)
        case HeartbeatReply():
            _check_numbers(message.round)
        case VoteRequest():
            _check_numbers(message.last_index, message.last_term)
        case SnapshotChunk():
            _check_chunk(message)
        case SnapshotReply():
            _check_numbers(message.index, message.next_offset)
        case _:
            pass  # VoteReply and TimeoutNow carry nothing more


def _check_append(message: Append) -> None:
    _check_numbers(message.prev_index, message.prev_term, message.commit)
    if (message.prev_index == 0) != (message.prev_term == 0):
        raise _refuse(f"previous entry {message.prev_index} of term {message.prev_term}")
    index, term = message.prev_index, message.prev_term
    for entry in message.entries:
        index += 1
        if entry.index != index:
            raise _refuse(f"entry {entry.index} where {index} must follow")
        if not term <= entry.term <= message.term:
            raise _refuse(f"entry of term {entry.term} after {term} from a leader of {message.term}")
        term = entry.term
        _check_entry(entry)
    if term > message.term:
        raise _refuse(f"previous term {term} is after the leader's {message.term}")


def _check_chunk(message: SnapshotChunk) -> None:
    _check_snapshot_meta(message.meta)
    _check_numbers(message.offset, message.crc)
    meta = message.meta
    if meta.index < 1 or not 1 <= meta.term <= message.term or not meta.membership.voters:
        raise _refuse(f"a snapshot at {meta.index} of term {meta.term} from a leader of {message.term}")
    if message.offset + len(message.data) > meta.size:
        raise _refuse(f"bytes beyond the snapshot's end {meta.size}")
