"""What the stories about storage share: brokers on one metadata store and one object store, and what they
hold."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sava.metadata.store import MetadataStore
from sava.records import RecordBatch
from sava.storage.broker_storage import BrokerStorage, StorageOptions
from sava.storage.catalog import Catalog
from sava.storage.journal import JournalOptions
from sava.storage.objectstore import ObjectStore
from sava.storage.topic_log import TopicLog
from sava.storage.types import TopicKey
from sava.storage.uploader import UploadOptions
from sava.supervisor import Supervisor
from sava.wal import Disk, LocalDisk
from tests.support.memory_store import MemoryStore
from tests.support.one_disk import OneDisk

TOPIC = TopicKey("default", "orders", 7)
OTHER = TopicKey("default", "payments", 8)

LAZY = StorageOptions(upload=UploadOptions(segment_age_s=3600))
"""Uploads nothing unless a topic is sealed or a segment is full."""
EAGER = StorageOptions(upload=UploadOptions(segment_age_s=0.0))
"""Uploads everything at once."""
FORGETFUL = StorageOptions(cache_bytes=0, upload=UploadOptions(segment_age_s=3600))
"""No cache: reads come from the journal."""


def small_files(options: StorageOptions = LAZY, *, file_bytes: int = 4096) -> StorageOptions:
    return StorageOptions(
        cache_bytes=options.cache_bytes, upload=options.upload, journal=JournalOptions(file_bytes=file_bytes)
    )


def batch(*payloads: str, producer: int = 0, sequence: int = 0, time: int = 1) -> RecordBatch:
    return RecordBatch.encode(
        [payload.encode() for payload in payloads],
        publish_time=time,
        producer_id=producer,
        base_sequence=sequence,
    )


async def wake(log: TopicLog) -> None:
    """As after an append: the next one is accepted without a word to the metadata store."""
    await log._marker.mark_dirty()


def numbered(start: int, end: int, **keys: int) -> RecordBatch:
    """Messages whose payload is the offset that they ought to get."""
    return batch(*map(str, range(start, end)), **keys)


async def append_each(log: TopicLog, start: int, end: int) -> None:
    for offset in range(start, end):
        assert await log.append(numbered(offset, offset + 1)) == offset


async def contents(log: TopicLog, start: int = 0, end: int | None = None) -> list[str]:
    found: list[str] = []
    position = start
    async for each in log.read(start, end):
        assert each.base_offset == position
        position = each.next_offset
        found += [payload.decode() for payload in each.payloads()]
    return found


def expected(start: int, end: int) -> list[str]:
    return list(map(str, range(start, end)))


@dataclass
class Cluster:
    """Brokers come and go; metadata and objects stay."""

    path: Path
    metadata: MetadataStore = field(default_factory=MemoryStore)
    store: ObjectStore = field(default_factory=lambda: ObjectStore.open("memory://"))
    failures: list[BaseException] = field(default_factory=list)

    async def start(
        self, broker: str = "a", options: StorageOptions = LAZY, *, disk: Disk | None = None
    ) -> BrokerStorage:
        storage = await BrokerStorage.open(
            disk or LocalDisk(self.path / broker),
            broker=broker,
            store=self.store,
            metadata=self.metadata,
            options=options,
            fail=self.failures.append,
            supervisor=Supervisor(),
        )
        await storage.journal.begin_generation(OneDisk())
        return storage

    @asynccontextmanager
    async def broker(
        self, broker: str = "a", options: StorageOptions = LAZY, *, disk: Disk | None = None
    ) -> AsyncIterator[BrokerStorage]:
        """A broker from its start to its stop."""
        storage = await self.start(broker, options, disk=disk)
        try:
            yield storage
        finally:
            await storage.close()

    async def object_count(self) -> int:
        return len([info async for info in self.store.list("topics")])

    def catalog(self, topic: TopicKey = TOPIC) -> Catalog:
        return Catalog(self.metadata, topic)
