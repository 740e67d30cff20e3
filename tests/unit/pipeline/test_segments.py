"""Segments as Spark's tasks read them: the wanted rows and columns, from a directory and from a store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest

from sava.pipeline.cluster import Objects
from sava.pipeline.source.columns import Bounds
from sava.pipeline.source.reading import MappedFile, StoredObject, open_source, read_segment
from sava.records import STORED_COLUMNS, Message, Origin, RecordBatch
from sava.storage import segment_file
from sava.storage.errors import ObjectMissing, SegmentCorrupt
from sava.storage.objectstore import ObjectStore
from sava.storage.segment import write_segment
from sava.storage.types import Segment
from tests.support.messages import TOPIC, numbered, placed

Open = Callable[[Segment], MappedFile | StoredObject]


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return ObjectStore.open(f"file://{tmp_path}")


@pytest.fixture(params=["mapped", "fetched"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    """A segment in either way; they must not differ."""
    url = f"file://{tmp_path}"
    if request.param == "mapped":
        return lambda segment: open_source(url, segment)
    return lambda segment: StoredObject(Objects.of(url), segment)


async def written(store: ObjectStore, batches: list[RecordBatch]) -> Segment:
    return await write_segment(store, TOPIC, epoch=1, batches=batches, created_ms=0)


def rows_of(
    source: MappedFile | StoredObject,
    segment: Segment,
    start: int,
    end: int,
    columns: tuple[str, ...],
    times: Bounds | None = None,
) -> tuple[list[int], dict[str, list[Any]]]:
    """Offsets, and the values of each column, None where nothing was read."""
    offsets: list[int] = []
    values: dict[str, list[Any]] = {name: [] for name in columns}
    for rows in read_segment(source, segment, start, end, columns, times):
        count = rows.end - rows.start
        offsets += range(rows.start, rows.end)
        for name in columns:
            array = rows.columns.get(name)
            values[name] += [None] * count if array is None else array.to_pylist()
    return offsets, values


async def test_any_range_of_many_row_groups(store: ObjectStore, opened: Open) -> None:
    segment = await written(store, numbered(1000, 60_000, size=100))
    for start, end in ((1000, 60_000), (1000, 1001), (12_345, 23_456), (59_999, 60_000)):
        offsets, values = rows_of(opened(segment), segment, start, end, ("payload",))
        assert offsets == list(range(start, end))
        assert values["payload"] == [b"%0100d" % offset for offset in range(start, end)]


async def test_all_columns(store: ObjectStore, opened: Open) -> None:
    messages = [
        Message(b"one", "k", {"a": "1"}, 1_000_000, 7, 2, Origin("eu", 5), "web"),
        Message(b"", None, {}, 1_000_001, None, None, None),
        Message(b"\x00\xff", "clé", {"b": "", "c": "22"}, 999_999, 7, 3, Origin("us", 6), "app"),
    ]
    segment = await written(store, placed([RecordBatch.from_messages(messages)], 5))
    offsets, values = rows_of(opened(segment), segment, 5, 8, STORED_COLUMNS)
    assert offsets == [5, 6, 7]
    assert values["payload"] == [b"one", b"", b"\x00\xff"]
    assert values["key"] == ["k", None, "clé"]
    assert [dict(entries or ()) for entries in values["attributes"]] == [{"a": "1"}, {}, {"b": "", "c": "22"}]
    assert values["schema_version"] == [2, None, 3]
    assert values["origin_offset"] == [5, None, 6]
    assert values["producer"] == ["web", None, "app"]


async def test_columns_of_nulls_are_not_read(store: ObjectStore, opened: Open) -> None:
    segment = await written(store, numbered(0, 100))
    (rows,) = read_segment(opened(segment), segment, 0, 100, ("key", "producer", "publish_time"), None)
    assert list(rows.columns) == ["publish_time"]


async def test_offsets_alone_need_no_page(store: ObjectStore, tmp_path: Path) -> None:
    """Everything before the footer is overwritten: nobody notices who does not read it."""
    segment = await written(store, numbered(0, 30_000))
    path = tmp_path / segment.key
    with path.open("r+b") as file:
        file.write(bytes(segment.size - segment.footer_size))
    offsets, _ = rows_of(open_source(f"file://{tmp_path}", segment), segment, 7, 29_999, ())
    assert offsets == list(range(7, 29_999))


async def test_row_groups_outside_of_the_times_are_left_out(store: ObjectStore, opened: Open) -> None:
    segment = await written(store, numbered(0, 60_000, size=100))
    offsets, _ = rows_of(opened(segment), segment, 0, 60_000, (), Bounds(2 * 30_000, 2 * 30_001))
    assert 30_000 in offsets
    assert len(offsets) < 30_000
    assert rows_of(opened(segment), segment, 0, 60_000, (), Bounds(2 * 60_000, 1 << 62))[0] == []


async def test_a_deleted_segment_is_missing(store: ObjectStore, opened: Open, tmp_path: Path) -> None:
    segment = await written(store, numbered(0, 10))
    (tmp_path / segment.key).unlink()
    with pytest.raises(ObjectMissing):
        rows_of(opened(segment), segment, 0, 10, ("payload",))


async def test_a_damaged_page_is_found(store: ObjectStore, opened: Open, tmp_path: Path) -> None:
    segment = await written(store, numbered(0, 1000))
    path = tmp_path / segment.key
    payloads = pq.read_metadata(path).row_group(0).column(segment_file.SCHEMA.names.index("payload"))
    assert payloads.path_in_schema == "payload"
    position = payloads.data_page_offset + payloads.total_compressed_size // 2
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(SegmentCorrupt):
        rows_of(opened(segment), segment, 0, 1000, STORED_COLUMNS)


@pytest.mark.parametrize("change", [{"footer_crc32c": 1}, {"start": 1}, {"topic_id": 8}, {"epoch": 2}])
async def test_another_segment_under_the_same_key_is_found(
    store: ObjectStore, opened: Open, change: dict[str, int]
) -> None:
    segment = msgspec.structs.replace(await written(store, numbered(0, 10)), **change)
    with pytest.raises(SegmentCorrupt):
        rows_of(opened(segment), segment, 0, 10, ("payload",))


async def test_a_file_of_another_size_is_found(store: ObjectStore, tmp_path: Path) -> None:
    segment = await written(store, numbered(0, 10))
    (tmp_path / segment.key).write_bytes(b"PAR1")
    with pytest.raises(SegmentCorrupt):
        MappedFile(tmp_path / segment.key, segment)
    with pytest.raises(SegmentCorrupt):
        StoredObject(Objects.of(f"file://{tmp_path}"), segment).footer()


def test_reading_does_not_make_a_directory(tmp_path: Path) -> None:
    """An executor on another machine has no such directory, and must not have one afterwards."""
    segment = Segment(
        topic_id=1,
        start=0,
        end=1,
        epoch=1,
        key="topics/a/b/1/x.parquet",
        size=100,
        crc32c=0,
        footer_size=50,
        footer_crc32c=0,
        min_publish_time=0,
        max_publish_time=0,
        created_ms=0,
    )
    with pytest.raises(ObjectMissing):
        open_source(f"file://{tmp_path}/not-there", segment)
    assert not (tmp_path / "not-there").exists()
