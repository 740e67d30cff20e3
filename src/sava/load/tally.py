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

**The payload.** A message of a load begins with a header to be recognized by:

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
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from functools import cache
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
    """Which, as far as it has reported."""
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
        named = sum(last - first for first, last in account.unacknowledged)
        excused = sum(account.absent(*each) for each in ranges) + max(account.failed - named, 0)
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
