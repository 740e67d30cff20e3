"""Relays: one call of a client, made again at another broker, as bytes.

Errors of the other broker are ``Relayed``. Whoever reads slowly is waited for: a message is read from one
side when the one before it was taken by the other, and HTTP/2's flow control does the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import grpc
from grpc import aio

from sava.peers import faults
from sava.peers.brokers import Link, Unreachable
from sava.peers.faults import Relayed
from sava.tasks import cancelled, first_write

EOF: Final[Any] = vars(aio)["EOF"]  # the type stubs do not know it

Metadata = tuple[tuple[str, str | bytes], ...]
Write = Callable[[bytes], Awaitable[None]]

FORWARDED: Final = "sava-forwarded"
ONE_HOP: Final[Metadata] = ((FORWARDED, "1"),)

_OF_THE_CONNECTION: Final = frozenset(("user-agent", "te", "content-type", "host", "accept-encoding"))


def is_forwarded(context: Any) -> bool:
    """Whether the call came through another broker, and must not be sent to a third."""
    return any(item[0] == FORWARDED for item in context.invocation_metadata() or ())


def metadata_of(context: Any) -> Metadata:
    """What the client has sent with its call (tokens, traces), and the mark of a forwarded one."""
    sent = tuple(
        (key, value)
        for key, value in context.invocation_metadata() or ()
        if key not in _OF_THE_CONNECTION and not key.startswith((":", "grpc-"))
    )
    return sent + ONE_HOP


@contextmanager
def _told(link: Link) -> Iterator[None]:
    try:
        yield
    except aio.AioRpcError as error:
        raise faults.relayed(error, target=link.name) from None
    except aio.UsageError:
        raise Unreachable(f"{link.name} was registered anew") from None
    except asyncio.CancelledError:
        # A channel that is closed cancels its calls, and a call that is cancelled cancels who awaits it.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Relayed(grpc.StatusCode.UNAVAILABLE, f"{link.name} is gone") from None


async def unary(link: Link, method: str, request: bytes, timeout: float, metadata: Metadata) -> bytes:
    with _told(link):
        reply: bytes = await link.unary(method)(request, timeout=timeout, metadata=metadata)
    return reply


async def server_stream(
    link: Link, method: str, request: bytes, timeout: float | None, metadata: Metadata, write: Write
) -> Metadata:
    """Until the other broker ends it. The trailing metadata of its end."""
    with _told(link):
        call = link.server_stream(method)(request, timeout=timeout, metadata=metadata)
        try:
            async for reply in call:
                await write(reply)
            return await _trailing(call)
        finally:
            call.cancel()


async def both_ways(
    link: Link,
    method: str,
    first: bytes,
    timeout: float | None,
    metadata: Metadata,
    read: Callable[[], Awaitable[Any]],
    write: Write,
) -> Metadata:
    """Until the other broker ends it. ``first`` was read already; what follows is read when the other broker
    has answered it."""
    sending: asyncio.Task[None] | None = None
    with _told(link):
        call = link.both_ways(method)(timeout=timeout, metadata=metadata)
        try:
            # If the call has ended, reading tells why.
            with suppress(aio.AioRpcError, asyncio.InvalidStateError):
                await first_write(call, first)
            async for reply in call:
                if sending is None:
                    sending = asyncio.create_task(_send(call, read))
                await write(reply)
            return await _trailing(call)
        finally:
            call.cancel()
            await cancelled(sending)


async def _send(call: Any, read: Callable[[], Awaitable[Any]]) -> None:
    with suppress(aio.AioRpcError, asyncio.InvalidStateError):
        while (request := await read()) is not EOF:
            await call.write(request)
        await call.done_writing()


async def _trailing(call: Any) -> Metadata:
    return tuple(await call.trailing_metadata() or ())


class Opening:
    """A stream's context, as a handler sees it: it knows whether the client has got anything yet, and keeps
    the request that opened the stream until then."""

    def __init__(self, context: Any, parse: Callable[[bytes], Any] | None = None) -> None:
        self._context = context
        self._parse = parse
        self._again: bytes | None = None
        self.first: bytes | None = None
        self.has_begun = False

    def rewind(self) -> None:
        """Let the opening be read once more."""
        self._again = self.first

    async def read(self) -> Any:
        assert self._parse is not None
        if self._again is not None:
            request, self._again = self._again, None
        else:
            request = await self._context.read()
            if request is EOF:
                return request
            if self.first is None and not self.has_begun:
                self.first = request
        return self._parse(request)

    async def write(self, response: Any) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.first = None
        await self._context.write(response)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)
