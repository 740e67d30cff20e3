"""What goes in comes out, whatever it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sava.records import (
    MAX_BATCH_BYTES,
    MAX_COUNT,
    BatchTooLarge,
    Compression,
    InvalidMessage,
    Message,
    Origin,
    RecordBatch,
)
from tests.unit.records.samples import MESSAGES, RICH, UNIFORM, numbered, placed

CODECS = st.sampled_from(Compression)


@given(MESSAGES | UNIFORM, CODECS, st.integers(0, 7))
def test_messages(messages: list[Message], codec: Compression, shift: int) -> None:
    batch = RecordBatch.from_messages(messages, producer_id=4, base_sequence=5, codec=codec)
    # At every alignment: bytes read from a socket or a file begin anywhere.
    received = RecordBatch.parse(memoryview(bytes(shift) + batch.to_bytes())[shift:]).verify()
    assert list(received) == messages
    assert received.payloads() == [message.payload for message in messages]
    assert len(received) == len(messages)
    assert received.header.min_publish_time == min(message.publish_time for message in messages)
    assert received.header.max_publish_time == max(message.publish_time for message in messages)


@given(MESSAGES, CODECS)
def test_encoding_is_a_function(messages: list[Message], codec: Compression) -> None:
    first = RecordBatch.from_messages(messages, codec=codec).to_bytes()
    assert first == RecordBatch.from_messages(list(RecordBatch.parse(first)), codec=codec).to_bytes()


def test_columns_given_as_one_value_or_as_many_are_the_same() -> None:
    one = RecordBatch.encode([b"a", b"b"], publish_time=5, schema_id=6, schema_version=7, producer="web-é")
    many = RecordBatch.encode(
        [b"a", b"b"], publish_time=[5, 5], schema_id=[6, 6], schema_version=[7, 7], producer=["web-é"] * 2
    )
    assert one.to_bytes() == many.to_bytes()
    assert [message.producer for message in one.verify()] == ["web-é"] * 2


def test_offset_and_topic_are_filled_when_read() -> None:
    messages = list(placed(numbered(2), 40).messages("/default/orders"))
    assert [(message.offset, message.topic) for message in messages] == [
        (40, "/default/orders"),
        (41, "/default/orders"),
    ]


def test_readers_cannot_change_each_others_attributes() -> None:
    for attributes in ({}, {"a": "1"}):
        first, second = RecordBatch.encode([b"", b""], publish_time=0, attributes=[attributes] * 2)
        first.attributes["x"] = "y"  # type: ignore[index]
        assert second.attributes == attributes


def test_a_writable_buffer_is_copied_so_that_checked_bytes_stay_checked() -> None:
    buffer = bytearray(numbered(3).to_bytes())
    batch = RecordBatch.parse(buffer).verify()
    buffer[88:] = b"\xff" * (len(buffer) - 88)
    assert batch.payloads() == [b"0", b"1", b"2"]


@pytest.mark.parametrize("codec", [Compression.LZ4, Compression.ZSTD])
def test_compression_makes_like_messages_smaller(codec: Compression) -> None:
    payloads = [b'{"order": %d, "status": "paid", "currency": "EUR"}' % i for i in range(1000)]
    plain = RecordBatch.encode(payloads, publish_time=list(range(1000)))
    packed = RecordBatch.encode(payloads, publish_time=list(range(1000)), codec=codec)
    assert packed.header.length < plain.header.length / 3
    assert packed.header.body_size == plain.header.body_size
    assert RecordBatch.parse(packed.to_bytes()).verify().payloads() == plain.payloads()


@pytest.mark.parametrize(
    "make",
    [
        lambda: RecordBatch.encode([], publish_time=0),
        lambda: RecordBatch.encode([b"a", None], publish_time=0),  # type: ignore[list-item]
        lambda: RecordBatch.encode([1], publish_time=0),  # type: ignore[list-item]
        lambda: RecordBatch.encode(["text"], publish_time=0),  # type: ignore[list-item]
        lambda: RecordBatch.encode([memoryview(bytes(8)).cast("i")], publish_time=0),  # type: ignore[list-item]
        lambda: RecordBatch.encode([b"a"], publish_time=2**63),
        lambda: RecordBatch.encode([b"a"], publish_time=[2**63]),
        lambda: RecordBatch.encode([b"a"], publish_time=[]),
        lambda: RecordBatch.encode([b"a"], publish_time=[None]),  # type: ignore[list-item]
        lambda: RecordBatch.encode([b"a"], publish_time=0, keys=["a", "b"]),
        lambda: RecordBatch.encode([b"a"], publish_time=0, keys=["\ud800"]),
        lambda: RecordBatch.encode([b"a"], publish_time=0, keys=[b"\xff"]),  # type: ignore[list-item]
        lambda: RecordBatch.encode([b"a"], publish_time=0, attributes=[None]),  # type: ignore[list-item]
        lambda: RecordBatch.encode([b"a"], publish_time=0, attributes=[{"a": None}]),  # type: ignore[dict-item]
        lambda: RecordBatch.encode([b"a"], publish_time=0, attributes=[{None: "a"}]),  # type: ignore[dict-item]
        lambda: RecordBatch.encode([b"a"], publish_time=0, attributes=[{"a": "\udfff"}]),
        lambda: RecordBatch.encode([b"a"], publish_time=0, schema_version=2**31),
        lambda: RecordBatch.encode([b"a"], publish_time=0, origins=[Origin("eu", 2**63)]),
        lambda: RecordBatch.encode([b"a"], publish_time=0, producer_id=-1),
        lambda: RecordBatch.encode([b"a"], publish_time=0, producer="\ud800"),
        lambda: RecordBatch.encode([b"a"], publish_time=0, producer=["a", "b"]),
        lambda: RecordBatch.encode([b"a"], publish_time=0, base_sequence=2**63),
    ],
)
def test_values_that_the_format_cannot_hold(make: Callable[[], Any]) -> None:
    with pytest.raises(InvalidMessage):
        make()


def test_an_origin_is_given_whole_or_not_at_all() -> None:
    messages = [Message(b"", origin=Origin("eu", 1)), Message(b"", origin=None)]
    assert list(RecordBatch.from_messages(messages)) == messages
    with pytest.raises(InvalidMessage):
        RecordBatch.from_messages([Message(b"", origin=Origin("eu", None))])  # type: ignore[arg-type]


def test_limits() -> None:
    with pytest.raises(BatchTooLarge) as count:
        RecordBatch.encode([b""] * (MAX_COUNT + 1), publish_time=0)
    assert (count.value.size, count.value.limit) == (MAX_COUNT + 1, MAX_COUNT)
    half = bytes(MAX_BATCH_BYTES // 2)
    for codec in Compression:
        with pytest.raises(BatchTooLarge):
            RecordBatch.encode([half, half], publish_time=0, codec=codec)
    with pytest.raises(BatchTooLarge):
        RecordBatch.encode([b""] * 100_000, publish_time=0, keys=["k" * 1000] * 100_000)
    with pytest.raises(BatchTooLarge):
        RecordBatch.encode([b""] * 100_000, publish_time=0, producer="p" * 1000)


def test_the_largest_number_of_messages() -> None:
    batch = RecordBatch.encode([b""] * MAX_COUNT, publish_time=0).verify()
    assert batch.to_arrow().num_rows == MAX_COUNT
    assert batch.to_arrow().column("attributes").null_count == MAX_COUNT


def test_a_message_is_a_value() -> None:
    assert Message(b"a") == Message(payload=b"a", key=None, attributes={}, publish_time=0)
    assert len({message.payload for message in RICH}) == 3
    with pytest.raises(AttributeError):
        RICH[0].payload = b""  # type: ignore[misc]


def test_one_value_for_all_rows_is_known_without_writing_it_out() -> None:
    batch = RecordBatch.encode([b"a", b"b"], publish_time=1, producer="p", keys=["x", None])

    assert batch.constant("producer") == "p"
    assert batch.constant("key") is None
    assert batch.is_of("p")
    assert not batch.is_of("q")
