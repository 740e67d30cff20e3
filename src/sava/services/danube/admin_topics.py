"""``TopicAdmin``: topics and their subscriptions. Settings take effect when the call returns."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from sava.broker.errors import MessageInvalid, SubscriptionUnknown, TopicUnknown
from sava.broker.names import TopicName
from sava.broker.non_reliable import NonReliableSubscription
from sava.broker.specs import Backoff, FailurePolicy, Poison, TopicSpec
from sava.broker.subscription import Subscription
from sava.broker.topic import Topic
from sava.broker.topic_schemas import TopicSchemas
from sava.broker.topics import Topics
from sava.proto import danube_admin_pb2 as pb
from sava.proto import danube_admin_pb2_grpc as rpc
from sava.schemas.registry import SchemaRegistry
from sava.services.danube.admin_brokers import NEEDS_ANOTHER
from sava.services.danube.codes import required, told, topic_name, unimplemented

MAX_MS: Final = 1 << 40
"""Times that somebody can mean; longer ones would not fit where they are added up."""

_BACKOFF: Final = {pb.Fixed: Backoff.FIXED, pb.Exponential: Backoff.EXPONENTIAL}
_POISON: Final = {pb.DeadLetter: Poison.DEAD_LETTER, pb.Block: Poison.BLOCK, pb.Drop: Poison.DROP}
_BACKOFF_NUMBERS: Final = {backoff: number for number, backoff in _BACKOFF.items()}
_POISON_NUMBERS: Final = {poison: number for number, poison in _POISON.items()}


class TopicAdmin(rpc.TopicAdminServicer):
    def __init__(
        self, topics: Topics, schemas: SchemaRegistry, topic_schemas: TopicSchemas, broker_id: int
    ) -> None:
        self._topics = topics
        self._schemas = schemas
        self._topic_schemas = topic_schemas
        self._broker_id = str(broker_id)

    # -- topics --------------------------------------------------------------------------------

    @told
    async def ListNamespaceTopics(
        self, request: pb.NamespaceRequest, context: Any
    ) -> pb.TopicInfoListResponse:
        await self._topics.namespaces.policy(required(request.name, "name"))
        return self._listed((await self._topics.registry.list(request.name)).items())

    @told
    async def ListBrokerTopics(self, request: pb.BrokerRequest, context: Any) -> pb.TopicInfoListResponse:
        if request.broker_id != self._broker_id:
            return pb.TopicInfoListResponse()
        return self._listed((name, topic.spec) for name, topic in self._topics.loaded.items())

    def _listed(self, topics: Iterable[tuple[TopicName, TopicSpec]]) -> pb.TopicInfoListResponse:
        """As Danube counts them: the partitions, not the topic that they are of."""
        return pb.TopicInfoListResponse(
            topics=[
                pb.TopicInfo(name=str(name), broker_id=self._broker_id, delivery=_delivery(spec))
                for name, spec in sorted(topics, key=lambda item: item[0])
                if not spec.partitions
            ]
        )

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

    async def UnloadTopic(self, request: pb.TopicRequest, context: Any) -> pb.TopicResponse:
        await unimplemented(context, f"UnloadTopic: {NEEDS_ANOTHER}")

    @told
    async def DescribeTopic(self, request: pb.DescribeTopicRequest, context: Any) -> pb.DescribeTopicResponse:
        name = topic_name(request.name)
        spec = await self._topics.registry.need(name)
        response = pb.DescribeTopicResponse(
            name=str(name), broker_id=self._broker_id, delivery=_delivery(spec)
        )
        response.subscriptions.extend(await self._subscriptions_of(name))
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
        return pb.SubscriptionListResponse(
            subscriptions=await self._subscriptions_of(topic_name(request.name))
        )

    async def _subscriptions_of(self, name: TopicName) -> list[str]:
        """Of a partitioned topic: those that any partition has."""
        partitions = await self._topics.registry.partitions(name)
        if not partitions:
            raise TopicUnknown(name)
        return sorted({sub for each in partitions for sub in (await self._topics.get(each)).subscriptions})

    @told
    async def Unsubscribe(self, request: pb.SubscriptionRequest, context: Any) -> pb.SubscriptionResponse:
        for topic in await self._having(request.topic, request.subscription):
            await topic.unsubscribe(request.subscription)
        return pb.SubscriptionResponse(success=True)

    @told
    async def SetSubscriptionFailurePolicy(
        self, request: pb.SetSubscriptionFailurePolicyRequest, context: Any
    ) -> pb.SubscriptionResponse:
        if not request.HasField("failure_policy"):
            raise MessageInvalid("failure_policy is missing")
        policy = policy_from(request.failure_policy)
        for topic in await self._having(request.topic, request.subscription):
            await topic.set_failure_policy(request.subscription, policy)
        return pb.SubscriptionResponse(success=True)

    @told
    async def GetSubscriptionFailurePolicy(
        self, request: pb.GetSubscriptionFailurePolicyRequest, context: Any
    ) -> pb.GetSubscriptionFailurePolicyResponse:
        subscription = await self._first(request.topic, request.subscription)
        response = pb.GetSubscriptionFailurePolicyResponse(subscription_type=subscription.type)
        if isinstance(subscription, Subscription):
            response.failure_policy.CopyFrom(policy_to(subscription.spec.failure_policy))
        return response

    @told
    async def SetSubscriptionDispatchConfig(
        self, request: pb.SetSubscriptionDispatchConfigRequest, context: Any
    ) -> pb.SubscriptionResponse:
        if not request.HasField("dispatch_config"):
            raise MessageInvalid("dispatch_config is missing")
        for topic in await self._having(request.topic, request.subscription):
            await topic.set_max_unacked(request.subscription, request.dispatch_config.max_unacked_messages)
        return pb.SubscriptionResponse(success=True)

    @told
    async def GetSubscriptionDispatchConfig(
        self, request: pb.GetSubscriptionDispatchConfigRequest, context: Any
    ) -> pb.GetSubscriptionDispatchConfigResponse:
        subscription = await self._first(request.topic, request.subscription)
        response = pb.GetSubscriptionDispatchConfigResponse()
        if isinstance(subscription, Subscription):
            response.dispatch_config.max_unacked_messages = subscription.spec.max_unacked_messages
        return response

    async def _first(self, text: str, subscription: str) -> Subscription | NonReliableSubscription:
        """Of a partitioned topic, that of one partition: settings are made for all of them."""
        return (await self._having(text, subscription))[0].subscriptions[subscription]

    async def _having(self, text: str, subscription: str) -> list[Topic]:
        """The topic, or those partitions of it, that have the subscription: at least one."""
        name = topic_name(text)
        partitions = await self._topics.registry.partitions(name)
        if not partitions:
            raise TopicUnknown(name)
        topics = [await self._topics.get(each) for each in partitions]
        having = [topic for topic in topics if subscription in topic.subscriptions]
        if not having:
            raise SubscriptionUnknown(name, subscription)
        return having


def _delivery(spec: TopicSpec) -> str:
    return "Reliable" if spec.reliable else "NonReliable"


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
