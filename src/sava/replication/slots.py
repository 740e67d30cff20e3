"""Cursors of links, made and removed by the leader: what keeps messages here until a remote has them.

A topic that comes under a policy gets a cursor for each remote, in each partition, by which retention spares
what is not copied. It is there before anything is copied, since a remote may be down from the first day. The
runner moves it on (``sava.pipeline.replicate.acks``); it goes back when an operator asks for a topic to be
copied again; when no policy wants the link any more it goes, and retention continues as without it.

What is there is read from the metadata store, where subscriptions have their records, and compared with what
is wanted in every pass; owners are asked only about differences. One that cannot be asked at present is asked
in the next pass.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

from sava.errors import SavaError
from sava.metadata.store import MetadataStore
from sava.replication.records import EARLIEST, LATEST
from sava.storage.keys import replication_slot
from sava.tasks import cancelled
from sava.topics import specs
from sava.topics.names import TopicName
from sava.topics.specs import EARLIEST as FIRST
from sava.topics.specs import AtOffset, AtTime, Position

log = logging.getLogger(__name__)

AT_A_TIME: Final = 16
PASS_S: Final = 5.0
"""For the differences of one pass; a policy that is set waits for it."""


SetSlot = Callable[[TopicName, str, Position], Awaitable[None]]
"""Asks the owner of a topic to make a slot at a position, or to move it back to one."""
DropSlot = Callable[[TopicName, str], Awaitable[None]]


class ReplicationSlot(NamedTuple):
    """One partition and one remote."""

    remote: str
    topic: TopicName

    @property
    def name(self) -> str:
        return replication_slot(self.remote)


class ReplicationSlots:
    """Owned by the event loop."""

    def __init__(self, store: MetadataStore, *, pin: SetSlot, rewind: SetSlot, unpin: DropSlot) -> None:
        self._store = store
        self._pin = pin
        self._rewind = rewind
        self._unpin = unpin
        self._failing: dict[ReplicationSlot, str] = {}

    def exists(self, cursor: ReplicationSlot) -> bool:
        """As far as this node knows."""
        return self._store.local.get(specs.subscription_key(cursor.topic, cursor.name)) is not None

    async def make(self, wanted: Iterable[tuple[ReplicationSlot, Position]]) -> bool:
        """Those that are missing; whether all are there then."""
        missing = [(cursor, start) for cursor, start in wanted if not self.exists(cursor)]

        async def pin(cursor: ReplicationSlot, start: Position) -> None:
            await self._pin(cursor.topic, cursor.name, start)
            log.info("replication: keeps topic=%s for remote=%s from=%s", cursor.topic, cursor.remote, start)

        return await self._each([(cursor, partial(pin, cursor, start)) for cursor, start in missing])

    async def rewind(self, wanted: Iterable[tuple[ReplicationSlot, Position]]) -> bool:
        """What is behind these positions is to be copied again; whether all are where they should be. None is
        moved forward, so it can be done again and again."""
        return await self._each(
            [(cursor, partial(self._rewind, cursor.topic, cursor.name, start)) for cursor, start in wanted]
        )

    async def remove(self, unwanted: Iterable[ReplicationSlot]) -> bool:
        """Those that are there; whether none is there then."""
        there = [cursor for cursor in unwanted if self.exists(cursor)]

        async def unpin(cursor: ReplicationSlot) -> None:
            await self._unpin(cursor.topic, cursor.name)
            log.info("replication: keeps topic=%s for remote=%s no more", cursor.topic, cursor.remote)

        return await self._each([(cursor, partial(unpin, cursor)) for cursor in there])

    async def _each(self, work: Sequence[tuple[ReplicationSlot, Callable[[], Awaitable[None]]]]) -> bool:
        """A few at a time, within the time of a pass. Each failure is logged once."""
        room = asyncio.Semaphore(AT_A_TIME)
        done: set[ReplicationSlot] = set()

        async def do(cursor: ReplicationSlot, call: Callable[[], Awaitable[None]]) -> None:
            async with room:
                try:
                    await call()
                except (SavaError, TimeoutError) as error:
                    self._failed(cursor, str(error))
                    return
            self._failing.pop(cursor, None)
            done.add(cursor)

        tasks = [asyncio.create_task(do(cursor, call)) for cursor, call in work]
        try:
            async with asyncio.timeout(PASS_S):
                await asyncio.gather(*tasks)
        except TimeoutError:
            pass  # the rest is for the next pass
        finally:
            await cancelled(*tasks)
        return len(done) == len(work)

    def _failed(self, cursor: ReplicationSlot, reason: str) -> None:
        if self._failing.get(cursor) != reason:
            self._failing[cursor] = reason
            log.warning(
                "replication: its cursor waits topic=%s remote=%s error=%s",
                cursor.topic,
                cursor.remote,
                reason,
            )


def first_position(start: str, offset: int | None) -> Position:
    """Where a policy starts; ``offset``: of one that starts at the latest, as it was taken down."""
    if start == EARLIEST:
        return FIRST
    if start == LATEST:
        return AtOffset(offset) if offset is not None else FIRST
    return AtTime(int(start))
