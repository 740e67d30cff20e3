"""Room: how much a producer holds that has no receipt yet. Whoever wants to send more waits, first come first
served; room that becomes free is taken on behalf of those who wait, many at once."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from sava.client.errors import ClientError, Timeout

MAX_PENDING_BYTES: Final = 256 << 20


class _Waiter:
    __slots__ = ("admitted", "messages", "size")

    def __init__(self, messages: int, size: int, admitted: asyncio.Future[None]) -> None:
        self.messages = messages
        self.size = size
        self.admitted = admitted


class Room:
    def __init__(self, max_messages: int) -> None:
        self._max_messages = max_messages
        self._messages = 0
        self._size = 0
        self._waiters: deque[_Waiter] = deque()

    @property
    def messages(self) -> int:
        """Taken now."""
        return self._messages

    def take(self, messages: int, size: int) -> bool:
        """Take room if there is some. What is alone may be of any size: it would never fit otherwise."""
        total, total_size = self._messages + messages, self._size + size
        if self._waiters or (
            self._messages and (total > self._max_messages or total_size > MAX_PENDING_BYTES)
        ):
            return False
        self._messages, self._size = total, total_size
        return True

    async def wait(self, messages: int, size: int, timeout: float) -> None:
        """Take room when there is some. Raises Timeout."""
        waiter = _Waiter(messages, size, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout(timeout):
                await waiter.admitted
        except BaseException as error:
            self._withdraw(waiter)
            if isinstance(error, TimeoutError):
                raise Timeout(
                    f"no room within {timeout} s: {self._messages} messages wait for their receipts"
                ) from None
            raise

    def give_back(self, messages: int, size: int) -> None:
        self._messages -= messages
        self._size -= size
        self._admit()

    def fail(self, error: ClientError) -> None:
        """Nobody will get room any more."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error.again())

    def _fits(self, messages: int, size: int) -> bool:
        return not self._messages or (
            self._messages + messages <= self._max_messages and self._size + size <= MAX_PENDING_BYTES
        )

    def _admit(self) -> None:
        while self._waiters and self._fits(self._waiters[0].messages, self._waiters[0].size):
            waiter = self._waiters.popleft()
            if not waiter.admitted.done():  # cancelled a moment ago, and not withdrawn yet
                self._messages += waiter.messages
                self._size += waiter.size
                waiter.admitted.set_result(None)

    def _withdraw(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self._admit()  # it may have stood before a smaller one
        elif not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
            self.give_back(waiter.messages, waiter.size)
