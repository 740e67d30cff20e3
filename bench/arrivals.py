"""When events arrive at a watcher."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import grpc.aio


@contextlib.asynccontextmanager
async def arriving(
    events: AsyncIterator[int], stop: Callable[[], object]
) -> AsyncIterator[asyncio.Queue[float]]:
    """A queue that gets the time of each event. ``events`` says how many have come, each time that some have;
    ``stop`` ends it."""
    times: asyncio.Queue[float] = asyncio.Queue()

    async def receive() -> None:
        async for count in events:
            now = time.perf_counter()
            for _ in range(count):
                times.put_nowait(now)

    task = asyncio.create_task(receive())
    try:
        yield times
    finally:
        task.cancel()
        stop()
        with contextlib.suppress(asyncio.CancelledError, grpc.RpcError):
            await task
