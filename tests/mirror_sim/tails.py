"""Tails: what a closed ledger holds of each topic beyond its segments, and what a ledger need not keep.

The simulator's own, for topics that have one ledger at a time; a broker's is ``sava.ledger.tail_recovery``,
which reads real records of several lives, and what a broker trims is in ``sava.storage.journal_index``. So
the simulator shows that the protocol keeps what these rules ask for; that brokers keep the rules is for the
tests of those.

    segments       0 ────────────── 40
    ledger              30 ──────────────── 55 (closed)          the topic goes on at 55
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sava.ledger.protocol.record import LedgerRecord, LedgerState, TailBroken


class Frame(NamedTuple):
    """One batch of a topic in a ledger."""

    topic: int
    epoch: int
    start: int
    """Offsets ``start .. end``."""
    end: int
    position: int


def is_settled(record: LedgerRecord) -> bool:
    """Whether it is known what the ledger holds, for ever: only then may a topic go on elsewhere."""
    return record.state is LedgerState.CLOSED


def tail_of(frames: Iterable[Frame], topic: int, epoch: int, registered: int) -> list[Frame]:
    """The frames of a topic's epoch from its registered end on, in order. Raises TailBroken when one is
    missing: what follows a hole must not be taken for what was in it."""
    tail: list[Frame] = []
    at = registered
    for frame in frames:
        if (frame.topic, frame.epoch) != (topic, epoch) or frame.end <= at:
            continue
        if frame.start != at:
            raise TailBroken(f"topic id {topic}, epoch {epoch}: the ledger has {frame.start} after {at}")
        tail.append(frame)
        at = frame.end
    return tail


def lowest_needed(frames: Iterable[Frame], registered: Mapping[int, int], end: int) -> int:
    """Where the first frame begins that is not in a registered segment of its topic; ``end`` if there is
    none. A topic that is not in ``registered`` has none."""
    needed = (frame.position for frame in frames if frame.end > registered.get(frame.topic, 0))
    return min(needed, default=end)
