"""The four subscription types, on reliable and non-reliable topics."""

from __future__ import annotations

import asyncio
from typing import Any

from common import main, producer, receiver
from danube import DanubeClient, SubType
from grpc.aio import AioRpcError


async def fan_out(client: DanubeClient, topic: str, reliable: bool) -> Any:
    """Three exclusive subscriptions; a fourth that comes later sees only what is sent later."""
    sender = await producer(client, topic, reliable=reliable)
    receivers = [await receiver(client, topic, f"c{n}", f"s{n}") for n in range(3)]
    for number in range(10):
        await sender.send(str(number).encode())
    received = [await each.texts(10) for each in receivers]
    late = await receiver(client, topic, "c3", "s3")
    await sender.send(b"late")
    received += [await late.texts(1)]
    return received


async def shared(client: DanubeClient, topic: str, reliable: bool, partitions: int = 0) -> Any:
    """Three consumers share; each gets some, nobody the same."""
    sender = await producer(client, topic, reliable=reliable, partitions=partitions)
    receivers = [await receiver(client, topic, f"c{n}", "s", SubType.SHARED) for n in range(3)]
    received: list[list[str]] = [[], [], []]
    done = asyncio.Event()

    async def receive(index: int) -> None:
        while True:
            message = await receivers[index].next(timeout=60)
            received[index].append(message.payload.decode())
            if sum(map(len, received)) == 300:
                done.set()

    tasks = [asyncio.create_task(receive(index)) for index in range(3)]
    for number in range(300):
        await sender.send(str(number).encode())
    await asyncio.wait_for(done.wait(), 20)
    for task in tasks:
        task.cancel()
    return received


async def failover(client: DanubeClient, topic: str, reliable: bool) -> Any:
    """The first consumer gets everything until it goes; then the second does, at once."""
    sender = await producer(client, topic, reliable=reliable)
    first = await receiver(client, topic, "first", "s", SubType.FAILOVER)
    await sender.send(b"for the first")
    received = [await first.texts(1)]
    second = await receiver(client, topic, "second", "s", SubType.FAILOVER)
    await sender.send(b"still for the first")
    received.append(await first.texts(1))
    silent = await second.is_silent(0.3)
    await first.close()
    if not reliable:
        await asyncio.sleep(0.5)
    await sender.send(b"for the second")
    received.append(await second.texts(1))
    return {"received": received, "second_was_silent": silent}


async def key_shared(client: DanubeClient, topic: str, reliable: bool, partitions: int = 0) -> Any:
    """Two consumers; every key has one of them, and its order."""
    sender = await producer(client, topic, reliable=reliable, partitions=partitions)
    receivers = [await receiver(client, topic, f"c{n}", "s", SubType.KEY_SHARED) for n in range(2)]
    if not reliable:
        await asyncio.sleep(0.3)
    received: list[list[tuple[str, int]]] = [[], []]
    done = asyncio.Event()

    async def receive(index: int) -> None:
        while True:
            message = await receivers[index].next(timeout=60)
            received[index].append((message.routing_key, int(message.payload)))
            if sum(map(len, received)) == 200:
                done.set()

    tasks = [asyncio.create_task(receive(index)) for index in range(2)]
    for number in range(200):
        await sender.send_with_key(str(number).encode(), None, f"key-{number % 20}")
    await asyncio.wait_for(done.wait(), 20)
    for task in tasks:
        task.cancel()
    return received


async def key_filters(client: DanubeClient, topic: str, reliable: bool) -> Any:
    """Globs choose keys; what nobody takes is passed over."""
    sender = await producer(client, topic, reliable=reliable)
    europe = await receiver(client, topic, "eu", "s", SubType.KEY_SHARED, ("eu-*", "uk-?"))
    america = await receiver(client, topic, "us", "s", SubType.KEY_SHARED, ("us-*",))
    if not reliable:
        await asyncio.sleep(0.3)
    for key in ("eu-west", "us-east", "asia", "uk-1", "uk-12", "us-1", "eu-"):
        await sender.send_with_key(key.encode(), None, key)
    return {"eu": await europe.texts(3), "us": await america.texts(2)}


async def exclusive_is_exclusive(client: DanubeClient, topic: str) -> Any:
    """A second name is refused while the first has its stream, and let in afterwards."""
    await producer(client, topic)
    first = await receiver(client, topic, "first", "s")
    await asyncio.sleep(0.3)
    try:
        await receiver(client, topic, "second", "s")
    except AioRpcError as error:
        refused = error.code().name
    else:
        refused = "let in"
    await first.close()
    second = await receiver(client, topic, "second", "s")
    sender = await producer(client, topic)
    await sender.send(b"hello")
    return {"refused": refused, "received": await second.texts(1)}


if __name__ == "__main__":
    main(fan_out, shared, failover, key_shared, key_filters, exclusive_is_exclusive)
