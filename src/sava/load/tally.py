"""The tally of a load: the messages that came, against the messages that were sent.

Each message has its producer's sequence. So the tally knows, without keeping messages,

* **duplicates**: a sequence that had come before;
* **reordered**: a first arrival behind a later message of the same producer in the same lane. A lane is where
  the order is promised: a partition, or one consumer's share of it, or one key of it;
* **lost**: a sequence that never came, below the end that the producer reported, and that was owed;
* **unread**: the same, when it is unknown whether it should have come.

What is owed depends on where consuming began (``Owed``) and on whether everything was read. Consumers that
were stopped before have not been at the same place in all partitions, so what is missing may just not have
had its turn.

Which sequences came is kept in pages of one byte for each. The tally drops a page that is full, and all pages
of a producer of which nothing is missing. So memory grows with what is missing, not with what came. Above the
limit the tally gives up the oldest pages: what comes for them later is counted as *late*, since it may have
come before.

``KeyOrder`` keeps the position of each key, for each producer and partition, where the order of a key is what
is promised. A topic that grows spreads its keys again, and the messages of a key in its old partition and in
its new one have no order. It keeps one number for each key. Above the limit it forgets the oldest keys: later
messages are compared with each other only.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sava.load.payload import Arrivals, LoadSource, PayloadKind, arrivals

PAGE: Final = 1 << 12
"""Small: of thousands of producers each has some that are not full."""
MAX_PAGES: Final = 1 << 14
"""64 MiB."""

_COME: Final = b"\x01"

Range = tuple[int, int]
"""Sequences from the first to, and without, the second."""
Sequences = NDArray[np.int64]


class Owed(Enum):
    """What of a topic should come."""

    ALL = auto()
    """Every message that it ever had."""
    REST = auto()
    """In each partition, everything from some place on: others have consumed what was before, or retention
    has removed it. Of a producer's messages those are owed that it sent when all partitions had begun."""
    SOME = auto()
    """Single messages of it have been acked before, or are acked by others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What has been found so far."""

    received: int = 0
    """All of the load's messages, duplicates too; without those that tell where a producer has ended."""
    lost: int = 0
    unread: int = 0
    """Messages that did not come, where it is unknown whether they should have."""
    duplicates: int = 0
    reordered: int = 0
    late: int = 0
    """Came when their page had been given up: lost ones that were not, or duplicates."""
    foreign: int = 0
    """Not of this load."""
    uncertain: int = 0
    """Messages that were neither acknowledged nor there: no promise covers them."""
    open_ended: int = 0
    """Producers whose last message did not come: what is behind the last that did is not counted as lost."""

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.duplicates or self.reordered or self.late)


@dataclass(slots=True)
class _Page:
    cells: bytearray = field(default_factory=lambda: bytearray(PAGE))
    come: int = 0


@dataclass(slots=True)
class _Account:
    """The sequences of one producer."""

    settled: int = 0
    """Everything below has come."""
    pages: dict[int, _Page] = field(default_factory=dict)
    full: set[int] = field(default_factory=set)
    """Pages, behind one that is not."""
    given_up: set[int] = field(default_factory=set)
    came: int = 0
    """Without duplicates and late ones."""
    next_sequence: int = 0
    """Behind the highest that came."""
    end: int | None = None
    failed: int = 0
    """How many messages the producer could not get acknowledged."""
    unacknowledged: list[Range] = field(default_factory=list)
    """Which ones, as far as it reported them."""
    firsts: dict[str, int] = field(default_factory=dict)
    """By partition: the lowest that came from there."""

    def absent(self, start: int, end: int) -> int:
        """Of these sequences, those that have not come."""
        start = max(start, self.settled)
        if start >= end:
            return 0
        came = sum(_overlap(number, start, end) for number in self.full)
        for number, page in self.pages.items():
            if _overlap(number, start, end):
                first = number * PAGE
                came += page.cells.count(_COME, max(start - first, 0), end - first)
        return end - start - came


class DeliveryTally:
    """Owned by one event loop."""

    def __init__(
        self,
        *,
        by_key: bool = False,
        owed: Owed = Owed.ALL,
        partitions: int = 1,
        run: int | None = None,
        max_pages: int = MAX_PAGES,
    ) -> None:
        """by_key      order is promised for each key, across consumers.
        partitions  that there were when consuming began.
        run         only this one's messages count."""
        self._owed = owed
        self._partitions = partitions
        self._run = run
        self._max_pages = max_pages
        self._accounts: dict[LoadSource, _Account] = {}
        self._pages: dict[tuple[LoadSource, int], None] = {}
        """Those that are not full, the oldest first."""
        self._highest: dict[Hashable, int] = {}
        """By source and lane: the end of what came in order."""
        self._key_order = KeyOrder() if by_key else None
        self.received = self.duplicates = self.reordered = self._late = self._foreign = 0

    # -- what comes ------------------------------------------------------------------------------

    def take(
        self, topic: str, payloads: Sequence[bytes], *, consumer: int = 0, is_again: bool = False
    ) -> list[Arrivals]:
        """Messages that came from a topic or partition, in this order. Returns those of the load.

        consumer  where each of several has an order of its own.
        is_again  they may have been on their way to another one: only their own order counts."""
        found, foreign = arrivals(payloads)
        own = [each for each in found if self._run is None or each.source.run == self._run]
        for batch in own:
            self._take(topic, None if is_again else (topic, consumer), batch)
        others = sum(len(each.sequences) for each in found) - sum(len(each.sequences) for each in own)
        self._foreign += foreign + others
        return own

    def _take(self, topic: str, lane: Hashable | None, batch: Arrivals) -> None:
        sequences, source = batch.sequences, batch.source
        account = self._accounts.get(source)
        if account is None:
            account = self._accounts[source] = _Account()
        if batch.kind is PayloadKind.GAP:
            for first, count in zip(sequences, batch.times, strict=True):
                _note(account.unacknowledged, (first, first + count))
            return
        count, lowest, highest = len(sequences), min(sequences), max(sequences)
        if batch.kind is PayloadKind.MESSAGE:
            self.received += count
        account.firsts[topic] = min(account.firsts.get(topic, lowest), lowest)
        account.next_sequence = max(account.next_sequence, highest + 1)
        by_key = self._key_order is not None and source.keys
        if not by_key and sequences == array("Q", range(lowest, lowest + count)):
            self._take_run(account, source, lane, lowest, highest + 1)
        else:
            self._take_any(account, source, topic, lane, np.array(sequences, np.int64))
        if batch.kind is PayloadKind.END:
            account.end, account.failed = sequences[-1] + 1, batch.times[-1]
        if account.came == account.end:
            self._settle(account, source)

    def _take_run(
        self, account: _Account, source: LoadSource, lane: Hashable | None, start: int, end: int
    ) -> None:
        """Sequences one behind the other, as they come where there are no keys; without a look at each."""
        place = (source, lane)
        highest = self._highest.get(place, 0) if lane is not None else 0
        cut = min(max(start, highest), end)
        self.reordered += self._mark_run(account, source, start, cut)
        self._mark_run(account, source, cut, end)
        if lane is not None and end > highest:
            self._highest[place] = end

    def _mark_run(self, account: _Account, source: LoadSource, start: int, end: int) -> int:
        """Note that they came. Returns how many came for the first time."""
        new = 0
        while start < end:
            if start < account.settled:
                high = min(end, account.settled)
                self.duplicates += high - start
            else:
                number = start // PAGE
                high = min(end, (number + 1) * PAGE)
                page = self._page(account, source, number, high - start)
                if page is not None:
                    first = number * PAGE
                    before = page.cells.count(_COME, start - first, high - first)
                    page.cells[start - first : high - first] = _COME * (high - start)
                    new += self._noted(account, source, number, page, high - start - before, before)
            start = high
        account.came += new
        return new

    def _take_any(
        self, account: _Account, source: LoadSource, topic: str, lane: Hashable | None, sequences: Sequences
    ) -> None:
        """Sequences with gaps, as one of several partitions has them, or not in order, or again."""
        is_new = np.zeros(len(sequences), np.bool_)
        rows = _firsts(sequences)
        ascending = sequences[rows]
        settled = int(np.searchsorted(ascending, account.settled))
        self.duplicates += len(sequences) - len(rows) + settled
        numbers = ascending[settled:] // PAGE
        for part in np.split(rows[settled:], np.flatnonzero(numbers[1:] != numbers[:-1]) + 1):
            number = int(sequences[part[0]]) // PAGE if len(part) else 0
            page = self._page(account, source, number, len(part)) if len(part) else None
            if page is not None:
                places = sequences[part] - number * PAGE
                cells = np.frombuffer(page.cells, np.uint8)
                is_new[part] = cells[places] == 0
                cells[places] = 1
                new = int(np.count_nonzero(is_new[part]))
                self._noted(account, source, number, page, new, len(part) - new)
        account.came += int(np.count_nonzero(is_new))
        is_behind = self._is_behind(source, topic, lane, sequences)
        self.reordered += int(np.count_nonzero(is_new & is_behind))

    def _is_behind(
        self, source: LoadSource, topic: str, lane: Hashable | None, sequences: Sequences
    ) -> NDArray[np.bool_]:
        """Which of them come behind a later one."""
        if self._key_order is not None and source.keys:
            return self._key_order.is_behind((source, topic), source.keys, sequences)
        place = (source, lane)
        before = 0 if lane is None else self._highest.get(place, 0)
        ends = np.maximum.accumulate(np.concatenate(([before], sequences + 1)))
        if lane is not None:
            self._highest[place] = int(ends[-1])
        return sequences < ends[:-1]

    def _page(self, account: _Account, source: LoadSource, number: int, count: int) -> _Page | None:
        """The page to note ``count`` sequences in; None, after counting them, if it is full or given up."""
        if number in account.full:
            self.duplicates += count
            return None
        if number in account.given_up:
            self._late += count
            return None
        return account.pages.get(number) or self._open(account, source, number)

    def _noted(
        self, account: _Account, source: LoadSource, number: int, page: _Page, new: int, again: int
    ) -> int:
        """Returns how many are new."""
        self.duplicates += again
        page.come += new
        if page.come == PAGE:
            account.full.add(number)
            self._let_go(account, source, number)
            while (next_page := account.settled // PAGE) in account.full:
                account.full.discard(next_page)
                account.settled = (next_page + 1) * PAGE
        return new

    def _settle(self, account: _Account, source: LoadSource) -> None:
        """Nothing of this producer is missing."""
        account.settled = account.came
        account.full.clear()
        for number in list(account.pages):
            self._let_go(account, source, number)

    def _open(self, account: _Account, source: LoadSource, number: int) -> _Page:
        if len(self._pages) >= self._max_pages:
            oldest, oldest_number = next(iter(self._pages))
            self._let_go(self._accounts[oldest], oldest, oldest_number)
            self._accounts[oldest].given_up.add(oldest_number)
        page = account.pages[number] = _Page()
        page.come = max(account.settled - number * PAGE, 0)
        page.cells[: page.come] = _COME * page.come
        self._pages[source, number] = None
        return page

    def _let_go(self, account: _Account, source: LoadSource, number: int) -> None:
        del account.pages[number], self._pages[source, number]

    # -- what was sent ---------------------------------------------------------------------------

    def sent(self, source: LoadSource, end: int, unacknowledged: Sequence[Range] = ()) -> None:
        """A producer's own word: it has sent the sequences below ``end``, and got no acknowledgement
        for these."""
        account = self._accounts.setdefault(source, _Account())
        account.end, account.unacknowledged = end, list(unacknowledged)
        account.failed = sum(stop - start for start, stop in unacknowledged)

    def has_all(self) -> bool:
        """Whether no acknowledged message is missing."""
        return not any(self._missing(account).lost for account in self._accounts.values())

    def count(self, *, is_all_read: bool = True) -> Count:
        missing = [self._missing(account) for account in self._accounts.values()]
        lost = sum(each.lost for each in missing)
        return Count(
            received=self.received,
            lost=lost if is_all_read else 0,
            unread=sum(each.unread for each in missing) + (0 if is_all_read else lost),
            duplicates=self.duplicates,
            reordered=self.reordered,
            late=self._late,
            foreign=self._foreign,
            uncertain=sum(each.uncertain for each in missing),
            open_ended=sum(account.end is None for account in self._accounts.values()),
        )

    def _missing(self, account: _Account) -> _Missing:
        end = account.end if account.end is not None else account.next_sequence
        if self._owed is Owed.ALL:
            start, is_owed = 0, True
        elif self._owed is Owed.REST and len(account.firsts) >= self._partitions:
            start, is_owed = max(account.firsts.values()), True
        else:
            start, is_owed = min(account.firsts.values(), default=end), False
        absent = account.absent(start, end)
        if not absent:
            return _Missing(0, 0, 0)
        ranges = [(max(first, start), min(last, end)) for first, last in account.unacknowledged]
        told = sum(last - first for first, last in account.unacknowledged)
        excused = sum(account.absent(*each) for each in ranges) + max(account.failed - told, 0)
        uncertain = min(absent, excused)
        rest = absent - uncertain
        return _Missing(rest, 0, uncertain) if is_owed else _Missing(0, rest, uncertain)


class _Missing(NamedTuple):
    lost: int
    unread: int
    uncertain: int


def _firsts(sequences: Sequences) -> NDArray[np.int64]:
    """The rows of different ones, in the order of these; of equal ones the first."""
    if bool((sequences[1:] > sequences[:-1]).all()):  # as they nearly always come
        return np.arange(len(sequences))
    rows: NDArray[np.int64] = np.unique(sequences, return_index=True)[1]
    return rows


def _overlap(number: int, start: int, end: int) -> int:
    """How many sequences of a page are between these."""
    return max(min(end, (number + 1) * PAGE) - max(start, number * PAGE), 0)


def _note(ranges: list[Range], new: Range) -> None:
    """Add a range to those that are there, unless it is; a message that comes twice tells it twice."""
    if new not in ranges:
        ranges.append(new)


MAX_CELLS: Final = 1 << 23
"""64 MiB."""


class KeyOrder:
    """Owned by one event loop."""

    def __init__(self, max_cells: int = MAX_CELLS) -> None:
        self._max_cells = max_cells
        self._cells = 0
        self._ends: dict[Hashable, NDArray[np.int64]] = {}
        """By place and key: the end of what came in order."""

    def is_behind(self, place: Hashable, keys: int, sequences: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of them come behind a later one of the same key."""
        ends = self._ends.get(place)
        if ends is None:
            ends = self._begin(place, keys)
        chosen = sequences % keys
        is_behind = sequences < ends[chosen]
        if not is_behind.any() and bool((sequences[1:] > sequences[:-1]).all()):
            ends[chosen] = sequences + 1  # of several of one key the last stays, which is the highest
            return is_behind
        for row, (key, sequence) in enumerate(zip(chosen.tolist(), sequences.tolist(), strict=True)):
            is_behind[row] = sequence < ends[key]
            ends[key] = max(int(ends[key]), sequence + 1)
        return is_behind

    def _begin(self, place: Hashable, keys: int) -> NDArray[np.int64]:
        self._cells += keys
        while self._cells > self._max_cells and self._ends:
            self._cells -= len(self._ends.pop(next(iter(self._ends))))
        ends = self._ends[place] = np.zeros(keys, np.int64)
        return ends
