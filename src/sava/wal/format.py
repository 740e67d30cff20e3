"""Format: how records and files of the log look on disk.

A log is a sequence of bytes numbered from 0 (*positions*), cut into files that are named by the position of
their first byte and follow each other without a gap. Every file begins with a header record of one sector;
then records:

    crc u32 | length u32 | position u64 | durable u64 | incarnation u32 | kind u8 | 3 zeros | payload | zeros

* ``position`` is the record's own: bytes that once were a record elsewhere are not a record here.
* ``durable`` is how far the log was known durable when the record was written: a witness for what lies before
  it. See ``recovery`` for what follows from it.
* ``incarnation`` counts the openings for writing; it may only rise, and only in an OPENED record.
* ``crc`` is CRC-32C over all that follows it, padding included, so that every flipped bit is seen. It is
  seeded with the storage id: records of another log are not records here, and a client that does not know
  the id cannot hide one in a payload. The header record, which tells the id, has the seed 0.
* records begin at multiples of 8, so the search behind a hole looks at every eighth byte only.

The length of a record is believed only within what the file holds and ``MAX_LENGTH``. That is a constant of
the format and not ``max_record_bytes``: else lowering this option would turn acknowledged records into a torn
tail.

The header record's payload is a text line with the format's version, then the identity as JSON, then spaces.
Later versions keep the framing of this one record, so that an old Sava can say "too new" rather than
"corrupt".
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from operator import eq
from typing import Final

import google_crc32c
import msgspec

from sava.wal.disk import File, Readable

Buffers = Sequence[bytes | memoryview]
"""Pieces of one payload; whatever lends its memory will do. A memoryview is copied for its checksum, because
google_crc32c does not take one; ``bytes`` and ``pa.Buffer`` are not."""
Frame = tuple[int, int, int, int, bytes, int]
"""position, kind, durable, incarnation, payload, position of the next record (a plain tuple: recovery makes
millions)."""

VERSION: Final = 1
MAX_LENGTH: Final = 256 << 20
HEADER_BYTES: Final = 512
"""One sector of its own: appends never rewrite the sector that says whose log this is."""

KINDS: Final = 240
"""Kinds below belong to the callers."""
HEADER: Final = 240
OPENED: Final = 241
MARK: Final = 242

NEW_FILE: Final = "log.new"
"""A file is built under this name and renamed when complete: a half-made one never has a log file's
name."""

crc32c: Callable[[int, bytes], int] = google_crc32c.extend

_FRAME = struct.Struct("<IIQQIB3x")
_AFTER_CRC = struct.Struct("<IQQIB3x")
_CRC = struct.Struct("<I")
_PADDING = tuple(b"\0" * n for n in range(8))
_NAME = re.compile(r"log-(\d{20})\.wal")
_HEADER_LINE = re.compile(rb"SAVA-WAL (\d+)\n")
_CHUNK = 1 << 20
_SMALL: Final = 16 << 10
"""Below, one piece is cheaper than several in the call that writes them."""

FRAME_BYTES: Final = _FRAME.size


class Identity(msgspec.Struct, frozen=True):
    """Whose log this is. ``storage_id`` is drawn once when the directory is created: a lost disk is a new
    storage id. ``incarnation`` counts the times this log was opened for writing, durable before the first
    append."""

    owner: str
    storage_id: str
    incarnation: int


class FormatVersion(Exception):
    """An intact header of another version of the format."""

    def __init__(self, version: int) -> None:
        super().__init__(version)
        self.version = version


def file_name(start: int) -> str:
    return f"log-{start:020}.wal"


def file_start(name: str) -> int | None:
    """The position in a log file's name; None when the name is not of this format."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def payload_bytes(payload: Buffers) -> int:
    total = 0
    for part in payload:
        total += len(part) if type(part) is bytes else memoryview(part).nbytes
    return total


def record_bytes(length: int) -> int:
    """Of a record with a payload of this length: where it ends, the next one begins."""
    return (FRAME_BYTES + length + 7) & ~7


def seed_of(storage_id: str) -> int:
    return crc32c(0, storage_id.encode())


def encode_parts(
    kind: int, payload: Buffers, *, position: int, durable: int, incarnation: int, seed: int
) -> tuple[int, Buffers]:
    """The size of a record, and its bytes: in one piece if it is small, else with the payload as it was
    given. Copying a megabyte into fresh memory takes about as long as writing it to a fast disk."""
    length = payload_bytes(payload)
    head = _AFTER_CRC.pack(length, position, durable, incarnation, kind)
    padding = _PADDING[-length % 8]
    crc = crc32c(seed, head)
    for part in payload:
        crc = crc32c(crc, bytes(part) if type(part) is memoryview else part)
    if padding:
        crc = crc32c(crc, padding)
    parts = (_CRC.pack(crc), head, *payload, padding)
    size = FRAME_BYTES + length + len(padding)
    return size, (b"".join(parts),) if size <= _SMALL else parts


def encode(kind: int, payload: Buffers, *, position: int, durable: int, incarnation: int, seed: int) -> bytes:
    """As ``encode_parts``, in one piece."""
    _, parts = encode_parts(
        kind, payload, position=position, durable=durable, incarnation=incarnation, seed=seed
    )
    return b"".join(parts)


def encode_header(identity: Identity, start: int) -> bytes:
    text = b"SAVA-WAL %d\n%s" % (VERSION, msgspec.json.encode(identity))
    room = HEADER_BYTES - FRAME_BYTES
    if len(text) > room:
        raise ValueError(f"owner and storage id are too long for a log's header: {identity}")
    return encode(
        HEADER,
        [text.ljust(room)],
        position=start,
        durable=start,
        incarnation=identity.incarnation,
        seed=0,
    )


def read_header(file: File, start: int) -> Identity | None:
    """The identity that a file's header tells; None when there is no intact header. Raises FormatVersion."""
    frame = read_frame(file, base=start, offset=0, end=file.size(), seed=0)
    if frame is None or frame[1] != HEADER:
        return None
    payload = frame[4]
    line = _HEADER_LINE.match(payload)
    if line is None:
        return None
    if int(line[1]) != VERSION:
        raise FormatVersion(int(line[1]))
    try:
        return msgspec.json.decode(payload[line.end() :], type=Identity)
    except msgspec.DecodeError:
        return None


def read_frame(file: Readable, *, base: int, offset: int, end: int, seed: int) -> Frame | None:
    """The record at ``offset`` of a file that starts at position ``base``; None when there is no valid
    one."""
    return next(read_frames(file, base=base, offset=offset, end=end, seed=seed, chunk=4096), None)


def read_frames(
    file: Readable, *, base: int, offset: int, end: int, seed: int, chunk: int = _CHUNK
) -> Iterator[Frame]:
    """Valid records from ``offset`` up to ``end``, stopping before the first that is not valid."""
    unpack, checksum = _FRAME.unpack_from, crc32c
    data, at = b"", 0
    while offset + FRAME_BYTES <= end:
        if at + FRAME_BYTES > len(data):
            data, at = file.read(offset, min(chunk, end - offset)), 0
            if len(data) < FRAME_BYTES:
                return
        crc, length, position, durable, incarnation, kind = unpack(data, at)
        size = (FRAME_BYTES + length + 7) & ~7
        if position != base + offset or length > MAX_LENGTH or offset + size > end:
            return
        if at + size > len(data):
            data, at = file.read(offset, min(max(chunk, size), end - offset)), 0
            if len(data) < size:
                return
        if checksum(seed, data[at + 4 : at + size]) != crc:
            return
        payload = data[at + FRAME_BYTES : at + FRAME_BYTES + length]
        at += size
        offset += size
        yield position, kind, durable, incarnation, payload, position + size


def read_stream(file: Readable, *, base: int, offset: int, end: int, seed: int) -> Iterator[Frame]:
    """As ``read_frames``, over bytes that have files' headers among the records: a copy of a log."""
    while True:
        for frame in read_frames(file, base=base, offset=offset, end=end, seed=seed):
            yield frame
            offset = frame[5] - base
        header = read_frame(file, base=base, offset=offset, end=end, seed=0)
        if header is None or header[1] != HEADER:
            return
        yield header
        offset = header[5] - base


def find_witness(file: Readable, *, base: int, offset: int, end: int, seed: int) -> int | None:
    """Position of a valid record behind the bad one at ``offset`` that knew the bad one to be durable, or
    None."""
    lost = base + offset
    behind = find_frames(file, base=base, offset=offset + 8, end=end, seed=seed)
    return next((frame[0] for frame in behind if frame[2] > lost), None)


def find_frames(file: Readable, *, base: int, offset: int, end: int, seed: int) -> Iterator[Frame]:
    """Valid records from ``offset`` on, whatever lies between them."""
    while offset + FRAME_BYTES <= end:
        words = file.read(offset + 8, min(_CHUNK, (end - offset - 8) & ~7))
        count = len(words) // 8
        if count == 0:
            return
        # A record at o tells its position, base + o, in its second word: compare each word with that.
        expected = range(base + offset, base + offset + 8 * count, 8)
        are_equal = map(eq, struct.unpack(f"<{count}Q", words[: 8 * count]), expected)
        for position in compress(expected, are_equal):
            frame = read_frame(file, base=base, offset=position - base, end=end, seed=seed)
            if frame is not None:
                yield frame
        offset += 8 * count
