"""What all connections of the Raft port share: addresses, connecting, and noticing a vanished peer.

``connect`` gives a connection to its protocol only when it is certain that it stays. uvloop calls
``connection_made`` one pass of the loop before ``create_connection`` returns. A deadline that passes in
between cancels the call; uvloop then closes the handle and calls no ``connection_lost``:

    peer       accepts after a long silence; the loop is busy, and late
    uvloop     connection_made(transport)
    deadline   cancels create_connection
    uvloop     closes the handle

A protocol that has taken the transport holds a corpse: ``is_closing()`` is false, every write raises
RuntimeError, and nothing ever says that it is gone.
"""

from __future__ import annotations

import asyncio
import errno
import re
import socket
import ssl
from collections.abc import Callable
from typing import cast

from sava.metadata.errors import Unavailable

VANISHED_MS = 4000
"""A peer that vanished without a reset is noticed within this time, whether data waits for it or not."""
GONE_S = 1.0
"""An aborted connection is gone within three passes of the loop. No caller waits longer for that: a close
that waits for an event which the loop has lost keeps the whole broker from stopping."""


_PASSES = 3


async def settle() -> None:
    """Let asyncio finish what it has begun with a socket: between accepting or connecting it and
    ``connection_made`` lie up to three passes of the loop, in which nobody else knows of the socket yet."""
    for _ in range(_PASSES):
        await asyncio.sleep(0)


async def is_gone(*gone: asyncio.Event) -> bool:
    """Wait until aborted connections are gone; False when the loop does not say so within ``GONE_S``."""
    try:
        async with asyncio.timeout(GONE_S):
            for each in gone:
                await each.wait()
    except TimeoutError:
        return False
    return True


class _Arrival(asyncio.Protocol):
    """The protocol of a connection until ``create_connection`` has returned."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.received: list[bytes] = []
        self.is_lost = False
        self.error: Exception | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.received.append(data)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost, self.error = True, error


async def connect(address: str, protocol: Callable[[], asyncio.Protocol], tls: ssl.SSLContext | None) -> None:
    """Connect, and give the connection to ``protocol``: it hears ``connection_made`` only if this returns,
    and ``connection_lost`` in any case after that. Raises OSError, and Unavailable for what is no address."""
    host, port = split_address(address)
    arrival = _Arrival()
    try:
        await asyncio.get_running_loop().create_connection(
            lambda: arrival, host, port, ssl=tls, server_hostname=host if tls else None
        )
    except BaseException:
        if arrival.transport is not None:
            arrival.transport.abort()  # TLS would say goodbye first, and wait half a minute for an answer
        raise
    transport = arrival.transport
    if transport is None or arrival.is_lost:
        raise ConnectionResetError(str(arrival.error or "the other side closed the connection"))
    try:
        notice_vanishing(transport)
    except OSError:
        transport.abort()  # reset already, which the loop has not reported yet
        raise
    # No await from here on: nothing can come between the transport and the protocol that is to hold it.
    target = protocol()
    transport.set_protocol(target)
    try:
        target.connection_made(transport)
        for data in arrival.received:
            target.data_received(data)
    except BaseException:
        transport.abort()
        raise


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    try:
        return host.removeprefix("[").removesuffix("]"), int(port)
    except ValueError:
        raise Unavailable(f"{address!r} is not an address of the form host:port") from None


def is_refused(error: BaseException) -> bool:
    """Whether a connect failed since no process listens, under all addresses of the host. The loop joins the
    errors of several addresses into one that has only a text; an error among them that is not a refusal (a
    route that is missing) leaves open whether the process is there."""
    if isinstance(error, ConnectionRefusedError):
        return True
    causes = set(re.findall(r"\[Errno (\d+)\]", str(error)))
    return isinstance(error, OSError) and causes == {str(errno.ECONNREFUSED)}


def notice_vanishing(transport: asyncio.BaseTransport) -> None:
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", VANISHED_MS),
    ):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
