"""One life of a broker's topics after another, on one metadata store, one disk and one object store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from sava.config import Config
from sava.metadata.commands import Put
from sava.metadata.errors import Unavailable
from sava.metadata.records import RecordChange, RecordStore, Versioned, unchanged
from sava.metadata.store import MetadataStore
from sava.records import Message, RecordBatch
from sava.security.quotas import Quotas
from sava.storage.broker_storage import BrokerStorage, StorageOptions
from sava.supervisor import Supervisor
from sava.topics import ownership, specs
from sava.topics.consumer import ConsumerHandle
from sava.topics.errors import TopicUnknown
from sava.topics.maintenance import FAILURES, TopicsOptions
from sava.topics.names import TopicName
from sava.topics.producers import ProducerHandle
from sava.topics.registry import Located, Namespaces, Registry
from sava.topics.served import OtherBrokers, ServedTopics
from sava.topics.specs import EARLIEST, Ownership, Position, SubscriptionType
from sava.topics.topic import SubscribeOptions, Topic
from tests.support.storage import LAZY, Cluster
from tests.support.waiting import PATIENCE_S

log = logging.getLogger(__name__)

ORDERS = TopicName("default", "orders")
QUICK = TopicsOptions(cursor_interval_s=0.02)
SLOW = TopicsOptions(cursor_interval_s=3600.0)
"""Positions are written only when somebody asks for it."""
GIVEN: dict[str, Any] = {"kind": ServedTopics, "incarnation": lambda: 7}
"""A broker that is registered, in a cluster whose controller says who serves what."""


class SoleTopics(ServedTopics):
    """The topics of a broker without a cluster: a topic that no broker has is assigned to it before it is
    loaded, and what it owned before is loaded when it starts."""

    async def _prepare(self) -> None:
        await super()._prepare()
        while True:
            await self._catch_up()
            await asyncio.sleep(self._options.maintenance_interval_s)

    async def _catch_up(self) -> None:
        """What the controller and the agents of a cluster do: finish what was begun, load what is owned. What
        fails is tried again the next time."""
        try:
            await self.finish_deletions()
            found = await self.registry.list_all()
        except FAILURES as error:
            log.warning("topics: cannot be listed error=%s: %s", type(error).__name__, error)
            return
        owned = [name for name, spec in found.items() if not spec.partitions and self._should_load(name)]
        await self._upkeep.each(owned, self._load_known)

    def _should_load(self, name: TopicName) -> bool:
        record = ownership.known(self._store.local, name).record
        is_ours = record.owner == self.broker and record.state in ownership.STEPS["take"].sources
        return is_ours and name not in self._loaded

    async def _load_known(self, name: TopicName) -> None:
        with suppress(TopicUnknown):  # deleted meanwhile
            await self.get(name)

    def _check_may_take(self, name: TopicName) -> None:
        """``_load`` finds out."""

    async def _load(self, name: TopicName) -> Topic:
        if not (await self.registry.need(name)).partitions:
            await assign(self._store, name, self.broker)
        return await super()._load(name)


async def assign(store: MetadataStore, name: TopicName, broker: int) -> None:
    """In the controller's place: a topic that no broker has gets this one; any other stays as it is."""
    located: Located

    async def decide(found: Versioned[Ownership]) -> RecordChange[Ownership] | None:
        nonlocal located
        located = await Registry(store).locate(name)
        record = found.value or ownership.UNASSIGNED
        if record.state not in ownership.STEPS["assign"].sources:
            return None
        assigned = ownership.after("assign", name, record, owner=broker)
        return RecordChange(assigned, conditions=(located.unchanged,))

    await RecordStore(store).update(
        specs.ownership_key(name),
        Ownership,
        decide,
        what=f"the ownership of topic {name}",
        conclusive=(TopicUnknown,),
    )


class World(Cluster):
    """What outlives a broker."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)

    @asynccontextmanager
    async def topics(
        self,
        config: Config = Config(),  # noqa: B008 (frozen)
        options: TopicsOptions = QUICK,
        *,
        broker: int = 1,
        storage: StorageOptions = LAZY,
        kind: type[ServedTopics] = SoleTopics,
        incarnation: Callable[[], int] = lambda: 0,
        others: OtherBrokers | None = None,
        quotas: Quotas | None = None,
    ) -> AsyncIterator[ServedTopics]:
        """One run of a broker, with an orderly end."""
        async with self.broker(f"broker-{broker}", storage) as opened:
            topics = kind(
                self.metadata,
                opened,
                config,
                broker=broker,
                options=options,
                incarnation=incarnation,
                others=others,
                quotas=quotas,
            )
            await topics.start(Supervisor())
            try:
                yield topics
            finally:
                await topics.close()

    async def start_topics(
        self,
        options: TopicsOptions = QUICK,
        *,
        broker: int = 1,
        kind: type[ServedTopics] = SoleTopics,
        incarnation: Callable[[], int] = lambda: 0,
    ) -> tuple[ServedTopics, BrokerStorage]:
        """A run of a broker whose end is the caller's: see ``crash``."""
        storage = await self.start(f"broker-{broker}")
        topics = kind(
            self.metadata, storage, Config(), broker=broker, options=options, incarnation=incarnation
        )
        await topics.start(Supervisor())
        return topics, storage

    def ownership(self, name: TopicName = ORDERS) -> Ownership:
        return ownership.known(self.metadata.local, name).record

    async def step(self, step: str, name: TopicName = ORDERS, **changes: Any) -> Ownership:
        """What others do to a topic's ownership: the controller, or another broker."""
        key = specs.ownership_key(name)
        record, revision = ownership.held(await self.metadata.get(key))
        record = ownership.after(step, name, record, **changes)
        result = await self.metadata.txn((unchanged(key, revision),), (Put(key, specs.encode(record)),))
        assert result.succeeded
        return record

    async def assigned(self, broker: int, name: TopicName = ORDERS, *, reliable: bool = True) -> None:
        """A new topic, for a broker that waits to be given some."""
        await Namespaces(self.metadata).ensure((name.namespace,))
        await Registry(self.metadata).create(name, reliable=reliable)
        await self.step("assign", name, owner=broker)


async def _unreachable(*_: object) -> None:
    raise Unavailable("no other broker answers")


def others(
    *,
    released: Callable[[Sequence[TopicName]], Awaitable[None]] = _unreachable,
    publish: Callable[[TopicName, RecordBatch], Awaitable[None]] = _unreachable,
) -> OtherBrokers:
    """The other brokers of a test, of which only what it gives can be reached."""
    return OtherBrokers(released=released, publish=publish)


async def crash(topics: ServedTopics, storage: BrokerStorage) -> None:
    """Everything stops where it is, as far as that is possible within one process: nothing is written to the
    metadata store any more."""
    topics._keeper._kept.clear()
    await topics.close()
    await storage.close()


async def publish(topic: Topic, *payloads: str, name: str = "p") -> list[int]:
    producer = await topic.producers.open(name, takeover=False)
    return list(await asyncio.gather(*(producer.send(Message(each.encode())) for each in payloads)))


def batch_of(producer: ProducerHandle, *payloads: str, sequence: int | None = None) -> RecordBatch:
    return RecordBatch.encode(
        [payload.encode() for payload in payloads],
        publish_time=1,
        producer_id=producer.producer_id,
        base_sequence=producer.next_sequence if sequence is None else sequence,
    )


def options(
    subscription: str = "s",
    consumer: str = "c",
    *,
    type: SubscriptionType = SubscriptionType.SHARED,  # noqa: A002 (the field's name)
    start: Position = EARLIEST,
    credits: int = 1000,  # noqa: A002 (the field's name)
    **more: Any,
) -> SubscribeOptions:
    return SubscribeOptions(
        subscription=subscription, type=type, consumer_name=consumer, start=start, credits=credits, **more
    )


async def received(consumer: ConsumerHandle, count: int) -> list[tuple[int, str]]:
    """The next messages, with their offsets."""
    found: list[tuple[int, str]] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < count:
            for delivery in await consumer.receive(count - len(found)):
                found += [(offset, message.payload.decode()) for offset, message in delivery.messages()]
    return found


def ranges(*offsets: int) -> Sequence[tuple[int, int]]:
    return [(offset, offset + 1) for offset in offsets]
