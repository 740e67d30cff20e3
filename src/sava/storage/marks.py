"""Marks: what a topic remembers of an origin, and what of that goes into the topic's record.

Beside what was seen, it is where messages are *late*: below others of their origin that came before them. All
others are in the order of their origin, which is what makes it possible to find one without looking through
the whole topic.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np

from sava.storage.seen import Numbers, Seen, is_rising
from sava.storage.types import Late, OriginMark

MAX_RANGES: Final = 4096
"""Of what was seen, of all origins of a topic together: each has its share, and no less than four, as there
are a thousand origins at most. They are part of the topic's record, which may have a megabyte: a range takes
some five bytes of it, and 40 at the very worst."""
MAX_LATE: Final = 2048
"""The same of places of messages that are late."""
LATE_EACH: Final = 64
"""And of one origin: each ack is looked up in those that may have its message."""


class Mark(NamedTuple):
    """Of one origin."""

    seen: Seen
    late: tuple[Late, ...] = ()

    def bounded(self, origins: int) -> Mark:
        """As there is room in a topic that has so many."""
        return Mark(self.seen.trimmed(room_for(origins)), _fewer(self.late, origins))

    def record(self, origin: tuple[str, str], origins: int) -> OriginMark:
        seen, late = self.bounded(origins)
        steps = tuple(np.diff(seen.bounds, prepend=0).tolist())
        return OriginMark(*origin, steps, seen.vague, seen.by, seen.top, late)


def room_for(origins: int) -> int:
    """Ranges of each."""
    return MAX_RANGES // max(origins, 1)


def read_marks(records: Iterable[OriginMark]) -> dict[tuple[str, str], Mark]:
    """As they are in a topic's state."""
    return {
        (each.cluster, each.topic): Mark(
            Seen(np.cumsum(each.steps, dtype=np.int64), each.vague, each.by, each.top), each.late
        )
        for each in records
    }


def is_in_order(seen: Seen, offsets: Numbers) -> bool:
    """Whether messages at these offsets are in order behind those that are here."""
    return bool(offsets[0] >= seen.top) and is_rising(offsets)


def span(offsets: Numbers) -> tuple[int, int]:
    return int(offsets.min()), int(offsets.max()) + 1


def _fewer(late: tuple[Late, ...], origins: int) -> tuple[Late, ...]:
    """Two become one when there are too many: so none gets much larger than those beside it."""
    while len(late) > min(LATE_EACH, MAX_LATE // max(origins, 1)):
        pairs = zip(late[::2], late[1::2], strict=False)
        odd = late[len(late) // 2 * 2 :]
        late = (
            *(Late(a.start, b.end, min(a.lowest, b.lowest), max(a.top, b.top)) for a, b in pairs),
            *odd,
        )
    return late
