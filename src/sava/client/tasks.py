"""Tasks that end when asked to, with nothing left behind, and waiting for them."""

from __future__ import annotations

import asyncio
from typing import Any


async def cancelled(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel the tasks and wait until they have ended, however that is."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def is_done_within(timeout: float, future: asyncio.Future[None]) -> bool:
    """False when the time is up; the future goes on. Raises what it failed with."""
    try:
        async with asyncio.timeout(timeout):
            await asyncio.shield(future)
    except TimeoutError:
        return False
    return True
