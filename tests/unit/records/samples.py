"""Messages and batches for the tests of ``sava.records``, and a forger's tools."""

from __future__ import annotations

import struct
from typing import Any

import google_crc32c
from hypothesis import strategies as st

from sava.records import (
    DERIVED_COLUMNS,
    HEADER_BYTES,
    PREFIX_BYTES,
    STORED_COLUMNS,
    Message,
    Origin,
    RecordBatch,
)

ALL_COLUMNS = (*DERIVED_COLUMNS, *STORED_COLUMNS)

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(max_size=12)

MESSAGES = st.lists(
    st.builds(
        Message,
        payload=st.binary(max_size=40),
        key=st.none() | TEXT,
        attributes=st.dictionaries(TEXT, TEXT, max_size=3),
        publish_time=INT64,
        schema_id=st.none() | INT64,
        schema_version=st.none() | st.integers(-(2**31), 2**31 - 1),
        origin=st.none() | st.builds(Origin, TEXT, INT64),
        producer=st.none() | TEXT,
    ),
    min_size=1,
    max_size=20,
)
"""Messages with nothing in common."""

UNIFORM = st.builds(
    lambda message, count: [message] * count, MESSAGES.map(lambda messages: messages[0]), st.integers(1, 20)
)
"""Messages with everything in common: every column constant or absent."""

RICH = [
    Message(b"one", "k", {"a": "1"}, 1000, 7, 2, Origin("eu", 5), "web"),
    Message(b"", None, {}, 1001, 7, 3, None, None),
    Message("é!".encode(), "clé", {"b": "22", "c": ""}, 999, 7, None, Origin("us", 6), "app"),
]
"""One constant column (the schema id); all others hold different values, and nulls where they may."""


def rich() -> RecordBatch:
    return RecordBatch.from_messages(RICH, producer_id=3, base_sequence=10)


def numbered(count: int, **options: Any) -> RecordBatch:
    """A batch of payloads b"0", b"1", …"""
    return RecordBatch.encode([b"%d" % i for i in range(count)], publish_time=1000, **options)


def placed(batch: RecordBatch, base_offset: int = 100) -> RecordBatch:
    return batch.assigned(topic_id=1, epoch=2, base_offset=base_offset)


def seal(data: bytes | bytearray) -> bytes:
    """Make length, body size and checksum fit what is there, as a forger would."""
    forged = bytearray(data)
    struct.pack_into("<I", forged, 8, len(forged))
    if not forged[48]:
        struct.pack_into("<I", forged, 44, len(forged) - HEADER_BYTES)
    struct.pack_into("<I", forged, 12, google_crc32c.value(bytes(forged[PREFIX_BYTES:])))
    return bytes(forged)


def patch(data: bytes, form: str, position: int, value: Any) -> bytes:
    forged = bytearray(data)
    struct.pack_into(form, forged, position, value)
    return bytes(forged)


def read_everything(batch: RecordBatch) -> list[Message]:
    """Touch every byte that a batch exposes, in all the ways there are."""
    messages = list(batch.verify())
    columns = ALL_COLUMNS if batch.header.is_assigned else ALL_COLUMNS[1:]
    arrow = batch.to_arrow(columns)
    arrow.validate(full=True)
    for name in ("payload", "key", "attributes", "origin_cluster", "origin_offset"):
        assert len(arrow.column(name).to_pylist()) == len(messages)
    if batch.header.is_assigned and len(batch) > 1:
        tail = batch.slice(batch.base_offset + 1, batch.next_offset)
        assert list(RecordBatch.parse(tail.to_bytes()).verify()) == messages[1:]
    return messages
