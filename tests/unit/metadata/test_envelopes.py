"""Bytes between nodes: every message survives the wire, and nothing else gets in."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sava.metadata.peer import (
    Conflict,
    Envelope,
    MalformedEnvelope,
    PeerMessage,
    decode_envelope,
    encode_envelope,
)
from sava.raft import Append, Entry, EntryKind, Message
from sava.raft.types import NodeId
from tests.unit.metadata.test_replica_peers import heartbeat, three
from tests.unit.raft.test_codec import BAD, MESSAGES


def envelope(message: PeerMessage) -> Envelope:
    return Envelope("c", NodeId(1), 1, 2, NodeId(2), message, "a:1")


@pytest.mark.parametrize(
    "message", [*MESSAGES, Conflict(NodeId(1), 3)], ids=lambda message: type(message).__name__
)
def test_messages_survive_the_wire(message: PeerMessage) -> None:
    assert decode_envelope(encode_envelope(envelope(message))) == envelope(message)


@pytest.mark.parametrize("message", BAD, ids=lambda message: type(message).__name__)
def test_what_the_core_relies_on_is_checked_at_the_door(message: Message) -> None:
    with pytest.raises(MalformedEnvelope):
        decode_envelope(encode_envelope(envelope(message)))


def test_entries_that_do_not_follow_one_another_get_into_no_log() -> None:
    """A member that is out of its mind sends an entry two places behind the last one. Once taken, it was in
    the log where it does not belong, and at its next start the node refused its own log."""
    world, leader, follower = three()
    usual = heartbeat(world, leader, follower)
    assert follower.replica.core is not None
    before = follower.replica.core.status()
    hole = Append(
        leader.id,
        follower.id,
        before.term,
        before.last_index,
        before.term,
        (Entry(before.last_index + 2, before.term, EntryKind.COMMAND, b""),),
        before.commit,
    )
    with pytest.raises(MalformedEnvelope):
        follower.replica.receive(
            decode_envelope(encode_envelope(msgspec.structs.replace(usual, message=hole)))
        )
    follower.stop()
    follower.start()
    world.pass_time(300)
    assert not follower.failures


def test_bytes_that_are_no_envelope_are_a_typed_error() -> None:
    encoded = encode_envelope(envelope(Conflict(NodeId(1), 3)))
    for bad in (b"", b"\xc1", encoded[:-1], encoded[1:], b"\x90", encoded[:5]):
        with pytest.raises(MalformedEnvelope):
            decode_envelope(bad)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
def test_garbage_raises_only_a_typed_error(data: bytes) -> None:
    with suppress(MalformedEnvelope):
        decode_envelope(data)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(MESSAGES), st.data())
def test_damaged_messages_decode_to_something_valid_or_are_refused(
    message: Message, data: st.DataObject
) -> None:
    raw = bytearray(encode_envelope(envelope(message)))
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    for damaged in (bytes(raw), bytes(raw[:cut])):
        try:
            decoded = decode_envelope(damaged)
        except MalformedEnvelope:
            continue
        assert decode_envelope(encode_envelope(decoded)) == decoded


def test_deeply_nested_bytes_are_refused() -> None:
    with pytest.raises(MalformedEnvelope):
        decode_envelope(b"\x91" * 100_000)


def test_other_types_in_known_fields_are_refused() -> None:
    for body in ([3, 1, 2, "x", 0, 0, [], 0], [99, 1, 2, 3], [2, 1, 2, 3, 1], {"a": 1}, [], None):
        with pytest.raises(MalformedEnvelope):
            decode_envelope(msgspec.msgpack.encode(["c", 1, 1, 2, 2, body, "a:1"]))
