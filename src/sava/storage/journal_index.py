"""JournalIndex: where in the journal the batches of a topic are.

In memory only, rebuilt by the scan that recovery makes anyway. 28 bytes for a batch, in arrays: a journal
full of small batches holds millions, and an object for each would cost ten times that.

What a journal holds of one topic is a list of *runs*. A run is gapless and belongs to one epoch; a new one
begins when this broker gets the topic again, perhaps after others had it:

    epoch 1 here   0..22        run (epoch 1, 0..22)
    epoch 2 elsewhere  22..30
    epoch 3 here   30..         run (epoch 3, 30..)

Runs rise in epoch and in offset. Anything else in the journal is a broken promise (JournalCorrupt), because
the journal writes no frame behind one that it refused, and disowns what a seal has cut off before it takes
the topic again (see ``journal``).

**Holdings.** What a journal holds of each topic, by the headers of its frames: where they are, and what they
tell of the topic's producers. In memory, and found again by a scan (``replay``).

**Replay.** What a scan of the journal's records says of its topics.

A frame is a record batch with its broker-assigned part, or one of two notes:

    kind       payload                what it says
    BATCH      record batch           these messages are part of the topic
    RELEASED   topic id, offset       what stands before this record, below the offset, is in segments
    DISOWNED   topic id, offset       what stands before this record, from the offset on, is not history
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from sava.errors import CallerError, HostError
from sava.records import Header, peek_header
from sava.storage.producers import ProducerTable
from sava.wal import LogClosed, Record


class JournalCorrupt(HostError):
    """The journal holds what it can never have written."""


class FrameDamaged(HostError):
    """A frame of a topic cannot be read back from this broker's disk. The topic can be stored, and handed
    over, only up to the frame.

    Messages before and behind it can be read, and other topics are not concerned."""

    def __init__(self, topic: str, start: int, end: int, position: int) -> None:
        super().__init__(
            f"topic {topic}: offsets {start}..{end} cannot be read: this broker's journal has no intact "
            f"record at position {position}. If `sava ledgers describe` shows mirrors, they have it: stop "
            "this broker, move its journal directory away and start it again"
        )
        self.topic = topic
        self.start = start
        self.end = end
        self.position = position

    def of(self, topic: str) -> FrameDamaged:
        """The same, with the topic's name instead of its id."""
        return FrameDamaged(topic, self.start, self.end, self.position)


class Span(NamedTuple):
    """One batch: its offset, where its frame is, and how long it is."""

    base_offset: int
    position: int
    length: int


class _Run:
    __slots__ = ("bases", "end", "epoch", "lengths", "positions", "times")

    def __init__(self, epoch: int, start: int) -> None:
        self.epoch = epoch
        self.bases = array("q")
        self.positions = array("q")
        self.lengths = array("I")
        self.times = array("q")
        """Latest publish time of each batch."""
        self.end = start

    def cut(self, first: int, stop: int) -> None:
        """Keep the batches ``first .. stop``."""
        self.end = self.bases[stop] if stop < len(self.bases) else self.end
        for column in (self.bases, self.positions, self.lengths, self.times):
            del column[stop:], column[:first]


class JournalIndex:
    """The batches of one topic. Owned by the event loop (while recovering, by the thread that scans)."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def lowest_position(self) -> int | None:
        return self._runs[0].positions[0] if self._runs else None

    @property
    def start(self) -> int:
        """The first offset held; of an empty index there is none, and this is 0."""
        return self._runs[0].bases[0] if self._runs else 0

    @property
    def epoch(self) -> int:
        """The latest of the batches held; 0 if there is none."""
        return self._runs[-1].epoch if self._runs else 0

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The offsets held, gapless ranges from first to end."""
        merged: list[tuple[int, int]] = []
        for run in self._runs:
            if merged and merged[-1][1] == run.bases[0]:
                merged[-1] = (merged[-1][0], run.end)
            else:
                merged.append((run.bases[0], run.end))
        return merged

    def add(self, header: Header, position: int) -> None:
        """A durable batch. Raises JournalCorrupt unless it continues a run or begins a later one."""
        base_offset = header.base_offset
        run = self._runs[-1] if self._runs else None
        if run is None or run.epoch != header.epoch or run.end != base_offset:
            if run is not None and (header.epoch <= run.epoch or base_offset < run.end):
                raise JournalCorrupt(
                    f"topic {header.topic_id}: the frame at {position} holds offset {base_offset} of "
                    f"epoch {header.epoch}, after {run.end} of epoch {run.epoch}"
                )
            run = _Run(header.epoch, base_offset)
            self._runs.append(run)
        run.bases.append(base_offset)
        run.positions.append(position)
        run.lengths.append(header.length)
        run.times.append(header.max_publish_time)
        run.end = base_offset + header.count

    def spans(self, offset: int, max_bytes: int) -> list[Span]:
        """Batches from the one that holds ``offset`` on, without a gap, up to ``max_bytes`` but at least one;
        none if the offset is not held."""
        found: list[Span] = []
        left = max_bytes
        for run in self._runs:
            if run.end <= offset:
                continue
            if run.bases[0] > offset:
                break
            index = bisect_right(run.bases, offset) - 1
            for i in range(index, len(run.bases)):
                if found and run.lengths[i] > left:
                    return found
                left -= run.lengths[i]
                found.append(Span(run.bases[i], run.positions[i], run.lengths[i]))
            offset = run.end
        return found

    def bytes_from(self, offset: int) -> int:
        """How much is held from the offset on."""
        total = 0
        for run in self._runs:
            if run.end > offset:
                total += sum(run.lengths[max(0, bisect_right(run.bases, offset) - 1) :])
        return total

    def not_before(self, publish_time: int, offset: int) -> Iterator[int]:
        """Base offsets of the batches that end behind ``offset`` and may hold a message of this publish time
        or later."""
        for run in self._runs:
            if run.end > offset:
                for i in range(max(0, bisect_right(run.bases, offset) - 1), len(run.bases)):
                    if run.times[i] >= publish_time:
                        yield run.bases[i]

    def drop_before(self, offset: int) -> None:
        """Forget the batches that end at or before the offset."""
        while self._runs and self._runs[0].end <= offset:
            del self._runs[0]
        if self._runs:
            run = self._runs[0]
            run.cut(max(0, bisect_right(run.bases, offset) - 1), len(run.bases))

    def drop_from(self, offset: int) -> None:
        """Forget the batches that end behind the offset."""
        for run in self._runs:
            if run.end > offset:
                run.cut(0, max(0, bisect_right(run.bases, offset) - 1))
        self._runs = [run for run in self._runs if run.bases]


# -- all topics ------------------------------------------------------------------------------------


class Holdings:
    """The indexes and producers of all topics. Owned by one thread at a time: that of a scan, then that of
    the journal's event loop."""

    def __init__(self) -> None:
        self._topics: dict[int, JournalIndex] = {}
        """None of them is empty."""
        self._producers: dict[int, ProducerTable] = {}

    def __bool__(self) -> bool:
        return bool(self._topics)

    @property
    def topic_ids(self) -> list[int]:
        return list(self._topics)

    def index(self, topic_id: int) -> JournalIndex:
        """Not to be changed."""
        return self._topics.get(topic_id) or JournalIndex()

    @property
    def lowest_position(self) -> int | None:
        """The position of the first frame that a topic needs."""
        return min(
            (position for index in self._topics.values() if (position := index.lowest_position) is not None),
            default=None,
        )

    # -- frames ------------------------------------------------------------------------------

    def add(self, header: Header, position: int) -> None:
        """Raises JournalCorrupt."""
        index = self._topics.get(header.topic_id)
        if index is not None:
            index.add(header, position)
        else:
            index = JournalIndex()
            index.add(header, position)
            self._topics[header.topic_id] = index

    def drop_before(self, topic_id: int, offset: int) -> None:
        """What is below the offset is in registered segments."""
        index = self._topics.get(topic_id)
        if index is not None:
            index.drop_before(offset)
            self._release_empty(topic_id, index)

    def drop_from(self, topic_id: int, offset: int) -> None:
        """What is held from the offset on is not history, and neither is what it says of producers."""
        index = self._topics.get(topic_id)
        if index is not None:
            index.drop_from(offset)
            self._producers.pop(topic_id, None)
            self._release_empty(topic_id, index)

    def _release_empty(self, topic_id: int, index: JournalIndex) -> None:
        if not index:
            del self._topics[topic_id]
            self._producers.pop(topic_id, None)

    # -- producers ---------------------------------------------------------------------------

    def follow(self, header: Header) -> None:
        """A frame of a topic that is not open says this of its producer."""
        table = self._producers.get(header.topic_id)
        if table is None:
            table = self._producers[header.topic_id] = ProducerTable()
        table.follow(header)

    def take_producers(self, topic_id: int) -> ProducerTable:
        """What the frames of a topic that is not open tell of its producers."""
        return self._producers.pop(topic_id, None) or ProducerTable()

    def keep_producers(self, topic_id: int, table: ProducerTable) -> None:
        """The topic is closed: keep this for the next opening, which cannot learn it from the headers of
        frames without reading them again."""
        if topic_id in self._topics:
            self._producers[topic_id] = table


# -- found by a scan -------------------------------------------------------------------------------


BATCH: Final = 1
RELEASED: Final = 2
DISOWNED: Final = 3

NOTE: Final = struct.Struct("<qq")


def unpack_note(payload: bytes) -> tuple[int, int]:
    """Topic id and offset of a RELEASED or DISOWNED record."""
    topic_id, offset = NOTE.unpack(payload)
    return topic_id, offset


class JournalReplay:
    """What the recovery scan finds. Only headers are looked at: ``wal`` has checked the bytes."""

    def __init__(self, uncommitted_tails: Sequence[tuple[int, int]] = ()) -> None:
        """``uncommitted_tails``: from where to where the log holds frames that were never acknowledged, and
        are not history: the end of their generation of the journal was decided without them."""
        self._uncommitted_tails = uncommitted_tails
        self.holdings = Holdings()
        self.is_unwanted = False
        """Set by the event loop: no caller waits for the scan any more."""

    def take(self, record: Record) -> None:
        if self.is_unwanted:
            raise LogClosed("no caller waits for the journal any more")
        if record.kind == BATCH:
            if any(start <= record.position < end for start, end in self._uncommitted_tails):
                return
            try:
                header = peek_header(record.payload)
            except CallerError as error:  # no client is to blame for what stands in our own journal
                raise JournalCorrupt(f"the frame at {record.position}: {error}") from error
            self.holdings.add(header, record.position)
            self.holdings.follow(header)
        elif record.kind == RELEASED:
            self.holdings.drop_before(*unpack_note(record.payload))
        elif record.kind == DISOWNED:
            self.holdings.drop_from(*unpack_note(record.payload))
        else:
            raise JournalCorrupt(f"the frame at {record.position} is of a kind unknown here: {record.kind}")
