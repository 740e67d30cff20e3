"""Reading: what a task does with its pieces.

A task reads every piece to its end or fails. When a segment was deleted after planning, the task reads the
rest from the partition's owner; what the owner does not have either is lost, and only the user can accept
that.

Executors read segments straight from the object store. They fetch only row groups with wanted offsets, and of
these only wanted columns that hold values: the footer tells, after a check against its descriptor. Offsets
are not read, since those of a row group have no gaps. A file in a directory is memory-mapped. From any other
store the byte ranges of several row groups are fetched together, and two such windows are in flight while the
rows of a third are used.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import lru_cache
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from sava.pipeline.cluster import ClusterAccess, ClusterClient, Objects, OffsetGone
from sava.pipeline.errors import DELETED, DataLost, TopicReplaced
from sava.pipeline.options import TopicPartition
from sava.pipeline.source.columns import VALUE, Bounds, Choice, in_time
from sava.pipeline.source.planning import Piece, ReadTask
from sava.records import RecordBatch
from sava.records.columns import COLUMNS, nulls
from sava.storage import segment_file
from sava.storage.errors import DataGap, ObjectMissing, ObjectTruncated, SegmentCorrupt
from sava.storage.segment_file import Footer, PartialFile, RowGroup, row_groups
from sava.storage.types import Segment

if TYPE_CHECKING:
    from sava.pipeline.source.decoding import Decoder

log = logging.getLogger(__name__)

WINDOW_BYTES: Final = 4 << 20
WINDOWS_AHEAD: Final = 2


class Rows(NamedTuple):
    """Consecutive messages. ``columns`` has the wanted columns that hold values."""

    start: int
    end: int
    columns: dict[str, Any]

    def slice(self, start: int, end: int) -> Rows:
        if start <= self.start and end >= self.end:
            return self
        start, end = max(start, self.start), min(end, self.end)
        skip, count = start - self.start, end - start
        return Rows(start, end, {name: array.slice(skip, count) for name, array in self.columns.items()})


def read_segment(
    source: MappedFile | StoredObject,
    segment: Segment,
    start: int,
    end: int,
    columns: Sequence[str],
    times: Bounds | None,
) -> Iterator[Rows]:
    """The messages ``start .. end`` without row groups that hold nothing within ``times``. Raises
    ObjectMissing when the object was deleted, SegmentCorrupt, ObjectStoreUnavailable."""
    footer = segment_file.parse_footer(segment, source.footer())
    groups = [group for group in footer.covering(start, end) if times is None or _overlaps(group, times)]
    for file, window in source.files(footer, groups, columns):
        for group in window:
            wanted = [name for name in columns if name in group.columns]
            arrays = segment_file.read_columns(segment, file, group, wanted).columns if wanted else []
            yield Rows(group.start, group.end, dict(zip(wanted, arrays, strict=True))).slice(start, end)


def _overlaps(group: RowGroup, times: Bounds) -> bool:
    return group.max_publish_time >= times.start and group.min_publish_time < times.end


def open_source(store_url: str, segment: Segment) -> MappedFile | StoredObject:
    """Raises ObjectMissing, SegmentCorrupt."""
    if not 0 < segment.footer_size <= segment.size:
        raise SegmentCorrupt(f"{segment.key}: a footer of {segment.footer_size} bytes in {segment.size}")
    parts = urlsplit(store_url)
    if parts.scheme == "file":
        return MappedFile(Path(unquote(parts.path)) / segment.key, segment)
    return StoredObject(Objects.of(store_url), segment)


class MappedFile:
    """A segment in a local directory, memory-mapped."""

    def __init__(self, path: Path, segment: Segment) -> None:
        self._segment = segment
        try:
            self._file = pa.memory_map(str(path))
        except FileNotFoundError:
            raise ObjectMissing(segment.key) from None
        if self._file.size() != segment.size:
            raise SegmentCorrupt(f"{segment.key} has {self._file.size()} bytes instead of {segment.size}")

    def footer(self) -> bytes:
        size = self._segment.footer_size
        data: bytes = self._file.read_at(size, self._segment.size - size)
        return data

    def files(
        self, footer: Footer, groups: Sequence[RowGroup], columns: Sequence[str]
    ) -> Iterator[tuple[Any, Any]]:
        """Parquet files, each with the row groups that can be read from it; together all groups, in order."""
        yield _parquet(self._file, footer), groups


class StoredObject:
    """A segment in an object store, fetched by byte ranges."""

    def __init__(self, objects: Objects, segment: Segment) -> None:
        self._objects = objects
        self._segment = segment

    def footer(self) -> bytes:
        size = self._segment.size
        try:
            return self._objects.get_range(self._segment.key, size - self._segment.footer_size, size)
        except ObjectTruncated as error:
            raise SegmentCorrupt(f"{self._segment.key} has {error.size} bytes instead of {size}") from error

    def files(
        self, footer: Footer, groups: Sequence[RowGroup], columns: Sequence[str]
    ) -> Iterator[tuple[Any, Any]]:
        """As those of a mapped file."""
        windows = _windows(footer, groups, columns)
        ahead: deque[tuple[_Window, Future[list[bytes]] | None]] = deque()
        try:
            while True:
                for window in islice(windows, WINDOWS_AHEAD + 1 - len(ahead)):
                    fetched = (
                        self._objects.start_ranges(self._segment.key, window.ranges)
                        if window.ranges
                        else None
                    )
                    ahead.append((window, fetched))
                if not ahead:
                    return
                window, fetched = ahead[0]
                parts = fetched.result() if fetched is not None else []
                file = pa.PythonFile(_Ranges(self._segment.size, window.ranges, parts), mode="r")
                yield _parquet(file, footer), window.groups
                ahead.popleft()
        finally:
            for _, fetched in ahead:
                if fetched is not None:
                    fetched.cancel()


class _Window(NamedTuple):
    groups: list[RowGroup]
    ranges: list[tuple[int, int]]


def _windows(footer: Footer, groups: Sequence[RowGroup], columns: Sequence[str]) -> Iterator[_Window]:
    """Groups of row groups to fetch together. The first has one, so that its rows come soon."""
    window, size = _Window([], []), 0
    for index, group in enumerate(groups):
        window.groups.append(group)
        for start, end in _column_ranges(footer, group, columns):
            size += end - start
            if window.ranges and window.ranges[-1][1] == start:
                window.ranges[-1] = (window.ranges[-1][0], end)
            else:
                window.ranges.append((start, end))
        if size >= WINDOW_BYTES or index == 0:
            yield window
            window, size = _Window([], []), 0
    if window.groups:
        yield window


def _column_ranges(footer: Footer, group: RowGroup, columns: Sequence[str]) -> Iterator[tuple[int, int]]:
    wanted = {name for name in columns if name in group.columns}
    described = footer.metadata.row_group(group.number)
    for index in range(described.num_columns):
        column = described.column(index)
        if column.path_in_schema.partition(".")[0] in wanted:
            first = column.dictionary_page_offset or column.data_page_offset
            yield first, first + column.total_compressed_size


class _Ranges(PartialFile):
    """A file of which only some ranges are present."""

    def __init__(self, size: int, ranges: Sequence[tuple[int, int]], parts: Sequence[bytes]) -> None:
        super().__init__(size)
        self._starts = [start for start, _ in ranges]
        self._parts = [memoryview(part) for part in parts]

    def read(self, length: int) -> memoryview:
        index = max(bisect_right(self._starts, self._at) - 1, 0)
        skip = self._at - self._starts[index]
        self._at += length
        return self._parts[index][skip : skip + length]


def _parquet(file: Any, footer: Footer) -> Any:
    return pq.ParquetFile(file, metadata=footer.metadata, page_checksum_verification=True, pre_buffer=False)


LARGE: Final = 512
"""Smaller batches are joined: Spark has a cost per batch."""
JOINED: Final = 1 << 20
"""The size of a joined batch."""
_COMMON_ROWS: Final = 1 << 14
_SPECS: Final = {spec.name: spec for spec in COLUMNS}


class TaskReader:
    """Reads the pieces of a task. It is pickled to executors and holds only values."""

    def __init__(
        self,
        access: ClusterAccess,
        choice: Choice,
        *,
        fail_on_data_loss: bool,
        decoder: Decoder | None = None,
        times: Bounds | None = None,
    ) -> None:
        self._access = access
        self._choice = choice
        self._fail_on_data_loss = fail_on_data_loss
        self._decoder = decoder
        self._times = times

    def read(self, share: ReadTask) -> Iterator[Any]:
        """Record batches with the columns of the query."""
        for piece in share.pieces:
            batches = (self._batch(piece.part, rows) for rows in self._rows(share, piece))
            yield from batches if self._times is None else in_time(batches, self._times)

    def _rows(self, share: ReadTask, piece: Piece) -> Iterator[Rows]:
        while piece.start < piece.end:
            try:
                for rows in rows_of(self._access, share.store_url, piece, self._choice.stored, self._times):
                    yield rows
                    piece = piece._replace(start=rows.end)
                return
            except OffsetGone as gone:
                start, lost = piece.start, min(gone.first, piece.end)
                if self._fail_on_data_loss:
                    raise DataLost(piece.part, start, lost, DELETED) from None
                log.warning("source: %s: offsets %s to %s are skipped: %s", piece.part, start, lost, DELETED)
                piece = piece._replace(start=lost, segment=None)

    def _batch(self, part: TopicPartition, rows: Rows) -> Any:
        count = rows.end - rows.start
        arrays = [self._column(name, part, rows, count) for name in self._choice.names]
        return pa.RecordBatch.from_arrays(arrays, schema=self._choice.arrow)

    def _column(self, name: str, part: TopicPartition, rows: Rows, count: int) -> Any:
        if name == "offset":
            return pa.arange(rows.start, rows.end)
        if name == "topic":
            return _constant(part.topic, pa.string(), count)
        if name == "partition":
            return _constant(part.number, pa.int32(), count)
        if name == VALUE:
            assert self._decoder is not None
            columns = rows.columns
            return self._decoder.decode(
                columns["payload"], columns.get("schema_id"), columns.get("schema_version")
            )
        array = rows.columns.get(name)
        return nulls(_SPECS[name], count) if array is None else array


def rows_of(
    access: ClusterAccess,
    store_url: str,
    piece: Piece,
    columns: Sequence[str],
    times: Bounds | None = None,
    *,
    topic_id: int = 0,
) -> Iterator[Rows]:
    """The rows of a piece in order, from the store or the owner; row groups without messages within ``times``
    may be left out. Messages must belong to ``topic_id`` if it is not 0. Raises OffsetGone when neither the
    store nor the owner has them, TopicReplaced, DataGap."""
    at = piece.start
    if piece.segment is not None:
        _check_topic(piece.name, topic_id, piece.segment.topic_id)
        try:
            source = open_source(store_url, piece.segment)
            for rows in read_segment(source, piece.segment, at, piece.end, columns, times):
                yield rows
                at = rows.end
            return
        except ObjectMissing:
            log.info(
                "source: %s is gone; offsets %s to %s come from the owner", piece.segment.key, at, piece.end
            )
    batches = ClusterClient.of(access).read(piece.name, at, piece.end)
    for rows in rows_in(batches, piece.name, at, columns, topic_id=topic_id):
        yield rows
        at = rows.end
    if at < piece.end:
        raise DataGap(f"{piece.name}: the owner has no offset {at}, and {piece.end - 1} was there")


def rows_in(
    batches: Iterable[RecordBatch], name: str, at: int, columns: Sequence[str], *, topic_id: int = 0
) -> Iterator[Rows]:
    """The rows of consecutive batches of a partition, the first at offset ``at``. Raises TopicReplaced,
    DataGap."""
    return _joined(_checked(batches, name, at, topic_id), columns)


def _checked(batches: Iterable[RecordBatch], name: str, at: int, topic_id: int) -> Iterator[RecordBatch]:
    """Check that batches are consecutive: joined, they have only the offset of the first."""
    for batch in batches:
        _check_topic(name, topic_id, batch.header.topic_id)
        if batch.base_offset != at:
            raise DataGap(f"{name}: offset {batch.base_offset} follows {at}")
        at = batch.next_offset
        yield batch


def _check_topic(name: str, wanted: int, found: int) -> None:
    if wanted not in (0, found):
        raise TopicReplaced(name, wanted, found)


def _joined(batches: Iterator[RecordBatch], columns: Sequence[str]) -> Iterator[Rows]:
    """The rows of consecutive batches, small batches joined."""
    for is_small, run in groupby(batches, lambda batch: len(batch) < LARGE):
        if is_small:
            for few in _gathered(run):
                at = few[0].base_offset
                for table in row_groups(few):
                    yield Rows(at, at + len(table), {name: _whole(table.column(name)) for name in columns})
                    at += len(table)
        else:
            for batch in run:
                rows = batch.to_arrow(columns)
                yield Rows(
                    batch.base_offset, batch.next_offset, dict(zip(columns, rows.columns, strict=True))
                )


def _gathered(batches: Iterator[RecordBatch]) -> Iterator[list[RecordBatch]]:
    few: list[RecordBatch] = []
    size = 0
    for batch in batches:
        few.append(batch)
        size += batch.header.length
        if size > JOINED:
            yield few
            few, size = [], 0
    if few:
        yield few


def _whole(column: Any) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _constant(value: Any, kind: Any, count: int) -> Any:
    if count > _COMMON_ROWS:
        return pa.repeat(pa.scalar(value, kind), count)
    return _common(value, kind).slice(0, count)


@lru_cache(maxsize=256)
def _common(value: Any, kind: Any) -> Any:
    return pa.repeat(pa.scalar(value, kind), _COMMON_ROWS)
