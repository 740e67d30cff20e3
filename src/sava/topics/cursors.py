"""CursorKeeper: writes how far subscriptions are to the metadata store, for all topics of a broker.

One task writes, so that an older position never overtakes a newer one. Once a second it takes every cursor
that has changed and writes many in one transaction; whoever waits for acks to be stored makes it come sooner.
Cursors say when they change, so that those that do not cost nothing.
Each write is conditional on the topic's ownership record and on the subscription's own:

    old owner    pauses                                   ── wakes up and writes its cursor: refused
    new owner            takes the topic, its consumers ack 100..200, writes 200

    unsubscribe  removes s; somebody subscribes to s anew, from the end
    keeper       is late with the cursor of the old s: refused

A transaction that is refused is tried in halves, until those that caused it are alone. Each of these asks its
tenure (see ``tenure``) before it is given up: a record that was written again because the topic is to move
has the same owner, and the positions that go with the topic are still to be written. When the store cannot be
reached everything stays as it is, to be written later: what a crash loses then is that messages are delivered
again.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from sava.errors import SavaError
from sava.metadata.commands import Compare, Operation, Put
from sava.metadata.store import MetadataStore
from sava.supervisor import Supervisor
from sava.tasks import cancelled
from sava.topics import specs
from sava.topics.specs import CursorRecord
from sava.topics.subscription import Subscription
from sava.topics.tenure import Tenure

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
    """A subscription whose position is to be kept."""

    key: str
    subscription: Subscription
    tenure: Tenure
    exists: Compare
    """That the subscription is still this one."""


class CursorKeeper:
    """Owned by the event loop."""

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
        cursor.subscription.when_dirty(partial(self._note, cursor))

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
            self._changed = {each for each in self._changed & self._kept if each.subscription.is_dirty}
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
        records = [(cursor, cursor.subscription.cursor_record(cursor.tenure.epoch)) for cursor in part]
        puts: list[Operation] = [Put(cursor.key, _encode(record)) for cursor, record in records]
        if len(part) > 1 and sum(len(put.value) for put in puts if isinstance(put, Put)) > MAX_BYTES:
            await self._write_halves(part)
            return
        holds = {cursor.tenure: cursor.tenure.holds for cursor in part}
        result = await self._store.txn((*holds.values(), *(cursor.exists for cursor in part)), puts)
        if result.succeeded:
            for cursor, record in records:
                cursor.subscription.mark_stored(record)
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
