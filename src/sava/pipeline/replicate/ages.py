"""Age: when the oldest message of a partition was published that is not copied.

What comes while the partition is watched was published when its end was first seen that far, or shortly
before. Of what was there before the first look nothing is known; the source is asked for the time of the
message that is copied next, now and then.

Pure: clocks are parameters.
"""

from __future__ import annotations

from collections import deque
from typing import Final

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
