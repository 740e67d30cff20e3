"""CommitQueue: group commit for a journal, from the queue of a record to its outcome.

    put ─▶ written, synced with its group ─▶ on enough disks ─▶ completed, in the order of the calls
           └─ refused: the disk is full ──── completed behind what was written before it ─┘

**Full disk.** From the first refusal on the log refuses everything (why: see ``journal``), and so does this
queue, until the refused caller has its outcome and the queue behind it is empty.

**Quorum.** A record that is durable here waits until enough disks have it; which they are and how many is
decided above (``ledger``), and a broker without mirrors is a quorum of one. The order of completions does not
change: the refusal of the disk is reported behind what was written before it, and not sooner:

    a  10..20     durable here, not yet elsewhere
    b  20..21     refused: the disk is full
    complete b    the topic takes everything in flight for failed, and gives out 10 again → a and its
                  successor are two messages at one offset

**Generations.** Within one generation of a journal, what is written is one stream that the same disks hold.
A journal accepts nothing before its first generation and nothing between two. A generation ends by a fence of
another broker, with the broker's registration, or with the process. What was in flight then is not
acknowledged, and the broker that ended the generation decides whether it happened. Topics that were opened
in a generation end with it.

A failed write or sync is final: ``fail`` is called once, and the process must stop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

from sava.errors import RetryableError
from sava.records import Header
from sava.storage.errors import ClosedUncommitted
from sava.wal import Buffers, DiskFull, Done, Log, LogClosed, Record, Tap, Writer
from sava.wal.errors import Fullness
from sava.wal.writer import Observe

_UNBOUNDED: Final = 1 << 62
"""The writer's own bound is not used: ``Journal.reserve`` waits where the writer would refuse."""


class NotCommittable(RetryableError):
    """The journal accepts nothing at the moment, since nothing could be acknowledged."""


class AckQuorum(Protocol):
    """The disks of one generation. Called on the event loop. A Protocol, as the ledger stands above storage
    and implements it."""

    @property
    def is_degraded(self) -> bool:
        """Whether what is acknowledged now is on fewer disks than it should be."""
        ...

    def check(self) -> None:
        """Raises NotCommittable when too few disks are there to ever commit what would be appended now."""
        ...

    def durable(self, end: int) -> int:
        """This disk has everything before ``end``; how far all is committed."""
        ...

    def trimmable(self, floor: int) -> int:
        """Everything before ``floor`` is in registered segments; how much of it this disk may release."""
        ...


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


@dataclass(slots=True, eq=False)
class QueuedRecord:
    """A record of the journal until its caller has the outcome."""

    size: int
    done: Done
    header: Header | None = None
    """Of a frame; None: a note."""
    positions: list[int] = field(default_factory=list)
    """Where the record is, once it is written."""
    outcome: BaseException | None = None
    """What the disk said; final when the quorum is far enough."""
    end: int = 0
    """Where the quorum must be. Of something refused: where what was before it ends."""


class CommitQueue:
    """Owned by the event loop; the log is of the writer's thread alone."""

    def __init__(
        self,
        log: OrderedLog,
        *,
        observe: Observe | None,
        complete: Callable[[QueuedRecord, BaseException | None], None],
        advanced: Callable[[int], None],
        has_room: Callable[[], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        """``complete`` is called for each record, in order. ``advanced`` gets a position before which
        everything is committed and completed, which may have made room; ``has_room`` is called when something
        else may have."""
        self._loop = asyncio.get_running_loop()
        self._log = log
        self._complete = complete
        self._advanced = advanced
        self._has_room = has_room
        self._fail = fail
        self._is_full = False
        self._is_reopening = False
        self._fullness = Fullness("journal", "messages are refused")
        self._uncommitted: deque[QueuedRecord] = deque()
        """Records that the disk has written or refused, in order, until the quorum has what they are
        about."""
        self._uncommitted_end = 0
        self.quorum: AckQuorum | None = None
        """None before the first generation; that of the last one after it has ended."""
        self._not_begun: BaseException | None = NotCommittable("the journal is not open yet")
        """Why there is no generation now."""
        self.has_generation = False
        """Whether topics can be opened."""
        self._openers: list[asyncio.Future[None]] = []
        """Callers that wait for the next generation."""
        self._not_expected: BaseException | None = None
        """Why no generation will begin before another one is expected."""
        self.is_closed = False
        self.failure: BaseException | None = None
        self.refusal: BaseException | None = self._not_begun
        """Why nothing is accepted; None: records are accepted, if there is room."""
        self.syncs = 0
        """Groups that became durable, for figures."""
        self._writer = Writer(log, deliver=self._deliver, max_queued_bytes=_UNBOUNDED, observe=observe)

    # -- accepting ---------------------------------------------------------------------------

    def _update_refusal(self) -> None:
        """After each change of what it depends on."""
        self.refusal = self.failure or self._not_begun
        if self.failure is None and self.is_closed:
            self.refusal = LogClosed("the journal is closed")
        elif self.refusal is None and self._is_full:
            self.refusal = DiskFull("the journal's disk is full")

    def check(self) -> None:
        """Raises why nothing is accepted. Without the trace of those who were refused with it before, which
        would keep all that their frames refer to."""
        if self.refusal is not None:
            raise self.refusal.with_traceback(None)

    def put(self, kind: int, payload: Buffers, record: QueuedRecord) -> None:
        """Queue the record; ``complete`` gets it with None when it is committed."""
        self._writer.append([(kind, payload)], partial(self._written, record), positions=record.positions)

    # -- completing --------------------------------------------------------------------------

    def _deliver(self, finish_group: Callable[[], None]) -> None:
        """(On the writer's thread.) One call into the loop for each group."""
        self._loop.call_soon_threadsafe(self._finish_group, finish_group)

    def _finish_group(self, finish_group: Callable[[], None]) -> None:
        self.syncs += 1
        finish_group()
        if self.quorum is not None and self._uncommitted:
            # Another thread's, but a fact: it only grows, and only after a sync.
            self.committed(self.quorum.durable(self._log.durable_end))
        else:
            self._has_room()

    def _written(self, record: QueuedRecord, outcome: BaseException | None) -> None:
        """The disk has answered; mirrors may have to answer, too."""
        if isinstance(outcome, DiskFull):
            self._is_full = True
            self._update_refusal()
            self._fullness.refused(outcome)
        elif outcome is not None:
            self.failed(outcome)
        elif self._fullness.is_full:
            self._fullness.passed()
        if self._not_begun is not None:
            self._finish(record, outcome or self._not_begun)
            return
        if record.positions:
            self._uncommitted_end = max(self._uncommitted_end, record.positions[0] + record.size)
        record.end, record.outcome = self._uncommitted_end, outcome
        self._uncommitted.append(record)
        if self.failure is not None:
            self._fail_uncommitted(self.failure)

    def _finish(self, record: QueuedRecord, outcome: BaseException | None) -> None:
        if isinstance(outcome, DiskFull):
            self._reopen()
        try:
            self._complete(record, outcome)
        except Exception as error:  # noqa: BLE001 (the others of the group must have their outcomes, too)
            self.failed(error)

    def committed(self, position: int) -> None:
        """The quorum has moved to this position: what lies before it is committed."""
        uncommitted = self._uncommitted
        while uncommitted and uncommitted[0].end <= position:
            record = uncommitted.popleft()
            self._finish(record, record.outcome)
        self._advanced(position)

    def _fail_uncommitted(self, error: BaseException) -> None:
        """Nothing of it will be acknowledged. What the disk refused was refused for that reason."""
        while self._uncommitted:
            record = self._uncommitted.popleft()
            self._finish(record, record.outcome or error)

    def _reopen(self) -> None:
        """A caller learned that the disk was full. The queue opens when everything that was queued behind the
        refused frame is completed; all of it is by then, since it waits for the same position."""
        if not self._is_reopening and not self.is_closed:
            self._is_reopening = True
            self._writer.run(lambda _: self._log.accept_again(), self._reopened)

    def _reopened(self, outcome: BaseException | None) -> None:
        self._is_full = self._is_reopening = False
        self._update_refusal()
        if outcome is not None:
            self.failed(outcome)

    def failed(self, failure: BaseException) -> None:
        if self.failure is None:
            self.failure = failure
            self._update_refusal()
            self._fail(failure)

    # -- generations -------------------------------------------------------------------------

    def trimmable(self, floor: int) -> int:
        """How much of what lies before the floor may go now."""
        if self._not_begun is not None or self.quorum is None:
            return 0
        return min(floor, self.quorum.trimmable(floor))

    async def wait_for_generation(self) -> None:
        """Until topics can be opened. Raises what ``fail_waiting`` was given, also to callers that come after
        it, until a generation is expected again."""
        if self._not_expected is not None:
            raise self._not_expected.with_traceback(None)
        if not self.has_generation:
            opener: asyncio.Future[None] = self._loop.create_future()
            self._openers.append(opener)
            try:
                await opener
            finally:
                self._openers.remove(opener)

    def fail_waiting(self, why: BaseException) -> None:
        """The expected generation will not begin: a caller that still waits would keep others from beginning
        the next one, and so would one that is about to wait."""
        self._not_expected = why
        for opener in self._openers:
            if not opener.done():
                opener.set_exception(why)

    def expect_generation(self) -> None:
        """One is about to begin: it may be waited for."""
        self._not_expected = None

    def begin_generation(self, quorum: AckQuorum) -> None:
        """Records are accepted; topics are not to be opened yet."""
        self.expect_generation()
        self.quorum = quorum
        self._not_begun = None
        self._update_refusal()

    def open_topics(self) -> None:
        """What had to come first in the generation is committed: topics can be opened."""
        self.has_generation = True
        for opener in self._openers:
            if not opener.done():
                opener.set_result(None)

    def end_generation(self, why: BaseException) -> None:
        """What is in flight, and what comes until the next generation, fails with this."""
        self._not_begun = why
        self._update_refusal()
        self.has_generation = False
        self.fail_waiting(why)
        self._fail_uncommitted(why)
        self._has_room()

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
        """Finish what is queued; a record that is uncommitted then stays so."""
        self.is_closed = True
        self._update_refusal()
        self._has_room()
        await asyncio.to_thread(self._writer.close)
        await asyncio.sleep(0)  # the last outcomes of the disk
        self._fail_uncommitted(
            ClosedUncommitted("the journal was closed before this was known to be committed")
        )


def resolve(future: asyncio.Future[None], outcome: BaseException | None) -> None:
    if not future.done():
        if outcome is None:
            future.set_result(None)
        else:
            future.set_exception(outcome)
