"""Header: the 88 bytes before the columns, and the part of them that belongs to the broker.

    prefix, rewritten by the broker    magic | version | length | crc | topic id | epoch | base offset
    sealed by the crc                  count | sizes | flags | layout | producer id | sequence | times | body

A broker that takes a batch from a client writes 40 new bytes and passes the rest on as it came: nothing is
decoded, re-encoded or summed again. The length stands outside the checksum because it says what the checksum
covers; a wrong one covers other bytes and fails. The whole layout with its reasons is in
``docs/design/record-batch.md``.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Final

import msgspec

from sava.records.errors import BatchCorrupt, BatchTooLarge, UnsupportedBatch

Buffer = bytes | bytearray | memoryview

MAGIC: Final = b"SAVB"
VERSION: Final = 1

MAX_BATCH_BYTES: Final = 64 << 20
"""Of a whole batch, of its body before compression, and of each constant column written out. It bounds what a
hostile batch can make a reader allocate, and keeps all positions inside a batch within int32."""
MAX_COUNT: Final = 1 << 20

UNASSIGNED: Final = -1
"""The base offset of a batch that no broker has taken yet."""

_PREFIX = struct.Struct("<4sB3xIIqqq")
_SEALED = struct.Struct("<IIHHIqqqq")
_WHOLE = struct.Struct("<4sB3sIIqqqIIHHIqqqq")

PREFIX_BYTES: Final = _PREFIX.size
HEADER_BYTES: Final = _WHOLE.size

_CODEC_BITS: Final = 0b11
_LAYOUT_END: Final = 1 << 18
"""Two bits for each of nine columns."""
INT64_END: Final = 1 << 63


class Compression(IntEnum):
    """How the body is compressed."""

    NONE = 0
    LZ4 = 1
    ZSTD = 2


_CODECS: Final = tuple(Compression)


class Header(msgspec.Struct, frozen=True, gc=False):
    """All that is known of a batch without touching its columns."""

    length: int
    crc: int
    topic_id: int
    epoch: int
    base_offset: int
    count: int
    body_size: int
    codec: Compression
    layout: int
    producer_id: int
    base_sequence: int
    min_publish_time: int
    max_publish_time: int

    @property
    def is_assigned(self) -> bool:
        return self.base_offset != UNASSIGNED

    @property
    def next_offset(self) -> int:
        """One past the last offset. Of an unassigned batch there is none, so this is UNASSIGNED too."""
        return self.base_offset + self.count if self.base_offset != UNASSIGNED else UNASSIGNED

    @property
    def next_sequence(self) -> int:
        return self.base_sequence + self.count

    def replace(self, **changes: int) -> Header:
        return msgspec.structs.replace(self, **changes)

    def prefix(self) -> bytes:
        return _PREFIX.pack(
            MAGIC, VERSION, self.length, self.crc, self.topic_id, self.epoch, self.base_offset
        )

    def sealed(self) -> bytes:
        """The part that the checksum covers."""
        return _SEALED.pack(
            self.count,
            self.body_size,
            self.codec,
            0,
            self.layout,
            self.producer_id,
            self.base_sequence,
            self.min_publish_time,
            self.max_publish_time,
        )


def peek_header(buffer: Buffer, position: int = 0) -> Header:
    """The header of the batch that begins at ``position``, checked by itself: the body need not be there
    yet."""
    try:
        fields = _WHOLE.unpack_from(buffer, position)
    except struct.error:
        raise BatchCorrupt(f"{len(buffer) - position} bytes are fewer than a header has") from None
    magic, version, gap, length, crc, topic_id, epoch, base_offset, count, body_size = fields[:10]
    flags, reserved, layout, producer_id, base_sequence, min_time, max_time = fields[10:]
    if magic != MAGIC:
        raise BatchCorrupt(f"begins with {magic!r}")
    if version != VERSION:
        raise UnsupportedBatch("version", version)
    codec = flags & _CODEC_BITS
    if flags != codec or codec >= len(_CODECS):
        raise UnsupportedBatch("flags", flags)
    if reserved or gap != b"\0\0\0":
        raise UnsupportedBatch("use of reserved bytes", reserved or int.from_bytes(gap, "little"))
    if layout >= _LAYOUT_END:
        raise UnsupportedBatch("layout", layout)
    header = Header(
        length,
        crc,
        topic_id,
        epoch,
        base_offset,
        count,
        body_size,
        _CODECS[codec],
        layout,
        producer_id,
        base_sequence,
        min_time,
        max_time,
    )
    check_header(header)
    return header


def check_header(header: Header) -> None:
    """Raise unless sizes are within the limits, numbers within their ranges, and none contradicts another."""
    check_sizes(header.count, header.length, header.body_size)
    body_bytes = header.length - HEADER_BYTES
    if body_bytes < 0 or (header.codec is Compression.NONE and body_bytes != header.body_size):
        raise BatchCorrupt(f"a length of {header.length} does not go with a body of {header.body_size}")
    if header.min_publish_time > header.max_publish_time:
        raise BatchCorrupt("the earliest publish time is after the latest")
    if header.topic_id < 0 or header.epoch < 0 or header.producer_id < 0 or header.base_sequence < 0:
        raise BatchCorrupt("a negative topic, epoch, producer or sequence")
    if header.base_offset < UNASSIGNED:
        raise BatchCorrupt(f"base offset {header.base_offset}")
    last = INT64_END - header.count
    if header.base_offset > last or header.base_sequence > last:
        raise BatchCorrupt("offsets or sequences pass the end of int64")


def check_sizes(count: int, length: int, body_size: int) -> None:
    if not 0 < count <= MAX_COUNT:
        if count <= 0:
            raise BatchCorrupt("holds no message")
        raise BatchTooLarge("the number of messages", count, MAX_COUNT)
    if length > MAX_BATCH_BYTES:
        raise BatchTooLarge("the length", length, MAX_BATCH_BYTES)
    if body_size > MAX_BATCH_BYTES:
        raise BatchTooLarge("the uncompressed body", body_size, MAX_BATCH_BYTES)
