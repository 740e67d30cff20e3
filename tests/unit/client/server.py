"""A broker for the client's tests: Sava's protocol over lists in memory, with faults to order.

It keeps what a real broker keeps of producers (the batches it has, by sequence) and of a subscription (what
is delivered, what is acked), as simply as that can be written. Nothing is durable; receipts come when
``receipts`` is set.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import grpc
from grpc import aio

from sava.peers.channels import PINGS_ALLOWED
from sava.proto import streams_pb2 as pb
from sava.proto import streams_pb2_grpc as rpc
from sava.records import RecordBatch
from tests.support.network import END
from tests.support.waiting import PATIENCE_S

_OPTIONS = (
    ("grpc.max_receive_message_length", 70 << 20),
    ("grpc.so_reuseport", 0),
    # Clients ping; a server that expects fewer pings hangs up on them.
    *PINGS_ALLOWED,
)
Trailing = tuple[tuple[str, str], ...]


class Fault(Exception):
    def __init__(self, status: grpc.StatusCode, code: str = "", text: str = "as ordered") -> None:
        super().__init__(text)
        self.status, self.code, self.text = status, code, text

    async def tell(self, context: Any) -> None:
        trailing: Trailing = (("sava-code", self.code),) if self.code else ()
        await context.abort(self.status, self.text, trailing)


def refused(code: str) -> Fault:
    return Fault(grpc.StatusCode.FAILED_PRECONDITION, code)


UNKNOWN_TOKEN = Fault(grpc.StatusCode.UNAUTHENTICATED, "token_invalid", "the token has expired")
AWAY = Fault(grpc.StatusCode.UNAVAILABLE, "not_owner")


class MemoryTopic:
    def __init__(self, name: str, *, reliable: bool = True) -> None:
        self.name = name
        self.reliable = reliable
        self.batches: list[RecordBatch] = []
        self.start_offset = 0
        self.next_offset = 0
        self.producers: dict[str, dict[int, tuple[int, int]]] = {}
        """By producer: base sequence → (next sequence, base offset)."""
        self.grown = asyncio.Event()
        self.acked: set[int] = set()
        self.nacked: list[pb.Nacks] = []
        self.cursor = 0

    def next_sequence(self, producer: str) -> int:
        return max((end for end, _ in self.producers.get(producer, {}).values()), default=0)

    def append(self, producer: str, batch: RecordBatch) -> int:
        header = batch.header
        known = self.producers.setdefault(producer, {})
        if header.base_sequence in known:
            return known[header.base_sequence][1]
        if header.base_sequence != self.next_sequence(producer):
            raise refused("sequence_gap")
        offset = self.next_offset
        known[header.base_sequence] = (header.next_sequence, offset)
        self.batches.append(batch.assigned(topic_id=1, epoch=1, base_offset=offset))
        self.next_offset += len(batch)
        self.grown.set()
        self.grown = asyncio.Event()
        return offset

    def payloads(self) -> list[bytes]:
        return [payload for batch in self.batches for payload in batch.payloads()]


class MemoryBroker(rpc.StreamsServicer):
    def __init__(self) -> None:
        self.topics: dict[str, MemoryTopic] = {}
        self.partitions: dict[str, int] = {}
        self.receipts = asyncio.Event()
        self.receipts.set()
        self.refuse_payload: dict[bytes, Fault] = {}
        """A batch with this payload ends the stream with that fault."""
        self.refuse_opening: Fault | None = None
        self.away: set[str] = set()
        """Topics that nobody serves at present."""
        self.max_message_size = 0
        self.is_degraded = False
        self.stores_acks = True
        self.metadata: list[tuple[str, str]] = []
        self.tokens: set[str] | None = None
        """Those that are accepted; None: no token is needed."""
        self.shown: list[str] = []
        """Tokens that came, one for each call, while some are needed."""
        self.break_with = AWAY
        self.openings: list[Any] = []
        self.epochs: dict[tuple[str, str], int] = {}
        """The number of the last open, by topic and producer."""
        self.received: list[tuple[int, int]] = []
        """Base sequence and count of every batch that came, repeated ones too."""
        self.credits: list[int] = []
        self.acks: list[list[int]] = []
        self.calls: dict[asyncio.Task[Any], asyncio.Lock] = {}
        """Streams, and what is held while one of them writes."""
        self.offsets_asked: list[pb.OffsetsRequest] = []
        self.offsets_under_way = 0
        self.refuse_offsets: dict[str, Fault] = {}
        """By topic."""
        self.refuse_reading: Fault | None = None
        self.elsewhere = ""
        """The address of the broker that has the topics, if this one says that it has not."""
        self.port = 0
        self._server: aio.Server | None = None
        self.changed = asyncio.Condition()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = aio.server(options=_OPTIONS)
        self.register(self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()

    def register(self, server: aio.Server) -> None:
        rpc.add_StreamsServicer_to_server(self, server)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    def topic(self, name: str, *, reliable: bool = True) -> MemoryTopic:
        return self.topics.setdefault(name, MemoryTopic(name, reliable=reliable))

    def partitioned(self, name: str, count: int) -> list[MemoryTopic]:
        self.partitions[name] = count
        return [self.topic(f"{name}-part-{index}") for index in range(count)]

    async def break_streams(self) -> None:
        """Never amid a write: gRPC cannot send a status while it sends a message."""
        calls = dict(self.calls)
        for call, writing in calls.items():
            async with writing:
                call.cancel()
        await asyncio.wait(calls)

    async def received_batches(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S), self.changed:
            await self.changed.wait_for(lambda: len(self.received) >= count)

    async def _tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def _authenticate(self, context: Any) -> None:
        if self.tokens is None:
            return
        given = {key: str(value) for key, value in context.invocation_metadata()}
        self.shown.append(given.get("authorization", "").removeprefix("Bearer "))
        if self.shown[-1] not in self.tokens:
            await UNKNOWN_TOKEN.tell(context)

    # -- the service ---------------------------------------------------------------

    async def LookUp(self, request: pb.LookUpRequest, context: Any) -> pb.LookUpResponse:
        self.metadata.extend((key, str(value)) for key, value in context.invocation_metadata())
        await self._authenticate(context)
        name, count = request.topic, self.partitions.get(request.topic, 0)
        names = [f"{name}-part-{index}" for index in range(count)] or [name]
        if request.create and not count:
            self.topic(name, reliable=request.delivery != pb.NON_RELIABLE)
            base, part, index = name.rpartition("-part-")
            if part:
                self.partitions[base] = max(self.partitions.get(base, 0), int(index) + 1)
        if names[0] not in self.topics:
            await refused("topic_unknown").tell(context)
        return pb.LookUpResponse(
            topic=name,
            reliable=self.topics[names[0]].reliable,
            partition_count=count,
            partitions=[
                pb.Partition(topic=each, broker_id=1, address=self.elsewhere or self.address)
                for each in names
            ],
        )

    async def Offsets(self, request: pb.OffsetsRequest, context: Any) -> pb.OffsetsResponse:
        await self._authenticate(context)
        self.offsets_asked.append(request)
        if request.topic in self.refuse_offsets:
            await self.refuse_offsets[request.topic].tell(context)
        topic = self.topics[request.topic]
        self.offsets_under_way += 1
        try:
            if request.HasField("beyond"):
                with suppress(TimeoutError):
                    async with asyncio.timeout(request.wait_ms / 1000):
                        while topic.next_offset <= request.beyond:
                            await topic.grown.wait()
        finally:
            self.offsets_under_way -= 1
        offset = topic.next_offset
        for batch in reversed(topic.batches):
            if request.HasField("publish_time") and batch.header.min_publish_time >= request.publish_time:
                offset = batch.base_offset
        return pb.OffsetsResponse(
            start_offset=topic.start_offset, next_offset=topic.next_offset, offset=offset
        )

    async def Segments(self, request: pb.SegmentsRequest, context: Any) -> pb.SegmentsResponse:
        raise NotImplementedError

    # As in the real one: the stubs know generators only.
    async def Publish(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        writing = asyncio.Lock()
        await self._serve(self._publish(context, writing), context, writing)

    async def Subscribe(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        writing = asyncio.Lock()
        await self._serve(self._subscribe(context, writing), context, writing)

    async def Read(self, request: pb.ReadRequest, context: Any) -> AsyncIterator[pb.ReadResponse]:
        await self._authenticate(context)
        if self.refuse_reading is not None:
            await self.refuse_reading.tell(context)
        topic = self.topics[request.topic]
        position = request.start.offset
        while not request.HasField("end") or position < request.end:
            grown = topic.grown
            found = [batch for batch in topic.batches if batch.next_offset > position]
            if not found:
                await grown.wait()
                continue
            batch = found[0].slice(position, found[0].next_offset)
            position = batch.next_offset
            yield pb.ReadResponse(batches=[batch.to_bytes()], next_offset=topic.next_offset)

    async def _serve(self, work: Any, context: Any, writing: asyncio.Lock) -> None:
        """``break_streams`` cancels the work, and the stream ends as ``break_with`` says."""
        await self._authenticate(context)
        task = asyncio.ensure_future(work)
        self.calls[task] = writing
        try:
            await asyncio.wait((task,))
            if task.cancelled():
                await self.break_with.tell(context)
            task.result()
        except Fault as fault:
            await fault.tell(context)
        finally:
            del self.calls[task]
            task.cancel()
            with suppress(asyncio.CancelledError, Fault):
                await task

    def _epoch(self, opening: pb.OpenProducer) -> int:
        """The number of the producer's open. The highest one has the name."""
        if opening.is_name_generated:
            return 0
        place = opening.topic, opening.producer_name
        current = self.epochs.get(place, 0)
        if opening.producer_epoch and opening.producer_epoch < current:
            raise refused("producer_fenced")
        self.epochs[place] = opening.producer_epoch or current + 1
        return self.epochs[place]

    async def _publish(self, context: Any, writing: asyncio.Lock) -> None:
        opening = (await context.read()).open
        self.openings.append(opening)
        if self.refuse_opening is not None:
            raise self.refuse_opening
        if opening.topic in self.away:
            raise AWAY
        topic = self.topics[opening.topic]
        opened = pb.ProducerOpened(
            producer_id=7,
            next_sequence=topic.next_sequence(opening.producer_name),
            epoch=1,
            reliable=topic.reliable,
            max_message_size=self.max_message_size,
            producer_epoch=self._epoch(opening),
        )
        async with writing:
            await context.write(pb.PublishResponse(opened=opened))
        accepted: asyncio.Queue[pb.Receipt] = asyncio.Queue()
        answering = asyncio.ensure_future(self._answer(accepted, context, writing))
        try:
            while (request := await context.read()) is not END:
                batch = RecordBatch.parse(request.batch).verify()
                self.received.append((batch.header.base_sequence, len(batch)))
                await self._tell()
                for payload in batch.payloads():
                    if payload in self.refuse_payload:
                        await accepted.join()
                        raise self.refuse_payload[payload]
                accepted.put_nowait(
                    pb.Receipt(
                        base_offset=topic.append(opening.producer_name, batch),
                        base_sequence=batch.header.base_sequence,
                        count=len(batch),
                        is_degraded=self.is_degraded,
                    )
                )
        finally:
            answering.cancel()
            await asyncio.wait((answering,))

    async def _answer(self, accepted: asyncio.Queue[pb.Receipt], context: Any, writing: asyncio.Lock) -> None:
        while True:
            receipt = await accepted.get()
            await self.receipts.wait()
            async with writing:
                await context.write(pb.PublishResponse(receipts=[receipt]))
            accepted.task_done()

    async def _subscribe(self, context: Any, writing: asyncio.Lock) -> None:
        opening = (await context.read()).open
        self.openings.append(opening)
        if self.refuse_opening is not None:
            raise self.refuse_opening
        topic = self.topics[opening.topic]
        opened = pb.ConsumerOpened(consumer_id=1, epoch=1, reliable=topic.reliable)
        async with writing:
            await context.write(pb.SubscribeResponse(opened=opened))
        delivering = asyncio.ensure_future(self._deliver(topic, context, writing))
        try:
            while (request := await context.read()) is not END:
                match request.WhichOneof("kind"):
                    case "credits":
                        self.credits.append(request.credits)
                    case "acks":
                        flat = request.acks.ranges
                        self.acks.append(list(flat))
                        for start, end in zip(flat[::2], flat[1::2], strict=True):
                            topic.acked.update(range(start, end))
                        if request.acks.receipt and self.stores_acks:
                            async with writing:
                                await context.write(pb.SubscribeResponse(acks_stored=request.acks.receipt))
                    case "nacks":
                        topic.nacked.append(request.nacks)
                await self._tell()
        finally:
            delivering.cancel()
            await asyncio.wait((delivering,))

    async def _deliver(self, topic: MemoryTopic, context: Any, writing: asyncio.Lock) -> None:
        """Everything not acked, from the cursor on, whatever the credits are."""
        position = topic.cursor
        while True:
            grown = topic.grown
            for batch in topic.batches:
                if batch.next_offset > position:
                    part = batch.slice(position, batch.next_offset)
                    position = batch.next_offset
                    delivered = pb.Delivered(batch=part.to_bytes(), attempt=1)
                    async with writing:
                        await context.write(pb.SubscribeResponse(delivered=[delivered]))
            await grown.wait()
