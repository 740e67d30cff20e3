"""What a message of a load carries to be recognized by, at the beginning of its payload:

    0   8   magic, then the run: a number drawn for each run, so that an older run's messages are not counted
    8   8   producer (28 bits), number of keys (32 bits), kind (4 bits)
    16  8   sequence: 0, 1, 2 … of this producer, over all partitions
    24  8   when it was due, in nanoseconds since 1970

Four little-endian words, and never read one by one: a batch's headers are joined and become columns.

When a producer has sent its messages, it announces to consumers what to expect. A GAP names messages that it
could not get acknowledged, which may or may not be there: the sequence is the first of them, and instead of a
time it has their number. The END is its last message, with the next sequence and the number of all such
messages: more than the gaps name, if one of these did not arrive.

The key of a message is its sequence modulo the number of keys, so that it need not be looked at either.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Sequence
from enum import IntEnum
from functools import cache
from itertools import accumulate
from typing import Final, NamedTuple

HEADER_BYTES: Final = 32
MAX_KEYS: Final = 1 << 20
MAX_SEQUENCE: Final = 1 << 48
_MAGIC: Final = int.from_bytes(b"savB", "little")
_FILLING_BYTES: Final = 8 << 20
"""More than a batch has, so that no batch has the same bytes twice."""


class PayloadKind(IntEnum):
    MESSAGE = 0
    END = 1
    GAP = 2


class LoadSource(NamedTuple):
    """Who made a message: the run, and the producer of that run."""

    run: int
    producer: int
    keys: int
    """How many the producer has; 0: none."""


class Arrivals(NamedTuple):
    """Messages of one source and one kind, in the order in which they came."""

    source: LoadSource
    kind: PayloadKind
    sequences: array[int]
    times: array[int]


def draw_run() -> int:
    return random.SystemRandom().getrandbits(32)


@cache
def _filling(size: int) -> bytes:
    """Not worth compressing, like most payloads that are. One for all producers of a process."""
    return random.randbytes(size)


class Maker:
    """Makes the payloads of one producer, of ``low`` to ``high`` bytes each."""

    def __init__(self, source: LoadSource, low: int, high: int) -> None:
        self._first = source.run << 32 | _MAGIC
        self._second = source.producer << 36 | source.keys << 4
        self._keys = source.keys
        self._low, self._high = low - HEADER_BYTES, high - HEADER_BYTES
        self._filling = _filling(max(_FILLING_BYTES, 2 * high))
        self._random = random.Random()
        self._at = self._random.randrange(_FILLING_BYTES)

    def payloads(self, first: int, times: Sequence[int]) -> list[bytes]:
        """The messages from sequence ``first`` on, due at these times."""
        count = len(times)
        headers = self._headers(PayloadKind.MESSAGE, range(first, first + count), times)
        if self._low == self._high:
            sizes = [self._low] * count
        else:
            sizes = self._random.choices(range(self._low, self._high + 1), k=count)
        # Each continues where the one before ended: bytes that came again within a batch would be compressed
        # away, and a compressed load would look like hardly any.
        filling, around = self._filling, len(self._filling) - self._high
        *starts, self._at = accumulate(sizes, lambda at, size: (at + size) % around, initial=self._at)
        places = zip(headers, starts, sizes, strict=True)
        return [header + filling[start : start + size] for header, start, size in places]

    def end(self, sequence: int, unacknowledged: int) -> bytes:
        return self._headers(PayloadKind.END, [sequence], [unacknowledged])[0]

    def gap(self, first: int, count: int) -> bytes:
        return self._headers(PayloadKind.GAP, [first], [count])[0]

    def keys(self, first: int, count: int) -> list[str] | None:
        """Of the messages from sequence ``first`` on."""
        return (
            [f"key-{number % self._keys}" for number in range(first, first + count)] if self._keys else None
        )

    def _headers(self, kind: PayloadKind, sequences: Sequence[int], times: Sequence[int]) -> list[bytes]:
        count = len(times)
        words = array("Q", bytes(count * HEADER_BYTES))
        words[0::4] = array("Q", [self._first]) * count
        words[1::4] = array("Q", [self._second | kind]) * count
        words[2::4] = array("Q", sequences)
        words[3::4] = array("Q", times)
        if sys.byteorder == "big":
            words.byteswap()
        raw = words.tobytes()
        return [raw[at : at + HEADER_BYTES] for at in range(0, len(raw), HEADER_BYTES)]


def arrivals(payloads: Sequence[bytes]) -> tuple[list[Arrivals], int]:
    """The messages by source and kind, and how many are not of a load."""
    if not payloads:
        return [], 0
    own = [payload[:HEADER_BYTES] for payload in payloads if len(payload) >= HEADER_BYTES]
    words = array("Q", b"".join(own))
    if sys.byteorder == "big":
        words.byteswap()
    firsts, seconds, sequences, times = (words[word::4] for word in range(4))
    if own and firsts.count(firsts[0]) == len(own) and seconds.count(seconds[0]) == len(own):
        # As it is nearly always: a batch has one producer.
        found = [_arrivals(firsts[0], seconds[0], sequences, times)]
    else:
        found = _sorted_out(firsts, seconds, sequences, times)
    known = [each for each in found if each is not None]
    return known, len(payloads) - sum(len(each.sequences) for each in known)


def _sorted_out(
    firsts: array[int], seconds: array[int], sequences: array[int], times: array[int]
) -> list[Arrivals | None]:
    rows: dict[tuple[int, int], list[int]] = {}
    for row, pair in enumerate(zip(firsts, seconds, strict=True)):
        rows.setdefault(pair, []).append(row)
    return [
        _arrivals(
            first,
            second,
            array("Q", [sequences[row] for row in chosen]),
            array("Q", [times[row] for row in chosen]),
        )
        for (first, second), chosen in rows.items()
    ]


def _arrivals(first: int, second: int, sequences: array[int], times: array[int]) -> Arrivals | None:
    """None if no load made them."""
    source, kind = LoadSource(first >> 32, second >> 36, second >> 4 & 0xFFFF_FFFF), second & 0xF
    if first & 0xFFFF_FFFF != _MAGIC or source.keys > MAX_KEYS or kind > max(PayloadKind):
        return None
    if max(sequences) >= MAX_SEQUENCE or max(times) >= 1 << 63:
        return None
    return Arrivals(source, PayloadKind(kind), sequences, times)
