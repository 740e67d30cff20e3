"""Sava through the published danube-client: one message in a call, to a reliable topic."""

from __future__ import annotations

import sys
from typing import Any

import uvloop
from danube import DanubeClientBuilder, DispatchStrategy  # type: ignore[import-untyped]  # it has none

from bench.samples import closed_loop
from bench.workers import payloads, serve


class Jobs:
    def __init__(self, client: Any) -> None:
        self._client = client
        self._payload = payloads()[0][0]

    async def publish(self, topic: str, in_flight: int, seconds: float) -> dict[str, Any]:
        builder = self._client.new_producer().with_topic(topic).with_name("bench")
        producer = builder.with_dispatch_strategy(DispatchStrategy.RELIABLE).build()
        await producer.create()
        try:
            await producer.send(self._payload)
            sample = await closed_loop(
                lambda _: producer.send(self._payload), in_flight=in_flight, seconds=seconds
            )
        finally:
            await producer.close()
        return {"count": sample.count, "seconds": sample.seconds, "latencies": sample.latencies}


async def main(address: str) -> None:
    client = await DanubeClientBuilder().service_url(f"http://{address}").build()
    await serve(Jobs(client))


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
