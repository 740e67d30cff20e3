"""ConsumerHandle: what the handler of a client's stream holds, the same for reliable and other topics.

A subscription puts deliveries into the consumer's queue without waiting; the handler fetches all that is
there. How much can be in the queue is bounded by credits (messages) and by bytes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from sava.errors import SavaError
from sava.records import Message, RecordBatch
from sava.topics.dispatch.outstanding import Flight
from sava.topics.errors import ConsumerClosed
from sava.topics.ranges import Range


@dataclass(frozen=True, slots=True)
class Delivery:
    """A batch on its way to one consumer.

    ``ranges`` names the offsets of the batch's rows, in order. Of adjacent messages it has one element; a
    key-shared consumer gets the rows of its keys, which have others between them.
    """

    batch: RecordBatch
    ranges: tuple[Range, ...]
    attempt: int = 1
    """1 for the first delivery."""

    def __len__(self) -> int:
        return len(self.batch)

    def offsets(self) -> Iterator[int]:
        for start, end in self.ranges:
            yield from range(start, end)

    def messages(self) -> Iterator[tuple[int, Message]]:
        """Each message with its offset."""
        return zip(self.offsets(), self.batch, strict=True)


class ConsumerOwner(Protocol):
    """The subscription, as its consumers see it."""

    @property
    def name(self) -> str: ...

    def is_active(self, consumer: ConsumerHandle) -> bool: ...

    def limit(self, consumer: ConsumerHandle) -> int | None:
        """How many messages may be fetched now; None for all."""

    def fetched(self, consumer: ConsumerHandle, flight: Flight, count: int) -> None:
        """The handler has fetched ``count`` messages of a delivery."""

    def waits(self, consumer: ConsumerHandle) -> None:
        """It has fetched everything and would take more."""

    def granted(self, consumer: ConsumerHandle, count: int) -> None: ...

    def ack(self, ranges: Sequence[Range]) -> None: ...

    def nack(self, ranges: Sequence[Range], *, delay_ms: int, reason: str) -> None: ...

    def detach(self, consumer: ConsumerHandle) -> None: ...


class ConsumerHandle:
    """Owned by the event loop. One task at a time waits in ``receive``."""

    def __init__(self, name: str, consumer_id: int, owner: ConsumerOwner) -> None:
        self.name = name
        self.consumer_id = consumer_id
        self.subscription = owner.name
        self._owner = owner
        self._queue: deque[tuple[Delivery, Flight]] = deque()
        self._changed = asyncio.Event()
        self._error: SavaError | None = None

    @property
    def is_active(self) -> bool:
        """Whether it is being served: of a failover subscription, one is."""
        return self._error is None and self._owner.is_active(self)

    @property
    def is_closed(self) -> bool:
        return self._error is not None

    async def receive(self, max_messages: int | None = None) -> list[Delivery]:
        """Everything that is queued (up to ``max_messages``), after waiting for something. Raises
        ConsumerReplaced, ConsumerClosed."""
        while True:
            if self._error is not None:
                raise self._error
            found = self._fetch(max_messages)
            if found:
                return found
            self._owner.waits(self)
            self._changed.clear()
            await self._changed.wait()

    def _fetch(self, max_messages: int | None) -> list[Delivery]:
        limits = (max_messages, self._owner.limit(self))
        left = min((limit for limit in limits if limit is not None), default=None)
        found: list[Delivery] = []
        while self._queue and (left is None or left > 0):
            delivery, flight = self._queue.popleft()
            if flight.is_void:
                continue
            if left is not None:
                if len(delivery) > left:
                    delivery, rest = split(delivery, left)
                    self._queue.appendleft((rest, flight))
                left -= len(delivery)
            found.append(delivery)
            self._owner.fetched(self, flight, len(delivery))
        return found

    def grant(self, count: int) -> None:
        """The client takes ``count`` more messages."""
        if count > 0 and self._error is None:
            self._owner.granted(self, count)

    def ack(self, ranges: Sequence[Range]) -> None:
        """Any consumer may ack what any consumer of the subscription was sent. What is not on its way changes
        nothing."""
        self._owner.ack(ranges)

    def nack(self, ranges: Sequence[Range], *, delay_ms: int = 0, reason: str = "") -> None:
        """Deliver again, after the policy's delay or this one, whichever is longer."""
        self._owner.nack(ranges, delay_ms=delay_ms, reason=reason)

    def close(self) -> None:
        """The stream ended: what was on its way goes to others, or waits for the next consumer.
        Idempotent."""
        if self._error is None:
            self.end(ConsumerClosed(f"consumer {self.name} of subscription {self.subscription} is closed"))
            self._owner.detach(self)

    # -- for the subscription ------------------------------------------------------------------

    def put(self, delivery: Delivery, flight: Flight) -> None:
        self._queue.append((delivery, flight))
        self._changed.set()

    def poke(self) -> None:
        """What may be fetched has changed."""
        self._changed.set()

    def end(self, error: SavaError) -> None:
        self._error = self._error or error
        self._queue.clear()
        self._changed.set()


def split(delivery: Delivery, count: int) -> tuple[Delivery, Delivery]:
    """The first ``count`` messages, and the others."""
    head: list[Range] = []
    tail: list[Range] = []
    left = count
    for start, end in delivery.ranges:
        cut = min(end, start + left)
        left -= cut - start
        if start < cut:
            head.append((start, cut))
        if cut < end:
            tail.append((cut, end))
    batch, attempt = delivery.batch, delivery.attempt
    if len(delivery.ranges) == 1 and batch.base_offset == delivery.ranges[0][0]:
        (start, cut), (_, end) = head[0], tail[0]
        return (
            Delivery(batch.slice(start, cut), tuple(head), attempt),
            Delivery(batch.slice(cut, end), tuple(tail), attempt),
        )
    return (
        Delivery(batch.select(range(count)), tuple(head), attempt),
        Delivery(batch.select(range(count, len(batch))), tuple(tail), attempt),
    )


def cut_out(batch: RecordBatch, ranges: tuple[Range, ...], attempt: int = 1) -> Delivery:
    """A delivery of these offsets of an assigned batch: the batch itself if they are all of it."""
    base = batch.base_offset
    if len(ranges) == 1:
        return Delivery(batch.slice(*ranges[0]), ranges, attempt)
    rows = [row for start, end in ranges for row in range(start - base, end - base)]
    return Delivery(batch.select(rows), ranges, attempt)
