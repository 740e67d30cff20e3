"""Stream: one gRPC stream as lanes, feeds and readers use it; and where to open it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from grpc.aio import AioRpcError, Channel

from sava.client.connection import OPEN_TIMEOUT_S, Connection, silent
from sava.client.errors import Unavailable, error_of
from sava.client.pulse import Waiting
from sava.proto import streams_pb2_grpc as rpc
from sava.tasks import cancelled, first_write

STATUS_S: Final = 1.0
"""For the status of a stream to arrive after a write has failed."""


class Stream:
    """Errors are the client's types; an end without an error is Unavailable, for none of Sava's streams ends
    by itself while the client wants it."""

    def __init__(self, call: Any, target: str, waiting: Waiting) -> None:
        """``waiting``: how its broker is watched."""
        self._call = call
        self._target = target
        self._waiting = waiting
        # Not call.read(): it drops what has arrived once the status is there.
        self._responses = aiter(call)

    async def write(self, request: Any) -> None:
        await self._written(self._call.write(request))

    async def _written(self, writing: Coroutine[Any, Any, None]) -> None:
        try:
            await writing
        except AioRpcError as error:
            raise error_of(error, self._target) from None
        except asyncio.InvalidStateError:
            raise self._ended() from None
        except asyncio.CancelledError:
            if not self._waiting.was_given_up():
                raise
            raise silent(self._target) from None

    async def receive(self) -> Any:
        try:
            response = await anext(self._responses)
        except AioRpcError as error:
            raise error_of(error, self._target) from None
        except StopAsyncIteration:
            raise self._ended() from None
        except asyncio.CancelledError:
            if not self._waiting.was_given_up():
                raise
            raise silent(self._target) from None
        self._waiting.pulse.heard()
        return response

    def _ended(self) -> Unavailable:
        if self._waiting.is_given_up:
            return silent(self._target)
        return Unavailable(f"broker {self._target} has ended the stream")

    async def open(self, request: Any) -> Any:
        """The answer to the request that opens a stream. Both have one deadline: a request waits for a
        connection, and a broker that stands still accepts connections."""
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await self._written(first_write(self._call, request))
                response = await self.receive()
        except TimeoutError:
            raise Unavailable(f"broker {self._target} did not answer within {OPEN_TIMEOUT_S} s") from None
        self._waiting.pulse.answered(asyncio.get_running_loop().time() - began)
        return response

    def cancel(self) -> None:
        self._call.cancel()


class Route:
    """Where the streams of one topic or partition go: to the broker that serves it, and after a failure
    wherever a new look-up says."""

    def __init__(self, connection: Connection, topic: str, address: str) -> None:
        self._connection = connection
        self._topic = topic
        self._next = address
        self._last = ""

    async def find(self) -> str:
        target = self._next
        if not target or self._connection.is_silent(target):
            target = await self._connection.locate(self._topic, but_not=self._last, timeout=OPEN_TIMEOUT_S)
        self._next, self._last = "", target
        return target

    def stay(self, target: str) -> None:
        """The target is good: go there again without a look-up."""
        self._next = target


@asynccontextmanager
async def open_stream(
    connection: Connection,
    method: str,
    target: str,
    *request: Any,
    owes: Callable[[], bool] = lambda: True,
    service: Callable[[Channel], Any] = rpc.StreamsStub,
    timeout: float | None = None,
) -> AsyncIterator[Stream]:
    """``owes``: whether the broker owes this stream an answer now; it ends if a broker that does is
    silent. ``timeout``: when it ends in any case."""
    metadata = await connection.metadata()
    call = getattr(connection.stub(target, service), method)(*request, timeout=timeout, metadata=metadata)
    try:
        with connection.pulse(target).watch(call, owes) as waiting:
            yield Stream(call, target, waiting)
    finally:
        call.cancel()


async def both(reading: Coroutine[Any, Any, None], writing: Coroutine[Any, Any, None]) -> None:
    """The two directions of a stream, until one fails. Raises its error; that of the reading side, which has
    the broker's status, if there are two."""
    read, write = asyncio.create_task(reading), asyncio.create_task(writing)
    try:
        await asyncio.wait((read, write), return_when=asyncio.FIRST_COMPLETED)
        if not read.done():
            await asyncio.wait((read,), timeout=STATUS_S)
    finally:
        await cancelled(read, write)
    for task in (read, write):
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    raise Unavailable("the stream was given up")
