"""What the core takes for granted about messages, and the bytes of configurations."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sava.raft import (
    NO_NODE,
    Append,
    AppendReply,
    Entry,
    EntryKind,
    Heartbeat,
    HeartbeatReply,
    MalformedMessage,
    Membership,
    NodeId,
    SnapshotChunk,
    SnapshotMeta,
    SnapshotReply,
    TimeoutNow,
    VoteReply,
    VoteRequest,
    check_message,
    decode_membership,
    encode_membership,
)
from tests.unit.raft.harness import N1, N2, N3, N4, entries_of, membership

META = SnapshotMeta(9, 2, Membership((N1, N2), (N2, N3), (N4,), ((N1, "a:1"), (N4, "d:4"))), 40, b"d" * 32)
MESSAGES = [
    VoteRequest(N1, N2, 3, 4, 2, pre=True, transfer=True),
    VoteRequest(N1, N2, 3, 4, 2),
    VoteReply(N1, N2, 3, False, pre=True),
    Append(N1, N2, 3, 4, 2, entries_of([2, 3, 3], start=5), 6),
    Append(N1, N2, 3, 0, 0, (), 0),
    Append(N1, N2, 1, 0, 0, (Entry(1, 1, EntryKind.MEMBERSHIP, encode_membership(membership([1, 2]))),), 0),
    AppendReply(N1, N2, 3, False, 9, 4, 2),
    Heartbeat(N1, N2, 3, 4, 5),
    HeartbeatReply(N1, N2, 3, 5),
    TimeoutNow(N1, N2, 3),
    SnapshotChunk(N1, N2, 3, META, 10, b"x" * 30, 0xDEADBEEF),
    SnapshotReply(N1, N2, 3, 9, b"d" * 32, 40),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_what_cores_send_is_let_through(message):
    check_message(message)


BAD = [
    VoteRequest(NO_NODE, N2, 3, 4, 2),
    VoteRequest(N1, NodeId(-2), 3, 4, 2),
    VoteRequest(N2, N2, 3, 4, 2),
    VoteRequest(N1, N2, -1, 4, 2),
    VoteRequest(N1, N2, 3, -4, 2),
    Append(N1, N2, 3, 4, 2, entries_of([2], start=6), 0),
    Append(N1, N2, 3, 4, 2, (*entries_of([2], start=5), *entries_of([2], start=7)), 0),
    Append(N1, N2, 3, 4, 2, entries_of([1], start=5), 0),
    Append(N1, N2, 3, 4, 2, entries_of([3, 2], start=5), 0),
    Append(N1, N2, 3, 4, 2, entries_of([4], start=5), 0),
    Append(N1, N2, 3, 4, 5, (), 0),
    Append(N1, N2, 3, 0, 1, (), 0),
    Append(N1, N2, 3, 4, 0, (), 0),
    Append(N1, N2, 3, 4, 2, (), -1),
    Append(N1, N2, 1, 0, 0, (Entry(1, 1, EntryKind.MEMBERSHIP, b"junk"),), 0),
    Append(N1, N2, 1, 0, 0, (Entry(1, 1, EntryKind.MEMBERSHIP, encode_membership(Membership())),), 0),
    Append(N1, N2, 1, 0, 0, (Entry(1, 1, EntryKind.MEMBERSHIP, encode_membership(Membership((N2, N1)))),), 0),
    AppendReply(N1, N2, 3, True, -1),
    Heartbeat(N1, N2, 3, -1, 0),
    HeartbeatReply(N1, N2, 3, -1),
    SnapshotReply(N1, N2, 3, 9, b"", -1),
    SnapshotChunk(N1, N2, 3, META, 20, b"x" * 30, 0),
    SnapshotChunk(N1, N2, 3, META, -1, b"", 0),
    SnapshotChunk(N1, N2, 1, META, 0, b"", 0),
    SnapshotChunk(N1, N2, 3, SnapshotMeta(0, 0, membership([1]), 0, b""), 0, b"", 0),
    SnapshotChunk(N1, N2, 3, SnapshotMeta(5, 1, Membership(), 0, b""), 0, b"", 0),
    SnapshotChunk(N1, N2, 3, SnapshotMeta(5, 1, membership([1]), 0, b"x" * 1000), 0, b"", 0),
]


@pytest.mark.parametrize("message", BAD, ids=lambda m: type(m).__name__)
def test_what_the_core_relies_on_is_checked(message):
    with pytest.raises(MalformedMessage):
        check_message(message)


def test_configurations_survive_the_disk():
    assert decode_membership(encode_membership(META.membership)) == META.membership


def test_encoding_is_canonical():
    assert encode_membership(Membership((N1, N2), (), (N3,))) == encode_membership(
        Membership((N1, N2), (), (N3,))
    )


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=200))
def test_garbage_raises_only_malformed_message(data):
    with suppress(MalformedMessage):
        decode_membership(data)
