"""Tails: what a closed journal holds of each topic beyond its segments, and what a journal need not keep.

A topic goes on elsewhere at the end of what was acknowledged, and only the closed journal knows that:

    segments       0 ────────────── 40
    journal              30 ──────────────── 55 (closed)          the topic goes on at 55

Whoever has the journal's bytes uploads 40..55 as segments and seals the topic at 55. Sealed at 40, or before
the journal was closed, the next owner would give out 40 a second time.

The other way round a frame may leave the journal when a segment that holds it is *registered*: an object that
was put into the store and is not named by anything is nobody's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from sava.mirror.errors import TailBroken
from sava.mirror.record import JournalRecord, JournalState
from sava.mirror.types import JournalId


class Frame(NamedTuple):
    """One batch of a topic in a journal."""

    topic: int
    epoch: int
    start: int
    """Offsets ``start .. end``."""
    end: int
    position: int


def is_settled(record: JournalRecord) -> bool:
    """Whether it is known what the journal holds, for ever: only then may a topic go on elsewhere."""
    return record.state is JournalState.CLOSED


def tail_of(frames: Iterable[Frame], topic: int, epoch: int, registered: int) -> list[Frame]:
    """The frames of a topic's epoch from its registered end on, in order. Raises TailBroken when one is
    missing: what follows a hole must not be taken for what was in it."""
    tail: list[Frame] = []
    at = registered
    for frame in frames:
        if (frame.topic, frame.epoch) != (topic, epoch) or frame.end <= at:
            continue
        if frame.start != at:
            raise TailBroken(f"topic id {topic}, epoch {epoch}: the journal has {frame.start} after {at}")
        tail.append(frame)
        at = frame.end
    return tail


def lowest_needed(frames: Iterable[Frame], registered: Mapping[int, int], end: int) -> int:
    """Where the first frame begins that is not in a registered segment of its topic; ``end`` if there is
    none. A topic that is not in ``registered`` has none."""
    needed = (frame.position for frame in frames if frame.end > registered.get(frame.topic, 0))
    return min(needed, default=end)


def unsettled(journals: Mapping[JournalId, JournalRecord], broker: int) -> list[JournalId]:
    """The journals of a broker that have to be closed before its topics can go on elsewhere."""
    return sorted(
        journal for journal, record in journals.items() if journal.broker == broker and not is_settled(record)
    )
