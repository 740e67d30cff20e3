"""Ranges: sets and maps of offsets, kept as ranges.

A subscription says things of messages that lie side by side: acked, on their way, waiting. As ranges they
cost what they differ, not what they count: a batch of a thousand is one entry, found by bisection. Both
classes keep parallel sorted lists, since ``bisect`` and slice assignment on plain lists are what Python does
fastest."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Range = tuple[int, int]
"""Offsets from the first to, and without, the second."""

V = TypeVar("V")


class IntervalSet:
    """A set of offsets. Ranges that touch are one; empty ranges are none."""

    __slots__ = ("_ends", "_starts", "count")

    def __init__(self, ranges: Iterable[Range] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.count = 0
        """How many offsets. Not ``len``: ``list`` and ``tuple`` make room for as many as that says, and a
        cursor at some thousand million is one range."""
        for start, end in ranges:
            self.add(start, end)

    def __bool__(self) -> bool:
        return self.count > 0

    def __iter__(self) -> Iterator[Range]:
        return zip(self._starts, self._ends, strict=True)

    def __contains__(self, offset: int) -> bool:
        index = bisect_right(self._starts, offset) - 1
        return index >= 0 and offset < self._ends[index]

    def __repr__(self) -> str:
        return f"IntervalSet({list(self)})"

    @property
    def fragments(self) -> int:
        """How many ranges."""
        return len(self._starts)

    @property
    def first(self) -> int:
        """The lowest offset. Raises IndexError if there is none."""
        return self._starts[0]

    @property
    def end(self) -> int:
        """Behind the highest offset. Raises IndexError if there is none."""
        return self._ends[-1]

    def add(self, start: int, end: int) -> int:
        """How many of them are new."""
        if start >= end:
            return 0
        starts, ends = self._starts, self._ends
        if not ends or start >= ends[-1]:  # in order, as most come
            if ends and start == ends[-1]:
                ends[-1] = end
            else:
                starts.append(start)
                ends.append(end)
            self.count += end - start
            return end - start
        low = bisect_left(ends, start)
        high = bisect_right(starts, end, low)
        if low == high:
            starts.insert(low, start)
            ends.insert(low, end)
            self.count += end - start
            return end - start
        known = sum(ends[low:high]) - sum(starts[low:high])
        start, end = min(start, starts[low]), max(end, ends[high - 1])
        starts[low:high] = (start,)
        ends[low:high] = (end,)
        added = end - start - known
        self.count += added
        return added

    def remove(self, start: int, end: int) -> list[Range]:
        """Those of them that were here."""
        if start >= end:
            return []
        starts, ends = self._starts, self._ends
        low = bisect_right(ends, start)
        high = bisect_left(starts, end, low)
        if low == high:
            return []
        first, last = starts[low], ends[high - 1]
        if high == low + 1 and start <= first and last <= end:
            del starts[low], ends[low]
            self.count -= last - first
            return [(first, last)]
        removed = list(zip(starts[low:high], ends[low:high], strict=True))
        removed[0] = (max(first, start), removed[0][1])
        removed[-1] = (removed[-1][0], min(last, end))
        left = [(first, start)] if first < start else []
        right = [(end, last)] if last > end else []
        rest = left + right
        starts[low:high] = [each[0] for each in rest]
        ends[low:high] = [each[1] for each in rest]
        self.count -= sum(stop - begin for begin, stop in removed)
        return removed

    def within(self, start: int, end: int) -> list[Range]:
        """Those of them that are here."""
        starts, ends = self._starts, self._ends
        low = bisect_right(ends, start)
        high = bisect_left(starts, end, low)
        return [(max(starts[i], start), min(ends[i], end)) for i in range(low, high)] if start < end else []

    def gaps(self, start: int, end: int) -> list[Range]:
        """Those of them that are not here."""
        if start < end and (not self._ends or start >= self._ends[-1]):
            return [(start, end)]
        found: list[Range] = []
        for begin, stop in self.within(start, end):
            if start < begin:
                found.append((start, begin))
            start = stop
        if start < end:
            found.append((start, end))
        return found

    def pop_prefix(self, offset: int) -> int:
        """Where the range ends that begins at or below the offset and reaches it; it and everything before is
        taken out. The offset itself if there is none: how a cursor moves on."""
        index = bisect_right(self._starts, offset)
        if not index:
            return offset
        end = max(offset, self._ends[index - 1])
        self.remove(self._starts[0], end)
        return end

    def clear(self) -> None:
        self._starts.clear()
        self._ends.clear()
        self.count = 0


class RangeMap(Generic[V]):
    """A value for each offset of disjoint ranges. Neighbours with the same value stay apart: a range is what
    was set together."""

    __slots__ = ("_ends", "_starts", "_values", "count")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._values: list[V] = []
        self.count = 0
        """How many offsets."""

    def __bool__(self) -> bool:
        return self.count > 0

    def __iter__(self) -> Iterator[tuple[int, int, V]]:
        return zip(self._starts, self._ends, self._values, strict=True)

    def __repr__(self) -> str:
        return f"RangeMap({list(self)})"

    @property
    def fragments(self) -> int:
        return len(self._starts)

    def get(self, offset: int) -> V | None:
        index = bisect_right(self._starts, offset) - 1
        return self._values[index] if index >= 0 and offset < self._ends[index] else None

    def set(self, start: int, end: int, value: V) -> None:
        if start >= end:
            return
        if self._ends and start < self._ends[-1]:
            self.remove(start, end)
        index = bisect_left(self._starts, start)
        self._starts.insert(index, start)
        self._ends.insert(index, end)
        self._values.insert(index, value)
        self.count += end - start

    def remove(self, start: int, end: int) -> list[tuple[int, int, V]]:
        """What was here of the range."""
        starts, ends, values = self._starts, self._ends, self._values
        low = bisect_right(ends, start)
        high = bisect_left(starts, end, low)
        if low == high or start >= end:
            return []
        removed = self._clipped(low, high, start, end)
        if high == low + 1 and start <= starts[low] and ends[low] <= end:
            del starts[low], ends[low], values[low]
            self.count -= removed[0][1] - removed[0][0]
            return removed
        kept: list[tuple[int, int, V]] = []
        if starts[low] < start:
            kept.append((starts[low], start, values[low]))
        if ends[high - 1] > end:
            kept.append((end, ends[high - 1], values[high - 1]))
        starts[low:high] = [each[0] for each in kept]
        ends[low:high] = [each[1] for each in kept]
        values[low:high] = [each[2] for each in kept]
        self.count -= sum(each[1] - each[0] for each in removed)
        return removed

    def within(self, start: int, end: int) -> list[tuple[int, int, V]]:
        low = bisect_right(self._ends, start)
        high = bisect_left(self._starts, end, low)
        return self._clipped(low, high, start, end) if start < end else []

    def _clipped(self, low: int, high: int, start: int, end: int) -> list[tuple[int, int, V]]:
        return [
            (max(self._starts[i], start), min(self._ends[i], end), self._values[i]) for i in range(low, high)
        ]

    def clear(self) -> None:
        self._starts.clear()
        self._ends.clear()
        self._values.clear()
        self.count = 0


def difference(ranges: Iterable[Range], others: Iterable[Range]) -> Iterator[Range]:
    """What of the ranges is in none of the others; both are in order, and apart. In one pass, where taking
    out one after the other would move the rest each time."""
    rest = iter(others)
    begin, stop = next(rest, (0, 0))
    for first, end in ranges:
        start = first
        while start < end:
            while stop <= start and (found := next(rest, None)) is not None:
                begin, stop = found
            if stop <= start or begin >= end:
                yield start, end
                break
            if start < begin:
                yield start, begin
            start = stop


def runs(offsets: Iterable[int]) -> tuple[Range, ...]:
    """Ascending offsets as ranges."""
    found: list[Range] = []
    start = end = -1
    for offset in offsets:
        if offset == end:
            end += 1
            continue
        if end > start:
            found.append((start, end))
        start, end = offset, offset + 1
    if end > start:
        found.append((start, end))
    return tuple(found)
