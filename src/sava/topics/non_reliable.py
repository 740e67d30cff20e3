"""Non-reliable topics: messages to whoever listens at this moment, and to nobody else.

Nothing is kept and nothing is repeated. Publishing never waits: each consumer has a bounded queue, and what
does not fit is dropped and counted. Offsets only number the messages since the topic was opened here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from sava.errors import SavaError
from sava.records import RecordBatch
from sava.topics.consumer import ConsumerHandle, cut_out
from sava.topics.delivery import Range
from sava.topics.dispatch.in_flight import Flight
from sava.topics.dispatch.keys import HashRing, KeyFilter, effective_keys
from sava.topics.dispatch.member import QUEUE_BYTES, DispatchMember
from sava.topics.errors import ConsumerReplaced, SubscriptionBusy
from sava.topics.names import TopicName
from sava.topics.ranges import runs
from sava.topics.specs import SubscriptionType

QUEUE_MESSAGES: Final = 10_000
"""In the queue of one consumer."""


class FanOut:
    """The subscriptions of one topic. Owned by the event loop."""

    def __init__(self, topic: TopicName, *, topic_id: int = 0, epoch: int = 0) -> None:
        self.topic = topic
        self._topic_id = topic_id
        self._epoch = epoch
        self._next = 0
        self._subscriptions: dict[str, NonReliableSubscription] = {}

    @property
    def next_offset(self) -> int:
        return self._next

    @property
    def subscriptions(self) -> Mapping[str, NonReliableSubscription]:
        return MappingProxyType(self._subscriptions)

    def subscribe(self, name: str, type: SubscriptionType) -> NonReliableSubscription:  # noqa: A002
        """The subscription of this name, new if there is none. Whether the type is the same is for the caller
        to see."""
        if name not in self._subscriptions:
            self._subscriptions[name] = NonReliableSubscription(self.topic, name, type)
        return self._subscriptions[name]

    def remove(self, name: str, error: SavaError) -> None:
        """Its consumers end with the error."""
        subscription = self._subscriptions.pop(name, None)
        if subscription is not None:
            subscription.close(error)

    def publish(self, batch: RecordBatch) -> int:
        """To everybody who listens; the offset of its first message. Never waits."""
        base = self._next
        placed = batch.assigned(topic_id=self._topic_id, epoch=self._epoch, base_offset=base)
        self._next = placed.next_offset
        for subscription in self._subscriptions.values():
            subscription.publish(placed)
        return base

    def close(self, error: SavaError) -> None:
        for name in list(self._subscriptions):
            self.remove(name, error)


@dataclass(slots=True, eq=False)
class _Seat:
    consumer: ConsumerHandle
    member: DispatchMember
    queued: int = 0
    """Messages in the consumer's queue."""

    @property
    def room(self) -> int:
        return QUEUE_MESSAGES - self.queued if self.member.queued_bytes < QUEUE_BYTES else 0


class NonReliableSubscription:
    """Owned by the event loop."""

    def __init__(
        self,
        topic: TopicName,
        name: str,
        type: SubscriptionType,  # noqa: A002
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topic = topic
        self.name = name
        self.type = type
        self.delivered = 0
        self.delivered_bytes = 0
        """Messages put into a queue."""
        self.dropped = 0
        """Messages that no consumer had room for, or that none was there for."""
        self._clock = clock
        self._idle_since: float | None = clock()
        self._seats: dict[str, _Seat] = {}
        self._ring = HashRing()
        self._turn = 0

    @property
    def consumers(self) -> Mapping[str, ConsumerHandle]:
        return MappingProxyType({name: seat.consumer for name, seat in self._seats.items()})

    @property
    def idle_since(self) -> float | None:
        """Since when there is no consumer; None if there is one."""
        return self._idle_since

    def attach(
        self,
        consumer_name: str,
        *,
        consumer_id: int,
        key_filters: Sequence[str] = (),
        credits: int = 0,  # noqa: A002 (the protocol's word)
    ) -> ConsumerHandle:
        """As ``Subscription.attach``; what a replaced consumer had not fetched is gone."""
        replaced = self._seats.get(consumer_name)
        if self.type is SubscriptionType.EXCLUSIVE and self._seats and replaced is None:
            raise SubscriptionBusy(
                f"subscription {self.name} of topic {self.topic} is exclusive, and consumer "
                f"{next(iter(self._seats))} is connected"
            )
        consumer = ConsumerHandle(consumer_name, consumer_id, self)
        self._seats[consumer_name] = _Seat(
            consumer, DispatchMember(consumer_name, KeyFilter(key_filters), credits)
        )
        self._changed()
        if replaced is not None:
            replaced.consumer.end(ConsumerReplaced(f"consumer {consumer_name} has connected again elsewhere"))
        return consumer

    def detach(self, consumer: ConsumerHandle) -> None:
        if self._seat(consumer) is not None:
            del self._seats[consumer.name]
            self._changed()

    def close(self, error: SavaError) -> None:
        for seat in list(self._seats.values()):
            seat.consumer.end(error)
            self.detach(seat.consumer)

    def _changed(self) -> None:
        self._idle_since = None if self._seats else self._clock()
        self._ring.set(seat.member for seat in self._seats.values())

    def _seat(self, consumer: ConsumerHandle) -> _Seat | None:
        seat = self._seats.get(consumer.name)
        return seat if seat is not None and seat.consumer is consumer else None

    # -- publishing ----------------------------------------------------------------------------

    def publish(self, batch: RecordBatch) -> None:
        """An assigned batch to the consumers it is for."""
        seats = list(self._seats.values())
        if not seats:
            self.dropped += len(batch)
        elif self.type is SubscriptionType.KEY_SHARED:
            self._by_key(batch)
        elif self.type is SubscriptionType.SHARED:
            self._in_turn(batch, seats)
        else:
            self._put(seats[0], batch, batch.base_offset, batch.next_offset)

    def _in_turn(self, batch: RecordBatch, seats: list[_Seat]) -> None:
        """A slice for each, beginning with whoever is next; more for those with room if others have none."""
        start, end = batch.base_offset, batch.next_offset
        first = self._turn % len(seats)
        order = [seat for seat in seats[first:] + seats[:first] if seat.room > 0]
        for place, seat in enumerate(order):
            share = -(-(end - start) // (len(order) - place))
            count = min(share, seat.room)
            if count:
                self._put(seat, batch, start, start + count)
                self._turn = seats.index(seat) + 1
            start += count
        self.dropped += end - start

    def _by_key(self, batch: RecordBatch) -> None:
        homes: dict[str, str | None] = {}
        chosen: dict[str | None, list[int]] = {}
        for offset, key in enumerate(effective_keys(batch), batch.base_offset):
            if key not in homes:
                homes[key] = self._ring.home(key)
            chosen.setdefault(homes[key], []).append(offset)
        for name, offsets in chosen.items():
            seat = None if name is None else self._seats[name]
            room = 0 if seat is None else max(0, seat.room)
            self.dropped += max(0, len(offsets) - room)
            if seat is not None and room:
                self._queue(seat, batch, runs(offsets[:room]))

    def _put(self, seat: _Seat, batch: RecordBatch, start: int, end: int) -> None:
        stop = min(end, start + max(0, seat.room))
        self.dropped += end - stop
        if start < stop:
            self._queue(seat, batch, ((start, stop),))

    def _queue(self, seat: _Seat, batch: RecordBatch, ranges: tuple[Range, ...]) -> None:
        count = sum(end - start for start, end in ranges)
        size = batch.header.length * count // len(batch)
        seat.queued += count
        seat.member.queued_bytes += size
        self.delivered += count
        self.delivered_bytes += size
        flight = Flight(seat.member, ranges, 1, 0.0, count, count, size)
        seat.consumer.put(cut_out(batch, ranges), flight)

    # -- what consumers ask for ----------------------------------------------------------------

    def is_active(self, consumer: ConsumerHandle) -> bool:
        seat = self._seat(consumer)
        if self.type in (SubscriptionType.SHARED, SubscriptionType.KEY_SHARED):
            return seat is not None
        return seat is not None and seat is next(iter(self._seats.values()))

    def limit(self, consumer: ConsumerHandle) -> int | None:
        seat = self._seat(consumer)
        return 0 if seat is None else seat.member.credits

    def fetched(self, consumer: ConsumerHandle, flight: Flight, count: int) -> None:
        seat = self._seat(consumer)
        if seat is None:
            return
        seat.queued -= count
        seat.member.credits -= count
        flight.unfetched -= count
        if not flight.unfetched:
            seat.member.queued_bytes -= flight.queued_bytes

    def waits(self, consumer: ConsumerHandle) -> None:
        """What comes is put into its queue in any case."""

    def granted(self, consumer: ConsumerHandle, count: int) -> None:
        seat = self._seat(consumer)
        if seat is not None:
            seat.member.credits += count
            consumer.poke()

    def ack(self, ranges: Sequence[Range]) -> None:
        """Nothing waits for it."""

    def nack(self, ranges: Sequence[Range], *, delay_ms: int = 0, reason: str = "") -> None:
        """Nothing is repeated."""
