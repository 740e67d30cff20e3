"""Topic: one topic on the broker that serves it: its log, who publishes, and who consumes.

It ends in one order, whatever the reason: nobody may publish any more, what was accepted resolves, consumers
end, positions are written, the log closes. Positions are written before the log closes because after it
another broker may take the topic and begin at what it finds.

Handing over is the same with a seal: before the log closes, everything that was acknowledged is put where any
broker reads it, and the end is written down. Publishers are held meanwhile, not refused (see ``publishing``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Final

from sava.broker.consumer import Consumer
from sava.broker.consumers import KnownConsumer
from sava.broker.delivery import Range
from sava.broker.errors import NotHandedOver, TopicMismatch, TopicMoved
from sava.broker.info import SubscriptionInfo, TopicInfo
from sava.broker.names import TopicName
from sava.broker.non_reliable import NonReliableSubscription
from sava.broker.position import Position
from sava.broker.producers import AccessMode, Producer, Producers
from sava.broker.publishing import Publisher
from sava.broker.specs import FailurePolicy, TopicSpec
from sava.broker.staged import Run, Stage, StagedWrites
from sava.broker.subscribing import AnySubscription, Parts, SubscribeOptions
from sava.broker.subscriptions import FLUSH_S, Subscriptions, resolve
from sava.broker.tenure import Tenure
from sava.broker.transient import TransientSubscriptions
from sava.errors import SavaError
from sava.records import RecordBatch
from sava.storage.staging import Section
from sava.storage.topic_log import Status, TopicLog

__all__ = ["SubscribeOptions", "Topic"]

LAST_FLUSH_S: Final = 1.0
"""For positions, where the time for them is over already or nobody may need them."""


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
        self._has_closed = asyncio.Event()
        self._reliable = Subscriptions(tenure, log, parts) if log is not None else None
        self._transient = TransientSubscriptions(tenure, parts) if log is None else None
        self._publisher = Publisher(
            self.name, log if log is not None else self._need_transient(), parts.limits, parts.gate
        )
        self._staged = StagedWrites(self._publisher, log)
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

    async def check_staged(self, stage: Stage, writer: str, sections: Sequence[Section]) -> None:
        """Raise unless the topic takes these messages of the writer: TopicMismatch, MessageTooLarge,
        SchemaRefused, ProducerBusy, StagedInvalid."""
        self.producers.check_shared(writer)
        await self._staged.check(stage, sections)

    async def publish_staged(self, stage: Stage, run: Run) -> None:
        """Until all of it is durable, however often it is asked for. What is in the topic already is not
        published again. Raises TopicMoved, TopicClosed, LimitReached and what keeps the sections from being
        read; what was published by then stays, and the next call goes on behind it."""
        await self._staged.publish(stage, run)

    # -- subscribing -------------------------------------------------------------------------

    async def subscribe(self, options: SubscribeOptions) -> Consumer:
        """Raises SubscriptionMismatch, SubscriptionBusy, LimitReached, OffsetOutOfRange."""
        return await self._subscriptions.subscribe(options)

    async def create_subscription(self, options: SubscribeOptions) -> None:
        """Ahead of its consumers, so ``consumer_name`` means nothing. Raises SubscriptionExists,
        TopicMismatch, LimitReached, OffsetOutOfRange."""
        if self._reliable is None:
            raise TopicMismatch(
                f"topic {self.name} is not reliable: its subscriptions last as long as their consumers"
            )
        await self._reliable.create(options)

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

    async def advance(self, subscription: str, offset: int) -> None:
        """Ack what is below the offset for a reader that keeps its own position; see ``Subscriptions``."""
        await self._need_reliable().advance(subscription, offset)

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

    @property
    def published(self) -> tuple[int, int]:
        """Messages, and their bytes, since this broker began to serve the topic."""
        return self._publisher.messages, self._publisher.bytes

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

    async def hand_over(self, *, timeout: float) -> int:
        """Let go of the topic so that any broker can go on: returns the exclusive end (0 if nothing is kept),
        below which everything is in segments. Everybody who uses the topic here gets TopicMoved.

        The topic is closed afterwards, also by a failure: NotHandedOver when the time is up, and whatever
        stands in the way of the seal. Positions that cannot be written do not: messages are then delivered
        again."""
        moved = TopicMoved(self.name)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        doing = "waiting for what was accepted"
        try:
            async with asyncio.timeout_at(deadline):
                await self._publisher.hold()
                doing = "writing the positions of its subscriptions"
                await self._subscriptions.close(moved, timeout=min(FLUSH_S, timeout / 2))
                doing = "uploading and sealing its log"
                return (await self.log.seal(timeout=deadline - loop.time())).end if self.log else 0
        except TimeoutError:
            raise NotHandedOver(
                f"topic {self.name} was not handed over within {timeout:g} s; it was still {doing}"
            ) from None
        finally:
            await self.close(for_producers=moved, for_consumers=moved, timeout=LAST_FLUSH_S)

    async def close(
        self, *, for_producers: SavaError, for_consumers: SavaError, timeout: float = FLUSH_S
    ) -> None:
        """What was accepted resolves; positions are written if that is possible in time. Whoever asks a
        second time waits for the first."""
        if self._is_closed:
            await self._has_closed.wait()
            return
        self._is_closed = True
        try:
            self.producers.end(for_producers)
            await self._publisher.close(for_producers)
            await self._staged.close(for_producers)
            await self._subscriptions.close(for_consumers, timeout=timeout)
            if self.log is not None:
                await self.log.close()
        finally:
            self._has_closed.set()


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
