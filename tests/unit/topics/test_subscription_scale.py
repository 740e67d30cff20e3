"""Stories of much: throughput, a long way behind, many idle subscriptions, and the real log."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from sava.records import RecordBatch
from sava.storage.broker_storage import StorageOptions
from sava.topics.errors import ConsumerClosed
from sava.topics.specs import CursorRecord, SubscriptionType
from sava.topics.subscription import Hooks, Subscription
from tests.support.storage import FORGETFUL, LAZY, Cluster, numbered
from tests.support.storage import TOPIC as KEY
from tests.unit.topics.memory_log import (
    TOPIC,
    Letters,
    MemoryLog,
    get,
    gets_nothing,
    spec_of,
    subscription_on,
    turns,
)

CLOSED = ConsumerClosed("the story is over")
_HOOKS = Hooks(dead_letter=Letters(), dispatch_rate=lambda: 0)
LEAST_MESSAGES_A_SECOND = 300_000
"""A floor for a busy machine; alone, it is several times that."""


async def consume(subscription: Subscription, name: str, count: int, window: int) -> int:
    """Take and ack until the subscription has no backlog; how many messages came."""
    consumer = subscription.attach(name, consumer_id=1, credits=window)
    seen = 0
    while subscription.backlog:
        for delivery in await consumer.receive():
            consumer.ack(delivery.ranges)
            consumer.grant(len(delivery))
            seen += len(delivery)
            if seen >= count:
                return seen
    return seen


async def test_batches_flow_at_a_high_rate() -> None:
    log = MemoryLog()
    batch = RecordBatch.encode([b"x" * 100] * 1_000, publish_time=1)
    for _ in range(500):
        log.append(batch)
    subscription = subscription_on(log, spec_of())
    began = time.thread_time()
    async with asyncio.timeout(60):
        assert await consume(subscription, "c", 500_000, 20_000) == 500_000
    rate = 500_000 / (time.thread_time() - began)
    print(f"{rate:,.0f} messages/s")
    assert rate > LEAST_MESSAGES_A_SECOND
    await subscription.close(CLOSED)


@pytest.mark.parametrize("kind", list(SubscriptionType))
async def test_a_consumer_far_behind_gets_everything(kind: SubscriptionType) -> None:
    log = MemoryLog()
    for first in range(0, 100_000, 100):
        keys = [f"k{(first + n) * 7919 % 1000}" for n in range(100)]
        log.append(RecordBatch.encode([b""] * 100, publish_time=1, keys=keys))
    subscription = subscription_on(log, spec_of(kind, window=1_000))
    names = ["a"] if kind is SubscriptionType.EXCLUSIVE else ["a", "b"]
    consumers = [asyncio.create_task(consume(subscription, name, 100_000, 300)) for name in names]
    async with asyncio.timeout(60):
        await asyncio.wait(consumers, return_when=asyncio.FIRST_COMPLETED)
    assert subscription.cursor.record(1) == CursorRecord(100_000, (), 1)
    assert subscription.stats.delivered == subscription.stats.acked == 100_000
    for consumer in consumers:
        consumer.cancel()
    await asyncio.gather(*consumers, return_exceptions=True)
    await subscription.close(CLOSED)


async def test_a_thousand_idle_subscriptions_cost_next_to_nothing() -> None:
    log = MemoryLog()
    log.publish(1)
    subscriptions = [subscription_on(log, spec_of(ack_timeout_ms=30_000)) for _ in range(1_000)]
    consumers = [each.attach("c", consumer_id=1, credits=10) for each in subscriptions]
    await asyncio.gather(*(get(consumer, 1) for consumer in consumers))
    for consumer in consumers:
        consumer.ack([(0, 1)])
    await turns()
    before = time.thread_time()
    await asyncio.sleep(1.0)
    assert time.thread_time() - before < 0.05
    await asyncio.gather(*(each.close(CLOSED) for each in subscriptions))
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("options", [LAZY, FORGETFUL])
async def test_on_a_real_log_through_a_seal_and_a_restart(tmp_path: Path, options: StorageOptions) -> None:
    cluster = Cluster(tmp_path)
    async with cluster.broker(options=options) as broker:
        log = await broker.open_topic(KEY, epoch=1)
        for first in range(0, 60, 3):
            await log.append(numbered(first, first + 3))
        first_life = Subscription(TOPIC, "s", spec_of(), CursorRecord(0), log, _HOOKS)
        first_life.start()
        consumer = first_life.attach("c", consumer_id=1, credits=1000)
        assert await get(consumer, 60) == list(range(60))
        consumer.ack([(0, 20), (30, 40)])
        record = first_life.cursor.record(1)
        appending = asyncio.ensure_future(log.append(numbered(60, 61)))
        assert await get(consumer, 1) == [60], "woken by the log"
        await appending
        await first_life.close(CLOSED)
        await log.seal()

    async with cluster.broker(options=options) as broker:
        log = await broker.open_topic(KEY, epoch=2)
        second_life = Subscription(TOPIC, "s", spec_of(), record, log, _HOOKS)
        second_life.start()
        consumer = second_life.attach("c", consumer_id=1, credits=15)
        expected = [*range(20, 30), *range(40, 61)]
        assert await get(consumer, 15) == expected[:15]
        assert await gets_nothing(consumer)
        consumer.nack([(22, 24)])
        consumer.grant(100)
        assert await get(consumer, 18) == [22, 23, *expected[15:]]
        await second_life.close(CLOSED)
        await log.close()
