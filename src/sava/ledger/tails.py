"""Tails: which frames of a disk's closed journals are a topic's history beyond its segments.

A disk may have had several lives since a topic was last uploaded, each with a journal of its own; all of them
are read in order, as the owner would at a restart. Frames that follow one another without a gap are the tail.

    segments     0 ─────── 40
    journal 7         30 ─────── 55   epoch 3
    journal 9                    55 ── 60   epoch 5                        the topic ends at 60

**A later epoch corrects an earlier one.** A mirror may have synced what the owner's own disk had not, so that
a journal is closed further than its owner's disk goes. Nothing there was acknowledged (the own disk is always
among those that it takes). An owner that came back took the topic at the end of its own disk, and its offsets
from there on are the ones that count:

    journal 7    … 55 56 57      epoch 3, closed at 57; the owner's disk had only up to 55
    journal 9         55' 56'    epoch 5                                    the topic has 55' and 56'

An owner may also have fetched what its disk lacked, and have written it once more, unchanged, at the
beginning of its next journal; the second copy adds nothing. A note that disowns (``storage.journal``) takes
away frames that were given up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from sava.errors import SavaError
from sava.ledger.protocol import JournalId
from sava.ledger.protocol.errors import TailBroken
from sava.records import BatchCorrupt, Header, UnsupportedBatch, peek_header
from sava.storage.journal_index import BATCH, DISOWNED, unpack_note
from sava.storage.types import TopicKey, TopicState
from sava.wal import Record


class Frame(NamedTuple):
    """One batch in a journal."""

    start: int
    """Offsets ``start .. end``."""
    end: int
    epoch: int
    journal: JournalId
    position: int
    size: int


class Tail:
    """Of one topic whose state is not settled and names the disk."""

    def __init__(self, topic: TopicKey, state: TopicState) -> None:
        self.topic = topic
        self.state = state
        self._frames: list[Frame] = []

    def take(self, header: Header, journal: JournalId, position: int) -> None:
        """The next frame in the order of the journals. Raises TailBroken."""
        if header.epoch > self.state.epoch:
            raise TailBroken(
                f"topic {self.topic.path}: journal {journal} has frames of epoch {header.epoch} at "
                f"{position}, and the topic is at {self.state.epoch}"
            )
        last = self._frames[-1] if self._frames else None
        if last is not None and header.base_offset < last.end:
            if self._has(header):
                return
            if header.epoch <= last.epoch:
                raise TailBroken(
                    f"topic {self.topic.path}: journal {journal} has offset {header.base_offset} at "
                    f"{position}, after {last.end} of the same epoch {last.epoch}"
                )
            self.disown(header.base_offset)
        if header.next_offset > self.state.end:
            self._frames.append(
                Frame(header.base_offset, header.next_offset, header.epoch, journal, position, header.length)
            )

    def _has(self, header: Header) -> bool:
        """Whether this very frame was taken before: an owner whose disk had lost what others had synced
        writes it down once more."""
        for frame in reversed(self._frames):
            if frame.start <= header.base_offset:
                return (frame.start, frame.end, frame.epoch) == (
                    header.base_offset,
                    header.next_offset,
                    header.epoch,
                )
        return False

    def disown(self, offset: int) -> None:
        """What was taken from the offset on is not history."""
        while self._frames and self._frames[-1].end > offset:
            del self._frames[-1]

    @property
    def frames(self) -> Iterator[Frame]:
        """Without a gap from the registered end on."""
        at = self.state.end
        for frame in self._frames:
            if frame.start > at:
                return
            yield frame
            at = frame.end

    @property
    def end(self) -> int:
        return max((frame.end for frame in self.frames), default=self.state.end)

    @property
    def behind_a_hole(self) -> int:
        """The end of what follows a gap, and so cannot be given to anybody; 0: there is none."""
        return self._frames[-1].end if self._frames and self._frames[-1].start > self.end else 0


class Tails:
    """Of all unsettled topics of a disk. Owned by one task."""

    def __init__(self, states: dict[TopicKey, TopicState]) -> None:
        self.by_id = {topic.topic_id: Tail(topic, state) for topic, state in states.items()}
        self.broken: dict[int, TailBroken] = {}
        """Topics whose frames contradict one another: to be looked at by somebody."""

    def take(self, record: Record, journal: JournalId) -> None:
        if record.kind == BATCH:
            try:
                header = peek_header(record.payload)
            except (BatchCorrupt, UnsupportedBatch) as error:
                self._unreadable(journal, record.position, error)
                return
            tail = self.by_id.get(header.topic_id)
            if tail is not None and header.topic_id not in self.broken:
                try:
                    tail.take(header, journal, record.position)
                except TailBroken as error:
                    self.broken[header.topic_id] = error
        elif record.kind == DISOWNED:
            topic_id, offset = unpack_note(record.payload)
            if topic_id in self.by_id:
                self.by_id[topic_id].disown(offset)

    def _unreadable(self, journal: JournalId, position: int, error: SavaError) -> None:
        """The frame may be the last one of any of the topics. A topic that were sealed without it would lose
        an acknowledged message, and give its offset out again."""
        for topic_id, tail in self.by_id.items():
            broken = TailBroken(
                f"topic {tail.topic.path}: the header of the frame in journal {journal} at {position} cannot "
                f"be read ({error}), so it may be the topic's; a broker of the version that wrote it can "
                "read it"
            )
            self.broken.setdefault(topic_id, broken)
