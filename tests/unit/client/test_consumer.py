"""The consumer against a broker in memory: credits, acks, and what a reconnect may not do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from sava.client import (
    Client,
    Closed,
    Consumer,
    ConsumerReplaced,
    Message,
    OutcomeUnknown,
    Refused,
    TopicUnknown,
    connection,
)
from sava.client import consumer as consumer_module
from sava.proto import streams_pb2 as pb
from tests.support.waiting import PATIENCE_S
from tests.unit.client.server import AWAY, MemoryBroker, refused

TOPIC = "/default/orders"


async def publish(client: Client, *payloads: bytes, topic: str = TOPIC) -> None:
    async with client.producer(topic, max_batch_messages=4) as producer:
        await producer.send_many(list(payloads))


async def take(consumer: Consumer, count: int) -> list[Message]:
    messages: list[Message] = []
    async with asyncio.timeout(PATIENCE_S):
        async for message in consumer:
            messages.append(message)
            if len(messages) == count:
                break
    return messages


async def reached(broker: MemoryBroker, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S), broker.changed:
        await broker.changed.wait_for(condition)


async def test_messages_come_one_by_one_or_by_batch(client: Client, broker: MemoryBroker) -> None:
    await publish(client, *(b"%d" % n for n in range(10)))
    async with client.consumer(TOPIC, subscription="s") as consumer:
        assert [message.offset for message in await take(consumer, 4)] == [0, 1, 2, 3]
        batch = await consumer.receive_batch(max_messages=3, timeout=PATIENCE_S)
        assert batch is not None
        assert batch.payloads() == [b"4", b"5", b"6"]
        assert batch.topic == TOPIC
        rest = await consumer.receive_batch(timeout=PATIENCE_S)
        assert rest is not None
        assert rest.ranges == ((7, 8),)


async def test_nothing_within_the_timeout_is_none(client: Client, broker: MemoryBroker) -> None:
    broker.topic(TOPIC)
    async with client.consumer(TOPIC, subscription="s") as consumer:
        assert await consumer.receive_batch(timeout=0.01) is None


async def test_an_opening_says_what_was_asked_for(client: Client, broker: MemoryBroker) -> None:
    broker.topic(TOPIC)
    async with client.consumer(
        TOPIC, subscription="s", type="key_shared", name="c", start=5, key_filters=("a*",), receive_queue=100
    ):
        await reached(broker, lambda: bool(broker.credits))
    (opening,) = broker.openings
    assert (opening.subscription, opening.consumer_name, opening.start.offset) == ("s", "c", 5)
    assert (opening.type, list(opening.key_filters)) == (pb.SUBSCRIPTION_KEY_SHARED, ["a*"])
    assert broker.credits == [100]


async def test_what_cannot_be_is_refused_before_anything_is_sent(client: Client) -> None:
    for wrong in ({"type": "queue"}, {"start": "first"}, {"receive_queue": 0}):
        with pytest.raises(Refused):
            client.consumer(TOPIC, subscription="s", **wrong)
    with pytest.raises(TopicUnknown):
        await client.consumer(TOPIC, subscription="s").open()


async def test_acks_are_few_ranges_and_flush_waits_until_they_are_stored(
    client: Client, broker: MemoryBroker
) -> None:
    await publish(client, *(b"%d" % n for n in range(12)))
    async with client.consumer(TOPIC, subscription="s") as consumer:
        messages = await take(consumer, 8)
        for message in messages[:6]:
            await consumer.ack(message)
        await consumer.ack_many(messages[6:])
        batch = await consumer.receive_batch(timeout=PATIENCE_S)
        assert batch is not None
        await consumer.ack(batch)
        await consumer.flush()
        assert broker.topic(TOPIC).acked == set(range(12))
        assert sum(map(len, broker.acks)) <= 4
        await consumer.flush()


async def test_acks_go_by_themselves_and_closing_sends_the_last_ones(
    client: Client, broker: MemoryBroker
) -> None:
    await publish(client, b"a", b"b")
    async with client.consumer(TOPIC, subscription="s") as consumer:
        first, second = await take(consumer, 2)
        await consumer.ack(first)
        await reached(broker, lambda: broker.topic(TOPIC).acked == {0})
        await consumer.ack(second)
    assert broker.topic(TOPIC).acked == {0, 1}


async def test_a_nack_says_when_and_why(client: Client, broker: MemoryBroker) -> None:
    await publish(client, b"a", b"b", b"c")
    async with client.consumer(TOPIC, subscription="s") as consumer:
        messages = await take(consumer, 3)
        await consumer.nack(messages[0], delay_ms=50, reason="not now")
        await consumer.nack(messages[1:])
        await reached(broker, lambda: len(broker.topic(TOPIC).nacked) == 2)
    first, second = broker.topic(TOPIC).nacked
    assert (list(first.ranges), first.delay_ms, first.reason) == ([0, 1], 50, "not now")
    assert list(second.ranges) == [1, 3]


async def test_a_foreign_message_is_refused(client: Client, broker: MemoryBroker) -> None:
    await publish(client, b"a")
    async with client.consumer(TOPIC, subscription="s") as consumer:
        for foreign in (Message(b"x", offset=1, topic="/default/other"), Message(b"x", topic=TOPIC)):
            with pytest.raises(Refused):
                await consumer.ack(foreign)
            with pytest.raises(Refused):
                await consumer.nack(foreign)


async def test_credits_come_back_in_large_steps(client: Client, broker: MemoryBroker) -> None:
    await publish(client, *(b"%d" % n for n in range(40)))
    async with client.consumer(TOPIC, subscription="s", receive_queue=16) as consumer:
        await take(consumer, 40)
        await reached(broker, lambda: sum(broker.credits) >= 16 + 40 - 8)
    assert broker.credits[0] == 16
    assert all(granted >= 8 for granted in broker.credits)


async def test_all_partitions_are_read_and_acked_by_name(client: Client, broker: MemoryBroker) -> None:
    parts = broker.partitioned(TOPIC, 3)
    async with client.producer(TOPIC) as producer:
        await producer.send_many([b"x"] * 30, keys=[f"k{n}" for n in range(30)])
    async with client.consumer(TOPIC, subscription="s") as consumer:
        messages = await take(consumer, 30)
        assert {message.topic for message in messages} == {part.name for part in parts}
        await consumer.ack_many(messages)
    for part in parts:
        assert part.acked == set(range(part.next_offset))


async def test_partitions_that_come_later_are_read_from_their_beginning(
    client: Client, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.partitioned(TOPIC, 1)
    monkeypatch.setattr(connection, "LOOK_UP_EVERY_S", 0.01)
    async with client.consumer(TOPIC, subscription="s", start="latest") as consumer:
        broker.partitioned(TOPIC, 2)
        await publish(client, b"early", topic=f"{TOPIC}-part-1")
        (message,) = await take(consumer, 1)
        assert (message.payload, message.topic) == (b"early", f"{TOPIC}-part-1")
    assert [opening.start.WhichOneof("kind") for opening in broker.openings if hasattr(opening, "start")] == [
        "latest",
        "earliest",
    ]


async def test_a_reconnect_shows_acked_messages_only_once_and_unseen_ones_once(
    client: Client, broker: MemoryBroker
) -> None:
    """The broker of this test forgets its acks with the stream, and delivers everything again."""
    await publish(client, *(b"%d" % n for n in range(12)))
    async with client.consumer(TOPIC, subscription="s", name="c") as consumer:
        seen = await take(consumer, 6)
        await consumer.ack_many(seen)
        await reached(broker, lambda: broker.topic(TOPIC).acked == set(range(6)))
        broker.topic(TOPIC).acked.clear()
        consumer._streams[TOPIC]._acks.rewind()  # as if no receipt had come yet
        consumer._streams[TOPIC]._acks.add_range(0, 6)
        await broker.break_streams()
        rest = await take(consumer, 6)
        assert [message.offset for message in rest] == list(range(6, 12))
        await reached(broker, lambda: broker.topic(TOPIC).acked == set(range(6)))
    assert [opening.consumer_name for opening in broker.openings[-2:]] == ["c", "c"]


async def test_messages_that_were_queued_are_dropped_because_they_come_again(
    client: Client, broker: MemoryBroker
) -> None:
    await publish(client, *(b"%d" % n for n in range(8)))
    async with client.consumer(TOPIC, subscription="s") as consumer:
        await take(consumer, 2)
        await reached(broker, lambda: len(broker.credits) == 1)
        broker.topic(TOPIC).cursor = 2
        await broker.break_streams()
        await reached(broker, lambda: len(broker.credits) == 2)
        assert [message.offset for message in await take(consumer, 6)] == list(range(2, 8))
        assert await consumer.receive_batch(timeout=0.01) is None


async def test_a_broker_that_is_away_means_no_messages_and_no_error(
    client: Client, broker: MemoryBroker
) -> None:
    broker.topic(TOPIC)
    async with client.consumer(TOPIC, subscription="s") as consumer:
        broker.refuse_opening = AWAY
        await broker.break_streams()
        assert await consumer.receive_batch(timeout=0.2) is None
        broker.refuse_opening = None
        await publish(client, b"back")
        assert [message.payload for message in await take(consumer, 1)] == [b"back"]


async def test_a_replaced_consumer_ends(client: Client, broker: MemoryBroker) -> None:
    broker.topic(TOPIC)
    async with client.consumer(TOPIC, subscription="s") as consumer:
        broker.refuse_opening = refused("consumer_replaced")
        await broker.break_streams()
        with pytest.raises(ConsumerReplaced):
            await take(consumer, 1)
        await consumer.flush()


async def test_closing_does_not_wait_long_for_acks_that_nobody_stores(
    client: Client, broker: MemoryBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker is there, and its cluster has lost its majority: positions are not written. The client's own
    timeout is for finding brokers, and may be minutes."""
    monkeypatch.setattr(consumer_module, "CLOSE_S", 0.2)
    await publish(client, b"a")
    broker.stores_acks = False
    async with client.consumer(TOPIC, subscription="s") as consumer:
        await consumer.ack(await anext(consumer))
        with pytest.raises(OutcomeUnknown):
            await consumer.flush(timeout=0.1)
        began = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - began < client._connection.timeout / 2
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("sava ")]


async def test_closing_ends_the_iteration(client: Client, broker: MemoryBroker) -> None:
    broker.topic(TOPIC)
    consumer = client.consumer(TOPIC, subscription="s")
    with pytest.raises(Closed):
        await anext(consumer)
    await consumer.open()
    waiting = asyncio.ensure_future(take(consumer, 1))
    await asyncio.sleep(0)
    await consumer.close()
    assert await waiting == []
    with pytest.raises(Closed):
        await consumer.receive_batch()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("sava ")]
