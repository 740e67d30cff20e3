"""What a message of a load carries to be recognized by, at the beginning of its payload:

    0   8   magic, then the run: a number drawn for each run, so that an older run's messages are not counted
    8   8   producer (28 bits), number of keys (32 bits), flags (4 bits)
    16  8   sequence: 0, 1, 2 … of this producer, over all partitions
    24  8   when it was due, in nanoseconds since 1970

Four little-endian words, and never read one by one: a batch's headers are joined and become columns. A
message with the flag END is its producer's last; instead of a time it has the number of messages that this
producer could not get acknowledged, of which nobody knows whether they are there.

The key of a message is its sequence modulo the number of keys, so that it need not be looked at either.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Sequence
from typing import Final, NamedTuple

HEADER_BYTES: Final = 32
MAX_KEYS: Final = 1 << 20
MAX_PRODUCERS: Final = 1 << 28
_MAGIC: Final = int.from_bytes(b"savB", "little")
_END: Final = 1
_RANDOM_BYTES: Final = 1 << 20


class Source(NamedTuple):
    """Who made a message: the run, and the producer of that run."""

    run: int
    producer: int
    keys: int
    """How many the producer has; 0: none."""


class Stretch(NamedTuple):
    """Messages of one source, in the order in which they came."""

    source: Source
    sequences: array[int]
    times: array[int]
    is_end: bool


def draw_run() -> int:
    return random.SystemRandom().getrandbits(32)


class Maker:
    """Makes the payloads of one producer, of ``low`` to ``high`` bytes each."""

    def __init__(self, source: Source, low: int, high: int) -> None:
        self._first = source.run << 32 | _MAGIC
        self._second = source.producer << 36 | source.keys << 4
        self._keys = source.keys
        self._low, self._high = low - HEADER_BYTES, high - HEADER_BYTES
        # Not worth compressing, like most payloads that are.
        self._filling = random.randbytes(max(high, _RANDOM_BYTES))
        self._random = random.Random()

    def payloads(self, first: int, times: Sequence[int], *, is_end: bool = False) -> list[bytes]:
        """The messages from sequence ``first`` on, due at these times."""
        count = len(times)
        words = array("Q", bytes(count * HEADER_BYTES))
        words[0::4] = array("Q", [self._first]) * count
        words[1::4] = array("Q", [self._second | (_END if is_end else 0)]) * count
        words[2::4] = array("Q", range(first, first + count))
        words[3::4] = array("Q", times)
        if sys.byteorder == "big":
            words.byteswap()
        raw = words.tobytes()
        headers = (raw[at : at + HEADER_BYTES] for at in range(0, len(raw), HEADER_BYTES))
        if self._low == self._high:
            filling = self._filling[: self._low]
            return [header + filling for header in headers]
        sizes = self._random.choices(range(self._low, self._high + 1), k=count)
        return [header + self._filling[:size] for header, size in zip(headers, sizes, strict=True)]

    def keys(self, first: int, count: int) -> list[str] | None:
        """Of the same messages."""
        return (
            [f"key-{number % self._keys}" for number in range(first, first + count)] if self._keys else None
        )


def stretches(payloads: Sequence[bytes]) -> tuple[list[Stretch], int]:
    """The messages by source, and how many were made by somebody else."""
    if not payloads:
        return [], 0
    own = [payload[:HEADER_BYTES] for payload in payloads if len(payload) >= HEADER_BYTES]
    words = array("Q", b"".join(own))
    if sys.byteorder == "big":
        words.byteswap()
    firsts, seconds, sequences, times = (words[word::4] for word in range(4))
    if firsts and firsts.count(firsts[0]) == len(own) and seconds.count(seconds[0]) == len(own):
        # As it is nearly always: a batch has one producer.
        found = [_stretch(firsts[0], seconds[0], sequences, times)] if _is_own(firsts[0]) else []
    else:
        found = _sorted_out(firsts, seconds, sequences, times)
    return found, len(payloads) - sum(len(each.sequences) for each in found)


def _sorted_out(
    firsts: array[int], seconds: array[int], sequences: array[int], times: array[int]
) -> list[Stretch]:
    rows: dict[tuple[int, int], list[int]] = {}
    for row, pair in enumerate(zip(firsts, seconds, strict=True)):
        if _is_own(pair[0]):
            rows.setdefault(pair, []).append(row)
    return [
        _stretch(
            first,
            second,
            array("Q", [sequences[row] for row in chosen]),
            array("Q", [times[row] for row in chosen]),
        )
        for (first, second), chosen in rows.items()
    ]


def _is_own(first: int) -> bool:
    return first & 0xFFFF_FFFF == _MAGIC


def _stretch(first: int, second: int, sequences: array[int], times: array[int]) -> Stretch:
    source = Source(first >> 32, second >> 36, second >> 4 & 0xFFFF_FFFF)
    return Stretch(source, sequences, times, bool(second & _END))
