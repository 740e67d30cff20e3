"""A broker that is killed under load and comes back: nothing lost, nothing twice, order kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sava.client import Client, Message
from tests.support.brokers import Standalone
from tests.support.waiting import PATIENCE_S

TOPIC = "/default/orders"
MESSAGES = 30_000
KILLS = (5_000, 15_000)


async def kill_and_start(broker: Standalone) -> None:
    await asyncio.to_thread(broker.kill)
    broker.start()


async def produce(client: Client, broker: Standalone) -> list[int]:
    """Messages with their numbers, a few hundred under way at any time; the broker dies amid them."""
    offsets: dict[int, int] = {}
    under_way = asyncio.Semaphore(500)
    async with client.producer(TOPIC, name="p", linger_ms=1, max_batch_messages=50, timeout=60) as producer:

        async def send(number: int) -> None:
            try:
                offsets[number] = await producer.send(b"%d" % number)
            finally:
                under_way.release()

        kills: list[asyncio.Task[None]] = []
        sends = []
        for number in range(MESSAGES):
            await under_way.acquire()
            sends.append(asyncio.create_task(send(number)))
            if number in KILLS:
                kills.append(asyncio.create_task(kill_and_start(broker)))
        await asyncio.gather(*sends, *kills)
    return [offsets[number] for number in range(MESSAGES)]


async def consume(client: Client) -> list[Message]:
    seen: list[Message] = []
    async with client.consumer(TOPIC, subscription="s", type="exclusive", name="c") as consumer:
        async for message in consumer:
            seen.append(message)
            await consumer.ack(message)
            if len(seen) >= MESSAGES and message.offset == MESSAGES - 1:
                break
        await consumer.flush(timeout=PATIENCE_S)
    return seen


async def test_a_killed_broker_loses_and_doubles_nothing(tmp_path: Path) -> None:
    with Standalone(tmp_path) as broker:
        async with Client(broker.url, timeout=60) as client:
            async with client.producer(TOPIC):
                pass  # the topic is there for the consumer
            async with asyncio.timeout(150):
                offsets, seen = await asyncio.gather(produce(client, broker), consume(client))

            # Every message was stored once, in the order in which it was sent, where its sender was told.
            async with client.reader(TOPIC, end="latest") as reader:
                stored = [(message.offset, message.payload) async for message in reader]
            assert stored == [(n, b"%d" % n) for n in range(MESSAGES)]
            assert offsets == list(range(MESSAGES))

            # The consumer acked each message when it saw it, and saw none again.
            assert [message.offset for message in seen] == list(range(MESSAGES))
            async with client.consumer(TOPIC, subscription="s", type="exclusive", name="c") as consumer:
                assert await consumer.receive_batch(timeout=0.5) is None


async def test_a_broker_that_stops_and_starts_is_only_a_pause(tmp_path: Path) -> None:
    with Standalone(tmp_path) as broker:
        async with Client(broker.url, timeout=60) as client, client.producer(TOPIC, timeout=60) as producer:
            await producer.send_many([b"%d" % n for n in range(100)])
            async with (
                client.consumer(TOPIC, subscription="s") as consumer,
                client.reader(TOPIC) as reader,
            ):
                first = [await anext(reader) for _ in range(100)]
                received = [await anext(consumer) for _ in range(100)]
                await consumer.ack_many(received)
                await consumer.flush()
                await asyncio.to_thread(broker.stop)
                sending = asyncio.create_task(producer.send_many([b"%d" % n for n in range(100, 200)]))
                broker.start()
                await sending
                rest = [await anext(reader) for _ in range(100)]
                received += [await anext(consumer) for _ in range(100)]
    assert [int(message.payload) for message in first + rest] == list(range(200))
    assert [message.offset for message in received] == list(range(200))
