"""SingleFlight: work that several ask for is done once, and all get its outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from sava.errors import SavaError
from sava.tasks import cancelled

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class SingleFlight(Generic[K, V]):
    """Owned by the event loop. The work runs in a task of its own: a caller that goes away does not stop it
    for the others. A failure is told to all who wait, and forgotten."""

    def __init__(self) -> None:
        self._running: dict[K, asyncio.Task[V]] = {}
        self._stopped: SavaError | None = None

    def __len__(self) -> int:
        return len(self._running)

    async def run(self, key: K, work: Callable[[], Coroutine[Any, Any, V]]) -> V:
        if self._stopped is not None:
            raise self._stopped
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(work())
            task.add_done_callback(lambda task: self._done(key, task))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._stopped is not None:
                raise self._stopped from None  # the work was cancelled, not the caller
            raise

    async def settled(self, key: K) -> None:
        """Until nothing runs for this key, whatever becomes of it."""
        task = self._running.get(key)
        if task is not None:
            await asyncio.wait((task,))

    async def all_settled(self) -> None:
        """Until nothing runs any more of what runs now."""
        if self._running:
            await asyncio.wait(list(self._running.values()))

    async def stop(self, error: SavaError) -> None:
        """End all that is running, and begin nothing more: whoever asks gets the error."""
        self._stopped = error
        await cancelled(*self._running.values())

    def _done(self, key: K, task: asyncio.Task[V]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # seen: those who waited may be gone
