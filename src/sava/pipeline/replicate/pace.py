"""Pace: when to try again, how much may go at a time, and how fast it went. Clocks are parameters.

Age: when the oldest message of a partition was published that is not copied.

What comes while the partition is watched was published when its end was first seen that far, or shortly
before. Of what was there before the first look nothing is known; the source is asked for the time of the
message that is copied next, now and then.

Pure: clocks are parameters.
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
"""A second, of a link that goes as fast as it may: each has to be worth the trouble."""
PORTIONS: Final = 20
"""Partitions of a round that share what a link may copy in a second. With more, each has its turn later."""


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
    """``rate`` messages a second of all partitions of a link together, as a bucket that holds those of one
    second; 0: no limit."""

    def __init__(self, rate: int, now: float) -> None:
        self.rate = rate
        self._room = float(rate)
        self._at = now

    def set(self, rate: int, now: float) -> None:
        if rate != self.rate:
            self.rate, self._room, self._at = rate, float(rate), now

    def portions(self, wanted: Sequence[int], now: float) -> list[int]:
        """What each may have that wants so many messages; who waits for the longest time is first. All get
        the same, or less if they want less. Where that would be crumbs, the last wait for their turn, and
        all do while there are only crumbs: a task costs as much for one message as for many."""
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
        """Seconds until there is something for those who want so many together."""
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


ASK_S: Final = 5.0
"""Between two questions for a publish time."""
MAX_ENDS: Final = 64


class Age:
    """Owned by the partition's thread."""

    def __init__(self, now: float) -> None:
        self._ends: deque[tuple[int, int]] = deque()
        """Ends, and when (µs) they were first seen."""
        self._first_end = 0
        """What was there at the first look."""
        self._told: tuple[int, int] | None = None
        """An offset below that, and when it was published (µs)."""
        self._asked_at = now - ASK_S

    def tell(self, offset: int, publish_us: int) -> None:
        self._told = (offset, publish_us)

    def forget(self) -> None:
        """What was told is of messages that are not the next ones any more."""
        self._told = None

    def see(self, end: int, position: int | None, now_us: int) -> None:
        """The partition ends here, and is copied up to ``position``, if that is known."""
        if not self._ends:
            self._first_end = end
        if not self._ends or end > self._ends[-1][0]:
            self._ends.append((end, now_us))
        while len(self._ends) > 1 and position is not None and self._ends[0][0] <= position:
            self._ends.popleft()
        if len(self._ends) > MAX_ENDS:
            # Every other one goes, but for the first and the last.
            kept = list(self._ends)
            self._ends = deque([*kept[:-1:2], kept[-1]])

    @property
    def told_us(self) -> int:
        """As it was told last; 0: it was not."""
        return self._told[1] if self._told is not None else 0

    def oldest_us(self, position: int) -> int:
        """Of the message at ``position``, which is there; 0: not known."""
        if position < self._first_end:
            return self.told_us
        return next((at for end, at in self._ends if end > position), 0)

    def wants(self, position: int, now: float) -> bool:
        """Whether the source is to be asked for the publish time of this message; it is then."""
        is_told = self._told is not None and self._told[0] == position
        if position >= self._first_end or is_told or now - self._asked_at < ASK_S:
            return False
        self._asked_at = now
        return True
