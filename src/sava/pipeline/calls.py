"""Unary calls to a cluster that are repeated until a broker answers.

A broker that is down, a topic that moves and a leader election pass; a call waits for them up to its timeout.
What a broker refuses is raised at once. One event loop owns everything here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from sava.client.backoff import ReconnectBackoff
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
"""Concurrent calls when one question concerns many partitions."""
COMMIT_S: Final = 600.0
"""A broker answers a commit when every part of it is published, which can take that long."""


class PartitionOwner:
    """The broker that owns one partition: the one that answered last, or after a failure the result of a
    look-up."""

    def __init__(self, connection: Connection, name: str) -> None:
        self.name = name
        self.target = ""
        """The broker that answered last; empty after a failure."""
        self._connection = connection
        self._failed = ""

    async def call(
        self, method: str, request: Any, *, timeout: float, service: Callable[[Any], Any] = rpc.StreamsStub
    ) -> Any:
        """Make one attempt, after a look-up if the owner is not known."""
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
        """The address of the owner. Raises Unavailable, TopicUnknown."""
        return self.target or await self._connection.locate(
            self.name, but_not=self._failed, timeout=min(timeout, OPEN_TIMEOUT_S)
        )

    def answered(self, target: str) -> None:
        self.target, self._failed = target, ""

    def failed(self, target: str) -> None:
        """Note that this broker does not answer or does not own the partition."""
        if self.target in ("", target):  # unless another call has found a better one meanwhile
            self.target, self._failed = "", target

    async def ask(self, method: str, request: Any) -> Any:
        """Repeat the call until it succeeds or the connection's timeout is over."""
        loop = asyncio.get_running_loop()
        timeout = self._connection.timeout
        deadline = loop.time() + timeout
        backoff = ReconnectBackoff()
        while True:
            left = deadline - loop.time()
            try:
                return await self.call(method, request, timeout=min(left, OPEN_TIMEOUT_S))
            except Unavailable as error:
                delay = backoff.delay(error)
                if loop.time() + delay >= deadline:
                    raise _unanswered(f"{method} of {self.name}", timeout, error) from None
                await asyncio.sleep(delay)


class ClusterCalls:
    """Calls to one cluster, with the known owners of its partitions."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._owners: dict[str, PartitionOwner] = {}

    def owner(self, name: str) -> PartitionOwner:
        """The owner of a plain topic or of a partition."""
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = PartitionOwner(self.connection, name)
        return owner

    async def by_owner(self, names: Iterable[str], *, timeout: float) -> dict[str, list[str]]:
        """Partitions grouped by owner. Partitions whose owner is not found are left out."""
        room = asyncio.Semaphore(SIDE_BY_SIDE)
        found: dict[str, str] = {}

        async def find(owner: PartitionOwner) -> None:
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
        """Ask any broker."""
        with _naming_the_call(method, self.connection.timeout):
            return await self.connection.ask(method, request)

    async def schema_of(
        self, request: danube_schema_pb2.GetSchemaRequest
    ) -> danube_schema_pb2.GetSchemaResponse:
        service = danube_schema_pb2_grpc.SchemaRegistryStub
        with _naming_the_call("GetSchema", self.connection.timeout):
            response: danube_schema_pb2.GetSchemaResponse = await self.connection.ask(
                "GetSchema", request, service=service
            )
        return response

    async def staging(self, request: writers_pb2.StagingRequest) -> writers_pb2.StagingResponse:
        with _naming_the_call("Staging", self.connection.timeout):
            timeout = self.connection.timeout
            response: writers_pb2.StagingResponse = await self._writers(
                "Staging", request, timeout, OPEN_TIMEOUT_S
            )
        return response

    async def commit(self, request: writers_pb2.CommitRequest) -> writers_pb2.CommitResponse:
        """Commit a batch. After a failure another broker gets the same request: a commit is idempotent."""
        with _naming_the_call("Commit", COMMIT_S):
            response: writers_pb2.CommitResponse = await self._writers("Commit", request, COMMIT_S, COMMIT_S)
        return response

    async def _writers(self, method: str, request: Any, timeout: float, attempt: float) -> Any:
        service = writers_pb2_grpc.WritersStub
        return await self.connection.ask(method, request, timeout=timeout, attempt=attempt, service=service)

    async def look_up(self, topic: str, *, create: bool) -> streams_pb2.LookUpResponse:
        """Look a topic up and remember the owners of its partitions."""
        delivery = streams_pb2.RELIABLE if create else streams_pb2.ANY
        with _naming_the_call(f"LookUp of {topic}", self.connection.timeout):
            found = await self.connection.look_up(topic, create=create, delivery=delivery)
        for partition in found.partitions:
            owner = self.owner(partition.topic)
            owner.target = owner.target or partition.address
        return found


def _unanswered(what: str, timeout: float, error: Unavailable) -> Unavailable:
    kind = Unanswered if isinstance(error, Unanswered) else Unavailable
    return kind(f"no broker has answered {what} within {timeout:g} s: {error}", error.code)


@contextmanager
def _naming_the_call(what: str, timeout: float) -> Iterator[None]:
    try:
        yield
    except Unavailable as error:
        raise _unanswered(what, timeout, error) from None
