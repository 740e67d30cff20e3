"""Topic: one topic on the broker that serves it: its log, who publishes, and who consumes.

It ends in one order, whatever the reason: nobody may publish any more, what was accepted resolves, consumers
end, positions are written, the log closes. Positions are written before the log closes because after it
another broker may take the topic and begin at what it finds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from sava.broker.consumer import Consumer
from sava.broker.consumers import KnownConsumer
from sava.broker.delivery import Range
from sava.broker.errors import TopicMismatch
from sava.broker.info import SubscriptionInfo, TopicInfo
from sava.broker.names import TopicName
from sava.broker.non_reliable import NonReliableSubscription
from sava.broker.ownership import Tenure
from sava.broker.position import Position
from sava.broker.producers import AccessMode, Producer, Producers
from sava.broker.publishing import Publisher
from sava.broker.specs import FailurePolicy, TopicSpec
from sava.broker.subscribing import AnySubscription, Parts, SubscribeOptions
from sava.broker.subscriptions import Subscriptions, resolve
from sava.broker.transient import TransientSubscriptions
from sava.errors import SavaError
from sava.records import RecordBatch
from sava.storage.topic_log import Status, TopicLog

__all__ = ["SubscribeOptions", "Topic"]


class Topic:
    """Owned by the event loop. Made by ``Topics``."""

    def __init__(self, tenure: Tenure, log: TopicLog | None, parts: Parts) -> None:
        self.name: TopicName = tenure.name
        self.spec: TopicSpec = tenure.located.spec
        self.epoch = tenure.epoch
        self.log = log
        self._limits = parts.limits
        self._gate = parts.gate
        self._is_closed = False
        self._reliable = Subscriptions(tenure, log, parts) if log is not None else None
        self._transient = TransientSubscriptions(tenure, parts) if log is None else None
        self._publisher = Publisher(
            self.name, log if log is not None else self._need_transient(), parts.limits, parts.gate
        )
        self.producers = Producers(
            self.name,
            self.spec.topic_id,
            self._publisher,
            parts.limits,
            parts.gate,
            epoch=self.epoch,
            is_reliable=self.spec.reliable,
        )

    async def load(self) -> None:
        """Take up the subscriptions that exist."""
        await self._subscriptions.load()

    @property
    def topic_id(self) -> int:
        return self.spec.topic_id

    @property
    def is_serving(self) -> bool:
        if self._is_closed:
            return False
        return self.log is None or self.log.status in (Status.OPEN, Status.SEALING)

    @property
    def _subscriptions(self) -> Subscriptions | TransientSubscriptions:
        return self._reliable if self._reliable is not None else self._need_transient()

    @property
    def subscriptions(self) -> Mapping[str, AnySubscription]:
        return self._subscriptions.live

    # -- publishing --------------------------------------------------------------------------

    async def open_producer(
        self,
        name: str,
        *,
        access: AccessMode = AccessMode.SHARED,
        schema_subject: str = "",
        takeover: bool,
    ) -> Producer:
        """With ``takeover`` an older open producer of the name is fenced; without, its registration is
        shared. Raises ProducerBusy, LimitReached, SchemaRefused."""
        return await self.producers.open(
            name, access=access, schema_subject=schema_subject, takeover=takeover
        )

    async def append(self, batch: RecordBatch) -> int:
        """For the broker's own messages: the base offset when durable."""
        return await asyncio.shield(await self._publisher.begin(batch, lambda: None))

    # -- subscribing -------------------------------------------------------------------------

    async def subscribe(self, options: SubscribeOptions) -> Consumer:
        """Raises SubscriptionMismatch, SubscriptionBusy, LimitReached, OffsetOutOfRange."""
        return await self._subscriptions.subscribe(options)

    def ack(self, subscription: str, ranges: Sequence[Range]) -> None:
        """For protocols whose acks name no consumer. Raises SubscriptionUnknown."""
        self._subscriptions.need(subscription).ack(ranges)

    def nack(
        self, subscription: str, ranges: Sequence[Range], *, delay_ms: int = 0, reason: str = ""
    ) -> None:
        self._subscriptions.need(subscription).nack(ranges, delay_ms=delay_ms, reason=reason)

    async def unsubscribe(self, name: str) -> None:
        await self._subscriptions.unsubscribe(name)

    async def set_failure_policy(self, subscription: str, policy: FailurePolicy) -> None:
        await self._need_reliable().set_failure_policy(subscription, policy)

    async def set_max_unacked(self, subscription: str, count: int) -> None:
        await self._need_reliable().set_max_unacked(subscription, count)

    async def seek(self, subscription: str, position: Position) -> int:
        """The offset that the subscription goes on from."""
        return await self._need_reliable().seek(subscription, position)

    async def acks_stored(self, subscription: str) -> None:
        """Until everything that is acked now is in the metadata store; at once if the topic keeps nothing."""
        if self._reliable is not None:
            await self._reliable.acks_stored(subscription)

    async def resolve(self, position: Position) -> int:
        """The offset of a position at this moment. Raises OffsetOutOfRange."""
        self._need_reliable()
        assert self.log is not None
        return await resolve(self.log, position)

    def known_consumer(self, consumer_id: int) -> KnownConsumer | None:
        """Whom the id stands for, if it was given to a consumer that comes back with it."""
        return self._subscriptions.ids.get(consumer_id)

    def _need_reliable(self) -> Subscriptions:
        if self._reliable is None:
            raise TopicMismatch(f"topic {self.name} is not reliable: it has no offsets to go back to")
        return self._reliable

    def _need_transient(self) -> TransientSubscriptions:
        assert self._transient is not None
        return self._transient

    # -- knowing -----------------------------------------------------------------------------

    def describe(self) -> TopicInfo:
        log = self.log
        return TopicInfo(
            name=self.name,
            topic_id=self.topic_id,
            reliable=self.spec.reliable,
            partitions=self.spec.partitions,
            epoch=self.epoch,
            state="closed" if self._is_closed else log.status.value if log is not None else "open",
            start_offset=log.start_offset if log is not None else 0,
            next_offset=log.next_offset if log is not None else self._need_transient().next_offset,
            stored_offset=log.stored_offset if log is not None else 0,
            producers=tuple(producer.name for producer in self.producers),
            subscriptions=tuple(map(_describe, self.subscriptions.values())),
            schema_subject=self._gate.subject(self.name),
        )

    # -- tending -----------------------------------------------------------------------------

    async def tend(self) -> None:
        """Let go of what has been left behind: idle producers, absent consumers, idle subscriptions."""
        self.producers.drop_idle()
        await self._subscriptions.tend()

    async def enforce_retention(self, now_ms: int) -> int:
        """Drop old segments; returns how many went. What a subscription has not acked stays."""
        policy = self._limits.of(self.name).retention
        if self.log is None or self._reliable is None or policy is None:
            return 0
        keep_from = self._reliable.lowest_cursor
        return len(await self.log.enforce_retention(policy, now_ms=now_ms, keep_from=keep_from))

    async def close(self, *, for_producers: SavaError, for_consumers: SavaError) -> None:
        """Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.producers.end(for_producers)
        await self._publisher.close(for_producers)
        await self._subscriptions.close(for_consumers)
        if self.log is not None:
            await self.log.close()


def _describe(subscription: AnySubscription) -> SubscriptionInfo:
    consumers = tuple(subscription.consumers)
    if isinstance(subscription, NonReliableSubscription):
        return SubscriptionInfo(name=subscription.name, type=subscription.type, consumers=consumers)
    stats = subscription.stats
    return SubscriptionInfo(
        name=subscription.name,
        type=subscription.type,
        consumers=consumers,
        cursor=subscription.cursor_offset,
        backlog=subscription.backlog,
        unacked=stats.unacked,
        is_blocked=stats.blocked,
    )
