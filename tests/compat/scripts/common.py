"""What the programs share. They know ``danube`` and nothing of Sava."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from danube import (
    Consumer,
    DanubeClient,
    DanubeClientBuilder,
    DispatchStrategy,
    Producer,
    SubType,
)

RECEIVE_TIMEOUT_S = 20.0

Scenario = Callable[..., Awaitable[Any]]


def main(*scenarios: Scenario) -> None:
    """``script.py scenario url {"argument": …}``"""
    by_name = {scenario.__name__: scenario for scenario in scenarios}
    name, url, arguments = sys.argv[1:4]
    asyncio.run(_run(by_name[name], url, json.loads(arguments)))


async def _run(scenario: Scenario, url: str, arguments: dict[str, Any]) -> None:
    client = await DanubeClientBuilder().service_url(url).build()
    say(await scenario(client, **arguments))


def say(value: Any) -> None:
    print(json.dumps(value), flush=True)


async def orders() -> asyncio.StreamReader:
    """Standard input, line by line."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def producer(
    client: DanubeClient, topic: str, name: str = "producer", *, reliable: bool = True, partitions: int = 0
) -> Producer:
    builder = client.new_producer().with_topic(topic).with_name(name)
    if reliable:
        builder = builder.with_dispatch_strategy(DispatchStrategy.RELIABLE)
    if partitions:
        builder = builder.with_partitions(partitions)
    made = builder.build()
    await made.create()
    return made


class Receiver:
    """A consumer and its queue."""

    def __init__(self, consumer: Consumer, queue: asyncio.Queue[Any]) -> None:
        self.consumer = consumer
        self.queue = queue

    async def next(self, *, ack: bool = True, timeout: float = RECEIVE_TIMEOUT_S) -> Any:
        message = await asyncio.wait_for(self.queue.get(), timeout)
        if ack:
            await self.consumer.ack(message)
        return message

    async def texts(self, count: int) -> list[str]:
        return [(await self.next()).payload.decode() for _ in range(count)]

    async def is_silent(self, seconds: float = 0.5) -> bool:
        try:
            await asyncio.wait_for(self.queue.get(), seconds)
        except TimeoutError:
            return True
        return False

    async def close(self) -> None:
        await self.consumer.close()


async def receiver(
    client: DanubeClient,
    topic: str,
    name: str = "consumer",
    subscription: str = "subscription",
    kind: SubType = SubType.EXCLUSIVE,
    filters: tuple[str, ...] = (),
) -> Receiver:
    builder = (
        client.new_consumer()
        .with_topic(topic)
        .with_consumer_name(name)
        .with_subscription(subscription)
        .with_subscription_type(kind)
    )
    if filters:
        builder = builder.with_key_filters(list(filters))
    consumer = builder.build()
    await consumer.subscribe()
    return Receiver(consumer, await consumer.receive())
