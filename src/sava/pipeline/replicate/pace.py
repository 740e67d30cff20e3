"""Pace of a link: delays between attempts, the rate limit, the measured rate, and the age of the backlog.

Clocks are parameters.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

FIRST_DELAY_S: Final = 0.1
LONGEST_DELAY_S: Final = 60.0
RATE_S: Final = 10.0
ROUNDS: Final = 5
"""Rounds per second of a link at its rate limit: each round has a fixed cost."""
PORTIONS: Final = 20
"""The partitions that share the rate of one second. With more, some wait for a later round."""


class Delays:
    """Delays between failed attempts: doubled each time, with a quarter of jitter, so that a hundred
    partitions whose remote was down do not retry at the same moment again and again."""

    def __init__(self, chance: Callable[[float, float], float] = random.uniform) -> None:
        self._chance = chance
        self._next = FIRST_DELAY_S

    def next(self) -> float:
        delay, self._next = self._next, min(2 * self._next, LONGEST_DELAY_S)
        return delay * self._chance(0.75, 1.0)

    def reset(self) -> None:
        self._next = FIRST_DELAY_S


class Throttle:
    """A token bucket for all partitions of a link: ``rate`` messages per second, one second of burst; 0 is no
    limit."""

    def __init__(self, rate: int, now: float) -> None:
        self.rate = rate
        self._room = float(rate)
        self._at = now

    def set(self, rate: int, now: float) -> None:
        if rate != self.rate:
            self.rate, self._room, self._at = rate, float(rate), now

    def portions(self, wanted: Sequence[int], now: float) -> list[int]:
        """The messages that each partition may copy, for those that want ``wanted``, the longest wait first.
        All get the same, or less if they want less. Where that would be too little, the last ones wait for a
        later round, and all wait while there is too little in total: a task for one message costs as much as
        for many."""
        if not self.rate:
            return list(wanted)
        self._fill(now)
        left, granted = int(self._room), [0] * len(wanted)
        if left < self._worth(sum(wanted)):
            return granted
        crumb = max(1, self.rate // PORTIONS)
        needed = accumulate(min(each, crumb) for each in wanted)
        turns = sum(each <= left for each in needed)
        for place, index in enumerate(sorted(range(turns), key=wanted.__getitem__)):
            granted[index] = min(wanted[index], left // (turns - place))
            left -= granted[index]
        return granted

    def due_in(self, wanted: int, now: float) -> float:
        """Seconds until ``portions`` grants messages to partitions that want ``wanted`` in total."""
        if not self.rate:
            return 0.0
        self._fill(now)
        return max(0.0, (self._worth(wanted) - self._room) / self.rate)

    def take(self, messages: int) -> None:
        self._room -= messages if self.rate else 0

    def give_back(self, messages: int) -> None:
        self._room = min(float(self.rate), self._room + messages)

    def _worth(self, wanted: int) -> int:
        return min(wanted, max(1, self.rate // ROUNDS))

    def _fill(self, now: float) -> None:
        self._room = min(float(self.rate), self._room + (now - self._at) * self.rate)
        self._at = now


class Rate:
    """Messages and bytes per second over the last RATE_S."""

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


ASK_S: Final = 5.0
"""The interval between two requests for a publish time."""
MAX_ENDS: Final = 64


class Age:
    """The publish time of the oldest message of a partition that is not copied.

    A message that arrives while the partition is watched was published when its end was first seen that far,
    or shortly before. For older messages the source is asked now and then for the time of the next message to
    copy.
    """

    def __init__(self, now: float) -> None:
        self._ends: deque[tuple[int, int]] = deque()
        """Ends, and the time (µs) when each was first seen."""
        self._first_end = 0
        """The end at the first look."""
        self._told: tuple[int, int] | None = None
        """An offset below that, and its publish time (µs), as the source answered."""
        self._asked_at = now - ASK_S

    def tell(self, offset: int, publish_us: int) -> None:
        self._told = (offset, publish_us)

    def forget(self) -> None:
        """Discard the answer: it concerns another message than the next one."""
        self._told = None

    def see(self, end: int, position: int | None, now_us: int) -> None:
        """Note the partition's end and its copied position, if known."""
        if not self._ends:
            self._first_end = end
        if not self._ends or end > self._ends[-1][0]:
            self._ends.append((end, now_us))
        while len(self._ends) > 1 and position is not None and self._ends[0][0] <= position:
            self._ends.popleft()
        if len(self._ends) > MAX_ENDS:
            # Drop every other one, except the first and the last.
            kept = list(self._ends)
            self._ends = deque([*kept[:-1:2], kept[-1]])

    @property
    def told_us(self) -> int:
        """The last answer of the source; 0 for none."""
        return self._told[1] if self._told is not None else 0

    def oldest_us(self, position: int) -> int:
        """The publish time of the existing message at ``position``; 0 if unknown."""
        if position < self._first_end:
            return self.told_us
        return next((at for end, at in self._ends if end > position), 0)

    def wants(self, position: int, now: float) -> bool:
        """Whether to ask the source now for the publish time of this message. A True answer starts a new
        interval."""
        is_told = self._told is not None and self._told[0] == position
        if position >= self._first_end or is_told or now - self._asked_at < ASK_S:
            return False
        self._asked_at = now
        return True
