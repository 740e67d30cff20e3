"""``NamespaceAdmin`` and ``TopicAdmin``: namespaces, topics and subscriptions, whichever brokers have them.
Settings take effect when the call returns.

Failure policy and dispatch configuration can be set before their subscription exists, as Danube's tools do
right after they have created a topic: the settings wait in the metadata store and are applied when the first
consumer creates the subscription.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

from sava.api.admin.descriptions import (
    MAX_MS,
    Partitions,
    common_owner,
    delivery,
    subscription_names,
)
from sava.api.admin.topics import Unloading
from sava.api.danube.admin import broker_id
from sava.api.danube.wire import required, told, topic_name
from sava.errors import HostError
from sava.proto import danube_admin_pb2 as pb
from sava.proto import danube_admin_pb2_grpc as rpc
from sava.proto.topics_admin_pb2 import TopicDescription
from sava.schemas.registry import SchemaRegistry
from sava.topics.errors import MessageInvalid
from sava.topics.names import TopicName
from sava.topics.rules import TopicSchemas
from sava.topics.served import ServedTopics
from sava.topics.specs import (
    DeadLetterPolicy,
    FailurePolicy,
    RedeliveryBackoff,
    TopicSpec,
)
from sava.topics.subscription import Subscription
from sava.topics.topic import Topic

# ruff: noqa: N802 (gRPC names the methods)


NO_TOPIC: Final = "."
"""A name that no topic can have, hence one that has no policy of its own."""


class NamespaceAdmin(rpc.NamespaceAdminServicer):
    def __init__(self, topics: ServedTopics) -> None:
        self._namespaces = topics.namespaces
        self._registry = topics.registry
        self._limits = topics.limits

    @told
    async def GetNamespaceTopics(self, request: pb.NamespaceRequest, context: Any) -> pb.TopicListResponse:
        """As Danube counts them: the partitions, not the topic that they are of."""
        await self._namespaces.policy(required(request.name, "name"))
        topics = await self._registry.list(request.name)
        return pb.TopicListResponse(
            topics=[str(name) for name, spec in topics.items() if not spec.partitions]
        )

    @told
    async def GetNamespacePolicies(self, request: pb.NamespaceRequest, context: Any) -> pb.PolicyResponse:
        """What holds for topics that have no policy of their own; 0: no limit."""
        await self._namespaces.policy(required(request.name, "name"))
        effective = self._limits.of(TopicName(request.name, NO_TOPIC))
        return pb.PolicyResponse(policies=msgspec.json.encode(effective._asdict()).decode())

    @told
    async def CreateNamespace(self, request: pb.NamespaceRequest, context: Any) -> pb.NamespaceResponse:
        await self._namespaces.create(required(request.name, "name"))
        return pb.NamespaceResponse(success=True)

    @told
    async def DeleteNamespace(self, request: pb.NamespaceRequest, context: Any) -> pb.NamespaceResponse:
        await self._namespaces.delete(required(request.name, "name"))
        return pb.NamespaceResponse(success=True)


# -- topics ----------------------------------------------------------------------------------------


SERVICE: Final = "/danube_admin.TopicAdmin/"

_BACKOFF: Final = {pb.Fixed: RedeliveryBackoff.FIXED, pb.Exponential: RedeliveryBackoff.EXPONENTIAL}
_POISON: Final = {
    pb.DeadLetter: DeadLetterPolicy.DEAD_LETTER,
    pb.Block: DeadLetterPolicy.BLOCK,
    pb.Drop: DeadLetterPolicy.DROP,
}
_BACKOFF_NUMBERS: Final = {backoff: number for number, backoff in _BACKOFF.items()}
_POISON_NUMBERS: Final = {poison: number for number, poison in _POISON.items()}


class UnloadFailed(HostError):
    """The topic could not be handed over; its owner keeps it. Says why."""


class TopicAdmin(rpc.TopicAdminServicer):
    def __init__(
        self, parts: Partitions, unloading: Unloading, schemas: SchemaRegistry, topic_schemas: TopicSchemas
    ) -> None:
        self._parts = parts
        self._unloading = unloading
        self._topics = parts.topics
        self._view = parts.view
        self._schemas = schemas
        self._topic_schemas = topic_schemas

    # -- topics --------------------------------------------------------------------------------

    @told
    async def ListNamespaceTopics(
        self, request: pb.NamespaceRequest, context: Any
    ) -> pb.TopicInfoListResponse:
        """As Danube counts them: the partitions, not the topic that they are of."""
        await self._topics.namespaces.policy(required(request.name, "name"))
        topics = await self._topics.registry.list(request.name)
        return _listed(
            (name, spec, self._view.held(name).record.owner)
            for name, spec in topics.items()
            if not spec.partitions
        )

    @told
    async def ListBrokerTopics(self, request: pb.BrokerRequest, context: Any) -> pb.TopicInfoListResponse:
        broker = broker_id(request.broker_id)
        return _listed((entry.name, entry.spec, broker) for entry in self._view.owned_by(broker))

    @told
    async def CreateTopic(self, request: pb.NewTopicRequest, context: Any) -> pb.TopicResponse:
        subject = request.schema_subject if request.HasField("schema_subject") else ""
        await self._create(request.name, 0, request.dispatch_strategy, subject)
        return pb.TopicResponse(success=True)

    @told
    async def CreatePartitionedTopic(
        self, request: pb.PartitionedTopicRequest, context: Any
    ) -> pb.TopicResponse:
        if not request.partitions:
            raise MessageInvalid("partitions is missing: a partitioned topic has at least one")
        subject = request.schema_subject if request.HasField("schema_subject") else ""
        await self._create(request.base_name, request.partitions, request.dispatch_strategy, subject)
        return pb.TopicResponse(success=True)

    async def _create(self, text: str, partitions: int, strategy: int, subject: str) -> None:
        if strategy not in (pb.NonReliable, pb.Reliable):
            raise MessageInvalid(f"dispatch_strategy {strategy} is not one of NonReliable (0), Reliable (1)")
        await self._topics.create(
            topic_name(text),
            reliable=strategy == pb.Reliable,
            partitions=partitions,
            schema_subject=subject,
        )

    @told
    async def DeleteTopic(self, request: pb.TopicRequest, context: Any) -> pb.TopicResponse:
        await self._topics.delete(topic_name(request.name))
        return pb.TopicResponse(success=True)

    @told
    async def UnloadTopic(self, request: pb.TopicRequest, context: Any) -> pb.TopicResponse:
        """To whichever broker suits best; of a partitioned topic all partitions. Answers when the new owner
        does."""
        async for move in self._unloading.unload(topic_name(request.name)):
            if move.error:
                raise UnloadFailed(f"topic {move.topic} was not moved: {move.error}")
        return pb.TopicResponse(success=True)

    @told
    async def DescribeTopic(self, request: pb.DescribeTopicRequest, context: Any) -> pb.DescribeTopicResponse:
        name = topic_name(request.name)
        spec = await self._topics.registry.need(name)
        parts = await self._parts.describe(await self._parts.names(name))
        response = pb.DescribeTopicResponse(
            name=str(name),
            broker_id=_owner_text(common_owner(part.broker_id for part in parts)),
            delivery=delivery(spec),
            subscriptions=_subscriptions_in(parts),
        )
        await self._describe_schema(name, response)
        return response

    async def _describe_schema(self, name: TopicName, response: pb.DescribeTopicResponse) -> None:
        schema = await self._topic_schemas.get(name)
        if schema is not None:
            subject = await self._schemas.subject(schema.subject)
            response.schema_subject = subject.subject
            response.schema_id = subject.schema_id
            response.schema_version = subject.latest
            response.schema_type = subject.type
            response.compatibility_mode = subject.mode.upper()

    # -- subscriptions -------------------------------------------------------------------------

    @told
    async def ListSubscriptions(self, request: pb.TopicRequest, context: Any) -> pb.SubscriptionListResponse:
        parts = await self._parts.describe(await self._parts.names(topic_name(request.name)))
        return pb.SubscriptionListResponse(subscriptions=_subscriptions_in(parts))

    @told
    async def Unsubscribe(self, request: pb.SubscriptionRequest, context: Any) -> pb.SubscriptionResponse:
        await self._parts.on_subscription(
            f"{SERVICE}Unsubscribe", request, pb.SubscriptionResponse, _unsubscribe
        )
        return pb.SubscriptionResponse(success=True)

    @told
    async def SetSubscriptionFailurePolicy(
        self, request: pb.SetSubscriptionFailurePolicyRequest, context: Any
    ) -> pb.SubscriptionResponse:
        if not request.HasField("failure_policy"):
            raise MessageInvalid("failure_policy is missing")
        policy_from(request.failure_policy)
        await self._parts.on_all(
            f"{SERVICE}SetSubscriptionFailurePolicy", request, pb.SubscriptionResponse, _set_failure_policy
        )
        return pb.SubscriptionResponse(success=True)

    @told
    async def GetSubscriptionFailurePolicy(
        self, request: pb.GetSubscriptionFailurePolicyRequest, context: Any
    ) -> pb.GetSubscriptionFailurePolicyResponse:
        """Of a partitioned topic, that of one partition: settings are made for all of them, also before the
        subscription exists."""
        found = await self._parts.on_subscription(
            f"{SERVICE}GetSubscriptionFailurePolicy",
            request,
            pb.GetSubscriptionFailurePolicyResponse,
            _get_failure_policy,
            or_all=True,
        )
        return found[0]

    @told
    async def SetSubscriptionDispatchConfig(
        self, request: pb.SetSubscriptionDispatchConfigRequest, context: Any
    ) -> pb.SubscriptionResponse:
        if not request.HasField("dispatch_config"):
            raise MessageInvalid("dispatch_config is missing")
        await self._parts.on_all(
            f"{SERVICE}SetSubscriptionDispatchConfig", request, pb.SubscriptionResponse, _set_dispatch_config
        )
        return pb.SubscriptionResponse(success=True)

    @told
    async def GetSubscriptionDispatchConfig(
        self, request: pb.GetSubscriptionDispatchConfigRequest, context: Any
    ) -> pb.GetSubscriptionDispatchConfigResponse:
        found = await self._parts.on_subscription(
            f"{SERVICE}GetSubscriptionDispatchConfig",
            request,
            pb.GetSubscriptionDispatchConfigResponse,
            _get_dispatch_config,
            or_all=True,
        )
        return found[0]


# -- what is done to one topic, where it is served -------------------------------------------------


async def _unsubscribe(topic: Topic, request: pb.SubscriptionRequest) -> pb.SubscriptionResponse:
    await topic.unsubscribe(request.subscription)
    return pb.SubscriptionResponse(success=True)


async def _set_failure_policy(
    topic: Topic, request: pb.SetSubscriptionFailurePolicyRequest
) -> pb.SubscriptionResponse:
    policy = policy_from(request.failure_policy)
    await topic.reliable.set_failure_policy(request.subscription, policy, ahead=True)
    return pb.SubscriptionResponse(success=True)


async def _get_failure_policy(
    topic: Topic, request: pb.GetSubscriptionFailurePolicyRequest
) -> pb.GetSubscriptionFailurePolicyResponse:
    response = pb.GetSubscriptionFailurePolicyResponse()
    subscription = topic.subscriptions.get(request.subscription)
    if subscription is None:
        policy = (await topic.settings_ahead(request.subscription)).failure_policy
    else:
        response.subscription_type = subscription.type
        policy = subscription.spec.failure_policy if isinstance(subscription, Subscription) else None
    if policy is not None:
        response.failure_policy.CopyFrom(policy_to(policy))
    return response


async def _set_dispatch_config(
    topic: Topic, request: pb.SetSubscriptionDispatchConfigRequest
) -> pb.SubscriptionResponse:
    count = request.dispatch_config.max_unacked_messages
    await topic.reliable.set_max_unacked(request.subscription, count, ahead=True)
    return pb.SubscriptionResponse(success=True)


async def _get_dispatch_config(
    topic: Topic, request: pb.GetSubscriptionDispatchConfigRequest
) -> pb.GetSubscriptionDispatchConfigResponse:
    response = pb.GetSubscriptionDispatchConfigResponse()
    subscription = topic.subscriptions.get(request.subscription)
    if subscription is None:
        count = (await topic.settings_ahead(request.subscription)).max_unacked_messages
    else:
        count = subscription.spec.max_unacked_messages if isinstance(subscription, Subscription) else None
    if count is not None:
        response.dispatch_config.max_unacked_messages = count
    return response


def _subscriptions_in(parts: Iterable[TopicDescription]) -> list[str]:
    """Those that any of them has."""
    return sorted({each for part in parts for each in subscription_names(part)})


def _listed(topics: Iterable[tuple[TopicName, TopicSpec, int]]) -> pb.TopicInfoListResponse:
    return pb.TopicInfoListResponse(
        topics=[
            pb.TopicInfo(name=str(name), broker_id=_owner_text(owner), delivery=delivery(spec))
            for name, spec, owner in sorted(topics, key=lambda item: item[0])
        ]
    )


def _owner_text(broker: int) -> str:
    return str(broker) if broker else ""


def policy_from(message: pb.SubscriptionFailurePolicy) -> FailurePolicy:
    """Raises MessageInvalid."""
    backoff = _BACKOFF.get(message.backoff_strategy)
    poison = _POISON.get(message.poison_policy)
    if backoff is None or poison is None:
        raise MessageInvalid(
            "failure_policy: backoff_strategy or poison_policy has a number that is not known"
        )
    for field in ("ack_timeout_ms", "base_redelivery_delay_ms", "max_redelivery_delay_ms"):
        if getattr(message, field) > MAX_MS:
            raise MessageInvalid(f"failure_policy: {field} {getattr(message, field)} is too long")
    dead_letter_topic = message.dead_letter_topic if message.HasField("dead_letter_topic") else ""
    if dead_letter_topic:
        topic_name(dead_letter_topic)
    return FailurePolicy(
        max_redelivery_count=message.max_redelivery_count,
        ack_timeout_ms=message.ack_timeout_ms,
        base_redelivery_delay_ms=message.base_redelivery_delay_ms,
        max_redelivery_delay_ms=message.max_redelivery_delay_ms,
        backoff=backoff,
        poison=poison,
        dead_letter_topic=dead_letter_topic,
    )


def policy_to(policy: FailurePolicy) -> pb.SubscriptionFailurePolicy:
    return pb.SubscriptionFailurePolicy(
        max_redelivery_count=policy.max_redelivery_count,
        ack_timeout_ms=policy.ack_timeout_ms,
        base_redelivery_delay_ms=policy.base_redelivery_delay_ms,
        max_redelivery_delay_ms=policy.max_redelivery_delay_ms,
        backoff_strategy=_BACKOFF_NUMBERS[policy.backoff],
        poison_policy=_POISON_NUMBERS[policy.poison],
        dead_letter_topic=policy.dead_letter_topic or None,
    )
