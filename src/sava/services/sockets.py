"""What all connections of the Raft port share: addresses, and noticing that the other side vanished."""

from __future__ import annotations

import asyncio
import errno
import re
import socket

from sava.metadata.errors import Unavailable

VANISHED_MS = 4000
"""A peer that vanished without a reset is noticed within this time, whether data waits for it or not."""


_PASSES = 3


async def settle() -> None:
    """Let asyncio finish what it has begun with a socket: between accepting or connecting it and
    ``connection_made`` lie up to three passes of the loop, in which nobody else knows of the socket yet."""
    for _ in range(_PASSES):
        await asyncio.sleep(0)


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
