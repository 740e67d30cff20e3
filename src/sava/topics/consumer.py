"""ConsumerHandle: what the handler of a client's stream holds, the same for reliable and other topics.

A subscription puts deliveries into the consumer's queue without waiting; the handler fetches all that is
there. How much can be in the queue is bounded by credits (messages) and by bytes.

Consumers of Danube's protocol come back with nothing but an id: ``ConsumerIds`` says whom it stands for.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import google_crc32c

from sava.errors import SavaError
from sava.metadata.commands import Delete, KeyValue, Operation, Put
from sava.records import Message, RecordBatch
from sava.topics import specs
from sava.topics.dispatch.members import Flight
from sava.topics.errors import ConsumerClosed
from sava.topics.names import TopicName
from sava.topics.ownership import Tenure
from sava.topics.ranges import Range
from sava.topics.specs import ConsumerRecord, SubscriptionType


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
    """The subscription, as its consumers see it. A Protocol: subscriptions of reliable and of other topics
    have nothing else in common."""

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

    def __init__(self, name: str, consumer_id: int, owner: ConsumerOwner, *, principal: str = "") -> None:
        """``principal``: whose consumer it is; empty: of all."""
        self.name = name
        self.principal = principal
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

    def wake(self) -> None:
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


# -- ids by which consumers come back ------------------------------------------------------------------------


FORGET_S: Final = 86_400.0
MAX_PER_SUBSCRIPTION: Final = 1000
STEP: Final = 400
"""Operations in one transaction, below the store's limit."""

_HASH_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class KnownConsumer:
    """Whom an id stands for: enough to subscribe again."""

    consumer_id: int
    topic: TopicName
    subscription: str
    name: str
    type: SubscriptionType
    key_filters: tuple[str, ...] = ()
    owner: str = ""


@dataclass(slots=True)
class _Seen:
    consumer: KnownConsumer
    at: float


def topic_of_consumer(consumer_id: int) -> int:
    return consumer_id >> _HASH_BITS


class ConsumerIds:
    """The ids under which consumers of Danube's protocol come back.

    A client of that protocol subscribes once and gets an id. After a broken stream it comes back with nothing
    but the id, to a broker that may have been restarted in between, and it does not look at errors. So the id
    is computed (topic id, then a hash of subscription and name) and what it stands for is kept in the
    metadata store. Two names with one hash get ids next to each other.

    Records go with their subscription, and when their consumer was not seen for a day. Not sooner: a client
    waits for the broker that it was with, which may be frozen or down for hours, and comes back with its id.
    The Python client asks after its health until the first error; from then on no broker can make it
    subscribe again, and an id that was forgotten meanwhile gets no messages for as long as the client runs.
    How long it was away counts from the start of the topic on this broker at most: while the broker was down
    no consumer could come.

    Says what is to be written, and does not write itself.
    """

    def __init__(
        self, topic: TopicName, topic_id: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._topic = topic
        self._topic_id = topic_id
        self._clock = clock
        self._by_id: dict[int, _Seen] = {}

    def load(self, kv: KeyValue, subscription: str) -> None:
        record = specs.decode(kv, ConsumerRecord)
        self._by_id[record.consumer_id] = _Seen(
            KnownConsumer(
                record.consumer_id,
                self._topic,
                subscription,
                specs.consumer_of_key(kv.key),
                record.type,
                record.key_filters,
                record.owner,
            ),
            self._clock(),
        )

    def get(self, consumer_id: int) -> KnownConsumer | None:
        seen = self._by_id.get(consumer_id)
        return seen.consumer if seen is not None else None

    def id_of(self, subscription: str, name: str) -> int:
        """The id that this name has, or would get."""
        low = int(google_crc32c.value(f"{subscription}\0{name}".encode()))
        while True:
            candidate = self._topic_id << _HASH_BITS | low
            known = self.get(candidate)
            if known is None or (known.subscription, known.name) == (subscription, name):
                return candidate
            low = low + 1 & (1 << _HASH_BITS) - 1

    def remember(self, consumer: KnownConsumer) -> list[Operation]:
        """What makes the store know it; nothing if it does. Those not seen for the longest time make room."""
        older = self._by_id.get(consumer.consumer_id)
        self._by_id[consumer.consumer_id] = _Seen(consumer, self._clock())
        if older is not None and older.consumer == consumer:
            return []
        record = ConsumerRecord(
            consumer_id=consumer.consumer_id,
            type=consumer.type,
            key_filters=consumer.key_filters,
            owner=consumer.owner,
        )
        key = specs.consumer_key(self._topic, consumer.subscription, consumer.name)
        surplus = self._of(consumer.subscription)[:-MAX_PER_SUBSCRIPTION]
        return [Put(key, specs.encode(record)), *self._drop(surplus)]

    def touch(self, subscription: str, name: str) -> None:
        """It is here."""
        seen = self._by_id.get(self.id_of(subscription, name))
        if seen is not None:
            seen.at = self._clock()

    def forget_absent(self, forget_s: float = FORGET_S) -> list[Operation]:
        """Those not seen for ``forget_s`` go; what removes them from the store."""
        before = self._clock() - forget_s
        return self._drop([seen for seen in self._by_id.values() if seen.at <= before])

    def forget(self, consumer_id: int) -> None:
        self._by_id.pop(consumer_id, None)

    def forget_subscription(self, subscription: str) -> None:
        self._drop(self._of(subscription))

    def _of(self, subscription: str) -> list[_Seen]:
        """Oldest first."""
        found = [seen for seen in self._by_id.values() if seen.consumer.subscription == subscription]
        return sorted(found, key=lambda seen: seen.at)

    def _drop(self, gone: list[_Seen]) -> list[Operation]:
        for seen in gone:
            del self._by_id[seen.consumer.consumer_id]
        return [
            Delete(specs.consumer_key(self._topic, seen.consumer.subscription, seen.consumer.name))
            for seen in gone
        ]


class ConsumerRecords:
    """The ids of one topic and their records, which only the topic's owner writes."""

    def __init__(self, tenure: Tenure, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.ids = ConsumerIds(tenure.name, tenure.located.spec.topic_id, clock=clock)
        self._tenure = tenure

    async def remember(self, consumer: KnownConsumer) -> None:
        """Returns when the id will be known after a restart."""
        operations = self.ids.remember(consumer)
        if not operations:
            return
        try:
            await self._tenure.write(operations)
        except BaseException:
            self.ids.forget(consumer.consumer_id)  # not known to be stored: to be written the next time
            raise

    async def forget_absent(self, present: Iterable[tuple[str, str]]) -> None:
        """All but those who are here (subscription and name) and those seen lately."""
        for subscription, name in present:
            self.ids.touch(subscription, name)
        operations = self.ids.forget_absent()
        for start in range(0, len(operations), STEP):
            await self._tenure.write(operations[start : start + STEP])
