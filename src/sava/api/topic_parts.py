"""TopicParts: a topic as the admin port sees it, whichever brokers have its partitions.

A topic that a broker serves is described by that broker. One that nobody serves (its owner is gone, or it is
on its way from one to another), or whose broker does not answer, is described by any, with what the metadata
store knows: an operator asks about a topic most urgently when it is not served.

What is done to one topic raises NotOwner if another broker has it, and the call is forwarded as a whole. What
is done to a partitioned topic is done to its partitions, each by its owner.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message

from sava.api import topic_descriptions as describe
from sava.cluster.view import ClusterView, TopicEntry
from sava.errors import RetryableError, SavaError
from sava.metadata.store import MetadataStore
from sava.peers.faults import Relayed
from sava.peers.owners import (
    PARALLEL,
    Owners,
    Part,
    Reply,
)
from sava.proto import topics_admin_pb2 as pb
from sava.tasks import spread
from sava.topics.errors import SubscriptionUnknown, TopicUnknown
from sava.topics.names import TopicName
from sava.topics.specs import OwnershipState
from sava.topics.topic import Topic
from sava.topics.topics import ServedTopics

Request = TypeVar("Request", bound=Message)

DESCRIBE: Final = "/sava.admin.Topics/DescribeTopic"
DESCRIBE_S: Final = 4.0
SETTLE_S: Final = 5.0
"""How long a topic that was just created is waited for before it is said to be unassigned."""


class TopicParts:
    """Holds nothing between calls."""

    def __init__(self, topics: ServedTopics, store: MetadataStore, view: ClusterView, owners: Owners) -> None:
        self.topics = topics
        self.view = view
        self._store = store
        self._owners = owners

    async def names(self, name: TopicName) -> list[TopicName]:
        """The partitions; the topic itself if it has none. Raises TopicUnknown."""
        partitions = await self.topics.registry.partitions(name)
        if not partitions:
            raise TopicUnknown(name)
        return partitions

    async def is_partitioned(self, name: TopicName) -> bool:
        """Raises TopicUnknown."""
        return bool((await self.topics.registry.need(name)).partitions)

    # -- describing --------------------------------------------------------------------------

    async def here(self, name: TopicName) -> pb.TopicDescription:
        """Of a topic that has no partitions. Raises NotOwner if another broker serves it."""
        topic = self.topics.loaded.get(name)
        if topic is None or not topic.is_serving:
            entry = self.view.entry(name)
            if entry is not None and not self._is_served(entry):
                return await describe.unserved_topic(entry, self._store.local)
            topic = await self.topics.get(name)
        return await describe.topic_description(topic, self.topics.broker)

    def _is_served(self, entry: TopicEntry) -> bool:
        return entry.record.state is OwnershipState.ASSIGNED and entry.record.owner in self.view.brokers

    async def describe(self, names: Sequence[TopicName]) -> list[pb.TopicDescription]:
        """Each by its owner. Of one whose owner does not answer, what the metadata store knows."""
        return await spread(names, self._describe, parallel=PARALLEL)

    async def _describe(self, name: TopicName) -> pb.TopicDescription:
        part = Part(
            topic=name,
            method=DESCRIBE,
            request=pb.DescribeTopicRequest(name=str(name)),
            reply=pb.TopicDescription,
            here=partial(self.here, name),
        )
        try:
            return await self._owners.do(part, timeout=DESCRIBE_S)
        except SavaError as error:
            entry = self.view.entry(name)
            if entry is None or not _is_silence(error):
                raise
            described = await describe.unserved_topic(entry, self._store.local)
            if self._is_served(entry):
                described.reason = f"broker {entry.record.owner} does not answer: {error}"
            return described

    async def settle(self, names: Sequence[TopicName]) -> None:
        """Until new topics have owners; they are described as they are after a while."""
        await self._owners.settled(names, timeout=SETTLE_S)

    # -- subscriptions -----------------------------------------------------------------------

    async def having(self, name: TopicName, subscription: str) -> list[TopicName]:
        """Those that have the subscription: a partition that was added later has it when the first consumer
        comes. Raises SubscriptionUnknown if none has."""
        found = [
            TopicName.parse(described.name)
            for described in await self.describe(await self.names(name))
            if subscription in describe.subscription_names(described)
        ]
        if not found:
            raise SubscriptionUnknown(name, subscription)
        return found

    async def on_subscription(
        self,
        method: str,
        request: Any,
        reply: type[Reply],
        work: Callable[[Topic, Any], Awaitable[Reply]],
        *,
        or_all: bool = False,
    ) -> list[Reply]:
        """``work`` on the topic that the request names, or on those of its partitions that have the
        subscription that it names: one answer for each. ``or_all``: on all partitions if none has it."""
        name = TopicName.parse(request.topic)
        if not await self.is_partitioned(name):
            return [await work(await self.topics.get(name), request)]
        try:
            names = await self.having(name, request.subscription)
        except SubscriptionUnknown:
            if not or_all:
                raise
            names = await self.names(name)
        return await self.on_each(names, method, request, reply, work)

    async def on_all(
        self,
        method: str,
        request: Any,
        reply: type[Reply],
        work: Callable[[Topic, Any], Awaitable[Reply]],
    ) -> list[Reply]:
        """``work`` on the topic that the request names, or on all of its partitions: one answer for each."""
        name = TopicName.parse(request.topic)
        if not await self.is_partitioned(name):
            return [await work(await self.topics.get(name), request)]
        return await self.on_each(await self.names(name), method, request, reply, work)

    async def on_each(
        self,
        names: Sequence[TopicName],
        method: str,
        request: Request,
        reply: type[Reply],
        work: Callable[[Topic, Request], Awaitable[Reply]],
    ) -> list[Reply]:
        """``work`` on each topic by its owner; ``request`` with the topic's name in its ``topic`` is what
        others are asked."""

        async def here(name: TopicName, asked: Request) -> Reply:
            return await work(await self.topics.get(name), asked)

        parts = []
        for name in names:
            asked = _about(request, name)
            parts.append(
                Part(topic=name, method=method, request=asked, reply=reply, here=partial(here, name, asked))
            )
        return await self._owners.each(parts)


def _is_silence(error: SavaError) -> bool:
    """Whether nobody answered, as opposed to somebody who refused."""
    if isinstance(error, Relayed):
        return error.status is grpc.StatusCode.UNAVAILABLE
    return isinstance(error, RetryableError)


def _about(request: Request, name: TopicName) -> Request:
    copy: Any = type(request)()
    copy.CopyFrom(request)
    copy.topic = str(name)
    asked: Request = copy
    return asked
