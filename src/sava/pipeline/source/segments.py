"""Segments: rows of Parquet objects, read by executors straight from the store.

Only row groups that hold wanted offsets are read, and of them only wanted columns that hold anything: the
footer tells, and it is checked against its descriptor first. Offsets are not read at all, since a row group's
are without gaps. A file in a directory is mapped into memory. From any other store the byte ranges of some
row groups are fetched together, and two such windows are under way while the rows of a third are used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from sava.pipeline.objects import Objects
from sava.pipeline.source.filters import Bounds
from sava.storage import segment_file
from sava.storage.errors import ObjectMissing, ObjectTruncated, SegmentCorrupt
from sava.storage.segment_file import Footer, PartialFile, RowGroup
from sava.storage.types import Segment

WINDOW_BYTES: Final = 4 << 20
WINDOWS_AHEAD: Final = 2


class Rows(NamedTuple):
    """Neighbouring messages. ``columns`` has those of the wanted ones that hold anything."""

    start: int
    end: int
    columns: dict[str, Any]

    def slice(self, start: int, end: int) -> Rows:
        if start <= self.start and end >= self.end:
            return self
        start, end = max(start, self.start), min(end, self.end)
        skip, count = start - self.start, end - start
        return Rows(start, end, {name: array.slice(skip, count) for name, array in self.columns.items()})


class Source(Protocol):
    """Where the bytes of one segment come from."""

    def footer(self) -> bytes: ...

    def files(
        self, footer: Footer, groups: Sequence[RowGroup], columns: Sequence[str]
    ) -> Iterator[tuple[Any, Any]]:
        """Parquet files that can be read for the row groups that come with them: all of them, in order."""
        ...


def read_segment(
    source: Source, segment: Segment, start: int, end: int, columns: Sequence[str], times: Bounds | None
) -> Iterator[Rows]:
    """The messages ``start .. end``; those of row groups that hold nothing within ``times`` are left out.
    Raises ObjectMissing when the object was deleted, SegmentCorrupt, ObjectStoreUnavailable."""
    footer = segment_file.parse_footer(segment, source.footer())
    groups = [
        group for group in footer.covering(start, end) if times is None or _overlaps(footer, group, times)
    ]
    for file, window in source.files(footer, groups, columns):
        for group in window:
            wanted = [name for name in columns if name in group.columns]
            arrays = segment_file.read_columns(segment, file, group, wanted).columns if wanted else []
            yield Rows(group.start, group.end, dict(zip(wanted, arrays, strict=True))).slice(start, end)


def _overlaps(footer: Footer, group: RowGroup, times: Bounds) -> bool:
    published = footer.metadata.row_group(group.number).column(1).statistics
    return bool(group.max_publish_time >= times.start and published.min_raw < times.end)


def open_source(store_url: str, segment: Segment) -> Source:
    """Raises ObjectMissing, SegmentCorrupt."""
    if not 0 < segment.footer_size <= segment.size:
        raise SegmentCorrupt(f"{segment.key}: a footer of {segment.footer_size} bytes in {segment.size}")
    parts = urlsplit(store_url)
    if parts.scheme == "file":
        return MappedFile(Path(unquote(parts.path)) / segment.key, segment)
    return StoredObject(Objects.of(store_url), segment)


class MappedFile:
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
        yield _parquet(self._file, footer), groups


class StoredObject:
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
    """Row groups that are fetched together. The first is alone, so that its rows come soon."""
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
    """Some ranges."""

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
