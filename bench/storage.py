"""What storage costs: ``python -m bench.storage [--quick]``. Ratios are of two measurements in the same run,
on the same disk."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from sava.metadata.memory import MemoryStore
from sava.records import RecordBatch
from sava.storage.broker_storage import BrokerStorage, StorageOptions
from sava.storage.objectstore import ObjectStore
from sava.storage.topic_log import TopicLog
from sava.storage.types import TopicKey
from sava.storage.uploader import UploadOptions
from sava.wal import LocalDisk

MB = 1 << 20
NOW = 1_750_000_000_000_000
LATER = UploadOptions(segment_age_s=3600, segment_bytes=1 << 40)
"""Uploads nothing by itself."""


@dataclass(frozen=True)
class Sizes:
    append: int
    small: int
    topics: int
    history: int
    through: int


FULL = Sizes(append=512 * MB, small=512 * MB, topics=1000, history=1024 * MB, through=5 << 30)
QUICK = Sizes(append=96 * MB, small=128 * MB, topics=1000, history=160 * MB, through=512 * MB)


def line(what: str, figure: str, target: str = "", met: bool | None = None) -> None:
    verdict = "" if met is None else ("ok" if met else "MISSED")
    print(f"{what:<58} {figure:>26}   {target:<16} {verdict}", flush=True)


class CountingStore(ObjectStore):
    fetched = 0

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        self.fetched += end - start
        return await super().get_range(key, start, end)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.fetched += sum(end - start for start, end in ranges)
        return await super().get_ranges(key, ranges)


@dataclass
class Place:
    """A directory, its objects and its metadata, for several lives of a broker."""

    path: Path
    metadata: MemoryStore
    epoch: int = 0

    @asynccontextmanager
    async def broker(self, options: StorageOptions) -> AsyncIterator[BrokerStorage]:
        (self.path / "objects").mkdir(exist_ok=True)
        storage = await BrokerStorage.open(
            LocalDisk(self.path / "journal"),
            broker="bench",
            store=CountingStore.open(f"file://{self.path}/objects"),
            metadata=self.metadata,
            options=options,
            fail=lambda failure: sys.exit(f"the disk failed: {failure}"),
        )
        try:
            yield storage
        finally:
            await storage.close()

    async def topic(self, storage: BrokerStorage, number: int = 1) -> TopicLog:
        self.epoch += 1
        return await storage.open_topic(TopicKey("bench", f"topic-{number}", number), epoch=self.epoch)


@asynccontextmanager
async def place() -> AsyncIterator[Place]:
    path = Path(tempfile.mkdtemp(prefix="sava-bench-", dir=os.environ.get("SAVA_BENCH_DIR")))
    try:
        yield Place(path, MemoryStore())
    finally:
        shutil.rmtree(path)


def thousand(size: int = 100) -> RecordBatch:
    noise = os.urandom(1000 * size)
    return RecordBatch.encode([noise[at : at + size] for at in range(0, len(noise), size)], publish_time=NOW)


async def append_many(log: TopicLog, batch: RecordBatch, count: int, in_flight: int) -> float:
    """Seconds for ``count`` appends, so many at a time."""
    left = iter(range(count))

    async def worker() -> None:
        for _ in left:
            await log.append(batch)

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return time.perf_counter() - began


# -- writing ---------------------------------------------------------------------------------------


def bare_write(path: Path, data: bytes, count: int, per_sync: int) -> float:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o640)
    began = time.perf_counter()
    for index in range(count):
        os.pwrite(fd, data, index * len(data))
        if (index + 1) % per_sync == 0:
            os.fdatasync(fd)
    os.fdatasync(fd)
    seconds = time.perf_counter() - began
    os.close(fd)
    path.unlink()
    return seconds


async def large_appends(sizes: Sizes) -> None:
    """The disk's speed changes from second to second, so all take turns; the best of each counts. The last
    bare one is what group commit can reach at most: it has one sync for as much as is in flight."""
    batch = RecordBatch.encode([os.urandom(MB)], publish_time=NOW)
    data, count = batch.to_bytes(), sizes.append // MB // 4
    bare, alone, grouped, bare_grouped = [], [], [], []
    async with place() as here, here.broker(StorageOptions(cache_bytes=8 * MB, upload=LATER)) as storage:
        log = await here.topic(storage)
        for _ in range(4):
            bare.append(bare_write(here.path / "bare", data, count, 1))
            alone.append(await append_many(log, batch, count, 1))
            grouped.append(await append_many(log, batch, count, 16))
            bare_grouped.append(bare_write(here.path / "bare", data, count, 16))
    base = min(bare)
    line("bare write + fdatasync of 1 MB", f"{count / base:.0f} MB/s")
    for what, seconds in (("one in flight", min(alone)), ("16 in flight", min(grouped))):
        figure = f"{count / seconds:.0f} MB/s, {base / seconds:.0%}"
        line(f"append 1 MB, {what}", figure, "≥ 70 %", base / seconds >= 0.7)
    line("bare, one fdatasync for 16", f"{count / min(bare_grouped):.0f} MB/s")


async def small_messages(sizes: Sizes) -> None:
    batch = thousand()
    count = sizes.small // batch.header.length
    async with place() as here, here.broker(StorageOptions(cache_bytes=8 * MB, upload=LATER)) as storage:
        log = await here.topic(storage)
        seconds = await append_many(log, batch, count, 32)
        rate = count * 1000 / seconds
        line("append 1,000 × 100 B, 32 in flight", f"{rate:,.0f} messages/s", "≥ 1,000,000", rate >= 1e6)


async def many_topics(sizes: Sizes) -> None:
    batch = RecordBatch.encode([b"x" * 100], publish_time=NOW)
    async with place() as here, here.broker(StorageOptions(upload=LATER)) as storage:
        logs = [await here.topic(storage, number) for number in range(1, sizes.topics + 1)]
        before, began = storage.journal.syncs, time.perf_counter()
        for _ in range(5):
            await asyncio.gather(*(log.append(batch) for log in logs))
        syncs = storage.journal.syncs - before
        rate = 5 * sizes.topics / (time.perf_counter() - began)
        line(
            f"{sizes.topics:,} topics, one message each",
            f"{5 * sizes.topics / syncs:.0f} appends per sync",
            "one for many",
            syncs * 10 < 5 * sizes.topics,
        )
        line("", f"{rate:,.0f} appends/s")


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


async def tail_reads(sizes: Sizes) -> None:
    batch = thousand()
    count = min(sizes.small, 128 * MB) // batch.header.length
    for where, cache in (("cache", 256 * MB), ("journal", 0)):
        async with place() as here, here.broker(StorageOptions(cache_bytes=cache, upload=LATER)) as storage:
            log = await here.topic(storage)
            await append_many(log, batch, count, 32)
            messages, seconds = await timed(lambda log=log: read_all(log))  # type: ignore[misc]
            rate = messages / seconds
            line(f"read from the {where}", f"{rate:,.0f} messages/s", "≥ 2,000,000", rate >= 2e6)


async def history(sizes: Sizes) -> None:
    """Cold reads, a seek, and the recovery scan: all of the same large topic."""
    batch = thousand()
    count = sizes.history // batch.header.length
    async with place() as here:
        async with here.broker(StorageOptions(cache_bytes=0, upload=LATER)) as storage:
            await append_many(await here.topic(storage), batch, count, 32)
        await recovery(here)
        options = StorageOptions(cache_bytes=0, upload=UploadOptions(segment_age_s=3600))
        async with here.broker(options) as storage:
            began = time.perf_counter()
            await (await here.topic(storage)).seal(timeout=600)
            seconds = time.perf_counter() - began
            line("upload as Parquet, verified", f"{sizes.history / MB / seconds:.0f} MB/s")
        async with here.broker(options) as storage:
            log = await here.topic(storage)
            await seek(log, count * 1000, sizes)
            await cold(here, log)


async def recovery(here: Place) -> None:
    size = sum(file.stat().st_size for file in (here.path / "journal").glob("log-*"))
    began = time.perf_counter()
    async with here.broker(StorageOptions(upload=LATER)):
        seconds = time.perf_counter() - began
    rate = size / MB / seconds
    line("recovery scan of the journal", f"{rate:.0f} MB/s", "≥ 300 MB/s", rate >= 300)


async def seek(log: TopicLog, end: int, sizes: Sizes) -> None:
    store = log._parts.reader._store
    assert isinstance(store, CountingStore)
    most = 0
    for offset in (end // 2 + 17, end // 3, end - 5, 123):
        store.fetched = 0
        async for batch in log.read(offset, offset + 1):
            assert batch.base_offset == offset
        most = max(most, store.fetched)
    line(
        f"seek to an offset in {sizes.history / MB:,.0f} MB reads",
        f"{most / MB:.2f} MB at most",
        "< 8 MB",
        most < 8 * MB,
    )


async def cold(here: Place, log: TopicLog) -> None:
    files = sorted((here.path / "objects").rglob("*.parquet"))

    async def plain() -> int:
        return await asyncio.to_thread(lambda: sum(len(pq.read_table(file)) for file in files))

    plains, ours = [], []
    for _ in range(3):
        plains.append(await timed(plain))
        ours.append(await timed(lambda: read_all(log)))
    assert {count for count, _ in plains} == {count for count, _ in ours}
    best_plain, best = min(seconds for _, seconds in plains), min(seconds for _, seconds in ours)
    line(
        f"cold read (pyarrow: {plains[0][0] / best_plain:,.0f} messages/s)",
        f"{ours[0][0] / best:,.0f} messages/s, {best_plain / best:.0%}",
        "≥ 50 %",
        best_plain / best >= 0.5,
    )


# -- memory ---------------------------------------------------------------------------------------------


def memory(sizes: Sizes) -> None:
    """In a process of its own, so that nothing else counts."""
    command = [sys.executable, "-m", "bench.storage", "--through", str(sizes.through)]
    subprocess.run(command, check=True)


async def through(total: int) -> None:
    """Append, follow and upload, with the default settings; a thread watches the memory. The code of the
    libraries is not counted: it is mapped from files, shared, and given back when memory is short."""
    options, batch = StorageOptions(), thousand()
    count = total // batch.header.length
    before, stop, peaks = _held(), threading.Event(), [0]

    def watch() -> None:
        while not stop.wait(0.02):
            peaks[0] = max(peaks[0], _held())

    watcher = threading.Thread(target=watch)
    watcher.start()
    async with place() as here, here.broker(options) as storage:
        log = await here.topic(storage)

        async def follow() -> None:
            async for each in log.tail(0):
                if each.next_offset == count * 1000:
                    return

        follower = asyncio.create_task(follow())
        seconds = await append_many(log, batch, count, 32)
        await follower
    stop.set()
    watcher.join()
    bound = options.cache_bytes + 150 * MB
    line(
        f"memory while {total / MB:,.0f} MB go through",
        f"{peaks[0] / MB:.0f} MB (before: {before / MB:.0f})",
        f"≤ {bound / MB:.0f} MB",
        peaks[0] <= bound,
    )
    line("  appended, followed and uploaded", f"{total / MB / seconds:.0f} MB/s")


def _held() -> int:
    resident, mapped = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - mapped) * resource.getpagesize()


async def measure(sizes: Sizes) -> None:
    await large_appends(sizes)
    await small_messages(sizes)
    await many_topics(sizes)
    await tail_reads(sizes)
    await history(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="less data, the same ratios")
    parser.add_argument("--through", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.through:
        asyncio.run(through(arguments.through))
        return
    sizes = QUICK if arguments.quick else FULL
    asyncio.run(measure(sizes))
    memory(sizes)


if __name__ == "__main__":
    main()
