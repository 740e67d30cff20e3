"""Sessions: a stream with two directions, from its opening to its end.

The directions must not wait for each other: while the broker waits for the disk, the client continues to
send, and while a consumer's acks come in, deliveries go out. So each stream has a reader and a writer. What
may be under way is bounded on both sides: unanswered batches by ``MAX_UNANSWERED`` (the broker stops
reading), deliveries by the consumer's credits.

A delivery is encoded once, however many subscriptions of a topic get it. A batch goes to each subscription as
it is stored. Protobuf would copy it into a message and again out of it, for every consumer;
``DeliveryEncoder`` writes the few bytes around it by hand, and one encoded delivery serves the other
subscriptions that read the same batch within a moment.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any, Final, NoReturn

from sava.peers import error_mapping
from sava.peers.forwarding import EOF
from sava.proto import streams_pb2 as pb
from sava.records import Header, RecordBatch
from sava.tasks import cancelled
from sava.topics.consumer import ConsumerHandle, Delivery
from sava.topics.errors import MessageInvalid, NotOwner
from sava.topics.producers import ProducerHandle
from sava.topics.ranges import Range
from sava.topics.topic import Topic

MAX_UNANSWERED: Final = 64
"""Batches of one producer whose outcome is open. Clients keep fewer."""
MAX_CREDITS: Final = 1_000_000
GOODBYE_S: Final = 1.0
"""For a client to close a stream that can continue elsewhere."""


class PublishHandler:
    """One Publish stream: batches in, receipts out in their order."""

    def __init__(self, producer: ProducerHandle, context: Any) -> None:
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
        self, topic: Topic, consumer: ConsumerHandle, deliveries: DeliveryEncoder, context: Any
    ) -> None:
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
