"""The files of one mirror log: one disk's copy of one ledger; and how a log is read back by position.

    mirrors/{broker}-{incarnation}/note                    what is promised, twice (see below)
                                   copy-{position}.wal     bytes of the ledger from that position on

The bytes are the owner's, at the owner's positions: a file begins between two records, and what a record is
can be seen without asking any broker but for the owner's storage id, which seeds its checksums and is kept in
the note.

**The note** has two slots that are written in turn, each with a number and a checksum: a crash spoils at most
the one that is being written, and the other one is the note before it. Written in place, it costs one sync
and no room on a full disk.

Behind a small write the file gets room, zeros that the next writes fill: a sync that need not make a new size
durable is faster (see ``wal.log``).

Files are owned by one thread at a time. The first error of the disk that is not "full" is final.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

import google_crc32c
import msgspec

from sava.ledger.protocol import (
    LedgerId,
    MemberNote,
    Range,
    StorageId,
    Work,
    held_after_restart,
)
from sava.wal import Disk, DiskFull, File, FileMissing, LogCorrupt, PositionOutside, Record
from sava.wal import format as wal_format
from sava.wal.format import KINDS, Frame, find_frames, read_stream, seed_of

FILE_BYTES: Final = 64 << 20
ROOM_BYTES: Final = 128 << 10
SMALL_BYTES: Final = 4096
SLOT_BYTES: Final = 4096
_REWRITE_BYTES: Final = 1 << 20
_NOTE_FILE: Final = "note"
_SLOT = struct.Struct("<IIQ")
_PREFIX, _SUFFIX = "copy-", ".wal"


class _Kept(msgspec.Struct, frozen=True):
    origin: str
    note: MemberNote


def directory_name(ledger: LedgerId) -> str:
    return f"{ledger.broker}-{ledger.incarnation}"


def ledger_of_directory(name: str) -> LedgerId | None:
    broker, _, incarnation = name.partition("-")
    if broker.isdecimal() and incarnation.isdecimal():
        return LedgerId(int(broker), int(incarnation))
    return None


def file_name(start: int) -> str:
    return f"{_PREFIX}{start:020}{_SUFFIX}"


def file_start(name: str) -> int | None:
    digits = name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    return int(digits) if name == f"{_PREFIX}{digits}{_SUFFIX}" and digits.isdecimal() else None


class MirrorFiles:
    def __init__(self, disk: Disk, origin: StorageId, note: MemberNote, *, file_bytes: int = 0) -> None:
        self.disk = disk
        self.origin = origin
        self.note = note
        self.end = 0
        """Of what is in the files and belongs to the copy."""
        self.reader = WalRangeReader(disk, origin=origin, name=file_name, start_of=file_start)
        self._file_bytes = file_bytes or FILE_BYTES
        self._starts: list[int] = []
        self._file: File | None = None
        """The last one."""
        self._room_end = 0
        self._has_new_names = False
        self._is_dirty = False
        self._note_file: File | None = None
        self._number = 0

    # -- beginning ---------------------------------------------------------------------------

    @classmethod
    def create(cls, disk: Disk, origin: StorageId, ledger: LedgerId, *, file_bytes: int = 0) -> MirrorFiles:
        """Nothing is durable before the first work is done. Raises DiskFull."""
        for name in disk.list():
            disk.remove(name)  # begun once, and without a note: no owner has heard of anything in it
        files = cls(disk, origin, MemberNote(ledger=ledger), file_bytes=file_bytes)
        files._note_file = disk.open(_NOTE_FILE, create=True)
        files._note_file.write(0, [bytes(2 * SLOT_BYTES)])
        files._has_new_names = True
        return files

    @classmethod
    def restore(cls, disk: Disk, *, file_bytes: int = 0) -> MirrorFiles | None:
        """As it was left by a crash, made durable; None when no note was ever stored. Raises LogCorrupt when
        there was one and it cannot be read: a disk that forgets a fence must not answer."""
        try:
            note_file = disk.open(_NOTE_FILE)
        except FileMissing:
            return None
        slots = [_read_slot(note_file, index) for index in (0, 1)]
        intact = [slot for slot in slots if slot is not None]
        if not intact:
            is_unused = not note_file.read(0, 2 * SLOT_BYTES).strip(b"\0")
            note_file.close()
            if is_unused:
                return None
            raise LogCorrupt(disk.path, _NOTE_FILE, 0, "no intact note of what was promised")
        number, kept = max(intact, key=lambda slot: slot[0])
        files = cls(disk, StorageId(kept.origin), kept.note, file_bytes=file_bytes)
        files._note_file, files._number = note_file, number
        files._restore()
        return files

    def _restore(self) -> None:
        note = self.note
        self._starts = sorted(start for name in self.disk.list() if (start := file_start(name)) is not None)
        if note.base is None:
            for start in self._starts:
                self.disk.remove(file_name(start))
            self._starts = []
            return
        first = max(note.base, note.floor)
        self.end = held_after_restart(note, self._intact(first)).end
        while self._starts and self._starts[-1] >= max(self.end, first + 1):
            self.disk.remove(file_name(self._starts.pop()))
        if self._starts:
            self._file = self.disk.open(file_name(self._starts[-1]))
            self._cut()
        else:
            self._file = self._open_file(self.end)
        self._room_end = self.end
        self._write_again(max(note.watermark, self._starts[-1]))
        self._is_dirty = self._has_new_names = True
        self.sync()

    def _intact(self, first: int) -> list[Range]:
        """What lies before the watermark was synced, and is looked at when a request asks for it."""
        watermark = max(self.note.watermark, first)
        known = [Range(first, watermark)] if watermark > first else []
        behind: list[Range] = []
        if self._starts and self._starts[0] <= watermark:
            last = self.disk.open(file_name(self._starts[-1]))
            try:
                end = self._starts[-1] + last.size()
            finally:
                last.close()
            frames = self.reader.frames(watermark, end)
            at = max((frame[5] for frame in frames), default=watermark)
            behind = [Range(watermark, at)] if at > watermark else []
        return known + behind

    def _write_again(self, start: int) -> None:
        """What was read back may be in the page cache only, and the kernel may hold it for clean."""
        assert self._file is not None
        base = self._starts[-1]
        for at in range(start, self.end, _REWRITE_BYTES):
            data = self._file.read(at - base, min(_REWRITE_BYTES, self.end - at))
            self._file.write(at - base, [data])

    # -- working -----------------------------------------------------------------------------

    def perform(self, work: Work) -> None:
        """All of it, in order, durable. Raises DiskFull with nothing of it left, or DiskFailed."""
        former = self.end
        try:
            if work.base is not None:
                self._begin(work.base)
            self._write_all(work.writes)
            self.sync()
        except DiskFull:
            self._take_back(former)
            raise
        if work.note is not None:
            self._store(work.note)
        if work.floor is not None:
            self._trim(work.floor)

    def _begin(self, base: int) -> None:
        self._close_file()
        for start in self._starts:
            self.disk.remove(file_name(start))
        self._starts = []
        self.end = base
        self._file = self._open_file(base)

    def _write_all(self, writes: Sequence[tuple[int, bytes]]) -> None:
        """What continues the copy in one piece; what repairs a part of it in its place."""
        news: list[bytes] = []
        size = 0
        for position, data in writes:
            end = self.end + size
            if position < end:
                if news:
                    self._write(self.end, news)
                    news, size = [], 0
                self._repair(position, data[: self.end - position])
                data = data[self.end - position :]
            if data:
                news.append(data)
                size += len(data)
        if news:
            self._write(self.end, news)

    def _repair(self, position: int, data: bytes) -> None:
        """The same bytes as were there before they were damaged."""
        while data:
            index = bisect_right(self._starts, position) - 1
            start = self._starts[index]
            limit = self._starts[index + 1] if index + 1 < len(self._starts) else self.end
            part = data[: limit - position]
            file = self.disk.open(file_name(start))
            try:
                file.write(position - start, [part])
                file.sync()
            finally:
                file.close()
            position += len(part)
            data = data[len(part) :]

    def _write(self, position: int, buffers: Sequence[bytes]) -> None:
        if self._file is not None and position - self._starts[-1] >= self._file_bytes:
            self._cut()
            self._file.sync()
            self._close_file()
        if self._file is None:
            self._file = self._open_file(position)
        offset, end = position - self._starts[-1], position + sum(map(len, buffers))
        self._is_dirty = True
        if self._room_end < end <= position + SMALL_BYTES:
            with suppress(DiskFull):
                self._file.write(offset, [*buffers, bytes(ROOM_BYTES)])
                self._room_end = end + ROOM_BYTES
                self.end = end
                return
        self._file.write(offset, buffers)
        self.end = end

    def _open_file(self, start: int) -> File:
        file = self.disk.open(file_name(start), create=True)
        self._starts.append(start)
        self._has_new_names = True
        self._room_end = start
        return file

    def _cut(self) -> None:
        """Let the last file end where the copy ends."""
        assert self._file is not None
        if self._file.size() > self.end - self._starts[-1]:
            self._file.truncate(self.end - self._starts[-1])
            self._is_dirty = True
        self._room_end = self.end

    def _take_back(self, end: int) -> None:
        self._close_file()
        while self._starts and self._starts[-1] >= end:
            self.disk.remove(file_name(self._starts.pop()))
            self._has_new_names = True
        self.end = end
        if self._starts:
            self._file = self.disk.open(file_name(self._starts[-1]))
            self._cut()

    def sync(self) -> None:
        if self._is_dirty and self._file is not None:
            self._file.sync()
        if self._has_new_names:
            self.disk.sync_dir()
        self._is_dirty = self._has_new_names = False

    def _store(self, note: MemberNote) -> None:
        assert self._note_file is not None
        self._number += 1
        payload = msgspec.json.encode(_Kept(self.origin, note))
        crc = google_crc32c.extend(google_crc32c.value(self._number.to_bytes(8, "little")), payload)
        slot = _SLOT.pack(crc, len(payload), self._number) + payload
        self._note_file.write(self._number % 2 * SLOT_BYTES, [slot.ljust(SLOT_BYTES, b"\0")])
        self._note_file.sync()
        self.note = note

    def _trim(self, floor: int) -> None:
        while len(self._starts) > 1 and self._starts[1] <= floor:
            self.disk.remove(file_name(self._starts.pop(0)))
            self.disk.sync_dir()

    # -- ending ------------------------------------------------------------------------------

    def close(self) -> None:
        self._close_file()
        if self._note_file is not None:
            self._note_file.close()
            self._note_file = None

    def delete(self) -> None:
        """The note goes last: without it a copy does not exist."""
        self.close()
        for name in self.disk.list():
            if name != _NOTE_FILE:
                self.disk.remove(name)
        with suppress(FileMissing):
            self.disk.remove(_NOTE_FILE)
        self.disk.sync_dir()

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _read_slot(file: File, index: int) -> tuple[int, _Kept] | None:
    data = file.read(index * SLOT_BYTES, SLOT_BYTES)
    if len(data) < _SLOT.size:
        return None
    crc, length, number = _SLOT.unpack_from(data)
    payload = data[_SLOT.size : _SLOT.size + length]
    if not length or google_crc32c.extend(google_crc32c.value(number.to_bytes(8, "little")), payload) != crc:
        return None
    try:
        return number, msgspec.json.decode(payload, type=_Kept)
    except msgspec.DecodeError:
        return None


READ_BYTES = 1 << 20


class WalRangeReader:
    """Reads back the bytes of one log, in one directory, by position.

    The owner's log and a mirror log are the same bytes at the same positions, in files that are named by
    where they begin and are cut differently. What is read for another disk is verified first: a mirror that
    is behind, or a disk that is written back to, must not get what has rotted here.

    Blocks on the disk; for worker threads. What is read is durable, or was written by the caller.
    """

    def __init__(
        self,
        disk: Disk,
        *,
        origin: str,
        name: Callable[[int], str] = wal_format.file_name,
        start_of: Callable[[str], int | None] = wal_format.file_start,
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
            raise LogCorrupt(self._disk.path, "a ledger's copy", at, "no intact record")

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
        """The ranges within ``start .. end`` whose records verify."""
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
