"""Copies into the topics of a broker: what the topic asks of copiers, and what happens when it moves."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sava.cluster.writer_records import new_producer_id
from sava.config import Config, PolicySettings
from sava.schemas.registry import SchemaRegistry
from sava.schemas.types import Policy, TopicSchema
from sava.storage.source_positions import SourcePositionMismatch, SourceProgress, is_source_key
from sava.topics.errors import (
    MessageTooLarge,
    ProducerBusy,
    SchemaRefused,
    TopicMismatch,
    TopicMoved,
)
from sava.topics.names import TopicName
from sava.topics.origin_acks import OriginAcks
from sava.topics.producers import AccessMode, producer_id
from sava.topics.rules import TopicSchemas
from sava.topics.specs import SubscriptionType
from tests.support.copying import Origins
from tests.support.storage import contents
from tests.support.topics import GIVEN, ORDERS, World, options, publish, received
from tests.support.waiting import PATIENCE_S, until

OWN = ("sava", "0000000000000001")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_only_sources_have_the_ids_of_sources() -> None:
    assert not any(
        is_source_key(producer_id(topic_id, name)) for topic_id in range(50) for name in "abcdefgh"
    )
    assert all(producer_id(topic_id, "a") for topic_id in range(50))
    assert not any(is_source_key(new_producer_id("writer", str(salt))) for salt in range(400))


async def test_a_topic_that_keeps_nothing_takes_no_copy(world: World) -> None:
    async with world.topics() as topics:
        topic = await topics.get_or_create(ORDERS, False)
        with pytest.raises(TopicMismatch):
            await topic.open_source(Origins("eu").source)


async def test_a_topic_that_is_one_producers_alone_takes_no_copy(world: World) -> None:
    eu = Origins("eu").publish(5)
    async with world.topics() as topics:
        topic = await topics.get_or_create(ORDERS, True)
        copier = await topic.open_source(eu.source)
        alone = await topic.producers.open("alone", access=AccessMode.EXCLUSIVE, takeover=True)
        with pytest.raises(ProducerBusy):
            await topic.open_source(eu.source)
        with pytest.raises(ProducerBusy):
            await copier.begin(eu.source_range(0, 5, begin=True))
        alone.close()
        await (await copier.begin(eu.source_range(0, 5, begin=True)))
        assert topic.log is not None
        assert await contents(topic.log) == eu.payloads


async def test_limits_and_schema_hold_for_copies_and_the_position_stays(world: World) -> None:
    eu = Origins("eu").publish(10)
    async with world.topics(Config(policies=PolicySettings(max_message_size=1000))) as topics:
        topic = await topics.get_or_create(ORDERS, True)
        copier = await topic.open_source(eu.source)
        await (await copier.begin(eu.source_range(0, 2, begin=True)))
        with pytest.raises(MessageTooLarge):
            await copier.begin(eu.source_range(2, 4, size=2000))
        await SchemaRegistry(world.metadata).register("orders", "bytes", b"")
        await TopicSchemas(world.metadata).set(ORDERS, TopicSchema(subject="orders", policy=Policy.ENFORCE))
        with pytest.raises(SchemaRefused):
            await copier.begin(eu.source_range(2, 4))
        assert await copier.progress() == SourceProgress(True, 2, 2)
        with pytest.raises(SourcePositionMismatch):
            await copier.begin(eu.source_range(4, 6)._replace(batches=[], offsets=[]))


async def test_a_range_waits_for_a_hand_over_and_goes_to_the_next_owner(
    world: World,
) -> None:
    """What was taken before resolves and comes along; what waits at the door is nowhere."""
    eu = Origins("eu").publish(20, skip=range(8, 12))
    await world.assigned(1)
    async with world.topics(broker=1, **GIVEN) as topics:
        topic = await topics.get(ORDERS)
        copier = await topic.open_source(eu.source)
        taken = await copier.begin(eu.source_range(0, 8, begin=True))
        await (await copier.begin(eu.source_range(8, 12)))  # brings nothing; the next owner still knows it
        await world.step("move", target=2)
        handing = asyncio.create_task(topics.hand_over(ORDERS, timeout=PATIENCE_S))
        await until(lambda: topic._publisher._held is not None)
        with pytest.raises(TopicMoved):
            await copier.begin(eu.source_range(12, 20))
        assert (await taken).position == 8
        assert await handing == 8
        await world.step("seal", end=8)
        await world.step("assign", owner=2)
        async with world.topics(broker=2, **GIVEN) as others:
            moved = await others.get(ORDERS)
            copier = await moved.open_source(eu.source)
            assert await copier.progress() == SourceProgress(True, 12, 12)
            await (await copier.begin(eu.source_range(12, 20)))
            assert moved.log is not None
            assert await contents(moved.log) == eu.payloads


async def test_acks_of_elsewhere_create_the_subscription_and_never_go_back(world: World) -> None:
    eu = Origins("eu").publish(6)
    async with world.topics() as topics:
        topic = await topics.get_or_create(ORDERS, True)
        await publish(topic, "own 0")
        copier = await topic.open_source(eu.source)
        await (await copier.begin(eu.source_range(0, 4, begin=True)))

        async def apply(cursor: int) -> int:
            acks = [OriginAcks(eu.source.origin, cursor, ())]
            kind = SubscriptionType.EXCLUSIVE
            return (await topic.apply_acks("s", kind, acks, source=eu.source, own=OWN)).position

        assert await apply(3) == 4
        assert await apply(1) == 4
        assert await apply(6) == 4, "the rest of them is not here yet"
        await (await copier.begin(eu.source_range(4, 6)))
        consumer = await topic.subscribe(options(type=SubscriptionType.EXCLUSIVE))
        assert await received(consumer, 3) == [(0, "own 0"), (5, "eu/7/4"), (6, "eu/7/5")]
        consumer.close()
        keeps_nothing = await topics.get_or_create(TopicName("default", "other"), False)
        with pytest.raises(TopicMismatch):
            await keeps_nothing.apply_acks("s", SubscriptionType.SHARED, (), source=eu.source, own=OWN)
