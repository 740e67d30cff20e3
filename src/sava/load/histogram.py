"""Histogram: durations in buckets whose width grows with the duration, so that every one of them is known to
within one percent, from a microsecond to days, in a bounded number of buckets.

Within each power of two there are 128 buckets of equal width, as in HdrHistogram.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

_BITS: Final = 7
_WIDTH: Final = 1 << _BITS
_MANY: Final = 50
"""From so many on it is worth to treat them as an array."""
_LARGEST: Final = (1 << 40) - 1
"""Microseconds: twelve days. What takes longer counts as that."""

PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9, 99.99)


class Histogram:
    """Of microseconds. Owned by one event loop."""

    def __init__(self) -> None:
        self._counts = np.zeros(int(_indexes(np.array([_LARGEST]))[0]) + 1, np.int64)
        self.count = 0
        self._sum = 0
        self._least = _LARGEST
        self._most = 0

    def record(self, microseconds: int) -> None:
        value = min(max(microseconds, 0), _LARGEST)
        shift = max(value.bit_length() - _BITS - 1, 0)
        self._counts[shift * _WIDTH + (value >> shift)] += 1
        self._note(1, value, value, value)

    def record_since(self, times: Sequence[int], now: int) -> None:
        """What has passed since each of these times, all in nanoseconds."""
        if len(times) < _MANY:
            for time in times:
                self.record((now - time) // 1000)
            return
        values = np.clip((now - np.array(times, np.int64)) // 1000, 0, _LARGEST)
        np.add.at(self._counts, _indexes(values), 1)
        self._note(len(values), int(values.sum()), int(values.min()), int(values.max()))

    def _note(self, count: int, total: int, least: int, most: int) -> None:
        self.count += count
        self._sum += total
        self._least = min(self._least, least)
        self._most = max(self._most, most)

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
        rank = max(1, math.ceil(self.count * percent / 100))
        index = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(max(_highest(index), self._least), self._most)

    def summary(self) -> dict[str, float]:
        """In milliseconds, as people think of them."""
        named = {f"p{percent:g}": self.percentile(percent) for percent in PERCENTILES}
        values = {"min": self.least, "mean": self.mean, **named, "max": self.most}
        return {name: round(value / 1000, 3) for name, value in values.items()}


def _indexes(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Exact below 2 * _WIDTH; above, the exponent and the first bits behind the leading one."""
    bits = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    shifts = np.maximum(bits - _BITS - 1, 0)
    indexes: NDArray[np.int64] = shifts * _WIDTH + (values >> shifts)
    return indexes


def _highest(index: int) -> int:
    """The largest value in a bucket."""
    if index < 2 * _WIDTH:
        return index
    shift = index // _WIDTH - 1
    return ((index - shift * _WIDTH + 1) << shift) - 1
