"""One life of a broker's topics after another, on one metadata store, one disk and one object store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sava.broker.consumer import Consumer
from sava.broker.names import TopicName
from sava.broker.position import EARLIEST, Position
from sava.broker.producers import Producer
from sava.broker.specs import SubscriptionType
from sava.broker.topic import SubscribeOptions, Topic
from sava.broker.topics import Topics, TopicsOptions
from sava.config import Config
from sava.records import Message, RecordBatch
from sava.storage.broker_storage import BrokerStorage, StorageOptions
from tests.unit.storage.brokers import LAZY, Cluster

ORDERS = TopicName("default", "orders")
QUICK = TopicsOptions(cursor_interval_s=0.02)
SLOW = TopicsOptions(cursor_interval_s=3600.0)
"""Positions are written only when somebody asks for it."""


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
    ) -> AsyncIterator[Topics]:
        """One life, with an orderly end."""
        async with self.broker(f"broker-{broker}", storage) as opened:
            topics = Topics(self.metadata, opened, config, broker=broker, options=options)
            await topics.start()
            try:
                yield topics
            finally:
                await topics.close()

    async def start_topics(
        self, options: TopicsOptions = QUICK, *, broker: int = 1
    ) -> tuple[Topics, BrokerStorage]:
        """A life whose end is the caller's: see ``crash``."""
        storage = await self.start(f"broker-{broker}")
        topics = Topics(self.metadata, storage, Config(), broker=broker, options=options)
        await topics.start()
        return topics, storage


async def crash(topics: Topics, storage: BrokerStorage) -> None:
    """Everything stops where it is, as far as that is possible within one process: nothing is written to the
    metadata store any more."""
    topics._keeper._kept.clear()
    await topics.close()
    await storage.close()


async def publish(topic: Topic, *payloads: str, name: str = "p") -> list[int]:
    producer = await topic.open_producer(name, takeover=False)
    return list(await asyncio.gather(*(producer.send(Message(each.encode())) for each in payloads)))


def batch_of(producer: Producer, *payloads: str, sequence: int | None = None) -> RecordBatch:
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


async def received(consumer: Consumer, count: int) -> list[tuple[int, str]]:
    """The next messages, with their offsets."""
    found: list[tuple[int, str]] = []
    async with asyncio.timeout(5):
        while len(found) < count:
            for delivery in await consumer.receive(count - len(found)):
                found += [(offset, message.payload.decode()) for offset, message in delivery.messages()]
    return found


def ranges(*offsets: int) -> Sequence[tuple[int, int]]:
    return [(offset, offset + 1) for offset in offsets]
