"""Tasks that must not die unnoticed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


def spawn(
    coroutine: Coroutine[Any, Any, None], *, name: str, failed: Callable[[BaseException], None]
) -> asyncio.Task[None]:
    """What it raises goes to ``failed``: a journal that nobody keeps neither commits nor is fenced."""

    def done(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            failed(error)

    task = asyncio.create_task(coroutine, name=name)
    task.add_done_callback(done)
    return task
