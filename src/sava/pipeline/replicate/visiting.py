"""Beside a link, at the remote: who it is, what it has of the topics, and what is made there.

One call describes all topics. A remote that does not answer is visited again after a delay that grows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, Protocol

from sava.client.errors import ClientError, Denied
from sava.errors import CallerError
from sava.pipeline.link import Access
from sava.pipeline.replicate.pace import Delays
from sava.pipeline.replicate.topics import Creation
from sava.pipeline.replicate.watching import Post
from sava.pipeline.replicate.work import LinkEnds
from sava.proto import replica_pb2 as pb
from sava.replication.matrix import State

DESCRIBE_S: Final = 2.0
IDLE_S: Final = 0.2
MADE_AT_ONCE: Final = 8


class Target(Protocol):
    """As ``replicate.target.Target``. Raises Unavailable, Denied, Refused."""

    def hello(self) -> pb.HelloResponse: ...

    def describe(self, topics: Sequence[str]) -> dict[str, pb.TopicShape]: ...

    def ensure_topic(
        self, topic: str, *, partitions: int, cluster: str, reliable: bool = True, grow: bool = False
    ) -> pb.TopicShape: ...


class Listener(Protocol):
    """Is told in the thread of the link."""

    def described(self, shapes: Mapping[str, pb.TopicShape]) -> None: ...

    def unanswered(self, state: State, reason: str, retry_ms: int) -> None: ...

    def made(self, creation: Creation, shape: pb.TopicShape) -> None: ...

    def not_made(self, creation: Creation, state: State, reason: str) -> None: ...


class RemoteReplaced(ClientError, CallerError):
    """Another cluster answers in the remote's place."""


class Visiting:
    """The work of one beat."""

    def __init__(self, remote: str, target: Callable[[Access], Target], post: Post, listener: Listener):
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
            return IDLE_S
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

    def _describe(self, target: Target, ends: LinkEnds, topics: Sequence[str]) -> float:
        """In how many seconds again."""
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

    def _require_same(self, hello: pb.HelloResponse, ends: LinkEnds) -> None:
        if (hello.cluster_name, hello.cluster_id) != (ends.target_name, ends.target_id):
            raise RemoteReplaced(
                f"remote {self._remote} is cluster {hello.cluster_name} (id {hello.cluster_id}) by now, and "
                f"was {ends.target_name} (id {ends.target_id}) when it was added; if that is meant, remove "
                f"it with `sava remotes remove {self._remote}` and add it again"
            )

    def _make(self, target: Target, ends: LinkEnds, creation: Creation) -> None:
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


def _state(error: ClientError) -> State:
    if isinstance(error, Denied):
        return State.DENIED
    return State.FAILED if isinstance(error, CallerError) else State.UNREACHABLE
