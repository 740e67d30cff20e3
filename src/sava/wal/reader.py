"""WalReader: durable records of a log, read from other threads while the log's one writer appends.

``Log`` belongs to one thread. Reading through it would put every catching-up consumer into the queue of the
fsyncs. A WalReader has descriptors of its own and uses nothing but positioned reads, so it shares no file
offset, no buffer and no lock with the writer; it needs to know only what never changes: that files are named
by the position of their first byte, and that a durable record stays as it is until its file is trimmed.

The caller asks only for records that it knows durable. What the files do meanwhile is seen as follows:

    writer  begins a file       the record is not in the newest file known here: list again, look again
    writer  trims a file        descriptor still open here: the bytes are still there, the read succeeds
                                else: ``PositionOutside``, as if the question had come a moment later

A descriptor is closed by the last thread that uses it: closing it under a running read would let the kernel
give its number to another file, and the read would return that file's bytes.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sava.wal.disk import Disk, File
from sava.wal.errors import FileMissing, LogClosed, LogCorrupt, PositionOutside
from sava.wal.format import FRAME_BYTES, KINDS, Frame, file_name, file_start, read_frames, seed_of
from sava.wal.recovery import Record

Span = tuple[int, int]
"""Position of a record and the length of its payload."""

_MAX_GAP = 64 << 10
"""Records of others between two wanted ones are read along up to this size: cheaper than a second call."""
_MAX_READ = 1 << 20


@dataclass(slots=True, eq=False)
class _Handle:
    file: File
    users: int = 0
    is_retired: bool = False


class WalReader:
    """Thread-safe. ``_lock`` guards the tables and is never held over a read or a listing."""

    def __init__(self, disk: Disk, *, storage_id: str, max_open_files: int = 16) -> None:
        self._disk = disk
        self._seed = seed_of(storage_id)
        self._max_open_files = max_open_files
        self._listing = threading.Lock()
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._starts: list[int] = []
        self._handles: dict[int, _Handle] = {}
        """By start of the file, least recently used first."""
        self._is_closed = False

    def read(self, spans: Sequence[Span]) -> list[Record]:
        """The records at these positions (ascending), each verified. Raises PositionOutside when one was
        trimmed away, LogCorrupt when one is not what was written."""
        records: list[Record] = []
        rest = list(spans)
        while rest:
            start = self._find_file(rest[0][0])
            taken = self._take(rest, start)
            records += self._read_group(start, rest[:taken])
            del rest[:taken]
        return records

    def _take(self, spans: Sequence[Span], start: int) -> int:
        """How many of the spans, from the first, one read of this file can serve."""
        with self._lock:
            index = bisect_right(self._starts, start)
            file_end = self._starts[index] if index < len(self._starts) else None
        first, end = spans[0][0], _end_of(spans[0])
        for count, span in enumerate(spans[1:], 1):
            if span[0] - end > _MAX_GAP or _end_of(span) - first > _MAX_READ:
                return count
            if file_end is not None and span[0] >= file_end:
                return count
            end = _end_of(span)
        return len(spans)

    def _read_group(self, start: int, spans: Sequence[Span]) -> list[Record]:
        found = self._frames(start, spans)
        missing = spans[len(found) :]
        if not missing:
            return found
        # The writer may have begun a file since the names were listed, and the rest is in there.
        self._refresh()
        if self._find_file(missing[0][0]) == start:
            raise LogCorrupt(self._disk.path, file_name(start), missing[0][0], "no intact record")
        return found + self.read(missing)

    def _frames(self, start: int, spans: Sequence[Span]) -> list[Record]:
        """The wanted records of one file, as far as they are intact."""
        offset, end = spans[0][0] - start, _end_of(spans[-1]) - start
        wanted = iter(spans)
        span = next(wanted)
        records: list[Record] = []
        with self._using(start) as file:
            end = min(end, file.size())
            frames = read_frames(
                file, base=start, offset=offset, end=end, seed=self._seed, chunk=end - offset
            )
            for frame in frames:
                if frame[0] < span[0]:
                    continue
                if not _is(frame, span):
                    break
                records.append(Record(frame[0], frame[1], frame[4]))
                following = next(wanted, None)
                if following is None:
                    break
                span = following
        return records

    def _find_file(self, position: int) -> int:
        """Start of the file that holds the position, as far as is known."""
        for attempt in (0, 1):
            with self._lock:
                index = bisect_right(self._starts, position)
                if index:
                    return self._starts[index - 1]
            if attempt == 0:
                self._refresh()
        raise PositionOutside(f"position {position} was trimmed away")

    def _refresh(self) -> None:
        """One at a time: an older listing must not replace a newer one."""
        with self._listing:
            starts = sorted(start for name in self._disk.list() if (start := file_start(name)) is not None)
            with self._lock:
                self._starts = starts

    @contextmanager
    def _using(self, start: int) -> Iterator[File]:
        handle = self._acquire(start)
        try:
            yield handle.file
        finally:
            self._release(handle)

    def _acquire(self, start: int) -> _Handle:
        with self._lock:
            if self._is_closed:
                raise LogClosed(f"{self._disk.path}: the reader is closed")
            handle = self._handles.pop(start, None)
            if handle is not None:
                self._handles[start] = handle
                handle.users += 1
                return handle
        try:
            opened = _Handle(self._disk.open(file_name(start)), users=1)
        except FileMissing as missing:
            raise PositionOutside(f"the file from position {start} on was trimmed away") from missing
        return self._adopt(start, opened)

    def _adopt(self, start: int, opened: _Handle) -> _Handle:
        """Remember a new descriptor, unless another thread was first or the reader was closed."""
        with self._lock:
            if self._is_closed or start in self._handles:
                opened.is_retired = True
            else:
                self._handles[start] = opened
            while len(self._handles) > self._max_open_files:
                self._retire(next(iter(self._handles)))
        return opened

    def _release(self, handle: _Handle) -> None:
        with self._lock:
            handle.users -= 1
            if handle.is_retired and handle.users == 0:
                handle.file.close()

    def _retire(self, start: int) -> None:
        """(The lock is held.)"""
        handle = self._handles.pop(start)
        handle.is_retired = True
        if handle.users == 0:
            handle.file.close()

    def forget(self, position: int) -> None:
        """Files whose records all lie before the position were trimmed: let go of their descriptors, which
        keep the space of removed files occupied."""
        self._refresh()
        with self._lock:
            for start in [start for start in self._handles if start < position and start not in self._starts]:
                self._retire(start)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for start in list(self._handles):
                self._retire(start)


def _end_of(span: Span) -> int:
    position, length = span
    return position + ((FRAME_BYTES + length + 7) & ~7)


def _is(frame: Frame, span: Span) -> bool:
    return frame[0] == span[0] and len(frame[4]) == span[1] and frame[1] < KINDS
