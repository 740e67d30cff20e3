"""Background threads of a link, and its calls to both clusters.

``AdminLinkControl`` asks the source cluster what to copy and reports the results. Its calls are idempotent
and fail within a second or two: during a leader election the link continues with what it knows.

A ``PeriodicThread`` repeats one kind of work in its own thread, because it may wait for a silent broker.
``SourceWatcher`` asks the source for the ends of partitions. ``RemoteVisitor`` asks the remote for its
identity and its topics, with one call for all topics, and creates topics there; a remote that does not answer
is visited again after a growing delay. The link's thread hands over one value to look at; results come back
through ``Post``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sava.client.errors import ClientError, Closed, Denied, Refused, TopicUnknown
from sava.errors import CallerError, RetryableError, SavaError
from sava.pipeline.cluster import ClusterAccess, ClusterClient, PartitionExtent
from sava.pipeline.options import TopicPartition, partition_name
from sava.pipeline.replicate.partitions import FIRST_DELAY_S, LONGEST_DELAY_S, PartitionState
from sava.pipeline.replicate.target import LinkEnds, TargetCluster
from sava.pipeline.replicate.topics import Creation
from sava.pipeline.runner.control import AdminCalls
from sava.proto import replica_pb2
from sava.proto import replication_pb2 as pb
from sava.proto import replication_pb2_grpc as rpc
from sava.replication.matrix import LinkState
from sava.security.credentials import Tls, Token
from sava.security.secret_files import SecretFiles
from sava.tasks import Backoff

if TYPE_CHECKING:
    from sava.pipeline.replicate.job import LinkJob

log = logging.getLogger(__name__)

NOWHERE: Final = Path("/nonexistent")
TARGET_S: Final = 5.0
"""A task gives up after this time without a broker of the remote."""


class BrokersReplaced(RetryableError):
    """All brokers that existed when the link started have been replaced."""


class AdminLinkControl(AdminCalls):
    """The calls of a link to its own cluster, for one thread. Raises Unavailable when no broker answers in
    time, and Refused.

    With ``client_addresses`` the link ends when all brokers of its start are gone. The link's own connections
    may know new brokers, but the processes of its tasks only know the addresses of its start: it must
    restart."""

    def __init__(
        self,
        addresses: str,
        *,
        tls: Tls | None = None,
        token: Token | None = None,
        client_addresses: Callable[[], str] = lambda: "",
    ) -> None:
        """``client_addresses``: those of the brokers at present, separated by commas; empty if unknown."""
        super().__init__(addresses, tls=tls, token=token, name="sava link control")
        self._client_addresses = client_addresses
        self._at_start = client_addresses()

    def link(self, remote: str) -> pb.Link:
        """Raises BrokersReplaced."""
        now = self._client_addresses()
        if now and not set(now.split(",")) & set(self._at_start.split(",")):
            raise BrokersReplaced(
                f"all brokers of the link's start ({self._at_start}) have been replaced by others ({now}); "
                "the link restarts with these"
            )
        self.refresh()
        link: pb.Link = self.ask("GetLink", pb.GetLinkRequest(remote=remote), rpc.ReplicationStub)
        return link

    def report(self, request: pb.ReportLinkRequest) -> None:
        self.ask("ReportLink", request, rpc.ReplicationStub)


@dataclass(frozen=True, slots=True)
class RemoteSecrets:
    """Where this machine has what remotes ask for. The cluster says only what the files are called."""

    directory: Path | None = None
    """None: names are to be whole paths, as the brokers accept them below their own directory."""
    token_files: Mapping[str, Path] = field(default_factory=dict)
    """By remote, in place of what the cluster says."""
    token: str = field(default="", repr=False)
    """For a remote without a file."""

    def access(self, remote: pb.Remote) -> ClusterAccess:
        """The token is read here, for the executors too, and again each time. Raises SecretFileRefused."""
        files = (self._path(remote.tls_ca), self._path(remote.tls_cert), self._path(remote.tls_key))
        return ClusterAccess(remote.service, self._token(remote), *files, TARGET_S)

    def _token(self, remote: pb.Remote) -> str:
        own = self.token_files.get(remote.name)
        if own is not None:
            return SecretFiles(own.parent, "the directory of --remote-token").token(own.name)
        if not remote.token_file:
            return self.token
        return self._files(remote.token_file).token(remote.token_file)

    def _path(self, name: str) -> str:
        return str(self._files(name).path(name)) if name else ""

    def _files(self, name: str) -> SecretFiles:
        if self.directory is not None:
            return SecretFiles(self.directory, "--secrets-dir")
        # A whole path, as a broker has accepted it; any other name is not below this and refused.
        return SecretFiles(Path(name).parent if Path(name).is_absolute() else NOWHERE, "--secrets-dir")


def ends_of(link: pb.Link, source: ClusterAccess, remotes: RemoteSecrets) -> LinkEnds:
    """Raises SecretFileRefused."""
    remote = link.remote
    return LinkEnds(
        source=source,
        source_name=link.cluster_name,
        source_id=link.cluster_id,
        target=remotes.access(remote),
        target_name=remote.cluster_name,
        target_id=remote.cluster_id,
    )


LONGEST_WAIT_S: Final = 60.0


class PeriodicThread(threading.Thread):
    """A thread that repeats ``work``, which returns the seconds until its next run. An unexpected error goes
    to ``failed`` and ends the thread. The thread calls ``ended`` last."""

    def __init__(
        self,
        name: str,
        work: Callable[[], float],
        failed: Callable[[Exception], None],
        ended: Callable[[], None],
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.due = threading.Event()
        """Set: run the work now, or again at once."""
        self._work = work
        self._failed = failed
        self._ended = ended
        self._closed = threading.Event()

    def close(self) -> None:
        """Stop after the current run."""
        self._closed.set()
        self.due.set()

    def run(self) -> None:
        try:
            self._beat()
        finally:
            self._ended()

    def _beat(self) -> None:
        while not self._closed.is_set():
            self.due.clear()
            try:
                delay = self._work()
            except Exception as error:  # noqa: BLE001 (the owner decides)
                if not self._closed.is_set():
                    self._failed(error)
                return
            self.due.wait(min(delay, LONGEST_WAIT_S))


Post = Callable[[Callable[[], None]], None]
"""Queues a call for the thread of the link."""

WATCH_S: Final = 1.0
PAUSE_S: Final = 0.01
"""The pause between answers, plus a little for each partition: a topic that grows constantly is not polled
constantly."""
IDLE_S: Final = 0.2
GONE_S: Final = 2.0
"""A partition that brokers do not know is asked for again after this time."""


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


DESCRIBE_S: Final = 2.0
UNASKED_S: Final = 0.2
MADE_AT_ONCE: Final = 8


class RemoteVisitor:
    """The calls to the remote. ``work`` is for a PeriodicThread; the rest for the thread of the link."""

    def __init__(
        self, remote: str, target: Callable[[ClusterAccess], TargetCluster], post: Post, link: LinkJob
    ):
        self.ends: LinkEnds | None = None
        self.topics: Sequence[str] = ()
        self._remote = remote
        self._target = target
        self._post = post
        self._link = link
        self.is_asked = threading.Event()
        """Set: describe the topics soon."""
        self._creations: list[Creation] = []
        self._guard = threading.Lock()
        self._backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S, jitter=0.25)
        self._describe_at = 0.0

    # -- for the thread of the link ------------------------------------------------------------

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
        if self.is_asked.is_set() or time.monotonic() >= self._describe_at:
            self.is_asked.clear()
            self._describe_at = time.monotonic() + self._describe(target, ends, topics)
        return max(0.0, self._describe_at - time.monotonic())

    def _describe(self, target: TargetCluster, ends: LinkEnds, topics: Sequence[str]) -> float:
        """Describe the topics. Returns the seconds until the next time."""
        try:
            self._require_same(target.hello(), ends)
            shapes = target.describe(topics)
        except ClientError as error:
            delay = self._backoff.next()
            retry_ms = time.time_ns() // 1_000_000 + round(delay * 1000)
            self._post(partial(self._link.unanswered, _state(error), str(error), retry_ms))
            return delay
        self._backoff.reset()
        self._post(partial(self._link.described, shapes))
        return DESCRIBE_S

    def _require_same(self, hello: replica_pb2.HelloResponse, ends: LinkEnds) -> None:
        if (hello.cluster_name, hello.cluster_id) != (ends.target_name, ends.target_id):
            raise Refused(
                f"remote {self._remote} is now cluster {hello.cluster_name} (id {hello.cluster_id}), and "
                f"was {ends.target_name} (id {ends.target_id}) when it was added; if that is intended, "
                f"remove it with `sava remotes remove {self._remote}` and add it again"
            )

    def _make(self, target: TargetCluster, ends: LinkEnds, creation: Creation) -> None:
        try:
            shape = target.ensure_topic(
                creation.topic,
                partitions=creation.partitions,
                cluster=ends.source_name,
                reliable=creation.reliable,
                grow=creation.grow,
            )
        except ClientError as error:
            self._post(partial(self._link.not_made, creation, _state(error), str(error)))
        else:
            self._post(partial(self._link.made, creation, shape))


def _state(error: ClientError) -> LinkState:
    if isinstance(error, Denied):
        return LinkState.DENIED
    return LinkState.FAILED if isinstance(error, CallerError) else LinkState.UNREACHABLE
