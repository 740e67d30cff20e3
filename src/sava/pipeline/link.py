"""Publishing: encoded batches on their way into one partition, some of them at a time.

Link: the cluster, as a process of a Spark application sees it.

Spark's Python workers are plain blocking code, and there are many of them: readers on the driver, tasks on
executors, commits in processes of their own. Each has one link per cluster, made when first needed, over one
event loop in a thread. Any thread may call.

A worker that was forked makes its own. That works as long as the process that it was forked from, as Spark's
daemon, has not used one: gRPC does not survive a fork, and a link says so instead of waiting for ever.

Brokers that are down, topics that move and leader elections are waited for, up to the time that ``Access``
gives; what a broker refuses is raised at once. Errors are those of ``sava.client.errors``.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from sava.client.batch import Batch
from sava.client.connection import OPEN_TIMEOUT_S, Connection, Tls
from sava.client.errors import ClientError, Closed, Refused, Timeout
from sava.client.loop_thread import LoopThread
from sava.client.producer import Producer, ProducerOptions
from sava.client.reader import Reader, ReaderOptions
from sava.pipeline import several
from sava.pipeline.calls import SIDE_BY_SIDE, Calls
from sava.pipeline.per_process import PerProcess
from sava.pipeline.tails import Extent, Tails
from sava.proto import danube_schema_pb2, replica_pb2, replica_pb2_grpc, streams_pb2, writers_pb2
from sava.records import MAX_BATCH_BYTES, MAX_COUNT, RecordBatch
from sava.tasks import cancelled

UNDER_WAY: Final = 24
"""Batches without a receipt: a broker's window is full, and some are there when it has room again."""


class Publishing:
    """A producer of its own, under a new name: whoever repeats the work begins anew. Owned by one event
    loop."""

    def __init__(self, connection: Connection, name: str) -> None:
        options = ProducerOptions(
            name=f"spark-{secrets.token_hex(8)}",
            is_name_generated=True,
            reliable=None,
            partitions=None,
            exclusive=False,
            linger_ms=0,
            max_batch_messages=MAX_COUNT,
            max_batch_bytes=MAX_BATCH_BYTES,
            max_pending=UNDER_WAY * MAX_COUNT,
            compression=None,
            schema=None,
            codec=None,
            timeout=connection.timeout,
        )
        self._producer = Producer(connection, name, options)
        self._is_open = False
        self._under_way: deque[asyncio.Future[int]] = deque()

    async def put(self, batch: RecordBatch) -> None:
        """Returns when there is room for the next. Raises what became of an earlier one, if that is an
        error."""
        if not self._is_open:
            await self._producer.open()
            self._is_open = True
        while self._under_way and (len(self._under_way) >= UNDER_WAY or self._under_way[0].done()):
            await self._under_way.popleft()
        self._under_way.append(await self._producer.send_batch(batch))

    async def settle(self) -> None:
        """Until everything is durable."""
        while self._under_way:
            await self._under_way.popleft()

    async def close(self) -> None:
        for future in self._under_way:
            future.cancel()  # the batches go their way or not, and nobody asks what became of them
        self._under_way.clear()
        if self._is_open:
            await self._producer.close(timeout=0)


__all__ = ["Access", "Extent", "Link", "OffsetGone", "TopicParts"]


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach a cluster; goes from the driver to the executors."""

    service: str
    """One address or several, with commas between: as of ``sava.client.Client``."""
    token: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    timeout_s: float = 60.0
    """Without a broker, until a call fails. Topics that move and brokers that restart are waited for."""

    def connection(self) -> Connection:
        """Raises Refused: an address that is none, or a file that cannot be read."""
        tls = Tls(self.ca or None, self.cert or None, self.key or None)
        return Connection(
            self.service,
            token=self.token or None,
            tls=tls if self.ca or self.cert or self.key else None,
            timeout=self.timeout_s,
        )


class TopicParts(NamedTuple):
    topic: str
    reliable: bool
    partitioned: bool
    names: tuple[str, ...]
    """One for a plain topic (its own name); of a partitioned one, by number."""
    schema_subject: str


class OffsetGone(Refused):
    """Messages that were to be read are not kept any more. ``start`` is the first of them, ``first`` the
    first that is left."""

    def __init__(self, name: str, start: int, first: int) -> None:
        super().__init__(
            f"{name}: the messages from offset {start} on are gone, the first that is kept is {first}",
            "offset_out_of_range",
        )
        self.name, self.start, self.first = name, start, first

    def __reduce__(self) -> tuple[Any, tuple[str, int, int]]:
        return OffsetGone, (self.name, self.start, self.first)


class Link:
    def __init__(self, access: Access) -> None:
        """For ``of``."""
        self._access = access
        self._connection = access.connection()
        self._calls = Calls(self._connection)
        self._tails = Tails(self._calls)
        self._loop = LoopThread("sava link")

    @staticmethod
    def of(access: Access) -> Link:
        """The link of this process to that cluster."""
        return _links.of(access)

    def close(self) -> None:
        """Whoever asks for it after that gets a new one."""
        _links.forget(self._access)
        self._loop.run(self._close())
        self._loop.close()

    async def _close(self) -> None:
        await self._tails.close()
        await self._connection.close()

    # -- topics ----------------------------------------------------------------------------

    def topics(self, namespace: str = "") -> list[streams_pb2.ListedTopic]:
        request = streams_pb2.ListTopicsRequest(namespace=namespace)
        return list(self._ask("ListTopics", request).topics)

    def parts(self, topic: str, *, create: bool = False) -> TopicParts:
        """Raises TopicUnknown. ``create``: a reliable topic, if the cluster allows it."""
        found = self._loop.run(self._calls.look_up(topic, create=create))
        return TopicParts(
            topic=found.topic,
            reliable=found.reliable,
            partitioned=found.partition_count > 0,
            names=tuple(partition.topic for partition in found.partitions),
            schema_subject=found.schema_subject,
        )

    def schema(self, subject: str, version: int = 0) -> streams_pb2.SchemaResponse:
        """0: the latest version."""
        request = streams_pb2.SchemaRequest(subject=subject, version=version)
        response: streams_pb2.SchemaResponse = self._ask("Schema", request)
        return response

    def schema_of(self, schema_id: int, version: int | None) -> danube_schema_pb2.GetSchemaResponse:
        """By the id that messages name it by. None: the latest version."""
        request = danube_schema_pb2.GetSchemaRequest(schema_id=schema_id, version=version)
        return self._loop.run(self._calls.schema_of(request))

    # -- reading ---------------------------------------------------------------------------

    def extents(self, names: Sequence[str]) -> dict[str, Extent]:
        """Of partitions, asked side by side."""
        return self._loop.run(self._extents(names))

    async def _extents(self, names: Sequence[str]) -> dict[str, Extent]:
        room = asyncio.Semaphore(SIDE_BY_SIDE)

        async def extent(name: str) -> Extent:
            async with room:
                request = streams_pb2.OffsetsRequest(topic=name)
                return Extent.of(await self._calls.owner(name).ask("Offsets", request))

        tasks = [asyncio.create_task(extent(name)) for name in names]
        try:
            return dict(zip(names, await asyncio.gather(*tasks), strict=True))
        finally:
            await cancelled(*tasks)

    def wait_beyond(self, ends: Mapping[str, int], *, timeout_s: float) -> dict[str, Extent]:
        """The extents as soon as one of the partitions has more than ``ends`` says, or the time is up. A
        partition that cannot be reached at the moment is missing in the answer: that nothing is known of it
        is no reason to stop. Raises TopicUnknown when one does not exist any more."""
        return self._loop.run(self._tails.wait(ends, timeout_s))

    def offset_at(self, name: str, publish_time: int) -> int:
        """The first offset that was not published before (µs since 1970 UTC); the end if there is none."""
        request = streams_pb2.OffsetsRequest(topic=name, publish_time=publish_time)
        return int(self._ask_owner(name, "Offsets", request).offset)

    def segments(self, name: str, start: int) -> streams_pb2.SegmentsResponse:
        """Of which the end is beyond ``start``."""
        request = streams_pb2.SegmentsRequest(topic=name, from_offset=start)
        response: streams_pb2.SegmentsResponse = self._ask_owner(name, "Segments", request)
        return response

    def read(self, name: str, start: int, end: int) -> Iterator[RecordBatch]:
        """Assigned batches that cover ``start .. end`` exactly, from the owner of the partition, whoever that
        is by then. Raises OffsetGone when they are not kept any more."""
        if start >= end:
            return
        options = ReaderOptions(start=start, end=end, timeout=self._access.timeout_s, codec=None)
        reader = Reader(self._connection, name, options)
        try:
            self._loop.run(reader.open())
            while (batches := self._next_batches(reader, start)) is not None:
                for batch in batches:
                    if batch.records.base_offset != start:
                        raise ClientError(f"{name}: a gap: {batch.records.base_offset} follows {start}")
                    start = batch.records.next_offset
                    yield batch.records
        finally:
            with suppress(Closed):  # a generator that ends with its process
                self._loop.run(reader.close())

    def read_each(
        self, tails: Mapping[str, tuple[int, int]], *, timeout_s: float, max_bytes: int
    ) -> Iterator[dict[str, list[RecordBatch]]]:
        """Of offsets ``start .. end`` of partitions, from the start on, what their owners have in memory. One
        call to each broker, in the order in which they answer; of each up to ``max_bytes``. Partitions
        of which nothing came are missing: ``read`` waits for them, or says what is wrong."""
        groups = self._loop.run(self._calls.by_owner(tails, timeout=timeout_s))
        readings = [
            self._loop.begin(
                several.read(self._calls, target, {name: tails[name] for name in part}, timeout_s, max_bytes)
            )
            for target, names in groups.items()
            for part in several.parts(names)
        ]
        for reading in as_completed(readings):
            yield reading.result()

    def _next_batches(self, reader: Reader, start: int) -> list[Batch] | None:
        try:
            return self._loop.run(self._heard(reader))
        except Refused as error:
            if error.code != "offset_out_of_range":
                raise
            first = self.extents([reader.topic])[reader.topic].start
            raise (OffsetGone(reader.topic, start, first) if start < first else error) from None

    async def _heard(self, reader: Reader) -> list[Batch] | None:
        """What comes next. A reader waits for what is not there yet; who reads what was there has a reason to
        wonder."""
        silence = self._access.timeout_s + OPEN_TIMEOUT_S
        try:
            async with asyncio.timeout(silence):
                return await reader.next_batches()
        except TimeoutError:
            raise Timeout(f"{reader.topic}: nothing came within {silence:g} s") from None

    def advance(self, name: str, subscription: str, offset: int) -> None:
        """Everything before the offset is done: acked in the subscription, which is created if it is
        missing."""
        request = streams_pb2.AdvanceRequest(topic=name, subscription=subscription, offset=offset)
        self._ask_owner(name, "Advance", request)

    # -- for replication -------------------------------------------------------------------

    def advance_all(
        self, subscription: str, offsets: Mapping[str, int], *, timeout_s: float
    ) -> dict[str, ClientError]:
        """As ``advance``, of many partitions side by side, one attempt each: those that failed."""
        return self._loop.run(self._advance_all(subscription, offsets, timeout_s))

    async def _advance_all(
        self, subscription: str, offsets: Mapping[str, int], timeout_s: float
    ) -> dict[str, ClientError]:
        room = asyncio.Semaphore(SIDE_BY_SIDE)
        failed: dict[str, ClientError] = {}

        async def advance(name: str, offset: int) -> None:
            request = streams_pb2.AdvanceRequest(topic=name, subscription=subscription, offset=offset)
            async with room:
                try:
                    await self._calls.owner(name).call("Advance", request, timeout=timeout_s)
                except ClientError as error:
                    failed[name] = error

        await asyncio.gather(*(advance(name, offset) for name, offset in offsets.items()))
        return failed

    def read_acks(
        self, request: replica_pb2.ReadAcksRequest, *, timeout_s: float
    ) -> replica_pb2.ReadAcksResponse:
        """What a subscription of a partition has acked, from its owner; one attempt."""
        owner = self._calls.owner(request.topic)
        service = replica_pb2_grpc.ReplicaStub
        response: replica_pb2.ReadAcksResponse = self._loop.run(
            owner.call("ReadAcks", request, timeout=timeout_s, service=service)
        )
        return response

    # -- writing ---------------------------------------------------------------------------

    def staging(self, writer: str) -> writers_pb2.StagingResponse:
        return self._loop.run(self._calls.staging(writers_pb2.StagingRequest(writer=writer)))

    def commit(self, request: writers_pb2.CommitRequest) -> writers_pb2.CommitResponse:
        """Until it is published. Raises Refused, also when another run has taken this one's place."""
        return self._loop.run(self._calls.commit(request))

    def publish(self, name: str, batches: Iterator[RecordBatch]) -> int:
        """Batches (not assigned, without producer) to a partition as they come, several on their way at a
        time, each once unless the process dies: how many messages. For the sink that repeats a failed task
        from its beginning."""
        publishing = Publishing(self._connection, name)
        count = 0
        try:
            for batch in batches:
                self._loop.run(publishing.put(batch))
                count += len(batch)
            self._loop.run(publishing.settle())
        finally:
            self._loop.run(publishing.close())
        return count

    # -- asking ----------------------------------------------------------------------------

    def _ask(self, method: str, request: Any) -> Any:
        return self._loop.run(self._calls.ask(method, request))

    def _ask_owner(self, name: str, method: str, request: Any) -> Any:
        return self._loop.run(self._calls.owner(name).ask(method, request))


_links: Final = PerProcess[Access, Link](Link)
