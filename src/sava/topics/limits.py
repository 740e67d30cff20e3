"""Limits: what the policies of a topic, its namespace and the configuration come to, and how a rate is kept.

Policies are looked up in this node's view of the metadata store at the moment of the check, so that a change
takes effect at once and everywhere, for producers and consumers that are already there as well. The decoded
result is kept for as long as none of the records has changed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sava.config import PolicySettings
from sava.metadata.store import MetadataStore
from sava.storage.maintenance import RetentionPolicy
from sava.topics import specs
from sava.topics.errors import LimitReached
from sava.topics.names import TopicName
from sava.topics.specs import NamespacePolicy

MAX_KNOWN: Final = 10_000
MAX_WAIT_S: Final = 10.0
"""Longer than this a publisher gets an error instead, and comes back: its call has a deadline too."""


class EffectiveLimits(NamedTuple):
    """0: no limit."""

    max_producers_per_topic: int
    max_subscriptions_per_topic: int
    max_consumers_per_topic: int
    max_consumers_per_subscription: int
    max_publish_rate: int
    max_subscription_dispatch_rate: int
    max_message_size: int
    retention_time_minutes: int
    retention_size_mb: int

    @property
    def retention(self) -> RetentionPolicy | None:
        """None: everything is kept."""
        if not self.retention_time_minutes and not self.retention_size_mb:
            return None
        return RetentionPolicy(
            max_age_ms=self.retention_time_minutes * 60_000 or None,
            max_bytes=self.retention_size_mb << 20 or None,
        )


UNLIMITED: Final = EffectiveLimits._make([0] * len(EffectiveLimits._fields))


def configured(policies: PolicySettings) -> NamespacePolicy:
    """The configuration's policies, whose keys are Danube's, in the terms of a namespace's."""
    return NamespacePolicy(
        max_producers_per_topic=policies.max_producers,
        max_subscriptions_per_topic=policies.max_subscriptions,
        max_consumers_per_topic=policies.max_consumers,
        max_consumers_per_subscription=policies.max_consumers_per_subscription,
        max_publish_rate=policies.max_publish_rate,
        max_subscription_dispatch_rate=policies.max_subscription_dispatch_rate,
        max_message_size=policies.max_message_size,
        retention_time_minutes=policies.retention_time_minutes,
        retention_size_mb=policies.retention_size_mb,
    )


class TopicLimits:
    def __init__(self, store: MetadataStore, policies: PolicySettings) -> None:
        self._store = store
        self._configured = configured(policies)
        self._known: dict[TopicName, _Known] = {}

    def of(self, topic: TopicName) -> EffectiveLimits:
        """A partition has what its partitioned topic has, unless it has a policy of its own."""
        local = self._store.local
        known = self._known.get(topic)
        if known is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            known = self._known[topic] = _Known(_levels(topic))
        elif known.looked_at == local.revision:
            return known.effective
        known.looked_at = local.revision
        records = [local.get(key) for key in known.keys]
        revisions = [kv.mod_revision if kv is not None else 0 for kv in records]
        if known.revisions != revisions:
            levels = [specs.decode(kv, NamespacePolicy) for kv in records if kv is not None]
            known.revisions, known.effective = revisions, combine((*levels, self._configured))
        return known.effective


@dataclass(slots=True)
class _Known:
    """What was found for a topic when the store was at revision ``looked_at``."""

    keys: tuple[str, ...]
    looked_at: int = -1
    revisions: list[int] = field(default_factory=list)
    effective: EffectiveLimits = UNLIMITED


def _levels(topic: TopicName) -> tuple[str, ...]:
    """Where its policies are, the nearest first."""
    topics = dict.fromkeys((topic, topic.head))
    return *map(specs.policy_key, topics), specs.namespace_key(topic.namespace)


def combine(levels: tuple[NamespacePolicy, ...]) -> EffectiveLimits:
    """Of each limit what the first level says that says anything."""
    return EffectiveLimits(
        *(
            next((value for level in levels if (value := getattr(level, name)) is not None), 0)
            for name in EffectiveLimits._fields
        )
    )


def check_room(count: int, limit: int, what: str) -> None:
    """Raise LimitReached unless one more fits."""
    if limit and count >= limit:
        raise LimitReached(f"{what}: the limit of {limit} is reached")


class RateLimiter:
    """Lets ``rate`` messages through in a second, in the order of asking; a second's worth may come at once.

    Asking takes the room at once and waits until it is there: who asks later cannot get in before. A batch
    larger than a second's worth passes too, and those behind it wait the longer.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._free_at = float("-inf")
        """When everything that was let through until now is paid for."""

    async def acquire(self, count: int, rate: int, what: str) -> None:
        """``rate`` is a second's, 0 for none. Raises LimitReached, without effect, when it would take too
        long."""
        if not rate:
            return
        now = self._clock()
        # A limiter that was idle has at most one second of room.
        start = max(self._free_at, now - 1.0)
        wait = start + min(count, rate) / rate - now
        if wait > MAX_WAIT_S:
            raise LimitReached(f"{what}: the rate of {rate} messages a second is exhausted")
        self._free_at = start + count / rate
        if wait > 0:
            await asyncio.sleep(wait)
