"""TransientSubscriptions: those of a topic that keeps nothing. They live in memory, while somebody listens.

A subscription that has had no consumer for a minute is removed: it has no position that could be missed. Ids
of consumers that come back with nothing else are kept as on reliable topics; the subscription is then made
anew.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Final

from sava.errors import SavaError
from sava.metadata.commands import DeletePrefix
from sava.records import RecordBatch
from sava.topics import specs
from sava.topics.consumer import ConsumerHandle
from sava.topics.consumers import ConsumerIds, ConsumerRecords
from sava.topics.errors import ConsumerClosed, SubscriptionUnknown
from sava.topics.non_reliable import FanOut, NonReliableSubscription
from sava.topics.subscribing import (
    SubscribeOptions,
    TopicDependencies,
    check_consumer,
    check_names,
    check_new,
)
from sava.topics.subscriptions import known
from sava.topics.tenure import Tenure

PAGE: Final = 1000
IDLE_S: Final = 60.0


class TransientSubscriptions:
    """Owned by the event loop. Also where the topic's batches go: to whoever listens."""

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
            await self._records.remember(known(self._topic, options, consumer_id))
            self._check(options)
        return self._fan_out.subscribe(options.subscription, options.type).attach(
            options.consumer_name,
            consumer_id=consumer_id,
            key_filters=tuple(options.key_filters),
            credits=options.credits,
        )

    def _check(self, options: SubscribeOptions) -> None:
        if self._closed is not None:
            raise self._closed
        if options.subscription not in self.live:
            check_new(self._topic, len(self.live), self._limits)
        check_consumer(self._topic, options, self.live, self._limits)

    async def unsubscribe(self, name: str) -> None:
        self.need(name)
        await self._tenure.write((DeletePrefix(specs.consumers_prefix(self._topic, name)),))
        self.ids.forget_subscription(name)
        self._remove(name)

    def _remove(self, name: str) -> None:
        self._fan_out.remove(name, ConsumerClosed(f"subscription {name} of topic {self._topic} was removed"))

    async def tend(self) -> None:
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
