"""Stories of messages that are not acked: nack, timeout, delays, dead letters."""

from __future__ import annotations

import asyncio

import pytest

from sava.records import RecordBatch
from sava.topics.errors import ConsumerClosed, LimitReached, TopicUnknown
from sava.topics.specs import (
    CursorRecord,
    DeadLetterPolicy,
    FailurePolicy,
    SubscriptionType,
)
from sava.topics.subscription import Subscription
from tests.support.waiting import PATIENCE_S, OwnTime
from tests.unit.topics.memory_log import (
    TOPIC,
    Letters,
    MemoryLog,
    get,
    gets_nothing,
    one,
    spec_of,
    subscription_on,
    turns,
)

EXCLUSIVE, SHARED, KEY_SHARED = (
    SubscriptionType.EXCLUSIVE,
    SubscriptionType.SHARED,
    SubscriptionType.KEY_SHARED,
)
CLOSED = ConsumerClosed("the story is over")


async def stats_say(subscription: Subscription, **wanted: object) -> None:
    """Until the stats say so."""
    async with asyncio.timeout(PATIENCE_S):
        while any(getattr(subscription.stats, name) != value for name, value in wanted.items()):
            await turns(1)


async def test_a_nacked_message_comes_again_with_its_next_attempt() -> None:
    log = MemoryLog()
    log.publish(3)
    subscription = subscription_on(log, spec_of())
    consumer = subscription.attach("c", consumer_id=1, credits=100)
    await get(consumer, 3)
    consumer.nack(one(1))
    [delivery] = await consumer.receive()
    assert (delivery.ranges, delivery.attempt) == (((1, 2),), 2)
    assert [message.payload for message in delivery.batch] == [b"1"]
    consumer.nack(one(1))
    assert [each.attempt for each in await consumer.receive()] == [3]
    consumer.ack([(0, 3)])
    assert subscription.cursor_offset == 3
    assert (subscription.stats.nacked, subscription.stats.redelivered) == (2, 2)
    await subscription.close(CLOSED)


async def test_the_longer_of_two_delays_counts_up_to_the_limit() -> None:
    now = 1000.0
    log = MemoryLog()
    log.publish(4)
    spec = spec_of(policy=FailurePolicy(), max_redelivery_delay_ms=5_000)
    subscription = subscription_on(log, spec)
    subscription._clock = lambda: now
    consumer = subscription.attach("c", consumer_id=1, credits=100)
    await get(consumer, 4)
    consumer.nack(one(0))  # the policy's second
    consumer.nack(one(1), delay_ms=300)  # the policy's second is longer
    consumer.nack(one(2), delay_ms=2_000)
    consumer.nack(one(3), delay_ms=3_600_000)  # five seconds are the limit

    for at, expected in ((1000.9, []), (1001.0, [0, 1]), (1001.9, []), (1002.0, [2]), (1005.0, [3])):
        now = at
        subscription._wake.set()
        if expected:
            assert await get(consumer, len(expected)) == expected
        assert await gets_nothing(consumer)
    await subscription.close(CLOSED)


async def test_a_message_without_an_ack_comes_again_after_the_timeout() -> None:
    log = MemoryLog()
    log.publish(2)
    subscription = subscription_on(log, spec_of(ack_timeout_ms=30))
    consumer = subscription.attach("c", consumer_id=1, credits=100)
    await get(consumer, 2)
    consumer.ack(one(0))
    assert await get(consumer, 1) == [1]
    assert subscription.stats.timed_out >= 1
    await subscription.close(CLOSED)


async def test_a_new_timeout_reaches_what_is_in_flight() -> None:
    log = MemoryLog()
    log.publish(2)
    subscription = subscription_on(log, spec_of(ack_timeout_ms=0))
    consumer = subscription.attach("c", consumer_id=1, credits=100)
    await get(consumer, 2)
    assert await gets_nothing(consumer)
    subscription.configure(spec_of(ack_timeout_ms=20))
    assert await get(consumer, 2) == [0, 1]
    await subscription.close(CLOSED)


async def test_what_a_consumer_never_fetched_goes_to_others_and_has_not_failed() -> None:
    log = MemoryLog()
    subscription = subscription_on(log, spec_of(SHARED, ack_timeout_ms=30))
    stuck = subscription.attach("stuck", consumer_id=1, credits=4)
    log.publish_each(4)
    await turns()
    reads = subscription.attach("reads", consumer_id=2, credits=4)
    found: list[int] = []
    while len(found) < 4:
        for delivery in await reads.receive():
            assert delivery.attempt == 1
            found += delivery.offsets()
            reads.ack(delivery.ranges)
    assert found == [0, 1, 2, 3]
    assert subscription.stats.timed_out == 0

    fetching = asyncio.ensure_future(stuck.receive())
    await turns()
    assert not fetching.done(), "what was taken back is not given out"
    log.publish_each(1)
    assert [list(delivery.offsets()) for delivery in await fetching] == [[4]]
    await subscription.close(CLOSED)


async def test_a_message_that_failed_too_often_blocks_what_is_new() -> None:
    log = MemoryLog()
    log.publish(4)
    subscription = subscription_on(log, spec_of(max_redelivery_count=1))
    consumer = subscription.attach("c", consumer_id=1, credits=100)
    await get(consumer, 4)
    consumer.nack(one(1))
    assert await get(consumer, 1) == [1]
    consumer.nack(one(1))
    log.publish(2)
    assert await gets_nothing(consumer)
    assert (subscription.stats.blocked, subscription.stats.blocked_offsets) == (True, ((1, 2),))

    consumer.nack(one(2))
    assert await get(consumer, 1) == [2], "what was delivered before goes on"

    consumer.ack(one(1))
    assert await get(consumer, 2) == [4, 5], "an ack of the blocked one releases"
    assert not subscription.stats.blocked
    await subscription.close(CLOSED)


@pytest.mark.parametrize("way", ["count", "drop", "seek"])
async def test_a_blocked_subscription_can_be_released(way: str) -> None:
    log = MemoryLog()
    log.publish(1)
    subscription = subscription_on(log, spec_of(max_redelivery_count=0))
    consumer = subscription.attach("c", consumer_id=1, credits=100)
    await get(consumer, 1)
    consumer.nack(one(0))
    log.publish(1)
    assert await gets_nothing(consumer)

    if way == "count":
        subscription.configure(spec_of(max_redelivery_count=5))
        assert await get(consumer, 2) == [0, 1]
    elif way == "drop":
        subscription.configure(spec_of(max_redelivery_count=0, dead_letter=DeadLetterPolicy.DROP))
        assert await get(consumer, 1) == [1]
        assert (subscription.stats.dropped, subscription.cursor_offset) == (1, 1)
    else:
        await subscription.seek(1)
        assert await get(consumer, 1) == [1]
    assert not subscription.stats.blocked
    await subscription.close(CLOSED)


async def test_drop_acks_and_counts() -> None:
    log = MemoryLog()
    log.publish(3)
    subscription = subscription_on(log, spec_of(max_redelivery_count=0, dead_letter=DeadLetterPolicy.DROP))
    consumer = subscription.attach("c", consumer_id=1, credits=100)
    await get(consumer, 3)
    consumer.nack([(0, 2)])
    consumer.ack(one(2))
    assert (subscription.stats.dropped, subscription.cursor_offset) == (2, 3)
    await subscription.close(CLOSED)


async def test_a_dead_letter_keeps_the_message_and_says_where_it_is_from() -> None:
    log, letters = MemoryLog(), Letters()
    log.append(
        RecordBatch.encode(
            [b"a", b"b"],
            publish_time=[5, 6],
            keys=["k", None],
            attributes=[{"mine": "1"}, {}],
            schema_id=7,
            schema_version=2,
            producer="p",
            producer_id=77,
        )
    )
    spec = spec_of(max_redelivery_count=1, dead_letter=DeadLetterPolicy.DEAD_LETTER)
    subscription = subscription_on(log, spec, letters=letters)
    consumer = subscription.attach("c", consumer_id=1, credits=100)
    await consumer.receive()
    consumer.nack(one(0))
    await consumer.receive()
    consumer.nack(one(0), reason="cannot parse")
    await stats_say(subscription, dead_lettered=1)

    [letter] = letters.received
    assert letters.targets == ["/default/orders-s-dlq"]
    assert (letter.payload, letter.key, letter.publish_time) == (b"a", "k", 5)
    assert (letter.schema_id, letter.schema_version, letter.producer) == (7, 2, "p")
    assert letter.attributes == {
        "mine": "1",
        "x-original-topic": str(TOPIC),
        "x-original-subscription": "s",
        "x-original-topic-offset": "0",
        "x-original-producer-id": "77",
        "x-poison-policy": "dead_letter",
        "x-delivery-attempt": "2",
        "x-failure-reason": "cannot parse",
    }
    assert subscription.cursor_offset == 1
    await subscription.close(CLOSED)


async def test_dead_letters_wait_for_their_topic_and_hold_up_nobody() -> None:
    log, letters = MemoryLog(), Letters()
    log.publish(3)
    letters.failures = [LimitReached("too many topics"), LimitReached("too many topics")]
    letters.gate.clear()
    spec = spec_of(
        max_redelivery_count=0, dead_letter=DeadLetterPolicy.DEAD_LETTER, dead_letter_topic="/default/bad"
    )
    subscription = subscription_on(log, spec, letters=letters)
    consumer = subscription.attach("c", consumer_id=1, credits=100)
    await get(consumer, 3)
    consumer.nack(one(0))
    await turns()
    consumer.ack([(1, 3)])
    log.publish(1)
    assert await get(consumer, 1) == [3]
    assert subscription.cursor_offset == 0, "not acked before it is safe"

    letters.gate.set()
    await stats_say(subscription, dead_lettered=1, error="")
    assert subscription.cursor_offset == 3
    assert letters.targets == ["/default/bad"]
    await subscription.close(CLOSED)


@pytest.mark.parametrize(
    "error", [TopicUnknown("/default/bad"), OSError("no route"), KeyError("an error that no rule names")]
)
async def test_an_error_of_the_dead_letter_topic_shows_and_a_new_policy_runs(
    error: Exception,
) -> None:
    log, letters = MemoryLog(), Letters()
    log.publish(1)
    letters.failures = [error]
    spec = spec_of(
        max_redelivery_count=0, dead_letter=DeadLetterPolicy.DEAD_LETTER, dead_letter_topic="/default/bad"
    )
    subscription = subscription_on(log, spec, letters=letters)
    consumer = subscription.attach("c", consumer_id=1, credits=100)
    await get(consumer, 1)
    consumer.nack(one(0))
    await stats_say(subscription, error=f"dead letters wait: {error}")
    subscription.configure(
        spec_of(
            max_redelivery_count=0,
            dead_letter=DeadLetterPolicy.DEAD_LETTER,
            dead_letter_topic="/default/good",
        )
    )
    await stats_say(subscription, dead_lettered=1, error="")
    assert letters.targets == ["/default/good"]
    await subscription.close(CLOSED)


async def test_many_dead_letters_are_handed_on_without_a_consumer() -> None:
    log, letters = MemoryLog(), Letters()
    log.publish(250)
    spec = spec_of(max_redelivery_count=0, dead_letter=DeadLetterPolicy.DEAD_LETTER)
    subscription = subscription_on(log, spec, letters=letters)
    consumer = subscription.attach("c", consumer_id=1, credits=1000)
    await get(consumer, 250)
    consumer.nack([(0, 250)])
    consumer.close()
    await stats_say(subscription, dead_lettered=250)
    assert [letter.payload for letter in letters.received] == [b"%d" % n for n in range(250)]
    assert subscription.cursor.record(1) == CursorRecord(250, (), 1)
    await turns()
    assert len(asyncio.all_tasks()) == 1
    await subscription.close(CLOSED)


async def test_a_failing_key_waits_and_the_others_go_on() -> None:
    log = MemoryLog()
    log.publish(4, keys=["a", "b", "a", "b"])
    subscription = subscription_on(log, spec_of(KEY_SHARED, max_redelivery_count=0))
    consumer = subscription.attach("c", consumer_id=1, credits=100)
    await get(consumer, 4)
    consumer.ack([(0, 1), (3, 4)])
    consumer.nack(one(2))
    log.publish(3, keys=["a", "b", "a"])
    assert await get(consumer, 1) == [5], "a is blocked, b is not"
    assert subscription.stats.blocked
    consumer.ack(one(2))
    assert await get(consumer, 2) == [4, 6]
    await subscription.close(CLOSED)


async def test_the_dispatch_rate_delays_and_never_drops() -> None:
    log = MemoryLog()
    log.publish(300)
    subscription = subscription_on(log, spec_of(), rate=lambda: 1000)
    consumer = subscription.attach("c", consumer_id=1, credits=1000)
    loop = asyncio.get_running_loop()
    began, own = loop.time(), OwnTime()
    assert await get(consumer, 300) == list(range(300))
    assert loop.time() - began > 0.15, "a burst of 100, then 200 at 1,000 a second"
    assert own.seconds < 1.0
    await subscription.close(CLOSED)
