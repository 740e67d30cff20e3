"""Histogram: durations in buckets whose width grows with the duration, so that every one of them is known to
within one percent, from a microsecond to days, in a bounded number of buckets.

Within each power of two there are 128 buckets of equal width, as in HdrHistogram.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Final

_BITS: Final = 7
_WIDTH: Final = 1 << _BITS
_LARGEST: Final = (1 << 40) - 1
"""Microseconds: twelve days. What takes longer counts as that."""

PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9, 99.99)


class Histogram:
    """Of microseconds. Owned by one event loop."""

    def __init__(self) -> None:
        self._counts = [0] * (_index(_LARGEST) + 1)
        self.count = 0
        self._sum = 0
        self._least = _LARGEST
        self._most = 0

    def record(self, microseconds: int, count: int = 1) -> None:
        value = min(max(microseconds, 0), _LARGEST)
        self._counts[_index(value)] += count
        self.count += count
        self._sum += value * count
        self._least = min(self._least, value)
        self._most = max(self._most, value)

    def record_all(self, microseconds: Iterable[int]) -> None:
        """Equal ones, of which batches have many, at once."""
        for value, count in Counter(microseconds).items():
            self.record(value, count)

    @property
    def least(self) -> int:
        return self._least if self.count else 0

    @property
    def most(self) -> int:
        return self._most

    @property
    def mean(self) -> float:
        return self._sum / self.count if self.count else 0.0

    def percentile(self, percent: float) -> int:
        """So many percent are not above it; nearest rank."""
        if not self.count:
            return 0
        left = max(1, math.ceil(self.count * percent / 100))
        for index, count in enumerate(self._counts):
            left -= count
            if left <= 0:
                return min(max(_highest(index), self._least), self._most)
        raise AssertionError("the counts do not add up")

    def summary(self) -> dict[str, float]:
        """In milliseconds, as people think of them."""
        named = {f"p{percent:g}": self.percentile(percent) for percent in PERCENTILES}
        values = {"min": self.least, "mean": self.mean, **named, "max": self.most}
        return {name: round(value / 1000, 3) for name, value in values.items()}


def _index(value: int) -> int:
    """Exact below 2 * _WIDTH; above, the exponent and the first bits behind the leading one."""
    shift = max(value.bit_length() - _BITS - 1, 0)
    return shift * _WIDTH + (value >> shift)


def _highest(index: int) -> int:
    """The largest value in a bucket."""
    if index < 2 * _WIDTH:
        return index
    shift = index // _WIDTH - 1
    return ((index - shift * _WIDTH + 1) << shift) - 1
