"""NATS JetStream through nats-py: a stream in files, asynchronous publishing, a pull consumer with explicit
acks."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from itertools import chain, cycle
from typing import Any

import nats
import nats.errors
import uvloop
from nats.js.api import AckPolicy, ConsumerConfig, StorageType

from bench.workers import BATCH, payloads, serve

WINDOW = 4_000
"""Publishes without an acknowledgement: nats-py's default."""


class Jobs:
    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._jetstream = connection.jetstream(publish_async_max_pending=WINDOW)
        self._batches = payloads()

    async def publish(self, topic: str, seconds: float) -> dict[str, Any]:
        jetstream = self._jetstream
        await jetstream.add_stream(name=topic, subjects=[topic], storage=StorageType.FILE)
        acknowledgements = []
        began = time.perf_counter()
        for payload in chain.from_iterable(cycle(self._batches)):
            acknowledgements.append(await jetstream.publish_async(topic, payload))
            if not len(acknowledgements) % BATCH and time.perf_counter() - began > seconds:
                break
        last = max(ack.seq for ack in await asyncio.gather(*acknowledgements))
        taken = time.perf_counter() - began
        assert last == len(acknowledgements), (last, len(acknowledgements))
        return {"count": last, "seconds": taken}

    async def consume(self, topic: str) -> dict[str, Any]:
        """Everything in the stream, each message acknowledged."""
        count = (await self._jetstream.stream_info(topic)).state.messages
        received = 0
        began = time.perf_counter()
        config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, max_ack_pending=10 * BATCH)
        consumer = await self._jetstream.pull_subscribe(topic, durable="consumer", config=config)
        while received < count:
            messages = await consumer.fetch(min(BATCH, count - received), timeout=10)
            for message in messages:
                await message.ack()
            received += len(messages)
        await self._connection.flush()
        taken = time.perf_counter() - began
        await consumer.unsubscribe()
        return {"count": received, "seconds": taken}

    async def remove(self, topic: str) -> dict[str, Any]:
        await self._jetstream.delete_stream(topic)
        return {}


async def main(address: str) -> None:
    connection = await nats.connect(f"nats://{address}", max_reconnect_attempts=0)
    try:
        await serve(Jobs(connection))
    finally:
        with contextlib.suppress(nats.errors.Error):
            await connection.close()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
