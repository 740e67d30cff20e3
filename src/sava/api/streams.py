"""The ``Streams`` service of the client port: Sava's own protocol, batch by batch; and what happens on a
stream of two directions, from its opening to its end.

The directions must not wait for each other: while the broker waits for the disk, the client continues to
send, and while a consumer's acks come in, deliveries go out. So each stream has a reader and a writer. What
may be under way is bounded on both sides: unanswered batches by ``MAX_UNANSWERED`` (the broker stops
reading), deliveries by the consumer's credits.

A delivery is encoded once, however many subscriptions of a topic get it. A batch goes to each subscription as
it is stored. Protobuf would copy it into a message and again out of it, for every consumer;
``DeliveryEncoder`` writes the few bytes around it by hand, and one encoded delivery serves the other
subscriptions that read the same batch within a moment.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final, NoReturn

import grpc
from grpc import aio

from sava.api.messages import to_message
from sava.peers import error_mapping
from sava.peers.forwarding import EOF
from sava.peers.guard import may_see
from sava.proto import streams_pb2 as pb
from sava.proto import streams_pb2_grpc as rpc
from sava.records import Header, RecordBatch
from sava.schemas.registry import SchemaRegistry
from sava.security.principal import current
from sava.security.quotas import Quotas, Usage
from sava.storage.topic_log import TopicLog
from sava.tasks import cancelled
from sava.topics.consumer import ConsumerHandle, Delivery
from sava.topics.errors import MessageInvalid, NotOwner, TopicMismatch
from sava.topics.names import TopicName, check_name
from sava.topics.producers import AccessMode, ProducerHandle
from sava.topics.ranges import Range
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
        self,
        topics: ServedTopics,
        *,
        schemas: SchemaRegistry,
        locate: Locate,
        store_url: str,
        quotas: Quotas,
    ) -> None:
        self._topics = topics
        self._quotas = quotas
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
        producer = await self._open_producer(await opening(context))
        try:
            with self._quotas.stream(current.get(), context.peer()) as usage:
                await PublishHandler(producer, context, usage).run()
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
        first = await opening(context)
        topic = await self._topics.get(TopicName.parse(first.topic))
        with self._quotas.stream(current.get(), context.peer()) as usage:
            consumer = await topic.subscribe(_subscribe_options(first))
            try:
                await SubscribeHandler(topic, consumer, self._deliveries, context, usage).run()
            finally:
                consumer.close()

    async def Read(self, request: pb.ReadRequest, context: Any) -> None:  # type: ignore[override]
        topic = await self._topics.get(TopicName.parse(request.topic))
        log = _log_of(topic)
        start = await topic.resolve(_position(request.start))
        end = request.end if request.HasField("end") else None
        size = min(request.max_bytes or READ_BYTES, MAX_READ_BYTES)
        with self._quotas.stream(current.get(), context.peer()) as usage:
            while end is None or start < end:
                await log.wait_beyond(start)
                batches = []
                async with aclosing(log.read(start, end, max_bytes=size)) as stream:
                    async for batch in stream:
                        batches.append(batch.to_bytes())
                        start = batch.next_offset
                if usage.consuming is not None:
                    await usage.consumed(sum(map(len, batches)))
                await context.write(pb.ReadResponse(batches=batches, next_offset=log.next_offset))

    async def LookUp(self, request: pb.LookUpRequest, context: Any) -> pb.LookUpResponse:
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
        if request.version:
            found = await self._schemas.get_version(request.subject, request.version)
        else:
            found = await self._schemas.latest(request.subject)
        return to_message(pb.SchemaResponse, found)

    async def ListTopics(self, request: pb.ListTopicsRequest, context: Any) -> pb.ListTopicsResponse:
        """From what this node knows, once it knows anything: programs ask again and again."""
        await self._topics.ready()
        if request.namespace:
            await self._topics.namespaces.policy(check_name(request.namespace, "namespace"))
        found = self._topics.registry.list_local(request.namespace or None)
        return pb.ListTopicsResponse(
            topics=[
                pb.ListedTopic(topic=str(name), reliable=spec.reliable, partition_count=spec.partitions)
                for name, spec in sorted(found.items())
                if name.head == name and may_see(name)
            ]
        )

    async def Advance(self, request: pb.AdvanceRequest, context: Any) -> pb.AdvanceResponse:
        topic = await self._topics.get(TopicName.parse(request.topic))
        await topic.reliable.advance(request.subscription, request.offset)
        return pb.AdvanceResponse()

    async def Append(self, request: pb.AppendRequest, context: Any) -> pb.AppendResponse:
        """What other brokers have for a topic. The guard lets no client do this: it would go around who
        publishes and whether the topic's schema lets it."""
        topic = await self._topics.get(TopicName.parse(request.topic))
        await topic.append(RecordBatch.parse(request.batch))
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


# -- a stream of two directions ---------------------------------------------------------------------


MAX_UNANSWERED: Final = 64
"""Batches of one producer whose outcome is open. Clients keep fewer."""
MAX_CREDITS: Final = 1_000_000
GOODBYE_S: Final = 1.0
"""For a client to close a stream that can continue elsewhere."""


class PublishHandler:
    """One Publish stream: batches in, receipts out in their order."""

    def __init__(self, producer: ProducerHandle, context: Any, usage: Usage) -> None:
        self._usage = usage
        self._producer = producer
        self._context = context
        self._unanswered: deque[tuple[asyncio.Future[int], Header]] = deque()
        self._changed = asyncio.Event()
        """An outcome is known, or there will be no more batches."""
        self._has_room = asyncio.Event()
        self._has_read_all = False
        self._ending: NotOwner | None = None
        """The topic is another broker's: nothing more is taken, and the client learns it."""

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
                    producer_epoch=producer.number,
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
            await cancelled(reading)

    async def _say_goodbye(self, error: NotOwner, reading: asyncio.Future[None]) -> NoReturn:
        """Until the client has heard it. A stream that ends while its client writes fails there with an
        error of gRPC's own, and the broker's status is lost."""
        await self._context.write(pb.PublishResponse(ending=error_mapping.code_of(error)))
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
                if self._usage.publishing is not None:
                    await self._usage.published(batch.header.length)
                try:
                    future = await self._producer.begin(batch)
                except NotOwner as error:
                    self._ending = error
                    self._changed.set()
                    continue
                unanswered.append((future, batch.header))
                future.add_done_callback(lambda _: self._changed.set())
                while len(unanswered) >= MAX_UNANSWERED:
                    self._has_room.clear()
                    await self._has_room.wait()
        finally:
            self._has_read_all = True
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
            base_offset = future.result()
            response.receipts.add(
                base_offset=base_offset,
                base_sequence=header.base_sequence,
                count=header.count,
                is_degraded=self._producer.is_degraded(base_offset),
            )
        return response, None


class SubscribeHandler:
    """One Subscribe stream: deliveries out, credits and acks in."""

    def __init__(
        self,
        topic: Topic,
        consumer: ConsumerHandle,
        deliveries: DeliveryEncoder,
        context: Any,
        usage: Usage,
    ) -> None:
        self._usage = usage
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
            await cancelled(*parts)

    async def _deliver(self) -> None:
        while True:
            for response in self._deliveries.responses(await self._consumer.receive()):
                if self._usage.consuming is not None:
                    await self._usage.consumed(len(response))
                await self._write(response)

    async def _read(self) -> None:
        consumer = self._consumer
        while (request := await self._context.read()) is not EOF:
            match request.WhichOneof("kind"):
                case "credits":
                    consumer.grant(min(request.credits, MAX_CREDITS))
                case "acks":
                    consumer.ack(ranges_of(request.acks.ranges))
                    if request.acks.receipt:
                        self._receipt = request.acks.receipt
                        self._receipt_wanted.set()
                case "nacks":
                    nacks = request.nacks
                    consumer.nack(ranges_of(nacks.ranges), delay_ms=nacks.delay_ms, reason=nacks.reason)
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


async def opening(context: Any) -> Any:
    """The request that opens a stream."""
    request = await context.read()
    if request is EOF or request.WhichOneof("kind") != "open":
        raise MessageInvalid("a stream begins with its opening")
    return request.open


def ranges_of(flat: Sequence[int]) -> list[Range]:
    """As they are in a message: start, end, start, end, … Raises MessageInvalid."""
    if len(flat) % 2:
        raise MessageInvalid("ranges come in pairs of start and end")
    return list(_pairs(flat))


def _pairs(flat: Sequence[int]) -> Iterator[Range]:
    for index in range(0, len(flat), 2):
        start, end = flat[index], flat[index + 1]
        if start >= end:
            raise MessageInvalid(f"the range {start}..{end} is empty or reversed")
        yield start, end


# -- deliveries on the wire ------------------------------------------------------------------------


MAX_HELD_BYTES: Final = 8 << 20
MAX_RESPONSE_BYTES: Final = 1 << 20
_OBJECT_BYTES: Final = 256
"""What an entry costs besides its bytes. Without it, single small messages take three times the bound."""

_DELIVERED: Final = bytes(((pb.SubscribeResponse.DELIVERED_FIELD_NUMBER << 3) | 2,))
_BATCH: Final = bytes(((pb.Delivered.BATCH_FIELD_NUMBER << 3) | 2,))

_Key = tuple[int, int, int, int, int]


class DeliveryEncoder:
    """Encodes deliveries, and keeps those that it encoded last. Owned by the event loop."""

    def __init__(self, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._max_held_bytes = max_held_bytes
        self._held: OrderedDict[_Key, bytes] = OrderedDict()
        self._held_bytes = 0

    def responses(self, deliveries: Sequence[Delivery]) -> Iterator[bytes]:
        """Serialized ``SubscribeResponse`` messages that carry these deliveries, together as far as they are
        small: a message costs gRPC as much as a hundred kilobytes. Messages that are written one behind the
        other are, by Protobuf's rules, one message with what all of them hold."""
        parts: list[bytes] = []
        size = 0
        for delivery in deliveries:
            part = self.encode(delivery)
            if parts and size + len(part) > MAX_RESPONSE_BYTES:
                yield b"".join(parts)
                parts, size = [], 0
            parts.append(part)
            size += len(part)
        yield parts[0] if len(parts) == 1 else b"".join(parts)

    def encode(self, delivery: Delivery) -> bytes:
        """A serialized ``SubscribeResponse`` with one delivery."""
        batch = delivery.batch
        if len(delivery.ranges) > 1 or delivery.ranges[0][0] != batch.base_offset:
            ranges = [offset for pair in delivery.ranges for offset in pair]
            return _encode(batch, pb.Delivered(ranges=ranges, attempt=delivery.attempt))
        header = batch.header
        key = (header.topic_id, header.epoch, header.base_offset, header.count, delivery.attempt)
        encoded = self._held.get(key)
        if encoded is None:
            encoded = _encode(batch, pb.Delivered(attempt=delivery.attempt))
            self._hold(key, encoded)
        return encoded

    def _hold(self, key: _Key, encoded: bytes) -> None:
        self._held[key] = encoded
        self._held_bytes += len(encoded) + _OBJECT_BYTES
        while self._held_bytes > self._max_held_bytes:
            _, dropped = self._held.popitem(last=False)
            self._held_bytes -= len(dropped) + _OBJECT_BYTES


def _encode(batch: RecordBatch, rest: pb.Delivered) -> bytes:
    size = batch.header.length
    tail = rest.SerializeToString()
    field = _BATCH + _varint(size)
    return b"".join((_DELIVERED, _varint(len(field) + size + len(tail)), field, *batch.buffers, tail))


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
