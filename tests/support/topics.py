"""One life of a broker's topics after another, on one metadata store, one disk and one object store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sava.config import Config
from sava.metadata.commands import Put
from sava.metadata.errors import Unavailable
from sava.metadata.records import unchanged
from sava.records import Message, RecordBatch
from sava.storage.broker_storage import BrokerStorage, StorageOptions
from sava.supervisor import Supervisor
from sava.topics import ownership, specs
from sava.topics.consumer import ConsumerHandle
from sava.topics.maintenance import TopicsOptions
from sava.topics.names import TopicName
from sava.topics.producers import ProducerHandle
from sava.topics.registry import Namespaces, Registry
from sava.topics.served import OtherBrokers, ServedTopics
from sava.topics.specs import EARLIEST, Ownership, Position, SubscriptionType
from sava.topics.topic import SubscribeOptions, Topic
from tests.support.storage import LAZY, Cluster
from tests.support.waiting import PATIENCE_S

ORDERS = TopicName("default", "orders")
QUICK = TopicsOptions(cursor_interval_s=0.02)
SLOW = TopicsOptions(cursor_interval_s=3600.0)
"""Positions are written only when somebody asks for it."""
GIVEN: dict[str, Any] = {"claims_unassigned": False, "incarnation": lambda: 7}
"""A broker that is registered, in a cluster whose controller says who serves what."""


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
        **more: Any,
    ) -> AsyncIterator[ServedTopics]:
        """One life, with an orderly end."""
        async with self.broker(f"broker-{broker}", storage) as opened:
            topics = ServedTopics(self.metadata, opened, config, broker=broker, options=options, **more)
            await topics.start(Supervisor())
            try:
                yield topics
            finally:
                await topics.close()

    async def start_topics(
        self, options: TopicsOptions = QUICK, *, broker: int = 1, **more: Any
    ) -> tuple[ServedTopics, BrokerStorage]:
        """A life whose end is the caller's: see ``crash``."""
        storage = await self.start(f"broker-{broker}")
        topics = ServedTopics(self.metadata, storage, Config(), broker=broker, options=options, **more)
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
