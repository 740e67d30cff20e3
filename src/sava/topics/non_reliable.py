"""Non-reliable topics: messages go to the consumers that are connected at this moment.

Nothing is kept and nothing is repeated. Publishing never waits: each consumer has a bounded queue, and what
does not fit is dropped and counted. Offsets only number the messages since the topic was opened here.

Subscriptions live in memory, as long as they have consumers. One that has had none for a minute is removed:
it has no position that could be missed. Ids of consumers that come back with nothing else are kept as on
reliable topics; the subscription is then made again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from sava.errors import SavaError
from sava.metadata.commands import DeletePrefix
from sava.records import RecordBatch
from sava.topics import specs
from sava.topics.consumer import ConsumerHandle, ConsumerIds, ConsumerRecords, cut_out
from sava.topics.dispatch.members import (
    QUEUE_BYTES,
    DispatchMember,
    Flight,
    HashRing,
    KeyFilter,
    effective_keys,
)
from sava.topics.errors import ConsumerClosed, ConsumerReplaced, SubscriptionBusy, SubscriptionUnknown
from sava.topics.names import TopicName
from sava.topics.ownership import Tenure
from sava.topics.ranges import Range, runs
from sava.topics.specs import SubscriptionType
from sava.topics.subscriptions import (
    SubscribeOptions,
    TopicDependencies,
    check_consumer,
    check_names,
    check_new,
    known,
    owned,
)

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

    def subscribe(self, name: str, type: SubscriptionType, owner: str = "") -> NonReliableSubscription:  # noqa: A002
        """The subscription of this name, new if there is none. Whether the type is the same, and whose it is,
        is for the caller to see."""
        if name not in self._subscriptions:
            self._subscriptions[name] = NonReliableSubscription(self.topic, name, type, owner=owner)
        return self._subscriptions[name]

    def remove(self, name: str, error: SavaError) -> None:
        """Its consumers end with the error."""
        subscription = self._subscriptions.pop(name, None)
        if subscription is not None:
            subscription.close(error)

    def publish(self, batch: RecordBatch) -> int:
        """To all subscriptions; the offset of its first message. Never waits."""
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
class _Attached:
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
        owner: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.topic = topic
        self.name = name
        self.type = type
        self.owner = owner
        """The principal that alone may use it; empty: all."""
        self.delivered = 0
        self.delivered_bytes = 0
        """Messages put into a queue."""
        self.dropped = 0
        """Messages that no consumer had room for, or that none was there for."""
        self._clock = clock
        self._idle_since: float | None = clock()
        self._attached: dict[str, _Attached] = {}
        self._ring = HashRing()
        self._turn = 0

    @property
    def consumers(self) -> Mapping[str, ConsumerHandle]:
        return MappingProxyType({name: slot.consumer for name, slot in self._attached.items()})

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
        principal: str = "",
    ) -> ConsumerHandle:
        """As ``Subscription.attach``; what a replaced consumer had not fetched is gone."""
        replaced = self._attached.get(consumer_name)
        if self.type is SubscriptionType.EXCLUSIVE and self._attached and replaced is None:
            raise SubscriptionBusy(
                f"subscription {self.name} of topic {self.topic} is exclusive, and consumer "
                f"{next(iter(self._attached))} is connected"
            )
        consumer = ConsumerHandle(consumer_name, consumer_id, self, principal=principal)
        self._attached[consumer_name] = _Attached(
            consumer, DispatchMember(consumer_name, KeyFilter(key_filters), credits)
        )
        self._changed()
        if replaced is not None:
            replaced.consumer.end(ConsumerReplaced(f"consumer {consumer_name} has connected again elsewhere"))
        return consumer

    def detach(self, consumer: ConsumerHandle) -> None:
        if self._find(consumer) is not None:
            del self._attached[consumer.name]
            self._changed()

    def close(self, error: SavaError) -> None:
        for slot in list(self._attached.values()):
            slot.consumer.end(error)
            self.detach(slot.consumer)

    def _changed(self) -> None:
        self._idle_since = None if self._attached else self._clock()
        self._ring.set(slot.member for slot in self._attached.values())

    def _find(self, consumer: ConsumerHandle) -> _Attached | None:
        slot = self._attached.get(consumer.name)
        return slot if slot is not None and slot.consumer is consumer else None

    # -- publishing ----------------------------------------------------------------------------

    def publish(self, batch: RecordBatch) -> None:
        """An assigned batch to the consumers it is for."""
        slots = list(self._attached.values())
        if not slots:
            self.dropped += len(batch)
        elif self.type is SubscriptionType.KEY_SHARED:
            self._by_key(batch)
        elif self.type is SubscriptionType.SHARED:
            self._in_turn(batch, slots)
        else:
            self._put(slots[0], batch, batch.base_offset, batch.next_offset)

    def _in_turn(self, batch: RecordBatch, slots: list[_Attached]) -> None:
        """A slice for each, beginning with the consumer whose turn it is; more for those with room if others
        have none."""
        start, end = batch.base_offset, batch.next_offset
        first = self._turn % len(slots)
        order = [slot for slot in slots[first:] + slots[:first] if slot.room > 0]
        for place, slot in enumerate(order):
            share = -(-(end - start) // (len(order) - place))
            count = min(share, slot.room)
            if count:
                self._put(slot, batch, start, start + count)
                self._turn = slots.index(slot) + 1
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
            slot = None if name is None else self._attached[name]
            room = 0 if slot is None else max(0, slot.room)
            self.dropped += max(0, len(offsets) - room)
            if slot is not None and room:
                self._queue(slot, batch, runs(offsets[:room]))

    def _put(self, slot: _Attached, batch: RecordBatch, start: int, end: int) -> None:
        stop = min(end, start + max(0, slot.room))
        self.dropped += end - stop
        if start < stop:
            self._queue(slot, batch, ((start, stop),))

    def _queue(self, slot: _Attached, batch: RecordBatch, ranges: tuple[Range, ...]) -> None:
        count = sum(end - start for start, end in ranges)
        size = batch.header.length * count // len(batch)
        slot.queued += count
        slot.member.queued_bytes += size
        self.delivered += count
        self.delivered_bytes += size
        flight = Flight(slot.member, ranges, 1, 0.0, count, count, size)
        slot.consumer.put(cut_out(batch, ranges), flight)

    # -- what consumers ask for ----------------------------------------------------------------

    def is_active(self, consumer: ConsumerHandle) -> bool:
        slot = self._find(consumer)
        if self.type in (SubscriptionType.SHARED, SubscriptionType.KEY_SHARED):
            return slot is not None
        return slot is not None and slot is next(iter(self._attached.values()))

    def limit(self, consumer: ConsumerHandle) -> int | None:
        slot = self._find(consumer)
        return 0 if slot is None else slot.member.credits

    def fetched(self, consumer: ConsumerHandle, flight: Flight, count: int) -> None:
        slot = self._find(consumer)
        if slot is None:
            return
        slot.queued -= count
        slot.member.credits -= count
        flight.unfetched -= count
        if not flight.unfetched:
            slot.member.queued_bytes -= flight.queued_bytes

    def waits(self, consumer: ConsumerHandle) -> None:
        """What comes is put into its queue in any case."""

    def granted(self, consumer: ConsumerHandle, count: int) -> None:
        slot = self._find(consumer)
        if slot is not None:
            slot.member.credits += count
            consumer.wake()

    def ack(self, ranges: Sequence[Range]) -> None:
        """Without effect: no message waits for an ack."""

    def nack(self, ranges: Sequence[Range], *, delay_ms: int = 0, reason: str = "") -> None:
        """Nothing is repeated."""


PAGE: Final = 1000
IDLE_S: Final = 60.0


class TransientSubscriptions:
    """The subscriptions of a topic that keeps nothing, and the sink of its batches. Owned by the event
    loop."""

    def __init__(
        self,
        tenure: Tenure,
        parts: TopicDependencies,
        *,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        located = tenure.located
        self._topic = located.name
        self._limits = parts.limits
        self._owners = parts.owners
        self._idle_s = idle_s
        self._clock = clock
        self._fan_out = FanOut(self._topic, topic_id=located.spec.topic_id, epoch=tenure.epoch)
        self._records = ConsumerRecords(tenure)
        self._tenure = tenure
        self._closed: SavaError | None = None

    @property
    def live(self) -> Mapping[str, NonReliableSubscription]:
        return self._fan_out.subscriptions

    @property
    def ids(self) -> ConsumerIds:
        return self._records.ids

    @property
    def next_offset(self) -> int:
        return self._fan_out.next_offset

    # -- publishing --------------------------------------------------------------------------

    async def begin(self, batch: RecordBatch) -> asyncio.Future[int]:
        """Done at once: there is nothing to wait for."""
        if self._closed is not None:
            raise self._closed
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        done.set_result(self._fan_out.publish(batch))
        return done

    def next_sequence(self, producer_id: int) -> int:
        """Nothing is kept, so nothing can be repeated."""
        return 0

    def is_degraded(self, offset: int) -> bool:
        """No disk was promised."""
        return False

    # -- subscribing -------------------------------------------------------------------------

    async def load(self) -> None:
        """The ids of consumers that may come back. There is nothing else."""
        after, more = "", True
        while more:
            prefix = specs.subscriptions_prefix(self._topic)
            page = await self._tenure.store.range(prefix, limit=PAGE, start_after=after)
            more = page.more
            for kv in page.kvs:
                after = kv.key
                self.ids.load(kv, kv.key.split("/")[5])

    def need(self, name: str) -> NonReliableSubscription:
        if self._closed is not None:
            raise self._closed
        subscription = self.live.get(name)
        if subscription is None:
            raise SubscriptionUnknown(self._topic, name)
        return subscription

    async def subscribe(self, options: SubscribeOptions) -> ConsumerHandle:
        check_names(options)
        self._check(options)
        consumer_id = self.ids.id_of(options.subscription, options.consumer_name)
        if options.durable_id:
            consumer = owned(known(self._topic, options, consumer_id), self.ids, self._owners)
            await self._records.remember(consumer)
            self._check(options)
        principal = self._owners.of_new()
        return self._fan_out.subscribe(options.subscription, options.type, principal).attach(
            options.consumer_name,
            consumer_id=consumer_id,
            key_filters=tuple(options.key_filters),
            credits=options.credits,
            principal=principal,
        )

    def _check(self, options: SubscribeOptions) -> None:
        if self._closed is not None:
            raise self._closed
        if options.subscription not in self.live:
            check_new(self._topic, len(self.live), self._limits)
        check_consumer(self._topic, options, self.live, self._limits, self._owners)

    def need_own(self, name: str) -> NonReliableSubscription:
        """Raises SubscriptionUnknown, OwnedByAnother."""
        subscription = self.need(name)
        self._owners.check_subscription(subscription.owner, name, self._topic)
        return subscription

    async def unsubscribe(self, name: str) -> None:
        self.need_own(name)
        await self._tenure.write((DeletePrefix(specs.consumers_prefix(self._topic, name)),))
        self.ids.forget_subscription(name)
        self._remove(name)

    def _remove(self, name: str) -> None:
        self._fan_out.remove(name, ConsumerClosed(f"subscription {name} of topic {self._topic} was removed"))

    async def maintain(self) -> None:
        """Remove subscriptions without consumers, and forget consumers that stay away."""
        before = self._clock() - self._idle_s
        for subscription in list(self.live.values()):
            if subscription.idle_since is not None and subscription.idle_since <= before:
                self._remove(subscription.name)
        await self._records.forget_absent(
            (subscription.name, consumer)
            for subscription in self.live.values()
            for consumer in subscription.consumers
        )

    async def close(self, error: SavaError, *, timeout: float = 0.0) -> None:
        """At once, whatever the time: there are no positions to be written."""
        self._closed = error
        self._fan_out.close(error)
