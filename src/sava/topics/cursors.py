"""Cursors: what subscriptions have acked, and how the metadata store learns of it.

Everything below ``next_offset`` is acked, and so are the ranges beyond it. The owner of the topic writes the
cursor from time to time; what was acked since is delivered again after a crash. A caller that needs to know
that an ack is safe waits on ``acks_stored``:

    ack 5 ─▶ version 8 ─▶ record taken at version 8 ─▶ ack 6 ─▶ version 9 ─▶ the record is stored
    the caller that waits for 5 returns; the one that waits for 6 waits for the next record

A version counts changes, so a seek backwards is a change like any other.

**Writing** (``CursorKeeper``). One task writes for all topics of a broker, so that an older position never
overtakes a newer one. Once a second it takes every cursor that has changed and writes many in one
transaction; a caller that waits for acks to be stored makes it come sooner. Cursors say when they change, so
that those that do not cost nothing. Each write is conditional on the topic's ownership record and on the
subscription's own:

    old owner    pauses                                   ── wakes up and writes its cursor: refused
    new owner            takes the topic, its consumers ack 100..200, writes 200

    unsubscribe  removes s; a consumer subscribes to s again, from the end
    keeper       is late with the cursor of the old s: refused

A transaction that is refused is tried in halves, until those that caused it are alone. Each of these asks its
tenure (see ``ownership``) before it is given up: a record that was written again because the topic is to move
has the same owner, and the positions that go with the topic are still to be written. When the store cannot be
reached everything stays as it is, to be written later: what a crash loses then is that messages are delivered
again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

import msgspec

from sava.errors import SavaError
from sava.metadata.commands import Compare, Operation, Put
from sava.metadata.store import MetadataStore
from sava.supervisor import Supervisor
from sava.tasks import cancelled
from sava.topics import specs
from sava.topics.ownership import Tenure
from sava.topics.ranges import IntervalSet, Range
from sava.topics.specs import CursorRecord

_RECORDS_UNDER_WAY: Final = 16
"""Records taken and not yet reported as stored. There is one at a time; those of failed writes are
forgotten."""


class SubscriptionCursor:
    """What one subscription has acked. Owned by the event loop."""

    def __init__(self, record: CursorRecord) -> None:
        self.changed: Callable[[], object] = _nothing
        """Is called when there is something to store, and was not before."""
        self._next = record.next_offset
        self._acked = IntervalSet(_pairs(record.acked))
        self._notified = dict(_pairs(record.notified))
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

    def notified(self, source_key: int) -> int:
        """See ``CursorRecord``."""
        return self._notified.get(source_key, 0)

    def notify(self, source_key: int, offset: int) -> None:
        if offset > self.notified(source_key):
            self._notified[source_key] = offset
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
        notified = tuple(each for pair in self._notified.items() for each in pair)
        record = CursorRecord(self._next, acked, epoch, notified)
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
        """This broker will not store the cursor any more."""
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


log = logging.getLogger(__name__)

INTERVAL_S: Final = 1.0
PAUSE_S: Final = 0.02
"""Between two rounds, however many want one."""
MAX_CURSORS: Final = 150
"""In one transaction: each takes a condition and a write, and each topic a condition."""
MAX_BYTES: Final = 2 << 20
MAX_ACKED: Final = 40_000
"""Ranges of one record, which the store would otherwise refuse as too large. What is acked beyond them is
delivered again after a restart."""


@dataclass(frozen=True, slots=True, eq=False)
class KeptCursor:
    """The cursor of a subscription whose position is to be kept."""

    key: str
    cursor: SubscriptionCursor
    tenure: Tenure
    exists: Compare
    """That the subscription is still this one."""


class CursorKeeper:
    """Writes the cursors of all subscriptions of a broker. Owned by the event loop."""

    def __init__(self, store: MetadataStore, *, interval_s: float = INTERVAL_S) -> None:
        self._store = store
        self._interval_s = interval_s
        self._kept: set[KeptCursor] = set()
        self._changed: set[KeptCursor] = set()
        """Those that may be dirty, and maybe some that are not kept any more."""
        self._wanted = asyncio.Event()
        self._round_done: asyncio.Future[bool] | None = None
        self._task: asyncio.Task[None] | None = None
        self.failures = 0
        """Rounds that did not reach the store."""

    def start(self, supervisor: Supervisor) -> None:
        self._task = supervisor.essential(self._run(), name="cursors")

    async def close(self) -> None:
        """Without writing: ``flush`` comes first."""
        await cancelled(self._task)
        if self._round_done is not None and not self._round_done.done():
            self._round_done.set_result(False)

    def add(self, cursor: KeptCursor) -> None:
        self._kept.add(cursor)
        self._changed.add(cursor)
        cursor.cursor.changed = partial(self._note, cursor)

    def _note(self, cursor: KeptCursor) -> None:
        # Looked up at each call: a round takes the set and leaves another one.
        self._changed.add(cursor)

    def remove(self, cursor: KeptCursor) -> None:
        self._kept.discard(cursor)

    def wake(self) -> None:
        """Write soon."""
        self._wanted.set()

    async def flush(self, *, timeout: float = 5.0) -> bool:
        """Write everything that has changed until now; whether that was possible in time."""
        if self._task is None or self._task.done():
            return False
        if self._round_done is None:
            self._round_done = asyncio.get_running_loop().create_future()
        self.wake()
        try:
            async with asyncio.timeout(timeout):
                return await asyncio.shield(self._round_done)
        except TimeoutError:
            return False

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            self._wanted.clear()
            # Those who ask from now on want the round after this one.
            waiting, self._round_done = self._round_done, None
            is_stored = False
            try:
                is_stored = await self._round()
            finally:
                if waiting is not None:
                    waiting.set_result(is_stored)
            await asyncio.sleep(PAUSE_S)

    async def _round(self) -> bool:
        try:
            part: list[KeptCursor] = []
            # Those that are not stored in this round are looked at again in the next.
            self._changed = {each for each in self._changed & self._kept if each.cursor.is_dirty}
            for cursor in list(self._changed):
                part.append(cursor)
                if len(part) == MAX_CURSORS:
                    await self._write(part)
                    part = []
            if part:
                await self._write(part)
        except (SavaError, TimeoutError) as error:
            self.failures += 1
            log.warning("cursors: not stored, will be tried again error=%s: %s", type(error).__name__, error)
            return False
        return True

    async def _write(self, part: list[KeptCursor]) -> None:
        records = [(cursor, cursor.cursor.record(cursor.tenure.epoch)) for cursor in part]
        puts: list[Operation] = [Put(cursor.key, _encode(record)) for cursor, record in records]
        if len(part) > 1 and sum(len(put.value) for put in puts if isinstance(put, Put)) > MAX_BYTES:
            await self._write_halves(part)
            return
        holds = {cursor.tenure: cursor.tenure.holds for cursor in part}
        result = await self._store.txn((*holds.values(), *(cursor.exists for cursor in part)), puts)
        if result.succeeded:
            for cursor, record in records:
                cursor.cursor.mark_stored(record)
        elif len(part) > 1:
            await self._write_halves(part)
        else:
            await self._refused(part[0], holds[part[0].tenure])

    async def _write_halves(self, part: list[KeptCursor]) -> None:
        middle = len(part) // 2
        await self._write(part[:middle])
        await self._write(part[middle:])

    async def _refused(self, cursor: KeptCursor, compared: Compare) -> None:
        """The topic may be another's, or only be moving by now, or the subscription is gone."""
        if await cursor.tenure.still_holds() and cursor.tenure.holds != compared:
            await self._write([cursor])
        else:
            self._kept.discard(cursor)


def _encode(record: CursorRecord) -> bytes:
    if len(record.acked) > 2 * MAX_ACKED:
        record = msgspec.structs.replace(record, acked=record.acked[: 2 * MAX_ACKED])
    return specs.encode(record)
