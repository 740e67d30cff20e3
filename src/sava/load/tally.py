"""Tally: what came, against what was sent.

Each message has its producer's sequence. So the tally knows, without keeping messages,

* **duplicates**: a sequence that had come before;
* **reordered**: a first arrival behind a later message of the same producer in the same lane. A lane is where
  the order is promised: one consumer's share of one partition, and with a key-shared subscription one key,
  whoever consumes it;
* **lost**: a sequence that never came, below the end that the producer told;
* **unread**: the same, when consuming was ended before everything had been read. Partitions, and consumers
  that share one, are not at the same place then, so what is missing may just not have had its turn.

Which sequences came is kept in pages of one byte for each. A page that is full is let go. So memory grows
with what is missing, not with what came; if that is too much, the oldest pages are given up: what comes for
them later is counted as *late*, since nobody can tell any more whether it came before.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final

from sava.load.payload import Source, Stretch, stretches

PAGE: Final = 1 << 16
MAX_PAGES: Final = 1024
"""64 MiB."""
_COME: Final = b"\x01"

Range = tuple[int, int]
"""Sequences from the first to, and without, the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What has been found so far."""

    received: int = 0
    """All of the load's messages, duplicates too."""
    lost: int = 0
    unread: int = 0
    """Did not come before consuming was ended: nobody knows whether it would have."""
    duplicates: int = 0
    reordered: int = 0
    late: int = 0
    """Came when their page had been given up: lost ones that were not, or duplicates."""
    foreign: int = 0
    """Not of this load."""
    uncertain: int = 0
    """Not acknowledged, and not there: nobody promised anything."""
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
    """Of one producer."""

    first: int
    """Where sequences are expected to begin."""
    pages: dict[int, _Page] = field(default_factory=dict)
    full: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    came: int = 0
    """Without duplicates and late ones."""
    next_sequence: int = 0
    """Behind the highest that came."""
    end: int | None = None
    failed: int = 0
    """What the producer could not get acknowledged, if it only told how many."""
    unacknowledged: Sequence[Range] = ()
    """If it told which."""


class Tally:
    """Owned by one event loop."""

    def __init__(
        self,
        *,
        by_key: bool = False,
        from_start: bool = True,
        run: int | None = None,
        max_pages: int = MAX_PAGES,
    ) -> None:
        """by_key      order is promised for each key, not for each lane.
        from_start  sequences are expected from 0 on; otherwise from the lowest that is there.
        run         only this one's messages count."""
        self._by_key = by_key
        self._from_start = from_start
        self._run = run
        self._max_pages = max_pages
        self._accounts: dict[Source, _Account] = {}
        self._pages: dict[tuple[Source, int], None] = {}
        """Those that are not full, the oldest first."""
        self._highest: dict[Hashable, int] = {}
        """By source and lane: the end of what came in order."""
        self._by_keys: dict[Source, array[int]] = {}
        self.received = self._duplicates = self._reordered = self._late = self._foreign = 0

    # -- what comes ------------------------------------------------------------------------------

    def take(self, lane: Hashable, payloads: Sequence[bytes]) -> list[Stretch]:
        """Messages that came in this lane, in this order. Returns those of the load."""
        found, foreign = stretches(payloads)
        own = [each for each in found if self._run is None or each.source.run == self._run]
        for stretch in own:
            self._take(lane, stretch)
        others = sum(len(each.sequences) for each in found) - sum(len(each.sequences) for each in own)
        self._foreign += foreign + others
        return own

    def _take(self, lane: Hashable, stretch: Stretch) -> None:
        sequences, source = stretch.sequences, stretch.source
        count, first = len(sequences), sequences[0]
        self.received += count
        account = self._account(source, min(sequences))
        if self._by_key and source.keys:
            self._take_by_key(account, source, sequences)
        elif sequences == array("Q", range(first, first + count)):
            self._take_run(account, source, lane, first, first + count)
        elif not self._take_ascending(account, source, lane, sequences):
            for sequence in sequences:
                self._take_run(account, source, lane, sequence, sequence + 1)
        account.next_sequence = max(account.next_sequence, max(sequences) + 1)
        if stretch.is_end:
            account.end, account.failed = sequences[-1] + 1, stretch.times[-1]

    def _take_run(self, account: _Account, source: Source, lane: Hashable, start: int, end: int) -> None:
        """Sequences without a gap."""
        place = (source, lane)
        highest = self._highest.get(place, 0)
        if start < highest:
            cut = min(end, highest)
            self._reordered += self._mark(account, source, start, cut)
            start = cut
        if start < end:
            self._mark(account, source, start, end)
            self._highest[place] = end

    def _take_ascending(
        self, account: _Account, source: Source, lane: Hashable, sequences: array[int]
    ) -> bool:
        """Sequences with gaps, as one partition has them, all new and in order; False: they are not, and
        nothing was done."""
        place, base = (source, lane), sequences[0] // PAGE * PAGE
        page = account.pages.get(base // PAGE)
        if page is None or sequences[-1] >= base + PAGE or sequences[0] < self._highest.get(place, 0):
            return False
        if sequences != array("Q", sorted(sequences)):
            return False
        places = [sequence - base for sequence in sequences]
        cells = page.cells
        if any(itemgetter(*places)(cells)) or len(set(places)) < len(places):
            return False
        for each in places:
            cells[each] = 1
        self._noted(account, source, base // PAGE, page, len(places))
        account.came += len(places)
        self._highest[place] = sequences[-1] + 1
        return True

    def _take_by_key(self, account: _Account, source: Source, sequences: array[int]) -> None:
        highest = self._by_keys.get(source)
        if highest is None:
            highest = self._by_keys[source] = array("Q", bytes(8 * source.keys))
        keys = source.keys
        for sequence in sequences:
            is_new = self._mark(account, source, sequence, sequence + 1)
            if sequence < highest[sequence % keys]:
                self._reordered += is_new
            else:
                highest[sequence % keys] = sequence + 1

    def _account(self, source: Source, lowest: int) -> _Account:
        account = self._accounts.get(source)
        if account is None:
            account = self._accounts[source] = _Account(0 if self._from_start else lowest)
        elif not self._from_start:
            account.first = min(account.first, lowest)
        return account

    def _mark(self, account: _Account, source: Source, start: int, end: int) -> int:
        """Note that they came; returns how many came for the first time."""
        new = 0
        while start < end:
            number, low = divmod(start, PAGE)
            high = min(low + end - start, PAGE)
            new += self._mark_in_page(account, source, number, low, high)
            start += high - low
        account.came += new
        return new

    def _mark_in_page(self, account: _Account, source: Source, number: int, low: int, high: int) -> int:
        width = high - low
        if number in account.full:
            self._duplicates += width
            return 0
        if number in account.given_up:
            self._late += width
            return 0
        page = account.pages.get(number)
        if page is None:
            page = self._open(account, source, number)
        before = page.cells.count(_COME, low, high)
        self._duplicates += before
        page.cells[low:high] = _COME * width
        self._noted(account, source, number, page, width - before)
        return width - before

    def _noted(self, account: _Account, source: Source, number: int, page: _Page, new: int) -> None:
        page.come += new
        if page.come == PAGE:
            del account.pages[number], self._pages[source, number]
            account.full.add(number)

    def _open(self, account: _Account, source: Source, number: int) -> _Page:
        if len(self._pages) >= self._max_pages:
            oldest = next(iter(self._pages))
            del self._pages[oldest]
            other = self._accounts[oldest[0]]
            del other.pages[oldest[1]]
            other.given_up.add(oldest[1])
        page = account.pages[number] = _Page()
        self._pages[source, number] = None
        return page

    # -- what was sent ---------------------------------------------------------------------------

    def sent(self, source: Source, end: int, unacknowledged: Sequence[Range] = ()) -> None:
        """A producer's own word: it has sent the sequences below ``end``, and was not told of these that they
        are durable."""
        account = self._account(source, 0)
        account.end, account.unacknowledged, account.failed = end, unacknowledged, 0

    def has_all(self) -> bool:
        """Whether nothing that producers were told to be durable is missing."""
        return not any(self._missing(account)[0] for account in self._accounts.values())

    def count(self, *, is_all_read: bool = True) -> Count:
        missing = [self._missing(account) for account in self._accounts.values()]
        absent = sum(lost for lost, _ in missing)
        return Count(
            received=self.received,
            lost=absent if is_all_read else 0,
            unread=0 if is_all_read else absent,
            duplicates=self._duplicates,
            reordered=self._reordered,
            late=self._late,
            foreign=self._foreign,
            uncertain=sum(uncertain for _, uncertain in missing),
            open_ended=sum(account.end is None for account in self._accounts.values()),
        )

    def _missing(self, account: _Account) -> tuple[int, int]:
        """Lost, and of those that nobody promised to keep."""
        end = account.end if account.end is not None else account.next_sequence
        absent = max(end - account.first - account.came, 0)
        excused = sum(self._absent(account, start, stop) for start, stop in account.unacknowledged)
        uncertain = min(absent, excused + account.failed)
        return absent - uncertain, uncertain

    def _absent(self, account: _Account, start: int, end: int) -> int:
        absent = 0
        while start < end:
            number, low = divmod(start, PAGE)
            high = min(low + end - start, PAGE)
            page = account.pages.get(number)
            if page is not None:
                absent += page.cells.count(b"\x00", low, high)
            elif number not in account.full:
                absent += high - low
            start += high - low
        return absent
