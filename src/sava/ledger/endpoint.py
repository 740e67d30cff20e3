"""The endpoint of this broker's disk: it answers for its own ledgers, and for its copies of other brokers'.

A recoverer asks the owner's disk like any other, whether the owner is the process that it was or a new one.
For the own ledgers the log answers:

* **Fence** ends the open generation, if it is this one: nothing more is acknowledged under it, all that was
  queued becomes durable, the epoch and the end are written down, and then the answer leaves.
* **Check** and **Read** read the log.
* **WriteBack** cannot put bytes back into the log, which has grown since; they are kept as a copy like any
  other disk's, which begins where the log's part ends. The next ledger re-appends them (``Generations``).

**Generations.** Which part of the own log belongs to which ledger is written down beside the log.

A broker has one log, and a ledger for each of its generations: from where it was opened to where it was
ended, by a fence or by the end of the process. Positions continue from one to the next.

    log     ──────────────┬─────────────┬──────────────────────────────
    ledger  41            │ uncommitted │ 57
                 end of 41 ┘             └ start of 57

A recovery decides where a ledger ends (``closed``). What stands in the log between there and the end of that
generation was never acknowledged: this *uncommitted tail* is left out when the log is read at the next start.
So a generation with an uncommitted tail is remembered until the log does not hold that part any more, which
may be long after any topic needs the ledger itself. The other way round the ledger may continue where this
disk lost its last writes: this *missing range* is fetched from the disks that have it, and *re-appended* in
the next ledger before that is opened to topics.

The file is replaced as a whole: written under another name, synced, renamed, the directory synced. A thread
does that, since a disk may hang for seconds, and the event loop has heartbeats to send meanwhile. So a change
takes time: others see it when it is durable, and each change is decided on what the one before it left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

import msgspec

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
from sava.wal import Disk, DiskFull, FileMissing, LogCorrupt, PositionOutside

log = logging.getLogger(__name__)

_FILE: Final = "generations.json"
_NEW: Final = "generations.new"


class Generation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One ledger of this disk."""

    incarnation: int
    start: int
    end: int | None = None
    """Where the log was when it ended; None: it is open."""
    fence: int = 0
    """The greatest epoch that was promised."""
    closed: int | None = None
    """Where the ledger ends, once that was decided."""
    reappended: int | None = None
    """Where what was fetched from other disks ends in the log, once it is there, in the next ledger."""

    @property
    def missing_range(self) -> tuple[int, int] | None:
        """The part of the ledger that this disk does not have."""
        if self.closed is None or self.end is None or self.reappended is not None or self.closed <= self.end:
            return None
        return self.end, self.closed

    @property
    def uncommitted_tail(self) -> tuple[int, int] | None:
        """What stands in the log and is not part of the ledger."""
        if self.closed is None or self.end is None or self.closed >= self.end:
            return None
        return self.closed, self.end

    @property
    def last(self) -> int:
        """Where the last of it ends in the log."""
        return max(self.end or 0, self.reappended or 0)


class _Kept(msgspec.Struct, frozen=True):
    storage: str
    generations: tuple[Generation, ...]


Decide = Callable[[Generation | None], Generation | None]
"""What becomes of a generation; None: nothing changes."""


class Generations:
    """Owned by the event loop. A thread writes the file, for one change at a time."""

    def __init__(self, disk: Disk) -> None:
        """Raises LogCorrupt."""
        self._disk = disk
        self.known: dict[int, Generation] = {}
        """By incarnation; changed by ``change`` alone."""
        self._storage = ""
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()
        with suppress(FileMissing):
            file = disk.open(_FILE)
            try:
                data = file.read(0, file.size())
            finally:
                file.close()
            try:
                kept = msgspec.json.decode(data, type=_Kept)
            except msgspec.DecodeError as error:
                raise LogCorrupt(disk.path, _FILE, 0, f"not a list of ledgers ({error})") from error
            self._storage = kept.storage
            self.known = {generation.incarnation: generation for generation in kept.generations}

    async def belong_to(self, storage: StorageId, found_end: int) -> None:
        """The log is open: it ended at ``found_end``. Generations of another disk's log are dropped.

        A generation whose end was not written down ended where the next one began, at the latest. The
        messages of that one must not be left out with it."""
        if self._storage != storage:
            self._storage, self.known = storage, {}
        end = found_end
        for generation in reversed(list(self.known.values())):
            if generation.end is None:
                await self.keep(msgspec.structs.replace(generation, end=max(generation.start, end)))
            end = min(end, generation.start)

    @property
    def uncommitted_tails(self) -> list[tuple[int, int]]:
        return [
            generation.uncommitted_tail
            for generation in self.known.values()
            if generation.uncommitted_tail is not None
        ]

    def __iter__(self) -> Iterator[Generation]:
        return iter(list(self.known.values()))

    async def keep(self, generation: Generation) -> None:
        """Durable on return. Raises DiskFull, DiskFailed."""
        await self.change(generation.incarnation, lambda _: generation)

    async def forget(self, incarnation: int) -> None:
        await self._change(
            lambda: {number: generation for number, generation in self.known.items() if number != incarnation}
        )

    async def change(self, incarnation: int, decide: Decide) -> None:
        """Durable on return. ``decide`` gets the generation as the last change left it: two changes that are
        under way together (an end, and a promise to a recoverer) must not undo each other. Raises DiskFull,
        DiskFailed."""

        def changed() -> dict[int, Generation]:
            generation = decide(self.known.get(incarnation))
            return self.known if generation is None else {**self.known, incarnation: generation}

        await self._change(changed)

    async def settled(self) -> None:
        """Wait for changes whose callers were cancelled."""
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _change(self, changed: Callable[[], dict[int, Generation]]) -> None:
        """A caller that is cancelled leaves its change under way: the thread writes the file all the same.
        The next change must not write it at the same time, nor start from what was before."""
        task = asyncio.create_task(self._change_alone(changed), name="generations")
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        await asyncio.shield(task)

    async def _change_alone(self, changed: Callable[[], dict[int, Generation]]) -> None:
        async with self._changing:
            generations = changed()
            if generations != self.known:
                await asyncio.to_thread(self._store, generations)
                self.known = generations

    def _store(self, generations: dict[int, Generation]) -> None:
        """(On a thread.)"""
        with suppress(FileMissing):
            self._disk.remove(_NEW)
        file = self._disk.open(_NEW, create=True)
        try:
            file.write(0, [msgspec.json.encode(_Kept(self._storage, tuple(generations.values())))])
            file.sync()
        finally:
            file.close()
        self._disk.rename(_NEW, _FILE)
        self._disk.sync_dir()


# -- this disk as one that is asked --------------------------------------------------------------------------


class Ended(NamedTuple):
    """Of a generation that was open until now."""

    end: int
    commit: int


EndGeneration = Callable[[int], Awaitable[Ended | None]]
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
        self.end_generation: EndGeneration = _no_generation
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
        return self._generations.known.get(ledger.incarnation) if ledger.broker == self._broker else None

    # -- fencing -----------------------------------------------------------------------------

    async def _fence(self, origin: StorageId, message: Fence, reply: Reply) -> None:
        incarnation = message.ledger.incarnation
        async with self._fencing:
            ended = await self.end_generation(incarnation)
            generation = self._generations.known.get(incarnation)
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


async def _no_generation(_: int) -> Ended | None:
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
