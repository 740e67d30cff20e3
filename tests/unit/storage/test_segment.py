"""Segments: what goes in comes out, to Sava and to any Parquet reader; what was damaged never does."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import duckdb
import google_crc32c
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from obstore.store import MemoryStore, ObjectStoreMethods

from sava.records import Message, Origin, RecordBatch
from sava.storage import segment_file
from sava.storage.errors import (
    DataGap,
    InvalidStorageName,
    ObjectMissing,
    ObjectStoreUnavailable,
    SegmentCorrupt,
)
from sava.storage.keys import parse_object_key
from sava.storage.objectstore import ObjectStore
from sava.storage.segment import FOOTER_COST, SegmentReader, write_segment
from sava.storage.segment_file import parse_footer
from sava.storage.types import Segment, TopicKey
from tests.support.long import IS_LONG
from tests.support.messages import TOPIC, numbered, placed, read_messages, write
from tests.unit.records.samples import MESSAGES, UNIFORM
from tests.unit.storage.faults import BROKEN, FaultyBackend, cut, refuse

RICH = [
    Message(b"one", "k", {"a": "1"}, 1_000_000, 7, 2, Origin("eu", 5), "web"),
    Message(b"", None, {}, 1_000_001, None, None, None),
    Message(b"\x00\xff", "clé", {"b": "", "c": "22"}, 999_999, 7, 3, Origin("us", 6), "app"),
]
COLUMNS = [
    "topic",
    "partition",
    "offset",
    "publish_time",
    "key",
    "payload",
    "attributes",
    "producer",
    "schema_id",
    "schema_version",
    "origin_cluster",
    "origin_offset",
]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(f"file://{tmp_path}")


@pytest.fixture
def backend() -> FaultyBackend:
    return FaultyBackend(MemoryStore())


@pytest.fixture
def flaky(backend: FaultyBackend) -> ObjectStore:
    return ObjectStore("memory://", backend, timeout_s=5, attempts=2, pause_s=0.001)


async def write_rich(store: ObjectStore) -> Segment:
    batches = placed(
        [
            RecordBatch.from_messages(RICH, producer_id=3, base_sequence=10),
            RecordBatch.from_messages(RICH[:1]),
        ],
        100,
    )
    return await write_segment(store, TOPIC, epoch=2, batches=batches, created_ms=5)


def located(messages: list[Message], start: int) -> list[Message]:
    return [msgspec.structs.replace(message, offset=start + i) for i, message in enumerate(messages)]


# -- round trips ---------------------------------------------------------------------------


async def test_a_segment_gives_back_its_messages_and_describes_itself(store: ObjectStore) -> None:
    segment = await write_rich(store)
    assert await read_messages(SegmentReader(store), segment) == located([*RICH, RICH[0]], 100)
    assert (segment.topic_id, segment.start, segment.end, segment.epoch) == (7, 100, 104, 2)
    assert (segment.min_publish_time, segment.max_publish_time) == (999_999, 1_000_001)
    assert (await store.head(segment.key)).size == segment.size
    name = parse_object_key(segment.key)
    assert name is not None
    assert name[:4] == (TOPIC, 100, 104, 2)
    await SegmentReader(store).verify(segment)


async def test_plain_pyarrow_reads_exactly_the_messages(store: ObjectStore, tmp_path: Path) -> None:
    segment = await write_rich(store)
    table = pq.read_table(tmp_path / segment.key)
    assert table.schema.names == COLUMNS
    assert table.column("offset").to_pylist() == [100, 101, 102, 103]
    assert table.column("payload").to_pylist() == [b"one", b"", b"\x00\xff", b"one"]
    assert table.column("key").to_pylist() == ["k", None, "clé", "k"]
    assert table.column("attributes").to_pylist() == [
        [("a", "1")],
        None,
        [("b", ""), ("c", "22")],
        [("a", "1")],
    ]
    assert table.column("publish_time").cast("int64").to_pylist() == [
        1_000_000,
        1_000_001,
        999_999,
        1_000_000,
    ]
    assert table.column("producer").to_pylist() == ["web", None, "app", "web"]
    assert table.column("schema_version").to_pylist() == [2, None, 3, 2]
    assert table.column("origin_cluster").to_pylist() == ["eu", None, "us", "eu"]
    assert table.column("origin_offset").to_pylist() == [5, None, 6, 5]
    assert table.column("topic").to_pylist() == ["/default/orders"] * 4
    assert table.column("partition").to_pylist() == [0] * 4
    told = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    assert told == {
        "sava.topic_id": "7",
        "sava.epoch": "2",
        "sava.start": "100",
        "sava.end": "104",
        "sava.format": "1",
    }


async def test_duckdb_reads_exactly_the_messages(store: ObjectStore, tmp_path: Path) -> None:
    await write_rich(store)
    selected = duckdb.sql(
        f"""SELECT "offset", epoch_us(publish_time), key, payload, attributes, producer, schema_id,
                   schema_version, origin_cluster, origin_offset
            FROM '{tmp_path}/topics/default/orders/7/*.parquet' ORDER BY "offset" """
    )
    assert selected is not None
    rows = selected.fetchall()
    one = ("k", b"one", {"a": "1"})
    assert rows == [
        (100, 1_000_000, *one, "web", 7, 2, "eu", 5),
        (101, 1_000_001, None, b"", None, None, None, None, None, None),
        (102, 999_999, "clé", b"\x00\xff", {"b": "", "c": "22"}, "app", 7, 3, "us", 6),
        (103, 1_000_000, *one, "web", 7, 2, "eu", 5),
    ]


@given(st.lists(MESSAGES | UNIFORM, min_size=1, max_size=5), st.integers(0, 1 << 62), st.data())
@settings(max_examples=60, deadline=None)
def test_any_messages_round_trip(batches: list[list[Message]], start: int, data: st.DataObject) -> None:
    async def story() -> None:
        store = ObjectStore.open("memory://")
        encoded = placed([RecordBatch.from_messages(messages) for messages in batches], start)
        segment = await write_segment(store, TOPIC, epoch=1, batches=encoded, created_ms=0)
        expected = located([message for messages in batches for message in messages], start)
        reader = SegmentReader(store)
        assert await read_messages(reader, segment) == expected
        first = data.draw(st.integers(start, segment.end))
        end = data.draw(st.integers(first, segment.end))
        assert await read_messages(reader, segment, first, end) == expected[first - start : end - start]
        time = data.draw(st.sampled_from(expected)).publish_time
        late = [message.offset for message in expected if message.publish_time >= time]
        assert await reader.offset_at(segment, time) == late[0]
        await reader.verify(segment)

    asyncio.run(story())


# -- row groups ----------------------------------------------------------------------------


def row_groups(path: Path) -> list[tuple[int, int]]:
    """Rows and bytes before compression of each row group."""
    metadata = pq.read_metadata(path)
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    return [(group.num_rows, group.total_byte_size) for group in groups]


@pytest.mark.parametrize(
    ("count", "size", "per_batch"),
    [(40_000, 10, 1000), (40_000, 10, 40_000), (3000, 2000, 1), (3000, 2000, 3000), (20, 600_000, 20)],
    ids=["small", "one batch", "single messages", "large batch", "large messages"],
)
async def test_row_groups_are_small_whatever_the_batches(
    store: ObjectStore, tmp_path: Path, count: int, size: int, per_batch: int
) -> None:
    batches = numbered(50, 50 + count, size=size, per_batch=per_batch)
    segment = await write_segment(store, TOPIC, epoch=1, batches=batches, created_ms=0)
    groups = row_groups(tmp_path / segment.key)
    assert max(rows for rows, _ in groups) <= segment_file.ROW_GROUP_ROWS
    assert max(size for _, size in groups) <= 1.2 * segment_file.ROW_GROUP_BYTES
    assert sum(rows for rows, _ in groups) == count
    assert len(groups) < 2 + 4 * max(
        count * (size + 40) / segment_file.ROW_GROUP_BYTES, count / segment_file.ROW_GROUP_ROWS
    )
    messages = await read_messages(SegmentReader(store), segment)
    assert [int(message.payload[-10:]) for message in messages] == list(range(50, 50 + count))


async def test_keys_and_attributes_count_towards_a_row_group(store: ObjectStore, tmp_path: Path) -> None:
    """A constant key takes the bytes of one in a batch, and those of all once it is written out."""
    batch = RecordBatch.encode(
        [b""] * 5000, publish_time=1, keys=["k" * 1000] * 5000, attributes=[{"a": "v" * 1000}] * 5000
    )
    segment = await write_segment(store, TOPIC, epoch=1, batches=placed([batch], 0), created_ms=0)
    assert max(rows for rows, _ in row_groups(tmp_path / segment.key)) <= 2080
    assert len(await read_messages(SegmentReader(store), segment)) == 5000


async def test_a_message_larger_than_a_row_group(store: ObjectStore) -> None:
    payloads = [b"small", os.urandom(5 << 20), b"small too"]
    batch = RecordBatch.encode(payloads, publish_time=1)
    segment = await write_segment(store, TOPIC, epoch=1, batches=placed([batch], 9), created_ms=0)
    assert [message.payload for message in await read_messages(SegmentReader(store), segment)] == payloads


# -- reading little ------------------------------------------------------------------------


async def test_a_seek_reads_the_footer_and_few_row_groups(backend: FaultyBackend, flaky: ObjectStore) -> None:
    random_bytes = os.urandom(40 << 20)
    payloads = [random_bytes[start : start + 1000] for start in range(0, len(random_bytes), 1000)]
    batches = placed([RecordBatch.encode(payloads, publish_time=1)], 0)
    segment = await write_segment(flaky, TOPIC, epoch=1, batches=batches, created_ms=0)
    assert segment.size > 30 << 20
    reader = SegmentReader(flaky)
    backend.bytes_read = 0
    stream = reader.read(segment, 20_500, segment.end)
    first = await anext(stream)
    await stream.aclose()
    assert first.base_offset == 20_500
    assert backend.bytes_read < 5 << 20
    backend.calls.clear()
    assert [message.offset for message in await read_messages(reader, segment, 30_000, 30_001)] == [30_000]
    assert backend.calls == ["get_ranges_async"], "the footer is known by now, and one row group is one read"


async def test_columns_that_say_nothing_are_not_read(store: ObjectStore, tmp_path: Path) -> None:
    """Of each row group: the messages of one use other columns than those of the next."""
    rows = segment_file.ROW_GROUP_ROWS
    no_attributes = RecordBatch.from_arrow(
        pa.RecordBatch.from_arrays(
            [pa.array([b""] * rows), pa.array([[], None] * (rows // 2), pa.map_(pa.utf8(), pa.utf8()))],
            names=["payload", "attributes"],
        ),
        publish_time=1,
    )
    batches = [
        RecordBatch.encode([b""] * rows, publish_time=1, producer="web"),
        RecordBatch.encode([b""] * rows, publish_time=1, keys=[None] * (rows - 1) + ["k"]),
        no_attributes,
        RecordBatch.encode([b""] * rows, publish_time=1, attributes=[{}] * (rows - 1) + [{"a": "b"}]),
    ]
    segment = await write_segment(store, TOPIC, epoch=1, batches=placed(batches, 0), created_ms=0)
    data = (tmp_path / segment.key).read_bytes()
    footer = parse_footer(segment, data[-segment.footer_size :])
    assert [group.columns[2:] for group in footer.row_groups] == [
        ("producer",),
        ("key",),
        (),
        ("attributes",),
    ]
    messages = await read_messages(SegmentReader(store), segment)
    assert messages == located([message for batch in batches for message in batch], 0)
    await SegmentReader(store).verify(segment)


async def test_footers_are_kept_within_their_bytes(backend: FaultyBackend, flaky: ObjectStore) -> None:
    segments = [await write(flaky, start, start + 10) for start in range(0, 50, 10)]
    cost = max(segment.footer_size for segment in segments) * FOOTER_COST

    async def reads(reader: SegmentReader, segment: Segment) -> int:
        backend.calls.clear()
        await read_messages(reader, segment)
        return len(backend.calls)

    roomy = SegmentReader(flaky, footer_cache_bytes=5 * cost)
    assert [await reads(roomy, segment) for segment in segments * 2] == [2] * 5 + [1] * 5
    tight = SegmentReader(flaky, footer_cache_bytes=2 * cost)
    assert [await reads(tight, segment) for segment in segments * 2] == [2] * 10
    assert [await reads(tight, segment) for segment in segments[-2:]] == [1, 1]
    none = SegmentReader(flaky, footer_cache_bytes=0)
    assert [await reads(none, segment) for segment in segments[:1] * 2] == [2, 2]


async def test_ranges_outside_of_the_segment_are_empty(store: ObjectStore) -> None:
    segment = await write(store, 100, 200)
    reader = SegmentReader(store)
    for start, end in ((0, 100), (200, 300), (150, 150), (180, 120)):
        assert await read_messages(reader, segment, start, end) == []
    assert len(await read_messages(reader, segment, 0, 101)) == 1
    assert len(await read_messages(reader, segment, 199, 500)) == 1


async def test_offset_at_is_the_first_that_is_late_enough(store: ObjectStore) -> None:
    batches = numbered(0, 50_000, per_batch=5000)
    segment = await write_segment(store, TOPIC, epoch=1, batches=batches, created_ms=0)
    reader = SegmentReader(store)
    for time, offset in ((-5, 0), (0, 0), (1, 1), (2, 1), (66_001, 33_001), (99_998, 49_999)):
        assert await reader.offset_at(segment, time) == offset
    assert await reader.offset_at(segment, 99_999) is None


# -- writing what must not be --------------------------------------------------------------


async def test_what_is_no_segment_is_not_written(backend: FaultyBackend, flaky: ObjectStore) -> None:
    whole = numbered(0, 30, per_batch=10)

    async def attempt(batches: list[RecordBatch], topic: TopicKey = TOPIC, epoch: int = 1) -> None:
        await write_segment(flaky, topic, epoch=epoch, batches=batches, created_ms=0)

    with pytest.raises(DataGap, match="offset 10 is missing"):
        await attempt([whole[0], whole[2]])
    with pytest.raises(DataGap):
        await attempt([whole[0], whole[0]])
    with pytest.raises(ValueError, match="without messages"):
        await attempt([])
    with pytest.raises(ValueError, match="does not belong"):
        await attempt(whole, TopicKey("default", "orders", 8))
    with pytest.raises(ValueError, match="does not belong"):
        await attempt([RecordBatch.encode([b"x"], publish_time=1)])
    with pytest.raises(ValueError, match="does not belong"):
        await attempt(whole, epoch=0)
    with pytest.raises(InvalidStorageName):
        await attempt(whole, TopicKey("default", "../etc", 7))
    assert backend.calls == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:50] + b"!" + data[51:],
        lambda data: data + b"!",
    ],
    ids=["truncated", "changed", "longer"],
)
async def test_a_store_that_keeps_something_else_is_found_out(damage: Callable[[bytes], bytes]) -> None:
    with pytest.raises(SegmentCorrupt):
        await write(ObjectStore("memory://", cast(ObjectStoreMethods, _Damaging(damage)), attempts=1), 0, 100)


class _Damaging:
    """A store that changes what it is given."""

    def __init__(self, damage: Any) -> None:
        self._real, self._damage = MemoryStore(), damage

    async def put_async(self, path: str, file: Any, **options: Any) -> Any:
        return await self._real.put_async(path, self._damage(b"".join(file)), **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


async def test_an_upload_that_fails_raises(backend: FaultyBackend, flaky: ObjectStore) -> None:
    backend.plan("put_async", refuse(BROKEN), refuse(BROKEN))
    with pytest.raises(ObjectStoreUnavailable):
        await write(flaky, 0, 10)


# -- damage --------------------------------------------------------------------------------


async def outcome(store: ObjectStore, segment: Segment) -> object:
    """What a reader gets: the messages, or a typed error."""
    reader = SegmentReader(store)
    try:
        messages = await read_messages(reader, segment)
        return messages, await reader.offset_at(segment, 1_000_001)
    except SegmentCorrupt:
        return SegmentCorrupt


async def test_no_flipped_byte_changes_what_is_read(tmp_path: Path, store: ObjectStore) -> None:
    """Every byte of a segment (every fourth, unless there is time), one after the other: the reader sees the
    truth or an error, and verify sees every flip."""
    segment = await write_rich(store)
    path = tmp_path / segment.key
    whole = path.read_bytes()
    truth = await outcome(store, segment)
    errors = 0
    positions = range(0, len(whole), 1 if IS_LONG else 4)
    for position in positions:
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x41]) + whole[position + 1 :])
        found = await outcome(store, segment)
        assert found in (truth, SegmentCorrupt), position
        errors += found is SegmentCorrupt
        if position % 100 == 0:
            with pytest.raises(SegmentCorrupt):
                await SegmentReader(store).verify(segment)
    assert errors > len(positions) // 2


async def test_no_truncation_is_read_as_less(tmp_path: Path) -> None:
    store = ObjectStore.open(f"file://{tmp_path}", attempts=1)
    segment = await write_rich(store)
    path = tmp_path / segment.key
    whole = path.read_bytes()
    for size in range(0, len(whole), 37):
        path.write_bytes(whole[:size])
        assert await outcome(store, segment) is SegmentCorrupt
        with pytest.raises(SegmentCorrupt, match=f"{size} bytes instead of {len(whole)}"):
            await SegmentReader(store).verify(segment)


@pytest.mark.parametrize(
    "change",
    [
        {"topic_id": 8},
        {"epoch": 9},
        {"start": 99},
        {"end": 105},
        {"footer_size": 100},
        {"footer_crc32c": 0},
        {"size": 100},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_a_descriptor_of_another_object_is_found_out(
    store: ObjectStore, change: dict[str, int]
) -> None:
    segment = msgspec.structs.replace(await write_rich(store), **change)
    assert await outcome(store, segment) is SegmentCorrupt


@pytest.mark.parametrize("change", [{"min_publish_time": 0}, {"max_publish_time": 2_000_000}, {"crc32c": 1}])
async def test_verify_compares_with_the_descriptor(store: ObjectStore, change: dict[str, int]) -> None:
    segment = msgspec.structs.replace(await write_rich(store), **change)
    with pytest.raises(SegmentCorrupt):
        await SegmentReader(store).verify(segment)


async def test_a_foreign_parquet_file_is_no_segment(store: ObjectStore, tmp_path: Path) -> None:
    segment = await write_rich(store)
    path = tmp_path / segment.key
    table = pq.read_table(path)
    foreigners = [
        (table.drop_columns(["key"]), {}),
        (table.replace_schema_metadata({}), {}),
        (table.slice(1), {}),
        (table.take([0, 2, 1, 3]), {}),
        (table, {"write_statistics": False}),
        (table.set_column(0, table.schema.field(0), pa.array(["/default/order"] * 4)), {}),
        (table.set_column(1, table.schema.field(1), pa.array([0, 0, 1, 0], pa.int32())), {}),
    ]
    for foreign, options in foreigners:
        pq.write_table(foreign, path, **options)
        with pytest.raises(SegmentCorrupt):
            await SegmentReader(store).verify(describing(path.read_bytes(), segment))
    pq.write_table(table, path)
    await SegmentReader(store).verify(describing(path.read_bytes(), segment))


def describing(data: bytes, segment: Segment) -> Segment:
    """A descriptor whose checksums fit, as a forger would make it."""
    footer_size = int.from_bytes(data[-8:-4], "little") + 8
    return msgspec.structs.replace(
        segment,
        size=len(data),
        crc32c=google_crc32c.value(data),
        footer_size=footer_size,
        footer_crc32c=google_crc32c.value(data[-footer_size:]),
    )


async def test_an_object_that_was_deleted(store: ObjectStore) -> None:
    segment = await write_rich(store)
    await store.delete([segment.key])
    with pytest.raises(ObjectMissing):
        await read_messages(SegmentReader(store), segment)


# -- a store in trouble --------------------------------------------------------------------


async def test_a_read_survives_what_passes(backend: FaultyBackend, flaky: ObjectStore) -> None:
    segment = await write(flaky, 0, 100)
    backend.plan("get_ranges_async", refuse(BROKEN), cut(0), *[cut(5)])
    with pytest.raises(ObjectStoreUnavailable):
        await read_messages(SegmentReader(flaky), segment)
    backend.plan("get_ranges_async")
    assert len(await read_messages(SegmentReader(flaky), segment)) == 100


async def test_a_store_that_goes_down_in_the_middle_of_a_read(
    backend: FaultyBackend, flaky: ObjectStore
) -> None:
    """What came is right, and the reader hears that the rest did not: never an early end."""
    batches = numbered(0, 100_000, size=100)
    segment = await write_segment(flaky, TOPIC, epoch=1, batches=batches, created_ms=0)
    reader = SegmentReader(flaky)
    await read_messages(reader, segment, 0, 1)

    async def works(call: Any) -> Any:
        return await call()

    backend.plan("get_ranges_async", works, works, *[refuse(BROKEN)] * 20)
    seen: list[RecordBatch] = []
    with pytest.raises(ObjectStoreUnavailable):
        await collect(reader.read(segment, 0, segment.end), seen)
    assert [batch.base_offset for batch in seen] == [0, *(batch.next_offset for batch in seen[:-1])]
    assert 0 < seen[-1].next_offset < segment.end


async def collect(stream: AsyncIterator[RecordBatch], into: list[RecordBatch]) -> None:
    async for batch in stream:
        into.append(batch)  # noqa: PERF401 (what came before an error counts)
