"""Redis Streams through redis-py: pipelined XADD; XREADGROUP, and the XACK of what it brought in the next
round trip."""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import cycle
from typing import Any

import redis.asyncio
import uvloop

from bench.workers import BATCH, payloads, serve

PIPELINES = 2
"""Under way at the same time, so that the client encodes one while the server works on another."""
GROUP = "consumers"


class Jobs:
    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._batches = payloads()

    async def publish(self, topic: str, seconds: float) -> dict[str, Any]:
        batches = cycle(self._batches)
        began = time.perf_counter()

        async def publisher() -> int:
            count = 0
            while time.perf_counter() - began < seconds:
                pipeline = self._client.pipeline(transaction=False)
                for payload in next(batches):
                    pipeline.xadd(topic, {"payload": payload})
                count += len(await pipeline.execute())
            return count

        count = sum(await asyncio.gather(*(publisher() for _ in range(PIPELINES))))
        taken = time.perf_counter() - began
        assert await self._client.xlen(topic) == count
        return {"count": count, "seconds": taken}

    async def consume(self, topic: str) -> dict[str, Any]:
        """Everything in the stream, each message acknowledged."""
        received = 0
        began = time.perf_counter()
        await self._client.xgroup_create(topic, GROUP, id="0")
        done: list[bytes] = []
        while True:
            pipeline = self._client.pipeline(transaction=False)
            if done:
                pipeline.xack(topic, GROUP, *done)
            pipeline.xreadgroup(GROUP, "consumer", {topic: ">"}, count=BATCH)
            found = (await pipeline.execute())[-1]
            if not found:
                break
            done = [identity for identity, _ in _entries(found)]
            received += len(done)
        taken = time.perf_counter() - began
        assert (await self._client.xpending(topic, GROUP))["pending"] == 0
        return {"count": received, "seconds": taken}

    async def remove(self, topic: str) -> dict[str, Any]:
        await self._client.unlink(topic)
        return {}


def _entries(found: Any) -> Any:
    """redis-py answers in the form of the protocol's version: a map, or a list of pairs."""
    if isinstance(found, dict):
        (entries,) = found.values()
        return entries[0] if entries and isinstance(entries[0], list) else entries
    return found[0][1]


async def main(address: str) -> None:
    host, port = address.split(":")
    async with redis.asyncio.Redis(host=host, port=int(port)) as client:
        await client.ping()
        await serve(Jobs(client))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
