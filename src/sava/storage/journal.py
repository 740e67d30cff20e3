"""Journal: the one durable log of a broker, shared by all its topics.

A sync costs the same for one batch as for a thousand, so all topics write into one log and one sync serves
whatever came in since the last (``wal.Writer``). A frame is a record batch with its broker-assigned part:
topic id, epoch, base offset. With the position and the incarnation that ``wal`` puts into each record, and
the storage id that seals it, a copy of these bytes on another disk names everything it is. Beside frames
there are notes on what of them is released or disowned (``JournalReplay``).

**No frame behind a refused one.** The writer tries a refused group one by one, so that on a nearly full disk
a small batch passes where a large one did not. For one topic that makes a hole:

    a (offsets 10..20, large)   refused: disk full
    b (offsets 20..21, small)   written, synced

b cannot be acknowledged (10..20 do not exist) and must not stay: the offsets 10.. are given out again, and at
the next start two frames would claim offset 20. So the log behind this journal (``OrderedLog``) refuses
*everything* after the first refusal, until the journal has seen it; appends that come meanwhile are refused
at the door (``commit_queue``), and the writer's queue is empty when it opens again. Appends in flight behind
the refused one failed with it, in order, and their topics start again from the durable end.

**Disowned.** A topic may be sealed without this broker's last frames (an operator gave them up). If this
broker gets the topic back, those frames hold offsets that others have used since. They are disowned, durably,
*before* the claim: between claim and note a crash would leave a topic that is ours and a tail that is not.

**Released.** Without a note, frames of topics that moved away would come back into the index at each start
and hold the log without limit, since this broker does not open these topics. The note need not be durable at
once: losing it costs space, nothing else.

**Committed.** An append succeeds when its frame is durable here and, in a journal that others mirror, on
enough of their disks (``commit_queue``). A journal accepts nothing before its first generation has begun, and
nothing between two.

Failures: a full disk refuses appends (retryable) and serves reads; the next append after room was made
succeeds. A failed write or sync is final: ``fail`` is called once, and the process must stop.

**Admission.** Appends wait while too much is in flight or waits to be uploaded, first come first served.

**Reading.** A journal's frames, read back by a few threads while another one writes.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from sava.records import Header, RecordBatch
from sava.storage.commit_queue import AckQuorum, CommitQueue, OrderedLog, QueuedRecord, resolve
from sava.storage.errors import Fenced
from sava.storage.journal_index import (
    BATCH,
    DISOWNED,
    NOTE,
    RELEASED,
    FrameDamaged,
    JournalCorrupt,
    JournalReplay,
    Span,
)
from sava.wal import Disk, Done, Log, LogClosed, LogOptions, Record
from sava.wal.errors import LogCorrupt, PositionOutside
from sava.wal.format import record_bytes
from sava.wal.reader import WalReader
from sava.wal.writer import Observe

_log = logging.getLogger(__name__)


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
    """Called with each group that became durable, on the writer's thread."""


class Journal:
    """Owned by the event loop that opened it; one thread writes, a few read."""

    def __init__(
        self,
        disk: Disk,
        log: OrderedLog,
        found: JournalReplay,
        *,
        options: JournalOptions,
        fail: Callable[[BaseException], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._options = options
        self.identity = log.identity
        """Storage id: of this disk, for as long as it is used. Incarnation: of this opening."""
        self.found_end = log.found_end
        """Where the log ended when it was opened."""
        self.holdings = found.holdings
        """What is held of each topic, opened or not. Changed by the journal alone, but for what is known of
        producers."""
        self._epochs: dict[int, int] = {}
        self._end = log.end
        self._floor = self._lowest_needed()
        self._trimmed_to = 0
        self._reserved = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        """Appends that wait for room, with their sizes."""
        self._reader = WalReader(disk, storage_id=log.identity.storage_id)
        self._read_threads = ThreadPoolExecutor(options.read_threads, thread_name_prefix="sava-journal-read")
        self._log = log
        """Of the writer's thread alone."""
        self.queue = CommitQueue(
            log,
            observe=options.observe,
            complete=self._complete,
            advanced=self._advanced,
            has_room=self._admit_next,
            fail=fail,
        )

    @classmethod
    async def open(
        cls,
        disk: Disk,
        *,
        broker: str,
        options: JournalOptions = JournalOptions(),  # noqa: B008 (frozen)
        uncommitted_tails: Sequence[tuple[int, int]] = (),
        fail: Callable[[BaseException], None],
    ) -> Journal:
        """Lock, recover, scan; nothing is accepted before ``begin_generation``. ``uncommitted_tails``: see
        ``JournalReplay``. Raises what ``Log.open`` raises, and JournalCorrupt. If the caller is cancelled,
        the scan is broken off and the lock is free when this ends."""
        found = JournalReplay(uncommitted_tails)
        log = await open_log(
            disk,
            owner=broker,
            options=LogOptions(file_bytes=options.file_bytes, room_bytes=options.room_bytes),
            found=found,
        )
        return cls(disk, log, found, options=options, fail=fail)

    @property
    def floor(self) -> int:
        """Everything before it is in registered segments, or not history."""
        return self._floor

    @property
    def held_bytes(self) -> int:
        """Bytes from the oldest frame that a topic needs to the end."""
        return self._end - self._floor

    @property
    def is_pressed(self) -> bool:
        """Half full: what holds the log is to be uploaded whatever its size and age."""
        return (self._end - self._floor) * 2 > self._options.max_held_bytes

    @property
    def is_degraded(self) -> bool:
        """Asked when a frame is committed: it is on fewer disks than it should be."""
        quorum = self.queue.quorum
        return quorum is not None and quorum.is_degraded

    # -- admission ---------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        """Whether ``reserve`` would return at once."""
        return not self._waiting and self._fits(size)

    def _fits(self, size: int) -> bool:
        if self.queue.refusal is not None:
            return True  # to be refused at once
        reserved, options = self._reserved, self._options
        is_full = reserved > 0 and reserved + size > options.max_in_flight_bytes
        return not is_full and self._end - self._floor + reserved <= options.max_held_bytes

    async def reserve(self, size: int) -> None:
        """Wait until there is room for a batch of this size, first come first served. What follows it
        without an await in between is in the order of these calls.

        A waiter stays in the queue until it runs again. If it left when woken, a caller that comes between
        the waking and the running would go first, and a producer's second batch would overtake its first."""
        if self.has_room(size):
            return
        waiter = (size, self.loop.create_future())
        self._waiting.append(waiter)
        try:
            self._admit_next()
            await waiter[1]
        finally:
            self._waiting.remove(waiter)
            # After this turn: the caller takes its room first.
            self.loop.call_soon(self._admit_next)

    def _admit_next(self) -> None:
        """There may be room: let the first one look."""
        if self._waiting:
            size, future = self._waiting[0]
            if not future.done() and self._fits(size):
                future.set_result(None)

    # -- appending ---------------------------------------------------------------------------

    def append(self, batch: RecordBatch, done: Done) -> None:
        """Queue an assigned batch. ``done`` is called on the event loop, in the order of the calls, with None
        when the batch is committed and in the index.

        Raises Fenced, DiskFull, NotCommittable, LogClosed or the failure of the disk, with nothing queued."""
        header, queue = batch.header, self.queue
        if queue.refusal is not None:
            queue.check()
        current = self._epochs.get(header.topic_id, 0)
        if header.epoch < current:
            raise Fenced(f"id {header.topic_id}", header.epoch, current)
        if queue.quorum is not None:
            queue.quorum.check()
        self._enqueue(batch, header, done)

    def _enqueue(self, batch: RecordBatch, header: Header, done: Done) -> None:
        size = record_bytes(header.length)
        self.queue.put(BATCH, batch.buffers, QueuedRecord(size, done, header))
        self._reserved += size

    def _advanced(self, position: int) -> None:
        """What lies before the position is committed, and its callers know."""
        if self._waiting:
            self._admit_next()
        if not self._reserved and position > self._end:
            # Notes. While a frame is in flight this would say nothing: it can be committed before this thread
            # hears of it, and is in no index until then.
            self._end = position
            if not self.holdings:
                self._raise_floor()

    def _complete(self, record: QueuedRecord, outcome: BaseException | None) -> None:
        """A committed frame goes into the index before its caller learns of it."""
        if record.header is not None:
            self._reserved -= record.size
            if outcome is None:
                position = record.positions[0]
                try:
                    self.holdings.add(record.header, position)
                except JournalCorrupt as error:
                    outcome = error
                    self.queue.failed(error)
                self._end = position + record.size
        record.done(outcome)

    # -- generations -------------------------------------------------------------------------

    async def begin_generation(self, quorum: AckQuorum, reappended: Sequence[RecordBatch] = ()) -> None:
        """From now on frames are accepted, and acknowledged when they are committed. ``reappended``: frames
        that are history, and that this disk had lost before they were durable here. They come first."""
        self.queue.begin_generation(quorum)
        for batch in reappended:
            await self._append_again(batch)
        self.queue.open_topics()

    async def _append_again(self, batch: RecordBatch) -> None:
        header, index = batch.header, self.holdings.index(batch.header.topic_id)
        if index and (header.epoch < index.epoch or header.next_offset <= index.ranges[-1][1]):
            return  # an earlier attempt has appended it
        future: asyncio.Future[None] = self.loop.create_future()
        self._enqueue(batch, header, partial(resolve, future))
        await future
        self.holdings.follow(header)

    def end_generation(self, why: BaseException) -> None:
        """What is in flight, and what comes until the next generation, fails with this. Topics that are open
        may not continue in the next: whether what they had in flight is history is not known here."""
        self.queue.end_generation(why)
        self._epochs = {topic_id: epoch + 1 for topic_id, epoch in self._epochs.items()}

    async def replay(self, uncommitted_tails: Sequence[tuple[int, int]]) -> None:
        """Between two generations, while no topic is open: find out again what the journal holds."""
        found = JournalReplay(uncommitted_tails)
        await self.queue.scan(found.take)
        self.holdings = found.holdings
        self._end = await self.queue.drained()
        self._floor = self._lowest_needed()

    # -- topics ------------------------------------------------------------------------------

    def fence(self, topic_id: int, epoch: int) -> None:
        """From now on nothing of an older epoch is appended."""
        self._epochs[topic_id] = max(epoch, self._epochs.get(topic_id, 0))

    async def disown(self, topic_id: int, offset: int) -> None:
        """What is held of the topic from the offset on is not its history; committed on return."""
        if all(end <= offset for _, end in self.holdings.index(topic_id).ranges):
            return
        self.queue.check()
        _log.warning("journal: dropping frames that are not history topic_id=%d from=%d", topic_id, offset)
        future: asyncio.Future[None] = self.loop.create_future()
        self._note(DISOWNED, topic_id, offset, partial(resolve, future))
        await future
        self.holdings.drop_from(topic_id, offset)
        self._raise_floor()

    def release(self, topic_id: int, below: int) -> None:
        """What is held of the topic below the offset is in registered segments: it need not be kept here."""
        index = self.holdings.index(topic_id)
        if not index or index.start >= below or self.queue.is_closed or self.queue.failure:
            return
        self.holdings.drop_before(topic_id, below)
        self._note(RELEASED, topic_id, below, _ignore)
        self._raise_floor()

    def _note(self, kind: int, topic_id: int, offset: int, done: Done) -> None:
        record = QueuedRecord(record_bytes(NOTE.size), done)
        self.queue.put(kind, [NOTE.pack(topic_id, offset)], record)

    def _raise_floor(self) -> None:
        """Trim what no topic needs any more."""
        floor = self._lowest_needed()
        if floor > self._floor:
            self._floor = floor
            self.trim()
            self._admit_next()

    def trim(self) -> None:
        """Remove the files that no topic needs, as far as the quorum allows."""
        floor = self.queue.trimmable(self._floor)
        if floor > self._trimmed_to and not self.queue.is_closed:
            self._trimmed_to = floor
            self.queue.trim(floor, partial(self._trimmed, floor))

    def _lowest_needed(self) -> int:
        """Frames in flight lie behind ``_end``, so a log of which nothing is needed may go up to there."""
        lowest = self.holdings.lowest_position
        return self._end if lowest is None else lowest

    def _trimmed(self, floor: int, outcome: BaseException | None) -> None:
        if outcome is not None:
            self.queue.failed(outcome)
        elif not self.queue.is_closed:
            self._read_threads.submit(self._reader.forget, floor)

    # -- reading -----------------------------------------------------------------------------

    async def read(self, topic_id: int, offset: int, max_bytes: int) -> list[RecordBatch]:
        """Batches from the one that holds ``offset`` on, without a gap, up to ``max_bytes`` but at least one.
        Empty when the offset is not held (any more): it is in a segment then, or nowhere. Raises FrameDamaged
        when the first of them is not intact; what stands before a damaged one is returned without it."""
        spans = self.holdings.index(topic_id).spans(offset, max_bytes)
        if not spans:
            return []
        if self.queue.is_closed:
            raise LogClosed("the journal is closed")
        try:
            return await self._read_spans(topic_id, spans)
        except PositionOutside:
            if self.holdings.index(topic_id).spans(offset, 1):
                raise  # still needed, and not there
            return []
        except LogCorrupt as error:
            intact = [span for span in spans if span.position < error.position]
            if intact:
                return await self._read_spans(topic_id, intact)
            index = self.holdings.index(topic_id)
            following = index.spans(offset, sys.maxsize)[1:]
            end = following[0].base_offset if following else index.ranges[-1][1]
            raise FrameDamaged(f"id {topic_id}", spans[0].base_offset, end, error.position) from error

    async def _read_spans(self, topic_id: int, spans: Sequence[Span]) -> list[RecordBatch]:
        """Raises PositionOutside (it was trimmed away), JournalCorrupt, LogCorrupt."""
        wanted = [(span.position, span.length) for span in spans]
        records = await self.loop.run_in_executor(self._read_threads, self._reader.read, wanted)
        return [_batch_at(span, record, topic_id) for span, record in zip(spans, records, strict=True)]

    # -- ending ------------------------------------------------------------------------------

    async def close(self) -> None:
        """Finish what is queued, then close the files. Appends that wait are refused."""
        if self.queue.is_closed:
            return
        try:
            await self.queue.close()
        finally:
            self._read_threads.shutdown()
            self._reader.close()


def _ignore(_: BaseException | None) -> None:
    """A note whose loss costs space, nothing else."""


def _batch_at(span: Span, record: Record, topic_id: int) -> RecordBatch:
    batch = RecordBatch.parse(record.payload)
    if record.kind != BATCH or batch.header.topic_id != topic_id or batch.base_offset != span.base_offset:
        raise JournalCorrupt(f"the frame at {span.position} is not offset {span.base_offset} of {topic_id}")
    return batch


# -- opening ---------------------------------------------------------------------------------------


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
    """Wait for a thread that cannot be interrupted, and undo what it has done. A second cancellation
    meanwhile is served by the one that is under way."""
    loop = asyncio.get_running_loop()
    await _settled(opening)
    if opening.exception() is None:
        closing = loop.run_in_executor(None, opening.result().close)
        await _settled(closing)
        if (failure := closing.exception()) is not None:
            _log.warning("the journal that was opened after its caller left could not be closed: %s", failure)


async def _settled(future: asyncio.Future[Any]) -> None:
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([future])
