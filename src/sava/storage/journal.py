"""Journal: the one durable log of a broker, shared by all its topics.

A sync costs the same for one batch as for a thousand, so all topics write into one log and one sync serves
whatever came in since the last (``wal.Writer``). A frame is a record batch with its broker-assigned part:
topic id, epoch, base offset. With the position and the incarnation that ``wal`` puts into each record, and
the storage id that seals it, a copy of these bytes on another disk names everything it is.

    kind       payload                what it says
    BATCH      record batch           these messages are part of the topic
    RELEASED   topic id, offset       what stands before this record, below the offset, is in segments
    DISOWNED   topic id, offset       what stands before this record, from the offset on, is not history

**No frame behind a refused one.** The writer tries a refused group one by one, so that on a nearly full disk
a small batch passes where a large one did not. For one topic that makes a hole:

    a (offsets 10..20, large)   refused: disk full
    b (offsets 20..21, small)   written, synced

b cannot be acknowledged (10..20 do not exist) and must not stay: the offsets 10.. are given out again, and at
the next start two frames would claim offset 20. So the log behind this journal (``_OrderedLog``) refuses
*everything* after the first refusal, until the journal has seen it; appends that come meanwhile are refused
at the door, and the writer's queue is empty when it opens again. Whoever was in flight behind the refused one
failed with it, in order, and starts again from the durable end.

**Disowned.** A topic may be sealed without this broker's last frames (an operator gave them up). If this
broker gets the topic back, those frames hold offsets that others have used since. They are disowned, durably,
*before* the claim: between claim and note a crash would leave a topic that is ours and a tail that is not.

**Released.** Without a note, frames of topics that moved away would come back into the index at each start
and hold the log for ever, since nobody opens these topics here. The note need not be durable at once: losing
it costs space, nothing else.

Failures: a full disk refuses appends (retryable) and serves reads; the next append after room was made
succeeds. A failed write or sync is final: ``fail`` is called once, and the process must stop.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sava.errors import CallerError
from sava.records import Header, RecordBatch, peek_header
from sava.storage.errors import Fenced
from sava.storage.journal_index import JournalCorrupt, JournalIndex, Span
from sava.storage.producers import ProducerTable
from sava.wal import Buffers, Disk, DiskFull, Done, Identity, Log, LogClosed, LogOptions, Record, Writer
from sava.wal.errors import PositionOutside
from sava.wal.format import FRAME_BYTES
from sava.wal.reader import Reader
from sava.wal.writer import Observe

_log = logging.getLogger(__name__)

BATCH: Final = 1
RELEASED: Final = 2
DISOWNED: Final = 3

_NOTE = struct.Struct("<qq")
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


class _OrderedLog(Log):
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


class Replay:
    """What the recovery scan finds. Only headers are looked at: ``wal`` has checked the bytes."""

    def __init__(self) -> None:
        self.topics: dict[int, JournalIndex] = {}
        self.producers: dict[int, ProducerTable] = {}
        self.is_unwanted = False
        """Set by the event loop: nobody waits for the scan any more."""

    def take(self, record: Record) -> None:
        if self.is_unwanted:
            raise LogClosed("nobody waits for the journal any more")
        if record.kind == BATCH:
            try:
                header = peek_header(record.payload)
            except CallerError as error:  # no client is to blame for what stands in our own journal
                raise JournalCorrupt(f"the frame at {record.position}: {error}") from error
            topic_id = header.topic_id
            if topic_id not in self.topics:
                self.topics[topic_id] = JournalIndex()
                self.producers[topic_id] = ProducerTable()
            self.topics[topic_id].add(header, record.position)
            self.producers[topic_id].follow(header)
        elif record.kind in (RELEASED, DISOWNED):
            self._take_note(record)
        else:
            raise JournalCorrupt(f"the frame at {record.position} is of a kind unknown here: {record.kind}")

    def _take_note(self, record: Record) -> None:
        topic_id, offset = _NOTE.unpack(record.payload)
        index = self.topics.get(topic_id)
        if index is None:
            return
        if record.kind == RELEASED:
            index.drop_before(offset)
        else:
            index.drop_from(offset)
            self.producers[topic_id] = ProducerTable()
        if not index:
            del self.topics[topic_id], self.producers[topic_id]


class Journal:
    """Owned by the event loop that opened it; one thread writes, a few read."""

    def __init__(
        self,
        disk: Disk,
        log: _OrderedLog,
        found: Replay,
        *,
        options: JournalOptions,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._options = options
        self._fail = fail
        self._identity = log.identity
        self._topics = found.topics
        self._producers = found.producers
        self._epochs: dict[int, int] = {}
        self._end = log.end
        self._floor = self._lowest_needed()
        self._reserved = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._is_shut = False
        self._is_closed = False
        self._failure: BaseException | None = None
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
        fail: Callable[[BaseException], None],
    ) -> Journal:
        """Lock, recover, scan. Raises what ``Log.open`` raises, and JournalCorrupt. If the caller is
        cancelled, the scan is broken off and the lock is free when this ends."""
        found = Replay()
        opening = asyncio.get_running_loop().run_in_executor(
            None,
            partial(
                _OrderedLog.open,
                disk,
                owner=broker,
                new_storage_id=lambda: uuid.uuid4().hex,
                options=LogOptions(file_bytes=options.file_bytes, room_bytes=options.room_bytes),
                replay=found.take,
            ),
        )
        try:
            log = await asyncio.shield(opening)
        except asyncio.CancelledError:
            found.is_unwanted = True
            await _abandon(opening)
            raise
        assert isinstance(log, _OrderedLog)
        return cls(disk, log, found, options=options, fail=fail)

    @property
    def identity(self) -> Identity:
        """Storage id: of this disk, for its life. Incarnation: of this opening."""
        return self._identity

    @property
    def held_bytes(self) -> int:
        """From the oldest frame that somebody needs to the end."""
        return self._end - self._floor

    @property
    def is_pressed(self) -> bool:
        """Half full: what holds the log is to be uploaded whatever its size and age."""
        return self.held_bytes * 2 > self._options.max_held_bytes

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
        without an await in between is in the order of these calls.

        A waiter stays in the queue until it runs again. If it left when woken, somebody who comes between
        the waking and the running would go first, and a producer's second batch would overtake its first."""
        if self.has_room(size):
            return
        waiter = (size, self._loop.create_future())
        self._waiting.append(waiter)
        try:
            self._wake()
            await waiter[1]
        finally:
            self._waiting.remove(waiter)
            # After this turn: the caller takes its room first.
            self._loop.call_soon(self._wake)

    def has_room(self, size: int) -> bool:
        """Whether ``reserve`` would return at once."""
        return not self._waiting and self._fits(size)

    def _fits(self, size: int) -> bool:
        if self._failure is not None or self._is_closed:
            return True  # to be refused at once
        is_full = self._reserved > 0 and self._reserved + size > self._options.max_in_flight_bytes
        return not is_full and self.held_bytes + self._reserved <= self._options.max_held_bytes

    def _wake(self) -> None:
        if self._waiting:
            size, future = self._waiting[0]
            if not future.done() and self._fits(size):
                future.set_result(None)

    def append(self, batch: RecordBatch, done: Done) -> None:
        """Queue an assigned batch. ``done`` is called on the event loop, in the order of the calls, with None
        when the batch is durable and in the index.

        Raises Fenced, DiskFull, LogClosed or the failure of the disk, with nothing queued."""
        header = batch.header
        current = self._epochs.get(header.topic_id, 0)
        if header.epoch < current:
            raise Fenced(f"id {header.topic_id}", header.epoch, current)
        self._check_open()
        if self._is_shut:
            raise DiskFull("the journal's disk is full")
        positions: list[int] = []
        size = FRAME_BYTES + header.length
        complete = partial(self._complete, header, positions, size, done)
        self._writer.append([(BATCH, batch.buffers)], complete, positions=positions)
        self._reserved += size

    def _deliver(self, complete: Callable[[], None]) -> None:
        """(On the writer's thread.) One call into the loop for each group."""
        self._loop.call_soon_threadsafe(self._complete_group, complete)

    def _complete_group(self, complete: Callable[[], None]) -> None:
        self.syncs += 1
        complete()
        self._wake()

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
            self._end = positions[0] + size
        if outcome is not None:
            self._refused(outcome)
        try:
            done(outcome)
        except Exception as error:  # noqa: BLE001 (the others of the group must be told, too)
            self._failed(error)

    def _refused(self, outcome: BaseException) -> None:
        if not isinstance(outcome, DiskFull):
            self._failed(outcome)
        elif not self._is_shut and not self._is_closed:
            self._is_shut = True
            # Runs behind everything that was queued behind the refused one.
            self._writer.run(lambda _: self._log.accept_again(), self._reopened)

    def _reopened(self, outcome: BaseException | None) -> None:
        self._is_shut = False
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

    # -- topics ------------------------------------------------------------------------------

    def fence(self, topic_id: int, epoch: int) -> None:
        """From now on nothing of an older epoch is appended."""
        self._epochs[topic_id] = max(epoch, self._epochs.get(topic_id, 0))

    async def disown(self, topic_id: int, offset: int) -> None:
        """What is held of the topic from the offset on is not its history; durable on return."""
        index = self._topics.get(topic_id)
        if index is None or all(end <= offset for _, end in index.ranges):
            return
        self._check_open()
        _log.warning("journal: what it holds is given up topic_id=%d from=%d", topic_id, offset)
        future: asyncio.Future[None] = self._loop.create_future()
        self._writer.append([(DISOWNED, [_NOTE.pack(topic_id, offset)])], partial(self._noted, future))
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
        self._writer.append([(RELEASED, [_NOTE.pack(topic_id, below)])], partial(self._noted, None))
        self._let_go(topic_id)

    def _noted(self, future: asyncio.Future[None] | None, outcome: BaseException | None) -> None:
        if outcome is not None:
            self._refused(outcome)
        if future is not None and not future.done():
            if outcome is None:
                future.set_result(None)
            else:
                future.set_exception(outcome)

    def _let_go(self, topic_id: int) -> None:
        """Trim what nobody needs any more."""
        index = self._topics.get(topic_id)
        if index is not None and not index:
            del self._topics[topic_id]
            self._producers.pop(topic_id, None)
        floor = self._lowest_needed()
        if floor > self._floor:
            self._floor = floor
            self._writer.run(lambda log: log.trim(floor), partial(self._trimmed, floor))
            self._wake()

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
            records = await self._loop.run_in_executor(self._threads, self._reader.read, wanted)
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
        self._wake()
        try:
            await asyncio.to_thread(self._writer.close)
        finally:
            self._threads.shutdown()
            self._reader.close()


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


def _batch_at(span: Span, record: Record, topic_id: int) -> RecordBatch:
    batch = RecordBatch.parse(record.payload)
    if record.kind != BATCH or batch.header.topic_id != topic_id or batch.base_offset != span.base_offset:
        raise JournalCorrupt(f"the frame at {span.position} is not offset {span.base_offset} of {topic_id}")
    return batch
