"""The service ``Replica`` of the client port: what other clusters need that replicate into this one.

Any broker answers what is known from the metadata store. A chain, and acks, are the business of the topic's
owner; calls for it are passed on to it as all calls about a topic are.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import sava
from sava.api import several
from sava.api.appending import Appending
from sava.api.sessions import opening, ranges_of
from sava.metadata.errors import NotInitialized
from sava.peers import faults
from sava.proto import replica_pb2 as pb
from sava.proto import replica_pb2_grpc as rpc
from sava.schemas.registry import SchemaRegistry
from sava.storage.source_positions import Origin
from sava.topics.chain import SourceCopier
from sava.topics.delivery import Range
from sava.topics.errors import (
    MessageInvalid,
    NamespaceUnknown,
    SubscriptionUnknown,
    TopicExists,
    TopicMismatch,
)
from sava.topics.names import TopicName, check_name
from sava.topics.origin_acks import OriginAcks
from sava.topics.specs import SubscriptionType, TopicSpec
from sava.topics.stretches import Source
from sava.topics.topic import Topic
from sava.topics.topics import ServedTopics

log = logging.getLogger(__name__)

MAX_DESCRIBED: Final = 1000
"""Topics in one call."""


class ReplicaService(rpc.ReplicaServicer):
    def __init__(
        self,
        topics: ServedTopics,
        *,
        schemas: SchemaRegistry,
        cluster_name: str,
        cluster_id: Callable[[], str],
    ) -> None:
        """``cluster_id``: empty while the cluster is not initialized."""
        self._topics = topics
        self._schemas = schemas
        self._cluster_name = cluster_name
        self._cluster_id = cluster_id

    async def Hello(self, request: pb.HelloRequest, context: Any) -> pb.HelloResponse:
        async with faults.told(context):
            cluster_id = self._cluster_id()
            if not cluster_id:
                raise NotInitialized("this broker is not part of a cluster yet")
        return pb.HelloResponse(
            cluster_name=self._cluster_name, cluster_id=cluster_id, version=sava.__version__
        )

    # -- topics ------------------------------------------------------------------------------

    async def DescribeTopics(
        self, request: pb.DescribeTopicsRequest, context: Any
    ) -> pb.DescribeTopicsResponse:
        async with faults.told(context):
            if len(request.topics) > MAX_DESCRIBED:
                raise MessageInvalid(f"{len(request.topics)} topics; one call describes {MAX_DESCRIBED}")
            await self._topics.ready()
            names = [_head(topic) for topic in request.topics]
            exist = {each: await self._exists(each) for each in {name.namespace for name in names}}
            shapes = [await self._shape(name, exist[name.namespace]) for name in names]
        return pb.DescribeTopicsResponse(topics=shapes)

    async def EnsureTopic(self, request: pb.EnsureTopicRequest, context: Any) -> pb.TopicShape:
        async with faults.told(context):
            name, count = _head(request.topic), request.partition_count
            await self._topics.ready()
            spec = await self._topics.registry.get(name)
            if spec is None:
                spec = await self._create(name, request)
            if request.grow and 0 < spec.partitions < count:
                log.info("replica: grown topic=%s partitions=%d by=%s", name, count, request.cluster_name)
                await self._topics.registry.grow(name, count)
            return await self._shape(name, await self._exists(name.namespace))

    async def _create(self, name: TopicName, request: pb.EnsureTopicRequest) -> TopicSpec:
        """Whoever is faster has created it; what it is then is for the caller to compare."""
        try:
            spec = await self._topics.create(
                name, reliable=request.reliable, partitions=request.partition_count
            )
        except TopicExists:
            return await self._topics.registry.need(name)
        except TopicMismatch:  # partitions of the other kind were added by somebody in between
            return await self._topics.registry.need(name)
        log.info("replica: created topic=%s partitions=%d by=%s", name, spec.partitions, request.cluster_name)
        return spec

    async def _exists(self, namespace: str) -> bool:
        """Linearizable: what this node knows of the namespace's topics afterwards is as new as this."""
        try:
            await self._topics.namespaces.policy(namespace)
        except NamespaceUnknown:
            return False
        return True

    async def _shape(self, name: TopicName, namespace_exists: bool) -> pb.TopicShape:
        registry = self._topics.registry
        shape = pb.TopicShape(topic=str(name), namespace_exists=namespace_exists)
        spec = await registry.get(name) if namespace_exists else None
        if spec is None:
            return shape
        shape.exists = True
        shape.partition_count, shape.reliable = spec.partitions, spec.reliable
        shape.schema_subject = self._topics.schema_subject(name)
        if not spec.partitions:
            shape.topic_ids.append(spec.topic_id)
        for index in range(spec.partitions):
            partition = await registry.get(name.partition(index))
            shape.topic_ids.append(partition.topic_id if partition is not None else 0)
            if partition is None:
                shape.missing.append(index)
        return shape

    async def EnsureSchema(self, request: pb.EnsureSchemaRequest, context: Any) -> pb.EnsureSchemaResponse:
        async with faults.told(context):
            found = await self._schemas.register(
                request.subject, request.type, request.definition, created_by="replication"
            )
            if request.topic:
                await self._topics.follow_subject(TopicName.parse(request.topic), request.subject)
        return pb.EnsureSchemaResponse(schema_id=found.schema_id, version=found.version)

    # -- messages and acks -------------------------------------------------------------------

    # grpc.aio also takes coroutines that read and write through the context; the stubs know generators only.
    async def Append(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        async with faults.told(context):
            await Appending(await self._chain(await opening(context)), context).run()

    async def AppendEach(self, request: pb.AppendEachRequest, context: Any) -> None:  # type: ignore[override]
        async with faults.told(context):
            await several.append_each(request, lambda each: self._chain(each.chain, each.topic_id), context)

    async def ReadEach(self, request: pb.ReadEachRequest, context: Any) -> None:  # type: ignore[override]
        async with faults.told(context):
            await several.read_each(self._topics, request, context)

    async def _chain(self, opening: pb.OpenChain, topic_id: int | None = None) -> SourceCopier:
        """``topic_id``: that the topic must have."""
        source = self._source(opening.source)
        topic = await self._topics.get(TopicName.parse(opening.topic))
        if topic_id not in (None, topic.topic_id):
            raise TopicMismatch(f"topic {topic.name} has id {topic.topic_id}; {topic_id} was a former one's")
        return await topic.open_chain(source)

    async def ApplyAcks(self, request: pb.ApplyAcksRequest, context: Any) -> pb.ApplyAcksResponse:
        async with faults.told(context):
            source = self._source(request.source)
            acks = [_origin_acks(each) for each in request.acks]
            try:
                kind = SubscriptionType(request.type)
            except ValueError:
                raise MessageInvalid(f"subscription type {request.type} does not exist") from None
            topic = await self._topics.get(TopicName.parse(request.topic))
            applied = await topic.apply_acks(
                check_name(request.subscription, "subscription"),
                kind,
                acks,
                source=source,
                own=self._own(topic),
                told=request.told,
                since=request.since,
            )
        return pb.ApplyAcksResponse(
            position=applied.position, left=map(_told, applied.left), told=applied.told
        )

    async def ReadAcks(self, request: pb.ReadAcksRequest, context: Any) -> pb.ReadAcksResponse:
        async with faults.told(context):
            topic = await self._topics.get(TopicName.parse(request.topic))
            try:
                found = await topic.read_acks(
                    request.subscription, ranges_of(request.known), self._own(topic)
                )
            except SubscriptionUnknown:
                return pb.ReadAcksResponse(exists=False, topic_id=topic.topic_id)
        return pb.ReadAcksResponse(
            exists=True,
            type=found.type,
            topic_id=topic.topic_id,
            acks=map(_told, found.acks),
            covered=_flat(found.covered),
            more=found.more,
        )

    def _own(self, topic: Topic) -> Origin:
        """As others call messages that are published to it."""
        return Source(self._cluster_name, self._cluster_id(), str(topic.name), topic.topic_id).origin

    def _source(self, source: pb.Source) -> Source:
        if not source.cluster_name or not source.cluster_id or not source.topic_id:
            raise MessageInvalid("a source is named by its cluster, the cluster's id and the topic's id")
        if source.cluster_name == self._cluster_name:
            raise MessageInvalid(
                f"the source is in a cluster of the same name as this one, {self._cluster_name!r}: its "
                "messages could not be told from this cluster's own; give one of them another cluster_name"
            )
        return Source(source.cluster_name, source.cluster_id, source.topic, source.topic_id)


def _head(text: str) -> TopicName:
    name = TopicName.parse(text)
    if name.head != name:
        raise MessageInvalid(f"topic {name} is named as a partition; ask for {name.head}")
    return name


def _origin_acks(acks: pb.OriginAcks) -> OriginAcks:
    return OriginAcks((acks.cluster_name, acks.topic), acks.cursor, ranges_of(acks.ranges))


def _told(acks: OriginAcks) -> pb.OriginAcks:
    cluster, topic = acks.origin
    return pb.OriginAcks(cluster_name=cluster, topic=topic, cursor=acks.cursor, ranges=_flat(acks.ranges))


def _flat(ranges: Sequence[Range]) -> list[int]:
    return [bound for each in ranges for bound in each]
