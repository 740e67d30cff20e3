"""Subscription: what the cluster says of the one that a load consumes. A load that has to tell what is lost
asks two things that messages do not tell: what should come, and whether more is to come. That nothing comes
for a while says neither: a broker may be gone, and another one on its way to take over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sava.client.consumer import SubscriptionType
from sava.errors import RetryableError
from sava.load.tally import Owed
from sava.proto import topics_admin_pb2 as pb
from sava.services.admin_client import AdminClient


class TopicUnserved(RetryableError):
    """No broker serves the topic, or all of it, at the moment."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where consuming begins."""

    owed: Owed
    partitions: int
    removed: int = 0
    """Messages that retention has removed before."""


class Subscription:
    def __init__(self, admin: AdminClient, topic: str, name: str) -> None:
        self._admin = admin
        self.topic = topic
        self.name = name
        self.is_used = False
        """Whether somebody has begun to consume: it may exist since then."""

    async def beginning(self, type_: SubscriptionType, start: Literal["earliest", "latest"]) -> Beginning:
        """Before the first consumer is there. Raises what the broker refuses, or RetryableError."""
        described = await self._describe(self.topic)
        parts = [await self._describe(name) for name in described.partitions] or [described]
        count = len(parts)
        if any(each.subscription == self.name for each in described.subscriptions):
            # Whoever consumed before has acked everything up to some place, unless several shared it.
            is_in_order = type_ in ("exclusive", "failover")
            return Beginning(Owed.REST if is_in_order else Owed.SOME, count)
        removed = sum(each.start_offset for each in parts)
        is_kept = all(each.HasField("start_offset") for each in parts)
        if start == "earliest" and is_kept and not removed:
            return Beginning(Owed.ALL, count)
        return Beginning(Owed.REST, count, removed)

    async def left(self) -> int:
        """Messages that are not acked. Raises RetryableError if nobody knows."""
        described = await self._describe(self.topic)
        if described.reason:
            raise TopicUnserved(f"topic {self.topic} is not served as a whole: {described.reason}")
        found = (each.backlog for each in described.subscriptions if each.subscription == self.name)
        return sum(found)

    async def delete(self) -> None:
        request = pb.DeleteSubscriptionRequest(topic=self.topic, subscription=self.name)
        await self._admin.call(self._admin.subscriptions.DeleteSubscription, request)

    async def _describe(self, name: str) -> pb.TopicDescription:
        described: pb.TopicDescription = await self._admin.call(
            self._admin.topics.DescribeTopic, pb.DescribeTopicRequest(name=name)
        )
        return described
