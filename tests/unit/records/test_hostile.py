"""Bytes from somebody who means harm: a typed error or a readable batch, nothing else, and little memory.

Forged batches have a right checksum and a right length, so only the structural checks stand between them and
Arrow's unchecked reads. They run in this process: a crash would end the whole test run.
"""

from __future__ import annotations

import random
import struct
from itertools import product

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sava.errors import SavaError
from sava.records import (
    HEADER_BYTES,
    MAX_BATCH_BYTES,
    MAX_COUNT,
    PREFIX_BYTES,
    BatchCorrupt,
    BatchTooLarge,
    Compression,
    Message,
    RecordBatch,
    iter_batches,
    peek_header,
)
from tests.unit.records.samples import MESSAGES, numbered, patch, placed, read_everything, rich, seal

PLAIN = placed(rich()).to_bytes()
HOSTILE_INT32 = [-(2**31), -1, 1, 2, 7, 8, 2**16, 2**31 - 1]
HOSTILE_INT64 = [-(2**63), -2, -1, 0, 1, 2**31, 2**63 - 1]


def survive(data: bytes) -> list[Message] | None:
    """The messages, or None when the batch is refused."""
    try:
        return read_everything(RecordBatch.parse(data))
    except SavaError:
        return None


@given(st.binary(max_size=300))
def test_arbitrary_bytes(data: bytes) -> None:
    assert survive(data) is None
    assert survive(b"SAVB\x01\0\0\0" + data) is None
    with pytest.raises(SavaError):
        list(iter_batches(b"?" + data))


def test_every_flipped_bit_is_seen() -> None:
    expected = read_everything(RecordBatch.parse(PLAIN))
    for position, bit in product(range(len(PLAIN)), range(8)):
        flipped = bytearray(PLAIN)
        flipped[position] ^= 1 << bit
        messages = survive(bytes(flipped))
        if 16 <= position < PREFIX_BYTES:  # the broker's part: covered by the journal's own checksum
            continue
        assert messages is None, (position, bit, expected)


def test_every_truncation_is_seen() -> None:
    for size in range(len(PLAIN)):
        assert survive(PLAIN[:size]) is None
        assert size < HEADER_BYTES or survive(seal(PLAIN[:size])) is None
    assert survive(PLAIN + b"\0") is None
    assert survive(seal(PLAIN + bytes(8))) is None


def test_every_flipped_bit_under_a_forged_checksum() -> None:
    for position, bit in product(range(PREFIX_BYTES, len(PLAIN)), range(8)):
        flipped = bytearray(PLAIN)
        flipped[position] ^= 1 << bit
        survive(seal(flipped))


def test_hostile_numbers_at_every_place_under_a_forged_checksum() -> None:
    for position, value in product(range(16, len(PLAIN) - 3, 4), HOSTILE_INT32):
        survive(seal(patch(PLAIN, "<i", position, value)))
    for position, value in product(range(16, len(PLAIN) - 7, 8), HOSTILE_INT64):
        survive(seal(patch(PLAIN, "<q", position, value)))


def test_every_layout_over_the_same_body() -> None:
    for layout in range(0, 1 << 18, 29):
        survive(seal(patch(PLAIN, "<I", 52, layout)))


@given(MESSAGES, st.data(), st.sampled_from(Compression))
def test_mutated_batches_under_a_forged_checksum(
    messages: list[Message], data: st.DataObject, codec: Compression
) -> None:
    forged = bytearray(placed(RecordBatch.from_messages(messages, codec=codec)).to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(PREFIX_BYTES, len(forged) - 1))
        kind = data.draw(st.sampled_from(["byte", "int", "cut", "insert"]))
        if kind == "byte":
            forged[position] = data.draw(st.integers(0, 255))
        elif kind == "int" and position + 4 <= len(forged):
            struct.pack_into("<i", forged, position, data.draw(st.sampled_from(HOSTILE_INT32)))
        elif kind == "cut" and position > HEADER_BYTES:
            del forged[position : position + data.draw(st.integers(1, 16))]
        elif kind == "insert":
            forged[position:position] = data.draw(st.binary(max_size=16))
    survive(seal(forged))


def test_random_bodies_behind_a_valid_header() -> None:
    seed = 20250731
    chance = random.Random(seed)
    for _ in range(3000):
        body = bytes(chance.choices((0, 1, 2, 3, 4, 8, 255), k=8 * chance.randrange(1, 40)))
        header = bytearray(PLAIN[:HEADER_BYTES])
        struct.pack_into("<I", header, 40, chance.choice((1, 1, 2, 3, 8)))
        struct.pack_into("<I", header, 52, chance.randrange(1 << 14) << 4 | 0b0110)
        survive(seal(bytes(header) + body))


OFFSETS = HEADER_BYTES
"""Where the payload's offsets [0, 3, 3, 6] are in ``rich``."""


@pytest.mark.parametrize(
    "offsets",
    [
        (1, 3, 3, 6),  # does not begin with 0
        (0, 3, 2, 6),  # falls
        (0, 7, 3, 6),  # passes the end and comes back
        (0, -1, 3, 6),
        (0, 3, 3, 2**31 - 1),
        (0, 3, 3, -6),
        (0, 3, 3, 14),  # takes the next column for its data
    ],
)
def test_hostile_offsets(offsets: tuple[int, ...]) -> None:
    forged = bytearray(PLAIN)
    struct.pack_into("<4i", forged, OFFSETS, *offsets)
    with pytest.raises(BatchCorrupt):
        RecordBatch.parse(seal(forged)).payloads()  # no verify: structure is checked all the same


def test_text_must_be_utf8() -> None:
    position = PLAIN.index("clé".encode())
    for column in (
        position,
        PLAIN.index(b"abc"),
        PLAIN.index(b"122"),
        PLAIN.index(b"euus"),
        PLAIN.index(b"webapp"),
    ):
        with pytest.raises(BatchCorrupt):
            RecordBatch.parse(seal(patch(PLAIN, "B", column, 0xFF))).to_arrow()


def test_the_headers_publish_times_must_be_true() -> None:
    for position, value in ((72, 998), (80, 1002)):
        with pytest.raises(BatchCorrupt, match="publish times"):
            RecordBatch.parse(seal(patch(PLAIN, "<q", position, value))).verify()


def test_an_origin_has_both_parts() -> None:
    validity = PLAIN.index(b"euus") + 8
    assert PLAIN[validity] == 0b101
    with pytest.raises(BatchCorrupt, match="origin"):
        RecordBatch.parse(seal(patch(PLAIN, "B", validity, 0b111))).verify()


def test_a_message_without_attributes_has_no_entries() -> None:
    position = PLAIN.index(b"abc") - 16 - 16 - 8
    assert PLAIN[position] == 0b101
    with pytest.raises(BatchCorrupt, match="attributes"):
        RecordBatch.parse(seal(patch(PLAIN, "B", position, 0b011))).verify()


def test_sizes_are_refused_from_the_header_alone() -> None:
    for position, value in ((8, MAX_BATCH_BYTES + 1), (40, MAX_COUNT + 1), (44, MAX_BATCH_BYTES + 1)):
        with pytest.raises(BatchTooLarge):
            peek_header(patch(PLAIN, "<I", position, value))
    for position in (8, 40):
        with pytest.raises(BatchCorrupt):
            peek_header(patch(PLAIN, "<I", position, 0))


def test_a_constant_cannot_stand_for_more_than_a_batch_may_hold() -> None:
    payloads, key = [b""] * 100_000, "k" * 600
    data = bytearray(RecordBatch.encode(payloads, publish_time=0, keys=[key] * 100_000).to_bytes())
    at = data.index(b"kkk")
    data[at : at + 600] = b"k" * 1200
    struct.pack_into("<i", data, at - 4, 1200)
    with pytest.raises(BatchTooLarge, match="constant key"):
        RecordBatch.parse(seal(data)).to_arrow()


@pytest.mark.parametrize("codec", [Compression.LZ4, Compression.ZSTD])
def test_a_declared_size_that_is_not_the_real_one(codec: Compression) -> None:
    data = numbered(1000, codec=codec).to_bytes()
    size = peek_header(data).body_size
    for declared in (0, 8, size - 8, size - 1, size + 1, size + 8, 2 * size, MAX_BATCH_BYTES):
        with pytest.raises(BatchCorrupt):
            RecordBatch.parse(seal(patch(data, "<I", 44, declared))).verify()


@pytest.mark.parametrize("codec", [Compression.LZ4, Compression.ZSTD])
def test_a_bomb_is_bounded(codec: Compression) -> None:
    """64 MB of zeros in a few hundred kilobytes or less: what is declared is what may be allocated."""
    zeros = bytes(MAX_BATCH_BYTES * 4)
    bomb = pa.Codec(codec.name.lower()).compress(zeros, asbytes=True)
    header = bytearray(numbered(1, codec=codec).to_bytes()[:HEADER_BYTES])
    struct.pack_into("<I", header, 44, MAX_BATCH_BYTES)
    before = pa.total_allocated_bytes()
    with pytest.raises(BatchCorrupt):
        RecordBatch.parse(seal(bytes(header) + bomb)).verify()
    assert pa.total_allocated_bytes() - before < 1 << 20
