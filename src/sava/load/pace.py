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
    """The moments, in nanoseconds since 1970, from now on. Without a rate everything is due when asked."""

    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._began = time.time_ns()
        self._given = 0

    async def due(self, most: int, until: float) -> list[int]:
        """The next messages: at least one, at most ``most``, when they are due. Fewer, or none, if it would
        be after ``until`` (by the clock of ``time.time``)."""
        if self._rate is None:
            now = time.time_ns()
            return [now] * most if now < until * NANOSECONDS else []
        while True:
            now = time.time_ns()
            ready = int((now - self._began) / NANOSECONDS * self._rate) + 1 - self._given
            if ready > 0:
                first = self._given
                self._given += min(ready, most)
                times = [self._moment(number) for number in range(first, self._given)]
                return [each for each in times if each < until * NANOSECONDS]
            if self._moment(self._given) >= until * NANOSECONDS:
                return []
            await asyncio.sleep(max((self._moment(self._given) - now) / NANOSECONDS, TURN_S))

    def _moment(self, number: int) -> int:
        assert self._rate is not None
        return self._began + int(number / self._rate * NANOSECONDS)
