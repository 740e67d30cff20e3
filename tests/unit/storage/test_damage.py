"""A byte of a real store is damaged while a broker serves: what fails, and what does not."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sava.errors import HostError
from sava.storage.broker_storage import StorageOptions
from sava.storage.errors import SegmentCorrupt
from sava.storage.journal_index import FrameDamaged
from sava.storage.objectstore import ObjectStore
from sava.storage.segment_file import SCHEMA
from sava.storage.topic_log import TopicLog
from sava.storage.uploader import UploadOptions
from tests.support.storage import FORGETFUL, OTHER, TOPIC, Cluster, append_each, batch, expected


def flip(directory: Path, found: bytes) -> None:
    """One bit of what is written somewhere below the directory, once."""
    files = [path for path in directory.rglob("*") if path.is_file() and found in path.read_bytes()]
    (path,) = files
    data = bytearray(path.read_bytes())
    data[data.index(found)] ^= 1
    path.write_bytes(data)


async def read_until_damage(log: TopicLog) -> tuple[list[str], HostError]:
    found: list[str] = []
    try:
        async for each in log.read(0):
            found += [payload.decode() for payload in each.payloads()]
    except HostError as error:
        return found, error
    raise AssertionError(f"nothing failed: {found}")


async def test_a_damaged_frame_fails_what_it_held_and_nothing_else(tmp_path: Path) -> None:
    """Schedule: two topics of one broker; a frame of one of them is damaged on the disk before it is in a
    segment. Readers get what is before it, then an error with the topic, the offsets and the way out. Reading
    behind it, publishing to both topics and storing the other one work; the damaged one is stored up to the
    frame, and cannot be sealed."""
    cluster = Cluster(tmp_path)
    async with cluster.broker(options=FORGETFUL) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        other = await storage.open_topic(OTHER, epoch=1)
        await append_each(log, 0, 5)
        assert await log.append(batch("the damaged one", "its companion")) == 5
        assert await log.append(batch("7")) == 7
        await append_each(other, 0, 3)
        flip(tmp_path / "a", b"the damaged one")

        found, error = await read_until_damage(log)
        assert found == expected(0, 5)
        assert isinstance(error, FrameDamaged)
        assert (error.topic, error.start, error.end) == (TOPIC.path, 5, 7)
        assert "move its journal directory away" in str(error)
        behind = [payload async for each in log.read(7) for payload in each.payloads()]
        assert behind == [b"7"]

        assert await log.append(batch("8")) == 8
        await append_each(other, 3, 4)
        assert (await other.seal()).end == 4
        with pytest.raises(FrameDamaged, match=TOPIC.path):
            await log.seal()
        assert log.stored_offset == 5
        assert cluster.failures == []


async def test_a_damaged_segment_fails_its_readers_and_not_its_producers(tmp_path: Path) -> None:
    """Schedule: a segment's object is damaged in the store. Reading it raises an error that names it, also
    after the topic was taken up again; producers of the topic continue, and newer messages can be read."""
    (tmp_path / "objects").mkdir()
    cluster = Cluster(tmp_path, store=ObjectStore.open((tmp_path / "objects").as_uri()))
    options = StorageOptions(cache_bytes=0, upload=UploadOptions(segment_age_s=3600))
    async with cluster.broker(options=options) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 5)
        await storage.uploader.flush(log._backlog, 5)
    (segment,) = await cluster.catalog().segments()
    path = tmp_path / "objects" / segment.key
    payloads = pq.read_metadata(path).row_group(0).column(SCHEMA.names.index("payload"))
    data = bytearray(path.read_bytes())
    data[payloads.data_page_offset + payloads.total_compressed_size - 1] ^= 1
    path.write_bytes(data)

    async with cluster.broker(options=options) as storage:
        log = await storage.open_topic(TOPIC, epoch=2)
        await append_each(log, 5, 8)
        _, error = await read_until_damage(log)
        assert isinstance(error, SegmentCorrupt)
        assert segment.key in str(error)
        assert [payload async for each in log.read(5) for payload in each.payloads()] == [b"5", b"6", b"7"]
        assert (await log.seal()).end == 8
