"""Pace: when messages are due. They are due whatever became of the earlier ones: a load that waits for a slow
cluster before it asks again would not notice that it is slow."""

from __future__ import annotations

import asyncio
import time
from typing import Final

TURN_S: Final = 0.001
"""How finely a rate is kept. What is due in between goes together."""
NANOSECONDS: Final = 1_000_000_000


class Pace:
    """The moments, in nanoseconds since 1970, from now on. Without a rate everything is due when asked.

    rate     a second; None: no bound.
    seconds  for how long; None: without an end.
    delay    of the first, in seconds: several that keep a rate together take turns."""

    def __init__(self, rate: float | None, seconds: float | None = None, *, delay: float = 0.0) -> None:
        self._rate = rate
        began = time.time_ns()
        self._began = began + int(delay * NANOSECONDS)
        self._end = None if seconds is None else began + int(seconds * NANOSECONDS)
        self._given = 0

    @property
    def is_over(self) -> bool:
        return self._end is not None and time.time_ns() >= self._end

    async def due(self, most: int) -> list[int]:
        """The next moments: at least one, at most ``most``, when they have come; none if the time is over.
        Whoever asks has the next one for itself, so many can ask at the same time."""
        if self._rate is None:
            return [] if self.is_over else [time.time_ns()] * most
        first = self._given
        if self._is_behind_the_end(self._moment(first)):
            return []
        self._given += 1
        left = self._moment(first) - time.time_ns()
        if left > 0:
            await asyncio.sleep(max(left / NANOSECONDS, TURN_S))
        times = [self._moment(first)]
        now = time.time_ns()
        while len(times) < most:
            moment = self._moment(self._given)
            if moment > now or self._is_behind_the_end(moment):
                break
            times.append(moment)
            self._given += 1
        return times

    def _is_behind_the_end(self, moment: int) -> bool:
        return self._end is not None and moment >= self._end

    def _moment(self, number: int) -> int:
        assert self._rate is not None
        return self._began + int(number / self._rate * NANOSECONDS)
