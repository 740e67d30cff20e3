"""Stories of non-reliable topics: whoever listens gets it, and nothing waits."""

from __future__ import annotations

import asyncio

import pytest

from sava.records import RecordBatch
from sava.topics.errors import ConsumerClosed, ConsumerReplaced, SubscriptionBusy
from sava.topics.non_reliable import QUEUE_MESSAGES, FanOut, NonReliableSubscription
from sava.topics.specs import SubscriptionType
from tests.unit.topics.memory_log import (
    TOPIC,
    get,
    gets_nothing,
    offsets_of,
    one,
)

EXCLUSIVE, SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED
FAILOVER, KEY_SHARED = SubscriptionType.FAILOVER, SubscriptionType.KEY_SHARED


def publish(fan_out: FanOut, count: int, keys: list[str | None] | None = None) -> int:
    first = fan_out.next_offset
    payloads = [b"%d" % offset for offset in range(first, first + count)]
    return fan_out.publish(RecordBatch.encode(payloads, publish_time=1, keys=keys))


async def test_every_subscription_gets_what_comes_while_it_listens() -> None:
    fan_out = FanOut(TOPIC)
    publish(fan_out, 3)
    consumers = [
        fan_out.subscribe(name, EXCLUSIVE).attach("c", consumer_id=1, credits=100) for name in ("s", "t")
    ]
    assert publish(fan_out, 2) == 3
    publish(fan_out, 1)
    for consumer in consumers:
        assert offsets_of(await consumer.receive()) == [3, 4, 5]
        assert await gets_nothing(consumer)


async def test_a_consumer_that_waits_is_woken() -> None:
    fan_out = FanOut(TOPIC)
    consumer = fan_out.subscribe("s", EXCLUSIVE).attach("c", consumer_id=1, credits=100)
    receiving = asyncio.ensure_future(consumer.receive())
    await asyncio.sleep(0)
    publish(fan_out, 1)
    assert offsets_of(await receiving) == [0]


async def test_credits_bound_what_is_fetched_and_not_what_is_queued() -> None:
    fan_out = FanOut(TOPIC)
    consumer = fan_out.subscribe("s", EXCLUSIVE).attach("c", consumer_id=1)
    publish(fan_out, 5)
    assert await gets_nothing(consumer)
    consumer.grant(2)
    assert await get(consumer, 2) == [0, 1]
    receiving = asyncio.ensure_future(consumer.receive())
    await asyncio.sleep(0)
    consumer.grant(100)
    assert offsets_of(await receiving) == [2, 3, 4]


async def test_what_does_not_fit_into_the_queue_is_dropped_and_counted() -> None:
    fan_out = FanOut(TOPIC)
    subscription = fan_out.subscribe("s", EXCLUSIVE)
    consumer = subscription.attach("c", consumer_id=1, credits=100_000)
    publish(fan_out, QUEUE_MESSAGES - 1)
    publish(fan_out, 3)
    assert (subscription.delivered, subscription.dropped) == (QUEUE_MESSAGES, 2)
    assert len(await get(consumer, QUEUE_MESSAGES)) == QUEUE_MESSAGES
    publish(fan_out, 1)
    assert await get(consumer, 1) == [QUEUE_MESSAGES + 2]

    large = RecordBatch.encode([bytes(1 << 20)], publish_time=1)
    for _ in range(10):
        fan_out.publish(large)
    assert 4 <= subscription.dropped <= 8, "bytes are bounded as well"


async def test_shared_consumers_take_turns_and_a_full_one_is_passed_over() -> None:
    fan_out = FanOut(TOPIC)
    subscription = fan_out.subscribe("s", SHARED)
    one_, other = (subscription.attach(name, consumer_id=1, credits=100_000) for name in "ab")
    for _ in range(4):
        publish(fan_out, 1)
    assert await get(one_, 2) == [0, 2]
    assert await get(other, 2) == [1, 3]
    publish(fan_out, 10)
    assert await get(one_, 5) == [4, 5, 6, 7, 8]
    assert await get(other, 5) == [9, 10, 11, 12, 13]

    publish(fan_out, 2 * QUEUE_MESSAGES)
    await get(one_, QUEUE_MESSAGES)
    publish(fan_out, 4)
    assert len(await get(one_, 4)) == 4
    assert subscription.dropped == 0


async def test_failover_serves_the_first_and_then_the_next() -> None:
    fan_out = FanOut(TOPIC)
    subscription = fan_out.subscribe("s", FAILOVER)
    first, second = (subscription.attach(name, consumer_id=1, credits=100) for name in "ab")
    publish(fan_out, 1)
    assert (first.is_active, second.is_active) == (True, False)
    assert await get(first, 1) == [0]
    first.close()
    publish(fan_out, 1)
    assert second.is_active
    assert await get(second, 1) == [1]


async def test_a_key_has_one_consumer_and_a_key_that_nobody_accepts_is_dropped() -> None:
    fan_out = FanOut(TOPIC)
    subscription = fan_out.subscribe("s", KEY_SHARED)
    eu = subscription.attach("eu", consumer_id=1, key_filters=["eu-*"], credits=100)
    us = subscription.attach("us", consumer_id=2, key_filters=["us-*"], credits=100)
    publish(fan_out, 4, keys=["eu-1", "us-1", "jp", "eu-2"])
    assert await get(eu, 2) == [0, 3]
    assert await get(us, 1) == [1]
    assert subscription.dropped == 1


async def test_an_exclusive_subscription_has_one_consumer() -> None:
    subscription = FanOut(TOPIC).subscribe("s", EXCLUSIVE)
    old = subscription.attach("a", consumer_id=1)
    with pytest.raises(SubscriptionBusy):
        subscription.attach("b", consumer_id=2)
    new = subscription.attach("a", consumer_id=1)
    with pytest.raises(ConsumerReplaced):
        await old.receive()
    old.close()
    assert subscription.consumers == {"a": new}


async def test_acks_are_accepted_and_mean_nothing() -> None:
    fan_out = FanOut(TOPIC)
    consumer = fan_out.subscribe("s", EXCLUSIVE).attach("c", consumer_id=1, credits=100)
    publish(fan_out, 2)
    await get(consumer, 2)
    consumer.ack(one(0))
    consumer.nack(one(1), delay_ms=1, reason="no")
    assert await gets_nothing(consumer)


async def test_it_knows_since_when_nobody_listens() -> None:
    now = 5.0
    subscription = NonReliableSubscription(TOPIC, "s", EXCLUSIVE, clock=lambda: now)
    idle_since = [subscription.idle_since]
    consumer = subscription.attach("c", consumer_id=1)
    idle_since.append(subscription.idle_since)
    now = 9.0
    consumer.close()
    idle_since.append(subscription.idle_since)
    assert idle_since == [5.0, None, 9.0]


async def test_closing_ends_the_consumers() -> None:
    fan_out = FanOut(TOPIC)
    consumer = fan_out.subscribe("s", EXCLUSIVE).attach("c", consumer_id=1)
    fan_out.close(ConsumerClosed("the topic moves"))
    with pytest.raises(ConsumerClosed, match="moves"):
        await consumer.receive()
    assert not fan_out.subscriptions
    publish(fan_out, 1)
