"""Room: who waits for room in the journal, in the order in which they came."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Room:
    """Owned by the event loop."""

    def __init__(self, fits: Callable[[int], bool]) -> None:
        """``fits``: whether a batch of this size may be appended now."""
        self._fits = fits
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def has(self, size: int) -> bool:
        """Whether ``reserve`` would return at once."""
        return not self._waiting and self._fits(size)

    async def reserve(self, size: int) -> None:
        """Wait until there is room.

        A waiter stays in the queue until it runs again. If it left when woken, somebody who comes between
        the waking and the running would go first, and a producer's second batch would overtake its first."""
        if self.has(size):
            return
        waiter = (size, self._loop.create_future())
        self._waiting.append(waiter)
        try:
            self.wake()
            await waiter[1]
        finally:
            self._waiting.remove(waiter)
            # After this turn: the caller takes its room first.
            self._loop.call_soon(self.wake)

    def wake(self) -> None:
        """There may be room: let the first one look."""
        if self._waiting:
            size, future = self._waiting[0]
            if not future.done() and self._fits(size):
                future.set_result(None)
