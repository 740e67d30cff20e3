"""The mirror store: what this disk holds of other brokers' ledgers.

Each mirror log is a ``LedgerMember`` (which decides) over ``MirrorFiles`` (which write), and has at most one
work on the disk at a time. What arrives while it runs waits in the member and is the next work: one
sync serves it all. Works of different logs run side by side in a few threads, so that the syncs of one
owner's ledger do not wait for those of another's; the filesystem joins them where it can.

Memory is bounded by the owners: none sends more than its window beyond what was said to be durable.

An answer goes to the connection that asked. The owner's connection hears how far its ledger is durable; the
latest connection that spoke for the ledger counts, for an owner has one connection at a time.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Final

from sava.errors import SavaError
from sava.ledger.mirror_log import MirrorFiles, directory_name, ledger_of_directory
from sava.ledger.protocol import (
    Check,
    CheckAnswer,
    CopyState,
    Durable,
    Fence,
    FenceAnswer,
    Join,
    LedgerAppend,
    LedgerId,
    LedgerMember,
    LedgerRefused,
    Message,
    Range,
    Read,
    ReadAnswer,
    RefusalReason,
    StorageId,
    Trim,
    Work,
    WriteBack,
)
from sava.ledger.protocol.record import without
from sava.ledger.records import LedgerRecords
from sava.tasks import cancelled, spawn
from sava.wal import DiskFull, LocalDisk, PositionOutside, Record

log = logging.getLogger(__name__)

Reply = Callable[[Message], None]

THREADS: Final = 8
READ_THREADS: Final = 2
NOTE_BYTES: Final = 16 << 20
"""Behind the note's watermark a bad record counts as torn. So much is read again after a crash."""
IDLE_S: Final = 1.0
SWEEP_S: Final = 30.0


@dataclass(slots=True)
class _Asked:
    """A question that is answered when something is durable."""

    message: Fence | WriteBack
    reply: Reply

    @property
    def end(self) -> int:
        return self.message.position + len(self.message.data) if isinstance(self.message, WriteBack) else 0


class MirrorLog:
    """Of one ledger. Owned by the event loop; its files by the thread that does its work."""

    def __init__(self, files: MirrorFiles, storage: StorageId, syncing: SyncThreads) -> None:
        self.files = files
        self.member = LedgerMember(storage, files.note, end=files.end, note_bytes=NOTE_BYTES)
        self._syncing = syncing
        self._loop = asyncio.get_running_loop()
        self._is_working = False
        self._settled = asyncio.Event()
        self._owner: Reply | None = None
        self._asked: list[_Asked] = []
        self._idle: asyncio.TimerHandle | None = None
        self._failed: Callable[[BaseException], None] = lambda _: None
        self._is_closing = False
        self.syncs = 0
        """For figures."""

    def when_failed(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed

    @property
    def state(self) -> CopyState | None:
        note = self.files.note
        if note.base is None:
            return None
        return CopyState(note.base, note.floor, self.member.durable_end, note.commit)

    def receive(self, message: Join | LedgerAppend | Fence | WriteBack | Trim, reply: Reply) -> None:
        if isinstance(message, (Join, LedgerAppend)):
            self._owner = reply
        answers = self.member.receive(message)
        for answer in answers:
            reply(answer)
        if isinstance(message, (Fence, WriteBack)) and not answers:
            self._asked.append(_Asked(message, reply))
        if isinstance(message, Trim) and not answers:
            reply(message)
        self._pump()

    def _pump(self, *, is_idle: bool = False) -> None:
        work = None if self._is_closing else self.member.poll(is_idle=is_idle)
        if work is None:
            return
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        self._is_working = True
        self._syncing.do(partial(self.files.perform, work), partial(self._worked, work))

    def _worked(self, work: Work, error: BaseException | None) -> None:
        self._is_working = False
        self._settled.set()
        self.syncs += 1
        if error is None:
            answers = self.member.done(work.number)
        elif isinstance(error, DiskFull):
            log.warning("ledgers: no room for a copy ledger=%s error=%s", self.member.ledger, error)
            answers = self.member.refuse(work.number)
        else:
            self._failed(error)
            return
        for answer in answers:
            self._answer(answer)
        self._pump()
        if not self._is_working and self._idle is None and not self._is_closing:
            self._idle = self._loop.call_later(IDLE_S, self._rest)

    def _rest(self) -> None:
        self._idle = None
        if not self._is_working:
            self._pump(is_idle=True)

    def _answer(self, answer: Message) -> None:
        if not isinstance(answer, FenceAnswer) and self._owner is not None:
            self._owner(answer)
        left: list[_Asked] = []
        for asked in self._asked:
            if _is_answer(answer, asked):
                asked.reply(answer)
            else:
                left.append(asked)
        self._asked = left

    def forget_owner(self, reply: Reply) -> None:
        """The connection is gone."""
        if self._owner is reply:
            self._owner = None

    async def settle(self) -> None:
        """Until nothing is on its way to the disk, and nothing more will be."""
        self._is_closing = True
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None
        while self._is_working:
            self._settled.clear()
            await self._settled.wait()


def _is_answer(answer: Message, asked: _Asked) -> bool:
    match answer:
        case FenceAnswer(epoch=epoch):
            # A later fence has taken the place of an earlier one: that one's recoverer was overtaken.
            return isinstance(asked.message, Fence) and asked.message.epoch <= epoch
        case Durable(end=end):
            return isinstance(asked.message, WriteBack) and asked.end <= end
        case _:
            return isinstance(asked.message, WriteBack)


class MirrorStore:
    """All copies of one disk. Owned by the event loop."""

    def __init__(self, disk: LocalDisk, storage: StorageId, *, fail: Callable[[BaseException], None]) -> None:
        """``disk``: the directory for copies. ``fail`` is called when the disk has failed: stop the process,
        for nothing that it would say can be believed."""
        self.storage = storage
        self._disk = disk
        self._fail = fail
        self._failure: BaseException | None = None
        self._syncing = SyncThreads(THREADS)
        self._threads = ThreadPoolExecutor(READ_THREADS, thread_name_prefix="sava-mirror-read")
        self._is_closed = False
        self._copies: dict[LedgerId, MirrorLog] = {}
        self._looking: set[asyncio.Task[None]] = set()
        self._sweeping: asyncio.Task[None] | None = None

    @property
    def count(self) -> int:
        """For figures."""
        return len(self._copies)

    async def open(self) -> None:
        """Find the copies of earlier generations of this process. Raises LogCorrupt, DiskFailed."""
        loop = asyncio.get_running_loop()
        for ledger, files in await loop.run_in_executor(self._threads, self._restore):
            self._copies[ledger] = self._adopt(files)

    def _restore(self) -> list[tuple[LedgerId, MirrorFiles]]:
        found = []
        for name in self._disk.directories():
            ledger = ledger_of_directory(name)
            files = MirrorFiles.restore(self._disk.directory(name)) if ledger is not None else None
            if ledger is not None and files is not None:
                found.append((ledger, files))
        return found

    def _adopt(self, files: MirrorFiles) -> MirrorLog:
        copy = MirrorLog(files, self.storage, self._syncing)
        copy.when_failed(self._failed)
        return copy

    def _failed(self, failure: BaseException) -> None:
        if self._failure is None:
            self._failure = failure
            self._fail(failure)

    # -- messages ----------------------------------------------------------------------------

    def receive(self, origin: StorageId, message: Message, reply: Reply) -> None:
        """``origin``: the owner's disk. ``reply`` is called with the answer, now or later, once or (for an
        owner's stream) as often as there is something to say; or never, when the disk has failed."""
        if self._failure is not None or self._is_closed:
            return
        if message.storage != self.storage:
            reply(LedgerRefused(message.ledger, self.storage, RefusalReason.OTHER_DISK))
        elif isinstance(message, (Check, Read)):
            task = spawn(self._look(message, reply), name="looking", failed=self._failed)
            self._looking.add(task)
            task.add_done_callback(self._looking.discard)
        elif isinstance(message, (Join, LedgerAppend, Fence, WriteBack, Trim)):
            copy = self._copies.get(message.ledger)
            if copy is None and isinstance(message, (LedgerAppend, Trim)):
                refusal = LedgerRefused(message.ledger, self.storage, RefusalReason.NOT_JOINED)
                reply(message if isinstance(message, Trim) else refusal)
                return
            try:
                copy = copy or self._create(origin, message.ledger)
            except DiskFull:
                reply(LedgerRefused(message.ledger, self.storage, RefusalReason.FULL))
                return
            except SavaError as error:
                self._failed(error)
                return
            copy.receive(message, reply)

    def _create(self, origin: StorageId, ledger: LedgerId) -> MirrorLog:
        files = MirrorFiles.create(self._disk.directory(directory_name(ledger)), origin, ledger)
        copy = self._copies[ledger] = self._adopt(files)
        return copy

    async def _look(self, message: Check | Read, reply: Reply) -> None:
        """Only what is durable, and only what verifies."""
        copy = self._copies.get(message.ledger)
        loop = asyncio.get_running_loop()
        durable = copy.member.durable_end if copy is not None else 0
        if isinstance(message, Read):
            data = b""
            if copy is not None and message.start < durable:
                end = min(message.end, durable)
                read = partial(_read, copy.files, message.start, end, message.max_bytes)
                data = await loop.run_in_executor(self._threads, read)
            reply(ReadAnswer(message.ledger, self.storage, message.start, data))
            return
        whole = Range(message.start, message.end)
        intact: list[Range] = []
        if copy is not None and message.start < durable:
            check = partial(_intact, copy.files, message.start, min(message.end, durable))
            intact = await loop.run_in_executor(self._threads, check)
        bad = tuple(without(whole, intact))
        if bad:
            log.warning("ledgers: a copy is damaged ledger=%s parts=%s", message.ledger, bad)
        reply(CheckAnswer(message.ledger, self.storage, message.start, message.end, bad))

    def forget_owner(self, reply: Reply) -> None:
        for copy in self._copies.values():
            copy.forget_owner(reply)

    # -- knowing -----------------------------------------------------------------------------

    @property
    def ledgers(self) -> list[LedgerId]:
        return list(self._copies)

    def copy(self, ledger: LedgerId) -> MirrorLog | None:
        return self._copies.get(ledger)

    def state(self, ledger: LedgerId) -> CopyState | None:
        copy = self._copies.get(ledger)
        return copy.state if copy is not None else None

    def scan(self, ledger: LedgerId, start: int, end: int) -> Iterator[Record]:
        """Verified records of callers' kinds, both borders being borders of records. Blocks on the disk: for
        worker threads. Raises LogCorrupt where one is not intact, PositionOutside where it is not held."""
        copy = self._copies.get(ledger)
        if copy is None:
            raise PositionOutside(f"this disk has no copy of ledger {ledger}")
        return copy.files.stretches.records(start, end)

    # -- ending ------------------------------------------------------------------------------

    async def forget(self, ledger: LedgerId) -> None:
        copy = self._copies.pop(ledger, None)
        if copy is not None:
            await copy.settle()
            await asyncio.get_running_loop().run_in_executor(self._threads, self._delete, copy.files)
            log.info("ledgers: a copy is deleted ledger=%s", ledger)

    def _delete(self, files: MirrorFiles) -> None:
        files.delete()
        self._disk.remove_directory(directory_name(files.note.ledger))

    async def sweep(self, records: LedgerRecords) -> None:
        """Delete the copies of ledgers whose record is gone: a number is never used again."""
        for ledger in self.ledgers:
            if await records.get(ledger) is None:
                await self.forget(ledger)

    def start(self, records: LedgerRecords) -> None:
        """Sweep from time to time."""
        self._sweeping = spawn(self._sweep(records), name="copies", failed=self._failed)

    async def _sweep(self, records: LedgerRecords) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await self.sweep(records)
            except (SavaError, TimeoutError) as error:
                log.info("ledgers: cannot look through the copies, retrying error=%s", error)

    async def close(self) -> None:
        self._is_closed = True
        await cancelled(self._sweeping)
        await asyncio.gather(*self._looking, return_exceptions=True)
        for copy in self._copies.values():
            await copy.settle()
            copy.files.close()
        # Not on the loop: a disk that hangs would stop it, and with it every limit for stopping.
        await asyncio.to_thread(self._syncing.close)
        await asyncio.to_thread(self._threads.shutdown)


def _read(files: MirrorFiles, start: int, end: int, max_bytes: int) -> bytes:
    try:
        return files.stretches.read(start, end, max_bytes)
    except PositionOutside:
        return b""


def _intact(files: MirrorFiles, start: int, end: int) -> list[Range]:
    try:
        return files.stretches.intact(start, end)
    except PositionOutside:
        return []


Job = Callable[[], None]
Done = Callable[[BaseException | None], None]


class SyncThreads:
    """The threads that write and sync mirror logs.

    A producer waits for each mirror, so what lies between a message and its sync counts: a job goes to a
    thread by a queue, and its outcome back to the event loop by one call, with no future in between. Threads
    are started as they are needed, up to a bound, and stay.

    Owned by the event loop that made it; ``done`` is called there.
    """

    def __init__(self, threads: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[tuple[Job, Done] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._max_threads = threads
        self._busy = 0

    def do(self, job: Job, done: Done) -> None:
        """Run the job on a thread, then ``done`` with None or what it raised."""
        self._busy += 1
        if self._busy > len(self._threads) < self._max_threads:
            thread = threading.Thread(target=self._serve, name="sava-mirror", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queue.put((job, done))

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            job, done = item
            outcome: BaseException | None = None
            try:
                job()
            except BaseException as error:  # noqa: BLE001 (it belongs to the caller that waits)
                outcome = error
            try:
                self._loop.call_soon_threadsafe(self._finish, done, outcome)
            except RuntimeError:
                return  # the loop is closed: no caller waits any more

    def _finish(self, done: Done, outcome: BaseException | None) -> None:
        self._busy -= 1
        done(outcome)

    def close(self) -> None:
        """When nothing is under way."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
