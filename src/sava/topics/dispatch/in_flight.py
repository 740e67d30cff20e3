"""InFlight: what was sent to consumers and not answered yet, as ranges that know their flight.

A flight is one delivery. Acks take ranges out of it, in any order and from several flights at once; what is
left of the oldest flight decides when the next ack timeout is due. The timeout itself is not stored: it is a
matter of the policy at the time of asking, so a change of policy reaches what is under way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from sava.topics.delivery import Range
from sava.topics.dispatch.member import DispatchMember
from sava.topics.ranges import RangeMap


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
