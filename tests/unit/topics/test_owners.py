"""Subscriptions and names of producers and consumers belong to the principal that made them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sava.config import Config
from sava.records import Message
from sava.security.principal import ANONYMOUS
from sava.storage.producers import MAX_OWNED, EpochRequest, grant
from sava.storage.types import EpochTable
from sava.topics.errors import OwnedByAnother, ProducerFenced
from sava.topics.producers import producer_id
from sava.topics.served import ServedTopics
from sava.topics.specs import EARLIEST, AtOffset, FailurePolicy, SubscriptionType
from sava.topics.topic import SubscribeOptions, Topic
from tests.support.principals import ALICE, MALLORY, OPERATOR, acting, enforcing
from tests.support.topics import ORDERS, World

PLAIN = Config()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
def guarded(tmp_path: Path) -> Config:
    return enforcing(tmp_path)


@pytest.fixture
async def topic(world: World, guarded: Config) -> AsyncIterator[Topic]:
    async with world.topics(guarded) as topics:
        yield await served(topics)


async def served(topics: ServedTopics, *, reliable: bool = True) -> Topic:
    return await topics.get_or_create(ORDERS, reliable)


def options(name: str = "billing", consumer: str = "c", *, durable: bool = False) -> SubscribeOptions:
    return SubscribeOptions(
        subscription=name,
        type=SubscriptionType.SHARED,
        consumer_name=consumer,
        start=EARLIEST,
        durable_id=durable,
    )


# -- subscriptions -------------------------------------------------------------------------------------------


async def test_what_another_has_subscribed_to_is_closed_to_a_stranger(topic: Topic) -> None:
    with acting(ALICE):
        await topic.subscribe(options())
    with acting(MALLORY):
        for attempt in (
            lambda: topic.subscribe(options(consumer="mine")),
            lambda: topic.unsubscribe("billing"),
            lambda: topic.reliable.seek("billing", AtOffset(0)),
            lambda: topic.reliable.advance("billing", 0),
            lambda: topic.reliable.set_failure_policy("billing", FailurePolicy()),
            lambda: topic.reliable.set_max_unacked("billing", 5),
        ):
            with pytest.raises(OwnedByAnother, match=r"belongs to user:alice, and not to user:mallory"):
                await attempt()
        with pytest.raises(OwnedByAnother):
            topic.ack("billing", ((0, 1),))
        with pytest.raises(OwnedByAnother):
            topic.nack("billing", ((0, 1),))
    with acting(ANONYMOUS), pytest.raises(OwnedByAnother):
        await topic.subscribe(options(consumer="mine"))
    with acting(ALICE):
        await topic.subscribe(options(consumer="other"))
        topic.ack("billing", ((0, 1),))
        await topic.unsubscribe("billing")


async def test_an_administrator_may_do_all_with_what_others_own(topic: Topic) -> None:
    with acting(ALICE):
        await topic.subscribe(options())
    with acting(OPERATOR, admin=True):
        await topic.reliable.seek("billing", AtOffset(0))
        await topic.unsubscribe("billing")


async def test_what_an_administrator_makes_is_for_all(topic: Topic) -> None:
    with acting(OPERATOR, admin=True):
        await topic.create_subscription(options())
    for principal in (ALICE, MALLORY):
        with acting(principal):
            await topic.subscribe(options(consumer=principal.name))
            topic.ack("billing", ((0, 1),))


async def test_a_consumer_is_not_replaced_by_a_stranger_of_its_name(topic: Topic) -> None:
    with acting(OPERATOR, admin=True):
        await topic.create_subscription(options())
    with acting(ALICE):
        mine = await topic.subscribe(options())
    with acting(MALLORY), pytest.raises(OwnedByAnother, match="consumer name c "):
        await topic.subscribe(options())
    assert not mine.is_closed


@pytest.mark.parametrize("reliable", [True, False])
async def test_an_id_is_its_subscribers_also_while_it_is_away(
    world: World, guarded: Config, reliable: bool
) -> None:
    async with world.topics(guarded) as topics:
        topic = await served(topics, reliable=reliable)
        if reliable:
            with acting(OPERATOR, admin=True):
                await topic.create_subscription(options())
        with acting(ALICE):
            (await topic.subscribe(options(durable=True))).close()
        await topic.maintain()
    async with world.topics(guarded) as topics:
        topic = await served(topics, reliable=reliable)
        with acting(MALLORY), pytest.raises(OwnedByAnother, match=r"consumer name c .*user:alice"):
            await topic.subscribe(options(durable=True))
        with acting(ALICE):
            await topic.subscribe(options(durable=True))


async def test_ownership_outlives_the_broker(world: World, guarded: Config) -> None:
    async with world.topics(guarded) as topics:
        topic = await served(topics)
        with acting(ALICE):
            (await topic.subscribe(options())).close()
            (await topic.producers.open("p", takeover=True)).close()
            (await topic.producers.open("danube", takeover=False)).close()
    async with world.topics(guarded, broker=1) as topics:
        topic = await served(topics)
        with acting(MALLORY):
            with pytest.raises(OwnedByAnother):
                await topic.subscribe(options())
            for name, takeover in (("p", True), ("p", False), ("danube", True), ("danube", False)):
                with pytest.raises(OwnedByAnother, match=f"producer name {name} of .* belongs to user:alice"):
                    await topic.producers.open(name, takeover=takeover)


async def test_a_transient_subscription_is_its_makers(world: World, guarded: Config) -> None:
    async with world.topics(guarded) as topics:
        topic = await served(topics, reliable=False)
        with acting(ALICE):
            await topic.subscribe(options())
        with acting(MALLORY), pytest.raises(OwnedByAnother):
            await topic.subscribe(options(consumer="mine"))


async def test_without_permissions_nothing_belongs_to_anyone(world: World, guarded: Config) -> None:
    async with world.topics(PLAIN) as topics:
        topic = await served(topics)
        with acting(ALICE):
            await topic.subscribe(options())
            await topic.producers.open("p", takeover=True)
        with acting(MALLORY):
            await topic.subscribe(options())
            await topic.producers.open("p", takeover=True)
    async with world.topics(guarded) as topics:  # what was made before is for all
        topic = await served(topics)
        with acting(MALLORY):
            await topic.subscribe(options())
        with acting(ALICE):
            await topic.subscribe(options(consumer="other"))


async def test_turning_permissions_off_opens_what_was_owned(world: World, guarded: Config) -> None:
    async with world.topics(guarded) as topics:
        topic = await served(topics)
        with acting(ALICE):
            (await topic.subscribe(options())).close()
            (await topic.producers.open("p", takeover=True)).close()
    async with world.topics(PLAIN) as topics:
        topic = await served(topics)
        await topic.subscribe(options())
        await topic.producers.open("p", takeover=True)


# -- names of producers --------------------------------------------------------------------------------------


async def test_a_producer_is_not_fenced_by_a_stranger(topic: Topic) -> None:
    with acting(ALICE):
        mine = await topic.producers.open("p", takeover=True)
        generated = await topic.producers.open("g", takeover=True, is_generated=True)
    with acting(MALLORY):
        for name in ("p", "g"):
            with pytest.raises(OwnedByAnother, match=f"producer name {name}"):
                await topic.producers.open(name, takeover=True)
            with pytest.raises(OwnedByAnother):
                await topic.producers.open(name, takeover=True, presented=mine.number + 1)
            with pytest.raises(OwnedByAnother):
                await topic.producers.open(name, takeover=False)
        with pytest.raises(OwnedByAnother):
            mine.check_own()
    assert mine.is_open
    assert generated.is_open
    with acting(ALICE):
        mine.check_own()
        again = await topic.producers.open("p", takeover=True)
        with pytest.raises(ProducerFenced):
            await mine.send(Message(b"x", None, {}, 1, None, None, None, "p"))
        assert again.is_open


async def test_an_administrator_who_opens_a_name_frees_it(topic: Topic) -> None:
    with acting(ALICE):
        (await topic.producers.open("p", takeover=True)).close()
    with acting(OPERATOR, admin=True):
        (await topic.producers.open("p", takeover=True)).close()
    with acting(MALLORY):
        await topic.producers.open("p", takeover=True)


def test_a_flood_of_names_drives_out_those_of_its_maker_only() -> None:
    mine = EpochRequest(producer_id(1, "mine"), 0, owner="user:alice")
    table = grant(EpochTable(), [mine]).table
    flood = [EpochRequest(number, 0, owner="user:mallory") for number in range(1, MAX_OWNED + 500)]
    table = grant(table, flood).table
    owners = dict(table.owners)
    assert owners["user:alice"] == (mine.producer_id,)
    assert len(owners["user:mallory"]) == MAX_OWNED - 1
