"""Recovery: what a directory still holds after any crash, and which loss must stop the node.

A crash may lose or reorder anything that was not synced, down to parts of a sector. So a bad record is
ordinary when it was never acknowledged, and a broken promise when it was. Cutting off in both cases loses
acknowledged data without a word (a Raft voter that forgets an entry it acknowledged breaks quorum
intersection); refusing in both cases makes every power cut an outage. Witnesses tell the two apart:
each record carries how far the log was known durable when it was written.

    append A, B   A and B carry durable = 0
    sync          acknowledged: durable is now the end of B
    append C, D   C and D carry durable = end of B
    power cut     the sectors of C are lost, those of D are not

Found: A, B, (bad), D. D is valid but knows only of A and B: C was never acknowledged, the log ends after B.
If instead B is bad, then D (or C) proves that B was acknowledged: corrupt. If the *last* synced batch is
damaged, no later batch is a witness; therefore an idle writer leaves a mark, a small unsynced record that
carries the new durable end.

What makes this sound:

* a file is synced before its successor exists, so a bad record in any file but the last is corruption;
* a file is built under another name, synced, and then renamed: a log file without an intact header is
  corruption, and a crash while one is created leaves nothing but a name that is removed here;
* a torn tail is cut and the cut is synced *before* anything is written behind it. Otherwise: A is lost and B
  survives, the next start writes something of A's size over A and crashes before the truncation reached the
  disk; now B follows it and comes back to life without A. (The incarnation in each record is a second lock on
  this door.)
* what was read back may live in the page cache only, and after a failed fsync the kernel may hold it for
  clean: the part beyond the last witness is written once more before the sync that opens the log
  (``Log.open``).

Nothing is allocated by a length that was not checked against the file, and files are read in large sequential
chunks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from sava.wal.disk import Disk, File
from sava.wal.errors import ForeignLog, LogCorrupt, UnsupportedFormat
from sava.wal.format import (
    HEADER_BYTES,
    KINDS,
    NEW_FILE,
    OPENED,
    FormatVersion,
    Identity,
    file_name,
    file_start,
    find_witness,
    read_frames,
    read_header,
    seed_of,
)

_CHUNK = 1 << 20


class Record(msgspec.Struct, frozen=True):
    position: int
    """Where the record begins. Positions only grow, over files and restarts, and never name two acknowledged
    records."""
    kind: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveredLog:
    """What was found. ``file`` is the last file, open, still with its torn tail and its room, if there is
    any (from ``end`` on)."""

    identity: Identity
    starts: list[int]
    file: File
    end: int
    content_end: int
    """End of the last record that a caller wrote."""
    witnessed: int
    """How far the files prove the log durable: a file's header by its name, the rest by what its records
    tell."""
    torn_bytes: int


def recover(disk: Disk, *, owner: str, replay: Callable[[Record], None] | None) -> RecoveredLog | None:
    """Read the whole log; None when there is none yet. Changes nothing but the remains of a half-made file.

    Raises LogCorrupt, ForeignLog, UnsupportedFormat."""
    starts = _find_files(disk)
    if not starts:
        return None
    walk = _Walk(disk, owner, replay)
    for start in starts[:-1]:
        file = disk.open(file_name(start))
        try:
            walk.read_file(file, start)
            if walk.end - start != file.size():
                raise LogCorrupt(disk.path, file.name, walk.end, "a bad record in a file that was closed")
        finally:
            file.close()
    last = disk.open(file_name(starts[-1]))
    try:
        walk.read_file(last, starts[-1])
        torn_bytes = walk.judge_tail(last, starts[-1])
    except BaseException:
        last.close()
        raise
    assert walk.identity is not None
    return RecoveredLog(
        identity=walk.identity,
        starts=starts,
        file=last,
        end=walk.end,
        content_end=walk.content_end,
        witnessed=walk.witnessed,
        torn_bytes=torn_bytes,
    )


def _find_files(disk: Disk) -> list[int]:
    starts = []
    for name in disk.list():
        start = file_start(name)
        if start is not None:
            starts.append(start)
        elif name.startswith("log-"):
            raise UnsupportedFormat(disk.path, name, "this looks like a log file of another version of Sava")
        elif name == NEW_FILE:
            disk.remove(name)
    return sorted(starts)


@dataclass(slots=True)
class _Walk:
    """The state carried from file to file while the log is read."""

    disk: Disk
    owner: str
    replay: Callable[[Record], None] | None
    identity: Identity | None = None
    end: int = 0
    content_end: int = 0
    witnessed: int = 0
    _seed: int = field(default=0, init=False)

    def read_file(self, file: File, start: int) -> None:
        """Take the file's valid records, up to the first that is not."""
        identity = self._check_header(file, start)
        replay, end, incarnation = self.replay, start + HEADER_BYTES, identity.incarnation
        witnessed, content_end = end, self.content_end
        frames = read_frames(file, base=start, offset=HEADER_BYTES, end=file.size(), seed=self._seed)
        for position, kind, durable, written_by, payload, next_position in frames:
            if written_by != incarnation:
                if kind != OPENED or written_by != incarnation + 1:
                    break
                incarnation = written_by
            end = next_position
            witnessed = max(witnessed, durable)
            if kind < KINDS:
                content_end = end
                if replay is not None:
                    replay(Record(position, kind, payload))
        self.identity = msgspec.structs.replace(identity, incarnation=incarnation)
        self.end, self.witnessed, self.content_end = end, witnessed, content_end

    def _check_header(self, file: File, start: int) -> Identity:
        path, before = self.disk.path, self.identity
        try:
            found = read_header(file, start)
        except FormatVersion as other:
            raise UnsupportedFormat(path, file.name, f"format version {other.version}") from other
        if found is None:
            raise LogCorrupt(path, file.name, start, "no intact file header")
        if found.owner != self.owner:
            raise ForeignLog(path, found=found.owner, expected=self.owner)
        if before is None:
            self._seed = seed_of(found.storage_id)
            return found
        if found.storage_id != before.storage_id:
            raise ForeignLog(
                f"{path}/{file.name}",
                found=f"{found.owner} (storage {found.storage_id})",
                expected=f"{before.owner} (storage {before.storage_id})",
            )
        if start != self.end:
            raise LogCorrupt(
                path, file.name, self.end, f"files are missing before this one, which starts at {start},"
            )
        if found.incarnation != before.incarnation:
            raise LogCorrupt(
                path, file.name, start, "a file of another time (incarnations do not follow each other)"
            )
        return found

    def judge_tail(self, file: File, start: int) -> int:
        """Bytes of torn tail behind the last valid record of the last file; zeros at its end are room that
        was not used yet. Raises LogCorrupt when what is bad had been acknowledged."""
        size = file.size()
        witness = find_witness(file, base=start, offset=self.end - start, end=size, seed=self._seed)
        if witness is not None:
            raise LogCorrupt(
                self.disk.path,
                file.name,
                self.end,
                f"a bad record (the record at {witness} proves it was durable)",
            )
        return _written_bytes(file, self.end - start, size)


def _written_bytes(file: File, offset: int, end: int) -> int:
    """How much of the file from ``offset`` on is there without the zeros at its end, to the next multiple of
    8, since a record may end in zeros itself."""
    while end > offset:
        at = max(offset, end - _CHUNK)
        if written := file.read(at, end - at).rstrip(b"\0"):
            return min(at + len(written) + 7 & ~7, end) - offset
        end = at
    return 0
