"""The services ``Namespaces`` and ``ServedTopics`` of the admin port: what operators ask for.

A translation: what a call means is in ``sava.topics``. Any broker answers. A partitioned topic is asked for
by its own name, and what is said or done then is said of, or done to, all its partitions, wherever they are
(``topic_parts``). A change that has to be made in several of them and fails on the way can be repeated: what
is done already is left as it is.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from sava.api import topic_descriptions as describe
from sava.api.topic_parts import TopicParts
from sava.api.unloading import Unloading
from sava.config import Policies
from sava.metadata.store import MetadataStore
from sava.peers import faults, relays
from sava.proto import topics_admin_pb2 as pb
from sava.proto import topics_admin_pb2_grpc as rpc
from sava.topics import specs
from sava.topics.errors import NamespaceExists, TopicExists, TopicMismatch
from sava.topics.limits import combine, configured
from sava.topics.names import TopicName, check_name
from sava.topics.specs import NamespacePolicy
from sava.topics.topic_schemas import TopicSchemas
from sava.topics.topics import ServedTopics


class NamespacesService(rpc.NamespacesServicer):
    def __init__(self, topics: ServedTopics, policies: Policies) -> None:
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
            with faults.made(f"the policy of namespace {namespace} is changed"):
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
    def __init__(self, parts: TopicParts, unloading: Unloading, store: MetadataStore) -> None:
        self._parts = parts
        self._unloading = unloading
        self._topics = parts.topics
        self._registry = parts.topics.registry
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
            with faults.made(f"topic {name} exists now"):
                return await self._describe_new(name)

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
        response = pb.ListTopicsResponse()
        for name in sorted(topics, key=lambda name: name.partition_of or (name, -1)):
            spec, part = topics[name], _part_of(name, topics)
            records = [self._parts.view.held(each).record for each in describe.members(name, spec)]
            response.topics.add(
                name=str(name),
                broker_id=describe.common_owner(record.owner for record in records),
                delivery=describe.delivery(spec),
                partitions=spec.partitions,
                partition_of=str(part) if part is not None else "",
                state=describe.together(record.state.value for record in records),
                epoch=None if spec.partitions else records[0].epoch,
            )
        return response

    async def DescribeTopic(self, request: pb.DescribeTopicRequest, context: Any) -> pb.TopicDescription:
        """Asked by another broker it answers only for what it has itself, or what nobody has."""
        async with faults.told(context):
            name = TopicName.parse(request.name)
            if relays.is_forwarded(context) and not await self._parts.is_partitioned(name):
                return await self._complete(name, await self._parts.here(name))
            return await self._describe(name)

    async def DeleteTopic(self, request: pb.DeleteTopicRequest, context: Any) -> pb.DeleteTopicResponse:
        async with faults.told(context):
            await self._topics.delete(TopicName.parse(request.name))
        return pb.DeleteTopicResponse()

    async def GrowTopic(self, request: pb.GrowTopicRequest, context: Any) -> pb.TopicDescription:
        async with faults.told(context):
            name = TopicName.parse(request.name)
            await self._registry.grow(name, request.partitions)
            with faults.made(f"topic {name} has {request.partitions} partitions now"):
                return await self._describe_new(name)

    async def SetTopicPolicy(self, request: pb.SetTopicPolicyRequest, context: Any) -> pb.TopicDescription:
        async with faults.told(context):
            name = TopicName.parse(request.name)
            await self._registry.change_policy(
                name, lambda policy: describe.changed_policy(policy, request.policy, request.clear)
            )
            with faults.made(f"the policy of topic {name} is changed"):
                return await self._describe(name)

    async def UnloadTopic(self, request: pb.UnloadTopicRequest, context: Any) -> AsyncIterator[pb.TopicMove]:
        async with faults.told(context):
            moves = self._unloading.unload(
                TopicName.parse(request.name), target=request.to_broker_id, timeout_ms=request.timeout_ms
            )
            async with aclosing(moves):
                async for move in moves:
                    yield move

    async def _describe_new(self, name: TopicName) -> pb.TopicDescription:
        await self._parts.settle(await self._parts.names(name))
        return await self._describe(name)

    async def _describe(self, name: TopicName) -> pb.TopicDescription:
        """By its owner, or owners."""
        spec = await self._registry.need(name)
        described = await self._parts.describe(describe.members(name, spec))
        whole = describe.whole_topic(name, spec, described) if spec.partitions else described[0]
        return await self._complete(name, whole)

    async def _complete(self, name: TopicName, described: pb.TopicDescription) -> pb.TopicDescription:
        """With what the metadata store knows besides."""
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


def _part_of(name: TopicName, topics: dict[TopicName, specs.TopicSpec]) -> TopicName | None:
    """The partitioned topic that it is a part of."""
    part = name.partition_of
    return part[0] if part is not None and part[0] in topics else None
