"""OwnDisk: this broker's disk as one that holds journals: its own, and copies of others'.

A coordinator asks the owner's disk like any other, whether the owner is the process that it was or a new one.
For the own journals the log answers:

* **Fence** ends the life that goes on, if it is this one: nothing more is acknowledged under it, all that was
  queued becomes durable, the epoch and the end are written down, and then told.
* **Check** and **Read** read the log.
* **WriteBack** cannot put bytes back into the log, which has gone on; they are kept as a copy like anybody
  else's, which begins where the log's part ends. The next journal adopts them (``lives``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import msgspec

from sava.ledger.generations import Life, Lives
from sava.ledger.mirror_log import Stretches
from sava.ledger.protocol import (
    Append,
    Bytes,
    Check,
    Checked,
    CopyState,
    Fence,
    Fenced,
    Join,
    JournalId,
    Message,
    Range,
    Read,
    Refusal,
    Refused,
    StorageId,
    Trim,
    WriteBack,
)
from sava.ledger.protocol.record import without
from sava.ledger.store import Copies, Reply
from sava.storage.journal import Journal
from sava.tasks import cancelled, spawn
from sava.wal import DiskFull, PositionOutside

log = logging.getLogger(__name__)


class Ended(NamedTuple):
    """Of a life that went on until now."""

    end: int
    commit: int


EndLife = Callable[[int], Awaitable[Ended | None]]
"""End the life of this incarnation if it goes on; None: its end is written down already."""


class OwnDisk:
    """Owned by the event loop."""

    def __init__(
        self,
        broker: int,
        journal: Journal,
        lives: Lives,
        copies: Copies,
        older: Stretches,
        *,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._broker = broker
        self._journal = journal
        self._lives = lives
        self._copies = copies
        self._older = older
        self._fail = fail
        self.storage = StorageId(journal.identity.storage_id)
        self.end_life: EndLife = _no_life
        self._commits: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._fencing = asyncio.Lock()
        self.fences = 0
        """Answered for own journals, for figures."""

    def receive(self, origin: StorageId, message: Message, reply: Reply) -> None:
        life = self._life(message.journal)
        if message.storage != self.storage or origin != self.storage:
            self._copies.receive(origin, message, reply)
        elif life is None:
            # This log's journal, and nothing is known of it: that is not to say that it is empty.
            reply(Refused(message.journal, self.storage, Refusal.NOT_JOINED))
        elif isinstance(message, (Join, Append)):
            reply(Refused(message.journal, self.storage, Refusal.FENCED, max(1, life.fence)))
        elif isinstance(message, Trim):
            reply(message)
        elif isinstance(message, WriteBack):
            self._write_back(origin, message, life, reply)
        elif isinstance(message, (Fence, Check, Read)):
            task = spawn(self._look(origin, message, reply), name="looking", failed=self._fail)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _look(self, origin: StorageId, message: Fence | Check | Read, reply: Reply) -> None:
        if isinstance(message, Fence):
            await self._fence(origin, message, reply)
        elif isinstance(message, Check):
            await self._check(origin, message, reply)
        else:
            await self._read(origin, message, reply)

    def forget_owner(self, reply: Reply) -> None:
        self._copies.forget_owner(reply)

    def _life(self, journal: JournalId) -> Life | None:
        return self._lives.get(journal.incarnation) if journal.broker == self._broker else None

    # -- fencing -----------------------------------------------------------------------------

    async def _fence(self, origin: StorageId, message: Fence, reply: Reply) -> None:
        incarnation = message.journal.incarnation
        async with self._fencing:
            ended = await self.end_life(incarnation)
            life = self._lives.get(incarnation)
            if life is None:
                return  # trimmed away meanwhile: its record is gone
            if message.epoch < life.fence:
                reply(Refused(message.journal, self.storage, Refusal.FENCED, life.fence))
                return
            if ended is not None:
                self._commits[incarnation] = ended.commit
            try:
                await self._lives.change(incarnation, partial(_promised, message.epoch, ended))
            except DiskFull as error:
                log.warning("journals: a fence is not answered journal=%s error=%s", message.journal, error)
                return  # it is asked again
        self.fences += 1
        # What was written back may be there as a copy, which obeys the same epoch.
        self._copies.receive(origin, message, partial(self._fenced, message, reply))

    def _fenced(self, message: Fence, reply: Reply, answer: Message) -> None:
        life = self._life(message.journal)
        if not isinstance(answer, Fenced) or life is None:
            reply(answer)
            return
        assert life.end is not None, "whoever ends a life says where"
        behind = answer.copy.end if answer.copy is not None else 0
        floor = min(max(life.start, self._journal.floor), life.end)
        commit = self._commits.get(life.incarnation, 0)
        state = CopyState(life.start, floor, max(life.end, behind), commit)
        reply(Fenced(message.journal, self.storage, answer.epoch, state))

    # -- reading -----------------------------------------------------------------------------

    async def _check(self, origin: StorageId, message: Check, reply: Reply) -> None:
        life = self._life(message.journal)
        end = min(message.end, life.end or 0) if life is not None else 0
        bad: list[Range] = []
        if message.start < end:
            whole = Range(message.start, end)
            intact = await asyncio.to_thread(partial(_intact, self._older, whole))
            bad += without(whole, intact)
        if end < message.end:
            behind = msgspec.structs.replace(message, start=max(message.start, end))
            answer = await self._of_copy(origin, behind)
            bad += answer.bad if isinstance(answer, Checked) else ()
        reply(Checked(message.journal, self.storage, message.start, message.end, tuple(bad)))

    async def _read(self, origin: StorageId, message: Read, reply: Reply) -> None:
        life = self._life(message.journal)
        end = min(message.end, life.end or 0) if life is not None else 0
        if message.start >= end:
            reply(await self._of_copy(origin, message))
            return
        read = partial(_read, self._older, message.start, end, message.max_bytes)
        data = await asyncio.to_thread(read)
        reply(Bytes(message.journal, self.storage, message.start, data))

    async def _of_copy(self, origin: StorageId, message: Check | Read) -> Message:
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._copies.receive(origin, message, future.set_result)
        return await future

    # -- writing back ------------------------------------------------------------------------

    def _write_back(self, origin: StorageId, message: WriteBack, life: Life, reply: Reply) -> None:
        end = life.end if life.end is not None else 0
        has_copy = self._copies.state(message.journal) is not None
        if message.position < end or (message.position > end and not has_copy):
            reply(Refused(message.journal, self.storage, Refusal.GAP, life.fence, end))
        else:
            # The log's part is all that there was: to the copy it is the first.
            first = msgspec.structs.replace(message, is_first=not has_copy)
            self._copies.receive(origin, first, reply)

    async def close(self) -> None:
        await cancelled(*self._tasks)


def _promised(epoch: int, ended: Ended | None, life: Life | None) -> Life | None:
    if life is None:
        return None
    end = life.end if ended is None else ended.end
    return msgspec.structs.replace(life, fence=epoch, end=end)


async def _no_life(_: int) -> Ended | None:
    return None


def _read(older: Stretches, start: int, end: int, max_bytes: int) -> bytes:
    try:
        return older.read(start, end, max_bytes)
    except PositionOutside:
        return b""


def _intact(older: Stretches, whole: Range) -> list[Range]:
    try:
        return older.intact(whole.start, whole.end)
    except PositionOutside:
        return []
