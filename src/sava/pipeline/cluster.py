"""ClusterClient: a blocking client of a cluster for the processes of a Spark application.

Spark's Python workers are plain blocking code, and there are many: readers on the driver, tasks on executors,
commits in processes of their own. Each process has one client per cluster, made when first needed, over one
event loop in a thread. Any thread may call.

A forked worker makes its own client. That works if the parent process, such as Spark's daemon, has not used
one: gRPC does not survive a fork, and the client raises an error instead of waiting without end.

The client waits for brokers that are down, topics that move and leader elections, up to the timeout of its
``ClusterAccess``. What a broker refuses is raised at once. Errors are those of ``sava.client.errors``.

**Per process** (``PerProcess``): one instance per process and key, made when first needed; ``Objects`` is an
object store of that kind. Spark forks its workers from a process that may have made some. An object with
threads does not survive a fork, so a child makes its own. The parent's instances stay referenced in the
child: releasing them would close their channels, which waits for threads that do not exist there.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import secrets
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

from sava.client.connection import OPEN_TIMEOUT_S, Connection
from sava.client.errors import ClientError, Closed, Refused, Timeout
from sava.client.loop_thread import LoopThread
from sava.client.messages import Batch
from sava.client.producer import Producer
from sava.client.publish_stream import ProducerOptions
from sava.client.reader import Reader, ReaderOptions
from sava.pipeline.calls import SIDE_BY_SIDE, ClusterCalls, EndWatcher, PartitionExtent, parts_of, read_tails
from sava.proto import (
    danube_schema_pb2,
    danube_schema_pb2_grpc,
    replica_pb2,
    replica_pb2_grpc,
    streams_pb2,
    writers_pb2,
    writers_pb2_grpc,
)
from sava.records import MAX_BATCH_BYTES, MAX_COUNT, RecordBatch
from sava.security.credentials import Tls, Token
from sava.storage.objectstore import ObjectStore
from sava.tasks import cancelled

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class PerProcess(Generic[K, T]):
    """Instances by key. Any thread may call. Those that exist when the process ends are closed."""

    def __init__(self, make: Callable[[K], T], close: Callable[[T], None]) -> None:
        self._make = make
        self._close = close
        self._guard = threading.Lock()
        self._held: dict[tuple[int, K], T] = {}
        os.register_at_fork(after_in_child=self._forked)
        _kinds.append(self)

    def of(self, key: K) -> T:
        with self._guard:
            held = self._held.get((os.getpid(), key))
            if held is None:
                held = self._held[os.getpid(), key] = self._make(key)
            return held

    def forget(self, key: K) -> None:
        """The next call of ``of`` makes a new instance."""
        with self._guard:
            self._held.pop((os.getpid(), key), None)

    def _forked(self) -> None:
        self._guard = threading.Lock()  # a thread of the parent may have held it

    def close_all(self) -> None:
        for (process, _), held in list(self._held.items()):
            if process == os.getpid():
                self._close(held)


_kinds: Final[list[PerProcess[Any, Any]]] = []


def close_all() -> None:
    """Close every instance of this process, of any kind."""
    for kind in _kinds:
        kind.close_all()


atexit.register(close_all)


class Objects:
    """An object store for blocking code, over an event loop in a thread."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._loop = LoopThread("sava objects")
        self._store = ObjectStore.open(url)

    @staticmethod
    def of(url: str) -> Objects:
        """The store of this process. Credentials and endpoint come from the environment, as for a broker.
        Raises UnsupportedStore."""
        return _stores.of(url)

    def close(self) -> None:
        _stores.forget(self._url)
        self._loop.close()

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """Raises ObjectMissing, ObjectTruncated, ObjectStoreUnavailable."""
        return self._loop.run(self._store.get_ranges(key, [(start, end)]))[0]

    def start_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> Future[list[bytes]]:
        """Start to fetch the ranges and return at once."""
        return self._loop.begin(self._store.get_ranges(key, ranges))

    def start_put(self, key: str, parts: Sequence[bytes]) -> Future[None]:
        """Start to put a new object and return at once. Raises ObjectExists, ObjectStoreUnavailable."""
        return self._loop.begin(self._store.put_new(key, parts))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are no error. Raises ObjectStoreUnavailable."""
        self._loop.run(self._store.delete(keys))


_stores: Final = PerProcess[str, Objects](Objects, Objects.close)


AHEAD: Final = 4
"""Batches of a partition that wait: the task that makes them is not held back by a short pause."""
COMMIT_S: Final = 600.0
"""A broker answers a commit when every part of it is published, which can take that long."""
UNDER_WAY: Final = 24
"""Batches without a receipt. They fill a broker's window, and some wait for its next free place."""


class PartitionPublisher:
    """A producer of encoded batches into one partition, several in flight, for one thread. Its name is new
    each time: a repeated task publishes everything again."""

    def __init__(self, loop: LoopThread, connection: Connection, name: str) -> None:
        options = ProducerOptions(
            name=f"spark-{secrets.token_hex(8)}",
            is_name_generated=True,
            reliable=None,
            linger_ms=0,
            max_batch_messages=MAX_COUNT,
            max_batch_bytes=MAX_BATCH_BYTES,
            max_pending=UNDER_WAY * MAX_COUNT,
            timeout=connection.timeout,
        )
        self._loop = loop
        self._make = partial(Producer, connection, name, options)
        self._producer: Producer | None = None
        self._turn = asyncio.Lock()
        self._ahead: deque[Future[None]] = deque()
        """Batches that wait for the producer to open, or for room."""
        self._under_way: deque[asyncio.Future[int]] = deque()
        self._failure: Exception | None = None

    def put(self, batch: RecordBatch) -> None:
        """Send a batch, and return when the next may follow. Raises the error of an earlier batch."""
        self._ahead.append(self._loop.begin(self._put(batch)))
        while len(self._ahead) > AHEAD or self._ahead[0].done():
            self._ahead.popleft().result()
            if not self._ahead:
                return

    def settle(self) -> None:
        """Return when every batch is durable. Raises the first error."""
        while self._ahead:
            self._ahead.popleft().result()
        self._loop.run(self._settle())

    def close(self) -> None:
        """What is not durable yet may be published or not."""
        for future in self._ahead:
            future.cancel()
        self._loop.run(self._close())

    async def _put(self, batch: RecordBatch) -> None:
        async with self._turn:
            if self._failure is not None:
                raise self._failure
            try:
                if self._producer is None:
                    self._producer = self._make()
                    await self._producer.open()
                while self._under_way and (len(self._under_way) >= UNDER_WAY or self._under_way[0].done()):
                    await self._under_way.popleft()
                self._under_way.append(await self._producer.send_batch(batch))
            except Exception as error:
                self._failure = error
                raise

    async def _settle(self) -> None:
        while self._under_way:
            await self._under_way.popleft()

    async def _close(self) -> None:
        for future in self._under_way:
            future.cancel()
        self._under_way.clear()
        if self._producer is not None:
            await self._producer.close(timeout=0)


__all__ = ["ClusterAccess", "ClusterClient", "OffsetGone", "PartitionExtent", "TopicPartitions"]


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """Address and credentials of a cluster; the driver sends it to the executors."""

    service: str
    """Addresses separated by commas, as for ``sava.client.Client``."""
    token: str = field(default="", repr=False)
    """Never part of a text: readers and tasks hold this, and Spark shows what it meets."""
    ca: str = ""
    cert: str = ""
    key: str = ""
    timeout_s: float = 60.0
    """A call fails after this time without an answer from any broker."""
    token_file: str = ""
    """In place of a token: on every machine that calls, which reads it again when it has changed."""

    @classmethod
    def by_files(
        cls,
        service: str,
        tls: Tls | None,
        *,
        token: str = "",
        token_file: str = "",
        timeout_s: float = 60.0,
    ) -> ClusterAccess:
        files = (tls.ca, tls.cert, tls.key) if tls is not None else (None, None, None)
        ca, cert, key = ("" if file is None else str(file) for file in files)
        return cls(service, token, ca, cert, key, timeout_s, token_file)

    @property
    def bearer(self) -> Token | None:
        """The token, or what knows it."""
        return self.token or (token_from(Path(self.token_file)) if self.token_file else None)

    def options(self) -> dict[str, str]:
        """As options of format("sava"), those that are set."""
        names = {
            "service": "service",
            "token": "token",
            "token_file": "tokenFile",
            "ca": "tlsCa",
            "cert": "tlsCert",
            "key": "tlsKey",
        }
        return {option: value for name, option in names.items() if (value := getattr(self, name))}

    def connection(self) -> Connection:
        """Raises Refused for an invalid address or an unreadable file."""
        tls = Tls(self.ca or None, self.cert or None, self.key or None)
        return Connection(
            self.service,
            token=self.bearer,
            tls=tls if self.ca or self.cert or self.key else None,
            timeout=self.timeout_s,
        )


MAX_TOKEN_BYTES: Final = 64 << 10


def token_from(path: Path) -> Callable[[], str]:
    """Reads the token of a file when it is asked the first time, and again when the file has changed: a look
    at the file for each call. While a file is being replaced the former token stays. The function raises
    Refused."""
    known: list[tuple[tuple[int, int, int], str]] = []

    def token() -> str:
        try:
            found = path.stat()
            look = (found.st_mtime_ns, found.st_size, found.st_ino)
            if not known or known[0][0] != look:
                known[:] = [(look, _read_token(path))]
        except (OSError, Refused) as error:
            if known:
                return known[0][1]
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise Refused(f"token file {path} cannot be used: {reason}") from None
        return known[0][1]

    return token


def _read_token(path: Path) -> str:
    """Raises OSError, Refused."""
    with path.open("rb") as file:
        read = file.read(MAX_TOKEN_BYTES + 1)
    text = read.decode("ascii", errors="replace").strip()
    if not text or len(read) > MAX_TOKEN_BYTES or not (text.isascii() and text.isprintable()) or " " in text:
        raise Refused("it is to hold one token and nothing else")
    return text


class TopicPartitions(NamedTuple):
    """A topic and the names of its partitions."""

    topic: str
    reliable: bool
    partitioned: bool
    names: tuple[str, ...]
    """The topic itself if it is plain, otherwise its partitions in order."""
    schema_subject: str


class OffsetGone(Refused):
    """Retention has deleted messages that were to be read: ``start`` is the first of them, ``first`` the
    first retained offset."""

    def __init__(self, name: str, start: int, first: int) -> None:
        super().__init__(
            f"{name}: offset {start} is no longer retained, the first retained offset is {first}",
            "offset_out_of_range",
        )
        self.name, self.start, self.first = name, start, first

    def __reduce__(self) -> tuple[Any, tuple[str, int, int]]:
        return OffsetGone, (self.name, self.start, self.first)


class ClusterClient:
    """One cluster, as this process sees it. Get it with ``of``."""

    def __init__(self, access: ClusterAccess) -> None:
        self._access = access
        self._connection = access.connection()
        self._calls = ClusterCalls(self._connection)
        self._tails = EndWatcher(self._calls)
        self._loop = LoopThread("sava link")

    @staticmethod
    def of(access: ClusterAccess) -> ClusterClient:
        """The client of this process for that cluster."""
        return _links.of(access)

    def close(self) -> None:
        """Close it. The next call of ``of`` makes a new one."""
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

    def partitions(self, topic: str, *, create: bool = False) -> TopicPartitions:
        """Look a topic up. ``create`` makes a reliable topic if the cluster allows it. Raises
        TopicUnknown."""
        found = self._loop.run(self._calls.look_up(topic, create=create))
        return TopicPartitions(
            topic=found.topic,
            reliable=found.reliable,
            partitioned=found.partition_count > 0,
            names=tuple(partition.topic for partition in found.partitions),
            schema_subject=found.schema_subject,
        )

    def schema(self, subject: str, version: int = 0) -> streams_pb2.SchemaResponse:
        """A version of a subject's schema; 0 is the latest."""
        request = streams_pb2.SchemaRequest(subject=subject, version=version)
        response: streams_pb2.SchemaResponse = self._ask("Schema", request)
        return response

    def schema_of(self, schema_id: int, version: int | None) -> danube_schema_pb2.GetSchemaResponse:
        """The schema with the id that messages carry; None is the latest version."""
        request = danube_schema_pb2.GetSchemaRequest(schema_id=schema_id, version=version)
        response: danube_schema_pb2.GetSchemaResponse = self._ask(
            "GetSchema", request, service=danube_schema_pb2_grpc.SchemaRegistryStub
        )
        return response

    # -- reading ---------------------------------------------------------------------------

    def extents(self, names: Sequence[str]) -> dict[str, PartitionExtent]:
        """The extents of partitions, asked concurrently."""
        return self._loop.run(self._extents(names))

    async def _extents(self, names: Sequence[str]) -> dict[str, PartitionExtent]:
        room = asyncio.Semaphore(SIDE_BY_SIDE)

        async def extent(name: str) -> PartitionExtent:
            async with room:
                request = streams_pb2.OffsetsRequest(topic=name)
                return PartitionExtent.of(await self._calls.owner(name).ask("Offsets", request))

        tasks = [asyncio.create_task(extent(name)) for name in names]
        try:
            return dict(zip(names, await asyncio.gather(*tasks), strict=True))
        finally:
            await cancelled(*tasks)

    def wait_beyond(self, ends: Mapping[str, int], *, timeout_s: float) -> dict[str, PartitionExtent]:
        """Return the extents when one partition has grown beyond its value in ``ends``, or after the timeout.
        A partition whose owner does not answer is missing from the result: unknown is no reason to stop.
        Raises TopicUnknown when a partition no longer exists."""
        return self._loop.run(self._tails.wait(ends, timeout_s))

    def offset_at(self, name: str, publish_time: int) -> int:
        """The first offset published at or after this time (µs since 1970 UTC), or the end."""
        request = streams_pb2.OffsetsRequest(topic=name, publish_time=publish_time)
        return int(self._ask_owner(name, "Offsets", request).offset)

    def segments(self, name: str, start: int) -> streams_pb2.SegmentsResponse:
        """The segments whose end is beyond ``start``."""
        request = streams_pb2.SegmentsRequest(topic=name, from_offset=start)
        response: streams_pb2.SegmentsResponse = self._ask_owner(name, "Segments", request)
        return response

    def read(self, name: str, start: int, end: int) -> Iterator[RecordBatch]:
        """Batches that cover ``start .. end`` exactly, from the partition's owner, also if it changes
        meanwhile. Raises OffsetGone when retention has deleted them."""
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
        """Read the offsets ``start .. end`` of many partitions from the memory of their owners, as far as it
        reaches. One call per broker, up to ``max_bytes`` each, in the order of the answers. A partition
        without an answer is missing: ``read`` waits for it, or raises the reason."""
        groups = self._loop.run(self._calls.by_owner(tails, timeout=timeout_s))
        readings = [
            self._loop.begin(
                read_tails(self._calls, target, {name: tails[name] for name in part}, timeout_s, max_bytes)
            )
            for target, names in groups.items()
            for part in parts_of(names)
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
        """The next batches. A reader waits for messages without end; here they exist, so silence is an
        error."""
        silence = self._access.timeout_s + OPEN_TIMEOUT_S
        try:
            async with asyncio.timeout(silence):
                return await reader.next_batches()
        except TimeoutError:
            raise Timeout(f"{reader.topic}: nothing came within {silence:g} s") from None

    def advance(self, name: str, subscription: str, offset: int) -> None:
        """Acknowledge everything before the offset in the subscription, which is created if missing."""
        request = streams_pb2.AdvanceRequest(topic=name, subscription=subscription, offset=offset)
        self._ask_owner(name, "Advance", request)

    # -- for replication -------------------------------------------------------------------

    def advance_all(
        self, subscription: str, offsets: Mapping[str, int], *, timeout_s: float
    ) -> dict[str, ClientError]:
        """``advance`` for many partitions concurrently, one attempt each. Returns the failures."""
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
        """The acknowledgements of a subscription, from the partition's owner; one attempt."""
        owner = self._calls.owner(request.topic)
        service = replica_pb2_grpc.ReplicaStub
        response: replica_pb2.ReadAcksResponse = self._loop.run(
            owner.call("ReadAcks", request, timeout=timeout_s, service=service)
        )
        return response

    # -- writing ---------------------------------------------------------------------------

    def staging(self, writer: str) -> writers_pb2.StagingResponse:
        request = writers_pb2.StagingRequest(writer=writer)
        response: writers_pb2.StagingResponse = self._ask(
            "Staging", request, service=writers_pb2_grpc.WritersStub
        )
        return response

    def commit(self, request: writers_pb2.CommitRequest) -> writers_pb2.CommitResponse:
        """Return when the batch is published: a commit is idempotent. Raises Refused, also when another run
        has replaced this one."""
        response: writers_pb2.CommitResponse = self._ask(
            "Commit", request, service=writers_pb2_grpc.WritersStub, timeout=COMMIT_S, attempt=COMMIT_S
        )
        return response

    def publish(self, name: str, batches: Iterator[RecordBatch]) -> int:
        """Publish batches (without offsets and producer) to a partition, several in flight, and return the
        number of messages. Each is published once unless the process dies; the at-least-once sink then
        repeats its task from the beginning."""
        count = 0
        with closing(self.publisher(name)) as publisher:
            for batch in batches:
                publisher.put(batch)
                count += len(batch)
            publisher.settle()
        return count

    def publisher(self, name: str) -> PartitionPublisher:
        """For the batches of a partition, to be closed by its owner."""
        return PartitionPublisher(self._loop, self._connection, name)

    # -- asking ----------------------------------------------------------------------------

    def _ask(self, method: str, request: Any, **how: Any) -> Any:
        return self._loop.run(self._calls.ask(method, request, **how))

    def _ask_owner(self, name: str, method: str, request: Any) -> Any:
        return self._loop.run(self._calls.owner(name).ask(method, request))


_links: Final = PerProcess[ClusterAccess, ClusterClient](ClusterClient, ClusterClient.close)
