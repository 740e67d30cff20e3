"""Tiered: one gapless stream over the three places where the messages of a topic are.

    offsets     start                    end of segments                       durable end
                  │ segments (Parquet) ─────┤
                          │ journal (frames not yet released) ────────────────────┤
                                                   │ cache (newest batches) ──────┤

The places overlap, and the borders move while a reader is under way. So the place is chosen again for each
range, by asking cache, journal and segments in this order, and each answers only for the offset it is asked
for. A range that was trimmed away between question and answer is simply asked for again, one place further
down: a range is registered as a segment before the journal lets go of it, so there is always one place that
has it. What no place has is ``DataGap``, never the next offset that happens to be there.

**BatchCache.** The batches that became durable last, of all topics of a broker, within one bound of bytes.
Consumers that keep up read here and touch no disk. One bound for all topics, because a bound per topic is
either too small for the busy ones or, times ten thousand topics, too large for the machine. What goes first
is what came first, over all topics: a consumer that keeps up needs the newest, and one that does not reads
the journal or the segments, which hold it as well. Nothing is put in by reading, so a consumer that reads
history does not push out what the others need.

Batches of a topic come in the order of their offsets and leave in it, so each topic's part is one gapless
range at its end, and a lookup is a binary search.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from operator import attrgetter
from typing import Final

import pyarrow.compute as pc

from sava.records import Compression, RecordBatch
from sava.storage.catalog import Catalog
from sava.storage.errors import DataGap, ObjectMissing, OffsetOutOfRange
from sava.storage.journal import Journal
from sava.storage.journal_index import FrameDamaged
from sava.storage.segment import SegmentReader
from sava.storage.types import Segment, TopicKey

_READ_BYTES: Final = 1 << 20
"""Read from the journal at once: enough to be worth a change of thread, little enough to be held by each of
many readers."""


# -- the newest batches ----------------------------------------------------------------------------


_OBJECT_BYTES: Final = 512
"""What a batch costs besides its bytes: a cache full of single small messages must keep its bound, too."""


class BatchCache:
    """Owned by the event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._order: deque[RecentBatches] = deque()
        """Whose turn it is to lose its oldest batch: one entry for each batch, in order of arrival."""
        self._stale = 0
        """Entries of parts that were dropped. They hold no bytes, so nothing would ever push them out of a
        cache that is not full: of a broker whose topics come and go they are cleared away."""

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def recent(self) -> RecentBatches:
        """A topic's part of the cache."""
        return RecentBatches(self)

    def added(self, part: RecentBatches, size: int) -> None:
        self._order.append(part)
        self._held_bytes += size
        while self._held_bytes > self._max_bytes:
            oldest = self._order.popleft()
            self._stale -= oldest.is_dropped
            self._held_bytes -= oldest.drop_oldest()

    def dropped(self, batches: int, size: int) -> None:
        """A part has gone, and had so much."""
        self._held_bytes -= size
        self._stale += batches
        if 2 * self._stale > len(self._order):
            self._order = deque(part for part in self._order if not part.is_dropped)
            self._stale = 0


class RecentBatches:
    """One topic's newest batches. Owned by the event loop."""

    __slots__ = ("_bases", "_batches", "_cache", "_end", "_first", "_sizes", "is_dropped")

    def __init__(self, cache: BatchCache) -> None:
        self._cache = cache
        self._bases: list[int] = []
        self._batches: list[RecordBatch | None] = []
        self._sizes: list[int] = []
        self._first = 0
        """Index of the oldest batch still held. Those before it are cut off from time to time: removing the
        head of a list one by one would move all the others each time."""
        self._end = -1
        self.is_dropped = False

    def put(self, batch: RecordBatch) -> None:
        """The next batch of the topic."""
        header = batch.header
        base_offset = header.base_offset
        if self._bases and base_offset != self._end:
            raise DataGap(f"offset {base_offset} follows {self._end} in the cache")
        # A compressed batch keeps its columns once a reader has looked at them.
        columns = 0 if header.codec is Compression.NONE else header.body_size
        size = header.length + columns + _OBJECT_BYTES
        self._bases.append(base_offset)
        self._batches.append(batch)
        self._sizes.append(size)
        self._end = header.next_offset
        self._cache.added(self, size)

    def get(self, offset: int) -> RecordBatch | None:
        """The batch that holds the offset, or None."""
        if offset >= self._end:
            return None
        index = bisect_right(self._bases, offset, self._first) - 1
        return self._batches[index] if index >= self._first else None

    def drop_oldest(self) -> int:
        """Let go of the oldest batch; its size."""
        if self.is_dropped:
            return 0
        index = self._first
        self._batches[index] = None
        self._first += 1
        size = self._sizes[index]
        if self._first * 2 > len(self._bases):
            del self._bases[: self._first], self._batches[: self._first], self._sizes[: self._first]
            self._first = 0
        return size

    def drop(self) -> None:
        """The topic is closed."""
        if not self.is_dropped:
            self.is_dropped = True
            sizes = self._sizes[self._first :]
            self._cache.dropped(len(sizes), sum(sizes))
            self._bases, self._batches, self._sizes = [], [], []
            self._first, self._end = 0, -1


# -- segments --------------------------------------------------------------------------------------


class KnownSegments:
    """The descriptors of a topic as its owner knows them. The owner is the one who adds to them, so they are
    read from the catalog once, when first needed; what retention has removed since, or what was merged, is
    found out by asking again."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._segments: list[Segment] | None = None

    def registered(self, segment: Segment) -> None:
        if self._segments is not None:
            self._segments.append(segment)

    def merged(self, parts: Sequence[Segment], merged: Segment) -> None:
        if self._segments is None:
            return
        index = bisect_right(self._segments, merged.start, key=_start) - 1
        if self._segments[index : index + len(parts)] == list(parts):
            self._segments[index : index + len(parts)] = [merged]
        else:
            self.forget()

    def forget(self) -> None:
        """They may have changed: ask the catalog next time."""
        self._segments = None

    async def all(self) -> list[Segment]:
        if self._segments is None:
            self._segments = await self._catalog.segments()
        return self._segments

    async def again(self) -> list[Segment]:
        self.forget()
        return await self.all()

    async def find(self, offset: int) -> Segment | None:
        """The segment that holds the offset. When it is not among those known, the catalog is asked once
        more: one may have been registered while the first answer was under way."""
        return _holding(await self.all(), offset) or _holding(await self.again(), offset)


_start: Final = attrgetter("start")


def _holding(segments: list[Segment], offset: int) -> Segment | None:
    index = bisect_right(segments, offset, key=_start) - 1
    return segments[index] if index >= 0 and offset < segments[index].end else None


# -- all three -------------------------------------------------------------------------------------


class TieredReader:
    """Reads one topic from its three tiers. Owned by the event loop; holds nothing between calls."""

    def __init__(
        self,
        topic: TopicKey,
        *,
        recent: RecentBatches,
        journal: Journal,
        segments: KnownSegments,
        reader: SegmentReader,
    ) -> None:
        self._topic = topic
        self._recent = recent
        self._journal = journal
        self._segments = segments
        self._reader = reader

    async def stream(self, start: int, end: int) -> AsyncGenerator[RecordBatch, None]:
        """Batches that cover exactly ``start .. end``, all of which must exist."""
        position = start
        while position < end:
            recent = self._recent.get(position)
            if recent is not None:
                yield _cut(recent, position, end)
                position = recent.next_offset
                continue
            batches = await self._held(position, _READ_BYTES)
            for batch in batches:
                if position < end:
                    yield _cut(batch, position, end)
                    position = batch.next_offset
            if not batches:
                async with aclosing(self._stored(position, end)) as stored:
                    async for batch in stored:
                        yield _cut(batch, position, end)
                        position = batch.next_offset

    def recent(self, start: int, end: int, max_bytes: int) -> list[RecordBatch]:
        """Of ``start .. end`` what the cache has from the start on, as many batches as ``max_bytes`` hold."""
        batches: list[RecordBatch] = []
        position, left = start, max_bytes
        while position < end and (batch := self._recent.get(position)) is not None:
            left -= batch.header.length
            if left < 0:
                break
            batches.append(_cut(batch, position, end))
            position = batch.next_offset
        return batches

    async def _held(self, position: int, max_bytes: int) -> list[RecordBatch]:
        """From the journal."""
        try:
            return await self._journal.read(self._topic.topic_id, position, max_bytes)
        except FrameDamaged as error:
            raise error.of(self._topic.path) from error

    async def _stored(self, position: int, end: int) -> AsyncGenerator[RecordBatch, None]:
        """From the segment that holds the position, to its end."""
        segment = await self._segments.find(position)
        if segment is None:
            raise await self._missing(position, "in no segment and not in the journal")
        # Closed with its reader, or what it fetches ahead would continue without a reader.
        batches = self._reader.read(segment, position, end)
        try:
            async with aclosing(batches):
                async for batch in batches:
                    position = batch.next_offset
                    yield batch
        except ObjectMissing as missing:
            if not await self._is_merged(segment):
                raise await self._missing(position, str(missing)) from missing

    async def _is_merged(self, segment: Segment) -> bool:
        """Whether another segment has what this one had: the reader continues there."""
        found = _holding(await self._segments.again(), segment.end - 1)
        return found is not None and found.key != segment.key

    async def _missing(self, offset: int, detail: str) -> OffsetOutOfRange | DataGap:
        """Retention removes descriptors before objects: what no descriptor names was released, and what one
        names and is not there is lost."""
        segments = await self._segments.again()
        if segments and offset < segments[0].start:
            return OffsetOutOfRange(offset, segments[0].start, segments[-1].end)
        return DataGap(f"topic {self._topic.path}: offset {offset} is missing: {detail}")

    async def offset_at(self, publish_time: int, end: int) -> int:
        """The first offset whose publish time is not before this; ``end`` if there is none."""
        segments = await self._segments.all()
        for segment in segments:
            if segment.max_publish_time >= publish_time:
                try:
                    found = await self._reader.offset_at(segment, publish_time)
                except ObjectMissing as missing:
                    if segment in await self._segments.again():
                        raise await self._missing(segment.start, str(missing)) from missing
                    return await self.offset_at(publish_time, end)
                if found is not None:
                    return found
        stored_end = segments[-1].end if segments else 0
        base = next(
            self._journal.holdings.index(self._topic.topic_id).not_before(publish_time, stored_end), None
        )
        if base is None:
            return end
        batches = await self._held(base, 1)
        if not batches:  # released meanwhile: it is in a segment now
            await self._segments.again()
            return await self.offset_at(publish_time, end)
        return base + _index_at(batches[0], publish_time)


def _cut(batch: RecordBatch, position: int, end: int) -> RecordBatch:
    """The part of the batch that the stream continues with."""
    if not batch.base_offset <= position < batch.next_offset:
        raise DataGap(f"offset {position} was asked for, and {batch} came")
    if batch.base_offset == position and batch.next_offset <= end:
        return batch
    return batch.slice(position, end)


def _index_at(batch: RecordBatch, publish_time: int) -> int:
    times = batch.to_arrow(("publish_time",)).column(0).cast("int64")
    index: int = pc.index(pc.greater_equal(times, publish_time), True).as_py()
    return index
