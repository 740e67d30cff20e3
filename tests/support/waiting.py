"""How tests wait for what must come, and how they tell how long something takes.

Only a test that fails waits for ``PATIENCE_S``, so the bound is generous: it stands for "never", on a machine
that does ten other things, and says nothing about how fast something should be.

Where a thing must not wait for a timeout of its own, that timeout is ``FAR_S``: a test that waits for it
fails. What must be done before a deadline, or is cut off by it, is tried with each of ``HURRIES`` until the
machine is fast enough for one.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from sava.errors import SavaError

T = TypeVar("T")

PATIENCE_S: Final = 60.0
FAR_S: Final = 10 * PATIENCE_S
HURRIES: Final = (2.0, 8.0, 30.0)


class NotInTime(AssertionError):
    """A condition was not true before its deadline."""


class _Attempts:
    """A condition's attempts until a deadline. A broker that refuses (SavaError) is asked again."""

    def __init__(
        self, what: str | Callable[[], object], timeout: float, passing: tuple[type[Exception], ...]
    ) -> None:
        self._what = what
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self.passing: tuple[type[Exception], ...] = (SavaError, *passing)
        self.last: object = None
        """The value or the error of the last attempt."""

    def check(self) -> None:
        if time.monotonic() > self._deadline:
            what = self._what() if callable(self._what) else self._what
            raise NotInTime(f"not within {self._timeout:g} s: {what} (last: {self.last!r})")


async def until(
    condition: Callable[[], object],
    what: str | Callable[[], object] = "the condition",
    *,
    timeout: float = PATIENCE_S,
    poll_s: float = 0.0,
    passing: tuple[type[Exception], ...] = (),
) -> None:
    """Ask again and again until the answer is true: for what has no event to wait for. Errors of the types
    ``passing`` mean "not yet". Raises NotInTime, with ``what`` and the last answer.

    The condition may be a coroutine function, which asks a broker as a rule: every 50 ms, where a look at
    this process is taken every 5 ms.
    """
    attempts = _Attempts(what, timeout, passing)
    while True:
        pause_s = 0.005
        try:
            answer = condition()
            if inspect.isawaitable(answer):
                pause_s = 0.05
                answer = await answer
            attempts.last = answer
            if attempts.last:
                return
        except attempts.passing as error:
            attempts.last = error
        attempts.check()
        await asyncio.sleep(poll_s or pause_s)


def wait_until(
    condition: Callable[[], T],
    what: str | Callable[[], object] = "the condition",
    *,
    timeout: float = PATIENCE_S,
    poll_s: float = 0.02,
    passing: tuple[type[Exception], ...] = (),
) -> T:
    """``until`` for tests without an event loop; returns the answer."""
    attempts = _Attempts(what, timeout, passing)
    while True:
        try:
            if value := condition():
                return value
            attempts.last = value
        except attempts.passing as error:
            attempts.last = error
        attempts.check()
        time.sleep(poll_s)


# -- how long something takes ------------------------------------------------------------------


class OwnTime:
    """How long something takes, whatever else the machine does; begins when it is made.

    A clock tells how long it took here and now, beside three other test processes. The kernel knows how long
    each thread was ready and had no core. Less that, it is the time that the thing takes by itself, and that
    may be asserted:

        own = OwnTime(broker.pid)
        await broker.put("/x", b"1")
        assert own.seconds < 3.0

    It counts this process and those named, but no threads that ended meanwhile. Where the kernel does not
    tell, it is the time of the clock.
    """

    def __init__(self, *pids: int) -> None:
        self._pids = (os.getpid(), *pids)
        self._waited = self._ready()
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        took = time.monotonic() - self._began
        now = self._ready()
        return took - sum(waited - self._waited.get(thread, 0) for thread, waited in now.items()) / 1e9

    def _ready(self) -> dict[Path, int]:
        """Nanoseconds for which each thread has waited for a core."""
        found: dict[Path, int] = {}
        for pid in self._pids:
            with suppress(OSError):
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    with suppress(OSError):  # it has ended
                        found[thread] = int((thread / "schedstat").read_text().split()[1])
        return found
