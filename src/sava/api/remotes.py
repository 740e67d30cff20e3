"""RemoteClusters: the client ports of other clusters, as this cluster asks them who they are and what they
have.

These are questions of people, a few a day, so each opens a connection of its own and closes it. A remote has
several addresses; they are tried in their order until one answers, within the time that the whole question
has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import Message
from grpc import aio

from sava.api.messages import from_message
from sava.connecting import cause_of
from sava.errors import shown
from sava.peers import tls
from sava.proto import replica_pb2 as pb
from sava.proto import replica_pb2_grpc as rpc
from sava.replication.matrix import There
from sava.replication.records import RemoteDenied, RemoteRecord, RemoteRefused, RemoteUnreachable
from sava.replication.remotes import ClusterIdentity, Shape

Reply = TypeVar("Reply", bound=Message)

TIMEOUT_S: Final = 8.0
"""For a whole question; less than a caller of the admin port waits for its answer."""
ATTEMPT_S: Final = 3.0
"""For one of several addresses."""

_OPTIONS: Final[tls.Options] = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.enable_retries", 0),
    # Two channels to one address would share a connection, also a broken one.
    ("grpc.use_local_subchannel_pool", 1),
)
_DENIED: Final = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)


class RemoteClusters:
    """Holds nothing between calls."""

    def __init__(self, *, timeout: float = TIMEOUT_S) -> None:
        self._timeout = timeout

    async def hello(self, remote: RemoteRecord) -> ClusterIdentity:
        answer: pb.HelloResponse = await self._ask(remote, lambda stub: stub.Hello, pb.HelloRequest())
        return from_message(ClusterIdentity, answer)

    async def describe(self, name: str, remote: RemoteRecord, topics: Sequence[str]) -> list[Shape]:
        request = pb.DescribeTopicsRequest(topics=topics)
        answer: pb.DescribeTopicsResponse = await self._ask(remote, lambda stub: stub.DescribeTopics, request)
        shapes = {shape.topic: shape for shape in answer.topics}
        if missing := [topic for topic in topics if topic not in shapes]:
            raise RemoteRefused(
                f"{remote.service} was asked of topic {missing[0]} and does not say what it has"
            )
        return [_shape(name, shapes[topic]) for topic in topics]

    async def _ask(self, remote: RemoteRecord, method: Callable[[Any], Any], request: Message) -> Any:
        targets, is_secure = parse_service(remote.service)
        credentials = _credentials(remote) if is_secure or remote.tls_ca or remote.tls_cert else None
        failures = []
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        for position, target in enumerate(targets):
            left = deadline - loop.time()
            if left <= 0:
                break
            is_last = position == len(targets) - 1
            try:
                return await _call(
                    target, credentials, remote, method, request, left if is_last else min(left, ATTEMPT_S)
                )
            except RemoteUnreachable as error:
                failures.append(str(error))
        raise RemoteUnreachable("; ".join(failures))


async def _call(
    target: str,
    credentials: grpc.ChannelCredentials | None,
    remote: RemoteRecord,
    method: Callable[[Any], Any],
    request: Message,
    timeout: float,
) -> Any:
    if credentials is None:
        channel = aio.insecure_channel(target, options=_OPTIONS)
    else:
        channel = aio.secure_channel(target, credentials, options=_OPTIONS)
    metadata = (("authorization", f"Bearer {remote.token}"),) if remote.token else ()
    try:
        return await method(rpc.ReplicaStub(channel))(request, timeout=timeout, metadata=metadata)
    except aio.AioRpcError as error:
        raise _failure(target, error) from error
    finally:
        await channel.close(None)


def _failure(target: str, error: aio.AioRpcError) -> RemoteUnreachable | RemoteDenied | RemoteRefused:
    status = error.code()
    if status in _DENIED:
        return RemoteDenied(f"{target} denies it: {error.details() or status.name.lower()}")
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RemoteUnreachable(f"{target} did not answer in time")
    if status is grpc.StatusCode.UNIMPLEMENTED:
        return RemoteRefused(
            f"{target} answers, and takes no replicas: it is not the client port of a Sava broker, or an "
            "older one's"
        )
    if status in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return RemoteUnreachable(f"{target} cannot be reached: {cause_of(error.details()).text}")
    return RemoteRefused(f"{target} refused with {status.name}: {error.details() or 'no details'}")


def parse_service(service: str) -> tuple[list[str], bool]:
    """Targets as gRPC writes them, and whether TLS is asked for. Raises RemoteRefused."""
    targets, schemes = [], set()
    for text in map(str.strip, service.split(",")):
        scheme, found, target = text.partition("://")
        if not found:
            scheme, target = "", text
        host, _, port = target.rstrip("/").rpartition(":")
        if scheme not in ("", "http", "https") or not host or not port.isdecimal():
            raise RemoteRefused(
                f"address {shown(text)}: written host:port, http://host:port or https://host:port"
            )
        targets.append(f"{host}:{port}")
        schemes.add(scheme)
    if "https" in schemes and schemes != {"https"}:
        raise RemoteRefused("addresses: either all or none of them are https")
    return targets, "https" in schemes


def _credentials(remote: RemoteRecord) -> grpc.ChannelCredentials:
    if bool(remote.tls_cert) != bool(remote.tls_key):
        raise RemoteRefused("TLS: a certificate needs its key, and a key its certificate")
    try:
        ca, key, cert = (
            Path(path).read_bytes() if path else None
            for path in (remote.tls_ca, remote.tls_key, remote.tls_cert)
        )
    except OSError as error:
        raise RemoteRefused(
            f"TLS: {error.filename} cannot be read by this broker: {error.strerror}; the files must be on "
            "the machines of all brokers and runners"
        ) from error
    return grpc.ssl_channel_credentials(ca, key, cert)


def _shape(remote: str, shape: pb.TopicShape) -> Shape:
    return Shape(
        topic=shape.topic,
        there=from_message(There, shape, remote=remote, partitions=shape.partition_count),
        schema_subject=shape.schema_subject,
    )
