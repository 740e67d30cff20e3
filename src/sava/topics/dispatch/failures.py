"""Failures: messages that were delivered and came back, until they are acked.

    delivery 1 ─▶ nack or timeout ─▶ waits delay(1) ─▶ delivery 2 ─▶ … ─▶ delivery n was the last one: poison

    block        stays here until somebody acts
    drop         counted as acked
    dead letter  leaves when it is safe in the other topic

Only messages with a failure have an entry, so all of this is bounded by the window of unacked messages. A
message that comes back because its consumer went away has not failed: it is sent again at once and its
attempt is the same."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from sava.topics.delivery import Range
from sava.topics.ranges import RangeMap


@dataclass(frozen=True, slots=True)
class Failure:
    """Of the last delivery that a message may have."""

    attempt: int
    reason: str


class Failures:
    def __init__(self) -> None:
        self.attempts: RangeMap[int] = RangeMap()
        """The number of the current or next delivery, where it is not the first."""
        self.waiting: RangeMap[float] = RangeMap()
        """Until when a message must not be sent again."""
        self.blocked: RangeMap[Failure] = RangeMap()
        self.dead: RangeMap[Failure] = RangeMap()
        """On their way to the dead-letter topic."""
        self._due: list[tuple[float, int, int]] = []
        """A heap. An entry counts if ``waiting`` still says the same of its range."""

    def attempt(self, offset: int) -> int:
        return self.attempts.get(offset) or 1

    def by_attempt(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """The range, cut where the number of the delivery changes."""
        if not self.attempts:
            return [(start, end, 1)]
        found: list[tuple[int, int, int]] = []
        for begin, stop, attempt in self.attempts.within(start, end):
            if start < begin:
                found.append((start, begin, 1))
            found.append((begin, stop, attempt))
            start = stop
        if start < end:
            found.append((start, end, 1))
        return found

    def wait(self, start: int, end: int, due: float) -> None:
        self.waiting.set(start, end, due)
        heappush(self._due, (due, start, end))
        if len(self._due) > 2 * self.waiting.fragments + 64:  # most are acked by now
            self._due = [(at, first, last) for first, last, at in self.waiting]
            heapify(self._due)

    @property
    def next_due(self) -> float | None:
        """Not after the time at which something is due."""
        return self._due[0][0] if self._due else None

    def pop_due(self, now: float) -> list[Range]:
        """Those whose time has come; they wait no more."""
        found: list[Range] = []
        while self._due and self._due[0][0] <= now:
            due, first, last = heappop(self._due)
            ranges = [(start, end) for start, end, at in self.waiting.within(first, last) if at == due]
            for start, end in ranges:
                self.waiting.remove(start, end)
            found += ranges
        return found

    def shorten(self, latest: float) -> None:
        """Nothing waits longer than this."""
        for start, end, due in list(self.waiting):
            if due > latest:
                self.wait(start, end, latest)

    def forget(self, start: int, end: int) -> None:
        """The messages are acked."""
        for part in (self.attempts, self.waiting, self.blocked, self.dead):
            if part:
                part.remove(start, end)

    def clear(self) -> None:
        for part in (self.attempts, self.waiting, self.blocked, self.dead):
            part.clear()
        self._due.clear()
