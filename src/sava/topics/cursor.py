"""Cursor: what a subscription has acked, and how much of that the metadata store knows.

Everything below ``next_offset`` is acked, and so are the ranges beyond it. The owner of the topic writes the
cursor from time to time; what was acked since is delivered again after a crash. Whoever needs to know that an
ack is safe waits on ``acks_stored``:

    ack 5 ─▶ version 8 ─▶ record taken at version 8 ─▶ ack 6 ─▶ version 9 ─▶ the record is stored
    the one who waits for 5 is told; the one who waits for 6 waits for the next record

A version counts changes, so a seek backwards is a change like any other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Final

from sava.topics.delivery import Range
from sava.topics.ranges import IntervalSet
from sava.topics.specs import CursorRecord

_RECORDS_UNDER_WAY: Final = 16
"""Records taken and not yet reported as stored. There is one at a time; those of failed writes are
forgotten."""


class SubscriptionCursor:
    """Owned by the event loop."""

    def __init__(self, record: CursorRecord) -> None:
        self.changed: Callable[[], object] = _nothing
        """Is called when there is something to store, and was not before."""
        self._next = record.next_offset
        self._acked = IntervalSet(_pairs(record.acked))
        self._told = dict(_pairs(record.told))
        self._version = 0
        self._stored = 0
        self._advance()

    # Made when first used: most cursors of a topic with thousands of subscriptions do not change.

    @cached_property
    def _taken(self) -> deque[tuple[CursorRecord, int]]:
        return deque(maxlen=_RECORDS_UNDER_WAY)

    @cached_property
    def _waiters(self) -> deque[tuple[int, asyncio.Future[None]]]:
        return deque()

    @property
    def next_offset(self) -> int:
        """The first offset that is not acked."""
        return self._next

    def acked(self) -> Iterator[Range]:
        """Beyond ``next_offset``."""
        return iter(self._acked)

    @property
    def acked_beyond(self) -> int:
        """How many messages are acked beyond ``next_offset``."""
        return self._acked.count

    @property
    def fragments(self) -> int:
        """How many ranges that is."""
        return self._acked.fragments

    @property
    def is_dirty(self) -> bool:
        return self._version != self._stored

    def is_acked(self, offset: int) -> bool:
        return offset < self._next or offset in self._acked

    def ack(self, start: int, end: int) -> int:
        """How many of them were not acked before."""
        start = max(start, self._next)
        added = self._acked.add(start, end)
        if added:
            self._change()
            if start == self._next:
                self._advance()
        return added

    def unacked(self, start: int, end: int) -> list[Range]:
        return self._acked.gaps(max(start, self._next), end)

    def told(self, chain_id: int) -> int:
        """See ``CursorRecord``."""
        return self._told.get(chain_id, 0)

    def tell(self, chain_id: int, offset: int) -> None:
        if offset > self.told(chain_id):
            self._told[chain_id] = offset
            self._change()

    def seek(self, offset: int) -> None:
        self._next = offset
        self._acked.clear()
        self._change()

    def _change(self) -> None:
        was_dirty = self.is_dirty
        self._version += 1
        if not was_dirty:
            self.changed()

    def _advance(self) -> None:
        self._next = self._acked.pop_prefix(self._next)

    # -- storing -----------------------------------------------------------------------------

    def record(self, epoch: int) -> CursorRecord:
        """What the metadata store should hold. Tell ``mark_stored`` when it does."""
        acked = tuple(bound for pair in self._acked for bound in pair)
        told = tuple(each for pair in self._told.items() for each in pair)
        record = CursorRecord(self._next, acked, epoch, told)
        self._taken.append((record, self._version))
        return record

    def mark_stored(self, record: CursorRecord) -> None:
        """A record that was not taken from here, or too long ago, changes nothing: the cursor stays dirty."""
        version = next((version for taken, version in reversed(self._taken) if taken == record), None)
        if version is None:
            return
        while self._taken and self._taken[0][1] <= version:
            self._taken.popleft()
        self._stored = max(self._stored, version)
        while self._waiters and self._waiters[0][0] <= self._stored:
            _, future = self._waiters.popleft()
            if not future.done():
                future.set_result(None)

    def acks_stored(self) -> asyncio.Future[None]:
        """Done when everything that is acked now is stored. Shared by those who ask for the same: never
        cancel it."""
        if self._waiters and self._waiters[-1][0] == self._version:
            return self._waiters[-1][1]
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.is_dirty:
            self._waiters.append((self._version, future))
        else:
            future.set_result(None)
        return future

    def give_up(self, error: Exception) -> None:
        """Nobody will store this cursor any more."""
        if not self.is_dirty:  # and so no caller waits
            return
        for _, future in self._waiters:
            if not future.done():
                future.set_exception(error)
                future.exception()  # seen: its caller may be gone
        self._waiters.clear()


def _nothing() -> None:
    pass


def _pairs(bounds: tuple[int, ...]) -> Iterator[Range]:
    return zip(bounds[::2], bounds[1::2], strict=True)
