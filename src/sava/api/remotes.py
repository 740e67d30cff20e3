"""RemoteClusters: the client ports of other clusters, as this cluster asks them who they are and what they
have.

These are questions of people, a few a day, so each opens a connection of its own and closes it. A remote has
several addresses; they are tried in their order until one answers, within the time that the whole question
has.

A caller chooses where this broker connects, and which of its files it shows there. ``AllowedAddresses`` and
``SecretFiles`` say how far, and the answers say no more than that there was none.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Callable, Sequence
from typing import Any, Final

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
from sava.security.secret_files import SecretFileRefused, SecretFiles

log = logging.getLogger(__name__)

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
MAX_ADDRESSES: Final = 16
_NAME: Final = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_.])?")
_NAME_PATTERN: Final = re.compile(r"(\*\.)?[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?")
_BRACKETED: Final = re.compile(r"\[[0-9A-Fa-f:.]+\]")
_PORT: Final = re.compile(r"[0-9]{1,5}")

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
NEVER: Final = tuple(
    map(
        ipaddress.ip_network,
        (
            *("0.0.0.0/8", "::/128", "169.254.0.0/16", "fe80::/10", "255.255.255.255/32"),
            # What clouds tell their machines, beside the link-local address that most of them use.
            *("fd00:ec2::254/128", "100.100.100.200/32", "168.63.129.16/32", "192.0.0.192/32"),
        ),
    )
)
LOOPBACK: Final = tuple(map(ipaddress.ip_network, ("127.0.0.0/8", "::1/128")))
_DENIED: Final = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)


class AllowedAddresses:
    """``replication.allowed_remotes``: which addresses this broker connects to because a caller has named
    them. Without a list that is all but NEVER, and loopback only where brokers are on loopback themselves, as
    in a cluster on one machine: the services of a host trust what comes from it.

    A name is looked up once, and the connection goes to the addresses that were found and checked: a name
    server that gives another address the next time changes nothing."""

    def __init__(self, allowed: Sequence[str] | None = None, *, is_loopback_allowed: bool = True) -> None:
        """Raises ValueError for an entry that is neither a name nor a network."""
        self._is_listed = allowed is not None
        self._networks = [_network(each) for each in allowed or () if _is_numeric(each)]
        self._names = [each.lower().rstrip(".") for each in allowed or () if not _is_numeric(each)]
        if wrong := [each for each in self._names if not _NAME_PATTERN.fullmatch(each)]:
            raise ValueError(f"{wrong[0]!r} is not a host name, *.DOMAIN, an address or a network")
        self._never = NEVER if is_loopback_allowed else (*NEVER, *LOOPBACK)

    async def resolve(self, target: str) -> list[str]:
        """As targets of gRPC that need no look-up, one for each kind of address. Raises RemoteRefused,
        OSError."""
        host, _, port = target.rpartition(":")
        bare = host.strip("[]")
        if not (_is_numeric(bare) or _NAME.fullmatch(bare)) or int(port) > 65535:
            raise RemoteRefused(f"address {target[:200]!r}: written host:port")
        found = await asyncio.get_running_loop().getaddrinfo(bare, int(port), type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(ipaddress.ip_address(each[4][0]) for each in found))
        allowed = [address for address in addresses if self._allows(bare.lower().rstrip("."), address)]
        if not allowed:
            log.warning("replication: a remote's address is not allowed address=%r", target[:200])
            raise RemoteRefused(f"address {target} is not allowed by replication.allowed_remotes")
        four = ",".join(f"{each}:{port}" for each in allowed if each.version == 4)
        six = ",".join(f"[{each}]:{port}" for each in allowed if each.version == 6)
        return [f"{scheme}:{each}" for scheme, each in (("ipv4", four), ("ipv6", six)) if each]

    def _allows(self, name: str, address: Address) -> bool:
        plain = getattr(address, "ipv4_mapped", None) or address
        if any(plain in network for network in self._networks):
            return True
        if plain.is_multicast or any(plain in network for network in self._never):
            return False
        return not self._is_listed or any(_matches(name, pattern) for pattern in self._names)


def _is_numeric(text: str) -> bool:
    try:
        _network(text)
    except ValueError:
        return False
    return True


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    return ipaddress.ip_network(text.strip("[]"), strict=False)


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or (pattern.startswith("*.") and name.endswith(pattern[1:]))


class RemoteClusters:
    """Holds nothing between calls. ``secrets``: where this broker has what remotes ask for."""

    def __init__(
        self, secrets: SecretFiles, addresses: AllowedAddresses, *, timeout: float = TIMEOUT_S
    ) -> None:
        self._secrets = secrets
        self._addresses = addresses
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
        credentials, metadata = self._credentials(remote, is_secure)
        failures = []
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeout
        for position, target in enumerate(targets):
            left = deadline - loop.time()
            if left <= 0:
                break
            is_last = position == len(targets) - 1
            try:
                async with asyncio.timeout(left if is_last else min(left, ATTEMPT_S)):
                    return await self._ask_one(target, credentials, metadata, method, request)
            except (RemoteUnreachable, OSError) as error:  # TimeoutError is one
                if not isinstance(error, RemoteUnreachable):
                    log.warning("replication: no answer from a remote address=%s error=%r", target, error)
                failures.append(target)
        raise RemoteUnreachable(f"could not connect to {', '.join(failures)} (the broker's log says more)")

    async def _ask_one(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None,
        metadata: Sequence[tuple[str, str]],
        method: Callable[[Any], Any],
        request: Message,
    ) -> Any:
        """Raises RemoteDenied, RemoteRefused, RemoteUnreachable, OSError."""
        failure: RemoteUnreachable | RemoteDenied = RemoteUnreachable(target)
        for resolved in await self._addresses.resolve(target):
            try:
                return await _call(target, resolved, credentials, metadata, method, request)
            except aio.AioRpcError as error:
                failure = _failure(target, error)
                if isinstance(failure, RemoteDenied):
                    break
        raise failure

    def _credentials(
        self, remote: RemoteRecord, is_secure: bool
    ) -> tuple[grpc.ChannelCredentials | None, list[tuple[str, str]]]:
        """For the connection and for each call. Raises RemoteRefused."""
        if bool(remote.tls_cert) != bool(remote.tls_key):
            raise RemoteRefused("TLS: a certificate needs its key, and a key its certificate")
        try:
            token = self._secrets.token(remote.token_file) if remote.token_file else ""
            ca, key, cert = (
                self._secrets.read(name) if name else None
                for name in (remote.tls_ca, remote.tls_key, remote.tls_cert)
            )
        except SecretFileRefused as error:
            raise RemoteRefused(str(error)) from None
        metadata = [("authorization", f"Bearer {token}")] if token else []
        if is_secure or ca or cert:
            return grpc.ssl_channel_credentials(ca, key, cert), metadata
        return None, metadata


async def _call(
    target: str,
    resolved: str,
    credentials: grpc.ChannelCredentials | None,
    metadata: Sequence[tuple[str, str]],
    method: Callable[[Any], Any],
    request: Message,
) -> Any:
    """Raises AioRpcError."""
    host = target.rpartition(":")[0].strip("[]")
    options: tls.Options = (*_OPTIONS, ("grpc.default_authority", target))
    if credentials is None:
        channel = aio.insecure_channel(resolved, options=options)
    else:
        named = (*options, ("grpc.ssl_target_name_override", host))
        channel = aio.secure_channel(resolved, credentials, options=named)
    try:
        return await method(rpc.ReplicaStub(channel))(request, metadata=metadata)
    finally:
        await channel.close(None)


def _failure(target: str, error: aio.AioRpcError) -> RemoteUnreachable | RemoteDenied:
    """A caller gets the same text for a port that is closed, silent or another service's: a remote is
    no way to look around in this broker's network."""
    status, details = error.code(), error.details() or ""
    if status in _DENIED:
        return RemoteDenied(f"{target} denies it: {details[:200] or status.name.lower()}")
    cause = cause_of(details).text if status is grpc.StatusCode.UNAVAILABLE else details
    log.warning(
        "replication: no answer from a remote address=%s code=%s error=%s", target, status.name, cause[:500]
    )
    return RemoteUnreachable(target)


def parse_service(service: str) -> tuple[list[str], bool]:
    """Targets as gRPC writes them, and whether TLS is asked for. Raises RemoteRefused."""
    targets, schemes = [], set()
    texts = [text.strip() for text in service.split(",", MAX_ADDRESSES)]
    if len(texts) > MAX_ADDRESSES:
        raise RemoteRefused(f"a remote has at most {MAX_ADDRESSES} addresses")
    for text in texts:
        scheme, found, target = text.partition("://")
        if not found:
            scheme, target = "", text
        host, _, port = target.rstrip("/").rpartition(":")
        is_host = _NAME.fullmatch(host) or (_BRACKETED.fullmatch(host) and _is_numeric(host))
        if scheme not in ("", "http", "https") or not is_host or not _PORT.fullmatch(port):
            raise RemoteRefused(
                f"address {shown(text)}: written host:port, http://host:port or https://host:port"
            )
        targets.append(f"{host}:{port}")
        schemes.add(scheme)
    if "https" in schemes and schemes != {"https"}:
        raise RemoteRefused("addresses: either all or none of them are https")
    return targets, "https" in schemes


def _shape(remote: str, shape: pb.TopicShape) -> Shape:
    return Shape(
        topic=shape.topic,
        there=from_message(There, shape, remote=remote, partitions=shape.partition_count),
        schema_subject=shape.schema_subject,
    )
