"""A topic's log as a list, and what the stories about subscriptions share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import msgspec

from sava.records import Message, RecordBatch
from sava.storage.errors import OffsetOutOfRange
from sava.topics.consumer import ConsumerHandle, Delivery
from sava.topics.names import TopicName
from sava.topics.ranges import Range
from sava.topics.specs import (
    CursorRecord,
    FailurePolicy,
    RedeliveryBackoff,
    SubscriptionSpec,
    SubscriptionType,
)
from sava.topics.subscription import Hooks, Subscription
from tests.support.waiting import PATIENCE_S

TOPIC = TopicName("default", "orders")
IMPATIENT = FailurePolicy(
    ack_timeout_ms=60_000,
    base_redelivery_delay_ms=0,
    max_redelivery_delay_ms=0,
    backoff=RedeliveryBackoff.FIXED,
)
"""What was nacked comes back at once."""


class MemoryLog:
    """As a TopicLog, without its storage."""

    def __init__(self) -> None:
        self.start_offset = 0
        self.next_offset = 0
        self.failure: Exception | None = None
        self.reads = 0
        self._batches: list[RecordBatch] = []
        self._advanced = asyncio.Event()

    def append(self, batch: RecordBatch) -> None:
        self._batches.append(batch.assigned(topic_id=1, epoch=1, base_offset=self.next_offset))
        self.next_offset += len(batch)
        self._advanced.set()
        self._advanced.clear()

    def publish(self, count: int, *, keys: Sequence[str | None] | None = None) -> None:
        """One batch of messages whose payload is their offset."""
        first = self.next_offset
        payloads = [b"%d" % offset for offset in range(first, first + count)]
        self.append(RecordBatch.encode(payloads, publish_time=1, keys=keys))

    def publish_each(self, count: int) -> None:
        for _ in range(count):
            self.publish(1)

    def remove_below(self, offset: int) -> None:
        """Retention."""
        self.start_offset = offset

    async def read(
        self, start: int, end: int | None = None, *, max_bytes: int | None = None
    ) -> AsyncGenerator[RecordBatch, None]:
        self.reads += 1
        if self.failure is not None:
            raise self.failure
        if not self.start_offset <= start <= self.next_offset:
            raise OffsetOutOfRange(start, self.start_offset, self.next_offset)
        stop = self.next_offset if end is None else min(end, self.next_offset)
        low, high = 0, len(self._batches)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._batches[middle].next_offset <= start else (low, middle)
        while low < len(self._batches) and self._batches[low].base_offset < stop:
            batch = self._batches[low]
            yield batch.slice(start, stop)
            low += 1

    async def wait_beyond(self, offset: int) -> None:
        while self.next_offset <= offset:
            await self._advanced.wait()


class Letters:
    """A dead-letter topic that can be told to fail."""

    def __init__(self) -> None:
        self.received: list[Message] = []
        self.targets: list[str] = []
        self.failures: list[Exception] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, target: str, messages: list[Message]) -> None:
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.targets.append(target)
        self.received += messages


def spec_of(
    type: SubscriptionType = SubscriptionType.EXCLUSIVE,  # noqa: A002
    policy: FailurePolicy = IMPATIENT,
    *,
    window: int = 65_536,
    **changes: object,
) -> SubscriptionSpec:
    policy = msgspec.structs.replace(policy, **changes)
    return SubscriptionSpec(type=type, failure_policy=policy, max_unacked_messages=window)


def subscription_on(
    log: MemoryLog,
    spec: SubscriptionSpec,
    *,
    cursor: CursorRecord | None = None,
    letters: Letters | None = None,
    rate: Callable[[], int] = lambda: 0,
) -> Subscription:
    hooks = Hooks(dead_letter=letters or Letters(), dispatch_rate=rate)
    subscription = Subscription(TOPIC, "s", spec, cursor or CursorRecord(0), log, hooks)
    subscription.start()
    return subscription


def offsets_of(deliveries: Sequence[Delivery]) -> list[int]:
    """The offsets, after a check that they belong to the messages that came with them."""
    found: list[int] = []
    for delivery in deliveries:
        for offset, message in delivery.messages():
            assert message.payload == b"%d" % offset
            found.append(offset)
    return found


async def get(consumer: ConsumerHandle, count: int) -> list[int]:
    """Exactly so many offsets."""
    found: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(found) < count:
            found += offsets_of(await consumer.receive(count - len(found)))
    assert len(found) == count
    return found


async def turns(count: int = 10) -> None:
    """Let everybody run who has something to do."""
    for _ in range(count):
        await asyncio.sleep(0)


async def gets_nothing(consumer: ConsumerHandle) -> bool:
    receiving = asyncio.ensure_future(consumer.receive())
    await turns()
    is_waiting = not receiving.done()
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    return is_waiting


def one(offset: int) -> list[Range]:
    return [(offset, offset + 1)]
