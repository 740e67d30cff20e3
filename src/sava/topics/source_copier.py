"""SourceCopier: one source, a partition of a topic of another cluster, that is copied into a topic here.

Any number of brokers may copy the same source into the same topic at once: the topic takes only one of two
records that begin at the same source position (``storage.source_positions``), and the other copier learns
what the position is. So a copier holds nothing that would have to be handed on, and needs no lease.

Ranges of the source follow one another without waiting: the next one is taken while those before it are on
their way to the disk. When one is refused, the ones behind it do not follow any more, and are refused as
well.

What the topic asks of producers it asks of a copier, too: limits, schema, rate, and to hold while it moves.

**Cutting** (``CheckedRange``, pure). A range is checked, and cut into records that move the source position:

    range      40..70 of the source, messages 41 42 45 … 66, in one or several batches
    left out   those that have been in this cluster already, and those that came another way before
    record     40..70 with what is left, in one frame; if no batch can hold it all, several:
               40..58 with the messages up to 57, then 58..70 with the rest

Each record ends behind its last message, so wherever the row of them breaks off, the source position is true.

A source's own messages are all in its ranges, so a record stands for all its offsets: they were seen, and
what is left out of them is not for this cluster. Of other origins, what is appended was seen, and nothing
else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sava.records import BatchTooLarge, RecordBatch
from sava.storage.errors import Fenced
from sava.storage.origin_marks import Numbers, SeenOffsets, is_in_order, numbers, span
from sava.storage.source_positions import (
    ORIGIN_TOPIC,
    PATH,
    SOURCE_BIT,
    Marks,
    MarksChanged,
    Origin,
    OriginForgotten,
    Origins,
    Range,
    SourceAppend,
    SourcePositionMismatch,
    SourceProgress,
    origin_topic,
    origins_of,
    source_id,
)
from sava.storage.topic_log import TopicLog
from sava.topics.errors import MessageInvalid, TopicMoved
from sava.topics.publishing import Publisher

SMALL: Final = 64 << 10
"""Bytes of a range that is read at once; a larger one is read in a thread."""


class Copied(NamedTuple):
    """What became of a range, when it is durable."""

    position: int
    kept: int
    """See ``SourceProgress``."""
    appended: int
    duplicates: int
    """Left out: they had come another way before."""
    loops: int
    """Left out: they have been in this cluster."""


class CopyCounts:
    """Counts of messages since the topic was loaded."""

    def __init__(self) -> None:
        self.appended = self.duplicates = self.loops = self.refused = 0


class SourceCopier:
    """Owned by the event loop. Made by ``Topic.open_source``."""

    def __init__(
        self,
        source: Source,
        publisher: Publisher,
        log: TopicLog,
        copies: CopyCounts,
        *,
        cluster: str,
        check: Callable[[], None],
    ) -> None:
        """``check`` raises if another producer has the topic alone."""
        self.source = source
        self._publisher = publisher
        self._log = log
        self._copies = copies
        self._cluster = cluster
        self._check = check

    @property
    def topic_id(self) -> int:
        return self._log.topic.topic_id

    @property
    def max_message_size(self) -> int:
        return self._publisher.max_message_size

    async def progress(self) -> SourceProgress:
        """Durable; when what is on its way now, from any copier, has come to its end."""
        return await self._log.sources.progress(self.source.key)

    async def begin(self, given: SourceRange) -> asyncio.Future[Copied]:
        """Take the range, after which its place in the topic is fixed; to be called for one after another.
        The future is done when it is durable, and fails with what becomes known later.

        Raises SourcePositionMismatch; MessageInvalid, BatchCorrupt, MessageTooLarge, SchemaRefused;
        LimitReached, DecodeBusy, TopicMoved, TopicClosed, DiskFull. What was taken before the error
        stays."""
        async with self._publisher.decoding(given.batches):
            return await self._begin(given)

    async def _begin(self, given: SourceRange) -> asyncio.Future[Copied]:
        size = sum(batch.header.body_size for batch in given.batches)
        read = partial(CheckedRange, self.source, given, self._cluster)
        pieces = await asyncio.to_thread(read) if size > SMALL else read()
        for batch in given.batches:
            await self._publisher.measure(batch)
        start, appended = given.start, 0
        future: asyncio.Future[int] | None = None
        while future is None or start < given.end:
            cut = partial(pieces.cut, start, self._log.sources.positions.marks(pieces.origins))
            records = await asyncio.to_thread(cut) if size > SMALL else cut()
            try:
                for record in records:
                    enter = partial(self._log.extend, record)
                    future = await self._publisher.begin(
                        record.batch, self._check, enter=enter, is_measured=True
                    )
                    start = record.end
                    appended += len(record.batch) if record.batch is not None else 0
            except SourcePositionMismatch:
                self._copies.refused += 1
                raise
            except MarksChanged:
                pass  # what is left of it is cut again
        outcome: asyncio.Future[Copied] = asyncio.get_running_loop().create_future()
        duplicates = pieces.count - appended - pieces.loops
        future.add_done_callback(
            partial(self._settled, outcome, given.end, appended, duplicates, pieces.loops)
        )
        return outcome

    def _settled(
        self,
        outcome: asyncio.Future[Copied],
        end: int,
        appended: int,
        duplicates: int,
        loops: int,
        future: asyncio.Future[int],
    ) -> None:
        """The last record of a range is durable, and so are those before it; or it failed."""
        failure = future.exception()
        if outcome.done():
            return
        if failure is not None:
            lost = isinstance(failure, Fenced)
            outcome.set_exception(TopicMoved(self._publisher.topic) if lost else failure)
            outcome.exception()  # seen: its caller may be gone
            return
        copies = self._copies
        copies.appended += appended
        copies.duplicates += duplicates
        copies.loops += loops
        kept = self._log.sources.positions.settled(self.source.key).kept
        outcome.set_result(Copied(end, kept, appended, duplicates, loops))


OFFSETS_END: Final = 1 << 62
"""Positions are the sequences of frames, of which there are not many more."""


class Source(NamedTuple):
    """One partition of one topic of another cluster, for its life: a topic that was created again has another
    id."""

    cluster: str
    cluster_id: str
    topic: str
    topic_id: int

    @property
    def key(self) -> int:
        """The same for every broker that copies it, and under whatever name."""
        return SOURCE_BIT | source_id(self.cluster_id, self.topic_id)

    @property
    def origin(self) -> Origin:
        """Of the messages that were published to it."""
        return self.cluster, origin_topic(self.cluster_id, self.topic_id)

    def __str__(self) -> str:
        return f"{self.topic} of cluster {self.cluster}"


class SourceRange(NamedTuple):
    """A range of offsets of a source, as it came."""

    start: int
    end: int
    begin: bool
    batches: Sequence[RecordBatch]
    offsets: Sequence[int]
    """start, end, start, end, … of the source's offsets of the messages."""


class _Rows(NamedTuple):
    """Messages of one origin in a batch that have not been in this cluster."""

    places: Any
    """Which they are."""
    offsets: Numbers
    """At the origin."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """A batch, and what is said of its messages."""

    batch: RecordBatch
    offsets: Any
    """At the source."""
    rows: Mapping[Origin, _Rows]
    loops: int
    """Messages that have been in this cluster."""


class _Kept(NamedTuple):
    """What is left of a batch."""

    batch: RecordBatch
    end: int
    """At the source, behind its last message."""
    seen: Marks
    """With it and what is before it, but for what the source's own offsets cover."""
    late: Mapping[Origin, Range]


class CheckedRange:
    """A range that was read: checked, and ready to be cut as often as marks change."""

    def __init__(self, source: Source, given: SourceRange, cluster: str) -> None:
        """``cluster``: this one. Raises MessageInvalid, BatchCorrupt."""
        self._source = source
        self._given = given
        self.count = sum(len(batch) for batch in given.batches)
        offsets = _expanded(given, self.count)
        self._pieces: list[_Piece] = []
        first = 0
        for batch in given.batches:
            part = offsets.slice(first, len(batch))
            self._pieces.append(_piece(source, batch.verify(), part, cluster))
            first += len(batch)
        self.loops = sum(piece.loops for piece in self._pieces)
        """Messages that have been in this cluster."""

    @property
    def origins(self) -> set[Origin]:
        """Whose marks a cut needs."""
        return {self._source.origin, *(origin for piece in self._pieces for origin in piece.rows)}

    def cut(self, start: int, marks: Marks) -> list[SourceAppend]:
        """What the range is from a position in it on, for a topic that has these marks of all origins.
        Raises OriginForgotten."""
        given = self._given
        running = dict(marks)
        kept: list[_Kept] = []
        for piece in self._pieces:
            late: dict[Origin, Range] = {}
            places = self._chosen(piece, start, running, late)
            if places is None:
                end = piece.offsets[len(piece.batch) - 1].as_py() + 1
                kept.append(_Kept(piece.batch, end, dict(running), late))
            elif len(places):
                end = piece.offsets[places[-1].as_py()].as_py() + 1
                kept.append(_Kept(piece.batch.select(places), end, dict(running), late))
        if kept:
            return list(self._records(start, start, given.end, marks, kept))
        begin = given.begin and start == given.start
        after = self._covered(marks, start, given.end)
        return [SourceAppend(self._source.key, start, given.end, begin, None, marks, after)]

    def _records(
        self, first: int, start: int, end: int, before: Marks, kept: Sequence[_Kept]
    ) -> Iterator[SourceAppend]:
        """``first``: where the cut begins."""
        source_key = self._source.key
        count = sum(len(each.batch) for each in kept)
        try:
            frame = RecordBatch.joined(
                [each.batch for each in kept], producer_id=source_key, base_sequence=end - count
            )
        except BatchTooLarge:
            if len(kept) == 1:
                raise
            middle = len(kept) // 2
            between = kept[middle - 1].end
            marks = {**before, **self._covered(kept[middle - 1].seen, first, between)}
            yield from self._records(first, start, between, before, kept[:middle])
            yield from self._records(first, between, end, marks, kept[middle:])
            return
        begin = self._given.begin and start == self._given.start
        after = self._covered(kept[-1].seen, first, end)
        yield SourceAppend(
            source_key, start, end, begin, frame, before, after, _hulls(each.late for each in kept)
        )

    def _covered(self, marks: Marks, start: int, end: int) -> dict[Origin, SeenOffsets]:
        """What was seen, with all offsets of the source between. If none of its own messages was ever here,
        there is nothing to tell apart."""
        seen = {origin: each for origin, each in marks.items() if each}
        own = self._source.origin
        if own in seen or marks[own].by:
            seen[own] = marks[own].covered(start, end)
        return seen

    def _chosen(
        self, piece: _Piece, start: int, marks: dict[Origin, SeenOffsets], late: dict[Origin, Range]
    ) -> Any:
        """The places of messages from the offset on that are new by the marks, which move on with them. None:
        all of the piece."""
        first = _below(piece.offsets, start)
        chosen = []
        for origin, (all_places, all_offsets) in piece.rows.items():
            places, offsets = all_places, all_offsets
            if first:
                is_left = numbers(places) >= first
                places, offsets = places.filter(pa.array(is_left)), offsets[is_left]
            if len(offsets):
                places, offsets = self._new(origin, places, offsets, marks[origin])
            if not len(offsets):
                continue
            chosen.append(places)
            lowest, top = span(offsets)
            if not is_in_order(marks[origin], offsets):
                late[origin] = lowest, top
            if origin == self._source.origin:  # where they are is covered with the record
                marks[origin] = marks[origin].credited(self._source.key, top)
            else:
                marks[origin] = marks[origin].added(offsets, self._source.key)
        if sum(map(len, chosen)) == len(piece.offsets):
            return None
        together = pa.concat_arrays(chosen) if chosen else pa.array([], pa.int64())
        return together.sort() if len(chosen) > 1 else together

    def _new(self, origin: Origin, places: Any, offsets: Numbers, seen: SeenOffsets) -> tuple[Any, Numbers]:
        if seen.is_beyond(offsets):
            return places, offsets
        unknown = seen.unknown(offsets, self._source.key)
        if unknown is not None:
            raise OriginForgotten(str(self._source), origin, unknown, seen.vague)
        is_new = seen.new(offsets)
        return places.filter(pa.array(is_new)), offsets[is_new]


def _hulls(spans: Iterable[Mapping[Origin, Range]]) -> dict[Origin, Range]:
    hulls: dict[Origin, Range] = {}
    for each in spans:
        for origin, (start, end) in each.items():
            known = hulls.get(origin, (start, end))
            hulls[origin] = min(start, known[0]), max(end, known[1])
    return hulls


def _expanded(given: SourceRange, count: int) -> Any:
    """The offset of each message, ascending and within the range. Raises MessageInvalid."""
    flat = given.offsets
    bounds = (given.start, *flat, given.end)
    in_order = all(start <= end for start, end in pairwise(bounds))
    if given.start >= given.end or given.end >= OFFSETS_END or len(flat) % 2 or not in_order:
        raise MessageInvalid(
            f"range {given.start}..{given.end}: its offsets are not ranges within it, in order"
        )
    named = sum(flat[1::2]) - sum(flat[::2])
    if named != count:  # before they are written out: a range may say anything
        raise MessageInvalid(f"range {given.start}..{given.end}: it has {named} offsets and {count} messages")
    parts = [pa.arange(start, end) for start, end in zip(flat[::2], flat[1::2], strict=True)]
    return pa.concat_arrays(parts) if parts else pa.array([], pa.int64())


def _piece(source: Source, batch: RecordBatch, offsets: Any, cluster: str) -> _Piece:
    found = origins_of(batch)
    for column, what in ((found.clusters, "origin"), (found.topics, ORIGIN_TOPIC), (found.paths, PATH)):
        if column.null_count:
            raise MessageInvalid(f"{source}: {column.null_count} messages come without {what}")
    origins, is_fresh = found.distinct(), None
    looped = [path for path in pc.unique(found.paths).to_pylist() if cluster in path.split(",")]
    if looped:
        is_fresh = pc.invert(pc.is_in(found.paths, pa.array(looped, pa.utf8())))
    rows = {origin: _rows_of(origin, found, is_fresh, len(origins) == 1) for origin in origins}
    own = rows.get(source.origin)
    if own is not None and not np.array_equal(own.offsets, numbers(offsets)[numbers(own.places)]):
        raise MessageInvalid(f"{source}: messages of its own say that they have other offsets there")
    loops = len(batch) - sum(len(each.offsets) for each in rows.values())
    return _Piece(batch, offsets, {origin: each for origin, each in rows.items() if len(each.offsets)}, loops)


def _rows_of(origin: Origin, found: Origins, is_fresh: Any, is_only: bool) -> _Rows:
    if is_only and is_fresh is None:
        return _Rows(pa.arange(0, len(found.offsets)), numbers(found.offsets))
    mask = is_fresh
    if not is_only:
        is_of = pc.and_(pc.equal(found.clusters, origin[0]), pc.equal(found.topics, origin[1]))
        mask = is_of if is_fresh is None else pc.and_(is_of, is_fresh)
    return _Rows(pc.indices_nonzero(mask).cast(pa.int64()), numbers(found.offsets.filter(mask)))


def _below(offsets: Any, start: int) -> int:
    """How many of ascending offsets are below."""
    if not len(offsets) or offsets[0].as_py() >= start:
        return 0
    return int(pc.sum(pc.less(offsets, start)).as_py())
