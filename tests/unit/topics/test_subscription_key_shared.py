"""Stories of key-shared subscriptions: keys in order, one consumer at a time, and nothing lost."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict

import pytest

from sava.records import RecordBatch
from sava.topics.consumer import ConsumerHandle, Delivery
from sava.topics.dispatch import key_shared
from sava.topics.dispatch.members import DispatchMember, HashRing, KeyFilter, effective_keys
from sava.topics.errors import ConsumerClosed
from sava.topics.specs import SubscriptionType
from sava.topics.subscription import Subscription
from tests.support.waiting import PATIENCE_S
from tests.unit.topics.memory_log import (
    MemoryLog,
    get,
    gets_nothing,
    one,
    spec_of,
    subscription_on,
    turns,
)

KEY_SHARED = SubscriptionType.KEY_SHARED
CLOSED = ConsumerClosed("the story is over")
KEYS = [f"k{n}" for n in range(20)]


def homes(*names: str) -> dict[str, list[str]]:
    """Which of KEYS each of these consumers has."""
    ring = HashRing()
    ring.set([DispatchMember(name) for name in names])
    found: dict[str, list[str]] = {name: [] for name in names}
    for key in KEYS:
        found[str(ring.home(key))].append(key)
    return found


def test_a_ring_shares_fairly_and_moves_little() -> None:
    ring = HashRing()
    keys = [f"key-{n}" for n in range(10_000)]
    ring.set([DispatchMember(name) for name in "abcd"])
    before = {key: ring.home(key) for key in keys}
    shares = [list(before.values()).count(name) for name in "abcd"]
    assert min(shares) > 1_500
    ring.set([DispatchMember(name) for name in "abcde"])
    moved = [key for key in keys if ring.home(key) != before[key]]
    assert {ring.home(key) for key in moved} == {"e"}
    assert len(moved) < 3_500


@pytest.mark.parametrize(
    ("globs", "accepted", "refused"),
    [
        ([], ["", "x"], []),
        (["eu-*"], ["eu-", "eu-west"], ["EU-west", "us-eu-", "eu"]),
        (["a?c", "x*z"], ["abc", "a\nc", "xz", "xyyz"], ["ac", "abbc", "xzy"]),
        (["[a]*.b+"], ["[a].b+", "[a]zz.b+"], ["a.b", "[a]xb+"]),
        (["*a*b*"], ["ab", "xaxbx"], ["ba"]),
        (["**"], ["", "anything"], []),
        ([""], [""], ["x"]),
    ],
)
def test_filters_are_globs(globs: list[str], accepted: list[str], refused: list[str]) -> None:
    chosen = KeyFilter(globs)
    assert [key for key in accepted if not chosen.accepts(key)] == []
    assert [key for key in refused if chosen.accepts(key)] == []


def test_a_hostile_glob_costs_no_more_than_its_length() -> None:
    assert not KeyFilter(["*a" * 50 + "*b"]).accepts("a" * 1_000)


def test_the_effective_key_is_the_key_then_the_producer_then_one_for_all() -> None:
    batch = RecordBatch.encode(
        [b""] * 4, publish_time=1, keys=["k", None, None, "k"], producer=["p", "p", None, None]
    )
    assert list(effective_keys(batch)) == ["k", "p", "", "k"]
    assert list(effective_keys(RecordBatch.encode([b""] * 2, publish_time=1))) == ["", ""]
    assert list(effective_keys(RecordBatch.encode([b""] * 2, publish_time=1, producer="p"))) == ["p", "p"]


async def test_each_key_has_one_consumer_and_keeps_its_order() -> None:
    log = MemoryLog()
    keys = [KEYS[n % 20] for n in range(200)]
    log.publish(200, keys=keys)
    subscription = subscription_on(log, spec_of(KEY_SHARED))
    shares = homes("a", "b")
    for name in shares:
        subscription.attach(name, consumer_id=1, credits=1000)
    await turns()
    for name, share in shares.items():
        expected = [offset for offset, key in enumerate(keys) if key in share]
        assert await get(subscription.consumers[name], len(expected)) == expected
    await subscription.close(CLOSED)


async def test_a_lone_consumer_gets_batches_untouched() -> None:
    log = MemoryLog()
    log.publish(20, keys=KEYS)
    subscription = subscription_on(log, spec_of(KEY_SHARED))
    consumer = subscription.attach("a", consumer_id=1, credits=1000)
    [delivery] = await consumer.receive()
    [stored] = [batch async for batch in log.read(0)]
    assert delivery.batch is stored
    await subscription.close(CLOSED)


async def test_a_key_moves_to_a_new_consumer_only_when_the_old_one_has_answered() -> None:
    log = MemoryLog()
    subscription = subscription_on(log, spec_of(KEY_SHARED))
    old = subscription.attach("a", consumer_id=1, credits=1000)
    moving = homes("a", "b")["b"][0]
    staying = homes("a", "b")["a"][0]
    log.publish(2, keys=[moving, moving])
    await get(old, 2)

    new = subscription.attach("b", consumer_id=2, credits=1000)
    log.publish(3, keys=[moving, staying, moving])
    assert await get(old, 1) == [3]
    assert await gets_nothing(new), "its messages are still in flight at the old one"
    old.ack(one(1))
    assert await gets_nothing(new)
    old.ack(one(0))
    assert await get(new, 2) == [2, 4]
    await subscription.close(CLOSED)


async def test_what_a_consumer_leaves_behind_comes_before_what_is_newer() -> None:
    log = MemoryLog()
    subscription = subscription_on(log, spec_of(KEY_SHARED))
    goes = subscription.attach("a", consumer_id=1, credits=3)
    log.publish(6, keys=["x", "y", "x", "y", "x", "y"])
    assert await get(goes, 3) == [0, 1, 2]
    goes.ack(one(0))
    stays = subscription.attach("b", consumer_id=2, credits=1000)
    goes.close()
    found = await get(stays, 5)
    assert [offset for offset in found if offset % 2 == 0] == [2, 4]
    assert [offset for offset in found if offset % 2 == 1] == [1, 3, 5]
    await subscription.close(CLOSED)


async def test_a_key_without_credits_holds_up_no_other_key_within_the_look_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_shared, "LOOK_AHEAD", 10)
    log = MemoryLog()
    shares = homes("a", "b")
    slow_key, quick_key = shares["a"][0], shares["b"][0]
    subscription = subscription_on(log, spec_of(KEY_SHARED))
    slow = subscription.attach("a", consumer_id=1, credits=1)
    quick = subscription.attach("b", consumer_id=2, credits=1000)
    for _ in range(30):
        log.publish(2, keys=[slow_key, quick_key])
    found = await get(quick, 10)
    assert found == list(range(1, 21, 2))
    assert await gets_nothing(quick), "ten messages were passed over: now it waits"

    assert await get(slow, 1) == [0]
    slow.grant(1000)
    assert sorted(found + await get(slow, 29) + await get(quick, 20)) == list(range(1, 60))
    await subscription.close(CLOSED)


@pytest.mark.parametrize("by", ["advance", "retention"])
async def test_what_was_passed_over_and_is_done_since_is_never_sent(
    by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages of a consumer without credits are passed over, for the other consumer's. Then everything up to
    offset 40 is acked by somebody who keeps its own position, or removed; and then the credits come."""
    monkeypatch.setattr(key_shared, "LOOK_AHEAD", 10)
    log = MemoryLog()
    shares = homes("a", "b")
    slow_key, quick_key = shares["a"][0], shares["b"][0]
    subscription = subscription_on(log, spec_of(KEY_SHARED))
    slow = subscription.attach("a", consumer_id=1, credits=1)
    quick = subscription.attach("b", consumer_id=2, credits=1000)
    for _ in range(30):
        log.publish(2, keys=[slow_key, quick_key])
    assert await get(slow, 1) == [0]
    assert await get(quick, 10) == list(range(1, 21, 2))

    if by == "advance":
        subscription.advance(40)
        assert (subscription.cursor_offset, subscription.stats.unacked) == (40, 0)
    else:
        log.remove_below(40)
    slow.grant(1000)
    assert await get(slow, 10) == list(range(40, 60, 2))
    assert await get(quick, 10) == list(range(41, 60, 2))
    await subscription.close(CLOSED)


async def test_after_a_nack_the_key_waits_for_it() -> None:
    log = MemoryLog()
    log.publish(3, keys=["x", "x", "y"])
    subscription = subscription_on(
        log, spec_of(KEY_SHARED, base_redelivery_delay_ms=20, max_redelivery_delay_ms=20)
    )
    consumer = subscription.attach("a", consumer_id=1, credits=1000)
    await get(consumer, 3)
    consumer.nack(one(0))
    log.publish(2, keys=["x", "y"])
    assert await get(consumer, 1) == [4]
    assert await get(consumer, 1) == [0], "after its delay"
    assert await gets_nothing(consumer), "and 3 only when 0 is acked"
    consumer.ack(one(0))
    assert await get(consumer, 1) == [3]
    await subscription.close(CLOSED)


async def test_a_key_that_nobody_accepts_is_skipped() -> None:
    log = MemoryLog()
    subscription = subscription_on(log, spec_of(KEY_SHARED))
    eu = subscription.attach("eu", consumer_id=1, key_filters=["eu-*"], credits=100)
    us = subscription.attach("us", consumer_id=2, key_filters=["us-*", "ca-?"], credits=100)
    log.publish(6, keys=["eu-1", "us-1", "jp-1", "ca-1", "ca-22", "eu-1"])
    assert await get(eu, 2) == [0, 5]
    assert await get(us, 2) == [1, 3]
    eu.ack([(0, 6)])
    assert subscription.cursor_offset == 6
    assert subscription.stats.skipped_by_filter == 2
    await subscription.close(CLOSED)


async def test_what_was_delivered_is_never_skipped_because_its_consumer_left() -> None:
    log = MemoryLog()
    subscription = subscription_on(log, spec_of(KEY_SHARED))
    eu = subscription.attach("eu", consumer_id=1, key_filters=["eu-*"], credits=100)
    us = subscription.attach("us", consumer_id=2, key_filters=["us-*"], credits=100)
    log.publish(2, keys=["eu-1", "us-1"])
    assert await get(eu, 1) == [0]
    assert await get(us, 1) == [1]
    us.ack(one(1))
    eu.close()
    log.publish(2, keys=["eu-1", "us-1"])
    assert await get(us, 1) == [3]
    assert (subscription.cursor_offset, subscription.stats.skipped_by_filter) == (0, 1)

    eu = subscription.attach("eu", consumer_id=1, key_filters=["eu-*"], credits=100)
    assert await get(eu, 1) == [0]
    await subscription.close(CLOSED)


class _Worker:
    """A consumer that fetches, checks, and acks or nacks, until it is told to leave or the work is done."""

    def __init__(self, soak: _Soak, consumer: ConsumerHandle) -> None:
        self.soak = soak
        self.consumer = consumer
        self.task = asyncio.create_task(self.run())

    async def run(self) -> None:
        while True:
            for delivery in await self.consumer.receive(self.soak.random.randint(1, 40)):
                self.soak.check(self.consumer.name, delivery)
                await asyncio.sleep(0)
                self.answer(delivery)
            self.consumer.grant(self.soak.random.randint(1, 60))

    def answer(self, delivery: Delivery) -> None:
        for offset in delivery.offsets():
            if self.soak.random.random() < 0.03:
                self.consumer.nack(one(offset))
            elif self.soak.random.random() < 0.98:
                self.consumer.ack(one(offset))
                self.soak.acked.add(offset)

    async def leave(self) -> None:
        self.consumer.close()
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


class _Soak:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.log = MemoryLog()
        self.keys: list[str] = []
        self.acked: set[int] = set()
        self.highest: dict[str, int] = defaultdict(lambda: -1)
        """The highest offset of each key that was delivered."""
        spec = spec_of(KEY_SHARED, ack_timeout_ms=40, max_redelivery_count=10_000, window=500)
        self.subscription: Subscription = subscription_on(self.log, spec)
        self.workers: dict[str, _Worker] = {}

    def publish(self) -> None:
        keys = [f"k{self.random.randint(0, 30)}" for _ in range(self.random.randint(1, 50))]
        self.keys += keys
        self.log.publish(len(keys), keys=keys)

    def check(self, name: str, delivery: Delivery) -> None:
        """What a key has not seen yet comes without a gap; what it has seen may come again."""
        for offset in delivery.offsets():
            key = self.keys[offset]
            if offset > self.highest[key]:
                between = self.keys[self.highest[key] + 1 : offset]
                assert key not in between, f"{name} got {offset} of {key}, after {self.highest[key]}"
                self.highest[key] = offset

    async def come_and_go(self) -> None:
        name = self.random.choice("abcde")
        worker = self.workers.pop(name, None)
        if worker is not None and self.random.random() < 0.5:
            await worker.leave()
        else:
            consumer = self.subscription.attach(name, consumer_id=1, credits=self.random.randint(0, 50))
            if worker is not None:  # replaced
                await asyncio.gather(worker.task, return_exceptions=True)
            self.workers[name] = _Worker(self, consumer)


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_no_key_is_reordered_or_lost_while_consumers_come_and_go(seed: int) -> None:
    soak = _Soak(seed)
    for _ in range(300):
        soak.publish()
        if soak.random.random() < 0.2:
            await soak.come_and_go()
        await asyncio.sleep(soak.random.choice([0, 0, 0, 0.001]))
        for worker in soak.workers.values():
            assert not worker.task.done(), worker.task.exception()
    if "a" not in soak.workers:
        soak.workers["a"] = _Worker(soak, soak.subscription.attach("a", consumer_id=1, credits=50))
    async with asyncio.timeout(PATIENCE_S):
        while soak.subscription.backlog:
            await asyncio.sleep(0.01)
            for worker in soak.workers.values():
                assert not worker.task.done(), worker.task.exception()
                worker.consumer.grant(10)
    assert soak.acked == set(range(len(soak.keys)))
    assert soak.subscription.stats.unacked == 0
    assert not soak.subscription._core._keys  # type: ignore[attr-defined]
    assert not soak.subscription._core._key_of  # type: ignore[attr-defined]
    for worker in soak.workers.values():
        await worker.leave()
    await soak.subscription.close(CLOSED)
