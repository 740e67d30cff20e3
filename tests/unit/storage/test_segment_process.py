"""The process that makes segments: the same segments as the broker makes, and no trace of it when it, or the
broker, has gone."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sava.records import RecordBatch
from sava.storage import segment_process
from sava.storage.broker_storage import BrokerStorage, StorageOptions
from sava.storage.errors import ObjectStoreUnavailable, SegmentCorrupt
from sava.storage.journal_index import FrameDamaged
from sava.storage.objectstore import ObjectStore
from sava.storage.producers import MAX_PRODUCERS, ProducerTable
from sava.storage.segment_process import SegmentProcess, telling
from sava.storage.topic_log import TopicLog
from sava.storage.types import TopicKey
from sava.storage.uploader import UploadOptions
from tests.support.processes import PIPE, start_child
from tests.support.storage import OTHER, TOPIC, Cluster, append_each, batch, contents, expected
from tests.support.waiting import PATIENCE_S, until

OPTIONS = StorageOptions(cache_bytes=0, upload=UploadOptions(segment_age_s=3600, has_process=True))
SOURCE = 1 << 62


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    (tmp_path / "objects").mkdir()
    return Cluster(tmp_path, store=ObjectStore.open((tmp_path / "objects").as_uri(), attempts=1))


@pytest.fixture
async def storage(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BrokerStorage]:
    monkeypatch.setattr(segment_process, "WORTH_BYTES", 0)
    async with cluster.broker(options=OPTIONS) as storage:
        yield storage


def process_of(storage: BrokerStorage) -> SegmentProcess:
    process = storage.uploader._process
    assert process is not None
    return process


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def stored(storage: BrokerStorage, log: TopicLog) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await storage.uploader.flush(log._backlog, log.next_offset)


async def test_it_makes_the_segments_that_the_broker_makes(cluster: Cluster, storage: BrokerStorage) -> None:
    """With what their batches say of producers; and it reads only the journal's files."""
    log = await storage.open_topic(TOPIC, epoch=1)
    for sequence in range(0, 60, 3):
        await log.append(batch(*"abc", producer=1 + sequence % 2, sequence=sequence // 6 * 3))
    await stored(storage, log)
    assert process_of(storage).pid is not None
    (segment,) = await cluster.catalog().segments()
    assert (segment.start, segment.end) == (0, 60)
    state = await cluster.catalog().load()
    assert state is not None
    assert [(each.producer_id, each.next_sequence) for each in state.producers] == [(1, 30), (2, 30)]
    assert await contents(log) == ["a", "b", "c"] * 20

    other = await storage.open_topic(OTHER, epoch=1)
    storage.uploader._process, process = None, storage.uploader._process
    for sequence in range(0, 60, 3):
        await other.append(batch(*"abc", producer=1 + sequence % 2, sequence=sequence // 6 * 3))
    await stored(storage, other)
    storage.uploader._process = process
    (twin,) = await cluster.catalog(OTHER).segments()
    tables = [pq.read_table(cluster.path / "objects" / each.key) for each in (segment, twin)]
    assert tables[0].drop_columns(["topic"]).equals(tables[1].drop_columns(["topic"]))
    assert segment.raw_bytes == twin.raw_bytes
    assert (await cluster.catalog(OTHER).load()).producers == state.producers  # type: ignore[union-attr]


async def test_small_topics_are_written_in_one_pass(cluster: Cluster, storage: BrokerStorage) -> None:
    topics = [TopicKey("default", f"t{number}", 100 + number) for number in range(150)]
    logs = [await storage.open_topic(topic, epoch=1) for topic in topics]
    for log in logs:
        await append_each(log, 0, 1)
    await asyncio.gather(*(stored(storage, log) for log in logs))
    for topic in topics:
        assert [(each.start, each.end) for each in await cluster.catalog(topic).segments()] == [(0, 1)]
    assert (storage.uploader.segments, storage.uploader.failures) == (150, 0)


async def test_when_it_is_killed_another_takes_the_range(cluster: Cluster, storage: BrokerStorage) -> None:
    """Killed while it works, again and again: the range is taken by the next one, and registered once."""
    log = await storage.open_topic(TOPIC, epoch=1)
    await log.append(batch(*["x" * 1000] * 2000))
    killed: list[int] = []

    async def kill() -> None:
        process = process_of(storage)
        while len(killed) < 3:
            await until(lambda: process.pid is not None and process.pid not in killed, "a process")
            assert process.pid is not None
            killed.append(process.pid)
            os.kill(process.pid, signal.SIGKILL)

    killing = asyncio.create_task(kill())
    async with asyncio.timeout(PATIENCE_S):
        await storage.uploader.flush(log._backlog, log.next_offset)
        await killing
    assert len(set(killed)) == 3
    assert process_of(storage).deaths == 3
    assert [(each.start, each.end) for each in await cluster.catalog().segments()] == [(0, 2000)]
    assert len(await contents(log)) == 2000


async def test_a_job_that_takes_too_long_is_ended(
    cluster: Cluster, storage: BrokerStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = await storage.open_topic(TOPIC, epoch=1)
    await append_each(log, 0, 1)
    await stored(storage, log)
    stopped = process_of(storage).pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    monkeypatch.setattr(segment_process, "JOB_S", 0.2)
    await append_each(log, 1, 2)
    flushing = asyncio.create_task(stored(storage, log))
    await until(lambda: process_of(storage).deaths == 1, "the end of the job")
    monkeypatch.undo()
    await flushing
    assert not is_alive(stopped)
    assert await contents(log) == expected(0, 2)


async def test_it_ends_when_it_is_idle(storage: BrokerStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_process, "IDLE_S", 0.05)
    log = await storage.open_topic(TOPIC, epoch=1)
    await append_each(log, 0, 1)
    await stored(storage, log)
    await until(lambda: process_of(storage).pid is None and not process_of(storage)._ending, "its end")
    await append_each(log, 1, 2)
    await stored(storage, log)
    assert await contents(log) == expected(0, 2)
    assert process_of(storage).deaths == 0


async def test_small_jobs_do_not_keep_it(storage: BrokerStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to it while it is there; a broker with nothing else to write has its memory back."""
    monkeypatch.setattr(segment_process, "IDLE_S", 0.2)
    log = await storage.open_topic(TOPIC, epoch=1)
    await append_each(log, 0, 1)
    await stored(storage, log)
    assert process_of(storage).pid is not None
    monkeypatch.setattr(segment_process, "WORTH_BYTES", 1 << 30)
    async with asyncio.timeout(PATIENCE_S):
        while process_of(storage).pid is not None:
            offset = log.next_offset
            await append_each(log, offset, offset + 1)
            await stored(storage, log)
    assert await contents(log) == expected(0, log.next_offset)


async def test_a_broker_that_closes_leaves_none(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_process, "WORTH_BYTES", 0)
    async with cluster.broker(options=OPTIONS) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 1)
        await stored(storage, log)
        pid = process_of(storage).pid
    assert pid is not None
    assert not is_alive(pid)

    async with cluster.broker(options=OPTIONS) as storage:
        log = await storage.open_topic(TOPIC, epoch=2)
        await append_each(log, 1, 2)
        flushing = asyncio.create_task(stored(storage, log))
        await until(lambda: process_of(storage).pid is not None, "a process that works")
        pid = process_of(storage).pid
        flushing.cancel()
    assert pid is not None
    assert not is_alive(pid)


async def test_a_broker_that_is_killed_leaves_none(tmp_path: Path) -> None:
    child = await start_child(
        sys.executable, "-m", "tests.unit.storage.segment_process_owner", str(tmp_path), stdout=PIPE
    )
    assert child.stdout is not None
    pid = int(await asyncio.wait_for(child.stdout.readline(), PATIENCE_S))
    assert is_alive(pid)
    os.kill(pid, signal.SIGSTOP)  # it does not see that its connection ends, as in the middle of a job
    child.kill()
    await child.wait()
    await until(lambda: not is_alive(pid), "the end of its process")


async def test_a_store_that_is_down_is_said_to_be(cluster: Cluster, storage: BrokerStorage) -> None:
    log = await storage.open_topic(TOPIC, epoch=1)
    await append_each(log, 0, 1)
    await stored(storage, log)
    (cluster.path / "objects").rename(cluster.path / "away")
    (cluster.path / "objects").write_text("in the way")
    await append_each(log, 1, 2)
    with pytest.raises(ObjectStoreUnavailable):
        await storage.uploader.flush(log._backlog, 2, is_patient=False)
    (cluster.path / "objects").unlink()
    (cluster.path / "away").rename(cluster.path / "objects")
    await stored(storage, log)
    assert await contents(log) == expected(0, 2)


async def test_a_frame_that_cannot_be_read_is_said_to_be(cluster: Cluster, storage: BrokerStorage) -> None:
    """And what is before it is stored."""
    log = await storage.open_topic(TOPIC, epoch=1)
    await append_each(log, 0, 5)
    await log.append(batch("the damaged one"))
    (path,) = [each for each in (cluster.path / "a").glob("log-*") if b"the damaged one" in each.read_bytes()]
    data = bytearray(path.read_bytes())
    data[data.index(b"the damaged one")] ^= 1
    path.write_bytes(data)
    with pytest.raises(FrameDamaged, match=TOPIC.path):
        await storage.uploader.flush(log._backlog, 6)
    assert log.stored_offset == 5


def test_errors_come_back_as_they_were() -> None:
    assert isinstance(segment_process._error_of("SegmentCorrupt", "x"), SegmentCorrupt)
    assert isinstance(segment_process._error_of("ObjectStoreUnavailable", "x"), ObjectStoreUnavailable)
    assert "KeyError: x" in str(segment_process._error_of("KeyError", "x"))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_told_of_producers_is_as_good_as_all(seed: int) -> None:
    """More producers than are remembered, sources, batches of none: the tables are the same."""
    chance = random.Random(seed)
    header = RecordBatch.encode([b""], publish_time=1).assigned(topic_id=7, epoch=1, base_offset=0).header
    producers = [0, SOURCE + 1, SOURCE + 2, *range(1, MAX_PRODUCERS + 50)]
    positions = dict.fromkeys(producers, 0)
    headers = []
    for offset in range(4000):
        producer = chance.choice(producers)
        positions[producer] += 1
        headers.append(
            header.replace(producer_id=producer, base_sequence=positions[producer], base_offset=offset)
        )
    known = ProducerTable()
    for each in headers[:1500]:
        known.follow(each)
    tables = [ProducerTable(known.states()) for _ in range(2)]
    for each in headers[1500:]:
        tables[0].follow(each)
    told = telling(headers[1500:])
    for each in told:
        tables[1].follow(each)
    assert len(told) < len(headers) - 1500
    assert tables[0].states() == tables[1].states()
