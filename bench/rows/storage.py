"""Storage, in this process and without a network: appending, reading, recovering, and the memory it takes.

What stands beside (a bare file, plain pyarrow) is measured in turns with Sava's, and the median of the rounds
counts: the speed of a disk changes from second to second. The bare file grows as the journal does, since
writing into memory that the page cache has used before is several times faster."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Final

import pyarrow.parquet as pq

from bench.plan import Plan
from bench.report import Quantity, Row, Target
from bench.storage_place import NOW, CountingStore, Place, append_many, place, thousand, thousands
from sava.records import RecordBatch
from sava.storage.broker_storage import StorageOptions
from sava.storage.topic_log import TopicLog
from sava.storage.uploader import UploadOptions

SECTION: Final = "storage"
MB: Final = 1_000_000

APPEND = Target("at least 70 %", at_least=0.7)
MESSAGES = Target("at least 1,000,000/s", at_least=1e6, of_peer=False)
TAIL = Target("at least 2,000,000/s", at_least=2e6, of_peer=False)
COLD = Target("at least 50 %", at_least=0.5)
SEEK = Target("less than 8 MB", at_most=8 * MB, of_peer=False)
RECOVERY = Target("at least 300 MB/s", at_least=300 * MB, of_peer=False)
MEMORY_BYTES: Final = StorageOptions().cache_bytes + 150 * MB
MEMORY = Target(f"at most {MEMORY_BYTES / MB:.0f} MB (cache + 150 MB)", at_most=MEMORY_BYTES, of_peer=False)

LATER = UploadOptions(segment_age_s=3600, segment_bytes=1 << 40)
"""Uploads nothing by itself."""


@dataclass(frozen=True)
class Sizes:
    rounds: int
    small: int
    history: int
    through: int


FULL = Sizes(rounds=16, small=512 * MB, history=1024 * MB, through=5_000 * MB)
QUICK = Sizes(rounds=6, small=128 * MB, history=160 * MB, through=500 * MB)


async def run(plan: Plan) -> list[Row]:
    sizes = QUICK if plan.quick else FULL
    rows: list[Row] = []
    for measure in (large_appends, small_messages, many_topics, tail_reads, history, memory):
        rows += await measure(plan.folder, sizes)
    return rows


# -- writing ---------------------------------------------------------------------------------------

PER_ROUND: Final = 16


async def large_appends(folder: Path, sizes: Sizes) -> list[Row]:
    batch = RecordBatch.encode([os.urandom(1 << 20)], publish_time=NOW)
    data = batch.to_bytes()
    bare: list[float] = []
    ours: dict[int, list[float]] = {1: [], 16: []}
    async with (
        place(folder) as here,
        here.broker(StorageOptions(cache_bytes=8 * MB, upload=LATER)) as storage,
    ):
        log = await here.topic(storage)
        for number in range(sizes.rounds):
            start = number * PER_ROUND * len(data)
            bare.append(await asyncio.to_thread(bare_writes, here.path / "bare", data, start))
            for in_flight, seconds in ours.items():
                seconds.append(await append_many(log, repeat(batch), PER_ROUND, in_flight))
    size = PER_ROUND * len(data)
    beside = Quantity(size / statistics.median(bare), "bytes per second")
    return [
        Row(
            SECTION,
            f"append 1 MiB, {in_flight} in flight",
            Quantity(size / statistics.median(seconds), "bytes per second"),
            beside,
            APPEND,
            peer_name="write + fdatasync",
        )
        for in_flight, seconds in ours.items()
    ]


def bare_writes(path: Path, data: bytes, start: int) -> float:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o640)
    began = time.perf_counter()
    for index in range(PER_ROUND):
        os.pwrite(fd, data, start + index * len(data))
        os.fdatasync(fd)
    seconds = time.perf_counter() - began
    os.close(fd)
    return seconds


async def small_messages(folder: Path, sizes: Sizes) -> list[Row]:
    count = sizes.small // thousand().header.length
    async with (
        place(folder) as here,
        here.broker(StorageOptions(cache_bytes=8 * MB, upload=LATER)) as storage,
    ):
        seconds = await append_many(await here.topic(storage), thousands(), count, 32)
    rate = Quantity(count * 1000 / seconds, "per second")
    return [Row(SECTION, "append 1,000 × 100 B, 32 in flight: messages", rate, None, MESSAGES)]


async def many_topics(folder: Path, sizes: Sizes) -> list[Row]:
    topics, rounds = 1000, 5
    batch = RecordBatch.encode([b"x" * 100], publish_time=NOW)
    async with place(folder) as here, here.broker(StorageOptions(upload=LATER)) as storage:
        logs = [await here.topic(storage, number) for number in range(1, topics + 1)]
        before, began = storage.journal.queue.syncs, time.perf_counter()
        for _ in range(rounds):
            await asyncio.gather(*(log.append(batch) for log in logs))
        seconds, syncs = time.perf_counter() - began, storage.journal.queue.syncs - before
    detail = f"{rounds * topics / syncs:.0f} share a sync"
    rate = Quantity(rounds * topics / seconds, "per second", detail)
    return [Row(SECTION, f"append one message to each of {topics:,} topics", rate)]


# -- reading ---------------------------------------------------------------------------------------


async def read_all(log: TopicLog) -> int:
    count = 0
    async for batch in log.read(log.start_offset):
        count += len(batch)
    return count


async def timed(call: Callable[[], Awaitable[int]]) -> tuple[int, float]:
    gc.collect()
    began = time.perf_counter()
    count = await call()
    return count, time.perf_counter() - began


async def tail_reads(folder: Path, sizes: Sizes) -> list[Row]:
    count = QUICK.small // thousand().header.length
    rows = []
    for where, cache in (("cache", 256 * MB), ("journal", 0)):
        options = StorageOptions(cache_bytes=cache, upload=LATER)
        async with place(folder) as here, here.broker(options) as storage:
            log = await here.topic(storage)
            await append_many(log, thousands(), count, 32)
            messages, seconds = await timed(lambda log=log: read_all(log))  # type: ignore[misc]
        rate = Quantity(messages / seconds, "per second")
        rows.append(Row(SECTION, f"read from the {where}: messages", rate, None, TAIL))
    return rows


async def history(folder: Path, sizes: Sizes) -> list[Row]:
    """The recovery scan, an upload, a seek and cold reads: all of the same large topic."""
    count = sizes.history // thousand().header.length
    size = f"{sizes.history / MB:,.0f} MB"
    async with place(folder) as here:
        async with here.broker(StorageOptions(cache_bytes=0, upload=LATER)) as storage:
            await append_many(await here.topic(storage), thousands(), count, 32)
        recovered = await _recovery(here)
        options = StorageOptions(cache_bytes=0, upload=UploadOptions(segment_age_s=3600))
        async with here.broker(options) as storage:
            log = await here.topic(storage)
            began = time.perf_counter()
            await log.seal(timeout=300)
            uploaded = Quantity(sizes.history / (time.perf_counter() - began), "bytes per second")
        async with here.broker(options) as storage:
            log = await here.topic(storage)
            fetched = await _seek(log, count * 1000)
            cold, plain = await _cold(here, log)
    return [
        Row(SECTION, f"recover a journal of {size}", recovered, None, RECOVERY),
        Row(SECTION, f"upload {size} as Parquet, verified", uploaded),
        Row(SECTION, f"seek to an offset in {size}: read", fetched, None, SEEK),
        Row(SECTION, f"read {size} from Parquet: messages", cold, plain, COLD, peer_name="pyarrow"),
    ]


async def _recovery(here: Place) -> Quantity:
    size = sum(file.stat().st_size for file in (here.path / "journal").glob("log-*"))
    began = time.perf_counter()
    async with here.broker(StorageOptions(upload=LATER)):
        seconds = time.perf_counter() - began
    return Quantity(size / seconds, "bytes per second")


async def _seek(log: TopicLog, end: int) -> Quantity:
    """The most that any of a few seeks has read."""
    most = 0
    for offset in (end // 2 + 17, end // 3, end - 5, 123):
        before = CountingStore.fetched
        async for batch in log.read(offset, offset + 1):
            assert batch.base_offset == offset
        most = max(most, CountingStore.fetched - before)
    return Quantity(most, "bytes", "the most of four")


async def _cold(here: Place, log: TopicLog) -> tuple[Quantity, Quantity]:
    files = sorted(here.objects.rglob("*.parquet"))

    async def plain() -> int:
        return await asyncio.to_thread(lambda: sum(len(pq.read_table(file)) for file in files))

    plains, ours = [], []
    for _ in range(5):
        plains.append(await timed(plain))
        ours.append(await timed(lambda: read_all(log)))
    assert {count for count, _ in plains} == {count for count, _ in ours}
    return _rate(ours), _rate(plains)


def _rate(measured: list[tuple[int, float]]) -> Quantity:
    return Quantity(measured[0][0] / statistics.median(seconds for _, seconds in measured), "per second")


# -- memory ----------------------------------------------------------------------------------------


async def memory(folder: Path, sizes: Sizes) -> list[Row]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.through", str(folder), str(sizes.through), stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    figures = json.loads(output)
    size = f"{sizes.through / MB:,.0f} MB"
    peak = Quantity(figures["peak"], "bytes", f"{figures['before'] / MB:.0f} MB before")
    speed = Quantity(sizes.through / figures["seconds"], "bytes per second")
    return [
        Row(SECTION, f"{size} appended, followed, uploaded: memory", peak, None, MEMORY),
        Row(SECTION, f"{size} appended, followed, uploaded: speed", speed),
    ]
