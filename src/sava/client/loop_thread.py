"""LoopThread: an event loop in a thread of its own, for programs that are not asynchronous themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from sava.client.errors import Closed
from sava.tasks import cancelled, spawn

T = TypeVar("T")


class LoopThread:
    """Runs until it is closed. Any thread may call. A process that was forked has the object but not the
    thread."""

    def __init__(self, name: str = "sava client") -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_report)
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``. If the waiting is interrupted, the work is cancelled."""
        future = self.begin(work)
        try:
            return future.result()
        except CancelledError:
            raise Closed("the client was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """It continues while the caller does something else."""
        try:
            self._check_alive()
        except Closed:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def start(self, work: Callable[[], Coroutine[Any, Any, None]], *, name: str) -> None:
        """Work without a caller that waits. It runs before what the loop is asked to do later."""
        self._check_alive()
        self._loop.call_soon_threadsafe(lambda: spawn(work(), name=name))

    def _check_alive(self) -> None:
        if not self._thread.is_alive():
            raise Closed("the client is closed, or the process was forked")

    def close(self) -> None:
        """What is still running is cancelled; callers that wait for it get Closed."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.create_task, self._end())
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        await cancelled(*(asyncio.all_tasks() - {asyncio.current_task()}))
        self._loop.stop()


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """As asyncio does, but for what gRPC finds too late. gRPC has one queue of events for all loops of a
    process, and whichever loop takes one off hands it to the loop that asked. A stream that was cancelled as
    its client closed ends a moment later; on a busy machine that loop may be gone by then. No caller waits
    for such an event, and other events are not touched: a program would see a stack trace for nothing. gRPC
    gives it no type of its own."""
    is_late = isinstance(context.get("exception"), RuntimeError)
    if is_late and "PollerCompletionQueue" in context["message"]:
        return
    loop.default_exception_handler(context)
