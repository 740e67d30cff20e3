"""One message at a time to each of several topics, for as long as the parent wants, and what became of each:
``python -m bench.workers.steady SYSTEM ADDRESSES``, where SYSTEM is a name of ``SENDERS``.

Each topic has a producer of its own, which sends the next message when the last is acknowledged. A message
whose sending failed is given up: whether it was stored is unknown, and the next one follows after
``PAUSE_S``. The times of acknowledgements are of CLOCK_MONOTONIC, which all processes of a machine share, so
the parent can compare them with the time of its fault. At the end everything is read back: an acknowledged
message that is not there is lost.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any, Final

import uvloop

from bench.workers import serve
from sava.client import Client, Producer

PAUSE_S: Final = 0.01
READ_S: Final = 60.0


class Sender(ABC):
    """A client of one system."""

    @abstractmethod
    async def open(self, topics: list[str]) -> None:
        """Make a producer for each topic, which exists unless producers create it."""

    @abstractmethod
    async def send(self, topic: str, payload: bytes) -> None:
        """Returns when the message is acknowledged."""

    @abstractmethod
    async def read(self, topic: str) -> list[bytes]:
        """Everything that is in the topic."""

    @abstractmethod
    async def close(self) -> None: ...


class SavaSender(Sender):
    """Every option at its default."""

    def __init__(self, addresses: str) -> None:
        self._client = Client(addresses)
        self._producers: dict[str, Producer] = {}

    async def open(self, topics: list[str]) -> None:
        for topic in topics:
            self._producers[topic] = self._client.producer(topic)
            await self._producers[topic].open()

    async def send(self, topic: str, payload: bytes) -> None:
        await self._producers[topic].send(payload)

    async def read(self, topic: str) -> list[bytes]:
        async with self._client.reader(topic, start="earliest", end="latest") as reader:
            return [payload async for batch in reader.batches() for payload in batch.payloads()]

    async def close(self) -> None:
        await self._client.close()


SENDERS: Final[dict[str, type[Any]]] = {"sava": SavaSender}


class Jobs:
    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._times: dict[str, list[float]] = {}
        self._acked: dict[str, list[int]] = {}
        self._failures: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self, topics: list[str]) -> dict[str, Any]:
        await self._sender.open(topics)
        for topic in topics:
            self._times[topic], self._acked[topic] = [], []
            self._tasks.append(asyncio.create_task(self._keep_sending(topic)))
        return {}

    async def _keep_sending(self, topic: str) -> None:
        number = 0
        while True:
            try:
                await self._sender.send(topic, b"%d" % number)
            except Exception as error:  # noqa: BLE001 - each client has errors of its own; all mean: no ack
                self._failures.append(f"{topic} {number}: {type(error).__name__}: {error}")
                await asyncio.sleep(PAUSE_S)
            else:
                self._times[topic].append(time.monotonic())
                self._acked[topic].append(number)
            number += 1

    async def last(self) -> dict[str, Any]:
        """When each topic was last acknowledged a message; 0 before the first."""
        self._check()
        return {topic: times[-1] if times else 0.0 for topic, times in self._times.items()}

    async def acks(self, since: float) -> dict[str, Any]:
        """The times of each topic's acknowledgements, from the last one before ``since`` on."""
        return {
            topic: times[max(0, bisect.bisect_right(times, since) - 1) :]
            for topic, times in self._times.items()
        }

    async def end(self) -> dict[str, Any]:
        """Stop sending, read everything back, and count."""
        self._check()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        counts = {"acked": 0, "lost": 0, "doubled": 0, "failed": len(self._failures)}
        for topic, acked in self._acked.items():
            async with asyncio.timeout(READ_S):
                found = Counter(map(int, await self._sender.read(topic)))
            counts["acked"] += len(acked)
            counts["lost"] += sum(number not in found for number in acked)
            counts["doubled"] += sum(count - 1 for count in found.values())
        return {**counts, "failures": self._failures[:10]}

    def _check(self) -> None:
        """A producer's task that has ended hides its topic: say why instead."""
        for task in self._tasks:
            if task.done():
                task.result()


async def main(system: str, addresses: str) -> None:
    sender: Sender = SENDERS[system](addresses)
    try:
        await serve(Jobs(sender))
    finally:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(5):
                await sender.close()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
