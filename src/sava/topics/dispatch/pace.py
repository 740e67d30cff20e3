"""Pace: at most so many messages a second, by waiting. A token bucket that holds a tenth of a second's
worth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

UNLIMITED: Final = 1 << 62
_BURST_S: Final = 0.1
_TURN_S: Final = 0.02
"""Worth waking up for."""


class Pace:
    def __init__(self, rate: Callable[[], int]) -> None:
        """``rate`` is asked each time, so a change takes effect at once; 0 is no limit."""
        self._rate = rate
        self._tokens: float | None = None
        self._at = 0.0

    def allowance(self, now: float) -> int:
        """How many messages may go now."""
        rate = self._rate()
        if rate <= 0:
            self._tokens = None
            return UNLIMITED
        most = max(1.0, rate * _BURST_S)
        tokens = most if self._tokens is None else self._tokens + (now - self._at) * rate
        self._tokens, self._at = min(most, tokens), now
        return int(self._tokens)

    def spend(self, count: int) -> None:
        if self._tokens is not None:
            self._tokens -= count

    def ready_at(self, now: float) -> float | None:
        """When to look again, if nothing may go now."""
        if self.allowance(now) > 0 or self._tokens is None:
            return None
        rate = self._rate()
        return now + (max(1.0, rate * _TURN_S) - self._tokens) / rate
