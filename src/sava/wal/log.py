"""Log: the one durable append-only log, under the Raft log and under the message journal alike.

Appending and making durable are two steps, and nothing may be promised to a caller between them:

    append   bytes are in the file, a crash may lose or tear them; ``end`` moves
    sync     they are durable; ``durable_end`` moves; now acknowledge

Records go into files of bounded size (``format``); a batch never spans two files, so a full disk takes back
the whole batch by cutting one file. A new file is begun in this order, because each step relies on the one
before it being durable:

    sync the old file -> write ``log.new`` with its header -> sync it -> rename -> sync the directory

Without the first sync, records lost at the end of the old file would leave a hole before acknowledged records
of the new one. Without the last, a power cut could take the name of a file that holds acknowledged records.

A sync that also has to make a file's new size durable takes longer (on ext4, by a fifth to a half). So behind
a small group the log writes room, zeros that the following groups overwrite in place
(``LogOptions.room_bytes``); large groups go without, since the zeros would cost more than they save. Zeros
are no record, so to recovery room is a tail that was never acknowledged. It is cut off wherever the end of
the file means something: before the next file is begun, on closing, and when the disk is full, since a write
that fails half-way has left records in there.

A group that fits into the room is written and synced by one call, when all before it is durable: see
``append_many``. Not if there is a tap (below): a copy is worth more on its way during the sync than a call.

Trimming removes the oldest file first and syncs the directory after each removal: two removals in one sync
may reach the disk in the other order, which leaves a hole in the middle of the log. The newest file is never
removed, and its header carries identity, incarnation and position, so none of the three is lost or used
twice, whatever is trimmed.

Each opening for writing appends a record that raises the incarnation, synced before ``open`` returns.

A log that is copied elsewhere while it is written has a *tap*: it is handed every byte of the log, in order,
after the write and before the sync, so that a copy is on its way while this disk syncs. A full disk has
refused what it refuses by then: nothing that was handed out is taken back.

After a failed write or sync the log does not know what is on disk, and a second fsync may report success for
pages that the kernel has dropped. So the first failure is final: the log refuses everything, and the process
must stop.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from sava.wal.disk import Disk, File
from sava.wal.errors import (
    DiskFailed,
    DiskFull,
    LogClosed,
    LogCorrupt,
    PositionOutside,
    RecordTooLarge,
)
from sava.wal.format import (
    HEADER_BYTES,
    KINDS,
    MARK,
    MAX_LENGTH,
    NEW_FILE,
    OPENED,
    Buffers,
    Identity,
    encode_header,
    encode_parts,
    file_name,
    payload_bytes,
    read_frame,
    read_frames,
    seed_of,
)
from sava.wal.recovery import Record, RecoveredLog, recover

__all__ = ["Buffers", "Identity", "Log", "LogOptions", "Record", "Tap"]

_REWRITE_CHUNK = 1 << 20
_SMALL_GROUP = 4096
"""Up to this size a group is followed by room."""


Tap = Callable[[int, Sequence[tuple[int, Buffers]]], None]
"""Called with the position of the first of some records, and the size and the bytes of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    file_bytes: int = 64 << 20
    """A file is closed and the next begun once it holds this much."""
    max_record_bytes: int = 64 << 20
    room_bytes: int = 0
    """Written ahead as zeros, for logs whose groups are often small and waited for."""

    def __post_init__(self) -> None:
        if not 0 < self.max_record_bytes <= MAX_LENGTH:
            raise ValueError(f"max_record_bytes must be within 1..{MAX_LENGTH}")


class Log:
    """Single-threaded: the owner (a ``Writer``'s thread, or the simulator) calls it; nothing here waits but
    the disk."""

    identity: Identity
    torn_bytes: int
    """Bytes of never acknowledged data that recovery has cut off."""

    def __init__(self, disk: Disk, options: LogOptions, found: RecoveredLog) -> None:
        self.identity = found.identity
        self.torn_bytes = found.torn_bytes
        self._disk = disk
        self._options = options
        self._seed = seed_of(found.identity.storage_id)
        self._starts = found.starts
        self._file = found.file
        self._end = found.end
        self._durable_end = found.witnessed
        self._content_end = found.content_end
        self._witnessed = found.witnessed
        """The durable end that the newest record in the log tells."""
        self._room_end = found.end
        """End of the zeros behind the newest record; before ``_end`` if there are none."""
        self._older: File | None = None
        """The closed file that was read last."""
        self.found_end = found.end
        """Where the log ended when it was opened: nothing before it is of this opening."""
        self.tap: Tap | None = None
        self._failure: DiskFailed | None = None
        self._closed = False

    @classmethod
    def open(
        cls,
        disk: Disk,
        *,
        owner: str,
        new_storage_id: Callable[[], str],
        options: LogOptions = LogOptions(),  # noqa: B008 (frozen)
        replay: Callable[[Record], None] | None = None,
    ) -> Log:
        """Lock the directory, recover, bump the incarnation. ``replay`` sees every record still held, oldest
        first.

        Raises LogCorrupt, ForeignLog, UnsupportedFormat, DirectoryLocked, DiskFull. A torn tail (never
        acknowledged) is cut off silently and counted."""
        disk.lock()
        try:
            found = recover(disk, owner=owner, replay=replay)
            if found is None:
                return cls(disk, options, _create_file(disk, Identity(owner, new_storage_id(), 1), start=0))
            try:
                log = cls(disk, options, found)
                log._resume()
                return log
            except BaseException:
                found.file.close()
                raise
        except BaseException:
            disk.unlock()
            raise

    def _resume(self) -> None:
        """Make what was recovered durable and raise the incarnation (why in this order: see ``recovery``)."""
        start = self._starts[-1]
        if self._file.size() > self._end - start:
            self._file.truncate(self._end - start)
            self._file.sync()
        for offset in range(self._witnessed - start, self._end - start, _REWRITE_CHUNK):
            length = min(_REWRITE_CHUNK, self._end - start - offset)
            self._file.write(offset, [self._file.read(offset, length)])
        self.identity = msgspec.structs.replace(self.identity, incarnation=self.identity.incarnation + 1)
        self._write([(OPENED, ())])
        self.sync()
        self._disk.sync_dir()

    @property
    def first(self) -> int:
        """Where the records held begin: none lies before it, and ``scan(log.first)`` gives all."""
        return self._starts[0] + HEADER_BYTES

    @property
    def end(self) -> int:
        """Exclusive end of what was appended."""
        return self._end

    @property
    def durable_end(self) -> int:
        """Exclusive end of what is durable."""
        return self._durable_end

    def append(self, kind: int, payload: Buffers) -> int:
        """Append one record (not yet durable); returns its position. Raises DiskFull with nothing
        appended."""
        return self.append_many([(kind, payload)])[0]

    def append_many(
        self, records: Sequence[tuple[int, Buffers]], *, is_synced_next: bool = False
    ) -> list[int]:
        """As ``append``, with one ``write`` for all; all or nothing on DiskFull. A caller that calls ``sync``
        next says so: what is small is then durable already, if that takes one call of the disk instead of
        two. It has called ``check`` for these records, when it accepted them."""
        if not is_synced_next:
            self.check(records)
        self._check_usable()
        if not records:
            return []
        if self._end - self._starts[-1] >= self._options.file_bytes:
            self.roll()
        positions = self._write(records, is_synced_next=is_synced_next)
        self._content_end = self._end
        return positions

    def check(self, records: Sequence[tuple[int, Buffers]]) -> int:
        """Refuse what can never be appended: RecordTooLarge, or ValueError for a kind outside 0..239. Returns
        the bytes of all payloads. (Any thread.)"""
        total = 0
        for kind, payload in records:
            if not 0 <= kind < KINDS:
                raise ValueError(f"record kind {kind} is outside 0..{KINDS - 1}")
            size = payload_bytes(payload)
            if size > self._options.max_record_bytes:
                raise RecordTooLarge(f"a record of {size} bytes exceeds {self._options.max_record_bytes}")
            total += size
        return total

    def _write(self, records: Sequence[tuple[int, Buffers]], *, is_synced_next: bool = False) -> list[int]:
        position, durable, incarnation = self._end, self._durable_end, self.identity.incarnation
        positions: list[int] = []
        buffers: list[bytes | memoryview] = []
        written: list[tuple[int, Buffers]] = []
        for kind, payload in records:
            size, parts = encode_parts(
                kind, payload, position=position, durable=durable, incarnation=incarnation, seed=self._seed
            )
            positions.append(position)
            buffers += parts
            written.append((size, parts))
            position += size
        try:
            if is_synced_next and self._can_be_durable_at_once(position):
                self._write_into_room(b"".join(buffers))
                self._durable_end = position
            else:
                self._write_at_end(buffers, position)
        except DiskFailed as failure:
            self._failure = failure
            raise
        self._end = position
        self._witnessed = durable
        if self.tap is not None:
            self.tap(positions[0], written)
        return positions

    def _can_be_durable_at_once(self, end: int) -> bool:
        """Whether a group up to ``end`` is small, fits into the room, and follows nothing that is not
        durable: a mark before it that a power cut takes away would take the group with it. With a tap, one
        call for both would keep the copies waiting for this disk."""
        if self.tap is not None or self._durable_end < self._end:
            return False
        return end <= min(self._room_end, self._end + _SMALL_GROUP)

    def _write_into_room(self, data: bytes) -> None:
        try:
            self._file.write_durably(self._end - self._starts[-1], data)
        except DiskFull:
            self._cut_room()
            raise

    def _write_at_end(self, buffers: list[bytes | memoryview], end: int) -> None:
        """Write what reaches up to ``end``, with room behind it if that is worth it and the disk has some."""
        offset, room = self._end - self._starts[-1], self._options.room_bytes
        if room and self._room_end < end <= self._end + _SMALL_GROUP:
            with suppress(DiskFull):
                self._file.write(offset, [*buffers, bytes(room)])
                self._room_end = end + room
                return
        try:
            self._file.write(offset, buffers)
        except DiskFull:
            self._cut_room()
            raise

    def _cut_room(self) -> None:
        """Let the file end where the log ends (not yet durable)."""
        if self._room_end > self._end:
            self._file.truncate(self._end - self._starts[-1])
            self._room_end = self._end

    def sync(self) -> int:
        """Make everything appended durable; returns ``durable_end``. Raises DiskFailed: stop the process."""
        self._check_usable()
        if self._durable_end < self._end:
            try:
                self._file.sync()
            except DiskFailed as failure:
                self._failure = failure
                raise
            self._durable_end = self._end
        return self._durable_end

    def _sync_without_room(self) -> None:
        """As ``sync``, and the file durably ends where the log does."""
        self._check_usable()
        if self._durable_end < self._end or self._room_end > self._end:
            try:
                self._cut_room()
                self._file.sync()
            except DiskFailed as failure:
                self._failure = failure
                raise
            self._durable_end = self._end

    def mark(self) -> None:
        """Write down, without syncing, how far the log is known durable. Called when idle after a sync: it
        lets recovery tell a flipped bit in the last acknowledged record from a torn write. On a full disk it
        is left out."""
        self._check_usable()
        if self._witnessed >= min(self._content_end, self._durable_end):
            return
        with suppress(DiskFull):
            self._write([(MARK, ())])

    def read(self, position: int) -> Record:
        """The record at ``position``, verified. Raises PositionOutside, LogCorrupt."""
        self._check_usable()
        if not self.first <= position < self._end:
            raise PositionOutside(f"position {position} is not within {self.first}..{self._end}")
        start, end = self._bounds(position)
        file = self._file if start == self._starts[-1] else self._open_older(file_name(start))
        frame = read_frame(file, base=start, offset=position - start, end=end - start, seed=self._seed)
        if frame is None:
            raise LogCorrupt(self._disk.path, file.name, position, "no intact record")
        if frame[1] >= KINDS:
            raise PositionOutside(f"position {position} holds a record of the log's own")
        return Record(position, frame[1], frame[4])

    def scan(self, start: int) -> Iterator[Record]:
        """Records from ``start`` (a record's position, or ``first``) to the ``end`` of this moment. Raises
        PositionOutside, LogCorrupt."""
        self._check_usable()
        position, scan_end = start, self._end
        if not self.first <= position <= scan_end:
            raise PositionOutside(f"position {position} is not within {self.first}..{scan_end}")
        return self._scan(position, scan_end)

    def _scan(self, position: int, scan_end: int) -> Iterator[Record]:
        while position < scan_end:
            start, end = self._bounds(position)
            end = min(end, scan_end)
            position = max(position, start + HEADER_BYTES)
            file = self._disk.open(file_name(start))
            try:
                offset = position - start
                frames = read_frames(file, base=start, offset=offset, end=end - start, seed=self._seed)
                for at, kind, _, _, payload, next_position in frames:
                    position = next_position
                    if kind < KINDS:
                        yield Record(at, kind, payload)
            finally:
                file.close()
            if position != end:
                raise LogCorrupt(self._disk.path, file.name, position, "no intact record")

    def _bounds(self, position: int) -> tuple[int, int]:
        """Start and end of the file that holds ``position``."""
        index = bisect_right(self._starts, position)
        if index == 0:
            raise PositionOutside(f"position {position} was trimmed away")
        return self._starts[index - 1], self._starts[index] if index < len(self._starts) else self._end

    def _open_older(self, name: str) -> File:
        if self._older is None or self._older.name != name:
            self._close_older()
            self._older = self._disk.open(name)
        return self._older

    def _close_older(self) -> None:
        if self._older is not None:
            self._older.close()
            self._older = None

    def roll(self) -> None:
        """Close the current file (synced) and begin the next, unless no record was appended to it yet. Raises
        DiskFull with nothing changed."""
        self._sync_without_room()
        if self._content_end <= self._starts[-1] + HEADER_BYTES:
            return
        try:
            made = _create_file(self._disk, self.identity, start=self._end)
        except DiskFailed as failure:
            self._failure = failure
            raise
        self._file.close()
        self._file = made.file
        self._starts.append(self._end)
        start, self._end = self._end, made.end
        self._durable_end = self._room_end = made.end
        self._witnessed = made.witnessed
        if self.tap is not None:
            self.tap(start, [(HEADER_BYTES, [encode_header(self.identity, start)])])

    def trim(self, position: int) -> None:
        """Delete whole files whose records all lie before ``position``. The newest file always stays."""
        self._check_usable()
        try:
            while len(self._starts) > 1 and self._starts[1] <= position:
                self._close_older()
                self._disk.remove(file_name(self._starts[0]))
                self._disk.sync_dir()
                del self._starts[0]
        except DiskFailed as failure:
            self._failure = failure
            raise

    def close(self) -> None:
        """Sync, mark, release the lock. After a failure it only releases. Raises DiskFailed when the sync
        fails."""
        if self._closed:
            return
        try:
            if self._failure is None:
                self.sync()
                self.mark()
                self._sync_without_room()
        finally:
            self._closed = True
            self._close_older()
            self._file.close()
            self._disk.unlock()

    def _check_usable(self) -> None:
        if self._closed:
            raise LogClosed(f"{self._disk.path}: the log is closed")
        if self._failure is not None:
            raise DiskFailed(
                f"{self._disk.path}: refused, since an earlier write or sync failed"
            ) from self._failure


def _create_file(disk: Disk, identity: Identity, *, start: int) -> RecoveredLog:
    """A new file of a log, durable, its header included. Raises DiskFull with nothing left behind."""
    file = disk.open(NEW_FILE, create=True)
    try:
        file.write(0, [encode_header(identity, start)])
        file.sync()
        disk.rename(NEW_FILE, file_name(start))
        disk.sync_dir()
    except DiskFull:
        disk.remove(NEW_FILE)
        raise
    finally:
        file.close()
    end = start + HEADER_BYTES
    return RecoveredLog(
        identity=identity,
        starts=[start],
        file=disk.open(file_name(start)),
        end=end,
        content_end=start,
        witnessed=end,
        torn_bytes=0,
    )
