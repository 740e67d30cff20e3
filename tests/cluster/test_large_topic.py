"""A topic with thousands of subscriptions, producers and segments, on real brokers: when its owner is killed,
the next one takes it up and stays registered. A broker that made all of it in one piece lost its registration
over it, and so did the next one."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Final

from sava.proto import admin_pb2
from sava.proto import topics_admin_pb2 as pb
from sava.storage import keys
from sava.storage.types import TopicKey
from tests.support.brokers import CALL_S, BrokerProcess, Brokers
from tests.support.long import IS_LONG

TOPIC: Final = "/default/large"
SUBSCRIPTIONS, PRODUCERS, SEGMENTS = (10_000, 2_000, 1_000) if IS_LONG else (300, 60, 40)
HELD_MS: Final = 50.0 if IS_LONG else 100.0
"""The short form runs beside other tests, and the CPU time of a turn grows with what the caches are shared
with."""
PARALLEL: Final = 32


class LargeBrokers(Brokers):
    async def prepare(self) -> BrokerProcess:
        broker = await super().prepare()
        broker.run_as("tests.cluster.large_child", SAVA_TURNS=str(turns_of(broker)))
        return broker

    async def segments(self, topic_id: int) -> int:
        client, after, count = self.running[0].client, "", 0
        prefix = keys.segments_prefix(TopicKey("default", "large", topic_id))
        while True:
            request = admin_pb2.RangeRequest(prefix=prefix, limit=500, start_after=after)
            page = await client.call(client.meta.Range, request, timeout=CALL_S)
            count += len(page.kvs)
            if not page.kvs:
                return count
            after = page.kvs[-1].key


def turns_of(broker: BrokerProcess) -> Path:
    return broker.data_dir.with_name(f"turns-{broker.number}")


def long_turns(brokers: Iterable[BrokerProcess], since: float) -> list[float]:
    """Milliseconds, the longest first."""
    lines = [line for each in brokers if turns_of(each).exists() for line in turns_of(each).open()]
    found = [tuple(map(float, line.split())) for line in lines]
    return sorted((ms for at, ms in found if at >= since), reverse=True)


async def each_of(count: int, work: Callable[[int], Awaitable[object]]) -> None:
    waiting = iter(range(count))

    async def take_turns() -> None:
        for number in waiting:
            await work(number)

    await asyncio.gather(*(take_turns() for _ in range(PARALLEL)))


async def registrations(broker: BrokerProcess) -> float:
    _, page = await broker.http("/metrics")
    found = re.search(r"^sava_broker_registrations_total ([\d.]+)$", page, re.MULTILINE)
    assert found is not None, page[:500]
    return float(found[1])


async def fill(cluster: LargeBrokers) -> None:
    owner = await cluster.owner(TOPIC)

    async def subscribe(number: int) -> None:
        kind = ("exclusive", "shared", "failover", "key_shared")[number % 4]
        start = pb.StartPosition(earliest=True)
        request = pb.CreateSubscriptionRequest(
            topic=TOPIC, subscription=f"subscription-{number}", type=kind, start=start
        )
        await owner.client.call(owner.client.subscriptions.CreateSubscription, request, timeout=CALL_S)

    await each_of(SUBSCRIPTIONS, subscribe)
    async with cluster.sava_client() as client:

        async def publish(number: int) -> None:
            async with client.producer(TOPIC, name=f"producer-{number}") as producer:
                await producer.send(b"x" * 100)

        await each_of(PRODUCERS, publish)
        async with client.producer(TOPIC) as producer:
            while await cluster.segments((await cluster.describe(TOPIC)).topic_id) < SEGMENTS:
                await producer.send(b"x" * 100)


async def test_the_next_owner_of_a_large_topic_stays_registered(tmp_path: Path) -> None:
    """The owner of the topic is killed. Another broker takes it up, is asked for its figures and for a
    description of the topic, and does not register a second time: no turn of its event loop is so long that
    its lease or its heartbeats wait for it. All subscriptions are there, at their places."""
    async with LargeBrokers(3, tmp_path) as cluster:
        await cluster.create(TOPIC)
        await fill(cluster)
        before = await cluster.describe(TOPIC)
        owner = await cluster.owner(TOPIC)
        others = [broker for broker in cluster.brokers if broker is not owner]
        registered = [await registrations(broker) for broker in others]
        gone = await cluster.id_of(owner)
        killed = time.time()
        owner.kill()
        await owner.ended()
        await cluster.served(TOPIC, by_other_than=gone, timeout=60)
        served = time.time() - killed
        after = await cluster.describe(TOPIC)
        assert [await registrations(broker) for broker in others] == registered
        turns = long_turns(others, killed)
        segments = await cluster.segments(after.topic_id)
    print(
        f"{len(after.subscriptions)} subscriptions, {PRODUCERS} producers, {segments} segments: served "
        f"{served:.2f} s after the kill; longest turns {[round(ms) for ms in turns[:5]]} ms"
    )
    assert after.next_offset == before.next_offset
    assert [(each.subscription, each.type, each.cursor) for each in after.subscriptions] == [
        (each.subscription, each.type, each.cursor) for each in before.subscriptions
    ]
    assert len(after.subscriptions) == SUBSCRIPTIONS
    assert segments >= SEGMENTS
    assert not turns or turns[0] <= HELD_MS
