"""Supervisor: what becomes of a broker one of whose tasks dies of a bug.

What a task foresees (a store without a quorum, a disk that is full) it handles itself. What gets here no code
foresaw, and the rest of the broker does not notice: it would stay ready, and keep its lease and its topics,
for which something is not done any more. Two ways out of it, and each task has one:

* **Essential.** Others rely on what it does, and on what it holds in memory, and of that nothing is certain
  after a bug. What is on disk is: so the process ends, in order if it can (positions written, the lease given
  back, leadership handed over), its service manager starts it again, and others take its topics at once.
* **Repeated.** It begins every round from records that it reads again, writes on condition that they are
  still so, and without it the broker serves as before. Such a task is begun again, after a pause that grows.
  Ending the process would be worse than what it mends: what a leader does for all, each next leader does
  with the same records, and one that no code can digest would end one broker after the other.

A task that is cancelled by code that did not mean to (the error of a wait that was cancelled elsewhere
came through) ends without an error, and is as dead.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from sava.tasks import Backoff

log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 60.0
"""Also: a task that has worked longer than this begins with the first pause again."""


class Supervisor:
    """Of one broker. Owned by the event loop."""

    def __init__(self) -> None:
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Resolves with the reason when this process must not continue."""
        self.failures: Counter[str] = Counter()
        """How often each task has died; for figures."""

    def essential(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """A task without which this process must not continue. It may return: then it has done its work."""

        def done(task: asyncio.Task[None]) -> None:
            error = _unforeseen(task)
            if error is not None:
                self.failures[name] += 1
                log.critical("supervisor: an essential task died task=%s", name, exc_info=error)
                self.end(f"the task '{name}' died: {type(error).__name__}: {error}")

        task = asyncio.create_task(work, name=name)
        task.add_done_callback(done)
        return task

    def repeated(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        *,
        name: str,
        resign: Callable[[], Awaitable[None]] | None = None,
    ) -> asyncio.Task[None]:
        """A task that is begun again. ``resign``: of what is done by the leader for all, so that another one
        tries, each time that the pauses have become the longest ones."""
        return self.essential(self._repeat(work, name, resign), name=name)

    def end(self, reason: str) -> None:
        """This process must not continue. The first reason counts: what follows may come of it."""
        if not self.died.done():
            self.died.set_result(reason)

    @property
    def reason(self) -> str:
        """Why this process must not continue; empty: it may."""
        return self.died.result() if self.died.done() else ""

    async def _repeat(
        self,
        work: Callable[[], Coroutine[Any, Any, None]],
        name: str,
        resign: Callable[[], Awaitable[None]] | None,
    ) -> None:
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, jitter=0)
        while True:
            began = time.monotonic()
            error = await _outcome(work())
            if error is None:
                return
            self.failures[name] += 1
            if time.monotonic() - began > LONGEST_PAUSE_S:
                backoff.reset()
            is_longest, pause = backoff.is_longest, backoff.next()
            log.error(
                "supervisor: a task died and is begun again task=%s pause_s=%.0f", name, pause, exc_info=error
            )
            if is_longest and resign is not None:
                await resign()
            await asyncio.sleep(pause)


async def _outcome(work: Coroutine[Any, Any, None]) -> BaseException | None:
    """What it died of; None if it returned. The caller handles a cancellation by its owner."""
    try:
        await work
    except Exception as error:  # noqa: BLE001 (whatever it is, it is a bug)
        return error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        return _stray()
    return None


def _unforeseen(task: asyncio.Task[None]) -> BaseException | None:
    """What it died of; None if it returned, or its owner cancelled it."""
    if not task.cancelled():
        return task.exception()
    return None if task.cancelling() else _stray()


def _stray() -> BaseException:
    return asyncio.CancelledError("something that it waited for was cancelled")
