"""The service ``Subscriptions`` of the admin port.

Of a partitioned topic, a subscription is those of its partitions: numbers are sums, and a change is made in
each partition that has it, by the partition's owner.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from typing import Any, Final

from sava.api import topic_descriptions as describe
from sava.api.topic_parts import TopicParts
from sava.peers import faults
from sava.peers.relays import is_forwarded
from sava.proto import topics_admin_pb2 as pb
from sava.proto import topics_admin_pb2_grpc as rpc
from sava.storage.source_positions import is_replication_slot
from sava.topics.errors import MessageInvalid, SubscriptionExists, TopicMismatch
from sava.topics.names import TopicName, check_name, check_unreserved
from sava.topics.non_reliable import NonReliableSubscription
from sava.topics.position import AtOffset, Position
from sava.topics.topic import SubscribeOptions, Topic

SERVICE: Final = "/sava.admin.Subscriptions/"


class SubscriptionsService(rpc.SubscriptionsServicer):
    def __init__(self, parts: TopicParts) -> None:
        self._parts = parts

    async def CreateSubscription(
        self, request: pb.CreateSubscriptionRequest, context: Any
    ) -> pb.SubscriptionDescription:
        async with faults.told(context):
            name, subscription = (
                TopicName.parse(request.topic),
                check_name(request.subscription, "subscription"),
            )
            start = describe.position(request.start)
            if is_replication_slot(subscription) and is_forwarded(context):  # the leader's, who makes them
                topic = await self._parts.topics.get(name)
                await topic.pin(subscription, start)
                return describe.subscription_description(topic, subscription)
            check_unreserved(subscription)
            if not await self._parts.is_partitioned(name):
                return await _create(await self._parts.topics.get(name), request)
            _check_anywhere(name, start)
            missing = [
                TopicName.parse(described.name)
                for described in await self._parts.describe(await self._parts.names(name))
                if subscription not in describe.subscription_names(described)
            ]
            if not missing:
                raise SubscriptionExists(f"topic {name} has a subscription {subscription} already")
            await self._parts.on_each(
                missing, f"{SERVICE}CreateSubscription", request, pb.SubscriptionDescription, _create
            )
            with faults.made(f"subscription {subscription} of topic {name} exists now"):
                return await self._describe(name, subscription)

    async def DescribeSubscription(
        self, request: pb.DescribeSubscriptionRequest, context: Any
    ) -> pb.SubscriptionDescription:
        async with faults.told(context):
            name = TopicName.parse(request.topic)
            if await self._parts.is_partitioned(name):
                return await self._describe(name, request.subscription)
            return describe.find_subscription(name, [await self._parts.here(name)], request.subscription)[0]

    async def DeleteSubscription(
        self, request: pb.DeleteSubscriptionRequest, context: Any
    ) -> pb.DeleteSubscriptionResponse:
        async with faults.told(context):
            if is_replication_slot(request.subscription) and is_forwarded(context):
                topic = await self._parts.topics.get(TopicName.parse(request.topic))
                await topic.unpin(request.subscription)
                return pb.DeleteSubscriptionResponse()
            check_unreserved(request.subscription)
            await self._parts.on_subscription(
                f"{SERVICE}DeleteSubscription", request, pb.DeleteSubscriptionResponse, _delete
            )
        return pb.DeleteSubscriptionResponse()

    async def SeekSubscription(
        self, request: pb.SeekSubscriptionRequest, context: Any
    ) -> pb.SubscriptionDescription:
        async with faults.told(context):
            name, position = TopicName.parse(request.topic), describe.position(request.position)
            if is_replication_slot(request.subscription) and is_forwarded(context):  # the leader's: only back
                topic = await self._parts.topics.get(name)
                await topic.rewind(request.subscription, position)
                return describe.subscription_description(topic, request.subscription)
            check_unreserved(request.subscription)
            if await self._parts.is_partitioned(name):
                _check_anywhere(name, position)
            parts = await self._parts.on_subscription(
                f"{SERVICE}SeekSubscription", request, pb.SubscriptionDescription, _seek
            )
            with faults.made(f"subscription {request.subscription} of topic {name} was moved"):
                return await self._together(name, parts)

    async def ConfigureSubscription(
        self, request: pb.ConfigureSubscriptionRequest, context: Any
    ) -> pb.SubscriptionDescription:
        async with faults.told(context):
            parts = await self._parts.on_subscription(
                f"{SERVICE}ConfigureSubscription", request, pb.SubscriptionDescription, _configure
            )
            with faults.made(f"subscription {request.subscription} of topic {request.topic} is configured"):
                return await self._together(TopicName.parse(request.topic), parts)

    async def _describe(self, name: TopicName, subscription: str) -> pb.SubscriptionDescription:
        """Of a partitioned topic."""
        parts = await self._parts.describe(await self._parts.names(name))
        return await self._together(name, describe.find_subscription(name, parts, subscription))

    async def _together(
        self, name: TopicName, parts: list[pb.SubscriptionDescription]
    ) -> pb.SubscriptionDescription:
        """One description: of a topic's only one, or of its partitions'."""
        is_partitioned = await self._parts.is_partitioned(name)
        return describe.whole_subscriptions(name, parts)[0] if is_partitioned else parts[0]


# -- what is done to one topic, where it is served -------------------------------------------------


async def _create(topic: Topic, request: pb.CreateSubscriptionRequest) -> pb.SubscriptionDescription:
    await topic.create_subscription(
        SubscribeOptions(
            subscription=request.subscription,
            type=describe.subscription_type(request.type),
            consumer_name="",
            start=describe.position(request.start),
        )
    )
    return describe.subscription_description(topic, request.subscription)


async def _delete(topic: Topic, request: pb.DeleteSubscriptionRequest) -> pb.DeleteSubscriptionResponse:
    await topic.unsubscribe(request.subscription)
    return pb.DeleteSubscriptionResponse()


async def _seek(topic: Topic, request: pb.SeekSubscriptionRequest) -> pb.SubscriptionDescription:
    await topic.seek(request.subscription, describe.position(request.position))
    return describe.subscription_description(topic, request.subscription)


async def _configure(topic: Topic, request: pb.ConfigureSubscriptionRequest) -> pb.SubscriptionDescription:
    subscription = describe.subscription_of(topic, request.subscription)
    if isinstance(subscription, NonReliableSubscription):
        raise TopicMismatch(f"topic {topic.name} is not reliable: nothing is delivered twice")
    if request.failure_policy.ListFields():
        policy = describe.changed_failure_policy(subscription.spec.failure_policy, request.failure_policy)
        await topic.set_failure_policy(request.subscription, policy)
    if request.HasField("max_unacked_messages"):
        await topic.set_max_unacked(request.subscription, request.max_unacked_messages)
    return describe.subscription_description(topic, request.subscription)


def _check_anywhere(name: TopicName, position: Position) -> None:
    """Raise MessageInvalid unless the position is one in every partition."""
    if isinstance(position, AtOffset):
        raise MessageInvalid(
            f"topic {name} is partitioned, and each partition has offsets of its own: name one of them, "
            f"such as {name.partition(0)}, or give a time"
        )
