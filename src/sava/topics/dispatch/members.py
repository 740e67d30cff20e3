"""Members: consumers as dispatch sees them, the ring that gives each key one of them, and what was sent to
them and is not acked.

The ring is consistent hashing: every member has many points on a circle, and a key belongs to the first point
at or after its own. A member that comes or goes changes the keys of its own points only. A member whose
filter refuses the key is passed over, to the next one that accepts it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from typing import Final

import pyarrow.compute as pc

from sava.errors import CallerError
from sava.records import RecordBatch
from sava.schemas.bounds import Pattern
from sava.topics.ranges import IntervalSet, Range, RangeMap

MAX_GLOBS: Final = 64
MAX_GLOB_CHARS: Final = 1024
"""Of all filters of a consumer."""
MAX_FILTERED_KEY: Final = 1024


class InvalidFilter(CallerError):
    """Key filters beyond what a consumer may have."""


NO_KEY: Final = ""
"""The key of messages that have neither a key nor a named producer: they are one sequence."""
_POINTS: Final = 128
"""On the circle, for each member: shares differ by about a tenth."""


class KeyFilter:
    """Globs of which one must match the whole key: ``*`` is any text, ``?`` any one character, everything
    else itself, in the case it has. Without a glob every key is accepted. Keys of more than a kilobyte are
    accepted by no glob: a filter is asked for every key, on the event loop."""

    __slots__ = ("_accepted", "globs")

    def __init__(self, globs: Sequence[str] = ()) -> None:
        """Raises InvalidFilter."""
        self.globs = tuple(globs)
        if len(self.globs) > MAX_GLOBS or sum(map(len, self.globs)) > MAX_GLOB_CHARS:
            raise InvalidFilter(
                f"{len(self.globs)} key filters of {sum(map(len, self.globs))} characters; a consumer has at "
                f"most {MAX_GLOBS} of {MAX_GLOB_CHARS} in all"
            )
        self._accepted = _compiled(self.globs) if self.globs else None

    def accepts(self, key: str) -> bool:
        if self._accepted is None:
            return True
        return len(key) <= MAX_FILTERED_KEY and self._accepted.matches(key)


def _compiled(globs: tuple[str, ...]) -> Pattern:
    """RE2 does not backtrack: globs come from clients, and with Python's engine and a plain ``.*`` for each
    star ``*a*a*a*a*b`` takes time in the power of its stars."""
    written = "|".join(
        "".join(_GLOB.get(char, char if char.isalnum() else _quoted(char)) for char in glob) for glob in globs
    )
    return Pattern(f"(?s:{written})", max_chars=len(written) + 5)


_GLOB: Final = {"*": ".*", "?": "."}


def _quoted(char: str) -> str:
    return f"\\x{{{ord(char):x}}}"


def _place(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


class HashRing:
    """Of members by name. ``version`` changes with every change, so that answers can be kept."""

    def __init__(self) -> None:
        self.version = 0
        self._points: list[int] = []
        self._names: list[str] = []
        self._filters: dict[str, KeyFilter] = {}

    def set(self, members: Iterable[DispatchMember]) -> None:
        self.version += 1
        known = list(members)
        circle = sorted((_place(f"{each.name}\0{i}"), each.name) for each in known for i in range(_POINTS))
        self._points = [point for point, _ in circle]
        self._names = [name for _, name in circle]
        self._filters = {each.name: each.key_filter for each in known}

    def home(self, key: str) -> str | None:
        """The member that the key belongs to, None if none accepts it."""
        names = self._names
        if not names:
            return None
        first = bisect_left(self._points, _place(key))
        asked: set[str] = set()
        for step in range(len(names)):
            name = names[(first + step) % len(names)]
            if name in asked:
                continue
            if self._filters[name].accepts(key):
                return name
            asked.add(name)
            if len(asked) == len(self._filters):
                break
        return None


def effective_keys(batch: RecordBatch) -> Sequence[str]:
    """For each row: its key, else the name of its producer, else ``NO_KEY``."""
    columns = batch.to_arrow(("key", "producer"))
    encoded = pc.coalesce(columns.column(0), columns.column(1), NO_KEY).dictionary_encode()
    names: list[str] = encoded.dictionary.to_pylist()
    if len(names) == 1:
        return names * len(batch)
    indices = encoded.indices
    codes = memoryview(indices.buffers()[1]).cast("i")[indices.offset : indices.offset + len(indices)]
    return list(map(names.__getitem__, codes))


QUEUE_BYTES: Final = 4 << 20
"""Sent to a consumer's queue and not fetched from it. Credits count messages, and a thousand of them may be a
gigabyte; this bounds what a consumer holds that stopped reading."""


@dataclass(slots=True, eq=False)
class DispatchMember:
    """A consumer as dispatch sees it, one for each attachment: a consumer that comes back under its name is
    another member."""

    name: str
    key_filter: KeyFilter = field(default_factory=KeyFilter)
    credits: int = 0
    """Messages that may still be sent."""
    queued_bytes: int = 0
    is_stalled: bool = False
    """Left messages in its queue for longer than the ack timeout. Gets nothing until it fetches again."""
    again: IntervalSet = field(default_factory=IntervalSet)
    """Key-shared: redeliveries that only this member may get, now."""
    ahead: IntervalSet = field(default_factory=IntervalSet)
    """Key-shared: messages never sent that only this member may get, passed over for want of credits."""

    @property
    def has_room(self) -> bool:
        return self.credits > 0 and not self.is_stalled and self.queued_bytes < QUEUE_BYTES


# -- outstanding messages ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Flight:
    member: DispatchMember
    ranges: tuple[Range, ...]
    attempt: int
    since: float
    """When it was queued, or last fetched from."""
    left: int
    """Messages without an answer."""
    unfetched: int
    """Messages still in the consumer's queue."""
    queued_bytes: int
    """About what these take there, until the last of them is fetched."""
    is_void: bool = False
    """Taken back: what is still in the queue is passed over."""

    @property
    def is_fetched(self) -> bool:
        return not self.unfetched


class InFlight:
    """What was sent to consumers and not answered yet, as ranges that know their flight.

    A flight is one delivery. Acks take ranges out of it, in any order and from several flights at once; what
    is left of the oldest flight decides when the next ack timeout is due. The timeout itself is not stored:
    it is a matter of the policy at the time of asking, so a change of policy reaches what is under way."""

    def __init__(self) -> None:
        self._spans: RangeMap[Flight] = RangeMap()
        self._flights: OrderedDict[Flight, None] = OrderedDict()
        """Not answered or not fetched yet, by ``since``. (A plain dict would be searched from its emptied
        front.)"""

    def __len__(self) -> int:
        """How many messages."""
        return self._spans.count

    def __iter__(self) -> Iterator[Flight]:
        return iter(self._flights)

    @property
    def oldest(self) -> Flight | None:
        return next(iter(self._flights), None)

    def add(self, flight: Flight) -> None:
        self._flights[flight] = None
        for start, end in flight.ranges:
            self._spans.set(start, end, flight)

    def restart(self, flight: Flight, now: float) -> None:
        """Its time begins to run now."""
        if flight in self._flights:
            flight.since = now
            self._flights.move_to_end(flight)
            self._end_if_over(flight)

    def remove(self, start: int, end: int) -> list[tuple[int, int, Flight]]:
        """What was in flight of the range."""
        removed = self._spans.remove(start, end)
        for begin, stop, flight in removed:
            flight.left -= stop - begin
            self._end_if_over(flight)
        return removed

    def _end_if_over(self, flight: Flight) -> None:
        if not flight.left and not flight.unfetched:
            self._flights.pop(flight, None)

    def take(self, flight: Flight) -> list[Range]:
        """What was left of the flight, which is over."""
        mine = [
            (start, end)
            for first, last in flight.ranges
            for start, end, other in self._spans.within(first, last)
            if other is flight
        ]
        for start, end in mine:
            self.remove(start, end)
        self._end_if_over(flight)
        return mine

    def of(self, member: DispatchMember) -> list[Flight]:
        return [flight for flight in self._flights if flight.member is member]

    def clear(self) -> None:
        self._spans.clear()
        self._flights.clear()


@dataclass(frozen=True, slots=True)
class Failure:
    """Of the last delivery that a message may have."""

    attempt: int
    reason: str


class Failures:
    """Messages that were delivered and came back, until they are acked.

        delivery 1 ─▶ nack or timeout ─▶ waits delay(1) ─▶ delivery 2 ─▶ … ─▶ delivery n was the last one

    Then the dead-letter policy decides:

        block        stays here until an operator acts
        drop         counted as acked
        dead letter  leaves when it is safe in the other topic

    Only messages with a failure have an entry, so all of this is bounded by the window of unacked messages. A
    message that comes back because its consumer went away has not failed: it is sent again at once and its
    attempt is the same."""

    def __init__(self) -> None:
        self.attempts: RangeMap[int] = RangeMap()
        """The number of the current or next delivery, where it is not the first."""
        self.waiting: RangeMap[float] = RangeMap()
        """Until when a message must not be sent again."""
        self.blocked: RangeMap[Failure] = RangeMap()
        self.dead: RangeMap[Failure] = RangeMap()
        """On their way to the dead-letter topic."""
        self._due: list[tuple[float, int, int]] = []
        """A heap. An entry counts if ``waiting`` still says the same of its range."""

    def attempt(self, offset: int) -> int:
        return self.attempts.get(offset) or 1

    def by_attempt(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """The range, cut where the number of the delivery changes."""
        if not self.attempts:
            return [(start, end, 1)]
        found: list[tuple[int, int, int]] = []
        for begin, stop, attempt in self.attempts.within(start, end):
            if start < begin:
                found.append((start, begin, 1))
            found.append((begin, stop, attempt))
            start = stop
        if start < end:
            found.append((start, end, 1))
        return found

    def wait(self, start: int, end: int, due: float) -> None:
        self.waiting.set(start, end, due)
        heappush(self._due, (due, start, end))
        if len(self._due) > 2 * self.waiting.fragments + 64:  # most are acked by now
            self._due = [(at, first, last) for first, last, at in self.waiting]
            heapify(self._due)

    @property
    def next_due(self) -> float | None:
        """Not after the time at which something is due."""
        return self._due[0][0] if self._due else None

    def pop_due(self, now: float) -> list[Range]:
        """Those whose time has come; they wait no more."""
        found: list[Range] = []
        while self._due and self._due[0][0] <= now:
            due, first, last = heappop(self._due)
            ranges = [(start, end) for start, end, at in self.waiting.within(first, last) if at == due]
            for start, end in ranges:
                self.waiting.remove(start, end)
            found += ranges
        return found

    def shorten(self, latest: float) -> None:
        """Nothing waits longer than this."""
        for start, end, due in list(self.waiting):
            if due > latest:
                self.wait(start, end, latest)

    def forget(self, start: int, end: int) -> None:
        """The messages are acked."""
        for part in (self.attempts, self.waiting, self.blocked, self.dead):
            if part:
                part.remove(start, end)

    def clear(self) -> None:
        for part in (self.attempts, self.waiting, self.blocked, self.dead):
            part.clear()
        self._due.clear()
