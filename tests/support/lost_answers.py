"""A TCP proxy in front of a broker's port that loses the answer to one call, and nothing else.

The request goes through to the broker, which does what it asks. From then on the proxy keeps what the broker
sends, until the test cuts the connection or the caller's own deadline passes. A call is recognised by its
path, which gRPC writes in plain letters the first time that a connection carries it.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Self


class LostAnswers:
    """In front of ``target`` (``host:port``); ``address`` is where callers connect to."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._path = b""
        self._is_deaf = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.seen = asyncio.Event()
        """The call has passed; its answer does not."""
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def lose(self, path: str) -> None:
        """From now on the answer to a call of ``path`` is kept back."""
        self._path = path.encode()
        self.seen.clear()

    def forward_nothing(self) -> None:
        """Connections are taken, and nothing passes, as with a host behind a broken network."""
        self._is_deaf = True

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._writers.add(writer)
        with suppress(OSError):
            up_reader, up_writer = await asyncio.open_connection(*self._target)
            try:
                asked = asyncio.create_task(self._ask(reader, up_writer))
                await asyncio.wait(
                    {asked, asyncio.create_task(self._answer(up_reader, writer))},
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                up_writer.close()
                writer.close()
                self._writers.discard(writer)

    async def _ask(self, reader: asyncio.StreamReader, broker: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            if self._is_deaf:
                continue
            if self._path and self._path in data:
                self.seen.set()
            broker.write(data)
            await broker.drain()

    async def _answer(self, broker: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await broker.read(1 << 16):
            if not self.seen.is_set() and not self._is_deaf:
                writer.write(data)
                await writer.drain()
