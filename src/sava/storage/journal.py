"""Journal: the one durable log of a broker, shared by all its topics.

A sync costs the same for one batch as for a thousand, so all topics write into one log and one sync serves
whatever came in since the last (``wal.Writer``). A frame is a record batch with its broker-assigned part:
topic id, epoch, base offset. With the position and the incarnation that ``wal`` puts into each record, and
the storage id that seals it, a copy of these bytes on another disk names everything it is. Beside frames
there are notes on what of them is released or disowned (``replay``).

**No frame behind a refused one.** The writer tries a refused group one by one, so that on a nearly full disk
a small batch passes where a large one did not. For one topic that makes a hole:

    a (offsets 10..20, large)   refused: disk full
    b (offsets 20..21, small)   written, synced

b cannot be acknowledged (10..20 do not exist) and must not stay: the offsets 10.. are given out again, and at
the next start two frames would claim offset 20. So the log behind this journal (``ordered_log``) refuses
*everything* after the first refusal, until the journal has seen it; appends that come meanwhile are refused
at the door, and the writer's queue is empty when it opens again. Whoever was in flight behind the refused one
failed with it, in order, and starts again from the durable end.

**Disowned.** A topic may be sealed without this broker's last frames (an operator gave them up). If this
broker gets the topic back, those frames hold offsets that others have used since. They are disowned, durably,
*before* the claim: between claim and note a crash would leave a topic that is ours and a tail that is not.

**Released.** Without a note, frames of topics that moved away would come back into the index at each start
and hold the log for ever, since nobody opens these topics here. The note need not be durable at once: losing
it costs space, nothing else.

**Committed.** A frame is answered for when it is durable here and, in a journal that others mirror, on enough
of their disks (``commitment``). Such a journal accepts nothing before its first life has begun, and nothing
between two lives.

Failures: a full disk refuses appends (retryable) and serves reads; the next append after room was made
succeeds. A failed write or sync is final: ``fail`` is called once, and the process must stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Final

from sava.records import Header, RecordBatch
from sava.storage.commitment import Commitment, NotCommittable, Uncommitted
from sava.storage.errors import Fenced
from sava.storage.journal_index import JournalCorrupt, JournalIndex, Span
from sava.storage.ordered_log import OrderedLog, open_log
from sava.storage.producers import ProducerTable
from sava.storage.replay import BATCH, DISOWNED, NOTE, RELEASED, Replay
from sava.storage.room import Room
from sava.wal import Disk, DiskFull, Done, Identity, Log, LogClosed, LogOptions, Record, Tap, Writer
from sava.wal.errors import PositionOutside
from sava.wal.format import record_bytes
from sava.wal.reader import Reader
from sava.wal.writer import Observe

_log = logging.getLogger(__name__)

_UNBOUNDED: Final = 1 << 62
"""The writer's own bound is not used: ``reserve`` waits where the writer would refuse."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalOptions:
    file_bytes: int = 64 << 20
    room_bytes: int = 128 << 10
    """Ahead of small appends (see ``wal.log``): enough for hundreds of messages that are sent one by one."""
    max_in_flight_bytes: int = 16 << 20
    """Appends wait beyond this. Enough to keep a fast disk busy over one turn of the event loop."""
    max_held_bytes: int = 4 << 30
    """How much may wait to be uploaded before appends wait: the object store may be down for that long."""
    read_threads: int = 2
    observe: Observe | None = None
    """Told of each group that became durable, on the writer's thread."""


class Journal:
    """Owned by the event loop that opened it; one thread writes, a few read."""

    def __init__(
        self,
        disk: Disk,
        log: OrderedLog,
        found: Replay,
        *,
        options: JournalOptions,
        is_mirrored: bool,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._options = options
        self._fail = fail
        self._identity = log.identity
        self._topics = found.topics
        self._producers = found.producers
        self._epochs: dict[int, int] = {}
        self._end = log.end
        self._floor = self._lowest_needed()
        self._trimmed_to = 0
        self._reserved = 0
        self._room = Room(self._fits)
        self._is_shut = False
        self._is_reopening = False
        self._is_closed = False
        self._failure: BaseException | None = None
        self._uncommitted = Uncommitted()
        self._commitment: Commitment | None = None
        self._between_lives: BaseException | None = None
        if is_mirrored:
            self._between_lives = NotCommittable("the journal is not open yet")
        self._is_alive = not is_mirrored
        self._births: list[asyncio.Future[None]] = []
        """Whoever waits for the next life."""
        self.syncs = 0
        """Groups that became durable, for figures."""
        self._reader = Reader(disk, storage_id=log.identity.storage_id)
        self._threads = ThreadPoolExecutor(options.read_threads, thread_name_prefix="sava-journal-read")
        self._log = log
        """Of the writer's thread alone."""
        self._writer = Writer(
            log, deliver=self._deliver, max_queued_bytes=_UNBOUNDED, observe=options.observe
        )

    @classmethod
    async def open(
        cls,
        disk: Disk,
        *,
        broker: str,
        options: JournalOptions = JournalOptions(),  # noqa: B008 (frozen)
        void: Sequence[tuple[int, int]] = (),
        is_mirrored: bool = False,
        fail: Callable[[BaseException], None],
    ) -> Journal:
        """Lock, recover, scan. ``void``: see ``Replay``. ``is_mirrored``: nothing is accepted before
        ``begin_life``. Raises what ``Log.open`` raises, and JournalCorrupt. If the caller is cancelled, the
        scan is broken off and the lock is free when this ends."""
        found = Replay(void)
        log = await open_log(
            disk,
            owner=broker,
            options=LogOptions(file_bytes=options.file_bytes, room_bytes=options.room_bytes),
            found=found,
        )
        return cls(disk, log, found, options=options, is_mirrored=is_mirrored, fail=fail)

    @property
    def identity(self) -> Identity:
        """Storage id: of this disk, for its life. Incarnation: of this opening."""
        return self._identity

    @property
    def found_end(self) -> int:
        """Where the log ended when it was opened."""
        return self._log.found_end

    @property
    def floor(self) -> int:
        """Everything before it is in registered segments, or not history."""
        return self._floor

    @property
    def held_bytes(self) -> int:
        """From the oldest frame that somebody needs to the end."""
        return self._end - self._floor

    @property
    def is_pressed(self) -> bool:
        """Half full: what holds the log is to be uploaded whatever its size and age."""
        return self.held_bytes * 2 > self._options.max_held_bytes

    @property
    def is_degraded(self) -> bool:
        """Asked when a frame is answered for: it is on fewer disks than it should be."""
        return self._commitment is not None and self._commitment.is_degraded

    @property
    def topic_ids(self) -> list[int]:
        """Topics of which the journal holds something, opened or not."""
        return list(self._topics)

    def index(self, topic_id: int) -> JournalIndex:
        return self._topics.get(topic_id) or JournalIndex()

    def known_producers(self, topic_id: int) -> ProducerTable:
        """What the frames of a topic that is not open tell of its producers."""
        return self._producers.pop(topic_id, None) or ProducerTable()

    def keep_producers(self, topic_id: int, table: ProducerTable) -> None:
        """The topic is closed: keep this for the next opening, which cannot learn it from the headers of
        frames without reading them again."""
        if topic_id in self._topics:
            self._producers[topic_id] = table

    # -- appending ---------------------------------------------------------------------------

    async def reserve(self, size: int) -> None:
        """Wait until there is room for a batch of this size, first come first served. What follows it
        without an await in between is in the order of these calls."""
        await self._room.reserve(size)

    def has_room(self, size: int) -> bool:
        """Whether ``reserve`` would return at once."""
        return self._room.has(size)

    def _fits(self, size: int) -> bool:
        if self._failure is not None or self._is_closed or self._between_lives is not None:
            return True  # to be refused at once
        is_full = self._reserved > 0 and self._reserved + size > self._options.max_in_flight_bytes
        return not is_full and self.held_bytes + self._reserved <= self._options.max_held_bytes

    def append(self, batch: RecordBatch, done: Done) -> None:
        """Queue an assigned batch. ``done`` is called on the event loop, in the order of the calls, with None
        when the batch is committed and in the index.

        Raises Fenced, DiskFull, NotCommittable, LogClosed or the failure of the disk, with nothing queued."""
        header = batch.header
        self._check_open()
        current = self._epochs.get(header.topic_id, 0)
        if header.epoch < current:
            raise Fenced(f"id {header.topic_id}", header.epoch, current)
        if self._is_shut:
            raise DiskFull("the journal's disk is full")
        if self._commitment is not None:
            self._commitment.check()
        self._queue(batch, done)

    def _queue(self, batch: RecordBatch, done: Done) -> None:
        header = batch.header
        positions: list[int] = []
        size = record_bytes(header.length)
        complete = partial(
            self._answered, positions, size, partial(self._complete, header, positions, size, done)
        )
        self._writer.append([(BATCH, batch.buffers)], complete, positions=positions)
        self._reserved += size

    def _deliver(self, complete: Callable[[], None]) -> None:
        """(On the writer's thread.) One call into the loop for each group."""
        self.loop.call_soon_threadsafe(self._complete_group, complete)

    def _complete_group(self, complete: Callable[[], None]) -> None:
        self.syncs += 1
        complete()
        if self._commitment is not None and self._uncommitted:
            # Another thread's, but a fact: it only grows, and only after a sync.
            self._tell(self._commitment.durable(self._log.durable_end))
        self._room.wake()

    def _tell(self, position: int) -> None:
        """What lies before the position is committed."""
        self._uncommitted.tell(position)
        if not self._reserved and position > self._end:
            # Notes. While a frame is in flight this would say nothing: it can be committed before this thread
            # hears of it, and is in no index until then.
            self._end = position
            if not self._topics:
                self._raise_floor()

    def _answered(
        self,
        positions: list[int],
        size: int,
        finish: Callable[[BaseException | None], None],
        outcome: BaseException | None,
    ) -> None:
        """By the disk; others may be asked, too."""
        if outcome is not None:
            self._refused(outcome)
        if self._between_lives is not None:
            finish(outcome or self._between_lives)
            return
        if self._commitment is None:
            finish(outcome)
            return
        self._uncommitted.add(positions[0] + size if positions else 0, finish, outcome)
        if self._failure is not None:
            self._uncommitted.fail(self._failure)

    def _complete(
        self, header: Header, positions: list[int], size: int, done: Done, outcome: BaseException | None
    ) -> None:
        self._reserved -= size
        if outcome is None:
            index = self._topics.get(header.topic_id)
            if index is None:
                index = self._topics[header.topic_id] = JournalIndex()
            try:
                index.add(header, positions[0])
            except JournalCorrupt as error:
                outcome = error
                self._failed(error)
            self._end = positions[0] + size
        elif isinstance(outcome, DiskFull):
            self._reopen()
        try:
            done(outcome)
        except Exception as error:  # noqa: BLE001 (the others of the group must be told, too)
            self._failed(error)

    def _refused(self, outcome: BaseException) -> None:
        if isinstance(outcome, DiskFull):
            self._is_shut = True
        else:
            self._failed(outcome)

    def _reopen(self) -> None:
        """Somebody was told that the disk was full. The door opens when everything that was queued behind the
        refused frame was answered for; all of it is told by then, since it waits for the same position."""
        if not self._is_reopening and not self._is_closed:
            self._is_reopening = True
            self._writer.run(lambda _: self._log.accept_again(), self._reopened)

    def _reopened(self, outcome: BaseException | None) -> None:
        self._is_shut = self._is_reopening = False
        if outcome is not None:
            self._failed(outcome)

    def _failed(self, failure: BaseException) -> None:
        if self._failure is None:
            self._failure = failure
            self._fail(failure)

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closed:
            raise LogClosed("the journal is closed")
        if self._between_lives is not None:
            raise self._between_lives

    # -- lives -------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether topics can be opened."""
        return self._is_alive

    async def has_life(self) -> None:
        """Until topics can be opened. Raises what ``fail_waiting`` was told."""
        if not self._is_alive:
            birth: asyncio.Future[None] = self.loop.create_future()
            self._births.append(birth)
            try:
                await birth
            finally:
                self._births.remove(birth)

    def fail_waiting(self, why: BaseException) -> None:
        """The life that is waited for will not be: who goes on waiting would keep others from beginning the
        next one."""
        for birth in self._births:
            if not birth.done():
                birth.set_exception(why)

    async def set_tap(self, tap: Tap | None) -> int:
        """From the position that this returns on, the tap is handed everything; all before it is durable."""
        ends: list[int] = []

        def exchange(log: Log) -> None:
            log.tap = tap
            ends.append(log.end)

        await self._run(exchange)
        return ends[0]

    async def _run(self, action: Callable[[Log], None]) -> None:
        """On the writer's thread, behind everything that is queued."""
        future: asyncio.Future[None] = self.loop.create_future()
        self._writer.run(action, partial(_resolve, future))
        await future

    async def begin_life(self, commitment: Commitment, adopted: Sequence[RecordBatch] = ()) -> None:
        """From now on frames are accepted, and answered for when they are committed. ``adopted``: frames that
        are history, and that this disk had lost before they were durable here. They come first."""
        self._commitment = commitment
        self._between_lives = None
        for batch in adopted:
            await self._adopt(batch)
        self._is_alive = True
        for birth in self._births:
            if not birth.done():
                birth.set_result(None)

    async def _adopt(self, batch: RecordBatch) -> None:
        header, index = batch.header, self.index(batch.header.topic_id)
        if index and (header.epoch < index.epoch or header.next_offset <= index.ranges[-1][1]):
            return  # it was adopted before
        future: asyncio.Future[None] = self.loop.create_future()
        self._queue(batch, partial(_resolve, future))
        await future
        self._producers.setdefault(header.topic_id, ProducerTable()).follow(header)

    def committed(self, position: int) -> None:
        """The commitment has moved to this position."""
        self._tell(position)
        self._room.wake()

    def end_life(self, why: BaseException) -> None:
        """What is in flight, and what comes until the next life, fails with this. Topics that are open may
        not go on in the next: whether what they had in flight is history is not known here."""
        self._between_lives = why
        self._is_alive = False
        self.fail_waiting(why)
        self._uncommitted.fail(why)
        self._epochs = {topic_id: epoch + 1 for topic_id, epoch in self._epochs.items()}
        self._room.wake()

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

    async def replay(self, void: Sequence[tuple[int, int]]) -> None:
        """Between two lives, while no topic is open: find out anew what the journal holds."""
        found = Replay(void)

        def scan(log: Log) -> None:
            for record in log.scan(log.first):
                found.take(record)

        await self._run(scan)
        self._topics, self._producers = found.topics, found.producers
        self._end = await self.drained()
        self._floor = self._lowest_needed()

    # -- topics ------------------------------------------------------------------------------

    def fence(self, topic_id: int, epoch: int) -> None:
        """From now on nothing of an older epoch is appended."""
        self._epochs[topic_id] = max(epoch, self._epochs.get(topic_id, 0))

    async def disown(self, topic_id: int, offset: int) -> None:
        """What is held of the topic from the offset on is not its history; committed on return."""
        index = self._topics.get(topic_id)
        if index is None or all(end <= offset for _, end in index.ranges):
            return
        self._check_open()
        _log.warning("journal: what it holds is given up topic_id=%d from=%d", topic_id, offset)
        future: asyncio.Future[None] = self.loop.create_future()
        self._note(DISOWNED, topic_id, offset, partial(_resolve, future))
        await future
        index.drop_from(offset)
        self._producers.pop(topic_id, None)
        self._let_go(topic_id)

    def release(self, topic_id: int, below: int) -> None:
        """What is held of the topic below the offset is in registered segments: it need not be kept here."""
        index = self._topics.get(topic_id)
        if index is None or index.start >= below or self._is_closed or self._failure is not None:
            return
        index.drop_before(below)
        self._note(RELEASED, topic_id, below, _ignore)
        self._let_go(topic_id)

    def _note(self, kind: int, topic_id: int, offset: int, done: Done) -> None:
        positions: list[int] = []
        finish = partial(self._noted, done)
        answered = partial(self._answered, positions, record_bytes(NOTE.size), finish)
        self._writer.append([(kind, [NOTE.pack(topic_id, offset)])], answered, positions=positions)

    def _noted(self, done: Done, outcome: BaseException | None) -> None:
        if isinstance(outcome, DiskFull):
            self._reopen()
        done(outcome)

    def _let_go(self, topic_id: int) -> None:
        """Trim what nobody needs any more."""
        index = self._topics.get(topic_id)
        if index is not None and not index:
            del self._topics[topic_id]
            self._producers.pop(topic_id, None)
        self._raise_floor()

    def _raise_floor(self) -> None:
        floor = self._lowest_needed()
        if floor > self._floor:
            self._floor = floor
            self.trim()
            self._room.wake()

    def trim(self) -> None:
        """Remove the files that nobody needs, as far as the commitment allows."""
        floor = self._floor
        if self._between_lives is not None:
            return
        if self._commitment is not None:
            floor = min(floor, self._commitment.trimmable(floor))
        if floor > self._trimmed_to and not self._is_closed:
            self._trimmed_to = floor
            self._writer.run(lambda log: log.trim(floor), partial(self._trimmed, floor))

    def _lowest_needed(self) -> int:
        """Frames in flight lie behind ``_end``, so a log of which nothing is needed may go up to there."""
        held = [
            position for index in self._topics.values() if (position := index.lowest_position) is not None
        ]
        return min(held, default=self._end)

    def _trimmed(self, floor: int, outcome: BaseException | None) -> None:
        if outcome is not None:
            self._failed(outcome)
        elif not self._is_closed:
            self._threads.submit(self._reader.forget, floor)

    # -- reading -----------------------------------------------------------------------------

    async def read(self, topic_id: int, offset: int, max_bytes: int) -> list[RecordBatch]:
        """Batches from the one that holds ``offset`` on, without a gap, up to ``max_bytes`` but at least one.
        Empty when the offset is not held (any more): it is in a segment then, or nowhere."""
        spans = self.index(topic_id).spans(offset, max_bytes)
        if not spans:
            return []
        if self._is_closed:
            raise LogClosed("the journal is closed")
        wanted = [(span.position, span.length) for span in spans]
        try:
            records = await self.loop.run_in_executor(self._threads, self._reader.read, wanted)
        except PositionOutside:
            if self.index(topic_id).spans(offset, 1):
                raise  # still needed, and not there
            return []
        return [_batch_at(span, record, topic_id) for span, record in zip(spans, records, strict=True)]

    # -- ending ------------------------------------------------------------------------------

    async def close(self) -> None:
        """Finish what is queued, then close the files. Appends that wait are refused."""
        if self._is_closed:
            return
        self._is_closed = True
        self._room.wake()
        try:
            await asyncio.to_thread(self._writer.close)
            await asyncio.sleep(0)  # the last answers of the disk
            self._uncommitted.fail(LogClosed("the journal was closed before this was known to be committed"))
        finally:
            self._threads.shutdown()
            self._reader.close()


def _resolve(future: asyncio.Future[None], outcome: BaseException | None) -> None:
    if not future.done():
        if outcome is None:
            future.set_result(None)
        else:
            future.set_exception(outcome)


def _ignore(_: BaseException | None) -> None:
    """A note whose loss costs space, nothing else."""


def _batch_at(span: Span, record: Record, topic_id: int) -> RecordBatch:
    batch = RecordBatch.parse(record.payload)
    if record.kind != BATCH or batch.header.topic_id != topic_id or batch.base_offset != span.base_offset:
        raise JournalCorrupt(f"the frame at {span.position} is not offset {span.base_offset} of {topic_id}")
    return batch
