"""Acks that travel between clusters: what a subscription says, and what it takes from elsewhere while its own
consumers are at work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sava.records import Message
from sava.topics.names import InvalidName
from sava.topics.origin_acks import OriginAcks
from sava.topics.ranges import IntervalSet
from sava.topics.specs import AtOffset, SubscriptionType
from sava.topics.topic import AppliedAcks, Topic
from tests.support.copying import Origins
from tests.support.topics import (
    ORDERS,
    World,
    options,
    publish,
    ranges,
    received,
)

OWN = ("sava", "0000000000000001")
KINDS = list(SubscriptionType)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def copied(topic: Topic, origins: Origins, start: int, end: int, *, begin: bool = False) -> None:
    copier = await topic.open_source(origins.source)
    await (await copier.begin(origins.source_range(start, end, begin=begin)))


async def applied(topic: Topic, origins: Origins, *acked: int, kind: int = 1, **more: Any) -> AppliedAcks:
    acks = [OriginAcks(origins.source.origin, 0, ranges(*acked))]
    return await topic.apply_acks("s", SubscriptionType(kind), acks, source=origins.source, own=OWN, **more)


async def said(topic: Topic, *known: tuple[int, int]) -> dict[tuple[str, str], list[tuple[int, int]]]:
    found = await topic.read_acks("s", known, OWN)
    return {each.origin: list(IntervalSet([(0, each.cursor), *each.ranges])) for each in found.acks}


class TestTaking:
    @pytest.mark.parametrize("kind", KINDS)
    async def test_what_a_consumer_has_in_its_hands_is_settled(
        self, world: World, kind: SubscriptionType
    ) -> None:
        """Its own ack of it comes too late, and does no harm."""
        eu = Origins("eu").publish(6)
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await copied(topic, eu, 0, 6, begin=True)
            consumer = await topic.subscribe(options(type=kind))
            assert len(await received(consumer, 6)) == 6
            await applied(topic, eu, 0, 1, 4, kind=kind)
            subscription = topic.subscriptions["s"]
            assert topic.describe().subscriptions[0].cursor == 2
            assert topic.describe().subscriptions[0].unacked == 3
            consumer.ack(ranges(0, 1, 4))
            consumer.close()
            again = await topic.subscribe(options(type=kind, consumer="d"))
            assert [offset for offset, _ in await received(again, 3)] == [2, 3, 5]
            again.ack(ranges(2, 3, 5))
            assert topic.describe().subscriptions[0].cursor == 6
            assert topic.subscriptions["s"] is subscription

    async def test_what_waits_for_its_key_is_not_delivered_any_more(self, world: World) -> None:
        """Key-shared, and the only consumer has no credits left: the rest was looked at and passed over."""
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            producer = await topic.producers.open("p", takeover=False)
            for number in range(6):
                await producer.send(Message(str(number).encode(), key=f"k{number % 2}"))
            kind = SubscriptionType.KEY_SHARED
            consumer = await topic.subscribe(options(type=kind, credits=2))
            await received(consumer, 2)
            acks = [OriginAcks(OWN, 0, [(3, 6)])]
            await topic.apply_acks("s", kind, acks, source=Origins("eu").source, own=OWN)
            consumer.grant(10)
            assert await received(consumer, 1) == [(2, "2")]
            consumer.ack(ranges(0, 1, 2))
            assert topic.describe().subscriptions[0].cursor == 6

    async def test_a_subscription_that_was_moved_takes_them_too(self, world: World) -> None:
        """After a seek, late acks of consumers count for nothing; these are no late ones."""
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await publish(topic, *map(str, range(6)))
            consumer = await topic.subscribe(options(credits=0))
            await topic.reliable.seek("s", AtOffset(2))
            acks = [OriginAcks(OWN, 0, [(3, 5)])]
            await topic.apply_acks("s", SubscriptionType.SHARED, acks, source=Origins("eu").source, own=OWN)
            consumer.grant(10)
            assert [offset for offset, _ in await received(consumer, 2)] == [2, 5]

    async def test_what_is_not_here_yet_comes_back_and_is_not_taken_for_said(self, world: World) -> None:
        eu = Origins("eu").publish(10)
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await copied(topic, eu, 0, 4, begin=True)
            found = await applied(topic, eu, 0, 1, 2, 3, 4, 5, notified=6)
            assert found.position == 4
            assert found.left == [OriginAcks(eu.source.origin, 0, [(4, 6)])]
            assert found.notified == 4, "whoever forgets what is left begins there"
            await copied(topic, eu, 4, 10)
            found = await applied(topic, eu, 4, 5, notified=6, since=4)
            assert (found.left, found.notified) == ([], 6)

    async def test_how_much_was_said_is_kept_with_the_acks_and_lost_with_them(self, world: World) -> None:
        eu = Origins("eu").publish(6)
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await copied(topic, eu, 0, 6, begin=True)
            assert (await applied(topic, eu, 0, 1, notified=2)).notified == 2
            assert (await applied(topic, eu, notified=1)).notified == 2, "it never goes back"
        async with world.topics() as topics:
            topic = await topics.get(ORDERS)
            assert (await applied(topic, eu)).notified == 2
            assert topic.describe().subscriptions[0].cursor == 2
            await topic.unsubscribe("s")
            found = await applied(topic, eu, 2, notified=3, since=2)
            assert found.notified == 0, "what was said before is not here any more: it is to be said again"


class TestSaying:
    async def test_nobody_has_read_anything_and_so_nothing_is_said_of_others(self, world: World) -> None:
        """Here are eu's messages from 100 on, its policy began at the latest. The next one to be read here is
        eu 100; taken for "everything before 100 is acked" that would make eu skip a hundred messages."""
        eu = Origins("eu").publish(110)
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await copied(topic, eu, 100, 110, begin=True)
            consumer = await topic.subscribe(options())
            assert await said(topic) == {}
            await received(consumer, 10)
            consumer.ack(ranges(0, 1, 2, 5))
            assert await said(topic) == {
                eu.source.origin: [(100, 103), (105, 106)],
                OWN: [(0, 3), (5, 6)],
            }

    async def test_a_message_that_is_not_here_is_not_said_to_be_acked(self, world: World) -> None:
        eu = Origins("eu").publish(10, skip=(4,))
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await copied(topic, eu, 0, 10, begin=True)
            await topic.create_subscription(options())
            await topic.reliable.advance("s", 9)
            assert (await said(topic))[eu.source.origin] == [(0, 4), (5, 10)]

    async def test_what_is_known_is_not_said_again(self, world: World) -> None:
        eu = Origins("eu").publish(10)
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await copied(topic, eu, 0, 10, begin=True)
            await topic.create_subscription(options())
            await topic.reliable.advance("s", 6)
            assert await said(topic, (0, 4)) == {eu.source.origin: [(4, 6)], OWN: [(4, 6)]}
            assert await said(topic, (0, 6)) == {}

    async def test_a_subscription_made_by_remote_acks_says_nothing_of_the_past(self, world: World) -> None:
        """Here retention has removed 0..4 before there was such a subscription; elsewhere they are there and
        nobody has read them. Nobody has here, either."""
        eu = Origins("eu").publish(3)
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await publish(topic, *map(str, range(6)))
            assert topic.log is not None
            topic.log._backlog.starts_at(4)
            await applied(topic, eu)
            assert await said(topic) == {}
            assert (await topic.read_acks("s", (), OWN)).covered == ((0, 4),)
            await topic.reliable.advance("s", 5)
            assert await said(topic) == {OWN: [(4, 5)]}

    async def test_a_subscription_begun_at_the_end_says_that_all_before_is_done(self, world: World) -> None:
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await publish(topic, *map(str, range(6)))
            await topic.create_subscription(options(start=AtOffset(4)))
            assert await said(topic) == {OWN: [(0, 4)]}

    async def test_links_have_no_acks_to_say_or_to_take(self, world: World) -> None:
        eu = Origins("eu").publish(3)
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            with pytest.raises(InvalidName, match="for the links of replication"):
                await topic.read_acks("sava-link.west", (), OWN)
            with pytest.raises(InvalidName):
                await topic.apply_acks(
                    "sava-link.west", SubscriptionType.SHARED, (), source=eu.source, own=OWN
                )
