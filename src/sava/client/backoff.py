"""ReconnectBackoff: how long to wait before the next attempt. Doubles from 50 ms to 2 s, half of it left to
chance, so that a thousand clients of a broker that comes back do not come back in the same millisecond. A
topic that has moved is no reason to wait: the first look-up after that goes out at once, and is
answered when there is an owner."""

from __future__ import annotations

import asyncio
import random
from typing import Final

from sava.client.errors import ClientError

FIRST_S: Final = 0.05
LONGEST_S: Final = 2.0


class ReconnectBackoff:
    def __init__(self) -> None:
        self._next = FIRST_S

    def reset(self) -> None:
        self._next = FIRST_S

    def delay(self, failure: ClientError | None = None) -> float:
        delay, self._next = self._next, min(self._next * 2, LONGEST_S)
        if delay == FIRST_S and failure is not None and failure.is_elsewhere:
            return 0.0
        return delay * random.uniform(0.5, 1.0)

    async def pause(self, failure: ClientError | None = None) -> None:
        await asyncio.sleep(self.delay(failure))
