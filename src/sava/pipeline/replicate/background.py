"""Background threads of a link, and its calls to both clusters.

``LinkControl`` asks the source cluster what to copy and reports the results. Its calls are idempotent and
fail within a second or two: during a leader election the link continues with what it knows.

A ``PeriodicThread`` repeats one kind of work in its own thread, because it may wait for a silent broker.
``SourceWatcher`` and ``OffsetLookup`` ask the source for ends and publish times. ``RemoteVisitor`` asks the
remote for its identity and its topics, with one call for all topics, and creates topics there; a remote that
does not answer is visited again after a growing delay. The link's thread hands over one value to look at;
results come back through ``Post``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, NamedTuple, Protocol

from sava.client.connection import Tls
from sava.client.errors import ClientError, Closed, Denied, TopicUnknown
from sava.errors import CallerError, RetryableError, SavaError
from sava.pipeline.cluster import ClusterAccess, ClusterClient, PartitionExtent
from sava.pipeline.options import TopicPartition, partition_name
from sava.pipeline.replicate.partitions import Delays, PartitionState
from sava.pipeline.replicate.target import LinkEnds
from sava.pipeline.replicate.topics import Creation
from sava.pipeline.runner.control import AdminCalls
from sava.proto import replica_pb2
from sava.proto import replication_pb2 as pb
from sava.proto import replication_pb2_grpc as rpc
from sava.replication.matrix import LinkState

log = logging.getLogger(__name__)

TARGET_S: Final = 5.0
"""A task gives up after this time without a broker of the remote."""


class LinkControl(Protocol):
    """The calls of a link, for one thread. Raises Unavailable when no broker answers in time, and Refused."""

    def link(self, remote: str) -> pb.Link: ...

    def report(self, request: pb.ReportLinkRequest) -> None: ...

    def close(self) -> None: ...


class AdminLinkControl:
    """LinkControl through the admin port of any broker."""

    def __init__(self, addresses: str, *, tls: Tls | None = None) -> None:
        self._calls = AdminCalls(addresses, tls=tls, name="sava link control")

    def link(self, remote: str) -> pb.Link:
        self._calls.refresh()
        link: pb.Link = self._calls.ask("GetLink", pb.GetLinkRequest(remote=remote), rpc.ReplicationStub)
        return link

    def report(self, request: pb.ReportLinkRequest) -> None:
        self._calls.ask("ReportLink", request, rpc.ReplicationStub)

    def close(self) -> None:
        self._calls.close()


class BrokersReplaced(RetryableError):
    """All brokers that existed when the link started have been replaced."""


class FollowingControl:
    """LinkControl that ends a link when all brokers of its start are gone. The link's own connections may
    know new brokers, but the processes of its tasks only know the addresses of its start: it must restart."""

    def __init__(self, control: LinkControl, service: str, now: Callable[[], str]) -> None:
        """Client addresses, separated by commas: ``service`` at the start, ``now`` at present (empty if
        unknown)."""
        self._control = control
        self._service = service
        self._now = now
        self.report, self.close = control.report, control.close

    def link(self, remote: str) -> pb.Link:
        """Raises BrokersReplaced."""
        now = self._now()
        if now and not set(now.split(",")) & set(self._service.split(",")):
            raise BrokersReplaced(
                f"all brokers of the link's start ({self._service}) have been replaced by others ({now}); "
                "the link restarts with these"
            )
        return self._control.link(remote)


def ends_of(link: pb.Link, source: ClusterAccess) -> LinkEnds:
    remote = link.remote
    files = (remote.tls_ca, remote.tls_cert, remote.tls_key)
    return LinkEnds(
        source=source,
        source_name=link.cluster_name,
        source_id=link.cluster_id,
        target=ClusterAccess(remote.service, remote.token, *files, TARGET_S),
        target_name=remote.cluster_name,
        target_id=remote.cluster_id,
    )


LONGEST_S: Final = 60.0


class PeriodicThread:
    """A thread that repeats ``work``, which returns the seconds until its next run. An unexpected error goes
    to ``failed`` and ends the thread. The thread calls ``ended`` last."""

    def __init__(
        self,
        name: str,
        work: Callable[[], float],
        failed: Callable[[Exception], None],
        ended: Callable[[], None],
    ) -> None:
        self._work = work
        self._failed = failed
        self._ended = ended
        self._poked = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def poke(self) -> None:
        """Run the work now, or again at once."""
        self._poked.set()

    def close(self) -> None:
        """Stop after the current run."""
        self._closed.set()
        self._poked.set()

    def _run(self) -> None:
        try:
            self._beat()
        finally:
            self._ended()

    def _beat(self) -> None:
        while not self._closed.is_set():
            self._poked.clear()
            try:
                delay = self._work()
            except Exception as error:  # noqa: BLE001 (the owner decides)
                if not self._closed.is_set():
                    self._failed(error)
                return
            self._poked.wait(min(delay, LONGEST_S))


Post = Callable[[Callable[[], None]], None]
"""Queues a call for the thread of the link."""

WATCH_S: Final = 1.0
PAUSE_S: Final = 0.01
"""The pause between answers, plus a little for each partition: a topic that grows constantly is not polled
constantly."""
IDLE_S: Final = 0.2
GONE_S: Final = 2.0
"""A partition that brokers do not know is asked for again after this time."""
ASK_S: Final = 1.0


class SourceWatcher:
    """Reports the ends of partitions when one has grown."""

    def __init__(
        self,
        link: ClusterClient,
        tell: Callable[[Mapping[str, PartitionExtent], Mapping[str, PartitionState]], None],
    ) -> None:
        self.watched: Mapping[str, PartitionState] = {}
        """Partitions by name. The thread of the link sets it."""
        self._link = link
        self._tell = tell
        self._ends: dict[str, int] = {}
        self._gone: dict[str, float] = {}

    def work(self) -> float:
        now = time.monotonic()
        watched = self.watched
        self._gone = {name: at for name, at in self._gone.items() if now - at < GONE_S}
        beyond = {name: self._ends.get(name, -1) for name in watched if name not in self._gone}
        if not beyond:
            return IDLE_S
        try:
            found = self._link.wait_beyond(beyond, timeout_s=WATCH_S)
        except TopicUnknown:
            self._look_for_gone(beyond)
            return IDLE_S
        except Closed:
            return WATCH_S  # the process ends
        except SavaError as error:
            log.warning("replication: unknown ends, retrying error=%s", error)
            return WATCH_S
        self._ends = {name: end for name, end in self._ends.items() if name in watched}
        self._ends |= {name: extent.end for name, extent in found.items()}
        self._tell(found, watched)
        return PAUSE_S + len(beyond) / 10_000

    def _look_for_gone(self, names: Mapping[str, int]) -> None:
        """Find deleted partitions. The cluster soon removes them from the link, too."""
        try:
            listed = self._link.topics()
        except SavaError as error:
            log.info("replication: could not list topics error=%s", error)
            return
        there_are = {
            partition_name(TopicPartition(each.topic, number), partitioned=each.partition_count > 0)
            for each in listed
            for number in range(each.partition_count or 1)
        }
        now = time.monotonic()
        for name in names:
            if name not in there_are:
                self._gone[name] = now
                self._ends.pop(name, None)


class OffsetQuestion(NamedTuple):
    """A question about a partition: the publish time of ``offset``, or the offset at ``publish_us`` if
    given."""

    partition: PartitionState
    offset: int = 0
    publish_us: int | None = None


class OffsetLookup:
    """Answers questions about single messages, a few at a time."""

    def __init__(self, link: ClusterClient, post: Post) -> None:
        self.questions: Sequence[OffsetQuestion] = ()
        """The thread of the link sets it when it is empty."""
        self._link = link
        self._post = post

    def work(self) -> float:
        for question in self.questions:
            try:
                self._answer(question)
            except SavaError as error:
                log.info(
                    "replication: could not look up an offset topic=%s error=%s",
                    question.partition.name,
                    error,
                )
        self.questions = ()
        return ASK_S

    def _answer(self, question: OffsetQuestion) -> None:
        partition, offset = question.partition, question.offset
        if question.publish_us is not None:
            found = self._link.offset_at(partition.name, question.publish_us)
            self._post(partial(partition.start_at, found))
            return
        for batch in self._link.read(partition.name, offset, offset + 1):
            self._post(partial(partition.note_time, offset, batch.header.min_publish_time))


DESCRIBE_S: Final = 2.0
UNASKED_S: Final = 0.2
MADE_AT_ONCE: Final = 8


class _Target(Protocol):
    """As ``replicate.target.Target``. Raises Unavailable, Denied, Refused."""

    def hello(self) -> replica_pb2.HelloResponse: ...

    def describe(self, topics: Sequence[str]) -> dict[str, replica_pb2.TopicShape]: ...

    def ensure_topic(
        self, topic: str, *, partitions: int, cluster: str, reliable: bool = True, grow: bool = False
    ) -> replica_pb2.TopicShape: ...


class Listener(Protocol):
    """Gets the results in the thread of the link."""

    def described(self, shapes: Mapping[str, replica_pb2.TopicShape]) -> None: ...

    def unanswered(self, state: LinkState, reason: str, retry_ms: int) -> None: ...

    def made(self, creation: Creation, shape: replica_pb2.TopicShape) -> None: ...

    def not_made(self, creation: Creation, state: LinkState, reason: str) -> None: ...


class RemoteReplaced(ClientError, CallerError):
    """Another cluster answers at the remote's address."""


class RemoteVisitor:
    """The calls to the remote. ``work`` is for a PeriodicThread; the rest for the thread of the link."""

    def __init__(
        self, remote: str, target: Callable[[ClusterAccess], _Target], post: Post, listener: Listener
    ):
        self.ends: LinkEnds | None = None
        self.topics: Sequence[str] = ()
        self._remote = remote
        self._target = target
        self._post = post
        self._listener = listener
        self._is_asked = threading.Event()
        self._creations: list[Creation] = []
        self._guard = threading.Lock()
        self._delays = Delays()
        self._describe_at = 0.0

    # -- for the thread of the link ------------------------------------------------------------

    def describe_soon(self) -> None:
        self._is_asked.set()

    def make(self, creations: Sequence[Creation]) -> None:
        with self._guard:
            self._creations += creations

    # -- its own -------------------------------------------------------------------------------

    def work(self) -> float:
        ends, topics = self.ends, self.topics
        if ends is None or not topics:
            return UNASKED_S
        target = self._target(ends.target)
        with self._guard:
            creations, self._creations = self._creations, []
        if creations:
            with ThreadPoolExecutor(min(MADE_AT_ONCE, len(creations))) as pool:
                list(pool.map(partial(self._make, target, ends), creations))
        if self._is_asked.is_set() or time.monotonic() >= self._describe_at:
            self._is_asked.clear()
            self._describe_at = time.monotonic() + self._describe(target, ends, topics)
        return max(0.0, self._describe_at - time.monotonic())

    def _describe(self, target: _Target, ends: LinkEnds, topics: Sequence[str]) -> float:
        """Describe the topics. Returns the seconds until the next time."""
        try:
            self._require_same(target.hello(), ends)
            shapes = target.describe(topics)
        except ClientError as error:
            delay = self._delays.next()
            retry_ms = time.time_ns() // 1_000_000 + round(delay * 1000)
            self._post(partial(self._listener.unanswered, _state(error), str(error), retry_ms))
            return delay
        self._delays.reset()
        self._post(partial(self._listener.described, shapes))
        return DESCRIBE_S

    def _require_same(self, hello: replica_pb2.HelloResponse, ends: LinkEnds) -> None:
        if (hello.cluster_name, hello.cluster_id) != (ends.target_name, ends.target_id):
            raise RemoteReplaced(
                f"remote {self._remote} is now cluster {hello.cluster_name} (id {hello.cluster_id}), and "
                f"was {ends.target_name} (id {ends.target_id}) when it was added; if that is intended, "
                f"remove it with `sava remotes remove {self._remote}` and add it again"
            )

    def _make(self, target: _Target, ends: LinkEnds, creation: Creation) -> None:
        try:
            shape = target.ensure_topic(
                creation.topic,
                partitions=creation.partitions,
                cluster=ends.source_name,
                reliable=creation.reliable,
                grow=creation.grow,
            )
        except ClientError as error:
            self._post(partial(self._listener.not_made, creation, _state(error), str(error)))
        else:
            self._post(partial(self._listener.made, creation, shape))


def _state(error: ClientError) -> LinkState:
    if isinstance(error, Denied):
        return LinkState.DENIED
    return LinkState.FAILED if isinstance(error, CallerError) else LinkState.UNREACHABLE
