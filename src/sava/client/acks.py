"""AckBook: what an application has acked of one partition, and how far the broker has stored it.

    add ─▶ the run that grows ─▶ runs ─▶ take: on the wire ─▶ unconfirmed ─▶ stored: forgotten

Acks that were sent are kept until a receipt says that they are stored. A stream that breaks, or a broker that
restarts, loses those that were not; they are sent again first thing on the next stream, and messages that
come once more although they are acked are not shown to the application again.

Offsets are acked mostly in order, so an ack usually moves the end of a run by one. Owned by the feed of one
partition; no I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

Range = tuple[int, int]

MAX_RANGES: Final = 1_000
"""In one message; more are sent without waiting for others."""


class AckBook:
    def __init__(self) -> None:
        self._start = 0
        self._end = 0
        self._runs: list[Range] = []
        self._sent: list[Range] = []
        """Sent since a receipt was last asked for."""
        self._awaited: deque[tuple[int, list[Range]]] = deque()
        self._receipt = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return self._start == self._end and not self._runs

    @property
    def is_large(self) -> bool:
        return len(self._runs) >= MAX_RANGES

    @property
    def is_confirmed(self) -> bool:
        """Whether all that was acked is known to be stored."""
        return self.is_empty and not self._sent and not self._awaited

    def add(self, offset: int) -> None:
        if offset == self._end:
            self._end += 1
        else:
            self.add_range(offset, offset + 1)

    def add_range(self, start: int, end: int) -> None:
        if start != self._end:
            self._close_run()
            self._start = start
        self._end = end

    def take(self, *, receipt: bool) -> tuple[list[int], int]:
        """The ranges to send (start, end, …), and a receipt to ask for or 0. A receipt covers all that was
        taken before, too."""
        self._close_run()
        ranges, self._runs = coalesced(self._runs), []
        self._sent.extend(ranges)
        if not receipt:
            return _flat(ranges), 0
        self._receipt += 1
        self._awaited.append((self._receipt, self._sent))
        self._sent = []
        return _flat(ranges), self._receipt

    def stored(self, receipt: int) -> None:
        while self._awaited and self._awaited[0][0] <= receipt:
            self._awaited.popleft()

    def rewind(self) -> list[Range]:
        """The stream is gone: everything unconfirmed is to be sent again. Returns it."""
        runs = [run for _, ranges in self._awaited for run in ranges]
        self._awaited.clear()
        self._close_run()
        self._runs = coalesced([*runs, *self._sent, *self._runs])
        self._sent = []
        return list(self._runs)

    def _close_run(self) -> None:
        if self._start < self._end:
            self._runs.append((self._start, self._end))
        self._start = self._end = 0


def coalesced(ranges: Iterable[Range]) -> list[Range]:
    """Ascending, and joined where they touch."""
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _flat(ranges: Iterable[Range]) -> list[int]:
    return [offset for pair in ranges for offset in pair]
