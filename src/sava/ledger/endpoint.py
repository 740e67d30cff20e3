"""The endpoint of this broker's disk: it answers for its own ledgers, and for its copies of other brokers'.

A recoverer asks the owner's disk like any other, whether the owner is the process that it was or a new one.
For the own ledgers the log answers:

* **Fence** ends the open generation, if it is this one: nothing more is acknowledged under it, all that was
  queued becomes durable, the epoch and the end are written down, and then the answer leaves.
* **Check** and **Read** read the log.
* **WriteBack** cannot put bytes back into the log, which has grown since; they are kept as a copy like any
  other disk's, which begins where the log's part ends. The next ledger re-appends them (``generations``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import NamedTuple

import msgspec

from sava.ledger.generations import Generation, Generations
from sava.ledger.mirror_log import WalRangeReader
from sava.ledger.protocol import (
    Check,
    CheckAnswer,
    CopyState,
    Fence,
    FenceAnswer,
    Join,
    LedgerAppend,
    LedgerId,
    LedgerRefused,
    Message,
    Range,
    Read,
    ReadAnswer,
    RefusalReason,
    StorageId,
    Trim,
    WriteBack,
)
from sava.ledger.protocol.record import without
from sava.ledger.store import MirrorStore, Reply
from sava.storage.journal import Journal
from sava.tasks import cancelled, spawn
from sava.wal import DiskFull, PositionOutside

log = logging.getLogger(__name__)


class Ended(NamedTuple):
    """Of a generation that went on until now."""

    end: int
    commit: int


EndLife = Callable[[int], Awaitable[Ended | None]]
"""End the generation of this incarnation if it is open; None: its end is written down already."""


class LedgerEndpoint:
    """Owned by the event loop."""

    def __init__(
        self,
        broker: int,
        journal: Journal,
        generations: Generations,
        copies: MirrorStore,
        older: WalRangeReader,
        *,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._broker = broker
        self._journal = journal
        self._generations = generations
        self._copies = copies
        self._older = older
        self._fail = fail
        self.storage = StorageId(journal.identity.storage_id)
        self.end_life: EndLife = _no_life
        self._commits: dict[int, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._fencing = asyncio.Lock()
        self.fences = 0
        """Answered for own ledgers, for figures."""

    def receive(self, origin: StorageId, message: Message, reply: Reply) -> None:
        generation = self._generation(message.ledger)
        if message.storage != self.storage or origin != self.storage:
            self._copies.receive(origin, message, reply)
        elif generation is None:
            # This log's ledger, and nothing is known of it: that is not to say that it is empty.
            reply(LedgerRefused(message.ledger, self.storage, RefusalReason.NOT_JOINED))
        elif isinstance(message, (Join, LedgerAppend)):
            reply(LedgerRefused(message.ledger, self.storage, RefusalReason.FENCED, max(1, generation.fence)))
        elif isinstance(message, Trim):
            reply(message)
        elif isinstance(message, WriteBack):
            self._write_back(origin, message, generation, reply)
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

    def _generation(self, ledger: LedgerId) -> Generation | None:
        return self._generations.get(ledger.incarnation) if ledger.broker == self._broker else None

    # -- fencing -----------------------------------------------------------------------------

    async def _fence(self, origin: StorageId, message: Fence, reply: Reply) -> None:
        incarnation = message.ledger.incarnation
        async with self._fencing:
            ended = await self.end_life(incarnation)
            generation = self._generations.get(incarnation)
            if generation is None:
                return  # trimmed away meanwhile: its record is gone
            if message.epoch < generation.fence:
                reply(LedgerRefused(message.ledger, self.storage, RefusalReason.FENCED, generation.fence))
                return
            if ended is not None:
                self._commits[incarnation] = ended.commit
            try:
                await self._generations.change(incarnation, partial(_promised, message.epoch, ended))
            except DiskFull as error:
                log.warning("ledgers: a fence is not answered ledger=%s error=%s", message.ledger, error)
                return  # it is asked again
        self.fences += 1
        # What was written back may be there as a copy, which obeys the same epoch.
        self._copies.receive(origin, message, partial(self._fenced, message, reply))

    def _fenced(self, message: Fence, reply: Reply, answer: Message) -> None:
        generation = self._generation(message.ledger)
        if not isinstance(answer, FenceAnswer) or generation is None:
            reply(answer)
            return
        assert generation.end is not None, "the host says where a generation ended"
        behind = answer.copy.end if answer.copy is not None else 0
        floor = min(max(generation.start, self._journal.floor), generation.end)
        commit = self._commits.get(generation.incarnation, 0)
        state = CopyState(generation.start, floor, max(generation.end, behind), commit)
        reply(FenceAnswer(message.ledger, self.storage, answer.epoch, state))

    # -- reading -----------------------------------------------------------------------------

    async def _check(self, origin: StorageId, message: Check, reply: Reply) -> None:
        generation = self._generation(message.ledger)
        end = min(message.end, generation.end or 0) if generation is not None else 0
        bad: list[Range] = []
        if message.start < end:
            whole = Range(message.start, end)
            intact = await asyncio.to_thread(partial(_intact, self._older, whole))
            bad += without(whole, intact)
        if end < message.end:
            behind = msgspec.structs.replace(message, start=max(message.start, end))
            answer = await self._of_copy(origin, behind)
            bad += answer.bad if isinstance(answer, CheckAnswer) else ()
        reply(CheckAnswer(message.ledger, self.storage, message.start, message.end, tuple(bad)))

    async def _read(self, origin: StorageId, message: Read, reply: Reply) -> None:
        generation = self._generation(message.ledger)
        end = min(message.end, generation.end or 0) if generation is not None else 0
        if message.start >= end:
            reply(await self._of_copy(origin, message))
            return
        read = partial(_read, self._older, message.start, end, message.max_bytes)
        data = await asyncio.to_thread(read)
        reply(ReadAnswer(message.ledger, self.storage, message.start, data))

    async def _of_copy(self, origin: StorageId, message: Check | Read) -> Message:
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._copies.receive(origin, message, future.set_result)
        return await future

    # -- writing back ------------------------------------------------------------------------

    def _write_back(
        self, origin: StorageId, message: WriteBack, generation: Generation, reply: Reply
    ) -> None:
        end = generation.end if generation.end is not None else 0
        has_copy = self._copies.state(message.ledger) is not None
        if message.position < end or (message.position > end and not has_copy):
            reply(LedgerRefused(message.ledger, self.storage, RefusalReason.GAP, generation.fence, end))
        else:
            # The log's part is all that there was: to the copy it is the first.
            first = msgspec.structs.replace(message, is_first=not has_copy)
            self._copies.receive(origin, first, reply)

    async def close(self) -> None:
        await cancelled(*self._tasks)


def _promised(epoch: int, ended: Ended | None, generation: Generation | None) -> Generation | None:
    if generation is None:
        return None
    end = generation.end if ended is None else ended.end
    return msgspec.structs.replace(generation, fence=epoch, end=end)


async def _no_life(_: int) -> Ended | None:
    return None


def _read(older: WalRangeReader, start: int, end: int, max_bytes: int) -> bytes:
    try:
        return older.read(start, end, max_bytes)
    except PositionOutside:
        return b""


def _intact(older: WalRangeReader, whole: Range) -> list[Range]:
    try:
        return older.intact(whole.start, whole.end)
    except PositionOutside:
        return []
