"""Asking: one question to a disk, one answer (``ports.LedgerPeers``), for whoever recovers a journal.

One connection leads to each broker that was asked, for as long as questions come. Several may be on their
way; each has a deadline. A question to this broker's own disk takes no connection.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import count
from typing import Final

from sava.ledger.live_brokers import LiveBrokers, PeerUnreachable
from sava.ledger.protocol import Message, StorageId
from sava.ledger.server import Holder
from sava.ledger.wire import (
    Answer,
    Door,
    Link,
    Request,
)

CONNECT_S: Final = 2.0


class _Line:
    """To one address. Owned by the event loop."""

    def __init__(self, door: Door) -> None:
        self.link = Link(door, self._received)
        self.waiting: dict[int, asyncio.Future[Message]] = {}
        self.link.is_gone.add_done_callback(self._gone)

    def _received(self, answer: Answer) -> None:
        future = self.waiting.pop(answer.ticket, None)
        if future is not None and not future.done():
            future.set_result(answer.message)

    def _gone(self, reason: asyncio.Future[str]) -> None:
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(ConnectionError(reason.result()))
        self.waiting.clear()


class Asking:
    """Owned by the event loop."""

    def __init__(self, door: Door, live_brokers: LiveBrokers, own: StorageId, holder: Holder) -> None:
        self._door = door
        self._live_brokers = live_brokers
        self._own = own
        self._holder = holder
        self._tickets = count(1)
        self._lines: dict[str, _Line] = {}
        self._connecting: dict[str, asyncio.Lock] = {}

    async def ask(
        self, storage: StorageId, message: Message, *, origin: StorageId, timeout: float
    ) -> Message:
        try:
            async with asyncio.timeout(timeout):
                if storage == self._own:
                    return await self._ask_here(message, origin)
                return await self._ask_there(storage, message, origin)
        except TimeoutError as error:
            raise PeerUnreachable(f"disk {storage} did not answer within {timeout:g} s") from error
        except OSError as error:
            raise PeerUnreachable(f"disk {storage} cannot be reached: {error}") from error

    async def _ask_here(self, message: Message, origin: StorageId) -> Message:
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()

        def reply(answer: Message) -> None:
            if not future.done():
                future.set_result(answer)

        self._holder.receive(origin, message, reply)
        return await future

    async def _ask_there(self, storage: StorageId, message: Message, origin: StorageId) -> Message:
        live = self._live_brokers.find(storage)
        if live is None:
            raise PeerUnreachable(f"no registered broker has the disk {storage}")
        line = await self._line(live.address)
        ticket = next(self._tickets)
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        line.waiting[ticket] = future
        try:
            line.link.send(Request(ticket, origin, message))
            return await future
        finally:
            line.waiting.pop(ticket, None)

    async def _line(self, address: str) -> _Line:
        async with self._connecting.setdefault(address, asyncio.Lock()):
            line = self._lines.get(address)
            if line is None or line.link.is_gone.done():
                line = _Line(self._door)
                link = line.link
                try:
                    async with asyncio.timeout(CONNECT_S):
                        await self._door.connect(address, lambda: link)
                        await link.is_ready
                except BaseException:
                    link.abort()
                    raise
                self._lines[address] = line
            return line

    async def close(self) -> None:
        lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            line.link.abort()
            with suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await asyncio.shield(line.link.is_gone)
