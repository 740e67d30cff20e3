"""Topics: those that this broker serves.

A topic is loaded when somebody asks for it, and those that this broker owned before are loaded in the
background after a start, so that what their journal still holds is uploaded and their backlog is known before
anybody comes. Loading happens once however many wait for it; a failure is an error to all of them, and the
next call tries again. It never becomes an empty topic.

Deleting runs to its end once begun, whoever asked for it; what a crash leaves is finished after the next
start (see ``registry``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from sava.broker import ownership
from sava.broker.consumers import KnownConsumer, topic_of_consumer
from sava.broker.cursors import CursorKeeper, report_failure
from sava.broker.errors import (
    ConsumerClosed,
    NotOwner,
    TopicMismatch,
    TopicUnknown,
)
from sava.broker.limits import Limits
from sava.broker.names import TopicName, check_name
from sava.broker.namespaces import Namespaces
from sava.broker.registry import Registry, check_kind
from sava.broker.schema_checks import SchemaChecks
from sava.broker.single_flight import SingleFlight
from sava.broker.specs import DEFAULT_NAMESPACES, TopicSpec
from sava.broker.subscribing import Parts
from sava.broker.topic import Topic
from sava.config import Config
from sava.errors import RetryableError, SavaError
from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.metadata.store import MetadataStore
from sava.records import Message, RecordBatch
from sava.schemas.registry import SchemaRegistry
from sava.storage.broker_storage import BrokerStorage
from sava.storage.topic_log import TopicClosed
from sava.storage.types import TopicKey

log = logging.getLogger(__name__)

RETRY_S: Final = 0.2
FAILURES: Final = (SavaError, TimeoutError)
"""Of one topic in the background: logged, and tried again later."""
PREPARE_S: Final = 10.0
"""How long the first callers wait for the namespaces to be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsOptions:
    cursor_interval_s: float = 1.0
    tend_interval_s: float = 30.0
    retention_interval_s: float = 60.0
    sweep_interval_s: float = 3600.0
    parallel: int = 8
    """Topics that are loaded, tended or deleted at a time in the background."""


class Topics:
    """Owned by the event loop. ``storage`` is the caller's to close, after this."""

    def __init__(
        self,
        store: MetadataStore,
        storage: BrokerStorage,
        config: Config,
        *,
        broker: int,
        options: TopicsOptions = TopicsOptions(),  # noqa: B008 (frozen)
    ) -> None:
        self.registry = Registry(store)
        self.namespaces = Namespaces(store)
        self.limits = Limits(store, config.policies)
        self.broker = broker
        self._store = store
        self._storage = storage
        self._config = config
        self._options = options
        self._keeper = CursorKeeper(store, interval_s=options.cursor_interval_s)
        self._parts = Parts(
            limits=self.limits,
            gate=SchemaChecks(store, SchemaRegistry(store)),
            keeper=self._keeper,
            dead_letter=self._dead_letter,
            max_unacked_messages=config.dispatch.max_unacked_messages,
        )
        self._loaded: dict[TopicName, Topic] = {}
        self._by_id: dict[int, Topic] = {}
        self._loading: SingleFlight[TopicName, Topic] = SingleFlight()
        self._deleting: SingleFlight[TopicName, None] = SingleFlight()
        self._names: dict[int, TopicName] = {}
        self._names_at = float("-inf")
        self._tasks: set[asyncio.Task[None]] = set()
        self._prepared = asyncio.Event()
        self._is_closing = False

    # -- running -----------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns at once; the rest happens in the background. Raises InvalidName for a namespace of the
        configuration."""
        for namespace in self._config.bootstrap_namespaces:
            check_name(namespace, "namespace")
        self._keeper.start()
        self._spawn(self._prepare())
        self._spawn(self._tend())
        self._spawn(self._retain())
        self._spawn(self._sweep())

    async def close(self) -> None:
        """Stop accepting, resolve what is in flight, write positions, close the logs."""
        self._is_closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        stopped = TopicClosed("this broker stops")
        await self._loading.stop(stopped)
        await self._deleting.stop(stopped)
        topics = list(self._loaded.values())
        await asyncio.gather(*(self._close(topic, "this broker stops") for topic in topics))
        await self._keeper.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(report_failure)

    async def _prepare(self) -> None:
        """Until it has succeeded: the store may have no quorum yet."""
        reason = ""
        while True:
            try:
                await self.namespaces.ensure((*DEFAULT_NAMESPACES, *self._config.bootstrap_namespaces))
                self._prepared.set()
                await self._release_leftovers()
                break
            except (RetryableError, OutcomeUnknown, TimeoutError) as error:
                if str(error) != reason:
                    reason = str(error)
                    log.info("topics: waiting for the metadata store error=%s", reason)
                await asyncio.sleep(RETRY_S)
        await self._catch_up()

    async def _release_leftovers(self) -> None:
        """What the journal holds of topics that no longer exist, or live elsewhere."""
        leftovers = self._storage.leftovers
        ids_end = await self.registry.last_id() + 1
        for topic_id in leftovers:
            if topic_id >= ids_end:
                log.error(
                    "topics: the journal holds a topic of another cluster, which is left alone topic_id=%d",
                    topic_id,
                )
        for topic_id in await self._storage.release_leftovers(ids_end=ids_end):
            log.info("topics: the journal has let go of a topic that is not here topic_id=%d", topic_id)

    async def _catch_up(self) -> None:
        """Finish what was begun, load what is owned. What fails is tried again the next time."""
        try:
            found = await self.registry.list_all()
        except FAILURES as error:
            log.warning("topics: cannot be listed error=%s: %s", type(error).__name__, error)
            return
        unfinished = [name for name, spec in found.items() if spec.deleting]
        await self._each(unfinished, self._finish_delete)
        owned = [name for name, spec in found.items() if not spec.partitions and self._should_load(name)]
        await self._each(owned, self._load_known)

    async def _finish_delete(self, name: TopicName) -> None:
        log.info("topics: finishing a deletion topic=%s", name)
        await self._deleting.run(name, partial(self._delete, name))

    def _should_load(self, name: TopicName) -> bool:
        return name not in self._loaded and ownership.owner_of(self._store, name) == self.broker

    async def _load_known(self, name: TopicName) -> None:
        with suppress(TopicUnknown):  # deleted meanwhile
            await self.get(name)

    async def _each(self, names: Iterable[TopicName], work: Callable[[TopicName], Awaitable[object]]) -> None:
        """A few at a time; one that fails is no reason to leave the others."""
        waiting = iter(names)

        async def take_turns() -> None:
            for name in waiting:
                try:
                    await work(name)
                except FAILURES as error:
                    log.warning("topics: failed topic=%s error=%s: %s", name, type(error).__name__, error)

        await asyncio.gather(*(take_turns() for _ in range(self._options.parallel)))

    async def _tend(self) -> None:
        while True:
            await asyncio.sleep(self._options.tend_interval_s)
            await self._each(list(self._loaded), self._tend_topic)
            if self._prepared.is_set():
                await self._catch_up()

    async def _tend_topic(self, name: TopicName) -> None:
        topic = self._loaded.get(name)
        if topic is not None:
            await topic.tend()

    async def _retain(self) -> None:
        while True:
            await asyncio.sleep(self._options.retention_interval_s)
            # Stored positions first: after a crash a subscription begins at the stored one, which must exist.
            if await self._keeper.flush():
                await self._each(list(self._loaded), self._enforce_retention)

    async def _sweep(self) -> None:
        """Objects that nothing names: a broker died between an upload and its registration."""
        while True:
            await asyncio.sleep(self._options.sweep_interval_s)
            await self._each(list(self._loaded), self._sweep_orphans)

    async def _sweep_orphans(self, name: TopicName) -> None:
        topic = self._loaded.get(name)
        if topic is not None and topic.log is not None:
            count = await topic.log.sweep_orphans(now_ms=time.time_ns() // 1_000_000)
            if count:
                log.info("topics: objects that nothing named were deleted topic=%s count=%d", name, count)

    async def _enforce_retention(self, name: TopicName) -> None:
        topic = self._loaded.get(name)
        if topic is not None:
            await topic.enforce_retention(time.time_ns() // 1_000_000)

    # -- finding -----------------------------------------------------------------------------

    @property
    def loaded(self) -> Mapping[TopicName, Topic]:
        """Changes as topics are loaded and closed: copy before iterating over an await."""
        return MappingProxyType(self._loaded)

    async def get(self, name: TopicName) -> Topic:
        """The topic, loaded. Raises TopicUnknown, NotOwner, TopicMismatch (partitioned: ask for its
        partitions), and whatever keeps it from being loaded."""
        topic = self._loaded.get(name)
        if topic is not None and topic.is_serving:
            return topic
        return await self._loading.run(name, partial(self._load, name))

    async def create(
        self, name: TopicName, *, reliable: bool, partitions: int = 0, schema_subject: str = ""
    ) -> TopicSpec:
        """On request, whatever the configuration says of automatic creation. Raises TopicExists,
        NamespaceUnknown, InvalidName, SchemaRefused."""
        await self.ready()
        if schema_subject:
            await self._parts.gate.check_subject(schema_subject)
        spec = await self.registry.create(name, reliable=reliable, partitions=partitions)
        await self._parts.gate.check_producer(name, schema_subject)
        return spec

    async def ensure(self, name: TopicName, reliable: bool | None) -> TopicSpec:
        """What the topic is; created if it is missing and the configuration allows that. The name of a
        partition creates the partitioned topic, and all partitions up to this one. Raises TopicUnknown,
        TopicMismatch, TopicExists, NamespaceUnknown."""
        await self.ready()
        if self._config.auto_create_topics:
            return await self.registry.ensure(name, reliable=reliable)
        spec = await self.registry.need(name)
        check_kind(name, spec, reliable)
        return spec

    async def get_or_create(self, name: TopicName, reliable: bool | None) -> Topic:
        topic = self._loaded.get(name)
        if topic is not None and topic.is_serving:
            check_kind(name, topic.spec, reliable)
            return topic
        await self.ensure(name, reliable)
        return await self.get(name)

    def by_id(self, topic_id: int) -> Topic | None:
        """If it is loaded."""
        return self._by_id.get(topic_id)

    async def consumer_by_id(self, consumer_id: int) -> KnownConsumer | None:
        """Whom an id stands for, also if it was given out before a restart; None if certainly nobody. Raises
        NotOwner, and whatever keeps the topic from being loaded."""
        topic_id = topic_of_consumer(consumer_id)
        topic = self.by_id(topic_id)
        if topic is None:
            name = await self._name_of(topic_id)
            if name is None:
                return None
            try:
                topic = await self.get(name)
            except TopicUnknown:
                return None
        return topic.known_consumer(consumer_id)

    async def _name_of(self, topic_id: int) -> TopicName | None:
        """Listed again at most once a second: clients repeat an id that is gone without a pause."""
        now = time.monotonic()
        if topic_id not in self._names and now - self._names_at >= 1.0:
            self._names_at = now
            self._names = {spec.topic_id: name for name, spec in (await self.registry.list()).items()}
        return self._names.get(topic_id)

    async def ready(self) -> None:
        try:
            async with asyncio.timeout(PREPARE_S):
                await self._prepared.wait()
        except TimeoutError:
            raise Unavailable("this broker waits for the metadata store") from None

    # -- loading -----------------------------------------------------------------------------

    async def _load(self, name: TopicName) -> Topic:
        older = self._loaded.get(name)
        if older is not None:
            await self._close(older, "it is taken up anew")
        if (await self.registry.need(name)).partitions:
            raise TopicMismatch(f"topic {name} is partitioned: its messages are its partitions'")
        tenure = await ownership.take(self.registry, self._store, name, self.broker, lost=self._lost)
        spec = tenure.located.spec
        topic_log = None
        if spec.reliable:
            topic_log = await self._storage.open_topic(_key(name, spec), epoch=tenure.epoch)
        topic = Topic(tenure, topic_log, self._parts)
        try:
            await topic.load()
        except BaseException:
            await self._close(topic, "it could not be loaded")
            raise
        self._loaded[name] = self._by_id[topic.topic_id] = topic
        return topic

    async def _close(self, topic: Topic, why: str, *, for_producers: SavaError | None = None) -> None:
        if self._loaded.get(topic.name) is topic:
            del self._loaded[topic.name]
        if self._by_id.get(topic.topic_id) is topic:
            del self._by_id[topic.topic_id]
        await topic.close(
            for_producers=for_producers or TopicClosed(f"topic {topic.name}: {why}"),
            for_consumers=ConsumerClosed(f"topic {topic.name}: {why}; subscribe again"),
        )

    def _lost(self, name: TopicName) -> None:
        topic = self._loaded.get(name)
        if topic is not None and not self._is_closing:
            log.warning("topics: another broker has taken over topic=%s epoch=%d", name, topic.epoch)
            self._spawn(self._close(topic, "another broker serves it now"))

    # -- deleting ----------------------------------------------------------------------------

    async def delete(self, name: TopicName) -> None:
        """The topic, with all its partitions, messages and subscriptions. Raises TopicUnknown, TopicMismatch
        (a partition), NotOwner."""
        for partition in await self.registry.partitions(name):
            owner = ownership.owner_of(self._store, partition)
            if owner not in (ownership.NOBODY, self.broker):
                raise NotOwner(partition, owner)
        await self._deleting.run(name, partial(self._delete, name))

    async def _delete(self, name: TopicName) -> None:
        family = await self.registry.begin_delete(name)
        for member, spec in family.members:
            await self._loading.settled(member)
            topic = self._loaded.get(member)
            if topic is not None:
                await self._close(topic, "it was deleted", for_producers=TopicUnknown(member))
            if spec.reliable:
                await self._storage.delete_topic(_key(member, spec))
        await self.registry.finish_delete(family)

    # -- dead letters ------------------------------------------------------------------------

    async def _dead_letter(self, target: str, messages: Sequence[Message]) -> None:
        """To another topic, which is created if it is missing, whatever the configuration says of others: the
        policy that names it was set on purpose."""
        name = TopicName.parse(target)
        await self.registry.ensure(name, reliable=None)
        await (await self.get(name)).append(RecordBatch.from_messages(messages))


def _key(name: TopicName, spec: TopicSpec) -> TopicKey:
    return TopicKey(name.namespace, name.topic, spec.topic_id)
