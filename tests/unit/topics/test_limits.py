"""What the three levels of policies come to, and how a rate is kept."""

from __future__ import annotations

import asyncio

import pytest

from sava.config import PolicySettings
from sava.metadata.records import RecordCorrupt
from sava.topics import specs
from sava.topics.errors import LimitReached
from sava.topics.names import TopicName
from sava.topics.registry import Namespaces, Registry
from sava.topics.rules import (
    MAX_WAIT_S,
    EffectiveLimits,
    RateLimiter,
    TopicLimits,
    check_room,
    configured,
)
from sava.topics.specs import NamespacePolicy
from tests.support.memory_store import MemoryStore
from tests.support.waiting import OwnTime

ORDERS = TopicName("default", "orders")


def test_every_policy_of_the_configuration_has_its_place() -> None:
    """Numbered, so that two that are swapped are found."""
    numbered = PolicySettings(**{name: index for index, name in enumerate(PolicySettings.model_fields, 1)})
    policy = configured(numbered)
    values = [getattr(policy, name) for name in policy.__struct_fields__]
    assert values == list(range(1, 10))
    assert list(policy.__struct_fields__) == list(EffectiveLimits._fields)


async def test_topic_comes_before_namespace_and_that_before_configuration() -> None:
    store = MemoryStore()
    namespaces, registry = Namespaces(store), Registry(store)
    limits = TopicLimits(store, PolicySettings(max_producers=1, max_consumers=2, max_message_size=3))
    await namespaces.ensure(("default",))
    await registry.create(ORDERS, reliable=True)
    assert limits.of(ORDERS).max_producers_per_topic == 1
    await namespaces.change_policy(
        "default",
        lambda _: NamespacePolicy(max_producers_per_topic=10, max_message_size=0, max_publish_rate=7),
    )
    assert limits.of(ORDERS)[:3] == (10, 10_000, 2)
    await registry.change_policy(ORDERS, lambda _: NamespacePolicy(max_producers_per_topic=0))
    assert limits.of(ORDERS).max_producers_per_topic == 0
    assert limits.of(ORDERS).max_message_size == 0
    assert limits.of(ORDERS).max_publish_rate == 7
    assert limits.of(TopicName("default", "order")).max_producers_per_topic == 10
    await registry.change_policy(ORDERS, lambda _: NamespacePolicy())
    assert limits.of(ORDERS).max_producers_per_topic == 10


async def test_a_policy_that_cannot_be_read_is_an_error_each_time() -> None:
    """Schedule: the record is damaged; it is asked for twice at the same revision of the store. The second
    answer must not be that there is no limit."""
    store = MemoryStore()
    limits = TopicLimits(store, PolicySettings(max_producers=1))
    assert limits.of(ORDERS).max_producers_per_topic == 1
    await store.put(specs.policy_key(ORDERS), b"not JSON")
    for _ in range(2):
        with pytest.raises(RecordCorrupt):
            limits.of(ORDERS)


async def test_partitions_have_what_their_topic_has() -> None:
    store = MemoryStore()
    registry, limits = Registry(store), TopicLimits(store, PolicySettings())
    await Namespaces(store).ensure(("default",))
    await registry.create(ORDERS, reliable=True, partitions=2)
    await registry.change_policy(ORDERS, lambda _: NamespacePolicy(max_consumers_per_topic=4))
    await registry.change_policy(ORDERS.partition(1), lambda _: NamespacePolicy(max_consumers_per_topic=5))
    found = [limits.of(ORDERS.partition(index)).max_consumers_per_topic for index in range(2)]
    assert found == [4, 5]


async def test_retention_in_the_terms_of_storage() -> None:
    limits = TopicLimits(MemoryStore(), PolicySettings(retention_time_minutes=2, retention_size_mb=0))
    retention = limits.of(ORDERS).retention
    assert retention is not None
    assert (retention.max_age_ms, retention.max_bytes) == (120_000, None)
    assert TopicLimits(MemoryStore(), PolicySettings()).of(ORDERS).retention is None


def test_room_for_one_more() -> None:
    check_room(4, 5, "things")
    check_room(10_000, 0, "things")
    with pytest.raises(LimitReached, match="things: the limit of 5"):
        check_room(5, 5, "things")


class TestRates:
    async def test_a_seconds_worth_passes_at_once_and_the_rest_in_order(self) -> None:
        limiter = RateLimiter()
        loop = asyncio.get_running_loop()
        passed: list[int] = []
        start, own = loop.time(), OwnTime()

        async def enter(number: int) -> None:
            await limiter.acquire(10, 100, "topic")
            passed.append(number)

        await asyncio.gather(*(enter(number) for number in range(13)))
        assert passed == list(range(13))
        assert loop.time() - start >= 0.25
        assert own.seconds < 2.0

    async def test_no_rate_no_waiting(self) -> None:
        limiter = RateLimiter(clock=lambda: 0.0)
        for _ in range(1000):
            await limiter.acquire(1000, 0, "topic")

    async def test_a_batch_above_the_rate_passes_and_those_behind_it_wait(self) -> None:
        now = 100.0
        limiter = RateLimiter(clock=lambda: now)
        await limiter.acquire(1100, 100, "topic")  # paid for at 110
        with pytest.raises(LimitReached):
            await limiter.acquire(1, 100, "topic")
        now += 11.0
        await limiter.acquire(50, 100, "topic")

    async def test_whoever_is_turned_away_has_used_nothing(self) -> None:
        now = 0.0
        limiter = RateLimiter(clock=lambda: now)
        await limiter.acquire(int(100 * (MAX_WAIT_S + 1)), 100, "topic")
        for _ in range(100):
            with pytest.raises(LimitReached):
                await limiter.acquire(100, 100, "topic")
        now += MAX_WAIT_S + 1.0
        await limiter.acquire(100, 100, "topic")
