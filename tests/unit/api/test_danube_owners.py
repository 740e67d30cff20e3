"""Danube's calls name a producer, a consumer or a message by a number, and prove nothing with it: what a
stranger's numbers stand for stays closed to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from sava.api.danube.consumers import ConsumerService, ConsumerSessions
from sava.api.danube.metrics import SendStats
from sava.api.danube.producers import DanubeProducers, ProducerService
from sava.proto import danube_api_pb2 as pb
from sava.schemas.registry import SchemaRegistry
from sava.security.quotas import Quotas
from sava.topics.errors import OwnedByAnother
from sava.topics.served import ServedTopics
from tests.support.principals import ALICE, MALLORY, OPERATOR, acting, enforcing
from tests.support.topics import ORDERS, World

TOPIC = str(ORDERS)


class DanubeSide:
    """The services of one broker, without a port: who calls is the test's to say."""

    def __init__(self, topics: ServedTopics, schemas: SchemaRegistry) -> None:
        self.topics = topics
        self.producers = ProducerService(DanubeProducers(topics), schemas, SendStats(), Quotas())
        self.sessions = ConsumerSessions(topics)
        self.consumers = ConsumerService(topics, self.sessions, cast(Any, None), "http://b:1", Quotas())

    async def create(self, name: str = "p", strategy: Any = pb.Reliable) -> int:
        request = pb.ProducerRequest(topic_name=TOPIC, producer_name=name, dispatch_strategy=strategy)
        return (await self.producers.CreateProducer(request, None)).producer_id

    async def send(self, producer_id: int, name: str = "p") -> None:
        place = pb.MsgID(producer_id=producer_id, topic_name=TOPIC)
        await self.producers.SendMessage(
            pb.StreamMessage(msg_id=place, payload=b"x", producer_name=name), None
        )

    async def subscribe(self, consumer: str = "c") -> int:
        request = pb.ConsumerRequest(
            topic_name=TOPIC,
            subscription="s",
            consumer_name=consumer,
            subscription_type=pb.ConsumerRequest.Shared,
        )
        return (await self.consumers.Subscribe(request, None)).consumer_id

    async def serve(self, consumer_id: int) -> None:
        async def write(message: pb.StreamMessage) -> None:
            raise AssertionError("a message came")

        async with asyncio.timeout(5):
            await self.sessions.serve(consumer_id, write, "http://b:1")


@pytest.fixture
async def side(tmp_path: Path) -> AsyncIterator[DanubeSide]:
    world = World(tmp_path)
    async with world.topics(enforcing(tmp_path)) as topics:
        yield DanubeSide(topics, SchemaRegistry(world.metadata))


async def test_a_producers_id_sends_for_its_maker_only(side: DanubeSide) -> None:
    with acting(ALICE):
        producer = await side.create()
        await side.send(producer)
    with acting(MALLORY):
        for attempt in (side.create(), side.send(producer)):
            with pytest.raises(OwnedByAnother):
                await attempt
    with acting(ALICE):
        await side.send(producer)


async def test_a_consumers_id_receives_for_its_subscriber_only(side: DanubeSide) -> None:
    with acting(ALICE):
        await side.send(await side.create())
    with acting(OPERATOR, admin=True):  # a subscription for all, in which consumers are still somebody's
        await side.subscribe("operators")
    with acting(ALICE):
        consumer = await side.subscribe()
    with acting(MALLORY):
        with pytest.raises(OwnedByAnother, match="consumer name c "):
            await side.serve(consumer)
        with pytest.raises(OwnedByAnother, match="consumer name c "):
            await side.subscribe()


async def test_what_waits_for_its_consumer_is_not_a_strangers(side: DanubeSide) -> None:
    """On a topic that keeps nothing, a consumer collects messages until its stream comes."""
    with acting(ALICE):
        producer = await side.create(strategy=pb.NonReliable)
        consumer = await side.subscribe()
        await side.send(producer)
    with acting(MALLORY), pytest.raises(OwnedByAnother, match="consumer name c "):
        await side.serve(consumer)


async def test_a_strangers_ack_does_nothing(side: DanubeSide) -> None:
    with acting(ALICE):
        producer = await side.create()
        await side.subscribe()
        await side.send(producer)
    place = pb.MsgID(topic_name=TOPIC, topic_offset=0)
    ack = pb.AckRequest(msg_id=place, subscription_name="s")
    nack = pb.NackRequest(msg_id=place, subscription_name="s")
    with acting(MALLORY):
        for attempt in (side.consumers.Ack(ack, None), side.consumers.Nack(nack, None)):
            with pytest.raises(OwnedByAnother, match="subscription s "):
                await attempt
    subscription = side.topics.loaded[ORDERS].subscription_set.need("s")
    assert subscription.backlog == 1  # type: ignore[union-attr]
    with acting(ALICE):
        await side.consumers.Ack(ack, None)
    assert subscription.backlog == 0  # type: ignore[union-attr]
