"""The target of a link: the values that driver and tasks exchange about it, its streams, and its calls.

**Values.** ``CopyShare`` and its errands go to a task, a ``CopyOutcome`` for each errand comes back.

**Streams** (``TargetStream``): ranges on their way into one topic of the target, from one source.

    ranges     1  2  3  4  5                  on their way without waiting, a bounded number of bytes
    answers    1  2  ended(why, where)        3 was refused, 4 and 5 with it

What is known of the source position (``CopyProgress``) is only ever what the target has said: where it was
at the opening, the end of each range that has its receipt, and what the end of the stream says. Nothing is
concluded from what was sent, so whatever fails in a row of ranges, the copier can continue from there.

The stream belongs to the event loop of its ``TargetCluster``; the methods are for one other thread. Each of
them has a moment (of ``time.monotonic``) at which it gives up.

**Calls** (``TargetCluster``): blocking, one per process and cluster, over one event loop in a thread, like
``ClusterClient`` for the source. It calls the service ``Replica``: any broker of the target answers, or
forwards the call. A call tries one broker after the other for a few seconds only: the caller has other work,
and retries.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from sava.client.connection import (
    STATUS_S,
    ClientStream,
    Connection,
    ReconnectBackoff,
    Route,
    open_stream,
)
from sava.client.errors import ClientError, Unavailable
from sava.client.loop_thread import LoopThread
from sava.pipeline.calls import ClusterCalls, append_each
from sava.pipeline.cluster import ClusterAccess, PerProcess
from sava.pipeline.source.planning import Piece
from sava.proto import replica_pb2 as pb
from sava.proto import replica_pb2_grpc as rpc
from sava.tasks import cancelled


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnds:
    """The two clusters of a link."""

    source: ClusterAccess
    source_name: str
    source_id: str
    target: ClusterAccess
    target_name: str
    target_id: str

    def source_of(self, name: str, topic_id: int) -> pb.Source:
        """The source of a partition's copy, as the target identifies it."""
        return pb.Source(
            cluster_name=self.source_name, cluster_id=self.source_id, topic=name, topic_id=topic_id
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Errand:
    """A request to copy one partition from its source position at the target up to ``end``."""

    name: str
    """The partition or plain topic; it has the same name at the target."""
    topic_id: int
    """The topic's id at the source."""
    target_topic_id: int
    """The compared topic at the target: another topic of the same name gets nothing."""
    subject: str
    """The topic's schema subject, or empty."""
    begin: int | None
    """The start of a new copy. None if the target must have a source position (it was seen before)."""
    end: int
    pieces: tuple[Piece, ...]
    """The places of the messages without a gap, from the driver's view of the position up to ``end``."""
    store_url: str
    forward: bool
    """Whether to copy messages that came from other clusters, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyShare:
    """The errands of one task, which run concurrently."""

    ends: LinkEnds
    errands: tuple[Errand, ...]
    budget_s: float
    """After this time no new range starts; the rest is for another round."""
    is_light: bool = False
    """The errands are small and are copied together as far as possible."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOutcome:
    """The outcome of an errand. Everything before ``position`` is durable at the target."""

    name: str
    is_known: bool = False
    """Whether the target has reported a source position; False also without an answer."""
    position: int = 0
    kept_position: int = 0
    """The source may delete messages below it."""
    messages: int = 0
    bytes: int = 0
    duplicates: int = 0
    skipped: int = 0
    """Messages that were left out: excluded, from other clusters without ``forward``, or loops."""
    code: str = ""
    """Sava's error code; empty if all went well within the budget. Also ``source_gone`` (retention deleted
    messages that were not copied; ``reason`` names them), ``source_position_missing`` (the target has
    none although it had one), ``target_replaced`` (another topic of the same name),
    ``source_unavailable`` and ``source_denied`` (``unavailable`` and ``denied`` are the target's)."""
    reason: str = ""
    may_pass: bool = False
    """A retry may succeed without action of a user."""


T = TypeVar("T")

UNANSWERED: Final = 8
"""Ranges of one source that are on their way: the target reads, checks and writes different ones at a
time."""
UNANSWERED_BYTES: Final = 8 << 20
"""Of them; a larger one goes alone."""


OWNER_S: Final = 30.0
"""Until a topic is looked up again: a broker that has given it away forwards, which costs a hop."""


class Owners:
    """Which broker of the target has which topic, as far as that was found out. Owned by the target's event
    loop."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[str, float]] = {}

    def get(self, topic: str) -> str:
        """Empty: not known, or not lately."""
        address, until = self._known.get(topic, ("", 0.0))
        return address if asyncio.get_running_loop().time() < until else ""

    def learn(self, topic: str, address: str) -> None:
        if self.get(topic) != address:
            self._known[topic] = (address, asyncio.get_running_loop().time() + OWNER_S)

    def forget(self, topic: str) -> None:
        self._known.pop(topic, None)


class EncodedRange(NamedTuple):
    """A ``SourceRange`` of ``replica.proto``, with its batches encoded."""

    start: int
    end: int
    begin: bool
    batches: bytes
    offsets: Sequence[int]
    skipped: int
    """Messages of the source that are not in it."""

    def message(self) -> pb.SourceRange:
        return pb.SourceRange(
            start=self.start, end=self.end, begin=self.begin, batches=self.batches, offsets=self.offsets
        )


@dataclass(slots=True)
class CopyProgress:
    """What the target has said so far."""

    is_known: bool = False
    position: int = 0
    kept_position: int = 0
    messages: int = 0
    bytes: int = 0
    duplicates: int = 0
    skipped: int = 0

    def receive(self, source_range: EncodedRange, receipt: pb.SourceReceipt) -> None:
        """The range is durable."""
        self.is_known, self.position = True, receipt.position
        self.kept_position = receipt.kept_position
        self.messages += receipt.appended
        self.bytes += len(source_range.batches)
        self.duplicates += receipt.duplicates
        self.skipped += source_range.skipped + receipt.loops


class TargetStream:
    """An append stream to one topic of the target, made by ``TargetCluster.append_stream``."""

    def __init__(
        self, loop: LoopThread, connection: Connection, owners: Owners, topic: str, source: pb.Source
    ) -> None:
        self.topic = topic
        self.progress = CopyProgress()
        self.ended: pb.SourceEnded | None = None
        """A range was refused, or failed."""
        self._loop = loop
        self._connection = connection
        self._owners = owners
        self._opening = pb.AppendRequest(open=pb.OpenSource(topic=topic, source=source))
        self._streams = AsyncExitStack()
        """Ends the stream that is open."""
        self._stream: ClientStream | None = None
        self._is_opening = False
        self._reading: asyncio.Task[None] | None = None
        self._unanswered: deque[EncodedRange] = deque()
        self._unanswered_bytes = 0
        self._changed = asyncio.Event()
        self._failure: ClientError | None = None

    # -- for the thread that copies ----------------------------------------------------------

    def open(self, *, until: float, end_by: float) -> pb.SourceOpened:
        """At the owner of the topic, or through any broker. ``end_by``: when the stream ends, come what
        may. Raises Unavailable, Refused."""
        return self._loop.run(self._within(self._open(end_by), until, "opened"))

    def put(self, source_range: EncodedRange, *, until: float) -> bool:
        """Send it as soon as there is room. False: the stream has ended. Raises Unavailable, Refused."""
        return self._loop.run(self._within(self._put(source_range), until, "answered"))

    def settle(self, *, until: float) -> None:
        """Until everything is answered, or the stream has ended. Raises Unavailable, Refused."""
        self._loop.run(self._within(self._settle(), until, "answered"))

    def close(self) -> None:
        """What is not answered goes its way or not."""
        self._loop.run(self._close())

    # -- on the loop -------------------------------------------------------------------------

    async def _within(self, work: Coroutine[Any, Any, T], until: float, what: str) -> T:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout_at(until):
                return await work
        except TimeoutError:
            work.close()  # it has not begun, if the time was up before
            raise Unavailable(
                f"{self.topic}: the target has not {what} within {loop.time() - began:.1f} s"
            ) from None

    async def _open(self, end_by: float) -> pb.SourceOpened:
        route, backoff = Route(self._connection, self.topic, self._owners.get(self.topic)), ReconnectBackoff()
        while True:
            try:
                address = await route.find()
                opened = await self._open_at(address, end_by)
                self._owners.learn(self.topic, address)
                return opened
            except Unavailable as error:
                self._owners.forget(self.topic)
                await self._close()
                delay = backoff.delay(error)
                if self._left(end_by) <= delay:
                    raise
                await asyncio.sleep(delay)

    async def _open_at(self, address: str, end_by: float) -> pb.SourceOpened:
        self._is_opening = True
        self._stream = await self._streams.enter_async_context(
            open_stream(
                self._connection,
                "Append",
                address,
                owes=lambda: self._is_opening or bool(self._unanswered),
                service=rpc.ReplicaStub,
                timeout=self._left(end_by),
            )
        )
        opened: pb.SourceOpened = (await self._stream.open(self._opening)).opened
        self._is_opening = False
        self._failure = None
        self.progress.is_known, self.progress.position = opened.is_known, opened.position
        self.progress.kept_position = opened.kept_position
        self._reading = asyncio.create_task(
            self._read(self._stream), name=f"sava append stream of {self.topic}"
        )
        return opened

    @staticmethod
    def _left(until: float) -> float:
        return max(until - asyncio.get_running_loop().time(), 0.001)

    async def _put(self, source_range: EncodedRange) -> bool:
        assert self._stream is not None
        size = len(source_range.batches)
        while self._goes_on() and self._unanswered and not self._has_room(size):
            await self._change()
        if not self._goes_on():
            return False
        self._unanswered.append(source_range)
        self._unanswered_bytes += size
        try:
            await self._stream.write(pb.AppendRequest(range=source_range.message()))
        except ClientError as error:
            # The end of the stream says why, and a write only that it has ended.
            assert self._reading is not None
            await asyncio.wait((self._reading,), timeout=STATUS_S)
            if self._goes_on():
                raise error
            return False
        return True

    async def _settle(self) -> None:
        while self._goes_on() and self._unanswered:
            await self._change()

    def _goes_on(self) -> bool:
        """Raises what the stream has failed with."""
        if self._failure is not None:
            raise self._failure.again()
        return self.ended is None

    def _has_room(self, size: int) -> bool:
        return len(self._unanswered) < UNANSWERED and self._unanswered_bytes + size <= UNANSWERED_BYTES

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _read(self, stream: ClientStream) -> None:
        try:
            while self.ended is None:
                response: pb.AppendResponse = await stream.receive()
                if response.WhichOneof("kind") == "ended":
                    self._end(response.ended)
                else:
                    self._receive(response.receipt)
                self._changed.set()
        except ClientError as error:
            self._failure = error
        finally:
            self._changed.set()

    def _receive(self, receipt: pb.SourceReceipt) -> None:
        if not self._unanswered or self._unanswered[0].end != receipt.position:
            raise ClientError(f"{self.topic}: the target has a receipt for {receipt.position}, out of order")
        source_range = self._unanswered.popleft()
        self._unanswered_bytes -= len(source_range.batches)
        self.progress.receive(source_range, receipt)

    def _end(self, ended: pb.SourceEnded) -> None:
        self.ended = ended
        if ended.may_pass:
            self._owners.forget(self.topic)  # it may have moved
        self.progress.is_known, self.progress.position = ended.is_known, ended.position

    async def _close(self) -> None:
        await cancelled(self._reading)
        await self._streams.aclose()
        self._reading = self._stream = None


CALL_S: Final = 8.0
"""The timeout of a call over all brokers."""
ATTEMPT_S: Final = 3.0
"""The timeout of one broker."""
ACKS_S: Final = 20.0
"""The timeout for acks: a subscription that lags is looked up in that much of the log."""
MAX_DESCRIBED: Final = 1000
"""The topics of one describe call."""


class TargetCluster:
    """Any thread may call. Every method raises Unavailable, Denied and Refused of ``sava.client.errors``."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._connection = access.connection()
        self._loop = LoopThread("sava target")
        self._calls = ClusterCalls(self._connection)
        self._owners = Owners()

    @staticmethod
    def of(access: ClusterAccess) -> TargetCluster:
        """The instance of this process."""
        return _targets.of(access)

    def close(self) -> None:
        """Close it. The next call of ``of`` makes a new one."""
        _targets.forget(self._access)
        self._loop.run(self._connection.close())
        self._loop.close()

    def hello(self) -> pb.HelloResponse:
        response: pb.HelloResponse = self._ask("Hello", pb.HelloRequest())
        return response

    def describe(self, topics: Sequence[str]) -> dict[str, pb.TopicShape]:
        """The shapes of plain and partitioned topics by name."""
        found: dict[str, pb.TopicShape] = {}
        for first in range(0, len(topics), MAX_DESCRIBED):
            request = pb.DescribeTopicsRequest(topics=topics[first : first + MAX_DESCRIBED])
            found.update((shape.topic, shape) for shape in self._ask("DescribeTopics", request).topics)
        return found

    def ensure_topic(
        self, topic: str, *, partitions: int, cluster: str, reliable: bool = True, grow: bool = False
    ) -> pb.TopicShape:
        """Create or grow a topic and return its shape; 0 partitions is a plain topic. ``cluster`` is for the
        log there."""
        request = pb.EnsureTopicRequest(
            topic=topic, partition_count=partitions, reliable=reliable, grow=grow, cluster_name=cluster
        )
        response: pb.TopicShape = self._ask("EnsureTopic", request)
        return response

    def ensure_schema(self, request: pb.EnsureSchemaRequest) -> pb.EnsureSchemaResponse:
        response: pb.EnsureSchemaResponse = self._ask("EnsureSchema", request)
        return response

    def apply_acks(self, request: pb.ApplyAcksRequest) -> pb.ApplyAcksResponse:
        response: pb.ApplyAcksResponse = self._ask("ApplyAcks", request, ACKS_S, ACKS_S)
        return response

    def append_stream(self, topic: str, source: pb.Source) -> TargetStream:
        """A stream that the caller opens and closes."""
        return TargetStream(self._loop, self._connection, self._owners, topic, source)

    def append_each(
        self, appends: Sequence[pb.EachAppend], *, until: float
    ) -> Future[dict[str, pb.SourceReceipt | None]]:
        """Multi-topic append: one range for each topic, one call per broker. Returns receipts by topic; None
        if the range was refused or its outcome is unknown. A topic is missing if its range was sent and not
        answered before ``until`` (``time.monotonic``)."""
        return self._loop.begin(append_each(self._calls, appends, until))

    def _ask(self, method: str, request: Any, timeout: float = CALL_S, attempt: float = ATTEMPT_S) -> Any:
        asked = self._connection.ask(
            method, request, timeout=timeout, attempt=attempt, service=rpc.ReplicaStub
        )
        return self._loop.run(asked)


_targets: Final = PerProcess[ClusterAccess, TargetCluster](TargetCluster, TargetCluster.close)
