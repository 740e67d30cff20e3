"""BrokerStorage: the storage of one broker, assembled: journal, cache, uploader, and the topics it owns.

BrokerStorage ── Journal        one log, one writer thread, all topics
              ├─ BatchCache     newest batches, all topics
              ├─ Uploader       one task, all topics; SegmentProcess, while there is much to write
              └─ TopicLog …     one for each topic that this broker owns
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from sava.errors import RetryableError
from sava.metadata.store import MetadataStore
from sava.storage.catalog import Catalog, TenureGuard, is_held
from sava.storage.errors import Fenced
from sava.storage.journal import Journal, JournalOptions
from sava.storage.maintenance import ExpiryClock
from sava.storage.objectstore import ObjectStore
from sava.storage.orphans import (
    SweptObjects,
    delete_topic,
    needless,
    note_deleted,
    sweep_deleted,
    topic_states,
)
from sava.storage.segment import SegmentReader
from sava.storage.segment_process import SegmentProcess
from sava.storage.tiered import BatchCache
from sava.storage.topic_log import LogDependencies, LogStatus, TopicLog
from sava.storage.types import TopicKey, TopicState
from sava.storage.uploader import Uploader, UploadOptions
from sava.supervisor import Supervisor
from sava.wal import Disk, Identity


class TopicBusy(RetryableError):
    """The topic is being opened here already, or what is left of it here is being released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    cache_bytes: int = 64 << 20
    footer_cache_bytes: int = 16 << 20
    journal: JournalOptions = field(default_factory=JournalOptions)
    upload: UploadOptions = field(default_factory=UploadOptions)


class BrokerStorage:
    """Owned by the event loop that opened it."""

    def __init__(
        self,
        journal: Journal,
        store: ObjectStore,
        metadata: MetadataStore,
        options: StorageOptions,
        supervisor: Supervisor,
        process: SegmentProcess | None = None,
    ) -> None:
        self._metadata = metadata
        self._journal = journal
        self.uploader = Uploader(store, journal, options.upload, supervisor, process)
        self.expiry_clock = ExpiryClock(store)
        self._parts = LogDependencies(
            journal=journal,
            cache=BatchCache(options.cache_bytes),
            uploader=self.uploader,
            store=store,
            reader=SegmentReader(store, footer_cache_bytes=options.footer_cache_bytes),
            ended=self._ended,
        )
        self._topics: dict[int, TopicLog] = {}
        """Until they are closed: a broker that topics come to and leave again would collect them."""
        self._busy: set[int] = set()
        """Topics that are being opened or released."""

    @classmethod
    async def open(
        cls,
        disk: Disk,
        *,
        broker: str,
        store: ObjectStore,
        metadata: MetadataStore,
        options: StorageOptions = StorageOptions(),  # noqa: B008 (frozen)
        uncommitted_tails: Sequence[tuple[int, int]] = (),
        fail: Callable[[BaseException], None],
        supervisor: Supervisor,
    ) -> BrokerStorage:
        """Recover the journal; topics can be opened when its first generation has begun.
        ``uncommitted_tails``: see ``Journal.open``. ``fail`` is called at most once, when the disk has
        failed: stop the process."""
        journal = await Journal.open(
            disk,
            broker=broker,
            options=options.journal,
            uncommitted_tails=uncommitted_tails,
            fail=fail,
        )
        process = None
        if options.upload.has_process:
            process = SegmentProcess(store.url, disk.path, journal.identity.storage_id)
        return cls(journal, store, metadata, options, supervisor, process)

    @property
    def identity(self) -> Identity:
        return self._journal.identity

    @property
    def journal(self) -> Journal:
        return self._journal

    @property
    def cache(self) -> BatchCache:
        return self._parts.cache

    @property
    def topics(self) -> Mapping[int, TopicLog]:
        """The open topics by id."""
        return MappingProxyType(
            {key: log for key, log in self._topics.items() if log.status is LogStatus.OPEN}
        )

    @property
    def leftovers(self) -> list[int]:
        """Topics that are not open here and of which the journal holds messages. They keep the journal from
        being trimmed until they are opened, released (``release_leftovers``), or discarded by a caller that
        knows that they are gone."""
        return [topic_id for topic_id in self._journal.holdings.topic_ids if not self._is_in_use(topic_id)]

    async def is_held(self) -> bool:
        """Whether segments are to stay as they are (see ``hold``)."""
        return await is_held(self._metadata, now_ms=await self.expiry_clock.now_ms())

    def _is_in_use(self, topic_id: int) -> bool:
        log = self._topics.get(topic_id)
        is_open = log is not None and log.status in (LogStatus.OPEN, LogStatus.SEALING)
        return is_open or topic_id in self._busy

    async def open_topic(self, topic: TopicKey, *, epoch: int, guard: TenureGuard | None = None) -> TopicLog:
        """Take the topic over under this epoch, for as long as ``guard`` holds. An older opening of it here
        ends first: its in-flight appends resolve before it is counted where the journal ends. Waits until
        the journal has a generation. Raises as ``TopicLog.open``, and TopicBusy."""
        await self._journal.queue.wait_for_generation()
        topic_id = topic.topic_id
        if topic_id in self._busy:
            raise TopicBusy(f"topic {topic.path} is being opened or released")
        self._busy.add(topic_id)
        try:
            older = self._topics.get(topic_id)
            if older is not None:
                if older.epoch > epoch:
                    raise Fenced(topic.path, epoch, older.epoch)
                await older.close()
            catalog = Catalog(self._metadata, topic, guard)
            log = await TopicLog.open(topic, epoch=epoch, catalog=catalog, parts=self._parts)
            self._topics[topic_id] = log
            return log
        finally:
            self._busy.discard(topic_id)

    def _ended(self, log: TopicLog) -> None:
        if self._topics.get(log.topic.topic_id) is log:
            del self._topics[log.topic.topic_id]

    async def discard(self, topic_id: int) -> None:
        """The topic is deleted, or its tail here was given up: forget what the journal holds of it."""
        log = self._topics.get(topic_id)
        if log is not None:
            await log.close()
        await self._journal.disown(topic_id, 0)

    async def release_leftovers(self, *, ids_end: int) -> list[int]:
        """Let go of what the journal need not keep of topics that are not open here (see ``leftovers``);
        returns those of which it holds nothing any more. Ids from ``ids_end`` on were not given out by this
        metadata store: such topics are another cluster's, and left alone. When the metadata store cannot be
        read, that is raised and nothing is released. For a broker that has started, and then from time to
        time; between two generations of the journal nothing is done."""
        if not self._journal.queue.has_generation:
            return []
        held = [topic_id for topic_id in self.leftovers if topic_id < ids_end]
        if not held:
            return []
        states = await topic_states(self._metadata)
        for topic_id in held:
            if not self._is_in_use(topic_id):  # it may have been opened meanwhile
                await self._release_leftover(topic_id, states.get(topic_id))
        return [topic_id for topic_id in held if topic_id not in self._journal.holdings.topic_ids]

    async def _release_leftover(self, topic_id: int, state: TopicState | None) -> None:
        epoch = self._journal.holdings.index(topic_id).epoch
        release, disown = needless(state, storage_id=self.identity.storage_id, epoch=epoch)
        self._busy.add(topic_id)
        try:
            if disown is not None:
                await self._journal.disown(topic_id, disown)
            self._journal.release(topic_id, release)
        finally:
            self._busy.discard(topic_id)

    async def delete_topic(self, topic: TopicKey) -> int:
        """Remove everything that storage has of a deleted topic; returns how many objects went. Can be
        repeated. What is on its way to the object store may still arrive: see ``sweep_deleted``."""
        await self.discard(topic.topic_id)
        await note_deleted(self._metadata, topic, now_ms=time.time_ns() // 1_000_000)
        return await delete_topic(Catalog(self._metadata, topic), self._parts.store)

    async def sweep_deleted(self) -> SweptObjects:
        """Remove the objects of deleted topics that came after their deletion."""
        now_ms = await self.expiry_clock.now_ms()
        return await sweep_deleted(self._metadata, self._parts.store, now_ms=now_ms)

    async def close(self) -> None:
        """Stop accepting, resolve what is in flight, leave the rest in the journal."""
        for log in list(self._topics.values()):
            await log.close()
        await self.uploader.close()
        await self._journal.close()
