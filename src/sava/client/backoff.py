"""Backoff: how long to wait before the next attempt. Doubles from 50 ms to 2 s, half of it left to chance, so
that a thousand clients of a broker that comes back do not come back in the same millisecond."""

from __future__ import annotations

import asyncio
import random
from typing import Final

FIRST_S: Final = 0.05
LONGEST_S: Final = 2.0


class Backoff:
    def __init__(self) -> None:
        self._next = FIRST_S

    def reset(self) -> None:
        self._next = FIRST_S

    def delay(self) -> float:
        delay, self._next = self._next, min(self._next * 2, LONGEST_S)
        return delay * random.uniform(0.5, 1.0)

    async def pause(self) -> None:
        await asyncio.sleep(self.delay())
