"""Copying between clusters without a driver: sources and what they hold, who sends it, and what must
have become of it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import grpc
from grpc import aio
from msgspec.structs import replace

from sava.client.blocking import Client
from sava.pipeline.cluster import ClusterAccess, ClusterClient, PartitionExtent
from sava.pipeline.options import TopicPartition
from sava.pipeline.replicate import copying
from sava.pipeline.replicate.copying import copy, copy_together
from sava.pipeline.replicate.target import CopyOutcome, CopyShare, Errand, LinkEnds, TargetCluster
from sava.pipeline.source.planning import SegmentHistory
from sava.proto import replica_pb2 as pb
from sava.proto import replica_pb2_grpc as rpc
from sava.records import Message, Origin, RecordBatch
from sava.storage.source_positions import ORIGIN_TOPIC, PATH, origin_topic
from sava.topics.ranges import runs
from sava.topics.source_copier import Source, SourceRange
from tests.support.waiting import PATIENCE_S, wait_until

T = TypeVar("T")


class Site:
    """A cluster that runs, as its clients see it."""

    def __init__(self, name: str, access: ClusterAccess) -> None:
        self.name = name
        self.access = access
        self.cluster_id = wait_until(TargetCluster.of(access).hello, f"{name} answers").cluster_id

    def close(self) -> None:
        TargetCluster.of(self.access).close()
        ClusterClient.of(self.access).close()

    @property
    def link(self) -> ClusterClient:
        return ClusterClient.of(self.access)

    def create(self, topic: str) -> int:
        """Its id."""
        target = TargetCluster.of(self.access)
        shape = wait_until(
            lambda: target.ensure_topic(topic, partitions=0, cluster=self.name), f"{topic} is there"
        )
        return int(shape.topic_ids[0])

    def publish(self, topic: str, messages: list[Message]) -> None:
        self.link.publish(topic, iter([RecordBatch.from_messages(messages)]))

    def extent(self, topic: str) -> PartitionExtent:
        return self.link.extents([topic])[topic]

    def stored(self, topic: str) -> None:
        """Until everything is in segments."""

        def is_stored() -> bool:
            extent = self.extent(topic)
            return extent.stored >= extent.end

        wait_until(is_stored, f"{topic} is in segments", poll_s=0.05)

    def messages(self, topic: str) -> list[Message]:
        extent = self.extent(topic)
        batches = self.link.read(topic, extent.start, extent.end)
        return [message for batch in batches for message in batch.messages()]


class Copier:
    """One link, one topic, planned anew in each round as a driver would."""

    def __init__(self, source: Site, target: Site, topic: str, *, forward: bool = False) -> None:
        self.source, self.target, self.topic = source, target, topic
        self.forward = forward
        self.topic_id, self.target_topic_id = source.create(topic), target.create(topic)
        self.ends = LinkEnds(
            source=source.access,
            source_name=source.name,
            source_id=source.cluster_id,
            target=target.access,
            target_name=target.name,
            target_id=target.cluster_id,
        )
        self.position = 0

    def errand(self, *, from_tail: bool = False, begin: int | None = 0) -> Errand:
        extent, history = self.source.extent(self.topic), SegmentHistory(self.source.link)
        start = min(self.position, extent.end)
        stored = start if from_tail else extent.stored
        pieces = history.pieces(TopicPartition(self.topic, 0), self.topic, start, extent.end, stored=stored)
        subject = self.source.link.partitions(self.topic).schema_subject
        return Errand(
            name=self.topic,
            topic_id=self.topic_id,
            target_topic_id=self.target_topic_id,
            subject=subject,
            begin=begin,
            end=extent.end,
            pieces=tuple(pieces),
            store_url=history.store_url,
            forward=self.forward,
        )

    def share(self, budget: float = 5.0, *, from_tail: bool = False) -> CopyShare:
        return CopyShare(ends=self.ends, errands=(self.errand(from_tail=from_tail),), budget_s=budget)

    def round(self, budget: float = 5.0, *, from_tail: bool = False) -> CopyOutcome:
        (outcome,) = copy(self.share(budget, from_tail=from_tail))
        self.position = outcome.position if outcome.is_known else self.position
        return outcome

    def finish(self, budget: float = 5.0, *, from_tail: bool = False) -> int:
        """Rounds until the end, whatever passes on the way; how many messages were appended."""
        deadline = time.monotonic() + 5 * PATIENCE_S
        appended = 0
        while self.position < self.source.extent(self.topic).end:
            outcome = self.round(budget, from_tail=from_tail)
            assert not outcome.code or outcome.may_pass, outcome
            assert time.monotonic() < deadline, outcome
            appended += outcome.messages
        return appended

    def expected(self, messages: list[Message]) -> list[Message]:
        """As they must be at the target, if all were published at the source from offset 0 on."""
        ours = {PATH: self.source.name, ORIGIN_TOPIC: origin_topic(self.source.cluster_id, self.topic_id)}
        return [
            replace(
                message,
                attributes={**message.attributes, **ours},
                origin=Origin(self.source.name, offset),
                offset=None,
                topic=None,
            )
            for offset, message in enumerate(messages)
        ]


class Several:
    """Topics of one link that have little to copy, in one share."""

    def __init__(self, source: Site, target: Site, topics: Sequence[str]) -> None:
        self.copiers = [Copier(source, target, topic) for topic in topics]
        self.together = 0
        """Errands that were not copied one by one."""

    def share(self, budget: float = 5.0) -> CopyShare:
        errands = tuple(
            copier.errand(from_tail=True, begin=None if copier.position else 0) for copier in self.copiers
        )
        return CopyShare(ends=self.copiers[0].ends, errands=errands, budget_s=budget, is_light=True)

    def round(self, budget: float = 5.0) -> list[CopyOutcome]:
        return self.copy(self.share(budget))

    def copy(self, share: CopyShare) -> list[CopyOutcome]:
        with mock.patch.object(copying, "copy_together", self._copied_together):
            outcomes = copy(share)
        for copier, outcome in zip(self.copiers, outcomes, strict=True):
            copier.position = outcome.position if outcome.is_known else copier.position
        return outcomes

    def _copied_together(self, ends: LinkEnds, errands: Sequence[Errand], *, until: float) -> Any:
        found = copy_together(ends, errands, until=until)
        self.together += len(found)
        return found

    def finish(self) -> None:
        """Rounds until the end, whatever passes on the way."""
        deadline = time.monotonic() + 60
        while any(each.position < each.source.extent(each.topic).end for each in self.copiers):
            outcomes = self.round()
            assert all(not outcome.code or outcome.may_pass for outcome in outcomes), outcomes
            assert time.monotonic() < deadline, outcomes


def bare(messages: list[Message]) -> list[Message]:
    """Without their place here."""
    return [replace(message, offset=None, topic=None) for message in messages]


def payloads(messages: list[Message]) -> list[str]:
    return [message.payload.decode() for message in messages]


def numbered(prefix: str, start: int, end: int, **attributes: str) -> list[Message]:
    """Some with keys, some with attributes of their own."""
    return [
        Message(
            f"{prefix}-{number}".encode(),
            f"k{number % 7}" if number % 3 else None,
            {**({"n": str(number)} if number % 5 == 0 else {}), **attributes},
            1_000_000 + number,
        )
        for number in range(start, end)
    ]


# -- sources -----------------------------------------------------------------------------------


class Copy(NamedTuple):
    """A message at a source."""

    cluster: str
    topic_id: int
    offset: int
    """There, where it was published."""
    path: tuple[str, ...]
    """The clusters that it has been in, the source's included."""
    cluster_id: str = ""

    @property
    def payload(self) -> bytes:
        return f"{self.cluster}/{self.topic_id}/{self.offset}".encode()

    def message(self, size: int = 0) -> Message:
        attributes = {PATH: ",".join(self.path), ORIGIN_TOPIC: origin_topic(self.cluster_id, self.topic_id)}
        payload = self.payload + b" " * size
        return Message(payload, None, attributes, 1, origin=Origin(self.cluster, self.offset))


class Origins:
    """What one partition of another cluster holds; None: a message that is not to be copied.

    Each message has the place where it was published: this source, or another one whose copy it is. The
    payload names that place, so what is found in a topic tells what it is a copy of.
    """

    def __init__(self, cluster: str, topic_id: int = 7, *, cluster_id: str = "") -> None:
        self.source = Source(cluster, cluster_id or f"id-of-{cluster}", "/default/orders", topic_id)
        self.held: list[Copy | None] = []

    def publish(self, count: int, *, skip: Iterable[int] = ()) -> Origins:
        """Messages of its own; those at these offsets are not to be copied."""
        skipped = set(skip)
        for offset in range(len(self.held), len(self.held) + count):
            cluster, cluster_id, _, topic_id = self.source
            mine = Copy(cluster, topic_id, offset, (cluster,), cluster_id)
            self.held.append(None if offset in skipped else mine)
        return self

    def relay(
        self, other: Origins, start: int = 0, end: int | None = None, *, skip: Iterable[int] = ()
    ) -> Origins:
        """Copies of what another source has to be copied; those of the other's at these offsets are not for
        this one."""
        skipped = set(skip)
        for offset, each in enumerate(other.held[start:end], start):
            if each is not None and offset not in skipped:
                self.held.append(each._replace(path=(*each.path, self.source.cluster)))
        return self

    def source_range(
        self, start: int, end: int, *, begin: bool = False, batches: int = 1, size: int = 0
    ) -> SourceRange:
        """As whoever copies would send it; payloads are longer by ``size``."""
        offsets = [offset for offset in range(start, end) if self.held[offset] is not None]
        messages = [copy.message(size) for offset in offsets if (copy := self.held[offset]) is not None]
        step = -(-len(messages) // batches) or 1
        parts = [messages[first : first + step] for first in range(0, len(messages), step)]
        return SourceRange(
            start,
            end,
            begin,
            [RecordBatch.from_messages(part) for part in parts],
            [bound for each in runs(offsets) for bound in each],
        )

    @property
    def payloads(self) -> list[str]:
        """Of all that is to be copied, in order."""
        return [copy.payload.decode() for copy in self.held if copy is not None]


def of_origin(payloads: Sequence[str], source: Source) -> list[str]:
    """Those that were published there."""
    prefix = f"{source.cluster}/{source.topic_id}/"
    return [stripped for payload in payloads if (stripped := payload.strip()).startswith(prefix)]


# -- senders: the ``Replica`` service by its stub ----------------------------------------------


def source_of(source: Source) -> pb.Source:
    return pb.Source(
        cluster_name=source.cluster,
        cluster_id=source.cluster_id,
        topic=source.topic,
        topic_id=source.topic_id,
    )


def request_of(source_range: SourceRange) -> pb.AppendRequest:
    batches = b"".join(batch.to_bytes() for batch in source_range.batches)
    return pb.AppendRequest(
        range=pb.SourceRange(
            start=source_range.start,
            end=source_range.end,
            begin=source_range.begin,
            batches=batches,
            offsets=source_range.offsets,
        )
    )


@asynccontextmanager
async def replica(address: str) -> AsyncIterator[Any]:
    async with aio.insecure_channel(address) as channel:
        yield rpc.ReplicaStub(channel)


class ReplicaStream:
    """One Append stream."""

    def __init__(self, stub: Any, topic: str, source: Source, *, timeout: float = PATIENCE_S) -> None:
        self._call = stub.Append(timeout=timeout)
        self._opening = pb.AppendRequest(open=pb.OpenSource(topic=topic, source=source_of(source)))

    async def open(self) -> pb.SourceOpened:
        await self._call.write(self._opening)
        response: pb.AppendResponse = await self._call.read()
        if response is aio.EOF:  # type: ignore[attr-defined]
            raise await self.error()
        return response.opened

    async def send(self, source_range: SourceRange) -> None:
        await self._call.write(request_of(source_range))

    async def receive(self) -> pb.SourceReceipt | pb.SourceEnded:
        response: pb.AppendResponse = await self._call.read()
        if response is aio.EOF:  # type: ignore[attr-defined]
            raise await self.error()
        kind = response.WhichOneof("kind")
        return response.receipt if kind == "receipt" else response.ended

    async def close(self) -> grpc.StatusCode:
        """Say that nothing more comes; how the stream has ended."""
        await self._call.done_writing()
        code: grpc.StatusCode = await self._call.code()
        return code

    async def error(self) -> Exception:
        return RuntimeError(f"{await self._call.code()}: {await self._call.details()}")

    def cancel(self) -> None:
        self._call.cancel()


class Sender:
    """Copies a source into a topic to its end, several ranges under way, through whichever broker it
    finds, and starts again from what it is told whenever something fails."""

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        topic: str,
        origins: Origins,
        rng: Random,
        *,
        longest: int = 200,
        is_complete: Callable[[], bool] = lambda: True,
    ) -> None:
        """``is_complete``: nothing more will be published at the source."""
        self._addresses = addresses
        self._topic = topic
        self._origins = origins
        self._rng = rng
        self._longest = longest
        self._is_complete = is_complete
        self._moved = asyncio.Event()
        self.position = 0
        """The last that it was told."""
        self.sent = self.refused = self.failed = 0

    async def beyond(self, position: int) -> None:
        """Until the target has reported that position."""
        while self.position < position:
            self._moved.clear()
            await self._moved.wait()

    def _told(self, position: int) -> None:
        self.position = position
        self._moved.set()

    async def run(self) -> None:
        while True:
            address = self._rng.choice(self._addresses())
            try:
                async with replica(address) as stub:
                    await self._copy(stub)
                return
            except (aio.AioRpcError, RuntimeError, asyncio.InvalidStateError):
                self.failed += 1
                await asyncio.sleep(self._rng.uniform(0, 0.2))

    async def _copy(self, stub: Any) -> None:
        while True:
            stream = ReplicaStream(stub, self._topic, self._origins.source)
            try:
                opened = await stream.open()
                assert opened.kept_position <= opened.position
                self._told(opened.position)
                if await self._stream(stream, opened):
                    return
                self.refused += 1
            finally:
                stream.cancel()

    async def _stream(self, stream: ReplicaStream, opened: pb.SourceOpened) -> bool:
        """Whether the end was reached."""
        position, under_way, is_known = opened.position, 0, opened.is_known
        while True:
            is_complete, total = self._is_complete(), len(self._origins.held)
            while position < total and under_way < 4:
                end = min(total, position + self._rng.randrange(1, self._longest))
                await stream.send(self._origins.source_range(position, end, begin=not is_known))
                position, is_known, under_way = end, True, under_way + 1
                self.sent += 1
            if not under_way:
                if is_complete:
                    return True
                await asyncio.sleep(0.01)
                continue
            answer = await stream.receive()
            if isinstance(answer, pb.SourceEnded):
                return False
            assert answer.position > self.position
            self._told(answer.position)
            under_way -= 1


# -- what is published, and what must arrive ---------------------------------------------------

SEND_S = 150.0
"""A producer waits so long for a broker that was killed."""
SHOWN = 5


class Load:
    """A thread that publishes numbers to some topics (plain ones, or partitions) of a cluster."""

    def __init__(
        self,
        cluster: str,
        urls: str | Sequence[str],
        names: Sequence[str],
        seed: int,
        *,
        pause_s: float = 0.02,
        padding: int = 0,
    ) -> None:
        self.cluster = cluster
        self.published = dict.fromkeys(names, 0)
        """By topic, as far as it is acked."""
        self._urls = urls
        self._chance = random.Random(seed)
        self._pause_s = pause_s
        self._padding = padding
        self._is_over = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"load of {cluster}", daemon=True)
        self._thread.start()

    def wait_begun(self) -> None:
        """Until something was published to each topic, however slow the machine is."""

        def has_begun() -> bool:
            return all(self.published.values()) or self._failure is not None

        wait_until(has_begun, lambda: f"{self.cluster}: {self.published}", timeout=SEND_S, poll_s=0.05)

    def stop(self) -> None:
        """Raises what a producer was told."""
        self._is_over.set()
        self._thread.join(SEND_S + 30)
        assert not self._thread.is_alive(), f"the producers of {self.cluster} hang"
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            with Client(self._urls, timeout=SEND_S) as client:
                producers = {name: client.producer(name, timeout=SEND_S) for name in self.published}
                for producer in producers.values():
                    producer.open()
                while not self._is_over.wait(self._chance.uniform(0, self._pause_s)):
                    name = self._chance.choice(list(producers))
                    first, count = self.published[name], self._chance.randrange(1, 60)
                    numbers = range(first, first + count)
                    sent = [payload(self.cluster, each, self._padding) for each in numbers]
                    producers[name].send_many(sent)
                    self.published[name] += count
                for producer in producers.values():
                    producer.close()
        except BaseException as error:  # noqa: BLE001 (raised by stop)
            self._failure = error


def payload(cluster: str, number: int, padding: int = 0) -> bytes:
    return f"{cluster} {number} ".encode() + b"." * padding


def differences(where: str, messages: Iterable[Message], published: Mapping[str, int]) -> list[str]:
    """What is wrong with a topic of cluster ``where``, of which so many messages of each cluster are to be
    there. Empty: nothing."""
    found: dict[str, list[int]] = {cluster: [] for cluster in published}
    wrong: list[str] = []
    for message in messages:
        cluster, number, _ = message.payload.decode().split(" ")
        found.setdefault(cluster, []).append(int(number))
        origin = message.origin.cluster if message.origin is not None else where
        path = message.attributes.get(PATH, where).split(",")
        if origin != cluster or path[0] != cluster or len(set(path)) < len(path):
            wrong.append(f"{where}: {cluster} {number} says that it is from {origin}, by way of {path}")
        if cluster != where and where in path:
            wrong.append(f"{where}: {cluster} {number} was here before: {path}")
    for cluster, numbers in found.items():
        counts, expected = Counter(numbers), range(published.get(cluster, 0))
        missing = [number for number in expected if number not in counts]
        repeated = [number for number, count in counts.items() if count > 1]
        unknown = [number for number in counts if number not in expected]
        late = [after for before, after in pairwise(numbers) if after < before]
        kinds = {"missing": missing, "repeated": repeated, "never published": unknown, "out of order": late}
        for what, which in kinds.items():
            if which:
                wrong.append(f"{where}: of {cluster} {len(which)} are {what}: {which[:SHOWN]}")
    return wrong
