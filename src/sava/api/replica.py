"""The service ``Replica`` of the client port: what other clusters need that replicate into this one.

Any broker answers what is known from the metadata store. Source positions, and acks, are the business of the
topic's owner; calls for it are passed on to it as all calls about a topic are.

**Append** is one stream of ranges of a source topic, from its opening to its end. As with publishing, the
directions do not wait for each other: the broker takes ranges while those before them are on their way to the
disk, up to ``MAX_UNANSWERED``. Receipts go out in the order of the ranges. The first failure is the last
answer:

    ranges     1  2  3  4  5
    receipts   1  2  ended(why, the source position)      4 and 5, taken or not, have failed with 3

The position that the end carries is durable. It is read when all that is on its way from this source, by any
stream, has come to its end: the client that continues from there has a chance to be the next. It is said in
the stream and not only in its status, for a stream that ends while its client writes fails there with an
error of gRPC's own.

**ReadEach and AppendEach** carry a little of each of many topics in one call. A stream costs the same whether
it carries one message or a million, and most of that cost is its beginning and its end. A copier with a few
messages of each of a hundred topics, several times a second, would do little else than open streams. Nothing
else is different: what is read is what ``Streams.Read`` would give, and each range could have come by
``Append``, and is taken or refused alone. What is not in memory, or is another broker's, is left to those
calls: they wait, ask others, and say why not.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import sava
from sava.api.streams import GOODBYE_S, opening, ranges_of
from sava.errors import HostError, RetryableError, SavaError
from sava.metadata.errors import NotInitialized, OutcomeUnknown
from sava.peers import error_mapping
from sava.peers.forwarding import EOF
from sava.proto import replica_pb2 as pb
from sava.proto import replica_pb2_grpc as rpc
from sava.records import iter_batches
from sava.schemas.registry import SchemaRegistry
from sava.storage.source_positions import Origin
from sava.tasks import cancelled
from sava.topics.errors import (
    MessageInvalid,
    NamespaceUnknown,
    SubscriptionUnknown,
    TopicExists,
    TopicMismatch,
)
from sava.topics.names import TopicName, check_name
from sava.topics.origin_acks import OriginAcks
from sava.topics.ranges import Range
from sava.topics.served import ServedTopics
from sava.topics.source_copier import Copied, Source, SourceCopier, SourceRange
from sava.topics.specs import SubscriptionType, TopicSpec
from sava.topics.topic import Topic

# ruff: noqa: N802 (gRPC names the methods)


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
        if len(request.topics) > MAX_DESCRIBED:
            raise MessageInvalid(f"{len(request.topics)} topics; one call describes {MAX_DESCRIBED}")
        await self._topics.ready()
        names = [_head(topic) for topic in request.topics]
        exist = {each: await self._exists(each) for each in {name.namespace for name in names}}
        shapes = [await self._shape(name, exist[name.namespace]) for name in names]
        return pb.DescribeTopicsResponse(topics=shapes)

    async def EnsureTopic(self, request: pb.EnsureTopicRequest, context: Any) -> pb.TopicShape:
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
        """The faster of two callers has created it; what it is then is for the caller to compare."""
        try:
            spec = await self._topics.create(
                name, reliable=request.reliable, partitions=request.partition_count
            )
        except TopicExists:
            return await self._topics.registry.need(name)
        except TopicMismatch:  # another caller added partitions of the other kind meanwhile
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
        found = await self._schemas.register(
            request.subject, request.type, request.definition, created_by="replication"
        )
        if request.topic:
            await self._topics.follow_subject(TopicName.parse(request.topic), request.subject)
        return pb.EnsureSchemaResponse(schema_id=found.schema_id, version=found.version)

    # -- messages and acks -------------------------------------------------------------------

    # grpc.aio also takes coroutines that read and write through the context; the stubs know generators only.
    async def Append(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        await AppendStream(await self._copier(await opening(context)), context).run()

    async def AppendEach(self, request: pb.AppendEachRequest, context: Any) -> None:  # type: ignore[override]
        await append_each(request, lambda each: self._copier(each.open, each.topic_id), context)

    async def ReadEach(self, request: pb.ReadEachRequest, context: Any) -> None:  # type: ignore[override]
        await read_each(self._topics, request, context)

    async def _copier(self, opening: pb.OpenSource, topic_id: int | None = None) -> SourceCopier:
        """``topic_id``: that the topic must have."""
        source = self._source(opening.source)
        topic = await self._topics.get(TopicName.parse(opening.topic))
        if topic_id not in (None, topic.topic_id):
            raise TopicMismatch(f"topic {topic.name} has id {topic.topic_id}; {topic_id} was a former one's")
        return await topic.open_source(source)

    async def ApplyAcks(self, request: pb.ApplyAcksRequest, context: Any) -> pb.ApplyAcksResponse:
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
            notified=request.told,
            since=request.since,
            owner=request.owner,
        )
        return pb.ApplyAcksResponse(
            position=applied.position, left=map(_told, applied.left), told=applied.notified
        )

    async def ReadAcks(self, request: pb.ReadAcksRequest, context: Any) -> pb.ReadAcksResponse:
        topic = await self._topics.get(TopicName.parse(request.topic))
        try:
            found = await topic.read_acks(request.subscription, ranges_of(request.known), self._own(topic))
        except SubscriptionUnknown:
            return pb.ReadAcksResponse(exists=False, topic_id=topic.topic_id)
        return pb.ReadAcksResponse(
            exists=True,
            type=found.type,
            topic_id=topic.topic_id,
            acks=map(_told, found.acks),
            covered=_flat(found.covered),
            more=found.more,
            owner=found.owner,
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
                "messages would look like this cluster's own; give one of them another cluster_name"
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


# -- appending a stream of ranges ------------------------------------------------------------------


MAX_UNANSWERED: Final = 64
"""Ranges of one stream whose outcome is open. Copiers keep fewer."""
MAY_PASS: Final = (RetryableError, OutcomeUnknown)


class AppendStream:
    """Owned by the event loop."""

    def __init__(self, copier: SourceCopier, context: Any) -> None:
        self._copier = copier
        self._context = context
        self._unanswered: deque[asyncio.Future[Copied]] = deque()
        self._changed = asyncio.Event()
        """An outcome is known, or there will be no more ranges."""
        self._has_room = asyncio.Event()
        self._has_read_all = False
        self._refusal: SavaError | None = None
        """Why a range was not taken: no other one is then."""

    async def run(self) -> None:
        """Until the client is done. Raises the error that the stream ends with; everything before it has its
        receipt."""
        progress = await self._copier.progress()
        opened = pb.SourceOpened(
            is_known=progress.is_known,
            position=progress.position,
            kept_position=progress.kept,
            topic_id=self._copier.topic_id,
            max_message_size=self._copier.max_message_size,
        )
        await self._context.write(pb.AppendResponse(opened=opened))
        reading = asyncio.ensure_future(self._read())
        try:
            failure = await self._answer()
            if failure is not None:
                await self._end(failure, reading)
            await reading
        finally:
            await cancelled(reading)

    async def _read(self) -> None:
        try:
            while (request := await self._context.read()) is not EOF:
                if self._refusal is not None:
                    continue
                try:
                    outcome = await self._copier.begin(_requested(request))
                except SavaError as error:
                    self._refusal = error
                    self._changed.set()
                    continue
                self._unanswered.append(outcome)
                outcome.add_done_callback(lambda _: self._changed.set())
                while len(self._unanswered) >= MAX_UNANSWERED and self._refusal is None:
                    self._has_room.clear()
                    await self._has_room.wait()
        finally:
            self._has_read_all = True
            self._changed.set()

    async def _answer(self) -> SavaError | None:
        """Receipts, until there is nothing more to answer; what the stream fails with."""
        while True:
            self._changed.clear()
            while self._unanswered and self._unanswered[0].done():
                outcome = self._unanswered.popleft()
                self._has_room.set()
                failure = outcome.exception()
                if isinstance(failure, SavaError):
                    self._refusal = failure
                    return failure
                copied = outcome.result()
                await self._context.write(pb.AppendResponse(receipt=receipt_of(copied)))
            if not self._unanswered:
                if self._refusal is not None or self._has_read_all:
                    return self._refusal
                await self._changed.wait()
            elif not self._unanswered[0].done():
                await self._changed.wait()

    async def _end(self, failure: SavaError, reading: asyncio.Future[None]) -> None:
        """Tell the client, and wait until it has heard it."""
        progress = await self._copier.progress()
        ended = pb.SourceEnded(
            code=error_mapping.code_of(failure),
            reason=str(failure),
            may_pass=isinstance(failure, MAY_PASS) and not isinstance(failure, HostError),
            is_known=progress.is_known,
            position=progress.position,
        )
        await self._context.write(pb.AppendResponse(ended=ended))
        await asyncio.wait((reading,), timeout=GOODBYE_S)
        raise failure


def _requested(request: pb.AppendRequest) -> SourceRange:
    if request.WhichOneof("kind") != "range":
        raise MessageInvalid("an append stream carries ranges after its opening")
    return range_of(request.range)


def range_of(message: pb.SourceRange) -> SourceRange:
    batches = list(iter_batches(message.batches))
    return SourceRange(message.start, message.end, message.begin, batches, message.offsets)


def receipt_of(copied: Copied) -> pb.SourceReceipt:
    return pb.SourceReceipt(
        position=copied.position,
        kept_position=copied.kept,
        appended=copied.appended,
        duplicates=copied.duplicates,
        loops=copied.loops,
    )


# -- multi-topic read and append -------------------------------------------------------------------


MAX_EACH: Final = 256
"""Topics in one call."""
TAIL_BYTES: Final = 1 << 20
"""Of one topic; and of one response, about."""
MAX_BYTES: Final = 16 << 20
"""Of one call."""


async def read_each(topics: ServedTopics, request: pb.ReadEachRequest, context: Any) -> None:
    _check_number(request.tails)
    left = min(request.max_bytes, MAX_BYTES)
    response, size = pb.ReadEachResponse(), 0
    for number, tail in enumerate(request.tails):
        topic = topics.loaded.get(TopicName.parse(tail.topic))
        if topic is None or not topic.is_serving or topic.log is None:
            continue
        log = topic.log
        batches = log.recent(tail.start, tail.end, max_bytes=min(left, TAIL_BYTES))
        response.tails.add(
            number=number,
            batches=[batch.to_bytes() for batch in batches],
            start_offset=log.start_offset,
            stored_offset=log.stored_offset,
            next_offset=log.next_offset,
        )
        read = sum(batch.header.length for batch in batches)
        left, size = left - read, size + read
        if size >= TAIL_BYTES:
            await context.write(response)
            response, size = pb.ReadEachResponse(), 0
    await context.write(response)


async def append_each(
    request: pb.AppendEachRequest,
    open_source: Callable[[pb.EachAppend], Awaitable[SourceCopier]],
    context: Any,
) -> None:
    """Side by side: one that waits, for its rate or because its topic moves, keeps no other waiting."""
    _check_number(request.appends)
    waiting: set[asyncio.Task[pb.EachAnswer]] = set()
    try:
        for number, each in enumerate(request.appends):
            waiting.add(asyncio.create_task(_answer(number, each, open_source)))
            await asyncio.sleep(0)  # others have their turn in between
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            await context.write(pb.AppendEachResponse(answers=[task.result() for task in done]))
    finally:
        for task in waiting:
            task.cancel()


async def _answer(
    number: int, each: pb.EachAppend, open_source: Callable[[pb.EachAppend], Awaitable[SourceCopier]]
) -> pb.EachAnswer:
    try:
        copier = await open_source(each)
        copied = await (await copier.begin(range_of(each.range)))
    except SavaError as error:
        return pb.EachAnswer(number=number, code=error_mapping.code_of(error))
    return pb.EachAnswer(number=number, receipt=receipt_of(copied))


def _check_number(of: Sequence[object]) -> None:
    if len(of) > MAX_EACH:
        raise MessageInvalid(f"{len(of)} topics; one call takes {MAX_EACH}")
