"""Running a command's asynchronous work so that Ctrl-C ends it."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``. Ctrl-C cancels the work, and KeyboardInterrupt is raised when it has ended.

    asyncio's own handling of SIGINT leaves a gap: a signal that comes just before the loop goes to sleep is
    seen when something else wakes the loop, which may be never in a command that follows a quiet topic. A
    loop that was told to handle a signal is woken by it whenever it comes."""

    async def interruptible() -> T:
        if threading.current_thread() is threading.main_thread():
            task = asyncio.current_task()
            assert task is not None
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
        return await work

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
