"""A producer and a consumer of the published Danube client, which knows nothing of Sava; it shares no process
with Sava's code, since both define the same Protobuf names.

python -m tests.torture.danube_program DIRECTORY TOPIC URL [CA CERT KEY]

It runs until it reads a line from its standard input, and then until its consumer has received everything
that was acknowledged.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from danube import DanubeClient, DanubeClientBuilder, DispatchStrategy, ProducerOptions, SubType

from tests.torture.history import Acked, Received, Recorder, Unsent, parse, payload

NAME = "danube"
PAUSE_S = 0.05
SETTLE_S = 90.0


class Program:
    def __init__(self, recorder: Recorder, topic: str) -> None:
        self._recorder = recorder
        self._topic = topic
        self._acked: set[int] = set()
        self._received: set[int] = set()
        self._is_stopping = False

    async def run(self, url: str, files: list[str]) -> bool:
        builder = DanubeClientBuilder().service_url(url)
        if files:
            builder = builder.with_mtls(*files)
        client = await builder.build()
        producing = asyncio.create_task(self._produce(client))
        consuming = asyncio.create_task(self._consume(client))
        await asyncio.to_thread(sys.stdin.readline)
        self._is_stopping = True
        await producing
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and not consuming.done():
            if self._acked <= self._received:
                break
            await asyncio.sleep(0.2)
        missing = sorted(self._acked - self._received)
        print(f"{len(self._acked)} acknowledged, {len(missing)} not received: {missing[:5]}", flush=True)
        if consuming.done():
            consuming.result()
        return not missing

    async def _produce(self, client: DanubeClient) -> None:
        builder = client.new_producer().with_topic(self._topic).with_name(NAME)
        producer = builder.with_dispatch_strategy(DispatchStrategy.RELIABLE).build()
        producer._options = ProducerOptions(max_retries=200, base_backoff_ms=100, max_backoff_ms=500)
        await self._again(producer.create)
        number = 0
        while not self._is_stopping:
            self._recorder.add(Unsent(time.monotonic(), self._topic, NAME, number, True, "under way"))
            try:
                await producer.send(payload(NAME, number))
            except Exception as error:  # noqa: BLE001 (whatever the client raises, the outcome is unknown)
                why = f"{type(error).__name__}: {error}"
                self._recorder.add(Unsent(time.monotonic(), self._topic, NAME, number, True, why))
                await asyncio.sleep(0.5)
            else:
                self._recorder.add(Acked(time.monotonic(), self._topic, NAME, number, -1))
                self._acked.add(number)
            number += 1
            await asyncio.sleep(PAUSE_S)

    async def _consume(self, client: DanubeClient) -> None:
        builder = client.new_consumer().with_topic(self._topic).with_consumer_name("danube-consumer")
        consumer = builder.with_subscription("danube").with_subscription_type(SubType.EXCLUSIVE).build()
        await self._again(consumer.subscribe)
        queue = await consumer.receive()
        while True:
            message = await queue.get()
            producer, number = parse(message.payload)
            offset = int(message.msg_id.topic_offset)
            self._recorder.add(
                Received(time.monotonic(), self._topic, "danube", "danube-consumer", offset, producer, number)
            )
            self._received.add(number)
            try:
                await consumer.ack(message)
            except Exception as error:  # noqa: BLE001 (the message comes again)
                print(f"ack of {number}: {error!r:.200}", flush=True)

    @staticmethod
    async def _again(call: Any) -> None:
        """Until it works; the client itself gives up early."""
        while True:
            try:
                await call()
                return
            except Exception as error:  # noqa: BLE001 (tried again)
                print(f"{error!r:.200}", flush=True)
                await asyncio.sleep(0.5)


def main() -> None:
    directory, topic, url, *files = sys.argv[1:]
    recorder = Recorder(Path(directory) / "danube.jsonl")
    is_complete = asyncio.run(Program(recorder, topic).run(url, files))
    recorder.close()
    sys.stdout.flush()
    os._exit(0 if is_complete else 1)


if __name__ == "__main__":
    main()
