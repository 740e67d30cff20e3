"""Single: the batch of one plain message, without Arrow.

A message that is sent alone finds caches and branch predictor cold: the caller waits for it. Arrow is built
for many rows, and for one it touches so much code that making and checking the batch takes several times as
long as in a loop. So the one shape that such messages have (a payload, one publish time, perhaps the
producer's name, nothing compressed) is written and checked here by hand.

There is still one place that says what is right: ``encode`` gives the bytes that ``encoder`` would, and
``is_sound`` says yes only where ``decoder`` would find nothing wrong. For whatever else they decline, and the
caller goes the general way, which also knows the errors.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

import google_crc32c

from sava.records.columns import PAYLOAD, PRODUCER, PUBLISH_TIME, Encoding
from sava.records.header import HEADER_BYTES, INT64_END, UNASSIGNED, Compression, Header

SMALL: Final = 16 << 10
"""Bytes of payload up to which copies cost less than what avoids them."""

_UNNAMED: Final = Encoding.DENSE << 2 * PAYLOAD | Encoding.CONSTANT << 2 * PUBLISH_TIME
_NAMED: Final = _UNNAMED | Encoding.CONSTANT << 2 * PRODUCER

_OFFSETS = struct.Struct("<ii")
_TIME = struct.Struct("<q")
_PADDING: Final = tuple(bytes(n) for n in range(8))


def encode(
    payload: bytes, *, publish_time: int, producer: str, producer_id: int, base_sequence: int
) -> tuple[Header, bytes] | None:
    """Header and bytes of the batch; None if the general encoder has to judge."""
    size = len(payload)
    if (
        size > SMALL
        or not 0 <= publish_time < INT64_END
        or not 0 <= producer_id < INT64_END
        or not 0 <= base_sequence < INT64_END - 1
    ):
        return None
    name = _producer_column(producer)
    if name is None:
        return None
    padding = _PADDING[-size & 7]
    body_size = 16 + size + len(padding) + len(name)
    unsealed = Header(
        HEADER_BYTES + body_size,
        0,
        0,
        0,
        UNASSIGNED,
        1,
        body_size,
        Compression.NONE,
        _NAMED,
        producer_id,
        base_sequence,
        publish_time,
        publish_time,
    )
    rest = b"".join(
        (unsealed.sealed(), _OFFSETS.pack(0, size), payload, padding, _TIME.pack(publish_time), name)
    )
    header = unsealed.replace(crc=google_crc32c.value(rest))
    return header, header.prefix() + rest


@lru_cache(maxsize=1024)
def _producer_column(producer: str) -> bytes | None:
    try:
        name = producer.encode()
    except UnicodeEncodeError:
        return None
    if len(name) > SMALL:
        return None
    return b"".join((_OFFSETS.pack(0, len(name)), name, _PADDING[-len(name) & 7]))


def is_sound(data: bytes | memoryview, header: Header) -> bool:
    """Whether this is a batch of one plain message, and its body is right. No: ask the decoder."""
    if header.count != 1 or header.codec is not Compression.NONE or header.layout not in (_NAMED, _UNNAMED):
        return False
    try:
        first, size = _OFFSETS.unpack_from(data, HEADER_BYTES)
        end = _end_of(HEADER_BYTES, size)
        (publish_time,) = _TIME.unpack_from(data, end)
        end += 8
        if first or size < 0 or not header.min_publish_time == header.max_publish_time == publish_time:
            return False
        if header.layout == _NAMED:
            start = end
            first, size = _OFFSETS.unpack_from(data, start)
            end = _end_of(start, size)
            if first or size < 0:
                return False
            str(data[start + 8 : start + 8 + size], "utf-8")
    except (struct.error, UnicodeDecodeError):
        return False
    return end == len(data)


def is_of(data: bytes | memoryview, header: Header, producer: str) -> bool:
    """Whether a sound batch names this producer. No: it names another, or has more than one message."""
    if header.count != 1 or header.codec is not Compression.NONE or header.layout != _NAMED:
        return False
    _, size = _OFFSETS.unpack_from(data, HEADER_BYTES)
    return data[_end_of(HEADER_BYTES, size) + 8 :] == _producer_column(producer)


def _end_of(start: int, size: int) -> int:
    """Of a column with one value of this size, its offsets and its padding."""
    return start + 8 + (size + 7 & ~7)
