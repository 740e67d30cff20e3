"""Salvage: a disk is gone and its journals are closed; what its topics have beyond their segments becomes
segments, and the topics end there, so that any broker may go on with them.

    states     the topics whose state is not settled and names the disk
    journals   all records of the disk's journals, every one closed (else somebody may still write)
    tails      one pass over the journals tells which frames count (``tails``)
    upload     a second pass gives them to segments: written, verified, registered by compare-and-swap
    seal       the topic ends with its tail, and with what its owner knew of producers, chains and origins: in
               one write with its last segment
    remove     when no topic needs the journals any more, their records go, and with them the copies

**In this order.** States are read before the journals' records. A topic whose state was then of epoch *e* has
frames only in journals that existed then, for an owner writes the frames of an epoch into one journal, whose
record is older than the claim. If all of these are closed, the tail is known. A state that changes meanwhile
(the disk is back, and its broker took the topic again) refuses what is registered here: each write is on the
condition of the epoch that was read.

**Nothing else is needed for it to be right.** Two brokers that salvage one disk register the same messages at
the same offsets, and whoever is second finds them there; so does an owner that was cut off, and uploads what
it has. Who salvages is a matter of who is near the bytes, and not of safety.

**Shared.** Making a small segment is work for a processor, and a thousand of them keep one broker busy for
seconds. So the brokers that hold the journals divide the topics by id (``Share``), and each reads the
journals for its own part. The records of the journals stay until no state needs them: a broker that removed
them after its own part would remove the only copy of the others' tails.

**Many small tails.** Segments are made side by side. Those that were made wait for each other, ``WAVE`` of
them or as many as there are, so that their registrations share log entries (``metadata.batching``), each on
its own conditions: a topic whose owner is back holds up no other. The next ones are made meanwhile. A
thousand tails that were registered as they came would be four hundred entries, and four hundred decisions of
the controller after them.

**Bounds.** Batches that wait to be uploaded or registered are held up to ``HELD_BYTES``; beyond it the topic
that has most is uploaded first. ``PARALLEL`` segments are made at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sava.errors import RetryableError
from sava.ledger.closed import BytesMissing, ClosedJournal, origin_of
from sava.ledger.ports import (
    JournalRecords,
    Peers,
    RecordChanged,
    Stored,
)
from sava.ledger.protocol import JournalId, JournalState, StorageId
from sava.ledger.protocol.errors import TailBroken
from sava.ledger.tails import Frame, Tail, Tails
from sava.metadata.store import MetadataStore
from sava.records import BatchCorrupt, Header, RecordBatch, UnsupportedBatch
from sava.storage.catalog import Catalog
from sava.storage.errors import Fenced, SegmentConflict, TopicGone
from sava.storage.objectstore import ObjectStore
from sava.storage.orphans import named_states
from sava.storage.producers import ProducerTable
from sava.storage.segment import write_segment
from sava.storage.types import Segment, TopicKey, TopicState
from sava.storage.uploader import marks_of
from sava.tasks import cancelled
from sava.wal import Record

log = logging.getLogger(__name__)

HELD_BYTES: Final = 128 << 20
SEGMENT_BYTES: Final = 16 << 20
PARALLEL: Final = 16
"""Most of the time that a small segment takes is waiting: for disks, or for an object store."""
WAVE: Final = 64
"""Segments that are registered together."""
OVERTAKEN: Final = (Fenced, TopicGone)
"""The topic is not the disk's any more: its owner is back, or it was deleted."""


class Share(NamedTuple):
    """The topics of a disk that one broker salvages: part ``number``, from 0 on, of ``parts``."""

    number: int = 0
    parts: int = 1

    def has(self, topic_id: int) -> bool:
        return topic_id % self.parts == self.number


WHOLE: Final = Share()


def share_of(holders: Sequence[StorageId], present: Set[StorageId], own: StorageId) -> Share | None:
    """The share of the broker with this disk: holders that are present divide the topics in the order of the
    record, which is the same everywhere. None: it holds nothing. Brokers that see different holders present
    may do a topic twice or leave it out until they see the same, or until one of them helps."""
    sharing = [storage for storage in holders if storage in present]
    return Share(sharing.index(own), len(sharing)) if own in sharing else None


class NotClosed(RetryableError):
    """A journal of the disk is not closed."""


@dataclass(slots=True)
class Salvaged:
    """What came of it."""

    topics: list[str] = field(default_factory=list)
    """They were sealed."""
    overtaken: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Topics that still wait, and why."""
    messages: int = 0
    bytes: int = 0
    removed: list[JournalId] = field(default_factory=list)
    others: int = 0
    """Topics of other brokers' shares that are not settled yet."""

    @property
    def is_complete(self) -> bool:
        return not self.failed


class Salvage:
    """Of one broker, for any number of disks. Owned by the event loop."""

    def __init__(
        self,
        records: JournalRecords,
        peers: Peers,
        metadata: MetadataStore,
        objects: ObjectStore,
        *,
        own: StorageId,
        threads: Executor | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        held_bytes: int = HELD_BYTES,
    ) -> None:
        self._records = records
        self._peers = peers
        self._metadata = metadata
        self._objects = objects
        self._own = own
        self._threads = threads
        self._segment_bytes = segment_bytes
        self._held_bytes = held_bytes

    async def run(self, broker: int, origin: StorageId, share: Share = WHOLE) -> Salvaged:
        """Salvage what the journals of this disk hold of the topics of the share. Can be repeated. Raises
        NotClosed, BytesMissing, and what keeps records from being read."""
        states = unsettled(await named_states(self._metadata), origin)
        journals = await self._journals(broker, origin)
        for journal, stored in journals.items():
            if stored.record.state is not JournalState.CLOSED:
                raise NotClosed(f"journal {journal} is {stored.record.state.value}")
        done = Salvaged()
        if not journals:
            return done
        own = {topic: state for topic, state in states.items() if share.has(topic.topic_id)}
        if own:
            await self._salvage(own, journals, done)
        if len(own) < len(states):
            now = unsettled(await named_states(self._metadata), origin)
            done.others = sum(not share.has(topic.topic_id) for topic in now)
        if done.is_complete and not done.overtaken and not done.others:
            await self._remove(journals, done)
        return done

    async def _journals(self, broker: int, origin: StorageId) -> Mapping[JournalId, Stored]:
        found = await self._records.of(broker)
        return {journal: each for journal, each in found.items() if origin_of(each.record) == origin}

    async def _salvage(
        self, states: dict[TopicKey, TopicState], journals: Mapping[JournalId, Stored], done: Salvaged
    ) -> None:
        opened = [
            ClosedJournal(journal, stored.record, self._peers, own=self._own)
            for journal, stored in journals.items()
        ]
        tails = await read_tails(states, opened)
        is_lossy = any(stored.record.lost for stored in journals.values())
        uploads = _Uploads(
            self._metadata, self._objects, self._threads, self._segment_bytes, self._held_bytes
        )
        for topic_id, tail in tails.by_id.items():
            if topic_id in tails.broken:
                done.failed[tail.topic.path] = str(tails.broken[topic_id])
            elif tail.behind_a_hole and not is_lossy:
                done.failed[tail.topic.path] = f"offset {tail.end} is missing in the closed journals"
            else:
                uploads.add(tail)
        try:
            async for frame, record in _wanted(opened, uploads.frames):
                await uploads.take(frame, record)
            await uploads.finish(done)
        finally:
            await uploads.close()

    async def _remove(self, journals: Mapping[JournalId, Stored], done: Salvaged) -> None:
        for journal, stored in journals.items():
            try:
                await self._records.remove(journal, revision=stored.revision)
            except RecordChanged as error:
                if error.found is not None:
                    raise
            done.removed.append(journal)


def unsettled(states: Mapping[TopicKey, TopicState], origin: StorageId) -> dict[TopicKey, TopicState]:
    """The topics of which only the journals of this disk know the end."""
    return {
        topic: state for topic, state in states.items() if state.storage_id == origin and not state.is_settled
    }


async def read_tails(
    states: dict[TopicKey, TopicState], journals: Sequence[ClosedJournal], *, is_partial: bool = False
) -> Tails:
    """What the journals hold of these topics. ``is_partial``: journals that are not closed count as far as
    anybody has them without a hole. Raises BytesMissing."""
    tails = Tails(states)
    for journal in journals:
        await journal.locate()
        is_closed = journal.record.state is JournalState.CLOSED
        end = journal.record.end if is_closed else journal.known_end
        try:
            async for records in journal.records(min(journal.start, end), end):
                for record in records:
                    tails.take(record, journal.journal)
        except BytesMissing:
            if not is_partial:
                raise
    return tails


async def _wanted(
    journals: Sequence[ClosedJournal], frames: Mapping[tuple[JournalId, int], Frame]
) -> AsyncIterator[tuple[Frame, Record]]:
    """The records of these frames, in the order of the journals."""
    for journal in journals:
        positions = [position for owner, position in frames if owner == journal.journal]
        if not positions:
            continue
        last = max(positions)
        async for records in journal.records(min(positions), journal.record.end):
            for record in records:
                frame = frames.get((journal.journal, record.position))
                if frame is not None:
                    yield frame, record
            if records and records[-1].position >= last:
                break


class _Upload:
    """One topic on its way into segments."""

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self.at = tail.state.end
        """Up to here batches were taken."""
        self.producers = ProducerTable(tail.state.producers, tail.state.origins)
        """As of the last segment."""
        self.batches: list[RecordBatch] = []
        self.headers: list[Header] = []
        """Of the whole frames that they are of."""
        self.held_bytes = 0
        self.task: asyncio.Task[None] | None = None
        self.error: Exception | None = None


class _Load(NamedTuple):
    """What goes into a segment."""

    batches: list[RecordBatch]
    headers: list[Header]
    size: int
    seals: bool
    """Nothing follows it."""


class _Uploads:
    """All topics of one salvage, within bounds of memory. Owned by one task and those that it starts."""

    def __init__(
        self,
        metadata: MetadataStore,
        objects: ObjectStore,
        threads: Executor | None,
        segment_bytes: int,
        held_bytes: int,
    ) -> None:
        self._metadata = metadata
        self._objects = objects
        self._threads = threads
        self._segment_bytes = segment_bytes
        self._limit = held_bytes
        self._held = 0
        self._slots = asyncio.Semaphore(PARALLEL)
        self._making = 0
        """Segments that are being made, or are to be."""
        self._made: list[asyncio.Future[None]] = []
        """Those that were made wait on these to be registered."""
        self._freed = asyncio.Event()
        self._uploads: dict[int, _Upload] = {}
        self._messages = 0
        self._bytes = 0
        self.frames: dict[tuple[JournalId, int], Frame] = {}
        """Those that are wanted."""
        self._of_frame: dict[tuple[JournalId, int], _Upload] = {}

    def add(self, tail: Tail) -> None:
        upload = self._uploads[tail.topic.topic_id] = _Upload(tail)
        for frame in tail.frames:
            key = frame.journal, frame.position
            self.frames[key], self._of_frame[key] = frame, upload

    async def take(self, frame: Frame, record: Record) -> None:
        """A wanted frame; those of one topic come in order."""
        upload = self._of_frame[frame.journal, frame.position]
        if upload.error is not None:
            return
        try:
            batch = RecordBatch.parse(record.payload)
        except (BatchCorrupt, UnsupportedBatch) as error:
            # Of this topic alone: the others of the disk would wait for a frame that is not theirs. What was
            # taken before it may be registered, what follows may not, and the topic is not sealed.
            path = upload.tail.topic.path
            upload.error = TailBroken(
                f"topic {path}: the frame of offset {frame.start} in journal {frame.journal} at "
                f"{frame.position} cannot be parsed: {error}"
            )
            log.error("salvage: failed topic=%s error=%s", path, upload.error)
            return
        upload.headers.append(batch.header)
        upload.batches.append(batch if frame.start >= upload.at else batch.slice(upload.at, frame.end))
        upload.at = frame.end
        upload.held_bytes += frame.size
        self._held += frame.size
        if upload.held_bytes >= self._segment_bytes:
            await self._begin(upload)
        while self._held > self._limit:
            largest = max(self._uploads.values(), key=lambda each: each.held_bytes)
            if largest.held_bytes:
                await self._begin(largest)
            else:  # all of it is on its way
                self._freed.clear()
                await self._freed.wait()

    async def finish(self, done: Salvaged) -> None:
        """Upload the rest and seal."""
        for upload in self._uploads.values():
            await self._begin(upload, seals=True)
        await asyncio.gather(*(upload.task for upload in self._uploads.values() if upload.task is not None))
        done.messages, done.bytes = self._messages, self._bytes
        for upload in self._uploads.values():
            path = upload.tail.topic.path
            if upload.error is None:
                done.topics.append(path)
            elif isinstance(upload.error, OVERTAKEN):
                done.overtaken.append(path)
            else:
                done.failed[path] = str(upload.error)

    async def close(self) -> None:
        tasks = [upload.task for upload in self._uploads.values() if upload.task is not None]
        await cancelled(*tasks)

    async def _begin(self, upload: _Upload, *, seals: bool = False) -> None:
        """What is held of the topic goes on its way, after what went before it."""
        if upload.task is not None:
            await upload.task
        load = _Load(upload.batches, upload.headers, upload.held_bytes, seals)
        upload.batches, upload.headers, upload.held_bytes = [], [], 0
        upload.task = asyncio.create_task(self._carry(upload, load), name=f"salvage {upload.tail.topic.path}")

    async def _carry(self, upload: _Upload, load: _Load) -> None:
        try:
            if upload.error is None:
                await self._store(upload, load)
        except Exception as error:  # noqa: BLE001 (of one topic; the others of the disk must not wait for it)
            upload.error = error
            log.warning(
                "salvage: failed topic=%s error=%s: %s", upload.tail.topic.path, type(error).__name__, error
            )
        finally:
            self._held -= load.size
            self._freed.set()

    async def _store(self, upload: _Upload, load: _Load) -> None:
        tail, known = upload.tail, upload.producers
        catalog, epoch = Catalog(self._metadata, tail.topic), tail.state.epoch
        known.chains.learn(await marks_of(load.batches, known.chains, self._threads))
        for header in load.headers:
            known.follow(header)
        batches, is_sealed = load.batches, False
        while batches:
            left = await self._register(catalog, epoch, batches, known, seals=load.seals)
            is_sealed = left is None and load.seals
            batches = left or []
        self._bytes += load.size
        self._messages += sum(batch.header.count for batch in load.batches)
        if load.seals and not is_sealed:
            await catalog.seal(
                epoch=epoch, end=tail.end, producers=known.states(), origins=known.chains.origin_marks()
            )

    async def _register(
        self,
        catalog: Catalog,
        epoch: int,
        batches: list[RecordBatch],
        known: ProducerTable,
        *,
        seals: bool,
    ) -> list[RecordBatch] | None:
        """None: they are registered, and the topic is sealed if that was asked for. Otherwise another broker
        has registered some of them meanwhile, and these are left. ``known``: as of the end of the batches."""
        segment = await self._make(catalog.topic, epoch, batches)
        try:
            await catalog.register(
                segment,
                epoch=epoch,
                producers=known.states(),
                origins=known.chains.origin_marks(),
                seals=seals,
            )
        except SegmentConflict:
            state = await catalog.load()
            if state is None or state.epoch != epoch or state.end <= segment.start:
                raise
            return [
                batch.slice(max(batch.base_offset, state.end), batch.next_offset)
                for batch in batches
                if batch.next_offset > state.end
            ]
        except TopicGone:
            # Its objects were listed and removed while this one was on its way; nobody will look again.
            await self._objects.delete([segment.key])
            raise
        return None

    async def _make(self, topic: TopicKey, epoch: int, batches: list[RecordBatch]) -> Segment:
        """A segment, when it is time to register it. Whoever is the last to be made lets those go that wait:
        nothing waits for what nobody makes."""
        self._making += 1
        try:
            async with self._slots:
                segment = await write_segment(
                    self._objects,
                    topic,
                    epoch=epoch,
                    batches=batches,
                    threads=self._threads,
                )
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._made.append(turn)
        finally:
            self._making -= 1
            if not self._making or len(self._made) >= WAVE:
                made, self._made = self._made, []
                for each in made:
                    if not each.done():
                        each.set_result(None)
        await turn
        return segment
