"""The services ``Namespaces``, ``Topics`` and ``Subscriptions`` of the admin port: what operators ask for.

A translation: what a call means is in ``sava.broker``. A partitioned topic is asked for by its own name, and
what is said or done then is said of, or done to, all its partitions. A change that has to be made in several
of them and fails on the way can be repeated: what is done already is left as it is.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from typing import Any, Final

from sava.broker import ownership, specs
from sava.broker.errors import (
    MessageInvalid,
    NamespaceExists,
    SubscriptionExists,
    SubscriptionUnknown,
    TopicExists,
    TopicMismatch,
)
from sava.broker.limits import combine, configured
from sava.broker.names import TopicName, check_name
from sava.broker.non_reliable import NonReliableSubscription
from sava.broker.position import AtOffset
from sava.broker.specs import NamespacePolicy
from sava.broker.topic import SubscribeOptions, Topic
from sava.broker.topic_schemas import TopicSchemas
from sava.broker.topics import Topics
from sava.config import Policies
from sava.metadata.store import MetadataStore
from sava.proto import topics_admin_pb2 as pb
from sava.proto import topics_admin_pb2_grpc as rpc
from sava.services import faults
from sava.services import topic_descriptions as describe

CREATOR: Final = "sava-admin"
"""The consumer that a subscription is created with; it is gone before anything is delivered."""


class NamespacesService(rpc.NamespacesServicer):
    def __init__(self, topics: Topics, policies: Policies) -> None:
        self._topics = topics
        self._namespaces = topics.namespaces
        self._configured = configured(policies)

    async def CreateNamespace(
        self, request: pb.CreateNamespaceRequest, context: Any
    ) -> pb.CreateNamespaceResponse:
        async with faults.told(context):
            try:
                await self._namespaces.create(request.namespace, describe.policy_from(request.policy))
            except NamespaceExists:
                return pb.CreateNamespaceResponse(already_existed=True)
        return pb.CreateNamespaceResponse()

    async def ListNamespaces(
        self, request: pb.ListNamespacesRequest, context: Any
    ) -> pb.ListNamespacesResponse:
        async with faults.told(context):
            return pb.ListNamespacesResponse(namespaces=await self._namespaces.list())

    async def DescribeNamespace(
        self, request: pb.DescribeNamespaceRequest, context: Any
    ) -> pb.NamespaceDescription:
        async with faults.told(context):
            return await self._describe(check_name(request.namespace, "namespace"))

    async def SetNamespacePolicy(
        self, request: pb.SetNamespacePolicyRequest, context: Any
    ) -> pb.NamespaceDescription:
        async with faults.told(context):
            namespace = check_name(request.namespace, "namespace")
            await self._namespaces.change_policy(
                namespace, lambda policy: describe.changed_policy(policy, request.policy, request.clear)
            )
            return await self._describe(namespace)

    async def DeleteNamespace(
        self, request: pb.DeleteNamespaceRequest, context: Any
    ) -> pb.DeleteNamespaceResponse:
        async with faults.told(context):
            await self._namespaces.delete(request.namespace)
        return pb.DeleteNamespaceResponse()

    async def _describe(self, namespace: str) -> pb.NamespaceDescription:
        policy = await self._namespaces.policy(namespace)
        topics = await self._topics.registry.list(namespace)
        return pb.NamespaceDescription(
            namespace=namespace,
            policy=describe.policy_message(policy),
            effective_policy=describe.policy_message(combine((policy, self._configured))),
            topics=sum(_part_of(name, topics) is None for name in topics),
        )


class TopicsService(rpc.TopicsServicer):
    def __init__(self, topics: Topics, store: MetadataStore) -> None:
        self._topics = topics
        self._registry = topics.registry
        self._store = store
        self._schemas = TopicSchemas(store)

    async def CreateTopic(self, request: pb.CreateTopicRequest, context: Any) -> pb.TopicDescription:
        async with faults.told(context):
            name = TopicName.parse(request.name)
            try:
                await self._topics.create(
                    name,
                    reliable=request.reliable,
                    partitions=request.partitions,
                    schema_subject=request.schema_subject,
                )
            except TopicExists:
                if not request.if_absent:
                    raise
                await self._check_same(name, request)
            return await self._describe(name)

    async def _check_same(self, name: TopicName, request: pb.CreateTopicRequest) -> None:
        """Raises TopicMismatch unless the topic that exists is what was to be created."""
        spec = (await self._registry.locate(name)).spec
        schema = await self._schemas.get(name) if request.schema_subject else None
        subject = schema.subject if schema is not None else ""
        asked = (request.reliable, request.partitions, request.schema_subject)
        if asked != (spec.reliable, spec.partitions, subject):
            spread = f"{spec.partitions} partitions" if spec.partitions else "no partitions"
            follows = f", schema {subject or 'none'}" if request.schema_subject else ""
            raise TopicMismatch(
                f"topic {name} exists already and is another: {describe.delivery(spec)}, {spread}{follows}"
            )

    async def ListTopics(self, request: pb.ListTopicsRequest, context: Any) -> pb.ListTopicsResponse:
        async with faults.told(context):
            if request.namespace:
                await self._topics.namespaces.policy(check_name(request.namespace, "namespace"))
            topics = await self._registry.list(request.namespace or None)
        owners = {name: ownership.owner_of(self._store, name) for name in topics}
        response = pb.ListTopicsResponse()
        for name in sorted(topics, key=lambda name: name.partition_of or (name, -1)):
            spec, part = topics[name], _part_of(name, topics)
            response.topics.add(
                name=str(name),
                broker_id=describe.common_owner(owners.get(each, 0) for each in _members(name, spec)),
                delivery=describe.delivery(spec),
                partitions=spec.partitions,
                partition_of=str(part) if part is not None else "",
            )
        return response

    async def DescribeTopic(self, request: pb.DescribeTopicRequest, context: Any) -> pb.TopicDescription:
        async with faults.told(context):
            return await self._describe(TopicName.parse(request.name))

    async def DeleteTopic(self, request: pb.DeleteTopicRequest, context: Any) -> pb.DeleteTopicResponse:
        async with faults.told(context):
            await self._topics.delete(TopicName.parse(request.name))
        return pb.DeleteTopicResponse()

    async def GrowTopic(self, request: pb.GrowTopicRequest, context: Any) -> pb.TopicDescription:
        async with faults.told(context):
            name = TopicName.parse(request.name)
            await self._registry.grow(name, request.partitions)
            return await self._describe(name)

    async def SetTopicPolicy(self, request: pb.SetTopicPolicyRequest, context: Any) -> pb.TopicDescription:
        async with faults.told(context):
            name = TopicName.parse(request.name)
            await self._registry.change_policy(
                name, lambda policy: describe.changed_policy(policy, request.policy, request.clear)
            )
            return await self._describe(name)

    async def _describe(self, name: TopicName) -> pb.TopicDescription:
        spec = await self._registry.need(name)
        broker = self._topics.broker
        if spec.partitions:
            parts = [
                describe.topic_description(await self._topics.get(partition), broker)
                for partition in await self._registry.partitions(name)
            ]
            described = describe.whole_topic(name, spec, parts)
        else:
            described = describe.topic_description(await self._topics.get(name), broker)
        schema = await self._schemas.get(name)
        if schema is not None:
            described.schema_subject = schema.subject
            described.validation_policy = schema.policy.value
        described.policy.CopyFrom(describe.policy_message(await self._policy(name)))
        described.effective_policy.CopyFrom(describe.policy_message(self._topics.limits.of(name)))
        return described

    async def _policy(self, name: TopicName) -> NamespacePolicy:
        """What was set for the topic itself."""
        kv = await self._store.get(specs.policy_key(name))
        return specs.decode(kv, NamespacePolicy) if kv is not None else NamespacePolicy()


class SubscriptionsService(rpc.SubscriptionsServicer):
    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    async def CreateSubscription(
        self, request: pb.CreateSubscriptionRequest, context: Any
    ) -> pb.SubscriptionDescription:
        async with faults.told(context):
            name = TopicName.parse(request.topic)
            options = SubscribeOptions(
                subscription=check_name(request.subscription, "subscription"),
                type=describe.subscription_type(request.type),
                consumer_name=CREATOR,
                start=describe.position(request.start),
            )
            topics = await self._partitions(name)
            missing = [topic for topic in topics if request.subscription not in topic.subscriptions]
            if not missing:
                raise SubscriptionExists(f"topic {name} has a subscription {request.subscription} already")
            if isinstance(options.start, AtOffset):
                _check_single(name, topics)
            for topic in missing:
                if not topic.spec.reliable:
                    raise TopicMismatch(
                        f"topic {name} is not reliable: its subscriptions last as long as their consumers"
                    )
                (await topic.subscribe(options)).close()
            return await self._describe(name, request.subscription)

    async def DescribeSubscription(
        self, request: pb.DescribeSubscriptionRequest, context: Any
    ) -> pb.SubscriptionDescription:
        async with faults.told(context):
            return await self._describe(TopicName.parse(request.topic), request.subscription)

    async def DeleteSubscription(
        self, request: pb.DeleteSubscriptionRequest, context: Any
    ) -> pb.DeleteSubscriptionResponse:
        async with faults.told(context):
            for topic in await self._having(TopicName.parse(request.topic), request.subscription):
                await topic.unsubscribe(request.subscription)
        return pb.DeleteSubscriptionResponse()

    async def SeekSubscription(
        self, request: pb.SeekSubscriptionRequest, context: Any
    ) -> pb.SubscriptionDescription:
        async with faults.told(context):
            name = TopicName.parse(request.topic)
            position = describe.position(request.position)
            topics = await self._having(name, request.subscription)
            if isinstance(position, AtOffset):
                _check_single(name, topics)
            for topic in topics:
                await topic.seek(request.subscription, position)
            return await self._describe(name, request.subscription)

    async def ConfigureSubscription(
        self, request: pb.ConfigureSubscriptionRequest, context: Any
    ) -> pb.SubscriptionDescription:
        async with faults.told(context):
            name = TopicName.parse(request.topic)
            for topic in await self._having(name, request.subscription):
                await _configure(topic, request)
            return await self._describe(name, request.subscription)

    async def _describe(self, name: TopicName, subscription: str) -> pb.SubscriptionDescription:
        found = [
            described
            for topic in await self._having(name, subscription)
            for described in describe.subscription_descriptions(topic)
            if described.subscription == subscription
        ]
        if (await self._topics.registry.need(name)).partitions:
            found = describe.whole_subscriptions(name, found)
        return found[0]

    async def _partitions(self, name: TopicName) -> list[Topic]:
        """The partitions, loaded; the topic itself if it has none. Raises TopicUnknown."""
        await self._topics.registry.need(name)
        return [await self._topics.get(each) for each in await self._topics.registry.partitions(name)]

    async def _having(self, name: TopicName, subscription: str) -> list[Topic]:
        """Those that have the subscription, at least one: a partition that was added later has it when the
        first consumer comes."""
        having = [topic for topic in await self._partitions(name) if subscription in topic.subscriptions]
        if not having:
            raise SubscriptionUnknown(name, subscription)
        return having


async def _configure(topic: Topic, request: pb.ConfigureSubscriptionRequest) -> None:
    subscription = topic.subscriptions[request.subscription]
    if isinstance(subscription, NonReliableSubscription):
        raise TopicMismatch(f"topic {topic.name} is not reliable: nothing is delivered twice")
    if request.failure_policy.ListFields():
        policy = describe.changed_failure_policy(subscription.spec.failure_policy, request.failure_policy)
        await topic.set_failure_policy(request.subscription, policy)
    if request.HasField("max_unacked_messages"):
        await topic.set_max_unacked(request.subscription, request.max_unacked_messages)


def _check_single(name: TopicName, topics: list[Topic]) -> None:
    if topics[0].name != name:
        raise MessageInvalid(
            f"topic {name} is partitioned, and each partition has offsets of its own: name one of them, "
            f"such as {topics[0].name}, or give a time"
        )


def _members(name: TopicName, spec: specs.TopicSpec) -> list[TopicName]:
    return [name.partition(index) for index in range(spec.partitions)] or [name]


def _part_of(name: TopicName, topics: dict[TopicName, specs.TopicSpec]) -> TopicName | None:
    """The partitioned topic that it is a part of."""
    part = name.partition_of
    return part[0] if part is not None and part[0] in topics else None
