"""ServedTopics: the topics that this broker serves.

A topic is loaded when a client asks for it, or earlier: its owner's agent takes up what it is assigned, so
that what the journal still holds is uploaded and the backlog is known before a client comes. Loading happens
once however many wait for it; a failure is an error to all of them, and the next call tries again. It never
becomes an empty topic.

Who serves a topic is in its ownership record, which the controller of the cluster writes. A topic that is not
this broker's is refused at once with NotOwner, and the client knows where to ask next.

It ends here in one of three ways:

    hand_over   everything goes to where any broker reads it, and the topic to its next owner
    drop        it is another's already, or this broker may have it no longer: nothing is sealed
    release     it is being deleted (see ``Deletions``)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

from sava.config import Config
from sava.errors import SavaError
from sava.metadata.errors import Unavailable
from sava.metadata.store import MetadataStore
from sava.records import Message, RecordBatch
from sava.schemas.registry import SchemaRegistry
from sava.security.quotas import Quotas
from sava.storage.broker_storage import BrokerStorage
from sava.storage.catalog import Catalog
from sava.storage.errors import DataGap, TopicSealed
from sava.storage.topic_log import TopicClosed
from sava.supervisor import Supervisor
from sava.tasks import SingleFlight, cancelled, spawn
from sava.topics import ownership
from sava.topics.consumer import KnownConsumer, topic_of_consumer
from sava.topics.cursors import CursorKeeper
from sava.topics.errors import (
    ConsumerClosed,
    NotHandedOver,
    NotOwner,
    TopicMismatch,
    TopicMoved,
    TopicUnknown,
)
from sava.topics.maintenance import FAILURES, TopicMaintenance, TopicsOptions
from sava.topics.names import TopicName, check_name
from sava.topics.ownership import Deletions, Released, Tenure, topic_key
from sava.topics.publishing import DecodeBudget
from sava.topics.registry import NamespaceRoom, Namespaces, PrincipalRoom, Registry, check_kind
from sava.topics.rules import OwnerRules, RateLimiter, SchemaChecks, TopicLimits
from sava.topics.specs import DEFAULT_NAMESPACES, OwnershipState, TopicSpec
from sava.topics.subscriptions import FLUSH_S, TopicDependencies
from sava.topics.topic import HOLD_S, LAST_FLUSH_S, Topic

log = logging.getLogger(__name__)

RETRY_S: Final = 0.2
PREPARE_S: Final = 10.0
"""How long the first callers wait for the namespaces to be there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherBrokers:
    """What a broker asks of the others of its cluster."""

    released: Released
    """Returns when no broker has these topics, which are being deleted."""
    publish: Callable[[TopicName, RecordBatch], Awaitable[None]]
    """To a topic of another broker. Returns when the messages are durable there."""


class ServedTopics:
    """Owned by the event loop. ``storage`` is the caller's to close, after this."""

    def __init__(
        self,
        store: MetadataStore,
        storage: BrokerStorage,
        config: Config,
        *,
        broker: int,
        options: TopicsOptions = TopicsOptions(),  # noqa: B008 (frozen)
        incarnation: Callable[[], int],
        others: OtherBrokers | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        """``incarnation``: of this process, as registered; 0 while it is not, and then it takes nothing up.
        ``others``: None if there are no other brokers. ``quotas``: None: no principal has any."""
        self.registry = Registry(store, NamespaceRoom(store, config.limits.topics_per_namespace))
        self._creations = RateLimiter()
        self.namespaces = Namespaces(store)
        self.limits = TopicLimits(store, config.policies)
        self.broker = broker
        self._store = store
        self._storage = storage
        self._config = config
        self._options = options
        self._incarnation = incarnation
        self._others = others
        self.owners = OwnerRules(config.auth.is_enforced)
        room = PrincipalRoom(store, quotas) if quotas is not None else None
        self.budget = DecodeBudget(config.limits.decompressing_mb << 20)
        self._keeper = CursorKeeper(store, interval_s=options.cursor_interval_s)
        self._parts = TopicDependencies(
            limits=self.limits,
            gate=SchemaChecks(store, SchemaRegistry(store)),
            keeper=self._keeper,
            dead_letter=self._dead_letter,
            max_unacked_messages=config.dispatch.max_unacked_messages,
            cluster=config.cluster_name,
            max_link_backlog=config.replication.max_backlog_bytes,
            budget=self.budget,
            owners=self.owners,
            room=room,
        )
        self._loaded: dict[TopicName, Topic] = {}
        self._by_id: dict[int, Topic] = {}
        self._ending: set[Topic] = set()
        self._loading: SingleFlight[TopicName, Topic] = SingleFlight()
        self._deletions = Deletions(
            self.registry,
            store,
            storage,
            broker=broker,
            close=self._close_deleted,
            released=others.released if others is not None else None,
        )
        self._upkeep = TopicMaintenance(self.loaded, self.registry, storage, self._keeper, options)
        self._names: dict[int, TopicName] = {}
        self._names_at = float("-inf")
        self._names_end = 0
        """Ids from here on were given out after the listing."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._prepared = asyncio.Event()
        self._is_closing = False

    @property
    def skipped_maintenance(self) -> Mapping[str, int]:
        """What maintenance left out, by kind."""
        return self._upkeep.skipped

    @property
    def merged_segments(self) -> int:
        """That went into larger ones."""
        return self._upkeep.merged_segments

    # -- running -----------------------------------------------------------------------------

    async def start(self, supervisor: Supervisor) -> None:
        """Returns at once; the rest happens in the background. Raises InvalidName for a namespace of the
        configuration."""
        for namespace in self._config.bootstrap_namespaces:
            check_name(namespace, "namespace")
        self._keeper.start(supervisor)
        self._tasks.add(supervisor.essential(self._prepare(), name="preparing"))
        for name, work in self._upkeep.works.items():
            self._tasks.add(supervisor.repeated(work, name=name))

    async def close(self) -> None:
        """Stop accepting, resolve what is in flight, write positions, close the logs."""
        self._is_closing = True
        await cancelled(*self._tasks)
        stopped = TopicClosed("this broker stops")
        await self._loading.stop(stopped)
        await self._deletions.running.stop(stopped)
        topics = [*self._loaded.values(), *self._ending]
        await asyncio.gather(*(self._close(topic, "this broker stops") for topic in topics))
        await self._keeper.close()

    async def _prepare(self) -> None:
        """Until it has succeeded: the store may have no quorum yet."""
        reason = ""
        while True:
            try:
                await self.namespaces.ensure((*DEFAULT_NAMESPACES, *self._config.bootstrap_namespaces))
                self._prepared.set()
                await self._upkeep.release_leftovers()
                break
            except FAILURES as error:
                if str(error) != reason:
                    reason = str(error)
                    log.info(
                        "topics: waiting for the metadata store error=%s: %s", type(error).__name__, reason
                    )
                await asyncio.sleep(RETRY_S)

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
        self._check_may_take(name)
        return await self._loading.run(name, partial(self._load, name))

    async def create(
        self, name: TopicName, *, reliable: bool, partitions: int = 0, schema_subject: str = ""
    ) -> TopicSpec:
        """On request, whatever the configuration says of automatic creation. Raises TopicExists,
        NamespaceUnknown, InvalidName, SchemaRefused."""
        await self.ready()
        if schema_subject:
            await self._parts.gate.check_subject(schema_subject)
        owner = await self._owner_of_new()
        spec = await self.registry.create(name, reliable=reliable, partitions=partitions, owner=owner)
        await self._parts.gate.check_producer(name, schema_subject)
        return spec

    async def ensure(self, name: TopicName, reliable: bool | None) -> TopicSpec:
        """What the topic is; created if it is missing and the configuration allows that. The name of a
        partition creates the partitioned topic, and all partitions up to this one. Raises TopicUnknown,
        TopicMismatch, TopicExists, NamespaceUnknown."""
        await self.ready()
        if self._config.auto_create_topics:
            owner = ""
            if self.registry.get_local(name) is None:
                await self._slow_down()
                owner = await self._owner_of_new()
            return await self.registry.ensure(name, reliable=reliable, owner=owner)
        spec = await self.registry.need(name)
        check_kind(name, spec, reliable)
        return spec

    async def _owner_of_new(self) -> str:
        """Whom a topic is counted for that the running call creates. Raises QuotaExceeded."""
        owner = self.owners.of_new()
        if self._parts.room is not None:
            await self._parts.room.check("topics", owner)
        return owner

    async def _slow_down(self) -> None:
        """Before a topic that its first caller creates. Raises LimitReached."""
        rate = self._config.limits.topic_creations_per_second
        await self._creations.acquire(
            1, rate, "topics that are created when they are first used (limits.topic_creations_per_second)"
        )

    async def follow_subject(self, name: TopicName, subject: str) -> None:
        """The topic takes it for its own if it has none. Raises SchemaRefused if it has another,
        TopicUnknown."""
        await self.registry.need(name)
        await self._parts.gate.check_producer(name, subject)

    async def get_or_create(self, name: TopicName, reliable: bool | None) -> Topic:
        topic = self._loaded.get(name)
        if topic is not None and topic.is_serving:
            check_kind(name, topic.spec, reliable)
            return topic
        await self.ensure(name, reliable)
        return await self.get(name)

    def schema_subject(self, name: TopicName) -> str:
        """That its messages follow, as this node knows; empty for none."""
        return self._parts.gate.subject(name)

    def by_id(self, topic_id: int) -> Topic | None:
        """If it is loaded."""
        return self._by_id.get(topic_id)

    async def consumer_by_id(self, consumer_id: int) -> KnownConsumer | None:
        """Whom an id stands for, also if it was given out before a restart; None if certainly for none.
        Raises NotOwner, and whatever keeps the topic from being loaded."""
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
        """Listed again at most once a second, for clients repeat an id that is gone without a pause; or if it
        was given out since: ids grow."""
        now, given_out = time.monotonic(), await self.registry.last_id()
        is_new = self._names_end <= topic_id <= given_out
        if topic_id not in self._names and (is_new or now - self._names_at >= 1.0):
            self._names = {spec.topic_id: name for name, spec in (await self.registry.list()).items()}
            self._names_at, self._names_end = now, given_out + 1
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
            await self._close(older, "it is taken up again")
        if (await self.registry.need(name)).partitions:
            raise TopicMismatch(f"topic {name} is partitioned: its messages are its partitions'")
        self._check_may_take(name)
        taken = await ownership.take(
            self.registry,
            self._store,
            name,
            self.broker,
            incarnation=self._incarnation(),
            lost=self._lost,
        )
        spec = taken.located.spec
        topic_log = None
        if spec.reliable:
            key = topic_key(name, spec)
            topic_log = await self._storage.open_topic(key, epoch=taken.epoch, guard=taken)
        topic = Topic(taken, topic_log, self._parts)
        try:
            await topic.subscription_set.load()
        except BaseException:
            await self._close(topic, "it could not be loaded")
            raise
        self._loaded[name] = self._by_id[topic.topic_id] = topic
        return topic

    def _check_may_take(self, name: TopicName) -> None:
        """What this node knows is enough to say no: a client that is sent away asks again elsewhere, or
        here."""
        record = ownership.known(self._store.local, name).record
        if record.state is OwnershipState.ASSIGNED and record.owner != self.broker:
            raise NotOwner(name, record.owner)
        if not self._incarnation():
            raise NotOwner(name, ownership.NO_OWNER)

    async def _close(
        self,
        topic: Topic,
        why: str,
        *,
        for_producers: SavaError | None = None,
        for_consumers: SavaError | None = None,
        timeout: float = FLUSH_S,
    ) -> None:
        if self._loaded.get(topic.name) is topic:
            del self._loaded[topic.name]
        if self._by_id.get(topic.topic_id) is topic:
            del self._by_id[topic.topic_id]
        self._ending.add(topic)
        try:
            await topic.close(
                for_producers=for_producers or TopicClosed(f"topic {topic.name}: {why}"),
                for_consumers=for_consumers or ConsumerClosed(f"topic {topic.name}: {why}; subscribe again"),
                timeout=timeout,
            )
        finally:
            self._ending.discard(topic)

    # -- giving up ---------------------------------------------------------------------------

    async def prepare_move(self, name: TopicName, *, timeout: float) -> None:
        """Before a move is decided, so that it holds publishers for a moment only: upload what is in the
        journal. Raises ObjectStoreUnavailable when the store takes no writes, and what else keeps messages
        from being uploaded; the topic is served as before."""
        topic = self._loaded.get(name)
        if topic is not None and topic.is_serving:
            await topic.prepare_move(timeout=timeout)
        else:
            await self._storage.uploader.check_store()

    async def upload_all(self, *, timeout: float) -> None:
        """Upload what the topics have in the journal, as far as that is possible in time: before all of them
        are moved, one after another, and while they are served."""
        logs = [topic.log for topic in self._loaded.values() if topic.log is not None and topic.is_serving]
        uploads = [asyncio.create_task(log.upload()) for log in logs]
        if uploads:
            await asyncio.wait(uploads, timeout=timeout)
        await cancelled(*uploads)

    async def hand_over(self, name: TopicName, *, timeout: float) -> int:
        """The owner's part of a move, to be called while the record is *moving*: returns the exclusive end,
        below which any broker can read everything; 0 for a topic that keeps nothing. Can be repeated, by a
        later run of this broker too.

        Raises NotHandedOver when the time is up, and whatever stands in the way. The topic is closed here in
        any case: either it is another's next, or it is taken up again under the next epoch."""
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(deadline):
                await self._loading.settled(name)
                topic = self._loaded.get(name)
                record = ownership.known(self._store.local, name).record
                if topic is not None and (not topic.is_serving or topic.epoch < record.epoch):
                    await self._drop(topic, "its tenure is over")
                    topic = None
                if topic is None:
                    async with asyncio.timeout(HOLD_S):  # publishers wait
                        return await self._seal_unloaded(name)
        except TimeoutError:
            raise NotHandedOver(
                f"topic {name} was not handed over within {timeout:g} s, of which its seal has {HOLD_S:g} s; "
                "it was still being opened or sealed"
            ) from None
        try:
            end = await topic.hand_over(timeout=deadline - asyncio.get_running_loop().time())
            log.info("topics: handed over topic=%s epoch=%d end=%d", name, topic.epoch, end)
            return end
        finally:
            await self._drop(topic, "it is handed over")

    async def _seal_unloaded(self, name: TopicName) -> int:
        """Seal a topic that is not loaded: an earlier run of this broker began to hand it over and did not
        finish, or the move was begun before the topic was ever taken up. It has no publishers to hold and no
        positions to write; but what the journal holds of it goes with it, and only this broker has that.

        The exclusive end; 0 if nothing is kept. Raises NotOwner unless the topic is this broker's and moving,
        and as ``BrokerStorage.open_topic`` and ``TopicLog.seal``."""
        if not (await self.registry.need(name)).reliable:
            return 0
        try:
            return await self._seal(name)
        except DataGap:
            # An earlier opening under this epoch may have had an upload on its way, which was registered
            # after this one had read where segments end. If that is not it, there is a gap the second time
            # too.
            return await self._seal(name)

    async def _seal(self, name: TopicName) -> int:
        resumed = await ownership.resume(self.registry, self._store, name, self.broker)
        key = topic_key(name, resumed.located.spec)
        try:
            log = await self._storage.open_topic(key, epoch=resumed.epoch, guard=resumed)
        except TopicSealed:
            state = await Catalog(self._store, key).load()
            if state is None or state.epoch != resumed.epoch or not state.sealed:
                raise
            return state.end  # only the ownership record does not say so yet
        try:
            return (await log.seal(timeout=HOLD_S)).end
        finally:
            await log.close()

    async def drop(self, name: TopicName, why: str) -> None:
        """Close the topic without sealing it, if it is here. Who uses it gets TopicMoved."""
        await self._loading.settled(name)
        topic = self._loaded.get(name)
        if topic is not None:
            log.info("topics: dropped topic=%s epoch=%d reason=%s", name, topic.epoch, why)
            await self._drop(topic, why)

    async def drop_all(self, why: str) -> None:
        """All of them, those included that are being loaded: this broker may no longer be the owner of
        anything. What is to be taken up from now on is for ``incarnation`` to say."""
        log.warning("topics: all are dropped count=%d reason=%s", len(self._loaded), why)
        await self._drop_loaded(why)
        await self._loading.all_settled()
        await self._drop_loaded(why)

    async def _drop_loaded(self, why: str) -> None:
        topics = [*self._loaded.values(), *self._ending]
        await asyncio.gather(*(self._drop(topic, why) for topic in topics))

    async def _drop(self, topic: Topic, why: str) -> None:
        moved = TopicMoved(topic.name, self._server_elsewhere(topic.name))
        await self._close(topic, why, for_producers=moved, for_consumers=moved, timeout=LAST_FLUSH_S)

    def _server_elsewhere(self, name: TopicName) -> int:
        record = ownership.known(self._store.local, name).record
        is_elsewhere = record.state is OwnershipState.ASSIGNED and record.owner != self.broker
        return record.owner if is_elsewhere else ownership.NO_OWNER

    def _lost(self, lost: Tenure) -> None:
        topic = self._loaded.get(lost.name)
        if topic is not None and topic.epoch == lost.epoch and not self._is_closing:
            log.warning("topics: the tenure is over topic=%s epoch=%d", topic.name, topic.epoch)
            dropping = spawn(self._drop(topic, "its tenure is over"), name=f"topics: dropping {topic.name}")
            self._tasks.add(dropping)
            dropping.add_done_callback(self._tasks.discard)

    # -- deleting ----------------------------------------------------------------------------

    async def delete(self, name: TopicName) -> None:
        """The topic, with all its partitions, messages and subscriptions, on all brokers. Raises
        TopicUnknown, TopicMismatch (a partition), NotOwner."""
        await self._deletions.run(name)

    async def finish_deletions(self) -> None:
        """Those that a crash has left behind. Raises what keeps topics from being listed."""
        await self._upkeep.each(await self._deletions.unfinished(), self._finish_deletion)

    async def _finish_deletion(self, name: TopicName) -> None:
        log.info("topics: finishing a deletion topic=%s", name)
        with suppress(TopicUnknown):  # another broker has finished it
            await self._deletions.run(name)

    async def release(self, name: TopicName) -> None:
        """The owner's part of a deletion: close the topic and say so. Nothing if it is not being deleted, or
        not this broker's."""
        await self._deletions.release(name)

    async def _close_deleted(self, name: TopicName) -> None:
        await self._loading.settled(name)
        topic = self._loaded.get(name)
        if topic is not None:
            await self._close(topic, "it was deleted", for_producers=TopicUnknown(name))

    # -- messages of this broker's own -------------------------------------------------------

    async def _dead_letter(self, target: str, messages: Sequence[Message]) -> None:
        """To another topic, which is created if it is missing, whatever the configuration says of others: the
        policy that names it was set on purpose."""
        name = TopicName.parse(target)
        await self.registry.ensure(name, reliable=None)
        await self.publish(name, messages)

    async def publish(self, name: TopicName, messages: Sequence[Message]) -> None:
        """What a broker has to say itself, to a topic that exists, wherever it is served. Returns when it is
        durable; without deduplication."""
        batch = RecordBatch.from_messages(messages)
        try:
            await (await self.get(name)).append(batch)
        except NotOwner:
            if self._others is None:
                raise
            await self._others.publish(name, batch)
