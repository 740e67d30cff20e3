"""Origin acks: what is acked of a topic, said so that other clusters understand it, and the other way round.

Offsets differ from cluster to cluster; where a message was published, and at which offset there, does not.
So acks travel by origin, and are looked up where they come to:

    acked there   of eu, topic 7: everything below 40, and 42..44
    here          offset   100     101     102     103     104     105
                  origin   eu 38   eu 41   own     eu 42   us 9    eu 43
    acked here             100                     103             105

What was published in this cluster has no origin, and here the offsets that others know it by. Messages that
are not acked there, or not of these origins, hold the cursor here, and the ranges beyond it are acked one by
one: nothing is skipped, and nothing is delivered again that was acked.

**Only what was seen is said** (``by_origin``). Of its own messages a cluster knows all, so its cursor says
everything of them. Of others' it has those that came to it, and "everything before the next one" would be
more than it knows:

    eu   0 … 99 are not acked; from 100 on messages are copied to us (the policy began at the latest)
    us   has eu 100 … 110, no consumer has read one of them
    us   says "of eu everything before 100 is acked": eu skips a hundred messages that no consumer ever read

The same goes for a message in the midst that is not to be copied. So what is said of copies is read off the
copies themselves: those that are acked, and that the other side does not know of yet. That also is what it
costs: messages are looked at once after they were acked, however far behind the subscription is.

**How far to look** (``translate``). Each origin's messages are in their order, but for some that came late;
the topic knows roughly where those are. So the search ends where each origin has come by the last offset that
is acked of it, and begins where the first one may be: not before the subscription's cursor, below which all
is acked, and not before the places of earlier searches (``Places``), or a subscription with one message that
no consumer can process would cost more with each ack. Then it looks where late ones may be that are acked:

    here   offset   100     101     102     103   …   190
           origin   eu 93   eu 94   eu 96   eu 97     eu 95, late
    acked of eu: 94..96    looks from 100 to 102, and at 190
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sava.records import RecordBatch
from sava.storage.origin_marks import Numbers, numbers, runs
from sava.storage.source_positions import Origin, origins_of
from sava.storage.topic_log import TopicLog
from sava.topics.ranges import IntervalSet, Range, difference

FEW: Final = 256
"""Messages that are looked at in one go; more are looked at in a thread."""
AT_ONCE: Final = 200_000
"""Messages that one question looks at."""
GAP: Final = 4096
"""Ranges that are nearer than this are read as one."""
PLACE_EVERY: Final = 8192
MAX_PLACES: Final = 10_000


class OriginAcks(NamedTuple):
    """What is acked of the messages that were published to one topic of one cluster."""

    origin: Origin
    cursor: int
    """Everything below."""
    ranges: Sequence[Range]
    """And these beyond."""

    @classmethod
    def of(cls, origin: Origin, acked: IntervalSet) -> OriginAcks:
        ranges = list(acked)
        if ranges and not ranges[0][0]:
            return cls(origin, ranges[0][1], ranges[1:])
        return cls(origin, 0, ranges)


class _Part(NamedTuple):
    """The messages of one origin in a batch."""

    origin: Origin
    rows: Numbers | None
    """Which they are, ascending; None: all."""
    offsets: Numbers
    """At the origin."""


# -- here, of what is acked elsewhere --------------------------------------------------------------


class Places:
    """Where the messages of origins are, roughly, as far as was looked: offsets there, and offsets
    here at or before which everything below them is. Of one topic; always true, since a log only grows."""

    def __init__(self) -> None:
        self._known: dict[Origin, tuple[list[int], list[int]]] = {}
        self._count = 0

    def saw(self, origin: Origin, origin_offset: int, offset: int) -> None:
        """All messages of the origin from its offset on are at this one here or behind it."""
        there, here = self._known.setdefault(origin, ([], []))
        index = bisect_left(here, offset)
        is_near = (index and offset - here[index - 1] < PLACE_EVERY) or (
            index < len(here) and here[index] - offset < PLACE_EVERY
        )
        if is_near:
            return
        if self._count >= MAX_PLACES:
            self._known, self._count = {origin: ([], [])}, 0
            there, here = self._known[origin]
            index = 0
        there.insert(index, origin_offset)
        here.insert(index, offset)
        self._count += 1

    def before(self, origin: Origin, origin_offset: int) -> int:
        """An offset here before which nothing of the origin is from that offset there on."""
        there, here = self._known.get(origin, ((), ()))
        index = bisect_right(there, origin_offset)
        return here[index - 1] if index else 0


async def translate(
    log: TopicLog, cursor: int, own: Origin, acks: Iterable[OriginAcks], places: Places
) -> tuple[Range, ...]:
    """The offsets here, from the cursor on, of what is acked. ``own``: as others call this topic."""
    await log.sources.learned()
    acked = {each.origin: IntervalSet([(0, each.cursor), *each.ranges]) for each in acks}
    acked = {origin: ranges for origin, ranges in acked.items() if ranges}
    firsts = (
        ranges.first if origin == own else places.before(origin, ranges.first)
        for origin, ranges in acked.items()
    )
    start = max(cursor, log.start_offset, min(firsts, default=0))
    search = _Search(log, acked, own, places)
    if acked:
        looked = await search.look(start, log.next_offset)
        for first, end in search.late(looked):
            await search.look_again(first, end)
    return tuple(search.found)


class _Search:
    """For what is acked, in a topic."""

    def __init__(
        self, log: TopicLog, acked: Mapping[Origin, IntervalSet], own: Origin, places: Places
    ) -> None:
        self._log = log
        self._acked = acked
        self._own = own
        self._places = places
        self._awaited = {origin: ranges.end for origin, ranges in acked.items()}
        """Origins that have not come to their last acked offset yet, and where that is."""
        self.found = IntervalSet()

    async def look(self, start: int, end: int) -> int:
        """Until all origins have come to their last acked offset; where that was."""
        if start >= end:
            return start
        async with aclosing(self._log.read(start, end)) as batches:
            async for batch in batches:
                await self._look_at(batch)
                if not self._awaited:
                    return batch.next_offset
        return end

    def late(self, start: int) -> list[Range]:
        """Where there may be acked messages that are not in order, from the offset here on."""
        spots = IntervalSet()
        for origin, ranges in self._acked.items():
            for each in self._log.sources.positions.late(origin):
                if ranges.within(each.lowest, each.top):
                    spots.add(each.start, each.end)
        return spots.within(start, self._log.next_offset)

    async def look_again(self, start: int, end: int) -> None:
        async with aclosing(self._log.read(max(start, self._log.start_offset), end)) as batches:
            async for batch in batches:
                await self._look_at(batch)

    async def _look_at(self, batch: RecordBatch) -> None:
        if len(batch) > FEW:
            await asyncio.to_thread(self.take, batch)
        else:
            self.take(batch)

    def take(self, batch: RecordBatch) -> None:
        own, base = self._own, batch.base_offset
        for part in _parts(batch, own):
            if part.origin != own and self._is_in_order(part.origin, batch):
                self._places.saw(part.origin, int(part.offsets[0]), base)
            ranges = self._acked.get(part.origin)
            if ranges is None:
                continue
            lowest, end = int(part.offsets.min()), int(part.offsets.max()) + 1
            for first, last in _hits(part, ranges.within(lowest, end)):
                self.found.add(base + first, base + last)
            self._came(part.origin, end)
        self._came(own, batch.next_offset)

    def _came(self, origin: Origin, end: int) -> None:
        """A message before that offset is here: what is not late is in order behind it."""
        if self._awaited.get(origin, end + 1) <= end:
            del self._awaited[origin]

    def _is_in_order(self, origin: Origin, batch: RecordBatch) -> bool:
        late = self._log.sources.positions.late(origin)
        return not any(each.start < batch.next_offset and batch.base_offset < each.end for each in late)


def _hits(part: _Part, ranges: Sequence[Range]) -> list[Range]:
    """Runs of rows of the batch whose offsets at the origin are in one of the ranges."""
    if not ranges:
        return []
    bounds = np.array(ranges, np.int64).ravel()
    places = np.flatnonzero(np.searchsorted(bounds, part.offsets, "right") % 2)
    return _pairs(places if part.rows is None else part.rows[places])


# -- elsewhere, of what is acked here --------------------------------------------------------------


class Said(NamedTuple):
    acks: list[OriginAcks]
    covered: IntervalSet
    """The offsets here that this is about."""


async def by_origin(log: TopicLog, acked: IntervalSet, own: Origin, *, at_once: int = AT_ONCE) -> Said:
    """What is acked, as others understand it. ``covered`` is less than all if that is too much to look at;
    the rest is for another time."""
    await log.sources.learned()
    found: dict[Origin, IntervalSet] = {}
    covered = acked
    if acked and log.sources.positions.has_origins:  # otherwise there is nothing but its own
        end = await _collect(log, acked, found, at_once)
        covered = IntervalSet(acked.within(0, end))
    if covered:
        found[own] = covered
    return Said([OriginAcks.of(origin, ranges) for origin, ranges in found.items()], covered)


async def _collect(log: TopicLog, acked: IntervalSet, found: dict[Origin, IntervalSet], at_once: int) -> int:
    """Copies that are acked, by origin; where it stopped looking."""
    left = at_once
    for first, end in _spans(acked):
        start = max(first, log.start_offset)
        if start >= min(end, log.next_offset):
            continue
        async with aclosing(log.read(start, end)) as batches:
            async for batch in batches:
                if len(batch) > FEW:
                    await asyncio.to_thread(_take_down, batch, acked, found)
                else:
                    _take_down(batch, acked, found)
                left -= len(batch)
                if left <= 0 and batch.next_offset < acked.end:
                    return batch.next_offset
    return acked.end


def _spans(acked: IntervalSet) -> Iterator[Range]:
    """What is read in one go: whatever is between near ranges costs less than to begin again."""
    start = end = -1
    for first, last in acked:
        if end < 0 or first - end > GAP:
            if end >= 0:
                yield start, end
            start = first
        end = last
    if end >= 0:
        yield start, end


def _take_down(batch: RecordBatch, acked: IntervalSet, found: dict[Origin, IntervalSet]) -> None:
    base = batch.base_offset
    chosen = acked.within(base, batch.next_offset)
    for part in _parts(batch, None) if chosen else ():
        ranges = found.setdefault(part.origin, IntervalSet())
        bounds = np.array(chosen, np.int64) - base
        if part.rows is not None:
            bounds = np.searchsorted(part.rows, bounds)
        for start, end in bounds.tolist():
            for first, last in _pairs(part.offsets[start:end]):
                ranges.add(first, last)


# -- columns ---------------------------------------------------------------------------------------


def _parts(batch: RecordBatch, own: Origin | None) -> list[_Part]:
    """By origin. Without ``own``, only copies."""
    count, base = len(batch), batch.base_offset
    clusters = batch.to_arrow(("origin_cluster",)).column(0)
    if clusters.null_count == count:
        return [] if own is None else [_Part(own, None, np.arange(base, base + count))]
    parts = []
    if clusters.null_count and own is not None:
        rows = np.flatnonzero(numbers(clusters.is_null().cast(pa.int8())))
        parts.append(_Part(own, rows, rows + base))
    columns = origins_of(batch)
    origins = [origin for origin in columns.distinct() if origin[0] is not None and origin[1] is not None]
    if len(origins) == 1 and not clusters.null_count:
        return [_Part(origins[0], None, numbers(columns.offsets))]
    for cluster, topic in origins:
        mask = pc.and_(pc.equal(clusters, cluster), pc.equal(columns.topics, topic))
        mask = pc.fill_null(mask, False)
        rows = np.flatnonzero(numbers(mask.cast(pa.int8())))
        if len(rows):
            parts.append(_Part((cluster, topic), rows, numbers(columns.offsets.filter(mask))))
    return parts


def _pairs(each: Numbers) -> list[Range]:
    """Numbers as ranges of those that follow one another."""
    if not len(each):
        return []
    flat = runs(each).tolist()
    return list(zip(flat[::2], flat[1::2], strict=True))


def left_over(
    acks: Iterable[OriginAcks], own: Origin, arrived: Mapping[Origin, Sequence[Range]]
) -> list[OriginAcks]:
    """What of the acks is about messages that are not here yet. ``arrived``: of each origin, the offsets that
    are not waited for."""
    left = []
    for each in acks:
        acked = IntervalSet([(0, each.cursor), *each.ranges])
        rest = IntervalSet(difference(acked, arrived.get(each.origin, ())))
        if rest and each.origin != own:
            left.append(OriginAcks.of(each.origin, rest))
    return left
