"""Sava through sava.client: batches and single messages in, batches and single messages out."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AsyncExitStack
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

import uvloop

from bench.samples import closed_loop
from bench.workers import BATCH, Pace, payloads, serve
from sava.client import Client, Consumer, Producer, Tls

BATCHES_IN_FLIGHT = 16
MESSAGES_IN_FLIGHT = 4_000
"""As many as nats-py has by default. More cost more: the garbage collector walks over all that waits."""
OPENING = 32
"""Topics that are opened at the same time while many are made."""


class Jobs:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._batches = payloads()
        self._held = AsyncExitStack()
        self._consumers: list[Consumer] = []
        self._pace = Pace()
        self._lags: list[float] = []
        self._watching: list[asyncio.Task[None]] = []

    # -- publishing ---------------------------------------------------------------------

    async def publish_many(self, topic: str, seconds: float) -> dict[str, Any]:
        """``send_many`` in batches of 1,000, for so long."""
        batches = cycle(self._batches)

        def for_so_long() -> Iterator[list[bytes]]:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                yield next(batches)

        return await self._send_batches(topic, for_so_long())

    async def fill(self, topic: str, count: int) -> dict[str, Any]:
        """So many messages, by ``send_many``."""
        batches = cycle(self._batches)
        return await self._send_batches(topic, islice(batches, count // BATCH))

    async def _send_batches(self, topic: str, batches: Iterator[list[bytes]]) -> dict[str, Any]:
        async with self._client.producer(topic) as producer:
            began = time.perf_counter()

            async def publisher() -> int:
                count = 0
                for batch in batches:
                    for sent in await producer.send_many(batch):
                        count += sent.count
                return count

            count = sum(await asyncio.gather(*(publisher() for _ in range(BATCHES_IN_FLIGHT))))
            return {"count": count, "seconds": time.perf_counter() - began}

    async def publish_ahead(self, topic: str, seconds: float) -> dict[str, Any]:
        """``send``, the next one before the last has its offset, as NATS is driven."""
        async with self._client.producer(topic) as producer:
            under_way: deque[asyncio.Future[int]] = deque()
            count = 0
            began = time.perf_counter()
            for payload in chain.from_iterable(cycle(self._batches)):
                under_way.append(producer.send(payload))
                count += 1
                if len(under_way) >= MESSAGES_IN_FLIGHT:
                    await under_way.popleft()
                if not count % BATCH and time.perf_counter() - began > seconds:
                    break
            offsets = await asyncio.gather(*under_way)
            assert len(set(offsets)) == len(offsets)
            return {"count": count, "seconds": time.perf_counter() - began}

    async def publish_each(self, topic: str, seconds: float) -> dict[str, Any]:
        """``send`` by many callers that each wait for the offset."""
        async with self._client.producer(topic) as producer:
            began = time.perf_counter()
            end = began + seconds

            async def publisher(payload: bytes) -> int:
                count = 0
                while time.perf_counter() < end:
                    await producer.send(payload)
                    count += 1
                return count

            messages = islice(chain.from_iterable(self._batches), MESSAGES_IN_FLIGHT)
            count = sum(await asyncio.gather(*map(publisher, messages)))
            return {"count": count, "seconds": time.perf_counter() - began}

    async def latency(self, topic: str, seconds: float) -> dict[str, Any]:
        """One message in flight."""
        payload = self._batches[0][0]
        async with self._client.producer(topic) as producer:
            await _warm(producer, payload)
            sample = await closed_loop(lambda _: producer.send(payload), in_flight=1, seconds=seconds)
        return {"count": sample.count, "seconds": sample.seconds, "latencies": sample.latencies}

    # -- in a cluster -------------------------------------------------------------------

    async def begin_pace(self, topic: str, reliable: bool, per_second: int) -> dict[str, Any]:
        """``send`` so many times a second, until ``end_pace``."""
        producer = self._client.producer(topic, reliable=reliable)
        await self._held.enter_async_context(producer)
        payload = self._batches[0][0]
        await _warm(producer, payload)
        self._pace.begin(lambda _: producer.send(payload), per_second)
        return {}

    async def end_pace(self) -> dict[str, Any]:
        done = await self._pace.end()
        await self.leave()
        return done

    async def first_acks(self, prefix: str, count: int) -> dict[str, Any]:
        """Topics that do not exist, one after the other, with one message each."""
        latencies = []
        began = time.perf_counter()
        for number in range(count):
            opened = time.perf_counter()
            async with self._client.producer(f"{prefix}-{number}") as producer:
                await producer.send(self._batches[0][0])
                latencies.append(time.perf_counter() - opened)
        return {"count": count, "seconds": time.perf_counter() - began, "latencies": latencies}

    async def fill_each(self, prefix: str, topics: int, messages: int) -> dict[str, Any]:
        """So many topics with so many messages each."""
        numbers = iter(range(topics))

        async def fill() -> None:
            for number in numbers:
                async with self._client.producer(f"{prefix}-{number}") as producer:
                    await producer.send_many(self._batches[0][:messages])

        await asyncio.gather(*(fill() for _ in range(OPENING)))
        return {}

    # -- replication --------------------------------------------------------------------

    async def paced_batches(self, topic: str, per_second: int, seconds: float) -> dict[str, Any]:
        """``send_many`` of 1,000 messages at a time, so many messages a second, for so long."""
        began = time.perf_counter()
        sent = 0
        async with self._client.producer(topic) as producer:
            for batch in cycle(self._batches):
                if (late := time.perf_counter() - began) >= seconds:
                    break
                await asyncio.sleep(max(0.0, sent / per_second - late))
                await producer.send_many(batch)
                sent += len(batch)
        return {"count": sent, "seconds": time.perf_counter() - began}

    async def pace_each(self, topics: list[str], per_second: int, seconds: float) -> dict[str, Any]:
        """``send`` so many times a second over all topics in turn, for so long."""
        async with AsyncExitStack() as opened:
            producers = [
                await opened.enter_async_context(self._client.producer(topic, linger_ms=1))
                for topic in topics
            ]
            payload, turns = self._batches[0][0], cycle(producers)
            self._pace.begin(lambda _: next(turns).send(payload), per_second)
            await asyncio.sleep(seconds)
            return {"count": len((await self._pace.end())["done"])}

    async def watch_lags(self, topics: list[str]) -> dict[str, Any]:
        """From now on: how old each message is when a reader at the end of these topics has it."""
        self._lags = []
        ready = []
        for topic in topics:
            reader = self._client.reader(topic, start="latest")
            ready.append(await self._held.enter_async_context(reader))
        self._watching = [asyncio.create_task(self._watch(reader)) for reader in ready]
        return {}

    async def _watch(self, reader: Any) -> None:
        while (batches := await reader.next_batches()) is not None:
            now = time.time()
            for batch in batches:
                published = batch.records.to_arrow(("publish_time",)).column(0)
                self._lags += [now - moment / 1e6 for moment in published.cast("int64").to_pylist()]

    async def end_watch(self) -> dict[str, Any]:
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        await self.leave()
        return {"lags": self._lags}

    # -- consuming ----------------------------------------------------------------------

    async def consume_batches(self, topic: str, count: int) -> dict[str, Any]:
        """By ``receive_batch``, payloads in hand, with one ack for each batch, until all acks are stored."""
        received = 0
        began = time.perf_counter()
        async with self._client.consumer(topic, subscription="batches", type="exclusive") as consumer:
            while received < count:
                batch = await consumer.receive_batch()
                assert batch is not None
                received += len(batch.payloads())
                await consumer.ack(batch)
            await consumer.flush()
            taken = time.perf_counter() - began
        return {"count": received, "seconds": taken}

    async def consume_each(self, topic: str, count: int) -> dict[str, Any]:
        """By ``async for``, each message acked; until all acks are stored."""
        received = 0
        began = time.perf_counter()
        async with self._client.consumer(topic, subscription="each", type="exclusive") as consumer:
            async for message in consumer:
                await consumer.ack(message)
                received += 1
                if received == count:
                    break
            await consumer.flush()
            taken = time.perf_counter() - began
        return {"count": received, "seconds": taken}

    # -- many of them ----------------------------------------------------------------------

    async def subscribe(self, topic: str, subscriptions: int) -> dict[str, Any]:
        """One consumer for each of so many subscriptions; they wait for ``drain``."""
        async with self._client.producer(topic):
            pass  # now there is such a topic
        for number in range(subscriptions):
            consumer = self._client.consumer(topic, subscription=f"fan-{number}", type="exclusive")
            self._consumers.append(await self._held.enter_async_context(consumer))
        return {}

    async def drain(self, count: int) -> dict[str, Any]:
        """Until each of the consumers has received and acked so many messages."""
        began = time.perf_counter()

        async def one(consumer: Consumer) -> None:
            received = 0
            while received < count:
                batch = await consumer.receive_batch()
                assert batch is not None
                received += len(batch)
                await consumer.ack(batch)

        await asyncio.gather(*(one(consumer) for consumer in self._consumers))
        seconds = time.perf_counter() - began
        total = count * len(self._consumers)
        await self.leave()
        return {"count": total, "seconds": seconds}

    async def idle(self, topics: int, attached: int) -> dict[str, Any]:
        """So many topics with a durable subscription each, and some with a consumer that stays."""
        numbers = iter(range(topics))

        async def make() -> None:
            for number in numbers:
                topic = f"/default/idle-{number}"
                async with self._client.producer(topic):
                    pass
                consumer = self._client.consumer(topic, subscription="idle", type="exclusive")
                if number < attached:
                    await self._held.enter_async_context(consumer)
                else:
                    async with consumer:
                        pass

        await asyncio.gather(*(make() for _ in range(OPENING)))
        return {}

    async def leave(self) -> dict[str, Any]:
        """Close what was left open."""
        self._consumers.clear()
        await self._held.aclose()
        return {}


async def _warm(producer: Producer, payload: bytes) -> None:
    for _ in range(50):
        await producer.send(payload)


async def main(address: str, ca: str = "", token_file: str = "") -> None:
    """``ca`` and ``token_file``: of a broker that asks for them."""
    secured: dict[str, Any] = {"tls": Tls(ca=ca), "token": Path(token_file)} if ca else {}
    async with Client(address, timeout=30.0, **secured) as client:
        await serve(Jobs(client))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
