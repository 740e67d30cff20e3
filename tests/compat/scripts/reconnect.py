"""Programs that run while the test does something to their broker or to each other."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import grpc.aio
from common import main, orders, producer, receiver, say
from danube import DanubeClient, ProducerOptions, SubType
from danube.proto import DanubeApi_pb2_grpc
from grpc.aio import AioRpcError


async def produce(client: DanubeClient, topic: str, partitions: int = 0) -> Any:
    """Send numbers, four at a time, until told to stop; returns those that the broker has answered."""
    sender = await producer(client, topic, partitions=partitions)
    sender._options = ProducerOptions(max_retries=40, base_backoff_ms=100, max_backoff_ms=300)
    stopping = asyncio.create_task((await orders()).readline())
    answered: list[int] = []
    numbers = iter(range(1_000_000))

    async def send() -> None:
        while not stopping.done():
            number = next(numbers)
            await sender.send(str(number).encode())
            answered.append(number)
            if len(answered) == 100:
                say("under way")

    await asyncio.gather(*(send() for _ in range(4)))
    return sorted(answered)


async def consume(
    client: DanubeClient, topic: str, name: str = "consumer", kind: int = 0, ack: bool = True
) -> Any:
    """Say every message."""
    await producer(client, topic)
    taker = await receiver(client, topic, name, kind=SubType(kind))
    say("subscribed")
    while True:
        message = await taker.next(ack=False, timeout=120)
        if ack:
            try:
                await taker.consumer.ack(message)
            except AioRpcError as error:
                say(f"ack failed: {error!r:.80}")
                continue
        say(message.payload.decode())


async def without_health(client: DanubeClient, topic: str) -> Any:
    """A consumer whose health loop has died, as it does at the first error."""
    await producer(client, topic)
    taker = await receiver(client, topic)
    for partition in taker.consumer._consumers.values():
        assert partition._health_task is not None
        partition._health_task.cancel()
    say("subscribed")
    while True:
        say((await taker.next(timeout=120)).payload.decode())


async def impatient(client: DanubeClient, topic: str) -> Any:
    """Counts how often the client opens its stream; an id that nobody has is put in place of its own."""
    await producer(client, topic)
    taker = await receiver(client, topic)
    opened = 0

    for partition in taker.consumer._consumers.values():
        partition._health_task.cancel()  # type: ignore[union-attr]
        partition.consumer_id = 4711
        original = partition.receive

        async def counted(original: Any = original) -> Any:
            nonlocal opened
            opened += 1
            return await original()

        partition.receive = counted  # type: ignore[method-assign]
        for task in taker.consumer._tasks:
            task.cancel()
        taker.consumer._tasks.clear()
    await taker.consumer.receive()
    await asyncio.sleep(3.0)
    return opened


async def with_keepalive(client: DanubeClient, topic: str) -> Any:
    """A consumer whose connections have the keepalive of docs/danube.md: how its stream ends."""
    keepalive = [
        ("grpc.keepalive_time_ms", 1_000),
        ("grpc.keepalive_timeout_ms", 1_000),
        ("grpc.http2.ping_timeout_ms", 1_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    grpc.aio.insecure_channel = functools.partial(grpc.aio.insecure_channel, options=keepalive)  # type: ignore[assignment]
    consumer = (
        client.new_consumer()
        .with_topic(topic)
        .with_consumer_name("consumer")
        .with_subscription("subscription")
        .with_subscription_type(SubType.EXCLUSIVE)
        .build()
    )
    await consumer.subscribe()
    (partition,) = consumer._consumers.values()
    # The broker has named its own address; the test stands between the client and the one that it was given.
    line = await client.connection_manager.get_connection(client.uri, client.uri)
    partition._stub = DanubeApi_pb2_grpc.ConsumerServiceStub(line.channel)
    stream = await partition.receive()
    say("subscribed")
    try:
        async for _ in stream:
            pass
    except AioRpcError as error:
        return error.code().name
    return "ended"


if __name__ == "__main__":
    main(produce, consume, without_health, impatient, with_keepalive)
