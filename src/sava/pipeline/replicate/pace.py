"""Pace: when to try again, how much may go at a time, and how fast it went. Clocks are parameters."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Final

FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 60.0
RATE_S: Final = 10.0


class Delays:
    """Between attempts that fail: twice as long each time, a quarter of it left to chance, so that a hundred
    partitions whose remote was away do not come back in the same moment for ever."""

    def __init__(self, chance: Callable[[float, float], float] = random.uniform) -> None:
        self._chance = chance
        self._next = FIRST_DELAY_S

    def next(self) -> float:
        delay, self._next = self._next, min(2 * self._next, LONGEST_DELAY_S)
        return delay * self._chance(0.75, 1.0)

    def reset(self) -> None:
        self._next = FIRST_DELAY_S


class Throttle:
    """``rate`` messages a second, as a bucket that holds those of one second; 0: no limit."""

    def __init__(self, rate: int, now: float) -> None:
        self.rate = rate
        self._room = float(rate)
        self._at = now

    def set(self, rate: int, now: float) -> None:
        if rate != self.rate:
            self.rate, self._room, self._at = rate, float(rate), now

    def allows(self, wanted: int, now: float) -> int:
        """Of so many messages. Nothing rather than a few of many: a task costs as much for one."""
        if not self.rate:
            return wanted
        self._fill(now)
        worth = min(wanted, max(1, self.rate // 5))
        return min(wanted, int(self._room)) if self._room >= worth else 0

    def due_in(self, wanted: int, now: float) -> float:
        """Seconds until it allows something."""
        if not self.rate:
            return 0.0
        self._fill(now)
        return max(0.0, (min(wanted, max(1, self.rate // 5)) - self._room) / self.rate)

    def take(self, messages: int) -> None:
        self._room -= messages if self.rate else 0

    def give_back(self, messages: int) -> None:
        self._room = min(float(self.rate), self._room + messages)

    def _fill(self, now: float) -> None:
        self._room = min(float(self.rate), self._room + (now - self._at) * self.rate)
        self._at = now


class Rate:
    """Messages and bytes a second, of late."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int, int]] = deque()

    def note(self, messages: int, size: int, now: float) -> None:
        self._recent.append((now, messages, size))

    def per_second(self, now: float) -> tuple[float, float]:
        while self._recent and self._recent[0][0] < now - RATE_S:
            self._recent.popleft()
        messages = sum(each for _, each, _ in self._recent)
        size = sum(each for _, _, each in self._recent)
        return messages / RATE_S, size / RATE_S
