"""The ``Streams`` service of the client port: Sava's own protocol, batch by batch. What happens on a stream
of two directions is in ``sessions``."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from typing import Any, Final

import grpc
from grpc import aio

from sava.api.messages import to_message
from sava.api.sessions import (
    MAX_CREDITS,
    DeliveryEncoder,
    PublishHandler,
    SubscribeHandler,
    opening,
)
from sava.peers import error_mapping
from sava.peers.forwarding import is_forwarded
from sava.proto import streams_pb2 as pb
from sava.proto import streams_pb2_grpc as rpc
from sava.records import RecordBatch
from sava.schemas.registry import SchemaRegistry
from sava.storage.topic_log import TopicLog
from sava.topics.errors import MessageInvalid, TopicMismatch
from sava.topics.names import TopicName, check_name
from sava.topics.producers import AccessMode, ProducerHandle
from sava.topics.served import ServedTopics
from sava.topics.specs import (
    EARLIEST,
    LATEST,
    AtOffset,
    AtTime,
    Position,
    SubscriptionType,
)
from sava.topics.topic import SubscribeOptions, Topic

READ_BYTES: Final = 1 << 20
MAX_READ_BYTES: Final = 16 << 20
MAX_EPOCH: Final = 1 << 62
"""Of a producer. Brokers give out far lower ones."""
LONGEST_WAIT_MS: Final = 30_000
"""For more than there was, in one call of Offsets."""

_ACCESS: Final = {pb.SHARED: AccessMode.SHARED, pb.EXCLUSIVE: AccessMode.EXCLUSIVE}
_RELIABLE: Final = {pb.ANY: None, pb.RELIABLE: True, pb.NON_RELIABLE: False}

Locate = Callable[[TopicName], Awaitable[tuple[int, str]]]
"""The broker that serves a topic: its id, and the address of its client port; 0 and nothing while none does.
Waits a little for a topic that was just created, or is on its way."""


class StreamsService(rpc.StreamsServicer):
    def __init__(
        self, topics: ServedTopics, *, schemas: SchemaRegistry, locate: Locate, store_url: str
    ) -> None:
        self._topics = topics
        self._schemas = schemas
        self._locate = locate
        self._store_url = store_url
        self._deliveries = DeliveryEncoder()

    def register(self, server: aio.Server) -> None:
        """As the generated code does, but for deliveries, which come encoded."""
        subscribe = grpc.stream_stream_rpc_method_handler(
            self.Subscribe, pb.SubscribeRequest.FromString, _serialize
        )
        name = pb.DESCRIPTOR.services_by_name["Streams"].full_name
        # The first handler that knows a method has it.
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(name, {"Subscribe": subscribe}),)
        )
        rpc.add_StreamsServicer_to_server(self, server)

    # grpc.aio also takes coroutines that read and write through the context; the stubs know generators only.
    async def Publish(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        async with error_mapping.told(context):
            producer = await self._open_producer(await opening(context))
            try:
                await PublishHandler(producer, context).run()
            finally:
                producer.close()

    async def _open_producer(self, request: pb.OpenProducer) -> ProducerHandle:
        name = TopicName.parse(request.topic)
        check_name(request.producer_name, "producer")
        topic = await self._topics.get_or_create(name, _known(_RELIABLE, request.delivery, "delivery"))
        return await topic.producers.open(
            request.producer_name,
            access=_known(_ACCESS, request.access_mode, "access mode"),
            schema_subject=request.schema_subject,
            takeover=True,
            presented=_epoch(request),
            is_generated=request.is_name_generated,
        )

    async def Subscribe(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        async with error_mapping.told(context):
            first = await opening(context)
            topic = await self._topics.get(TopicName.parse(first.topic))
            consumer = await topic.subscribe(_subscribe_options(first))
            try:
                await SubscribeHandler(topic, consumer, self._deliveries, context).run()
            finally:
                consumer.close()

    async def Read(self, request: pb.ReadRequest, context: Any) -> None:  # type: ignore[override]
        async with error_mapping.told(context):
            topic = await self._topics.get(TopicName.parse(request.topic))
            log = _log_of(topic)
            start = await topic.resolve(_position(request.start))
            end = request.end if request.HasField("end") else None
            size = min(request.max_bytes or READ_BYTES, MAX_READ_BYTES)
            while end is None or start < end:
                await log.wait_beyond(start)
                batches = []
                async with aclosing(log.read(start, end, max_bytes=size)) as stream:
                    async for batch in stream:
                        batches.append(batch.to_bytes())
                        start = batch.next_offset
                await context.write(pb.ReadResponse(batches=batches, next_offset=log.next_offset))

    async def LookUp(self, request: pb.LookUpRequest, context: Any) -> pb.LookUpResponse:
        async with error_mapping.told(context):
            name = TopicName.parse(request.topic)
            if request.create:
                await self._topics.ensure(name, _known(_RELIABLE, request.delivery, "delivery"))
            spec = await self._topics.registry.need(name)
            response = pb.LookUpResponse(
                topic=str(name),
                reliable=spec.reliable,
                partition_count=spec.partitions,
                schema_subject=self._topics.schema_subject(name),
            )
            partitions = await self._topics.registry.partitions(name)
            places = await asyncio.gather(*map(self._locate, partitions))
            for partition, (broker, address) in zip(partitions, places, strict=True):
                response.partitions.add(topic=str(partition), broker_id=broker, address=address)
        return response

    async def Offsets(self, request: pb.OffsetsRequest, context: Any) -> pb.OffsetsResponse:
        async with error_mapping.told(context):
            topic = await self._topics.get(TopicName.parse(request.topic))
            log = _log_of(topic)
            if request.HasField("beyond"):
                await _grown(log, request, context)
            offset = log.next_offset
            if request.HasField("publish_time"):
                offset = await log.offset_at(request.publish_time)
            return pb.OffsetsResponse(
                start_offset=log.start_offset,
                next_offset=log.next_offset,
                stored_offset=log.stored_offset,
                offset=offset,
                epoch=log.epoch,
            )

    async def Segments(self, request: pb.SegmentsRequest, context: Any) -> pb.SegmentsResponse:
        async with error_mapping.told(context):
            topic = await self._topics.get(TopicName.parse(request.topic))
            log = _log_of(topic)
            segments = await log.segments(request.from_offset)
            return pb.SegmentsResponse(
                segments=[
                    to_message(pb.Segment, segment, start_offset=segment.start, end_offset=segment.end)
                    for segment in segments[: request.limit or None]
                ],
                store_url=self._store_url,
                start_offset=log.start_offset,
                stored_offset=log.stored_offset,
                next_offset=log.next_offset,
            )

    async def Schema(self, request: pb.SchemaRequest, context: Any) -> pb.SchemaResponse:
        async with error_mapping.told(context):
            if request.version:
                found = await self._schemas.get_version(request.subject, request.version)
            else:
                found = await self._schemas.latest(request.subject)
        return to_message(pb.SchemaResponse, found)

    async def ListTopics(self, request: pb.ListTopicsRequest, context: Any) -> pb.ListTopicsResponse:
        """From what this node knows, once it knows anything: programs ask again and again."""
        async with error_mapping.told(context):
            await self._topics.ready()
            if request.namespace:
                await self._topics.namespaces.policy(check_name(request.namespace, "namespace"))
            found = self._topics.registry.list_local(request.namespace or None)
        return pb.ListTopicsResponse(
            topics=[
                pb.ListedTopic(topic=str(name), reliable=spec.reliable, partition_count=spec.partitions)
                for name, spec in sorted(found.items())
                if name.head == name
            ]
        )

    async def Advance(self, request: pb.AdvanceRequest, context: Any) -> pb.AdvanceResponse:
        async with error_mapping.told(context):
            topic = await self._topics.get(TopicName.parse(request.topic))
            await topic.reliable.advance(request.subscription, request.offset)
        return pb.AdvanceResponse()

    async def Append(self, request: pb.AppendRequest, context: Any) -> pb.AppendResponse:
        """What other brokers have for a topic; a client has no such right, since it would go around who
        publishes and whether the topic's schema lets it."""
        async with error_mapping.told(context):
            if not is_forwarded(context):
                raise MessageInvalid("Append is for brokers: clients publish")
            topic = await self._topics.get(TopicName.parse(request.topic))
            await topic.append(RecordBatch.parse(request.batch).verify())
        return pb.AppendResponse()


async def _grown(log: TopicLog, request: pb.OffsetsRequest, context: Any) -> None:
    """Until there is more than the caller knows of, or it has waited long enough. Raises TopicClosed when the
    topic leaves this broker."""
    wait_s = min(request.wait_ms, LONGEST_WAIT_MS) / 1000
    with suppress(TimeoutError):
        async with asyncio.timeout(min(wait_s, error_mapping.remaining(context, wait_s))):
            await log.wait_beyond(request.beyond)


def _epoch(request: pb.OpenProducer) -> int:
    """That the producer presents. The topic's record keeps it, and what it gives out next is beyond it: a
    number near the end of the range would leave none."""
    if request.producer_epoch >= MAX_EPOCH:
        raise MessageInvalid(f"producer_epoch {request.producer_epoch} is not a number that a broker gave")
    return request.producer_epoch


def _log_of(topic: Topic) -> TopicLog:
    if topic.log is None:
        raise TopicMismatch(f"topic {topic.name} is non-reliable: its messages are not kept")
    return topic.log


def _subscribe_options(request: pb.OpenConsumer) -> SubscribeOptions:
    try:
        kind = SubscriptionType(request.type)
    except ValueError:
        raise MessageInvalid(f"subscription type {request.type} does not exist") from None
    return SubscribeOptions(
        subscription=check_name(request.subscription, "subscription"),
        type=kind,
        consumer_name=check_name(request.consumer_name, "consumer"),
        key_filters=tuple(request.key_filters),
        start=_position(request.start, default=LATEST),
        credits=min(request.credits, MAX_CREDITS),
    )


def _position(position: pb.Position, *, default: Position = EARLIEST) -> Position:
    match position.WhichOneof("kind"):
        case "earliest":
            return EARLIEST
        case "latest":
            return LATEST
        case "offset":
            return AtOffset(position.offset)
        case "publish_time":
            return AtTime(position.publish_time)
        case _:
            return default


def _serialize(response: pb.SubscribeResponse | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()


def _known(table: dict[Any, Any], value: int, what: str) -> Any:
    try:
        return table[value]
    except KeyError:
        raise MessageInvalid(f"{what} {value} does not exist") from None
