"""Stories of exclusive, failover and shared subscriptions."""

from __future__ import annotations

import asyncio

import pytest

from sava.records import Compression, RecordBatch
from sava.storage.errors import DataGap
from sava.topics.consumer import Delivery
from sava.topics.errors import (
    ConsumerClosed,
    ConsumerReplaced,
    SubscriptionBusy,
    SubscriptionMismatch,
)
from sava.topics.specs import CursorRecord, SubscriptionType
from tests.unit.topics.memory_log import (
    MemoryLog,
    get,
    gets_nothing,
    offsets_of,
    one,
    spec_of,
    subscription_on,
    turns,
)

EXCLUSIVE, SHARED = SubscriptionType.EXCLUSIVE, SubscriptionType.SHARED
FAILOVER = SubscriptionType.FAILOVER
CLOSED = ConsumerClosed("the story is over")


async def test_an_exclusive_consumer_gets_whole_batches_in_order() -> None:
    log = MemoryLog()
    log.publish(3)
    log.publish(2)
    subscription = subscription_on(log, spec_of())
    consumer = subscription.attach("c", consumer_id=1, credits=100)

    await turns()
    deliveries = await consumer.receive()
    assert [delivery.ranges for delivery in deliveries] == [((0, 3),), ((3, 5),)]
    assert offsets_of(deliveries) == [0, 1, 2, 3, 4]

    log.publish(1)
    assert await get(consumer, 1) == [5]
    consumer.ack([(0, 6)])
    assert (subscription.cursor_offset, subscription.backlog) == (6, 0)
    assert subscription.stats.acked == subscription.stats.delivered == 6
    await subscription.close(CLOSED)


async def test_a_compressed_batch_that_goes_out_whole_is_not_touched() -> None:
    log = MemoryLog()
    log.append(RecordBatch.encode([b"0", b"1"], publish_time=1, codec=Compression.ZSTD))
    subscription = subscription_on(log, spec_of())
    consumer = subscription.attach("c", consumer_id=1, credits=100)

    [delivery] = await consumer.receive()
    stored = [batch async for batch in log.read(0)]
    assert delivery.batch is stored[0]
    await subscription.close(CLOSED)


async def test_a_large_batch_goes_out_in_pieces() -> None:
    log = MemoryLog()
    log.append(RecordBatch.encode([bytes(100_000)] * 30, publish_time=1))
    log.append(RecordBatch.encode([b""] * 25_000, publish_time=1))
    subscription = subscription_on(log, spec_of())
    consumer = subscription.attach("c", consumer_id=1, credits=100_000)

    found: list[Delivery] = []
    while sum(map(len, found)) < 25_030:
        found += await consumer.receive()
    assert max(delivery.batch.header.length for delivery in found) <= 1.1 * (1 << 20)
    assert max(map(len, found)) <= 10_000
    assert [offset for delivery in found for offset in delivery.offsets()] == list(range(25_030))
    await subscription.close(CLOSED)


async def test_nobody_gets_more_than_its_credits() -> None:
    log = MemoryLog()
    log.publish(100)
    subscription = subscription_on(log, spec_of())
    consumer = subscription.attach("c", consumer_id=1, credits=7)
    assert await get(consumer, 7) == list(range(7))
    assert await gets_nothing(consumer)

    consumer.grant(3)
    assert await get(consumer, 3) == [7, 8, 9]
    assert await gets_nothing(consumer)
    assert log.reads == 1, "the batch at hand is kept"
    await subscription.close(CLOSED)


async def test_the_window_bounds_what_is_not_acked() -> None:
    log = MemoryLog()
    log.publish(100)
    subscription = subscription_on(log, spec_of(window=10))
    consumer = subscription.attach("c", consumer_id=1, credits=1000)
    assert await get(consumer, 10) == list(range(10))
    assert await gets_nothing(consumer)
    assert subscription.stats.unacked == 10

    consumer.ack([(3, 5)])
    assert await get(consumer, 2) == [10, 11]
    subscription.configure(spec_of(window=20))
    assert len(await get(consumer, 10)) == 10
    await subscription.close(CLOSED)


async def test_a_consumer_that_stops_fetching_holds_a_bounded_queue() -> None:
    log = MemoryLog()
    for _ in range(20):
        log.append(RecordBatch.encode([bytes(1 << 20)], publish_time=1))
    subscription = subscription_on(log, spec_of())
    consumer = subscription.attach("c", consumer_id=1, credits=1000)
    await turns(50)
    assert 4 <= subscription.stats.delivered <= 6

    seen = 0
    while seen < 20:
        seen += sum(map(len, await consumer.receive()))
    await subscription.close(CLOSED)


async def test_receive_gives_at_most_what_was_asked_for() -> None:
    log = MemoryLog()
    log.publish(5)
    log.publish(5)
    subscription = subscription_on(log, spec_of())
    consumer = subscription.attach("c", consumer_id=1, credits=100)
    await turns()
    assert offsets_of(await consumer.receive(7)) == list(range(7))
    assert offsets_of(await consumer.receive(1)) == [7]
    assert offsets_of(await consumer.receive()) == [8, 9]
    await subscription.close(CLOSED)


async def test_repeated_acks_and_nacks_of_unsent_messages_change_nothing() -> None:
    log = MemoryLog()
    log.publish(10)
    subscription = subscription_on(log, spec_of())
    consumer = subscription.attach("c", consumer_id=1, credits=4)
    await get(consumer, 4)
    consumer.ack([(2, 4), (0, 0), (5, 1)])
    consumer.ack([(2, 4)])
    consumer.nack([(6, 9)])
    assert subscription.stats.acked == 2
    assert subscription.cursor.record(1) == CursorRecord(0, (2, 4), 1)
    await subscription.close(CLOSED)


async def test_after_a_restart_only_what_was_not_acked_comes_again() -> None:
    log = MemoryLog()
    log.publish(6)
    log.publish(6)
    subscription = subscription_on(log, spec_of(), cursor=CursorRecord(2, (4, 5, 7, 11)))
    consumer = subscription.attach("c", consumer_id=1, credits=100)
    assert await get(consumer, 5) == [2, 3, 5, 6, 11]
    consumer.ack([(0, 12)])
    assert subscription.cursor.record(1).next_offset == 12
    await subscription.close(CLOSED)


async def test_an_exclusive_subscription_refuses_a_second_consumer() -> None:
    """Until the first has gone."""
    log = MemoryLog()
    log.publish(3)
    subscription = subscription_on(log, spec_of())
    first = subscription.attach("a", consumer_id=1, credits=10)
    assert await get(first, 3) == [0, 1, 2]
    with pytest.raises(SubscriptionBusy):
        subscription.attach("b", consumer_id=2)
    first.ack(one(1))
    first.close()
    first.close()

    second = subscription.attach("b", consumer_id=2, credits=10)
    deliveries = await second.receive()
    assert offsets_of(deliveries) == [0, 2]
    assert {delivery.attempt for delivery in deliveries} == {1}, "nothing has failed"
    with pytest.raises(ConsumerClosed):
        await first.receive()
    await subscription.close(CLOSED)


async def test_a_consumer_that_connects_again_takes_over_from_itself() -> None:
    log = MemoryLog()
    log.publish(5)
    subscription = subscription_on(log, spec_of())
    old = subscription.attach("c", consumer_id=1, credits=3)
    assert await get(old, 3) == [0, 1, 2]
    waiting = asyncio.ensure_future(old.receive())
    await turns()

    new = subscription.attach("c", consumer_id=1, credits=100)
    with pytest.raises(ConsumerReplaced):
        await waiting
    assert await get(new, 5) == [0, 1, 2, 3, 4], "in order, what was in flight first"
    old.close()
    assert subscription.consumers["c"] is new
    old.ack([(0, 5)])
    assert subscription.cursor_offset == 5, "a late ack of the old stream counts"
    await subscription.close(CLOSED)


async def test_failover_promotes_the_next_consumer_within_a_turn_of_the_loop() -> None:
    log = MemoryLog()
    log.publish_each(6)
    subscription = subscription_on(log, spec_of(FAILOVER))
    first = subscription.attach("a", consumer_id=1, credits=4)
    second = subscription.attach("b", consumer_id=2, credits=100)
    third = subscription.attach("c", consumer_id=3, credits=100)
    assert await get(first, 4) == [0, 1, 2, 3]
    assert [each.is_active for each in (first, second, third)] == [True, False, False]
    assert await gets_nothing(second)
    first.ack(one(1))

    first.close()
    await asyncio.sleep(0)
    assert subscription.stats.in_flight >= 3, (
        "what the first had; dispatch stops when its slice of time is over"
    )
    assert await get(second, 5) == [0, 2, 3, 4, 5]
    assert [each.is_active for each in (first, second, third)] == [False, True, False]
    assert await gets_nothing(third)

    back = subscription.attach("a", consumer_id=1, credits=100)
    assert not back.is_active, "whoever comes back stands last"
    await subscription.close(CLOSED)


async def test_shared_consumers_get_slices_in_turn() -> None:
    log = MemoryLog()
    log.publish(100)
    subscription = subscription_on(log, spec_of(SHARED))
    consumers = [subscription.attach(name, consumer_id=1, credits=1000) for name in "abcd"]
    await turns()
    assert [[each.ranges for each in await consumer.receive()] for consumer in consumers] == [
        [((0, 25),)],
        [((25, 50),)],
        [((50, 75),)],
        [((75, 100),)],
    ]
    await subscription.close(CLOSED)


async def test_single_messages_alternate_between_shared_consumers() -> None:
    log = MemoryLog()
    log.publish_each(6)
    subscription = subscription_on(log, spec_of(SHARED))
    one_, other = (subscription.attach(name, consumer_id=1, credits=1000) for name in "ab")
    assert await get(one_, 3) == [0, 2, 4]
    assert await get(other, 3) == [1, 3, 5]
    await subscription.close(CLOSED)


async def test_whole_batches_are_not_cut_while_there_are_enough_of_them() -> None:
    log = MemoryLog()
    for _ in range(10):
        log.publish(10)
    subscription = subscription_on(log, spec_of(SHARED))
    consumers = [subscription.attach(name, consumer_id=1, credits=1000) for name in "ab"]
    await turns()
    found = [await consumer.receive() for consumer in consumers]
    assert [sum(map(len, each)) for each in found] == [55, 45]
    assert sum(len(delivery) == 10 for each in found for delivery in each) >= 8
    await subscription.close(CLOSED)


async def test_a_slow_shared_consumer_holds_nobody_up() -> None:
    log = MemoryLog()
    subscription = subscription_on(log, spec_of(SHARED))
    slow = subscription.attach("slow", consumer_id=1, credits=1)
    quick = subscription.attach("quick", consumer_id=2, credits=1000)
    log.publish_each(50)
    await turns()
    assert sorted(await get(quick, 49) + await get(slow, 1)) == list(range(50))
    await subscription.close(CLOSED)


async def test_what_a_shared_consumer_leaves_behind_goes_to_the_others_at_once() -> None:
    log = MemoryLog()
    log.publish_each(10)
    subscription = subscription_on(log, spec_of(SHARED))
    stays, goes = (subscription.attach(name, consumer_id=1, credits=1000) for name in "ab")
    assert await get(goes, 5) == [1, 3, 5, 7, 9]
    assert await get(stays, 5) == [0, 2, 4, 6, 8]
    goes.ack(one(3))
    goes.close()
    assert await get(stays, 4) == [1, 5, 7, 9]
    assert subscription.stats.redelivered == 4
    await subscription.close(CLOSED)


async def test_a_seek_forgets_what_is_under_way() -> None:
    log = MemoryLog()
    log.publish(10)
    subscription = subscription_on(log, spec_of())
    consumer = subscription.attach("c", consumer_id=1, credits=1000)
    assert len(await get(consumer, 10)) == 10
    consumer.ack([(0, 5)])

    await subscription.seek(2)
    assert (subscription.cursor_offset, subscription.backlog) == (2, 8)
    consumer.ack(one(9))
    assert await get(consumer, 8) == list(range(2, 10))
    await subscription.seek(9)
    assert await get(consumer, 1) == [9]
    await subscription.seek(1000)
    assert subscription.cursor_offset == 10
    await subscription.close(CLOSED)


async def test_what_was_queued_before_a_seek_is_not_given_out_after_it() -> None:
    log = MemoryLog()
    log.publish(10)
    subscription = subscription_on(log, spec_of())
    consumer = subscription.attach("c", consumer_id=1, credits=12)
    await turns()
    await subscription.seek(8)
    assert await get(consumer, 2) == [8, 9]
    log.publish(10)
    assert len(await get(consumer, 10)) == 10, "credits of what was not given out are there again"
    await subscription.close(CLOSED)


async def test_messages_that_retention_removed_are_passed_over_and_counted() -> None:
    log = MemoryLog()
    log.publish(4)
    log.publish(6)
    log.remove_below(4)
    subscription = subscription_on(log, spec_of(), cursor=CursorRecord(0, (1, 2)))
    consumer = subscription.attach("c", consumer_id=1, credits=100)
    assert await get(consumer, 6) == [4, 5, 6, 7, 8, 9]
    assert subscription.cursor_offset == 4
    assert subscription.stats.skipped_by_retention == 3
    assert subscription.stats.error == ""
    await subscription.close(CLOSED)


async def test_a_message_that_retention_removed_is_not_sent_again() -> None:
    log = MemoryLog()
    log.publish(4)
    log.publish(4)
    subscription = subscription_on(log, spec_of())
    consumer = subscription.attach("c", consumer_id=1, credits=8)
    await get(consumer, 8)
    log.remove_below(4)
    consumer.nack([(0, 8)])
    consumer.grant(100)
    assert await get(consumer, 4) == [4, 5, 6, 7]
    assert subscription.stats.skipped_by_retention == 4
    await subscription.close(CLOSED)


async def test_a_read_error_is_reported_and_tried_again() -> None:
    log = MemoryLog()
    log.publish(3)
    log.failure = DataGap("offset 0 is missing")
    subscription = subscription_on(log, spec_of())
    consumer = subscription.attach("c", consumer_id=1, credits=100)
    await turns()
    assert "offset 0 is missing" in subscription.stats.error

    log.failure = None
    assert await get(consumer, 3) == [0, 1, 2]
    assert subscription.stats.error == ""
    await subscription.close(CLOSED)


async def test_an_unforeseen_error_ends_the_consumers_not_the_subscription(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = MemoryLog()
    log.publish(3)
    log.failure = ZeroDivisionError("a fault in the program")
    subscription = subscription_on(log, spec_of())
    consumer = subscription.attach("c", consumer_id=1, credits=100)
    with pytest.raises(ConsumerClosed, match="a fault in the program"):
        await consumer.receive()
    assert "subscription failed" in caplog.text

    log.failure = None
    again = subscription.attach("c", consumer_id=1, credits=100)
    assert await get(again, 3) == [0, 1, 2]
    await subscription.close(CLOSED)


async def test_closing_ends_every_consumer() -> None:
    subscription = subscription_on(MemoryLog(), spec_of(SHARED))
    consumers = [subscription.attach(name, consumer_id=1) for name in "ab"]
    waiting = [asyncio.ensure_future(consumer.receive()) for consumer in consumers]
    await turns()
    await subscription.close(CLOSED)
    assert await asyncio.gather(*waiting, return_exceptions=True) == [CLOSED, CLOSED]
    with pytest.raises(ConsumerClosed):
        subscription.attach("c", consumer_id=1)
    await subscription.close(CLOSED)


async def test_acks_with_a_receipt_wait_for_the_record() -> None:
    log = MemoryLog()
    log.publish(3)
    subscription = subscription_on(log, spec_of())
    consumer = subscription.attach("c", consumer_id=1, credits=10)
    await get(consumer, 3)
    assert not subscription.cursor.is_dirty
    consumer.ack([(0, 2)])
    stored = subscription.cursor.acks_stored()
    record = subscription.cursor.record(5)
    assert (record, stored.done()) == (CursorRecord(2, (), 5), False)
    subscription.cursor.mark_stored(record)
    await stored
    await subscription.close(CLOSED)


async def test_a_type_cannot_be_changed() -> None:
    subscription = subscription_on(MemoryLog(), spec_of(SHARED))
    with pytest.raises(SubscriptionMismatch):
        subscription.configure(spec_of(FAILOVER))


async def test_without_consumers_there_is_no_task_and_an_idle_one_makes_no_turn() -> None:
    before = asyncio.all_tasks()
    log = MemoryLog()
    subscription = subscription_on(log, spec_of())
    await turns()
    assert asyncio.all_tasks() == before
    consumer = subscription.attach("c", consumer_id=1, credits=10)
    log.publish(1)
    assert await get(consumer, 1) == [0]
    consumer.ack(one(0))
    await turns()

    reads = log.reads
    steps = 0

    def count_turns(now: float) -> None:
        nonlocal steps
        steps += 1

    subscription._core.tick = count_turns  # type: ignore[method-assign]
    await asyncio.sleep(0.1)
    assert (log.reads, steps) == (reads, 0)

    del subscription._core.tick
    consumer.close()
    await turns()
    assert asyncio.all_tasks() == before
    await subscription.close(CLOSED)


async def test_acks_repeated_after_a_restart_count_before_redelivery() -> None:
    """Given acks 0..3 that were not stored when the broker died, when their client comes back with them, then
    these messages do not come again."""
    log = MemoryLog()
    log.publish(6)
    subscription = subscription_on(log, spec_of())
    consumer = subscription.attach("c", consumer_id=1, credits=0)

    consumer.ack([(0, 3), (4, 5), (5, 1000)])
    assert subscription.cursor_offset == 3
    assert subscription.backlog == 1

    consumer.grant(100)
    assert await get(consumer, 1) == [3]
    log.publish(1)
    assert await get(consumer, 1) == [6]
    await subscription.close(CLOSED)


async def test_an_ack_from_before_a_seek_does_not_count_after_it() -> None:
    log = MemoryLog()
    log.publish(4)
    subscription = subscription_on(log, spec_of())
    consumer = subscription.attach("c", consumer_id=1, credits=4)
    assert await get(consumer, 4) == [0, 1, 2, 3]

    await subscription.seek(0)
    consumer.ack([(0, 4)])
    consumer.grant(4)
    assert await get(consumer, 4) == [0, 1, 2, 3]
    await subscription.close(CLOSED)


async def test_a_client_with_its_own_position_may_ack_any_message() -> None:
    """Also after a seek, when acks of what was never sent count no more; and going back, or the same again,
    changes nothing."""
    log = MemoryLog()
    log.publish(10)
    subscription = subscription_on(log, spec_of(), cursor=CursorRecord(0, (5, 6)))
    subscription.advance(3)
    assert (subscription.cursor_offset, subscription.backlog) == (3, 6)

    consumer = subscription.attach("c", consumer_id=1, credits=2)
    assert await get(consumer, 2) == [3, 4]
    subscription.advance(7)
    assert (subscription.cursor_offset, subscription.stats.unacked) == (7, 0)
    consumer.grant(1)
    assert await get(consumer, 1) == [7]

    await subscription.seek(1)
    subscription.advance(9)
    assert (subscription.cursor_offset, subscription.backlog) == (9, 1)
    record = subscription.cursor.record(1)
    subscription.cursor.mark_stored(record)
    for offset in (9, 4, 0):
        subscription.advance(offset)
    assert not subscription.cursor.is_dirty
    assert subscription.cursor_offset == 9
    await subscription.close(CLOSED)
