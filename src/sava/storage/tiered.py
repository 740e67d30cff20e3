"""Tiered: one gapless stream over the three places where the messages of a topic are.

    offsets     start                    end of segments                       durable end
                  │ segments (Parquet) ─────┤
                          │ journal (frames not yet released) ────────────────────┤
                                                   │ cache (newest batches) ──────┤

The places overlap, and the borders move while a reader is under way. So the place is chosen again for each
stretch, by asking cache, journal and segments in this order, and each answers only for the offset it is asked
for. A stretch that was trimmed away between question and answer is simply asked for again, one place further
down: a range is registered as a segment before the journal lets go of it, so there is always one place that
has it. What no place has is ``DataGap``, never the next offset that happens to be there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from operator import attrgetter
from typing import Final

import pyarrow.compute as pc

from sava.records import RecordBatch
from sava.storage.cache import RecentBatches
from sava.storage.catalog import Catalog
from sava.storage.errors import DataGap, ObjectMissing, OffsetOutOfRange
from sava.storage.journal import Journal
from sava.storage.journal_index import FrameDamaged
from sava.storage.segment import SegmentReader
from sava.storage.types import Segment, TopicKey

_STRETCH_BYTES: Final = 1 << 20
"""Read from the journal at once: enough to be worth a change of thread, little enough to be held by each of
many readers."""


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


class TieredReader:
    """Of one topic; owned by the event loop. Holds nothing between calls."""

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
            batches = await self._held(position, _STRETCH_BYTES)
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
        # Closed with its reader, or it would continue to fetch ahead without a reader.
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
        """Retention removes descriptors before objects: what no descriptor names was let go, and what one
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
        base = next(self._journal.index(self._topic.topic_id).not_before(publish_time, stored_end), None)
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
