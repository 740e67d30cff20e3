"""Sava through the published danube-client: one message in a call, to a reliable topic."""

from __future__ import annotations

import sys
from typing import Any

import uvloop
from danube import DanubeClientBuilder, DispatchStrategy

from bench.samples import closed_loop
from bench.workers import Pace, payloads, serve


class Jobs:
    def __init__(self, client: Any) -> None:
        self._client = client
        self._payload = payloads()[0][0]
        self._pace = Pace()
        self._paced: Any = None

    async def _producer(self, topic: str, strategy: Any) -> Any:
        builder = self._client.new_producer().with_topic(topic).with_name("bench")
        producer = builder.with_dispatch_strategy(strategy).build()
        await producer.create()
        return producer

    async def publish(self, topic: str, in_flight: int, seconds: float) -> dict[str, Any]:
        producer = await self._producer(topic, DispatchStrategy.RELIABLE)
        try:
            await producer.send(self._payload)
            sample = await closed_loop(
                lambda _: producer.send(self._payload), in_flight=in_flight, seconds=seconds
            )
        finally:
            await producer.close()
        return {"count": sample.count, "seconds": sample.seconds, "latencies": sample.latencies}

    async def begin_pace(self, topic: str, reliable: bool, per_second: int) -> dict[str, Any]:
        """So many messages a second, a call for each, until ``end_pace``."""
        strategy = DispatchStrategy.RELIABLE if reliable else DispatchStrategy.NON_RELIABLE
        self._paced = producer = await self._producer(topic, strategy)
        await producer.send(self._payload)
        self._pace.begin(lambda _: producer.send(self._payload), per_second)
        return {}

    async def end_pace(self) -> dict[str, Any]:
        done = await self._pace.end()
        await self._paced.close()
        return done


async def main(address: str) -> None:
    client = await DanubeClientBuilder().service_url(f"http://{address}").build()
    await serve(Jobs(client))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
