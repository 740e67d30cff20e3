"""CommitQueue: group commit. The way of a record of the journal from the queue to its answer.

    put ─▶ written, synced with its group ─▶ committed (``commitment``) ─▶ answered, in the order of the calls
           └─ refused: the disk is full ──── told behind what was written before it ─┘

**The door.** From the first refusal on the log refuses everything (why: see ``journal``), and so does this,
at the door, until whoever was refused was told and the queue behind it is empty.

**Lives.** A journal that is mirrored accepts nothing before its first life has begun and nothing between two
(``commitment``); who waits for the next is told when it begins, or that it will not be.

A failed write or sync is final: ``fail`` is called once, and the process must stop.

**Commitment.** From when on a frame that is durable here may be acknowledged.

Without others, that is at once. A journal that others mirror waits until enough of them have it, too; who
they are and how many is decided above (``mirroring``). The order of answers does not change: what the disk
refused is told behind what was written before it, and not sooner:

    a  10..20  durable here, not yet elsewhere
    b  20..21  refused: the disk is full
    told b     the topic takes everything in flight for failed, and gives out 10 again → a and its successor
               are two messages at one offset

A journal has *lives*: within one, what is written is one stream that the same disks hold. It ends when
somebody else has ended it (a fence), with the broker's registration, or with the process; what was in
flight then is not acknowledged, and whoever ended it decides whether it happened. Topics that were opened
in a life end with it.

**The log** behind a journal writes nothing behind what it refused (why: see ``journal``).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from sava.errors import RetryableError
from sava.storage.errors import ClosedUncommitted
from sava.storage.journal_index import JournalReplay
from sava.wal import Buffers, Disk, DiskFull, Done, Log, LogClosed, LogOptions, Record, Tap, Writer
from sava.wal.fullness import Fullness
from sava.wal.writer import Observe

# -- waiting for other disks -----------------------------------------------------------------------


class NotCommittable(RetryableError):
    """The journal accepts nothing at the moment, since nothing could be acknowledged."""


class AckQuorum(Protocol):
    """Of one life. Called on the event loop."""

    @property
    def is_degraded(self) -> bool:
        """What is told to be committed now is on fewer disks than it should be."""
        ...

    def check(self) -> None:
        """Raises NotCommittable when too few disks are there to ever commit what would be appended now."""
        ...

    def durable(self, end: int) -> int:
        """This disk has everything before ``end``; how far all is committed."""
        ...

    def trimmable(self, floor: int) -> int:
        """Everything before ``floor`` is in registered segments; how much of it this disk may let go."""
        ...


class Waiting(NamedTuple):
    end: int
    """Where the commitment must be. Of something refused: where what was before it ends."""
    finish: Callable[[BaseException | None], None]
    outcome: BaseException | None


class Uncommitted:
    """Answers of the disk, in order, until they may be told."""

    def __init__(self) -> None:
        self._waiting: deque[Waiting] = deque()
        self._end = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self, end: int, finish: Callable[[BaseException | None], None], outcome: BaseException | None
    ) -> None:
        self._end = max(self._end, end)
        self._waiting.append(Waiting(self._end, finish, outcome))

    def tell(self, position: int) -> None:
        """What lies before the position is committed."""
        waiting = self._waiting
        while waiting and waiting[0].end <= position:
            _, finish, outcome = waiting.popleft()
            finish(outcome)

    def fail(self, error: BaseException) -> None:
        """Nothing of it will be acknowledged. What the disk refused was refused for that reason."""
        while self._waiting:
            _, finish, outcome = self._waiting.popleft()
            finish(outcome or error)


# -- the log behind a journal ----------------------------------------------------------------------


_log = logging.getLogger(__name__)


class OrderedLog(Log):
    """Owned by the writer's thread."""

    _refusal: DiskFull | None = None

    def append_many(
        self, records: Sequence[tuple[int, Buffers]], *, is_synced_next: bool = False
    ) -> list[int]:
        if self._refusal is not None:
            raise DiskFull("refused behind a write that found the disk full") from self._refusal
        try:
            return super().append_many(records, is_synced_next=is_synced_next)
        except DiskFull as refusal:
            self._refusal = refusal
            raise

    def accept_again(self) -> None:
        self._refusal = None


async def open_log(disk: Disk, *, owner: str, options: LogOptions, found: JournalReplay) -> OrderedLog:
    """Raises what ``Log.open`` raises. If the caller is cancelled, the scan is broken off and the lock is
    free when this ends."""
    opening = asyncio.get_running_loop().run_in_executor(
        None,
        partial(
            OrderedLog.open,
            disk,
            owner=owner,
            new_storage_id=lambda: uuid.uuid4().hex,
            options=options,
            replay=found.take,
        ),
    )
    try:
        log = await asyncio.shield(opening)
    except asyncio.CancelledError:
        found.is_unwanted = True
        await _abandon(opening)
        raise
    assert isinstance(log, OrderedLog)
    return log


async def _abandon(opening: asyncio.Future[Log]) -> None:
    """Wait for a thread that cannot be interrupted, and undo what it has done. Whoever cancels meanwhile is
    served by the cancellation that is under way."""
    loop = asyncio.get_running_loop()
    await _settled(opening)
    if opening.exception() is None:
        closing = loop.run_in_executor(None, opening.result().close)
        await _settled(closing)
        if (failure := closing.exception()) is not None:
            _log.warning("the journal, opened for nobody, could not be closed: %s", failure)


async def _settled(future: asyncio.Future[Any]) -> None:
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([future])


# -- the queue -------------------------------------------------------------------------------------


_UNBOUNDED: Final = 1 << 62
"""The writer's own bound is not used: ``Journal.reserve`` waits where the writer would refuse."""


class CommitQueue:
    """Owned by the event loop; the log is of the writer's thread alone."""

    def __init__(
        self,
        log: OrderedLog,
        *,
        is_mirrored: bool,
        observe: Observe | None,
        moved: Callable[[int], None],
        answered: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """``moved`` is told a position before which everything is committed and answered for; ``answered`` is
        called when answers may have made room."""
        self._loop = asyncio.get_running_loop()
        self._log = log
        self._moved = moved
        self._answered = answered
        self._fail = fail
        self._is_shut = False
        self._is_reopening = False
        self._fullness = Fullness("journal", "messages are refused")
        self._uncommitted = Uncommitted()
        self._commitment: AckQuorum | None = None
        self._between_lives: BaseException | None = None
        if is_mirrored:
            self._between_lives = NotCommittable("the journal is not open yet")
        self.is_alive = not is_mirrored
        """Whether topics can be opened."""
        self._births: list[asyncio.Future[None]] = []
        """Whoever waits for the next life."""
        self._unborn: BaseException | None = None
        """Why no life is to come before another one is expected."""
        self.is_closed = False
        self.failure: BaseException | None = None
        self.syncs = 0
        """Groups that became durable, for figures."""
        self._writer = Writer(log, deliver=self._deliver, max_queued_bytes=_UNBOUNDED, observe=observe)

    # -- accepting ---------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether anything is accepted, if there is room."""
        return self.failure is None and not self.is_closed and self._between_lives is None

    def check_open(self) -> None:
        """Raises why nothing is accepted."""
        if self.failure is not None:
            raise self.failure
        if self.is_closed:
            raise LogClosed("the journal is closed")
        if self._between_lives is not None:
            raise self._between_lives

    def check(self) -> None:
        """Raises why a frame would fail: DiskFull, NotCommittable."""
        if self._is_shut:
            raise DiskFull("the journal's disk is full")
        if self._commitment is not None:
            self._commitment.check()

    def put(self, kind: int, payload: Buffers, size: int, positions: list[int], finish: Done) -> None:
        """Queue a record of this size. ``finish`` is called with None when it is committed; by then
        ``positions`` has where it is."""
        disk_done = partial(self._written, positions, size, partial(self._finish, finish))
        self._writer.append([(kind, payload)], disk_done, positions=positions)

    # -- answering ---------------------------------------------------------------------------

    def _deliver(self, complete: Callable[[], None]) -> None:
        """(On the writer's thread.) One call into the loop for each group."""
        self._loop.call_soon_threadsafe(self._complete_group, complete)

    def _complete_group(self, complete: Callable[[], None]) -> None:
        self.syncs += 1
        complete()
        if self._commitment is not None and self._uncommitted:
            # Another thread's, but a fact: it only grows, and only after a sync.
            self._tell(self._commitment.durable(self._log.durable_end))
        self._answered()

    def _written(self, positions: list[int], size: int, finish: Done, outcome: BaseException | None) -> None:
        """By the disk; others may be asked, too."""
        if isinstance(outcome, DiskFull):
            self._is_shut = True
            self._fullness.refused(outcome)
        elif outcome is not None:
            self.failed(outcome)
        elif self._fullness.is_full:
            self._fullness.passed()
        if self._between_lives is not None:
            finish(outcome or self._between_lives)
        elif self._commitment is None:
            finish(outcome)
        else:
            self._uncommitted.add(positions[0] + size if positions else 0, finish, outcome)
            if self.failure is not None:
                self._uncommitted.fail(self.failure)

    def _finish(self, finish: Done, outcome: BaseException | None) -> None:
        if isinstance(outcome, DiskFull):
            self._reopen()
        try:
            finish(outcome)
        except Exception as error:  # noqa: BLE001 (the others of the group must be told, too)
            self.failed(error)

    def _tell(self, position: int) -> None:
        self._uncommitted.tell(position)
        self._moved(position)

    def committed(self, position: int) -> None:
        """The commitment has moved to this position."""
        self._tell(position)
        self._answered()

    def _reopen(self) -> None:
        """Somebody was told that the disk was full. The door opens when everything that was queued behind the
        refused frame was answered for; all of it is told by then, since it waits for the same position."""
        if not self._is_reopening and not self.is_closed:
            self._is_reopening = True
            self._writer.run(lambda _: self._log.accept_again(), self._reopened)

    def _reopened(self, outcome: BaseException | None) -> None:
        self._is_shut = self._is_reopening = False
        if outcome is not None:
            self.failed(outcome)

    def failed(self, failure: BaseException) -> None:
        if self.failure is None:
            self.failure = failure
            self._fail(failure)

    # -- lives -------------------------------------------------------------------------------

    @property
    def is_degraded(self) -> bool:
        """Asked when a frame is answered for: it is on fewer disks than it should be."""
        return self._commitment is not None and self._commitment.is_degraded

    def trimmable(self, floor: int) -> int:
        """How much of what lies before the floor may go now."""
        if self._between_lives is not None:
            return 0
        return floor if self._commitment is None else min(floor, self._commitment.trimmable(floor))

    async def has_life(self) -> None:
        """Until topics can be opened. Raises what ``fail_waiting`` was told, also to those who come after it,
        until a life is expected again."""
        if self._unborn is not None:
            raise self._unborn
        if not self.is_alive:
            birth: asyncio.Future[None] = self._loop.create_future()
            self._births.append(birth)
            try:
                await birth
            finally:
                self._births.remove(birth)

    def fail_waiting(self, why: BaseException) -> None:
        """The life that is waited for will not be: who goes on waiting would keep others from beginning the
        next one, and so would who is about to."""
        self._unborn = why
        for birth in self._births:
            if not birth.done():
                birth.set_exception(why)

    def expect_life(self) -> None:
        """One is about to begin."""
        self._unborn = None

    def begin_life(self, commitment: AckQuorum) -> None:
        """Records are accepted; topics are not to be opened yet."""
        self.expect_life()
        self._commitment = commitment
        self._between_lives = None

    def live(self) -> None:
        """Topics can be opened."""
        self.is_alive = True
        for birth in self._births:
            if not birth.done():
                birth.set_result(None)

    def end_life(self, why: BaseException) -> None:
        """What is in flight, and what comes until the next life, fails with this."""
        self._between_lives = why
        self.is_alive = False
        self.fail_waiting(why)
        self._uncommitted.fail(why)
        self._answered()

    # -- on the writer's thread, behind everything that is queued ------------------------------

    async def set_tap(self, tap: Tap | None) -> int:
        """From the position that this returns on, the tap is handed everything; all before it is durable."""
        ends: list[int] = []

        def exchange(log: Log) -> None:
            log.tap = tap
            ends.append(log.end)

        await self._run(exchange)
        return ends[0]

    async def drained(self) -> int:
        """The end of the log, when everything queued so far is durable."""
        ends: list[int] = []
        await self._run(lambda log: ends.append(log.end))
        return ends[0]

    async def first(self) -> int:
        """Where what the log still holds begins: files are trimmed as a whole, and the newest never is."""
        firsts: list[int] = []
        await self._run(lambda log: firsts.append(log.first))
        return firsts[0]

    async def scan(self, take: Callable[[Record], None]) -> None:
        """All that the log holds. ``take`` is called on that thread."""

        def read(log: Log) -> None:
            for record in log.scan(log.first):
                take(record)

        await self._run(read)

    async def _run(self, action: Callable[[Log], None]) -> None:
        future: asyncio.Future[None] = self._loop.create_future()
        self._writer.run(action, partial(resolve, future))
        await future

    def trim(self, floor: int, done: Done) -> None:
        self._writer.run(lambda log: log.trim(floor), done)

    async def close(self) -> None:
        """Finish what is queued; whoever is not answered then never will be."""
        self.is_closed = True
        self._answered()
        await asyncio.to_thread(self._writer.close)
        await asyncio.sleep(0)  # the last answers of the disk
        self._uncommitted.fail(
            ClosedUncommitted("the journal was closed before this was known to be committed")
        )


def resolve(future: asyncio.Future[None], outcome: BaseException | None) -> None:
    if not future.done():
        if outcome is None:
            future.set_result(None)
        else:
            future.set_exception(outcome)
