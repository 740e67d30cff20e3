"""TopicLog: one topic's messages on the broker that owns it: append, read, follow, seal.

Offsets are given out in the order of acceptance and written in that order; an append is acknowledged, and its
messages can be read, when they are durable. Two ends say so:

    ... ──────────────────┤ next_offset ───────────────────┤ assigned_offset
      durable, readable         in flight: on the way to the disk

**A refused batch leaves no hole.**

    a  0..10   accepted, in flight
    b 10..20   accepted, in flight
    disk full  a is refused
    c          must not get 20: nothing will ever be at 0..20

The journal writes nothing behind a refused frame (see ``journal``), so b fails as well. The first failure is
known before those behind it, and settles them all: every append in flight fails, what deduplication knew of
them is forgotten, and the next offset is the durable end again. The journal refuses at its door until its
queue has drained, so no new frame can get between.

**Opening.** The state in the metadata store says where segments end. If it is sealed, that is the next
offset, whatever the local journal holds. If it is not sealed and names this disk, the journal's frames from
there on are the tail, over all epochs this disk has served in a row (none, if it is clean). If it names
another disk and is clean, there is no tail. Otherwise the tail is elsewhere and the topic is not opened. A
read of the state that fails is a failure to open: taken for "nothing there" it would give out offset 0 a
second time.

**Sealing.** Stop accepting → in-flight appends resolve → upload the rest → ``Catalog.seal``. Up to the last
step a failure or the deadline takes it back, and the topic continues. From the last step on nothing does:

    seal sent ─▶ no answer in time ─▶ topic continues, acknowledges 22
                 the seal takes effect: "nothing beyond 22" ─▶ the next owner gives out 22 again

So a seal of unknown outcome leaves the topic closed for appends; ``seal`` can be called again, or the topic
be opened under the next epoch.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Final

from sava.errors import RetryableError
from sava.records import Header, RecordBatch
from sava.storage.catalog import Catalog
from sava.storage.clean_marker import CleanMarker
from sava.storage.errors import DataGap, Fenced, ObjectStoreUnavailable, OffsetOutOfRange
from sava.storage.journal import Journal
from sava.storage.journal_index import JournalCorrupt
from sava.storage.maintenance import RetentionPolicy, SegmentMaintenance
from sava.storage.objectstore import ObjectStore
from sava.storage.producers import EpochRequest, Granted, ProducerEpochs, ProducerTable
from sava.storage.segment import SegmentReader
from sava.storage.source_keeping import SourceKeeper
from sava.storage.source_positions import SourceAppend
from sava.storage.tiered import BatchCache, KnownSegments, TieredReader
from sava.storage.types import Segment, TopicKey, TopicState
from sava.storage.uploader import Backlog, Uploader
from sava.wal import DiskFull

AHEAD_BYTES: Final = 256 << 10
"""What may be left for the seal to upload, while publishers wait."""
AHEAD_ROUNDS: Final = 4
"""How often a topic is uploaded before its seal; one that grows as fast as that is sealed with what is
left."""


class TopicClosed(RetryableError):
    """The topic is being moved away or was closed here. Nothing was appended; its next owner will accept."""


class LogStatus(Enum):
    OPEN = "open"
    SEALING = "being sealed"
    SEALED = "sealed"
    CLOSED = "closed"
    FENCED = "owned by a newer epoch"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogDependencies:
    """What the topics of one broker share."""

    journal: Journal
    cache: BatchCache
    uploader: Uploader
    store: ObjectStore
    reader: SegmentReader
    ended: Callable[[TopicLog], None]
    """The topic is closed, and the journal has answered for all of it."""


@dataclass(slots=True, eq=False)
class _Pending:
    """An append in flight."""

    batch: RecordBatch
    header: Header
    future: asyncio.Future[int] = field(default_factory=asyncio.Future)
    is_settled: bool = False

    def fail(self, error: BaseException) -> None:
        self.is_settled = True
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # seen: its caller may be gone


class TopicLog:
    """Owned by the event loop of its journal: every change of its state is one step without an await."""

    def __init__(
        self,
        topic: TopicKey,
        *,
        epoch: int,
        catalog: Catalog,
        state: TopicState,
        next_offset: int,
        producers: ProducerTable,
        parts: LogDependencies,
    ) -> None:
        self.topic = topic
        self.epoch = epoch
        self._parts = parts
        self._journal = parts.journal
        self._catalog = catalog
        self._status = LogStatus.OPEN
        self._is_seal_running = False
        self._is_seal_in_doubt = False
        self._is_closed = False
        """Whether what is known of producers was left with the journal; the next opening has taken it."""
        self._fence: Fenced | None = None
        self._durable = next_offset
        self._assigned = next_offset
        self._arriving = 0
        """Appends that wait for room in the journal."""
        self._in_flight: deque[_Pending] = deque()
        self._degraded = 0, 0
        """The last offsets, in a row, that were acknowledged on fewer disks than they should be on."""
        self._unwritten = 0
        """Frames that the journal has not answered for, those included that were given up here."""
        self._is_in_doubt = False
        """The journal's generation has ended with frames that may be the topic's, or not."""
        self._producers = producers
        self.epochs = ProducerEpochs(state.epochs, self._write_epochs)
        """Which open of each producer's name is the last one."""
        self.producers_in_use: Callable[[], Collection[int]] = tuple
        """Of these producers the opens are forgotten last."""
        self._advanced = asyncio.Event()
        self._recent = parts.cache.recent()
        self._segments = KnownSegments(catalog)
        self._tiers = TieredReader(
            topic, recent=self._recent, journal=parts.journal, segments=self._segments, reader=parts.reader
        )
        self.uploaded_segments = 0
        self.uploaded_bytes = 0
        self.maintenance = SegmentMaintenance(
            catalog,
            parts.store,
            parts.reader,
            self._segments,
            epoch=epoch,
            segment_bytes=parts.uploader.options.segment_bytes,
            threads=parts.uploader.threads,
            fence=self.fence,
        )
        self._backlog = Backlog(
            catalog,
            state,
            held_bytes=parts.journal.holdings.index(topic.topic_id).bytes_from(state.end),
            skips=producers.sources.skips,
            registered=self._registered,
            caught_up=lambda: self._marker.soon(),
            fenced=self.fence,
        )
        self._marker = CleanMarker(
            catalog,
            state,
            has_tail=next_offset > state.end,
            after_s=parts.uploader.options.clean_after_s,
            is_stored=lambda: self._durable == self._backlog.state.end,
            is_quiet=self._is_quiet,
            fence=self.fence,
        )
        self.sources = SourceKeeper(
            producers.sources,
            backlog=self._backlog,
            journal=parts.journal,
            catalog=catalog,
            tail_end=next_offset,
            is_stored=lambda: self._durable == self._backlog.state.end,
            advanced=self._advanced,
        )
        """How far other clusters' topics were copied into this one."""
        parts.uploader.attach(self._backlog)

    @classmethod
    async def open(cls, topic: TopicKey, *, epoch: int, catalog: Catalog, parts: LogDependencies) -> TopicLog:
        """Claim the topic and continue where it ends. Raises Fenced, TopicSealed, TailElsewhere, DataGap, and
        whatever keeps the state from being read."""
        journal = parts.journal
        storage_id = journal.identity.storage_id
        found = await catalog.load()
        is_ours = found is not None and not found.sealed and found.storage_id == storage_id
        if found is None and journal.holdings.index(topic.topic_id):
            raise JournalCorrupt(f"the journal holds messages of {topic.path}, which was never opened")
        if found is not None and not is_ours:
            # Before the claim: after it, frames of long ago would be taken for the tail that this disk has.
            await journal.disown(topic.topic_id, found.end)
        state = await catalog.claim(epoch=epoch, storage_id=storage_id, has_tail=is_ours)
        journal.fence(topic.topic_id, epoch)
        journal.release(topic.topic_id, state.end)
        next_offset = state.end
        producers = ProducerTable(state.producers, state.origins)
        if is_ours:
            next_offset = _end_of_tail(topic, state, journal)
            if state.is_clean and next_offset > state.end:
                raise JournalCorrupt(
                    f"the journal holds messages of {topic.path} beyond {state.end}, where it is clean"
                )
            producers.adopt(journal.holdings.take_producers(topic.topic_id))
        return cls(
            topic,
            epoch=epoch,
            catalog=catalog,
            state=state,
            next_offset=next_offset,
            producers=producers,
            parts=parts,
        )

    # -- knowing -----------------------------------------------------------------------------

    @property
    def status(self) -> LogStatus:
        return self._status

    @property
    def start_offset(self) -> int:
        return self._backlog.state.start

    @property
    def stored_offset(self) -> int:
        """End of what is in registered segments."""
        return self._backlog.state.end

    @property
    def next_offset(self) -> int:
        """End of what is durable and can be read."""
        return self._durable

    @property
    def assigned_offset(self) -> int:
        """End of what was accepted."""
        return self._assigned

    # -- appending ---------------------------------------------------------------------------

    async def append(self, batch: RecordBatch | bytes | memoryview) -> int:
        """The base offset of the batch, once it is durable. A batch of a producer that is already here gets
        the offset it has. The body is not looked at: the service that takes batches from clients verifies
        them.

        Waits while too much is in flight or waits to be uploaded, and for a clean topic to be marked dirty.
        Raises SequenceGap, DuplicateForgotten, TopicClosed, Fenced; DiskFull, and what keeps the mark from
        being written (retryable); DiskFailed: the process stops. If the caller is cancelled, the batch may
        or may not be appended."""
        if not isinstance(batch, RecordBatch):
            batch = RecordBatch.parse(batch)
        return await asyncio.shield(await self.begin(batch))

    async def begin(self, batch: RecordBatch) -> asyncio.Future[int]:
        """Accept the batch, after which its place in the topic is fixed; the future has its base offset once
        it is durable. For callers that keep many on the way. Raises and waits as ``append``; the future fails
        with what becomes known later. It is shared when a batch is repeated: never cancel it."""
        header = batch.header
        await self._admit(header.length)
        # No await from here to the queue: the order of acceptance is the order of offsets and of frames.
        known = self._producers.find(header)
        return self._outcome_of(known) if known is not None else self._queue(batch)

    async def extend(self, append: SourceAppend) -> asyncio.Future[int]:
        """Accept the next range of a source; the future is done when it and everything before it is durable.
        Waits and raises as ``begin``, and SourcePositionMismatch, TooManySources, MarksMoved."""
        sources = self._producers.sources
        await self.sources.learned()
        self._check_accepting()
        sources.check(append)
        if append.batch is None:
            return self._skip(append)
        await self._admit(append.batch.header.length)
        sources.check(append)
        future = self._queue(append.batch)
        sources.begin(append, self._assigned)
        return future

    def _skip(self, append: SourceAppend) -> asyncio.Future[int]:
        """An append without messages. What it left out may be in flight: it fails with that."""
        self._producers.sources.begin(append, self._assigned)
        self.sources.skipped()
        if self._in_flight:
            return self._in_flight[-1].future
        self._producers.sources.settle(self._durable)
        return _done(self._durable)

    async def _admit(self, size: int) -> None:
        """Until there is room, in the order of the calls."""
        self._check_accepting()
        if self._marker.is_on:
            await self._marker.mark_dirty()
            self._check_accepting()
        if not self._journal.has_room(size):
            self._arriving += 1
            try:
                await self._journal.reserve(size)
            finally:
                self._arriving -= 1
            self._check_accepting()

    def _queue(self, batch: RecordBatch) -> asyncio.Future[int]:
        placed = batch.assigned(topic_id=self.topic.topic_id, epoch=self.epoch, base_offset=self._assigned)
        header = placed.header
        pending = _Pending(placed, header)
        self._journal.append(placed, partial(self._written, pending))
        self._unwritten += 1
        self._producers.begin(header)
        self._assigned += header.count
        self._in_flight.append(pending)
        return pending.future

    def _is_quiet(self) -> bool:
        """Nothing is about to be appended, or was and may be found to be the topic's."""
        is_certain = not self._arriving and not self._unwritten and not self._is_in_doubt
        return self._status is LogStatus.OPEN and is_certain

    def _outcome_of(self, base_offset: int) -> asyncio.Future[int]:
        """The future of a repeated batch, which may still be in flight."""
        for pending in self._in_flight:
            if pending.header.base_offset == base_offset:
                return pending.future
        return _done(base_offset)

    def is_degraded(self, offset: int) -> bool:
        """Whether the message, which was acknowledged just now, is on fewer disks than it should be."""
        return self._degraded[0] <= offset < self._degraded[1]

    def next_sequence(self, producer_id: int) -> int:
        """The sequence that is expected next of this producer; 0 of one that is not known."""
        return self._producers.next_sequence(producer_id)

    async def _write_epochs(self, asks: Sequence[EpochRequest]) -> Granted:
        self._check_accepting()
        try:
            return await self._catalog.grant_epochs(epoch=self.epoch, asks=asks, in_use=self.producers_in_use)
        except Fenced as error:
            self.fence(error)
            raise

    def _check_accepting(self) -> None:
        if self._fence is not None:
            raise self._fence
        if self._status is not LogStatus.OPEN:
            raise TopicClosed(f"topic {self.topic.path} is {self._status.value} on this broker")

    def _written(self, pending: _Pending, outcome: BaseException | None) -> None:
        """In the order of acceptance, on the event loop."""
        self._unwritten -= 1
        if pending.is_settled:
            if outcome is None:
                # Fenced, and on this disk all the same: if no other broker can have the topic, it has it
                # when this broker takes it up again, and its producer, which has no answer, repeats it.
                self._producers.follow(pending.header)
            self._tell()
            return
        if outcome is not None:
            # Only what the disk had no room for is not there.
            self._is_in_doubt |= not isinstance(outcome, DiskFull)
            self._settle_all(outcome)
            return
        self._in_flight.popleft()
        header = pending.header
        self._durable = header.next_offset
        if self._journal.is_degraded:
            start, end = self._degraded
            self._degraded = (start if end == header.base_offset else header.base_offset), self._durable
        self._recent.put(pending.batch)
        self._producers.commit(header)
        uploader = self._parts.uploader
        if self._backlog.grew(header, uploader.options.segment_bytes) or self._journal.is_pressed:
            uploader.woken.set()
        if not pending.future.done():
            pending.future.set_result(header.base_offset)
        self._tell()

    def _settle_all(self, error: BaseException) -> None:
        """Nothing that is in flight will be acknowledged."""
        for pending in self._in_flight:
            pending.fail(error)
        self._in_flight.clear()
        self._producers.abandon()
        self._assigned = self._durable
        self._tell()

    def _tell(self) -> None:
        """Wake all who wait for a change."""
        self._advanced.set()
        self._advanced.clear()

    # -- reading -----------------------------------------------------------------------------

    async def read(
        self, start: int, end: int | None = None, *, max_bytes: int | None = None
    ) -> AsyncGenerator[RecordBatch, None]:
        """Batches that cover ``start .. end`` without a gap (to the durable end of this moment if not said),
        up to about ``max_bytes`` but at least one. Raises OffsetOutOfRange, DataGap."""
        if not self.start_offset <= start <= self._durable:
            raise OffsetOutOfRange(start, self.start_offset, self._durable)
        stop = self._durable if end is None else min(end, self._durable)
        left = max_bytes
        async with aclosing(self._tiers.stream(start, stop)) as stream:
            async for batch in stream:
                yield batch
                if left is not None:
                    left -= batch.header.length
                    if left <= 0:
                        return

    def recent(self, start: int, end: int, *, max_bytes: int) -> list[RecordBatch]:
        """The beginning of what ``read`` gives, as far as it is in memory and ``max_bytes`` hold it, without
        waiting."""
        if start < self.start_offset:
            return []
        return self._tiers.recent(start, min(end, self._durable), max_bytes)

    async def tail(self, start: int) -> AsyncGenerator[RecordBatch, None]:
        """As ``read``, without an end: waits for what comes. Ends with TopicClosed or Fenced."""
        position = start
        while True:
            async with aclosing(self.read(position)) as stream:
                async for batch in stream:
                    yield batch
                    position = batch.next_offset
            await self.wait_beyond(position)

    async def wait_beyond(self, offset: int) -> None:
        """Until the message at the offset can be read: woken by the sync that makes it durable."""
        while self._durable <= offset:
            if self._status is not LogStatus.OPEN and self._status is not LogStatus.SEALING:
                self._check_accepting()
            await self._advanced.wait()

    async def offset_at(self, publish_time: int) -> int:
        """The first offset whose publish time (µs) is not before this; ``next_offset`` if there is none."""
        return await self._tiers.offset_at(publish_time, self._durable)

    async def segments(self, from_offset: int = 0) -> list[Segment]:
        """The registered segments that end beyond the offset, in order."""
        return [segment for segment in await self._segments.all() if segment.end > from_offset]

    async def enforce_retention(
        self, policy: RetentionPolicy, *, now_ms: int, keep_from: int | None = None
    ) -> list[Segment]:
        """Drop the segments that the policy lets go (see ``retention.enforce``); returns them."""
        dropped = await self.maintenance.enforce_retention(policy, now_ms=now_ms, keep_from=keep_from)
        if dropped:
            self._backlog.starts_at(dropped[-1].end)
        return dropped

    # -- ending ------------------------------------------------------------------------------

    async def upload_ahead(self, *, timeout: float) -> None:
        """Upload what is durable while the topic takes messages, until little is left for a seal. A little
        stays: an upload of it would only make the seals of other topics wait, since one is under way at a
        time. Raises ObjectStoreUnavailable when the store takes no writes or the time is up, and what else
        stands in the way."""
        uploader = self._parts.uploader
        try:
            async with asyncio.timeout(timeout):
                await uploader.check_store()
                for _ in range(AHEAD_ROUNDS):
                    if self.is_almost_stored:
                        return
                    await uploader.flush(self._backlog, self._durable, is_patient=False)
        except TimeoutError:
            raise ObjectStoreUnavailable(
                f"the object store {self._parts.store.url} has not taken what topic {self.topic.path} has in "
                f"the journal within {timeout:g} s"
            ) from None

    async def upload(self) -> None:
        """Until everything that is durable now is in segments. Raises what makes that impossible."""
        await self._parts.uploader.flush(self._backlog, self._durable)

    @property
    def is_almost_stored(self) -> bool:
        """Whether a seal has little to upload."""
        return self._backlog.held_bytes <= AHEAD_BYTES

    async def seal(self, *, timeout: float = 30.0) -> TopicState:
        """Hand the topic over: everything in segments, the end written down. Idempotent. Raises TimeoutError
        and whatever stands in the way; the topic then continues, unless the seal itself is in doubt."""
        if self._status is LogStatus.SEALED:
            return self._backlog.state
        if self._status is not LogStatus.OPEN and (
            self._is_seal_running or self._status is not LogStatus.SEALING
        ):
            self._check_accepting()
        self._status, self._is_seal_running = LogStatus.SEALING, True
        try:
            async with asyncio.timeout(timeout):
                await self._drained()
                await self._parts.uploader.flush(self._backlog, self._durable)
                return await self._write_seal()
        finally:
            self._is_seal_running = False
            if self._status is LogStatus.SEALING and not self._is_seal_in_doubt:
                self._status = LogStatus.OPEN

    async def _write_seal(self) -> TopicState:
        was_in_doubt, self._is_seal_in_doubt = self._is_seal_in_doubt, True
        self._backlog.catch_up_with_skips(self._durable)
        known = self._backlog.producers
        try:
            state = await self._catalog.seal(
                epoch=self.epoch,
                end=self._durable,
                producers=known.states(),
                origins=known.sources.origin_marks(),
            )
        except RetryableError:
            self._is_seal_in_doubt = was_in_doubt  # this one had no effect; an earlier one still may
            raise
        except Fenced as error:
            self.fence(error)
            raise
        self._backlog.state = state
        self._status = LogStatus.SEALED
        self._release()
        return state

    async def _drained(self) -> None:
        while self._unwritten:
            await self._advanced.wait()

    def fence(self, error: Fenced) -> None:
        """A newer epoch has the topic. What is in flight may be on this disk, but belongs to no owner: it
        is not acknowledged."""
        if self._fence is None:
            self._fence = error
            self._status = LogStatus.FENCED
            self._settle_all(error)
            self._release()

    async def close(self) -> None:
        """Stop here; what is not uploaded stays in the journal for the next opening, which must not begin
        before the journal has answered for every frame of this one."""
        is_first = self._status in (LogStatus.OPEN, LogStatus.SEALING)
        if is_first:
            self._status = LogStatus.CLOSED
        await self._drained()
        if is_first:
            self._release()
        if self._status is not LogStatus.SEALED and not self._is_closed:
            self._journal.holdings.keep_producers(self.topic.topic_id, self._producers)
        self._is_closed = True
        self._parts.ended(self)

    def _registered(self, segment: Segment) -> None:
        self.uploaded_segments += 1
        self.uploaded_bytes += segment.size
        self._segments.registered(segment)
        self.maintenance.registered()
        self._producers.sources.keep(self._backlog.state.producers)

    def _release(self) -> None:
        self._marker.close()
        self.epochs.close(self._fence or TopicClosed(f"topic {self.topic.path} is closed on this broker"))
        self.maintenance.close()
        self.sources.close()
        self._parts.uploader.backlogs.discard(self._backlog)
        self._recent.drop()
        self._tell()


def _done(offset: int) -> asyncio.Future[int]:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.set_result(offset)
    return future


def _end_of_tail(topic: TopicKey, state: TopicState, journal: Journal) -> int:
    """Where the journal's frames end that follow the segments."""
    for start, end in journal.holdings.index(topic.topic_id).ranges:
        if start > state.end:
            raise DataGap(
                f"topic {topic.path}: segments end at {state.end}, and the journal begins at {start}"
            )
        if end > state.end:
            return end
    return state.end
