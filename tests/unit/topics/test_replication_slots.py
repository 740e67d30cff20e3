"""Cursors of links: they keep messages from retention until another cluster has them."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest

from sava.config import Config, PolicySettings, ReplicationSettings
from sava.storage.keys import replication_slot
from sava.storage.types import Segment
from sava.topics.errors import SubscriptionUnknown
from sava.topics.names import InvalidName, TopicName
from sava.topics.specs import EARLIEST, LATEST, AtOffset, NamespacePolicy
from sava.topics.topic import Topic, kept_from
from tests.support.storage import EAGER
from tests.support.topics import ORDERS, World, options, publish, ranges, received
from tests.support.waiting import until

WEST = replication_slot("west")
LATER_MS = 120_000


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def stored(topic: Topic, count: int) -> None:
    """So many messages, each in a segment of its own."""
    log = topic.log
    assert log is not None
    for _ in range(count):
        await publish(topic, "x")
        await until(lambda: log.stored_offset == log.next_offset)


async def retained(topic: Topic) -> int:
    """The first offset that is kept when everything is old."""
    await topic.enforce_retention(time.time_ns() // 1_000_000 + LATER_MS)
    return topic.describe().start_offset


async def test_what_is_not_copied_stays_and_goes_when_nobody_waits_for_it(world: World) -> None:
    async with world.topics(storage=EAGER) as topics:
        topic = await topics.get_or_create(ORDERS, True)
        await topics.registry.change_policy(ORDERS, lambda _: NamespacePolicy(retention_time_minutes=1))
        await topic.reliable.hold_slot(WEST, EARLIEST)
        await topic.reliable.hold_slot(replication_slot("north"), EARLIEST)
        await stored(topic, 4)
        assert await retained(topic) == 0
        await topic.reliable.advance(WEST, 3)
        assert await retained(topic) == 0, "north has nothing yet"
        await topic.reliable.advance(replication_slot("north"), 2)
        assert await retained(topic) == 2
        await topic.release_slot(replication_slot("north"))
        assert await retained(topic) == 3
        await topic.release_slot(WEST)
        await topic.release_slot(WEST)
        assert await retained(topic) == 4


async def test_it_is_there_after_a_restart(world: World) -> None:
    async with world.topics() as topics:
        topic = await topics.get_or_create(ORDERS, True)
        await publish(topic, *"abcd")
        await topic.reliable.hold_slot(WEST, AtOffset(2))
        await topic.reliable.hold_slot(WEST, EARLIEST)  # once more: it stays where it is
        await topic.reliable.advance(WEST, 3)
    async with world.topics() as topics:
        topic = await topics.get(ORDERS)
        await topic.maintain()
        assert topic.describe().subscriptions[0].cursor == 3


async def test_a_position_that_is_gone_or_to_come_is_the_nearest_one(world: World) -> None:
    async with world.topics() as topics:
        topic = await topics.get_or_create(ORDERS, True)
        await publish(topic, "a", "b")
        await topic.reliable.hold_slot(WEST, AtOffset(99))
        assert topic.describe().subscriptions[0].cursor == 2


async def test_what_is_to_be_copied_again_is_kept_again(world: World) -> None:
    async with world.topics(storage=EAGER) as topics:
        topic = await topics.get_or_create(ORDERS, True)
        await topics.registry.change_policy(ORDERS, lambda _: NamespacePolicy(retention_time_minutes=1))
        await topic.reliable.hold_slot(WEST, EARLIEST)
        await stored(topic, 4)
        await topic.reliable.advance(WEST, 1)
        assert await retained(topic) == 1
        await topic.reliable.advance(WEST, 4)
        await topic.reliable.rewind(WEST, AtOffset(3))
        assert await retained(topic) == 3
        await topic.reliable.rewind(WEST, AtOffset(4))  # never forward
        assert await retained(topic) == 3
        await topic.reliable.advance(WEST, 4)
        await topic.reliable.rewind(WEST, AtOffset(0))  # as far as there is anything
    async with world.topics(storage=EAGER) as topics:
        topic = await topics.get(ORDERS)
        await topic.maintain()
        assert topic.describe().subscriptions[0].cursor == 3
        with pytest.raises(SubscriptionUnknown):
            await topic.reliable.rewind(replication_slot("north"), EARLIEST)


async def test_users_have_no_use_of_it(world: World) -> None:
    async with world.topics(Config(policies=PolicySettings(max_subscriptions=1))) as topics:
        topic = await topics.get_or_create(ORDERS, True)
        await topic.reliable.hold_slot(WEST, LATEST)
        consumer = await topic.subscribe(options())  # the limit is about users' subscriptions
        await publish(topic, "a")
        await received(consumer, 1)
        consumer.ack(ranges(0))
        reserved = "names that begin with sava-link. are for the links of replication"
        with pytest.raises(InvalidName, match=reserved):
            await topic.subscribe(options(WEST))
        with pytest.raises(InvalidName, match=reserved):
            await topic.create_subscription(options(replication_slot("east")))
        with pytest.raises(InvalidName, match=reserved):
            await topic.unsubscribe(WEST)
        with pytest.raises(InvalidName, match=reserved):
            await topic.reliable.seek(WEST, LATEST)
        with pytest.raises(InvalidName, match=reserved):
            topic.ack(WEST, ranges(0))
        assert {each.name: each.cursor for each in topic.describe().subscriptions} == {"s": 1, WEST: 0}
        other = await topics.get_or_create(TopicName("default", "other"), False)
        with pytest.raises(InvalidName, match=reserved):
            await other.subscribe(options(WEST))


async def test_a_runner_that_is_late_does_not_bring_it_back(world: World) -> None:
    """The policy is cleared, the cursor removed, and then comes what was on its way: made anew by it, the
    cursor would keep messages for ever."""
    async with world.topics() as topics:
        topic = await topics.get_or_create(ORDERS, True)
        await publish(topic, "a", "b")
        await topic.reliable.hold_slot(WEST, EARLIEST)
        await topic.release_slot(WEST)
        with pytest.raises(SubscriptionUnknown):
            await topic.reliable.advance(WEST, 1)
        assert not topic.subscriptions


async def test_beyond_the_limit_messages_go_and_somebody_is_told(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async with world.topics(storage=EAGER) as topics:
        topic = await topics.get_or_create(ORDERS, True)
        await topic.reliable.hold_slot(WEST, EARLIEST)
        await stored(topic, 4)
        assert topic.log is not None
        size = max(segment.size for segment in await topic.log.segments())
    limited = Config(replication=ReplicationSettings(max_backlog_gb=2.5 * size / 1e9))
    async with world.topics(limited, storage=EAGER) as topics:
        topic = await topics.get(ORDERS)
        await topics.registry.change_policy(ORDERS, lambda _: NamespacePolicy(retention_time_minutes=1))
        with caplog.at_level(logging.ERROR):
            assert await retained(topic) == 2
        assert "topic=/default/orders remote=west first=0 count=2" in caplog.text
        caplog.clear()
        assert await retained(topic) == 2
        assert not caplog.text, "once for each loss"
        await topic.create_subscription(options(start=AtOffset(2)))
        await stored(topic, 2)
        assert await retained(topic) == 2, "for consumers there is no such limit"


@pytest.mark.parametrize(
    ("consumers", "links", "max_bytes", "kept"),
    [
        pytest.param(None, [], None, None, id="nobody waits"),
        pytest.param(25, [], None, 25, id="a consumer"),
        pytest.param(25, [5, 40], None, 5, id="a link that is further behind"),
        pytest.param(25, [5], 250, 10, id="a link beyond the limit"),
        pytest.param(None, [5], 99, 30, id="not even the last one fits"),
        pytest.param(None, [5], 300, 5, id="at the limit"),
        pytest.param(3, [5], 100, 3, id="a consumer that is behind anyway"),
        pytest.param(None, [30], 100, 30, id="all is copied"),
    ],
)
def test_what_must_stay(
    consumers: int | None, links: list[int], max_bytes: int | None, kept: int | None
) -> None:
    """Segments of ten messages and a hundred bytes each."""
    segments = [segment(start, 100) for start in (0, 10, 20)]
    assert kept_from(consumers, links, segments, max_bytes) == kept


def segment(start: int, size: int) -> Segment:
    return Segment(
        topic_id=1,
        start=start,
        end=start + 10,
        key="k",
        size=size,
        crc32c=0,
        footer_size=0,
        footer_crc32c=0,
        min_publish_time=0,
        max_publish_time=0,
        created_ms=0,
        epoch=1,
    )
