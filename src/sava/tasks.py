"""Tasks: begun so that none fails unseen, waited for, tried again, and ended so that nothing of them is left.

``Backoff`` and ``Reconciler`` are the two ways in which work is repeated here: an attempt after a growing
pause, and a pass over a state whenever it may have changed.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable
from contextlib import suppress
from typing import Any, Final, Generic, TypeVar

from sava.errors import SavaError

log = logging.getLogger(__name__)

STEP_S: Final = 5.0
"""For one part of a broker to stop. A part that works takes milliseconds."""
SLICE_S: Final = 0.005

T = TypeVar("T")
Item = TypeVar("Item")
Result = TypeVar("Result")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


def report(task: asyncio.Task[Any], error: BaseException) -> None:
    log.error("a background task failed name=%s", task.get_name(), exc_info=error)


def spawn(
    work: Coroutine[Any, Any, T], *, name: str, failed: Callable[[BaseException], None] | None = None
) -> asyncio.Task[T]:
    """A task whose result no other task awaits. asyncio reports an error only when the task is forgotten, and
    an owner that will cancel it later does not forget it: so an error that the work does not handle itself
    goes to ``failed`` at once, or to the log."""

    def done(task: asyncio.Task[T]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        if failed is not None:
            failed(error)
        else:
            report(task, error)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(done)
    return task


async def cancelled(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel them and wait until they have ended, however that is. None stands for one that never began."""
    running = [task for task in tasks if task is not None]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


class Backoff:
    """Pauses between attempts. Each is twice the one before, from ``first_s`` up to ``limit_s``; chance
    shortens it by up to the fraction ``jitter``, so that a thousand that lost the same broker do not come
    back in the same millisecond. Owned by one task."""

    def __init__(self, first_s: float, limit_s: float, *, jitter: float = 0.5) -> None:
        self._first_s = first_s
        self._limit_s = limit_s
        self._jitter = jitter
        self._next_s = first_s

    @property
    def is_first(self) -> bool:
        """Whether the next pause is the first one."""
        return self._next_s == self._first_s

    @property
    def is_longest(self) -> bool:
        """Whether the next pause is the longest one."""
        return self._next_s >= self._limit_s

    def reset(self) -> None:
        """An attempt has succeeded: the next pause is the first again."""
        self._next_s = self._first_s

    def next(self) -> float:
        """Seconds until the next attempt."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._limit_s)
        return pause_s * random.uniform(1 - self._jitter, 1) if self._jitter else pause_s

    async def pause(self, woken: asyncio.Event | None = None) -> None:
        """Wait before the next attempt; setting ``woken`` ends the wait early."""
        pause_s = self.next()
        if woken is None:
            await asyncio.sleep(pause_s)
        else:
            await set_within(pause_s, woken)


class Reconciler:
    """A level-triggered loop: one pass over a state when it is woken, and every ``period_s`` in any case, so
    that nothing depends on a message that might be lost. A change during a pass leads to another pass.

    A pass that raises one of ``failures`` is tried again after a pause; the same failure is logged once, and
    not again before a pass has succeeded. Any other error ends the loop, and the ``Supervisor`` decides what
    that means. Owned by the event loop."""

    def __init__(
        self,
        name: str,
        work: Callable[[], Awaitable[None]],
        *,
        period_s: float,
        retry: Backoff | None = None,
        failures: tuple[type[BaseException], ...] = (SavaError, TimeoutError),
    ) -> None:
        self._name = name
        self._work = work
        self._period_s = period_s
        self._retry = retry or Backoff(0.2, period_s)
        self._failures = failures
        self._woken = asyncio.Event()
        self._logged = ""

    def wake(self) -> None:
        """The state may have changed."""
        self._woken.set()

    async def run(self) -> None:
        while True:
            self._woken.clear()  # before the pass: what changes while it looks is for the next one
            try:
                await self._work()
            except self._failures as error:
                self._log(f"{type(error).__name__}: {error}")
                await self._retry.pause()
            else:
                self._logged = ""
                self._retry.reset()
                await set_within(self._period_s, self._woken)

    def _log(self, failure: str) -> None:
        if failure != self._logged:
            self._logged = failure
            log.warning("%s pass failed, retrying error=%s", self._name, failure)


async def until_success(
    attempt: Callable[[], Awaitable[T]],
    failed: Callable[[BaseException], None],
    *,
    pauses: Backoff,
    failures: tuple[type[BaseException], ...] = (SavaError, TimeoutError),
) -> T:
    """The result of the first attempt that raises none of ``failures``. ``failed`` is called for a failure
    that is not the same as the one before, so that it is logged once."""
    reason = ""
    while True:
        try:
            return await attempt()
        except failures as error:
            if str(error) != reason:
                reason = str(error)
                failed(error)
            await pauses.pause()


async def set_within(timeout: float, event: asyncio.Event) -> bool:
    """Whether the event was set before the time was up."""
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await event.wait()
    return event.is_set()


class Slices:
    """Work on many small things in slices, between which the event loop serves others: heartbeats and lease
    renewals wait behind whatever holds it."""

    def __init__(self, seconds: float = SLICE_S) -> None:
        self._seconds = seconds
        self._until = time.monotonic() + seconds

    async def next(self) -> None:
        """Between two things: gives way if the slice is over."""
        if time.monotonic() >= self._until:
            await asyncio.sleep(0)
            self._until = time.monotonic() + self._seconds


async def is_done_within(timeout: float, future: asyncio.Future[None]) -> bool:
    """False when the time is up; the future continues. Raises what it failed with."""
    try:
        async with asyncio.timeout(timeout):
            await asyncio.shield(future)
    except TimeoutError:
        return False
    return True


async def spread(
    items: Iterable[Item], work: Callable[[Item], Awaitable[Result]], *, parallel: int
) -> list[Result]:
    """``work`` for each item, ``parallel`` at a time; results in the order of the items. Raises the first
    failure, and gives up what is not done by then."""
    waiting = iter(list(enumerate(items)))
    results: dict[int, Result] = {}

    async def take_turns() -> None:
        for index, item in waiting:
            results[index] = await work(item)

    turns = [asyncio.create_task(take_turns()) for _ in range(parallel)]
    try:
        await asyncio.gather(*turns)
    finally:
        await cancelled(*turns)
    return [results[index] for index in sorted(results)]


async def stopped_within(limit_s: float, stop: Callable[[], Awaitable[object]], *, what: str) -> bool:
    """One step of a shutdown: whether it ended in time and without an error; the log says so otherwise. A
    step that hangs is cancelled and left behind, and not waited for: one that waits for a disk or a peer that
    does not answer may not hear of being cancelled either."""

    async def work() -> None:
        await stop()

    def seen(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            task.exception()

    task = asyncio.create_task(work(), name=f"stopping {what}")
    task.add_done_callback(seen)
    try:
        await asyncio.wait((task,), timeout=limit_s)
    finally:
        is_done = task.done()
        task.cancel()
    if not is_done:
        log.error("stopping: not stopped within %g s, left behind part=%s", limit_s, what)
        return False
    error = asyncio.CancelledError() if task.cancelled() else task.exception()
    if error is not None:
        log.error("stopping: not stopped in order part=%s", what, exc_info=error)
    return error is None


class Stops:
    """What was started, to be stopped in the reverse order. A part that hangs or fails does not keep the next
    one from its turn: a broker that cannot close its journal still closes its ports."""

    def __init__(self) -> None:
        self._steps: list[tuple[str, Callable[[], Awaitable[object]]]] = []

    def add(self, what: str, stop: Callable[[], Awaitable[object]]) -> None:
        self._steps.append((what, stop))

    async def run(self) -> bool:
        """Whether all stopped in order."""
        is_in_order = True
        while self._steps:
            what, stop = self._steps.pop()
            is_in_order &= await stopped_within(STEP_S, stop, what=what)
        return is_in_order


async def first_write(call: Any, request: Any) -> None:
    """The first message of a gRPC stream, which waits until the call has a connection. Raises CancelledError
    if the call is cancelled meanwhile, or its channel closed: gRPC wakes the readers of such a call, and
    leaves a writer that waits for a connection waiting."""
    writing = asyncio.ensure_future(call.write(request))

    def ended(call: Any) -> None:
        if call.cancelled():  # any other end has a status, and that reaches the writer
            writing.cancel()

    call.add_done_callback(ended)
    await writing


class SingleFlight(Generic[K, V]):
    """Work that is done once for all callers that ask for it at the same time. Owned by the event loop. The
    work runs in a task of its own: a caller that goes away does not stop it for the others. All callers get
    its outcome, a failure too, and then it is forgotten."""

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
        """End all that is running, and begin nothing more: every caller gets the error."""
        self._stopped = error
        await cancelled(*self._running.values())

    def _done(self, key: K, task: asyncio.Task[V]) -> None:
        del self._running[key]
        if not task.cancelled():
            task.exception()  # seen: those who waited may be gone
