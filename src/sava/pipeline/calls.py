"""Calls: questions to a cluster, asked until they are answered.

A broker that is down, a topic that moves and a leader election pass; whoever asks waits for them, as long as
it was told to. What a broker refuses is raised at once. Owned by one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from sava.client.backoff import Backoff
from sava.client.connection import OPEN_TIMEOUT_S, Connection
from sava.client.errors import ClientError, Unanswered, Unavailable
from sava.proto import (
    danube_schema_pb2,
    danube_schema_pb2_grpc,
    streams_pb2,
    writers_pb2,
    writers_pb2_grpc,
)
from sava.proto import streams_pb2_grpc as rpc

SIDE_BY_SIDE: Final = 64
"""Calls of one question about many partitions."""
COMMIT_S: Final = 600.0
"""A commit is answered when all of it is published, wherever its topics are by then."""


class Owner:
    """Where calls about one partition go: to the broker that had it the last time, and after a failure
    wherever a look-up says."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.name = name
        self.target = ""
        """The broker that answered last; empty if it does not answer any more."""
        self._connection = connection
        self._failed = ""

    async def call(
        self, method: str, request: Any, *, timeout: float, service: Callable[[Any], Any] = rpc.StreamsStub
    ) -> Any:
        """One attempt, and a look-up if it is not known where."""
        target = await self.find(timeout)
        try:
            response = await self._connection.call(
                method, request, target=target, timeout=timeout, service=service
            )
        except Unavailable:
            self.failed(target)
            raise
        self.answered(target)
        return response

    async def find(self, timeout: float) -> str:
        """Where to call. Raises Unavailable, TopicUnknown."""
        return self.target or await self._connection.locate(
            self.name, but_not=self._failed, timeout=min(timeout, OPEN_TIMEOUT_S)
        )

    def answered(self, target: str) -> None:
        self.target, self._failed = target, ""

    def failed(self, target: str) -> None:
        """It does not answer, or does not have the partition."""
        if self.target in ("", target):  # unless another call has found a better one meanwhile
            self.target, self._failed = "", target

    async def ask(self, method: str, request: Any) -> Any:
        """As often as it takes, within the time of the connection."""
        loop = asyncio.get_running_loop()
        timeout = self._connection.timeout
        deadline = loop.time() + timeout
        backoff = Backoff()
        while True:
            left = deadline - loop.time()
            try:
                return await self.call(method, request, timeout=min(left, OPEN_TIMEOUT_S))
            except Unavailable as error:
                delay = backoff.delay(error)
                if loop.time() + delay >= deadline:
                    raise _unanswered(f"{method} of {self.name}", timeout, error) from None
                await asyncio.sleep(delay)


class Calls:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._owners: dict[str, Owner] = {}

    def owner(self, name: str) -> Owner:
        """Of a plain topic, or a partition."""
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = Owner(self.connection, name)
        return owner

    async def by_owner(self, names: Iterable[str], *, timeout: float) -> dict[str, list[str]]:
        """Partitions by the broker that has them. Those of which it is not found out are left out."""
        room = asyncio.Semaphore(SIDE_BY_SIDE)
        found: dict[str, str] = {}

        async def find(owner: Owner) -> None:
            with suppress(ClientError):
                async with room:
                    found[owner.name] = await owner.find(timeout)

        owners = [self.owner(name) for name in names]
        await asyncio.gather(*(find(owner) for owner in owners if not owner.target))
        groups: dict[str, list[str]] = {}
        for owner in owners:
            if target := owner.target or found.get(owner.name):
                groups.setdefault(target, []).append(owner.name)
        return groups

    async def ask(self, method: str, request: Any) -> Any:
        """Whichever broker answers."""
        with _told(method, self.connection.timeout):
            return await self.connection.ask(method, request)

    async def schema_of(
        self, request: danube_schema_pb2.GetSchemaRequest
    ) -> danube_schema_pb2.GetSchemaResponse:
        service = danube_schema_pb2_grpc.SchemaRegistryStub
        with _told("GetSchema", self.connection.timeout):
            response: danube_schema_pb2.GetSchemaResponse = await self.connection.ask(
                "GetSchema", request, service=service
            )
        return response

    async def staging(self, request: writers_pb2.StagingRequest) -> writers_pb2.StagingResponse:
        with _told("Staging", self.connection.timeout):
            timeout = self.connection.timeout
            response: writers_pb2.StagingResponse = await self._writers(
                "Staging", request, timeout, OPEN_TIMEOUT_S
            )
        return response

    async def commit(self, request: writers_pb2.CommitRequest) -> writers_pb2.CommitResponse:
        """A broker that fails on the way is followed by another: repeating a commit is safe."""
        with _told("Commit", COMMIT_S):
            response: writers_pb2.CommitResponse = await self._writers("Commit", request, COMMIT_S, COMMIT_S)
        return response

    async def _writers(self, method: str, request: Any, timeout: float, attempt: float) -> Any:
        service = writers_pb2_grpc.WritersStub
        return await self.connection.ask(method, request, timeout=timeout, attempt=attempt, service=service)

    async def look_up(self, topic: str, *, create: bool) -> streams_pb2.LookUpResponse:
        """Who has the partitions is remembered."""
        delivery = streams_pb2.RELIABLE if create else streams_pb2.ANY
        with _told(f"LookUp of {topic}", self.connection.timeout):
            found = await self.connection.look_up(topic, create=create, delivery=delivery)
        for partition in found.partitions:
            owner = self.owner(partition.topic)
            owner.target = owner.target or partition.address
        return found


def _unanswered(what: str, timeout: float, error: Unavailable) -> Unavailable:
    kind = Unanswered if isinstance(error, Unanswered) else Unavailable
    return kind(f"no broker has answered {what} within {timeout:g} s: {error}", error.code)


@contextmanager
def _told(what: str, timeout: float) -> Iterator[None]:
    try:
        yield
    except Unavailable as error:
        raise _unanswered(what, timeout, error) from None
