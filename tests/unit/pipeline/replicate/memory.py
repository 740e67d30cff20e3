"""Two clusters in memory, in a thread: one to copy from, and one to copy into that fails as ordered."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc import aio

from sava.client.loop_thread import LoopThread
from sava.pipeline.cluster import ClusterAccess, ClusterClient
from sava.pipeline.options import TopicPartition
from sava.pipeline.replicate.target import Errand, LinkEnds, TargetCluster
from sava.pipeline.source.planning import Piece
from sava.proto import replica_pb2 as pb
from sava.proto import replica_pb2_grpc as rpc
from sava.proto import streams_pb2
from sava.records import Message, RecordBatch, iter_batches
from tests.support.network import END
from tests.unit.client.server import AWAY, Fault, MemoryBroker

TOPIC_ID = 1
"""What the broker in memory gives to all topics."""
TARGET_TOPIC_ID = 5
UNKNOWN = Fault(grpc.StatusCode.UNIMPLEMENTED)


@dataclass
class MemoryCopy:
    """The copy of one source in one topic, as simply as it can be written."""

    is_known: bool = False
    position: int = 0
    messages: list[Message] = field(default_factory=list)
    ranges: list[tuple[int, int]] = field(default_factory=list)

    def take(self, source_range: pb.SourceRange) -> int | None:
        """How many messages were appended; None: it does not follow."""
        if source_range.begin is self.is_known or (self.is_known and source_range.start != self.position):
            return None
        found = [message for batch in iter_batches(source_range.batches) for message in batch.verify()]
        flat = source_range.offsets
        offsets = [n for start, end in zip(flat[::2], flat[1::2], strict=True) for n in range(start, end)]
        assert len(offsets) == len(found)
        assert source_range.start < source_range.end
        self.is_known, self.position = True, source_range.end
        self.messages += found
        self.ranges.append((source_range.start, source_range.end))
        return len(found)


Order = Callable[[MemoryCopy, pb.SourceRange], pb.SourceEnded | Fault | None]
"""What is to happen in place of taking a range: an ordered end, or a failure of the stream; None: take it."""


class Replica(rpc.ReplicaServicer):
    def __init__(self) -> None:
        self.sources: dict[str, MemoryCopy] = {}
        self.order: Order = lambda copied, source_range: None
        self.refuse_opening: dict[str, Fault] = {}
        self.refuse_openings: list[Fault] = []
        """The next ones, whatever they are of."""
        self.silent_openings: set[str] = set()
        self.receipts = asyncio.Event()
        self.receipts.set()
        self.max_message_size = 0
        self.openings = 0
        self.together: list[list[str]] = []
        """The topics of each call that appends to several."""
        self.refuse_together: dict[str, str] = {}
        """Codes by topic: in such a call alone."""
        self.is_older = False
        """There is no such call."""
        self.breaks_together = False
        """Such a call ends when everything was taken, and nothing answered."""
        self.most_unanswered = 0
        self.unanswered = 0

    def copied(self, topic: str) -> MemoryCopy:
        return self.sources.setdefault(topic, MemoryCopy())

    async def Append(self, requests: Any, context: Any) -> None:  # type: ignore[override]  # as in the real one
        opening = (await context.read()).open
        self.openings += 1
        if self.refuse_openings:
            await self.refuse_openings.pop(0).tell(context)
        if opening.topic in self.refuse_opening:
            await self.refuse_opening[opening.topic].tell(context)
        if opening.topic in self.silent_openings:
            await asyncio.Event().wait()
        copied = self.copied(opening.topic)
        opened = pb.SourceOpened(
            is_known=copied.is_known,
            position=copied.position,
            topic_id=TARGET_TOPIC_ID,
            max_message_size=self.max_message_size,
            kept_position=copied.position,
        )
        await context.write(pb.AppendResponse(opened=opened))
        taken: asyncio.Queue[pb.SourceReceipt | pb.SourceEnded | Fault] = asyncio.Queue()
        answering = asyncio.ensure_future(self._answer(taken, context))
        self.unanswered = 0
        try:
            while (request := await context.read()) is not END and not answering.done():
                source_range = request.range
                self.unanswered += 1
                self.most_unanswered = max(self.most_unanswered, self.unanswered)
                taken.put_nowait(self._taken(copied, source_range))
            await answering
        finally:
            answering.cancel()

    async def AppendEach(self, request: pb.AppendEachRequest, context: Any) -> Any:
        if self.is_older:
            await UNKNOWN.tell(context)
        self.together.append([each.open.topic for each in request.appends])
        answers = [self._answered(number, each) for number, each in enumerate(request.appends)]
        await self.receipts.wait()
        if self.breaks_together:
            await AWAY.tell(context)
        for first in range(0, len(answers), 3):
            yield pb.AppendEachResponse(answers=answers[first : first + 3])

    def _answered(self, number: int, each: pb.EachAppend) -> pb.EachAnswer:
        topic = each.open.topic
        if topic in self.refuse_together:
            return pb.EachAnswer(number=number, code=self.refuse_together[topic])
        if each.topic_id != TARGET_TOPIC_ID:
            return pb.EachAnswer(number=number, code="topic_mismatch")
        answer = self._taken(self.copied(topic), each.range)
        if isinstance(answer, pb.SourceReceipt):
            return pb.EachAnswer(number=number, receipt=answer)
        return pb.EachAnswer(number=number, code=answer.code)

    def _taken(
        self, copied: MemoryCopy, source_range: pb.SourceRange
    ) -> pb.SourceReceipt | pb.SourceEnded | Fault:
        ordered = self.order(copied, source_range)
        if ordered is not None:
            return ordered
        count = copied.take(source_range)
        if count is None:
            return pb.SourceEnded(
                code="source_position_mismatch",
                reason="as told",
                is_known=copied.is_known,
                position=copied.position,
            )
        return pb.SourceReceipt(position=source_range.end, appended=count, kept_position=source_range.end)

    async def _answer(self, taken: asyncio.Queue[Any], context: Any) -> None:
        while True:
            answer = await taken.get()
            await self.receipts.wait()
            if isinstance(answer, Fault):
                await answer.tell(context)
            self.unanswered -= 1
            if isinstance(answer, pb.SourceEnded):
                await context.write(pb.AppendResponse(ended=answer))
                return
            await context.write(pb.AppendResponse(receipt=answer))


class Placing(MemoryBroker):
    """Knows which topics are at another broker."""

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[str, str] = {}
        """The address of a topic that is not here."""
        self.looked_up: list[str] = []

    async def LookUp(self, request: streams_pb2.LookUpRequest, context: Any) -> streams_pb2.LookUpResponse:
        self.looked_up.append(request.topic)
        found = await super().LookUp(request, context)
        for partition in found.partitions:
            partition.address = self.places.get(partition.topic, partition.address)
        return found


class Remote(Placing):
    def __init__(self) -> None:
        super().__init__()
        self.replica = Replica()

    def register(self, server: aio.Server) -> None:
        super().register(server)
        rpc.add_ReplicaServicer_to_server(self.replica, server)


class Source(Placing, rpc.ReplicaServicer):  # type: ignore[misc]  # both have Append, and it has neither
    def __init__(self) -> None:
        super().__init__()
        self.together: list[list[str]] = []
        """The topics of each call that reads several."""
        self.is_older = self.is_silent = False
        self.forgotten: set[str] = set()
        """Topics that it has, and not in memory."""
        self.gone: set[str] = set()
        """Topics that such a call does not find here."""

    def register(self, server: aio.Server) -> None:
        super().register(server)
        rpc.add_ReplicaServicer_to_server(self, server)

    async def ReadEach(self, request: pb.ReadEachRequest, context: Any) -> Any:
        if self.is_older:
            await UNKNOWN.tell(context)
        if self.is_silent:
            await asyncio.Event().wait()
        self.together.append([tail.topic for tail in request.tails])
        left = request.max_bytes
        for number, tail in enumerate(request.tails):
            if tail.topic in self.gone:
                continue
            batches: list[bytes] = []
            for batch in self.topics[tail.topic].batches:
                start, end = max(batch.base_offset, tail.start), min(batch.next_offset, tail.end)
                if start < end and left > 0 and tail.topic not in self.forgotten:
                    batches.append(batch.slice(start, end).to_bytes())
                    left -= len(batches[-1])
            topic = self.topics[tail.topic]
            read = pb.TailRead(number=number, batches=batches, next_offset=topic.next_offset)
            yield pb.ReadEachResponse(tails=[read])


class World:
    """A source and a target, from another thread."""

    def __init__(self) -> None:
        self.loop = LoopThread("brokers")
        self.source, self.remote = Source(), Remote()
        self.replica = self.remote.replica
        self.loop.run(self.source.start())
        self.loop.run(self.remote.start())
        self.ends = LinkEnds(
            source=ClusterAccess(self.source.address, timeout_s=5),
            source_name="eu",
            source_id="id-of-eu",
            target=ClusterAccess(self.remote.address, timeout_s=5),
            target_name="us",
            target_id="id-of-us",
        )

    def publish(self, name: str, count: int, *, per_batch: int = 100, size: int = 0) -> None:
        async def append() -> None:
            topic = self.source.topic(name)
            self.remote.topic(name)
            for first in range(topic.next_offset, topic.next_offset + count, per_batch):
                payloads = [b"%d" % n + b" " * size for n in range(first, first + per_batch)]
                batch = RecordBatch.encode(
                    payloads, publish_time=first, base_sequence=topic.next_sequence("p")
                )
                topic.append("p", batch)

        self.loop.run(append())

    def errand(self, name: str, *, begin: int | None = 0, start: int = 0, end: int | None = None) -> Errand:
        end = self.source.topics[name].next_offset if end is None else end
        return Errand(
            name=name,
            topic_id=TOPIC_ID,
            target_topic_id=TARGET_TOPIC_ID,
            subject="",
            begin=begin,
            end=end,
            pieces=(Piece(TopicPartition(name, 0), name, start, end, None, 100.0),),
            store_url="",
            forward=False,
        )

    def copied(self, name: str) -> list[int]:
        return [int(message.payload) for message in self.replica.copied(name).messages]

    def call(self, work: Callable[[], None]) -> None:
        """Where the brokers are."""

        async def run() -> None:
            work()

        self.loop.run(run())

    def close(self) -> None:
        TargetCluster.of(self.ends.target).close()
        ClusterClient.of(self.ends.source).close()
        self.loop.run(self.source.stop())
        self.loop.run(self.remote.stop())
        self.loop.close()
