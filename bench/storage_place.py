"""A broker's storage on a directory of its own, for several starts of the broker, and what is put into it."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path

from sava.records import RecordBatch
from sava.storage.broker_storage import BrokerStorage, StorageOptions
from sava.storage.objectstore import ObjectStore
from sava.storage.topic_log import TopicLog
from sava.storage.types import TopicKey
from sava.supervisor import Supervisor
from sava.wal import LocalDisk
from tests.support.memory_store import MemoryStore
from tests.support.one_disk import OneDisk

NOW = 1_750_000_000_000_000


class CountingStore(ObjectStore):
    fetched = 0
    """Bytes read, of all stores of this process."""

    async def get_range(self, key: str, start: int, end: int) -> bytes:
        CountingStore.fetched += end - start
        return await super().get_range(key, start, end)

    async def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        CountingStore.fetched += sum(end - start for start, end in ranges)
        return await super().get_ranges(key, ranges)


@dataclass
class Place:
    """A directory, its objects and its metadata."""

    path: Path
    metadata: MemoryStore = field(default_factory=MemoryStore)
    epoch: int = 0

    @property
    def objects(self) -> Path:
        return self.path / "objects"

    @asynccontextmanager
    async def broker(self, options: StorageOptions) -> AsyncIterator[BrokerStorage]:
        self.objects.mkdir(exist_ok=True)
        storage = await BrokerStorage.open(
            LocalDisk(self.path / "journal"),
            broker="bench",
            store=CountingStore.open(f"file://{self.objects}"),
            metadata=self.metadata,
            options=options,
            fail=lambda failure: sys.exit(f"the disk failed: {failure}"),
            supervisor=Supervisor(),
        )
        await storage.journal.begin_generation(OneDisk())
        try:
            yield storage
        finally:
            await storage.close()

    async def topic(self, storage: BrokerStorage, number: int = 1) -> TopicLog:
        self.epoch += 1
        return await storage.open_topic(TopicKey("bench", f"topic-{number}", number), epoch=self.epoch)


@asynccontextmanager
async def place(folder: Path) -> AsyncIterator[Place]:
    path = Path(tempfile.mkdtemp(prefix="storage-", dir=folder))
    try:
        yield Place(path)
    finally:
        await asyncio.to_thread(shutil.rmtree, path)


def thousand() -> RecordBatch:
    """1,000 × 100 B that cannot be compressed."""
    noise = os.urandom(100_000)
    return RecordBatch.encode([noise[at : at + 100] for at in range(0, len(noise), 100)], publish_time=NOW)


def thousands() -> Iterator[RecordBatch]:
    """Without end, and so many different ones that no row group holds one twice."""
    return cycle([thousand() for _ in range(64)])


def received(batches: Iterable[RecordBatch]) -> Iterator[RecordBatch]:
    """Each in memory of its own, as if it came over the network."""
    return (RecordBatch.parse(bytes(memoryview(batch.data))) for batch in batches)


async def append_many(log: TopicLog, batches: Iterable[RecordBatch], count: int, in_flight: int) -> float:
    """Seconds for ``count`` appends, so many at a time."""
    left = islice(batches, count)

    async def worker() -> None:
        for batch in left:
            await log.append(batch)

    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(in_flight)))
    return time.perf_counter() - began
