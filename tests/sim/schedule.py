"""Schedule: virtual time as one priority queue of (time, sequence, action).

Two events at the same microsecond run in the order in which they were scheduled, so a run has one order only.
Time is an integer of microseconds; nothing here reads a clock."""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any

Action = Callable[..., object]

KEEP_EVENTS = 400
"""How many of the last events a failure report can show."""


class Schedule:
    def __init__(self) -> None:
        self.now = 0
        self.events = 0
        self.hash = 0
        """A running checksum over everything that was noted: equal for equal runs."""
        self.trace: Callable[[str], None] | None = None
        self._sequence = 0
        self._queue: list[tuple[int, int, Action, tuple[Any, ...]]] = []
        self._recent: deque[tuple[int, str, tuple[Any, ...]]] = deque(maxlen=KEEP_EVENTS)

    @property
    def now_ms(self) -> int:
        return self.now // 1000

    def after(self, delay_us: int, action: Action, *args: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self.now + max(0, delay_us), self._sequence, action, args))

    def run_until(self, end_us: int, stop: Callable[[], bool] | None = None) -> bool:
        """Run events up to ``end_us``; True as soon as ``stop`` holds (asked after each event)."""
        queue = self._queue
        while queue and queue[0][0] <= end_us:
            self.now, _, action, args = heapq.heappop(queue)
            self.events += 1
            action(*args)
            if stop is not None and stop():
                return True
        self.now = max(self.now, end_us)
        return stop is not None and stop()

    def note(self, what: str, *details: Any) -> None:
        """Something happened. Details are formatted only when somebody reads them."""
        self.hash = zlib.crc32(f"{self.now}{what}".encode(), self.hash)
        self._recent.append((self.now, what, details))
        if self.trace is not None:
            self.trace(format_event(self.now, what, details))

    def note_bytes(self, data: bytes) -> None:
        self.hash = zlib.crc32(data, self.hash)

    def recent(self, count: int) -> list[str]:
        return [format_event(*event) for event in list(self._recent)[-count:]]


def format_event(at: int, what: str, details: tuple[Any, ...]) -> str:
    return f"{at / 1e6:11.6f}  {what:<22} {' '.join(_brief(detail) for detail in details)}".rstrip()


def _brief(detail: Any) -> str:
    text = detail() if callable(detail) else str(detail)
    return text if len(text) <= 300 else f"{text[:300]}…"
