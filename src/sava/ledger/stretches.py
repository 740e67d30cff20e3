"""Stretches: bytes of a log, read back from the files that hold them, by position.

The owner's log and a copy of it are the same bytes at the same positions, in files that are named by where
they begin and are cut differently. Whoever reads for somebody else verifies first: a mirror that is behind,
or a disk that is written back to, must not get what has rotted here.

Blocks on the disk; for worker threads. What is read is durable, or was written by the caller.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sava.ledger.protocol import Range
from sava.wal import Disk, File, FileMissing, LogCorrupt, PositionOutside, Record
from sava.wal.format import KINDS, Frame, file_name, file_start, find_frames, read_stream, seed_of

READ_BYTES = 1 << 20


class Stretches:
    """Of one log, in one directory."""

    def __init__(
        self,
        disk: Disk,
        *,
        origin: str,
        name: Callable[[int], str] = file_name,
        start_of: Callable[[str], int | None] = file_start,
    ) -> None:
        """``origin``: the storage id of the disk that wrote the log, which its checksums are seeded with."""
        self._disk = disk
        self._seed = seed_of(origin)
        self._name = name
        self._start_of = start_of

    def frames(self, start: int, end: int) -> Iterator[Frame]:
        """Verified records from ``start`` on that end at or before ``end``, those of the log itself included,
        up to the first that is not intact. Raises PositionOutside when ``start`` is not held."""
        starts = self._starts()
        at = start
        while at < end:
            index = bisect_right(starts, at) - 1
            if index < 0:
                raise PositionOutside(f"{self._disk.path}: position {at} is not held")
            before = at
            for frame in self._frames_of(starts[index], at, end):
                at = frame[5]
                yield frame
            is_next = index + 1 < len(starts) and starts[index + 1] == at
            if at == before or not is_next:
                return

    def records(self, start: int, end: int) -> Iterator[Record]:
        """Callers' records from ``start`` to ``end``, both borders. Raises PositionOutside, and LogCorrupt
        when one is not intact."""
        at = start
        for frame in self.frames(start, end):
            at = frame[5]
            if frame[1] < KINDS:
                yield Record(frame[0], frame[1], frame[4])
        if at < end:
            raise LogCorrupt(self._disk.path, "a journal's copy", at, "no intact record")

    def read(self, start: int, end: int, max_bytes: int = READ_BYTES) -> bytes:
        """Whole verified records from ``start``, about ``max_bytes`` of them, at least one; empty when there
        is no intact one."""
        at = start
        for frame in self.frames(start, end):
            if at > start and frame[5] - start > max_bytes:
                break
            at = frame[5]
            if at - start >= max_bytes:
                break
        return self._raw(start, at)

    def intact(self, start: int, end: int) -> list[Range]:
        """The stretches of ``start .. end`` whose records verify."""
        found: list[Range] = []
        at = start
        while at < end:
            begin = at
            for frame in self.frames(at, end):
                at = frame[5]
            if at > begin:
                found.append(Range(begin, at))
            if at >= end:
                break
            following = self._next_intact(at, end)
            if following is None:
                break
            at = following
        return found

    def _next_intact(self, position: int, end: int) -> int | None:
        """Where the next intact record begins behind the bad one at ``position``."""
        starts = self._starts()
        for index, start in enumerate(starts):
            file_end = starts[index + 1] if index + 1 < len(starts) else end
            if file_end <= position:
                continue
            at = max(start, position + 8)
            with _opened(self._disk, self._name(start)) as file:
                behind = find_frames(
                    file, base=start, offset=at - start, end=min(file.size(), end - start), seed=self._seed
                )
                frame = next(behind, None)
            if frame is not None:
                return frame[0]
        return None

    def _frames_of(self, start: int, position: int, end: int) -> Iterator[Frame]:
        with _opened(self._disk, self._name(start)) as file:
            limit = min(file.size(), end - start)
            yield from read_stream(file, base=start, offset=position - start, end=limit, seed=self._seed)

    def _raw(self, start: int, end: int) -> bytes:
        parts: list[bytes] = []
        starts = self._starts()
        at = start
        while at < end:
            index = bisect_right(starts, at) - 1
            file_end = min(end, starts[index + 1]) if index + 1 < len(starts) else end
            with _opened(self._disk, self._name(starts[index])) as file:
                parts.append(file.read(at - starts[index], file_end - at))
            at = file_end
        return b"".join(parts)

    def _starts(self) -> Sequence[int]:
        return sorted(start for name in self._disk.list() if (start := self._start_of(name)) is not None)


@contextmanager
def _opened(disk: Disk, name: str) -> Iterator[File]:
    """A file for the time of a block. Raises PositionOutside when it was trimmed away."""
    try:
        file = disk.open(name)
    except FileMissing as missing:
        raise PositionOutside(f"{disk.path}/{name} was trimmed away") from missing
    try:
        yield file
    finally:
        file.close()
