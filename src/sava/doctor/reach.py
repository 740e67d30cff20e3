"""One address as a client sees it: whether somebody answers there, and with which certificate."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass
from typing import Any, Final

TIMEOUT_S: Final = 3.0
PAGE_S: Final = 10.0
"""A broker with thousands of topics has a page of megabytes, and writes it beside its other work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contact:
    use: str
    """client, admin, raft or http."""
    address: str
    error: str = ""
    """Why nobody could be reached; empty: somebody was."""
    expires: float | None = None
    """When the certificate shown there ends, in seconds since 1970; None: none was shown."""


async def contact(use: str, address: str, context: ssl.SSLContext | None) -> Contact:
    """Open a connection and close it again."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return Contact(use=use, address=address, error="not written HOST:PORT")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port), ssl=context)
    except TimeoutError:
        return Contact(use=use, address=address, error=f"no answer within {TIMEOUT_S:g} s")
    except ssl.SSLError as error:
        return Contact(use=use, address=address, error=f"TLS: {_tls_reason(error)}")
    except OSError as error:
        return Contact(use=use, address=address, error=_reason(error))
    try:
        return Contact(use=use, address=address, expires=_expiry(writer.get_extra_info("peercert")))
    finally:
        writer.close()


async def fetch(address: str, path: str) -> str:
    """The body of a page. Raises OSError, TimeoutError."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(PAGE_S):
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n".encode())
            answer = await reader.read(-1)
        finally:
            writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    status = head.partition(b"\r\n")[0].decode("latin-1")
    if " 200 " not in status:
        raise OSError(f"{path} was answered with {status!r}")
    return body.decode()


def days_left(expires: float) -> float:
    return (expires - time.time()) / 86400


def _expiry(certificate: Any) -> float | None:
    return ssl.cert_time_to_seconds(certificate["notAfter"]) if certificate else None


def _tls_reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return error.reason or str(error)


def _reason(error: OSError) -> str:
    """asyncio's own text names the address once more, and twice when a name has two."""
    return error.strerror if error.strerror and "Connect call" not in error.strerror else "connection refused"
