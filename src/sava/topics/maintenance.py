"""TopicMaintenance: what is done from time to time for the topics that are loaded, and for the journal behind
them.

A topic at which something fails is named in the log and looked at again the next time; the others do not wait
for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sava.errors import SavaError
from sava.storage.broker_storage import BrokerStorage
from sava.topics.cursors import CursorKeeper
from sava.topics.names import TopicName
from sava.topics.registry import Registry
from sava.topics.topic import Topic

log = logging.getLogger(__name__)

FAILURES: Final = (SavaError, TimeoutError)
"""Of one topic in the background: logged, and tried again later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsOptions:
    cursor_interval_s: float = 1.0
    maintenance_interval_s: float = 30.0
    retention_interval_s: float = 60.0
    merge_interval_s: float = 60.0
    sweep_interval_s: float = 3600.0
    parallel: int = 8
    """Topics that are loaded, maintained or deleted at a time in the background."""


class TopicMaintenance:
    """Owned by the event loop."""

    def __init__(
        self,
        loaded: Mapping[TopicName, Topic],
        registry: Registry,
        storage: BrokerStorage,
        keeper: CursorKeeper,
        options: TopicsOptions,
    ) -> None:
        self._loaded = loaded
        self._registry = registry
        self._storage = storage
        self._keeper = keeper
        self._options = options
        self.merged_segments = 0
        self.skipped: Counter[str] = Counter({"topic": 0, "note": 0})
        """What maintenance left out, by kind: topics that it failed for unexpectedly, notes of deleted topics
        that it cannot read."""
        """That went into larger ones."""

    @property
    def works(self) -> Mapping[str, Callable[[], Coroutine[Any, Any, None]]]:
        """That run until they are cancelled."""
        return {
            "maintenance": self._maintain,
            "retention": self._retain,
            "merging": self._merge,
            "sweeping": self._sweep,
        }

    async def each(
        self,
        names: Iterable[TopicName],
        work: Callable[[TopicName], Awaitable[object]],
        *,
        parallel: int | None = None,
    ) -> None:
        """A few at a time; one that fails is no reason to leave the others, whatever it fails with: topics
        behind one bad value would have no retention and no merges."""
        waiting = iter(names)

        async def take_turns() -> None:
            for name in waiting:
                try:
                    await work(name)
                except FAILURES as error:
                    log.warning("topics: failed topic=%s error=%s: %s", name, type(error).__name__, error)
                except Exception:
                    self.skipped["topic"] += 1
                    log.exception("topics: failed of a bug topic=%s", name)

        await asyncio.gather(*(take_turns() for _ in range(parallel or self._options.parallel)))

    async def release_leftovers(self) -> None:
        """What the journal holds of topics that no longer exist, or live elsewhere."""
        leftovers = self._storage.leftovers
        if not leftovers:
            return
        ids_end = await self._registry.last_id() + 1
        for topic_id in leftovers:
            if topic_id >= ids_end:
                log.error(
                    "topics: the journal holds a topic of another cluster, which is left alone topic_id=%d",
                    topic_id,
                )
        for topic_id in await self._storage.release_leftovers(ids_end=ids_end):
            log.info("topics: the journal has released a topic that is not here topic_id=%d", topic_id)

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(self._options.maintenance_interval_s)
            await self.each(list(self._loaded), self._maintain_topic)
            try:
                await self.release_leftovers()
            except FAILURES as error:
                log.warning("topics: the journal keeps what it has error=%s: %s", type(error).__name__, error)

    async def _maintain_topic(self, name: TopicName) -> None:
        topic = self._loaded.get(name)
        if topic is not None:
            await topic.maintain()

    async def _retain(self) -> None:
        while True:
            await asyncio.sleep(self._options.retention_interval_s)
            # Stored positions first: after a crash a subscription begins at the stored one, which must exist.
            if not await self._is_held() and await self._keeper.flush():
                await self.each(list(self._loaded), self._enforce_retention)

    async def _is_held(self) -> bool:
        """Whether segments are to stay as they are. Not known: the same."""
        try:
            return await self._storage.is_held()
        except FAILURES as error:
            log.warning("topics: segments stay as they are error=%s: %s", type(error).__name__, error)
            return True

    async def _enforce_retention(self, name: TopicName) -> None:
        topic = self._loaded.get(name)
        if topic is not None:
            await topic.enforce_retention(await self._storage.expiry_clock.now_ms())

    async def _merge(self) -> None:
        """One topic after the other: each has the messages of a merge in memory."""
        while True:
            await asyncio.sleep(self._options.merge_interval_s)
            if not await self._is_held():
                await self.each(list(self._loaded), self._merge_segments, parallel=1)

    async def _merge_segments(self, name: TopicName) -> None:
        topic = self._loaded.get(name)
        if topic is not None:
            self.merged_segments += await topic.merge_segments()

    async def _sweep(self) -> None:
        """Objects that nothing names: a broker died between an upload and its registration, or its topic was
        deleted in between."""
        while True:
            await asyncio.sleep(self._options.sweep_interval_s)
            await self.each(list(self._loaded), self._sweep_orphans)
            try:
                swept = await self._storage.sweep_deleted()
            except FAILURES as error:
                log.warning("topics: not swept error=%s: %s", type(error).__name__, error)
                continue
            self.skipped["note"] += swept.unreadable
            if swept.objects:
                log.info("topics: objects of deleted topics were deleted count=%d", swept.objects)

    async def _sweep_orphans(self, name: TopicName) -> None:
        topic = self._loaded.get(name)
        if topic is not None and topic.log is not None:
            now_ms = await self._storage.expiry_clock.now_ms()
            count = await topic.log.maintenance.sweep_orphans(now_ms=now_ms)
            if count:
                log.info("topics: objects that nothing named were deleted topic=%s count=%d", name, count)
