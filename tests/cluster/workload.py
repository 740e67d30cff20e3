"""Traffic that knows what it must find again.

Producers number their messages; whatever was acknowledged is remembered with its offset. At the end the topic
is read from its beginning, and everything is compared:

* each acknowledged message is at the offset that was acknowledged, and nowhere else;
* offsets have no hole, and one producer's messages are in the order of its numbers;
* a subscription has got every acknowledged message at least once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from types import TracebackType
from typing import Self

from sava.client import Client


class Workload:
    """``async with Workload(client, topic) as load``: producers and a consumer run until ``finish``."""

    def __init__(
        self,
        client: Client,
        topic: str,
        *,
        producers: int = 2,
        interval_s: float = 0.005,
        subscription: str = "workload",
    ) -> None:
        self._client = client
        self.topic = topic
        self._names = [f"producer-{number}" for number in range(producers)]
        self._interval_s = interval_s
        self._subscription = subscription
        self.acked: dict[int, bytes] = {}
        """Payload by offset."""
        self.received: dict[int, bytes] = {}
        self.redelivered = 0
        self.longest_wait_s = 0.0
        """The longest that one message took to be acknowledged."""
        self._stopping = asyncio.Event()
        self._producing: list[asyncio.Task[None]] = []
        self._consuming: asyncio.Task[None] | None = None
        self._got_one = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._consuming = asyncio.create_task(self._consume())
        self._producing = [asyncio.create_task(self._produce(name)) for name in self._names]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [*self._producing, *([self._consuming] if self._consuming is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def progressed(self, count: int, *, timeout: float = 60.0) -> None:
        """Until so many more messages were acknowledged."""
        goal = len(self.acked) + count
        async with asyncio.timeout(timeout):
            while len(self.acked) < goal:
                self._raise_failures()
                self._got_one.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await self._got_one.wait()

    async def finish(self, *, timeout: float = 60.0) -> None:
        """Stop producing, wait until everything was consumed, and compare."""
        self._stopping.set()
        try:
            async with asyncio.timeout(timeout):
                await asyncio.gather(*self._producing)
                while not self.acked.keys() <= self.received.keys():
                    self._raise_failures()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            missing = sorted(self.acked.keys() - self.received.keys())
            raise AssertionError(
                f"{self.topic}: not over within {timeout:g} s; of {len(self.acked)} acked messages "
                f"{len(missing)} were not consumed ({missing[:5]}…), the last consumed was "
                f"{max(self.received, default=None)}"
            ) from None
        await self._compare(timeout)

    def _raise_failures(self) -> None:
        for task in (*self._producing, self._consuming):
            if task is not None and task.done() and not task.cancelled() and task.exception() is not None:
                task.result()

    async def _produce(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        async with self._client.producer(self.topic, name=name, linger_ms=0, timeout=60) as producer:
            number = 0
            while not self._stopping.is_set():
                payload = f"{name} {number}".encode()
                began = loop.time()
                offset = await producer.send(payload)
                assert offset is not None
                self.longest_wait_s = max(self.longest_wait_s, loop.time() - began)
                assert offset not in self.acked, f"offset {offset} was given out twice"
                self.acked[offset] = payload
                self._got_one.set()
                number += 1
                await asyncio.sleep(self._interval_s)

    async def _consume(self) -> None:
        async with self._client.consumer(self.topic, subscription=self._subscription) as consumer:
            async for message in consumer:
                assert message.offset is not None
                if message.offset in self.received:
                    self.redelivered += 1
                    assert self.received[message.offset] == message.payload
                self.received[message.offset] = message.payload
                await consumer.ack(message)

    async def _compare(self, timeout: float) -> None:
        found: dict[int, bytes] = {}
        async with asyncio.timeout(timeout):
            async with self._client.reader(self.topic, end="latest") as reader:
                async for message in reader:
                    assert message.offset is not None
                    assert message.offset not in found
                    found[message.offset] = message.payload
        assert sorted(found) == list(range(len(found))), "offsets have a hole"
        for offset, payload in self.acked.items():
            assert found.get(offset) == payload, f"{offset}: {found.get(offset)!r} instead of {payload!r}"
        numbers: dict[str, list[int]] = defaultdict(list)
        for _, payload in sorted(found.items()):
            name, number = payload.decode().rsplit(" ", 1)
            numbers[name].append(int(number))
        for name, sequence in numbers.items():
            assert sequence == list(range(len(sequence))), f"{name}: out of order or twice"
        for offset, payload in self.received.items():
            assert found[offset] == payload, f"{offset} was delivered with another payload"
