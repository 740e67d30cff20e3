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
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
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


class KafkaSender(Sender):
    """librdkafka with ``acks=all``, idempotent, so that it repeats without doubling as Sava's client does."""

    def __init__(self, addresses: str, **tuning: Any) -> None:
        self._servers = {"bootstrap.servers": addresses, "log_level": 0}
        self._tuning = tuning
        self._producers: dict[str, Any] = {}
        self._polling: list[threading.Thread] = []
        self._is_closed = threading.Event()

    async def open(self, topics: list[str]) -> None:
        from confluent_kafka import Producer as KafkaProducer

        for topic in topics:
            options = {**self._servers, "acks": "all", "enable.idempotence": True, **self._tuning}
            self._producers[topic] = KafkaProducer(options)
            thread = threading.Thread(target=self._poll, args=(self._producers[topic],), daemon=True)
            thread.start()
            self._polling.append(thread)

    def _poll(self, producer: Any) -> None:
        while not self._is_closed.is_set():
            producer.poll(0.1)

    async def send(self, topic: str, payload: bytes) -> None:
        loop = asyncio.get_running_loop()
        delivered: asyncio.Future[None] = loop.create_future()

        def report(error: Any) -> None:
            if delivered.done():
                return
            if error is None:
                delivered.set_result(None)
            else:
                delivered.set_exception(RuntimeError(str(error)))

        def on_delivery(error: Any, _: Any) -> None:
            loop.call_soon_threadsafe(report, error)

        self._producers[topic].produce(topic, payload, on_delivery=on_delivery)
        await delivered

    async def read(self, topic: str) -> list[bytes]:
        return await asyncio.to_thread(self._read, topic)

    def _read(self, topic: str) -> list[bytes]:
        from confluent_kafka import Consumer as KafkaConsumer
        from confluent_kafka import TopicPartition

        consumer = KafkaConsumer({**self._servers, "group.id": "bench", "enable.auto.commit": False})
        try:
            _, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=READ_S)
            consumer.assign([TopicPartition(topic, 0, 0)])
            found: list[bytes] = []
            at, deadline = 0, time.monotonic() + READ_S
            while at < end and time.monotonic() < deadline:
                for message in consumer.consume(1000, timeout=1.0):
                    if message.error() is None:
                        found.append(message.value())
                        at = message.offset() + 1
            return found
        finally:
            consumer.close()

    async def close(self) -> None:
        self._is_closed.set()
        for thread in self._polling:
            await asyncio.to_thread(thread.join, 2.0)


KAFKA_TUNED: Final = {
    "request.timeout.ms": 2000,  # 30000 by default
    "socket.timeout.ms": 2000,  # 60000
    "socket.connection.setup.timeout.ms": 1000,  # 30000
    "reconnect.backoff.ms": 50,  # 100
    "reconnect.backoff.max.ms": 250,  # 10000
    "retry.backoff.ms": 50,  # 100
    "topic.metadata.refresh.fast.interval.ms": 50,  # 100
}


class NatsSender(Sender):
    """nats-py, one connection for each producer. A message has an id, by which the stream drops a second copy
    of it; a publish without an answer is tried again only by a tuned client, within ``again_s`` each."""

    def __init__(self, addresses: str, *, again_s: float = 0.0, **options: Any) -> None:
        self._servers = addresses.split(",")
        self._again_s = again_s
        self._options = options
        self._connections: dict[str, Any] = {}
        self._streams: dict[str, Any] = {}

    async def open(self, topics: list[str]) -> None:
        import nats

        for topic in topics:
            connection = await nats.connect(self._servers, error_cb=_ignore, **self._options)
            self._connections[topic] = connection
            self._streams[topic] = connection.jetstream()

    async def send(self, topic: str, payload: bytes) -> None:
        if not self._again_s:
            await self._streams[topic].publish(topic, payload)
            return
        headers = {"Nats-Msg-Id": payload.decode()}
        while True:
            try:
                await self._streams[topic].publish(topic, payload, timeout=self._again_s, headers=headers)
            except Exception:  # noqa: BLE001 - whatever it was: the id makes the next attempt safe
                await asyncio.sleep(PAUSE_S)
            else:
                return

    async def read(self, topic: str) -> list[bytes]:
        from nats.js.api import AckPolicy, ConsumerConfig

        stream = self._streams[topic]
        count = (await stream.stream_info(topic)).state.messages
        config = ConsumerConfig(ack_policy=AckPolicy.NONE, num_replicas=1, mem_storage=True)
        consumer = await stream.pull_subscribe(topic, config=config)
        found: list[bytes] = []
        while len(found) < count:
            messages = await consumer.fetch(min(500, count - len(found)), timeout=10)
            found += [message.data for message in messages]
        return found

    async def close(self) -> None:
        for connection in self._connections.values():
            await connection.close()


async def _ignore(_: Exception) -> None:
    """nats-py tells of broken connections, which are what is measured."""


NATS_TUNED: Final = {
    "again_s": 0.5,  # 5 s by default, and no second attempt
    "reconnect_time_wait": 0.1,  # 2 s
    "max_reconnect_attempts": -1,  # 60
    "connect_timeout": 1,  # 2 s
    "ping_interval": 1,  # 120 s
    "max_outstanding_pings": 2,
}

SENDERS: Final[dict[str, Callable[[str], Sender]]] = {
    "sava": SavaSender,
    "kafka": KafkaSender,
    "kafka-tuned": lambda addresses: KafkaSender(addresses, **KAFKA_TUNED),
    "nats": NatsSender,
    "nats-tuned": lambda addresses: NatsSender(addresses, **NATS_TUNED),
}


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
