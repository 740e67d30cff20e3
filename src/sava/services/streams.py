"""The ``Streams`` service of the client port: Sava's own protocol, batch by batch.

A stream has two directions that must not wait for each other: while the broker waits for the disk, the client
goes on sending, and while a consumer's acks come in, deliveries go out. So each stream has a reader and a
writer. What may be under way is bounded on both sides: unanswered batches by ``MAX_UNANSWERED`` (the broker
stops reading), deliveries by the consumer's credits.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Final, NoReturn

import grpc
from grpc import aio

from sava.broker.consumer import Consumer
from sava.broker.delivery import Range
from sava.broker.errors import MessageInvalid, NotOwner, TopicMismatch
from sava.broker.names import TopicName, check_name
from sava.broker.position import EARLIEST, LATEST, AtOffset, AtTime, Position
from sava.broker.producers import AccessMode, Producer
from sava.broker.specs import SubscriptionType
from sava.broker.topic import SubscribeOptions, Topic
from sava.broker.topics import Topics
from sava.proto import streams_pb2 as pb
from sava.proto import streams_pb2_grpc as rpc
from sava.records import Header, RecordBatch
from sava.schemas.registry import SchemaRegistry
from sava.services import faults
from sava.services.deliveries import Deliveries
from sava.services.relays import is_forwarded
from sava.storage.topic_log import TopicLog

EOF: Final[Any] = vars(aio)["EOF"]  # the type stubs do not know it
MAX_UNANSWERED: Final = 64
"""Batches of one producer whose outcome is open. Clients keep fewer."""
READ_BYTES: Final = 1 << 20
MAX_READ_BYTES: Final = 16 << 20
MAX_CREDITS: Final = 1_000_000
GOODBYE_S: Final = 1.0
"""For a client to close a stream that can go on elsewhere."""

_ACCESS: Final = {pb.SHARED: AccessMode.SHARED, pb.EXCLUSIVE: AccessMode.EXCLUSIVE}
_RELIABLE: Final = {pb.ANY: None, pb.RELIABLE: True, pb.NON_RELIABLE: False}

Locate = Callable[[TopicName], Awaitable[tuple[int, str]]]
"""Who serves a topic: the broker's id, and the address of its client port; 0 and nothing while nobody does.
Waits a little for a topic that was just created, or is on its way."""


class StreamsService(rpc.StreamsServicer):
    def __init__(self, topics: Topics, *, schemas: SchemaRegistry, locate: Locate, store_url: str) -> None:
        self._topics = topics
        self._schemas = schemas
        self._locate = locate
        self._store_url = store_url
        self._deliveries = Deliveries()

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
        async with faults.told(context):
            first = await _first(context, "open")
            producer = await self._open_producer(first.open)
            try:
                await _Publishing(producer, context).run()
            finally:
                producer.close()

    async def _open_producer(self, request: pb.OpenProducer) -> Producer:
        name = TopicName.parse(request.topic)
        check_name(request.producer_name, "producer")
        topic = await self._topics.get_or_create(name, _known(_RELIABLE, request.delivery, "delivery"))
        return await topic.open_producer(
            request.producer_name,
            access=_known(_ACCESS, request.access_mode, "access mode"),
            schema_subject=request.schema_subject,
            takeover=True,
        )

    async def Subscribe(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        async with faults.told(context):
            first = await _first(context, "open")
            topic = await self._topics.get(TopicName.parse(first.open.topic))
            consumer = await topic.subscribe(_subscribe_options(first.open))
            try:
                await _Subscribing(topic, consumer, self._deliveries, context).run()
            finally:
                consumer.close()

    async def Read(self, request: pb.ReadRequest, context: Any) -> None:  # type: ignore[override]
        async with faults.told(context):
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
        async with faults.told(context):
            name = TopicName.parse(request.topic)
            if request.create:
                await self._topics.ensure(name, _known(_RELIABLE, request.delivery, "delivery"))
            spec = await self._topics.registry.need(name)
            response = pb.LookUpResponse(
                topic=str(name), reliable=spec.reliable, partition_count=spec.partitions
            )
            partitions = await self._topics.registry.partitions(name)
            places = await asyncio.gather(*map(self._locate, partitions))
            for partition, (broker, address) in zip(partitions, places, strict=True):
                response.partitions.add(topic=str(partition), broker_id=broker, address=address)
        return response

    async def Offsets(self, request: pb.OffsetsRequest, context: Any) -> pb.OffsetsResponse:
        async with faults.told(context):
            topic = await self._topics.get(TopicName.parse(request.topic))
            log = _log_of(topic)
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
        async with faults.told(context):
            topic = await self._topics.get(TopicName.parse(request.topic))
            log = _log_of(topic)
            segments = await log.segments(request.from_offset)
            return pb.SegmentsResponse(
                segments=[
                    pb.Segment(
                        start_offset=segment.start,
                        end_offset=segment.end,
                        key=segment.key,
                        size=segment.size,
                        crc32c=segment.crc32c,
                        footer_size=segment.footer_size,
                        footer_crc32c=segment.footer_crc32c,
                        min_publish_time=segment.min_publish_time,
                        max_publish_time=segment.max_publish_time,
                        created_ms=segment.created_ms,
                        epoch=segment.epoch,
                    )
                    for segment in segments[: request.limit or None]
                ],
                store_url=self._store_url,
                start_offset=log.start_offset,
                stored_offset=log.stored_offset,
                next_offset=log.next_offset,
            )

    async def Schema(self, request: pb.SchemaRequest, context: Any) -> pb.SchemaResponse:
        async with faults.told(context):
            if request.version:
                found = await self._schemas.get_version(request.subject, request.version)
            else:
                found = await self._schemas.latest(request.subject)
        return pb.SchemaResponse(
            schema_id=found.schema_id, version=found.version, type=found.type, definition=found.definition
        )

    async def Append(self, request: pb.AppendRequest, context: Any) -> pb.AppendResponse:
        """What other brokers have for a topic; a client has no such right, since it would go around who
        publishes and whether the topic's schema lets it."""
        async with faults.told(context):
            if not is_forwarded(context):
                raise MessageInvalid("Append is for brokers: clients publish")
            topic = await self._topics.get(TopicName.parse(request.topic))
            await topic.append(RecordBatch.parse(request.batch).verify())
        return pb.AppendResponse()


class _Publishing:
    """One Publish stream: batches in, receipts out in their order."""

    def __init__(self, producer: Producer, context: Any) -> None:
        self._producer = producer
        self._context = context
        self._unanswered: deque[tuple[asyncio.Future[int], Header]] = deque()
        self._changed = asyncio.Event()
        """An outcome is known, or there will be no more batches."""
        self._has_room = asyncio.Event()
        self._has_read_all = False
        self._ending: NotOwner | None = None
        """The topic is another broker's: nothing more is taken, and the client is told so."""

    async def run(self) -> None:
        """Until the client is done. Raises the error that the stream ends with; what was durable before it
        has its receipt."""
        producer = self._producer
        await self._context.write(
            pb.PublishResponse(
                opened=pb.ProducerOpened(
                    producer_id=producer.producer_id,
                    next_sequence=producer.next_sequence,
                    epoch=producer.epoch,
                    reliable=producer.is_reliable,
                    max_message_size=producer.max_message_size,
                )
            )
        )
        reading = asyncio.ensure_future(self._read())
        try:
            await self._answer()
            if self._ending is not None:
                await self._say_goodbye(self._ending, reading)
            await reading
        finally:
            await _cancelled(reading)

    async def _say_goodbye(self, error: NotOwner, reading: asyncio.Future[None]) -> NoReturn:
        """Until the client has heard it. A stream that ends while its client writes fails there with an
        error of gRPC's own, and the broker's status is lost."""
        await self._context.write(pb.PublishResponse(ending=faults.code_of(error)))
        await asyncio.wait((reading,), timeout=GOODBYE_S)
        raise error

    async def _read(self) -> None:
        unanswered = self._unanswered
        try:
            while (request := await self._context.read()) is not EOF:
                if self._ending is not None:
                    continue
                if request.WhichOneof("kind") != "batch":
                    raise MessageInvalid("a publish stream carries batches after its opening")
                batch = RecordBatch.parse(request.batch)
                try:
                    future = await self._producer.begin(batch)
                except NotOwner as error:
                    self._ending = error
                    self._changed.set()
                    continue
                unanswered.append((future, batch.header))
                future.add_done_callback(self._settled)
                while len(unanswered) >= MAX_UNANSWERED:
                    self._has_room.clear()
                    await self._has_room.wait()
        finally:
            self._has_read_all = True
            self._changed.set()

    def _settled(self, _: asyncio.Future[int]) -> None:
        self._changed.set()

    async def _answer(self) -> None:
        while True:
            self._changed.clear()
            response, failure = self._take_answers()
            if response.receipts:
                self._has_room.set()
                await self._context.write(response)
            if isinstance(failure, NotOwner):
                self._ending = failure
                return
            if failure is not None:
                raise failure
            if not response.receipts:
                if (self._has_read_all or self._ending is not None) and not self._unanswered:
                    return
                await self._changed.wait()

    def _take_answers(self) -> tuple[pb.PublishResponse, BaseException | None]:
        """Of all batches whose outcome is known, up to the first that failed."""
        response = pb.PublishResponse()
        while self._unanswered and self._unanswered[0][0].done():
            future, header = self._unanswered.popleft()
            if (failure := future.exception()) is not None:
                return response, failure
            response.receipts.add(
                base_offset=future.result(), base_sequence=header.base_sequence, count=header.count
            )
        return response, None


class _Subscribing:
    """One Subscribe stream: deliveries out, credits and acks in."""

    def __init__(self, topic: Topic, consumer: Consumer, deliveries: Deliveries, context: Any) -> None:
        self._topic = topic
        self._consumer = consumer
        self._deliveries = deliveries
        self._context = context
        self._writing = asyncio.Lock()
        self._receipt = 0
        """The latest that was asked for and not answered; it covers those before it."""
        self._receipt_wanted = asyncio.Event()

    async def run(self) -> None:
        opened = pb.ConsumerOpened(
            consumer_id=self._consumer.consumer_id,
            epoch=self._topic.epoch,
            reliable=self._topic.spec.reliable,
        )
        await self._context.write(pb.SubscribeResponse(opened=opened))
        parts = [asyncio.ensure_future(part) for part in (self._read(), self._deliver(), self._tell_stored())]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            for part in done:
                part.result()
        finally:
            await _cancelled(*parts)

    async def _deliver(self) -> None:
        while True:
            for response in self._deliveries.responses(await self._consumer.receive()):
                await self._write(response)

    async def _read(self) -> None:
        consumer = self._consumer
        while (request := await self._context.read()) is not EOF:
            match request.WhichOneof("kind"):
                case "credits":
                    consumer.grant(min(request.credits, MAX_CREDITS))
                case "acks":
                    consumer.ack(_ranges(request.acks.ranges))
                    if request.acks.receipt:
                        self._receipt = request.acks.receipt
                        self._receipt_wanted.set()
                case "nacks":
                    nacks = request.nacks
                    consumer.nack(_ranges(nacks.ranges), delay_ms=nacks.delay_ms, reason=nacks.reason)
                case kind:
                    raise MessageInvalid(f"a subscribe stream carries no {kind or 'empty request'} here")

    async def _tell_stored(self) -> None:
        while True:
            await self._receipt_wanted.wait()
            self._receipt_wanted.clear()
            receipt = self._receipt
            await self._topic.acks_stored(self._consumer.subscription)
            await self._write(pb.SubscribeResponse(acks_stored=receipt))

    async def _write(self, response: pb.SubscribeResponse | bytes) -> None:
        async with self._writing:
            await self._context.write(response)


async def _first(context: Any, kind: str) -> Any:
    """The request that opens a stream."""
    request = await context.read()
    if request is EOF or request.WhichOneof("kind") != kind:
        raise MessageInvalid("a stream begins with its opening")
    return request


async def _cancelled(*tasks: asyncio.Future[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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


def _ranges(flat: Sequence[int]) -> list[Range]:
    if len(flat) % 2:
        raise MessageInvalid("ranges come in pairs of start and end")
    return list(_pairs(flat))


def _pairs(flat: Sequence[int]) -> Iterator[Range]:
    for index in range(0, len(flat), 2):
        start, end = flat[index], flat[index + 1]
        if start >= end:
            raise MessageInvalid(f"the range {start}..{end} is empty or reversed")
        yield start, end


def _known(table: dict[Any, Any], value: int, what: str) -> Any:
    try:
        return table[value]
    except KeyError:
        raise MessageInvalid(f"{what} {value} does not exist") from None
