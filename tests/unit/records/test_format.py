"""The format, byte by byte. A change that breaks a test here makes the journals of brokers unreadable."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pyarrow as pa
import pytest

from sava.records import (
    HEADER_BYTES,
    PREFIX_BYTES,
    UNASSIGNED,
    BatchCorrupt,
    Compression,
    RecordBatch,
    UnsupportedBatch,
    iter_batches,
    peek_header,
)
from tests.unit.records.samples import RICH, numbered, patch, placed, rich

GOLDEN = """
    53415642 01 000000                   | magic, version, reserved
    70010000 9be44ec4                    | length 368, crc
    0000000000000000                     | topic id: none yet
    0000000000000000                     | epoch: none yet
    ffffffffffffffff                     | base offset: none yet
    03000000 18010000                    | 3 messages, body of 280 bytes
    0000 0000 fafd0300                   | no compression; reserved; layout 11 11 11 11 01 11 11 10 10
    0300000000000000                     | producer 3
    0a00000000000000                     | base sequence 10
    e703000000000000                     | earliest publish time 999
    e903000000000000                     | latest publish time 1001
    00000000 03000000 03000000 06000000  | payload: offsets
    6f6e65 c3a921 0000                   | payload: data
    e803000000000000                     | publish_time: 1000
    e903000000000000                     | publish_time: 1001
    e703000000000000                     | publish_time: 999
    05 00000000000000                    | key: validity 101
    00000000 01000000 01000000 05000000  | key: offsets
    6b 636cc3a9 000000                   | key: data
    05 00000000000000                    | attributes: validity 101
    00000000 01000000 01000000 03000000  | attributes: entry offsets
    00000000 01000000 02000000 03000000  | attributes: name offsets
    61 62 63 0000000000                  | attributes: names
    00000000 01000000 03000000 03000000  | attributes: value offsets
    31 3232 0000000000                   | attributes: values
    0700000000000000                     | schema_id: constant
    03 00000000000000                    | schema_version: validity 011
    02000000 03000000 00000000 00000000  | schema_version: values
    05 00000000000000                    | origin_cluster: validity 101
    00000000 02000000 02000000 04000000  | origin_cluster: offsets
    6575 7573 00000000                   | origin_cluster: data
    05 00000000000000                    | origin_offset: validity 101
    0500000000000000                     | origin_offset: 5
    0000000000000000                     | origin_offset: null
    0600000000000000                     | origin_offset: 6
    05 00000000000000                    | producer: validity 101
    00000000 03000000 03000000 06000000  | producer: offsets
    776562 617070 0000                   | producer: data
"""

GOLDEN_ONE = """
    53415642 01 000000                   | magic, version, reserved
    80000000 bd7eb308                    | length 128, crc
    0500000000000000                     | topic id 5
    0600000000000000                     | epoch 6
    0700000000000000                     | base offset 7
    01000000 28000000                    | 1 message, body of 40 bytes
    0000 0000 16000000                   | no compression; reserved; layout 00 00 00 00 00 00 01 01 10
    0000000000000000                     | no producer
    0000000000000000                     | base sequence 0
    0400000000000000                     | earliest publish time 4
    0400000000000000                     | latest publish time 4
    00000000 05000000                    | payload: offsets
    68656c6c6f 000000                    | payload: data
    0400000000000000                     | publish_time: constant
    00000000 01000000                    | key: constant, offsets
    6b 00000000000000                    | key: constant, data
"""


def golden(listing: str) -> bytes:
    return bytes.fromhex("".join(line.split("|")[0] for line in listing.splitlines()))


def crc32c(data: bytes) -> int:
    """CRC-32C as the textbooks have it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_the_checksum_is_crc32c_of_all_that_follows_the_prefix() -> None:
    assert rich().header.crc == crc32c(golden(GOLDEN)[PREFIX_BYTES:])


def test_the_bytes_of_a_batch_with_every_kind_of_column() -> None:
    assert rich().to_bytes() == golden(GOLDEN)
    assert list(RecordBatch.parse(golden(GOLDEN)).verify()) == RICH


def test_the_bytes_of_a_batch_of_one() -> None:
    batch = RecordBatch.encode([b"hello"], publish_time=4, keys=["k"])
    placed_batch = batch.assigned(topic_id=5, epoch=6, base_offset=7)
    assert placed_batch.to_bytes() == golden(GOLDEN_ONE)


def test_header_fields() -> None:
    header = peek_header(placed(rich()).data)
    assert (header.topic_id, header.epoch, header.base_offset, header.next_offset) == (1, 2, 100, 103)
    assert (header.count, header.length, header.body_size) == (3, 368, 368 - HEADER_BYTES)
    assert (header.producer_id, header.base_sequence, header.next_sequence) == (3, 10, 13)
    assert (header.min_publish_time, header.max_publish_time) == (999, 1001)
    assert header.codec is Compression.NONE
    assert header.is_assigned


def test_a_batch_of_a_client_has_no_offsets() -> None:
    header = rich().header
    assert not header.is_assigned
    assert header.base_offset == header.next_offset == UNASSIGNED
    assert [message.offset for message in rich()] == [None] * 3


def test_the_header_can_be_read_before_the_body_has_arrived() -> None:
    assert peek_header(rich().to_bytes()[:HEADER_BYTES]) == rich().header


def test_a_large_batch_lends_its_bytes_instead_of_copying_them() -> None:
    data = RecordBatch.encode([bytes(100_000)], publish_time=1).to_bytes()
    _, rest = RecordBatch.parse(data).assigned(topic_id=9, epoch=8, base_offset=7).buffers
    assert rest.address == pa.py_buffer(data).address + PREFIX_BYTES


def test_an_assigned_batch_has_a_prefix_of_its_own_and_shares_the_rest() -> None:
    data = rich().to_bytes()
    batch = RecordBatch.parse(data).assigned(topic_id=9, epoch=8, base_offset=7)
    prefix, rest = batch.buffers
    assert len(prefix) == PREFIX_BYTES
    assert rest == data[PREFIX_BYTES:]
    whole = prefix + data[PREFIX_BYTES:]
    received = RecordBatch.parse(whole).verify()
    assert (received.header.topic_id, received.header.epoch, received.base_offset) == (9, 8, 7)
    assert [message.offset for message in received] == [7, 8, 9]
    assert list(batch.verify()) == list(received)
    assert batch.data == batch.to_bytes() == whole
    assert batch.buffers[0] == prefix
    assert data == rich().to_bytes()


def test_an_assigned_batch_can_be_moved_and_cut() -> None:
    batch = placed(rich()).assigned(topic_id=9, epoch=10, base_offset=70)
    part = batch.slice(71, 73)
    assert (part.header.epoch, part.base_offset, part.payloads()) == (10, 71, rich().payloads()[1:])
    prefix, rest = batch.slice(71, 73).buffers
    assert prefix + memoryview(rest) == part.to_bytes()
    assert pickle.loads(pickle.dumps(batch)).to_bytes() == batch.to_bytes()


def test_there_is_no_place_for_a_batch_at_the_end_of_int64() -> None:
    with pytest.raises(BatchCorrupt):
        rich().assigned(topic_id=1, epoch=1, base_offset=2**63 - 2)


def test_a_part_of_a_batch_is_none() -> None:
    with pytest.raises(BatchCorrupt):
        RecordBatch.parse(rich().to_bytes()[:-1])


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, 1000])
def test_a_batch_of_one_is_small(size: int) -> None:
    plain = RecordBatch.encode([bytes(size)], publish_time=1_750_000_000_000_000)
    assert plain.header.length - size <= 111
    full = RecordBatch.encode([bytes(size)], publish_time=1, keys=["order-1"], schema_id=1, schema_version=1)
    assert full.header.length - size < 150


def test_absent_and_constant_columns_cost_a_few_bytes() -> None:
    plain = numbered(1000).header.length
    constant = RecordBatch.encode(
        [b"%d" % i for i in range(1000)],
        publish_time=1000,
        keys=["same"] * 1000,
        attributes=[{"a": "b"}] * 1000,
        schema_id=1,
        schema_version=2,
    ).header.length
    assert constant - plain < 80


def test_the_name_of_a_producer_costs_its_length_once() -> None:
    named = numbered(1000, producer="checkout-eu-west-1").header.length
    assert named - numbered(1000).header.length == 8 + 24


def test_the_same_messages_have_the_same_bytes_in_every_process() -> None:
    program = (
        "import sys; from tests.unit.records.samples import rich; sys.stdout.buffer.write(rich().to_bytes())"
    )
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        assert run.stdout == golden(GOLDEN)


@pytest.mark.parametrize("codec", list(Compression))
def test_batches_laid_end_to_end(codec: Compression) -> None:
    batches = [placed(numbered(count, codec=codec), 10 * count) for count in (1, 2, 3)]
    stream = b"".join(batch.to_bytes() for batch in batches)
    read = list(iter_batches(stream))
    assert [batch.base_offset for batch in read] == [10, 20, 30]
    assert [batch.verify().payloads() for batch in read] == [batch.payloads() for batch in batches]
    assert list(iter_batches(b"")) == []


def test_a_stream_cut_inside_a_batch_yields_whole_batches_then_raises() -> None:
    stream = iter_batches(numbered(2).to_bytes() + numbered(3).to_bytes()[:-1])
    assert len(next(stream)) == 2
    with pytest.raises(BatchCorrupt):
        next(stream)


@pytest.mark.parametrize(
    ("position", "value"),
    [(4, 2), (5, 1), (7, 1), (48, 3), (48, 4), (49, 1), (50, 1), (51, 128), (54, 4), (55, 128)],
)
def test_what_a_newer_version_may_mean_is_refused_and_not_guessed(position: int, value: int) -> None:
    with pytest.raises(UnsupportedBatch):
        peek_header(patch(rich().to_bytes(), "B", position, value))


def test_a_batch_can_be_pickled() -> None:
    batch = placed(rich()).slice(101, 103)
    assert list(pickle.loads(pickle.dumps(batch))) == list(batch)


def test_its_repr_tells_where_it_belongs() -> None:
    assert repr(placed(rich())) == "<RecordBatch of 3, offsets [100, 103), epoch 2, producer 3 from 10>"
