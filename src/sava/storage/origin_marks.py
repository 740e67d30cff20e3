"""Seen: which messages of an origin a topic has, or knows not to come. Pure, and by column.

An origin's messages may come on several paths, and no path brings all of them: a message may be excluded from
the cluster in the midst, a link may have begun late, an operator may have agreed to a loss. So the end of
what has come says nothing of what is before it; what was really seen does, as ranges of the origin's offsets:

    eu ─▶ asia ─▶ us   brings eu 90 … 94, 96 … 120            seen  90..95  96..121
    eu ─▶ us           brings 95, late: in no range, so new   seen  90..121

**Holes close as the direct path passes.** A link that copies from the origin itself sees all that is there,
so a range of it stands for all its offsets, with or without a message. With that path alone there is one
range.

**Bounded.** Other paths leave holes that no path closes (the origin's offsets between its own messages are
copies it got from elsewhere). When there are too many, the oldest are forgotten: between two offsets it is
*vague* what is here. What comes there cannot be judged, with one exception: if a single source has brought
everything of the origin so far, what it brings now is new, since a source brings nothing twice. So an origin
with one path never notices.

**Marks.** What a topic remembers of an origin, and what of that goes into the topic's record.

Beside what was seen, it is where messages are *late*: below others of their origin that came before them.
All others are in the order of their origin, which is what makes it possible to find one without looking
through the whole topic.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sava.storage.types import Late, OriginMark

Numbers = NDArray[np.int64]

NO_SOURCE: Final = 0
SEVERAL: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class SeenOffsets:
    """Never changed: what comes of it with more is another one."""

    bounds: Numbers
    """start, end, start, end, … ascending; ranges neither overlap nor touch."""
    vague: tuple[int, int] = (0, 0)
    """From here to there the ranges were forgotten, and there are none."""
    by: int = NO_SOURCE
    """The source that alone has brought messages, or SEVERAL."""
    top: int = 0
    """Behind the highest offset of a message that is here. The messages before the one that is highest are
    lower, so what comes from here on is in order in the log, too."""

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, SeenOffsets)
            and (self.vague, self.by, self.top) == (other.vague, other.by, other.top)
            and np.array_equal(self.bounds, other.bounds)
        )

    def __bool__(self) -> bool:
        """Whether anything was."""
        return len(self.bounds) > 0

    @property
    def end(self) -> int:
        """Nothing was seen from here on."""
        return int(self.bounds[-1]) if len(self.bounds) else 0

    @property
    def ranges(self) -> list[tuple[int, int]]:
        flat = self.bounds.tolist()
        return list(zip(flat[::2], flat[1::2], strict=True))

    # -- judging -----------------------------------------------------------------------------

    def is_beyond(self, offsets: Numbers) -> bool:
        """Whether they are all behind what was seen, and in order: so it mostly is."""
        return bool(offsets[0] >= self.end) and is_rising(offsets)

    def new(self, offsets: Numbers) -> NDArray[np.bool_]:
        """Which of them were not seen; of several that are the same, the first."""
        is_new: NDArray[np.bool_] = np.searchsorted(self.bounds, offsets, "right") % 2 == 0
        if not is_rising(offsets):
            is_first = np.zeros(len(offsets), np.bool_)
            is_first[np.unique(offsets, return_index=True)[1]] = True
            is_new &= is_first
        return is_new

    def unknown(self, offsets: Numbers, source_key: int) -> int | None:
        """The first of them of which it cannot be said whether they were seen, if this source brings them."""
        start, end = self.vague
        if start == end or self.by == source_key:
            return None
        found = offsets[(offsets >= start) & (offsets < end)]
        return int(found[0]) if len(found) else None

    # -- seeing ------------------------------------------------------------------------------

    def credited(self, source_key: int, top: int) -> SeenOffsets:
        """The source has brought messages below ``top``; which, is said elsewhere."""
        by = source_key if self.by in (NO_SOURCE, source_key) else SEVERAL
        return replace(self, by=by, top=max(self.top, top))

    def added(self, offsets: Numbers, source_key: int) -> SeenOffsets:
        """With messages at these offsets (at least one), which the source has brought."""
        ordered = offsets if is_rising(offsets) else np.unique(offsets)
        return self.credited(source_key, int(ordered[-1]) + 1)._with(runs(ordered))

    def covered(self, start: int, end: int) -> SeenOffsets:
        """Of everything between it is known now: it is here, or does not come."""
        if start >= end:
            return self
        first, last = self.vague
        if start <= first:
            first = max(first, end)
        elif end >= last:
            last = min(last, start)
        vague = (first, last) if first < last else (0, 0)
        known = self if vague == self.vague else replace(self, vague=vague)
        return known._with(np.array([start, end], np.int64))

    def trimmed(self, room: int) -> SeenOffsets:
        """A copy with at most ``room`` ranges (two or more): the oldest holes are forgotten."""
        excess = len(self.bounds) // 2 - room
        if excess <= 0:
            return self
        start, end = self.vague
        first = int(
            self.bounds[2]
        )  # what is before it stays certain: the first range is often the direct path's
        start = min(start, first) if start < end else first
        end = max(end, int(self.bounds[2 * excess + 1]))
        return replace(self, bounds=_without(self.bounds, start, end), vague=(start, end))

    def _with(self, more: Numbers) -> SeenOffsets:
        bounds = self.bounds
        if not len(bounds) or more[0] > bounds[-1]:
            joined = np.concatenate((bounds, more))
        elif more[0] == bounds[-1]:
            joined = np.concatenate((bounds[:-1], more[1:]))
        elif len(more) == 2 and more[0] >= bounds[-2]:
            if more[1] <= bounds[-1]:
                return self
            joined = np.concatenate((bounds[:-1], more[1:]))
        else:
            joined = _united(bounds, more)
        start, end = self.vague
        if start < end and more[0] < end:
            joined = _without(joined, start, end)
        return replace(self, bounds=joined)


NOTHING: Final = SeenOffsets(np.zeros(0, np.int64))


def seen(ranges: Iterable[tuple[int, int]], **more: Any) -> SeenOffsets:
    """Of ranges that are ascending and apart."""
    return SeenOffsets(np.array([bound for each in ranges for bound in each], np.int64), **more)


def numbers(column: Any) -> Numbers:
    """The values of an Arrow array of int64 without nulls, as it lies in memory."""
    found: Numbers = column.to_numpy()
    return found


def is_rising(offsets: Numbers) -> bool:
    return bool((offsets[1:] > offsets[:-1]).all())


def runs(offsets: Numbers) -> Numbers:
    """Numbers (at least one) as start, end, start, end, … of those that follow one another."""
    breaks = np.flatnonzero(offsets[1:] != offsets[:-1] + 1)
    bounds = np.empty(2 * len(breaks) + 2, np.int64)
    bounds[0], bounds[-1] = offsets[0], offsets[-1] + 1
    bounds[1:-1:2] = offsets[breaks] + 1
    bounds[2:-1:2] = offsets[breaks + 1]
    return bounds


def _united(bounds: Numbers, more: Numbers) -> Numbers:
    starts = np.concatenate((bounds[::2], more[::2]))
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = np.maximum.accumulate(np.concatenate((bounds[1::2], more[1::2]))[order])
    breaks = np.flatnonzero(starts[1:] > ends[:-1])
    joined = np.empty(2 * len(breaks) + 2, np.int64)
    joined[0], joined[-1] = starts[0], ends[-1]
    joined[1:-1:2] = ends[breaks]
    joined[2:-1:2] = starts[breaks + 1]
    return joined


def _without(bounds: Numbers, start: int, end: int) -> Numbers:
    """What of the ranges is not between."""
    low, high = int(np.searchsorted(bounds, start, "left")), int(np.searchsorted(bounds, end, "right"))
    between = [start] * (low % 2) + [end] * (high % 2)
    return np.concatenate((bounds[:low], np.array(between, np.int64), bounds[high:]))


# -- marks -----------------------------------------------------------------------------------------


MAX_RANGES: Final = 4096
"""Of what was seen, of all origins of a topic together: each has its share, and no less than four, as there
are a thousand origins at most. They are part of the topic's record, which may have a megabyte: a range takes
some five bytes of it, and 40 at the very worst."""
MAX_LATE: Final = 2048
"""The same of places of messages that are late."""
LATE_EACH: Final = 64
"""And of one origin: each ack is looked up in those that may have its message."""


class Mark(NamedTuple):
    """What a topic remembers of one origin."""

    seen: SeenOffsets
    late: tuple[Late, ...] = ()

    def bounded(self, origins: int) -> Mark:
        """The mark, trimmed to the room that a topic of ``origins`` origins has for each."""
        return Mark(self.seen.trimmed(room_for(origins)), _fewer(self.late, origins))

    def record(self, origin: tuple[str, str], origins: int) -> OriginMark:
        seen, late = self.bounded(origins)
        steps = tuple(np.diff(seen.bounds, prepend=0).tolist())
        return OriginMark(*origin, steps, seen.vague, seen.by, seen.top, late)


def room_for(origins: int) -> int:
    """Ranges of each."""
    return MAX_RANGES // max(origins, 1)


def read_marks(records: Iterable[OriginMark]) -> dict[tuple[str, str], Mark]:
    """As they are in a topic's state."""
    return {
        (each.cluster, each.topic): Mark(
            SeenOffsets(np.cumsum(each.steps, dtype=np.int64), each.vague, each.by, each.top), each.late
        )
        for each in records
    }


def is_in_order(seen: SeenOffsets, offsets: Numbers) -> bool:
    """Whether messages at these offsets are in order behind those that are here."""
    return bool(offsets[0] >= seen.top) and is_rising(offsets)


def span(offsets: Numbers) -> tuple[int, int]:
    return int(offsets.min()), int(offsets.max()) + 1


def _fewer(late: tuple[Late, ...], origins: int) -> tuple[Late, ...]:
    """Two become one when there are too many: so none gets much larger than those beside it."""
    while len(late) > min(LATE_EACH, MAX_LATE // max(origins, 1)):
        pairs = zip(late[::2], late[1::2], strict=False)
        odd = late[len(late) // 2 * 2 :]
        late = (
            *(Late(a.start, b.end, min(a.lowest, b.lowest), max(a.top, b.top)) for a, b in pairs),
            *odd,
        )
    return late
