"""Messages at a fixed rate, from one job until another: what goes on in the cluster meanwhile is the parent's
affair. Times are those of the machine's monotonic clock, which is the same in all its processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from bench.samples import open_loop


class Pace:
    def __init__(self) -> None:
        self._is_over = False
        self._task: asyncio.Task[list[tuple[float, float]]] | None = None

    def begin(self, send: Callable[[int], Awaitable[object]], per_second: float) -> None:
        self._is_over = False
        self._task = asyncio.create_task(open_loop(send, per_second=per_second, until=lambda: self._is_over))

    async def end(self) -> dict[str, Any]:
        """When each message was due, and how long it took from then until it was acknowledged."""
        assert self._task is not None, "not begun"
        self._is_over = True
        task, self._task = self._task, None
        return {"done": await task}
