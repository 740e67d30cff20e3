"""Tail recovery: a disk is gone and its ledgers are closed; what its topics have beyond their segments
becomes segments, and the topics end there, so that any broker may open them.

    states     the topics whose state is not settled and names the disk
    ledgers    all records of the disk's ledgers, every one closed (else their broker may still write)
    tails      one pass over the ledgers finds which frames count (``Tail``)
    upload     a second pass gives them to segments: written, verified, registered by compare-and-swap
    seal       the topic ends with its tail, and with what its owner knew of producers, source positions and
               origins: in one write with its last segment
    remove     when no topic needs the ledgers any more, their records go, and with them the copies

**In this order.** States are read before the ledgers' records. A topic whose state was then of epoch *e* has
frames only in ledgers that existed then, for an owner writes the frames of an epoch into one ledger, whose
record is older than the claim. If all of these are closed, the tail is known. A state that changes meanwhile
(the disk is back, and its broker took the topic again) refuses what is registered here: each write is on the
condition of the epoch that was read.

**Nothing else is needed for it to be right.** Two brokers that recover the tails of one disk register the
same messages at the same offsets, and the second one finds them there; so does an owner that was cut off, and
uploads what it has. Which broker does it is a matter of which is near the bytes, and not of safety.

**Shared.** Making a small segment is work for a processor, and a thousand of them keep one broker busy for
seconds. So the brokers that hold the ledgers divide the topics by id (``Share``), and each reads the ledgers
for its own part. The records of the ledgers stay until no state needs them: a broker that removed them after
its own part would remove the only copy of the others' tails.

**Many small tails.** Segments are made side by side. Those that were made wait for each other, ``WAVE`` of
them or as many as there are, so that their registrations share log entries (``metadata.store``), each on
its own conditions: a topic whose owner is back holds up no other. The next ones are made meanwhile. A
thousand tails that were registered as they came would be four hundred entries, and four hundred decisions of
the controller after them.

**Bounds.** Batches that wait to be uploaded or registered are held up to ``HELD_BYTES``; beyond it the topic
that has most is uploaded first. ``PARALLEL`` segments are made at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence, Set
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from sava.errors import RetryableError, SavaError
from sava.ledger.protocol import LedgerId, LedgerState, StorageId
from sava.ledger.protocol.record import TailBroken
from sava.ledger.recoverer import BytesMissing, LedgerReader
from sava.ledger.registry import LedgerPeers, LedgerRecordChanged, LedgerRecords, Stored
from sava.metadata.store import MetadataStore
from sava.records import BatchCorrupt, Header, RecordBatch, UnsupportedBatch, peek_header
from sava.storage.catalog import Catalog
from sava.storage.errors import Fenced, SegmentConflict, TopicGone
from sava.storage.journal_index import BATCH, DISOWNED, unpack_note
from sava.storage.objectstore import ObjectStore
from sava.storage.orphans import named_states
from sava.storage.producers import ProducerTable
from sava.storage.segment import write_segment
from sava.storage.segment_process import marks_of
from sava.storage.types import Segment, TopicKey, TopicState
from sava.tasks import cancelled
from sava.wal import Record


class Frame(NamedTuple):
    """One batch in a ledger."""

    start: int
    """Offsets ``start .. end``."""
    end: int
    epoch: int
    ledger: LedgerId
    position: int
    size: int


class Tail:
    """The frames of a disk's closed ledgers that are one topic's history beyond its segments. The topic's
    state is not settled and names the disk.

    A disk may have had several generations since a topic was last uploaded, each with a ledger of its own;
    all of them are read in order, as the owner would at a restart. Frames that follow one another without a
    gap are the tail.

        segments    0 ─────── 40
        ledger 7         30 ─────── 55   epoch 3
        ledger 9                    55 ── 60   epoch 5                        the topic ends at 60

    **A later epoch corrects an earlier one.** A mirror may have synced what the owner's own disk had not, so
    that a ledger is closed further than its owner's disk goes. Nothing there was acknowledged (the own disk
    is always among those that it takes). An owner that came back took the topic at the end of its own disk,
    and its offsets from there on are the ones that count:

        ledger 7     … 55 56 57      epoch 3, closed at 57; the owner's disk had only up to 55
        ledger 9          55' 56'    epoch 5                                    the topic has 55' and 56'

    An owner may also have fetched what its disk was missing, and have appended it again, unchanged, at the
    beginning of its next ledger; the second copy adds nothing. A note that truncates (``storage.journal``)
    takes away frames that were abandoned.
    """

    def __init__(self, topic: TopicKey, state: TopicState) -> None:
        self.topic = topic
        self.state = state
        self._frames: list[Frame] = []

    def take(self, header: Header, ledger: LedgerId, position: int) -> None:
        """The next frame in the order of the ledgers. Raises TailBroken."""
        if header.epoch > self.state.epoch:
            raise TailBroken(
                f"topic {self.topic.path}: ledger {ledger} has frames of epoch {header.epoch} at "
                f"{position}, and the topic is at {self.state.epoch}"
            )
        last = self._frames[-1] if self._frames else None
        if last is not None and header.base_offset < last.end:
            if self._has(header):
                return
            if header.epoch <= last.epoch:
                raise TailBroken(
                    f"topic {self.topic.path}: ledger {ledger} has offset {header.base_offset} at "
                    f"{position}, after {last.end} of the same epoch {last.epoch}"
                )
            self.disown(header.base_offset)
        if header.next_offset > self.state.end:
            self._frames.append(
                Frame(header.base_offset, header.next_offset, header.epoch, ledger, position, header.length)
            )

    def _has(self, header: Header) -> bool:
        """Whether this very frame was taken before: an owner whose disk had lost what others had synced
        writes it down once more."""
        for frame in reversed(self._frames):
            if frame.start <= header.base_offset:
                return (frame.start, frame.end, frame.epoch) == (
                    header.base_offset,
                    header.next_offset,
                    header.epoch,
                )
        return False

    def disown(self, offset: int) -> None:
        """What was taken from the offset on is not history."""
        while self._frames and self._frames[-1].end > offset:
            del self._frames[-1]

    @property
    def frames(self) -> Iterator[Frame]:
        """Without a gap from the registered end on."""
        at = self.state.end
        for frame in self._frames:
            if frame.start > at:
                return
            yield frame
            at = frame.end

    @property
    def end(self) -> int:
        return max((frame.end for frame in self.frames), default=self.state.end)

    @property
    def behind_a_hole(self) -> int:
        """The end of what follows a gap, and so cannot be given to a consumer; 0: there is none."""
        return self._frames[-1].end if self._frames and self._frames[-1].start > self.end else 0


class Tails:
    """Of all unsettled topics of a disk. Owned by one task."""

    def __init__(self, states: dict[TopicKey, TopicState]) -> None:
        self.by_id = {topic.topic_id: Tail(topic, state) for topic, state in states.items()}
        self.broken: dict[int, TailBroken] = {}
        """Topics whose frames contradict one another: an operator has to look at them."""

    def take(self, record: Record, ledger: LedgerId) -> None:
        if record.kind == BATCH:
            try:
                header = peek_header(record.payload)
            except (BatchCorrupt, UnsupportedBatch) as error:
                self._unreadable(ledger, record.position, error)
                return
            tail = self.by_id.get(header.topic_id)
            if tail is not None and header.topic_id not in self.broken:
                try:
                    tail.take(header, ledger, record.position)
                except TailBroken as error:
                    self.broken[header.topic_id] = error
        elif record.kind == DISOWNED:
            topic_id, offset = unpack_note(record.payload)
            if topic_id in self.by_id:
                self.by_id[topic_id].disown(offset)

    def _unreadable(self, ledger: LedgerId, position: int, error: SavaError) -> None:
        """The frame may be the last one of any of the topics. A topic that were sealed without it would lose
        an acknowledged message, and give its offset out again."""
        for topic_id, tail in self.by_id.items():
            broken = TailBroken(
                f"topic {tail.topic.path}: the header of the frame in ledger {ledger} at {position} cannot "
                f"be read ({error}), so it may be the topic's; a broker of the version that wrote it can "
                "read it"
            )
            self.broken.setdefault(topic_id, broken)


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
    """The topics of a disk whose tails one broker recovers: part ``number``, from 0 on, of ``parts``."""

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
    """A ledger of the disk is not closed."""


@dataclass(slots=True)
class TailRecoveryReport:
    """What came of it."""

    topics: list[str] = field(default_factory=list)
    """They were sealed."""
    overtaken: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Topics that still wait, and why."""
    messages: int = 0
    bytes: int = 0
    removed: list[LedgerId] = field(default_factory=list)
    others: int = 0
    """Topics of other brokers' shares that are not settled yet."""

    @property
    def is_complete(self) -> bool:
        return not self.failed


class TailRecovery:
    """Of one broker, for any number of disks. Owned by the event loop."""

    def __init__(
        self,
        records: LedgerRecords,
        peers: LedgerPeers,
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

    async def run(self, broker: int, origin: StorageId, share: Share = WHOLE) -> TailRecoveryReport:
        """Recover what the ledgers of this disk hold of the topics of the share. Can be repeated. Raises
        NotClosed, BytesMissing, and what keeps records from being read."""
        states = unsettled(await named_states(self._metadata), origin)
        ledgers = await self._journals(broker, origin)
        for ledger, stored in ledgers.items():
            if stored.record.state is not LedgerState.CLOSED:
                raise NotClosed(f"ledger {ledger} is {stored.record.state.value}")
        done = TailRecoveryReport()
        if not ledgers:
            return done
        own = {topic: state for topic, state in states.items() if share.has(topic.topic_id)}
        if own:
            await self._tail_recovery(own, ledgers, done)
        if len(own) < len(states):
            now = unsettled(await named_states(self._metadata), origin)
            done.others = sum(not share.has(topic.topic_id) for topic in now)
        if done.is_complete and not done.overtaken and not done.others:
            await self._remove(ledgers, done)
        return done

    async def _journals(self, broker: int, origin: StorageId) -> Mapping[LedgerId, Stored]:
        found = await self._records.of(broker)
        return {ledger: each for ledger, each in found.items() if each.record.origin == origin}

    async def _tail_recovery(
        self, states: dict[TopicKey, TopicState], ledgers: Mapping[LedgerId, Stored], done: TailRecoveryReport
    ) -> None:
        opened = [
            LedgerReader(ledger, stored.record, self._peers, own=self._own)
            for ledger, stored in ledgers.items()
        ]
        tails = await read_tails(states, opened)
        is_lossy = any(stored.record.lost for stored in ledgers.values())
        uploads = _Uploads(
            self._metadata, self._objects, self._threads, self._segment_bytes, self._held_bytes
        )
        for topic_id, tail in tails.by_id.items():
            if topic_id in tails.broken:
                done.failed[tail.topic.path] = str(tails.broken[topic_id])
            elif tail.behind_a_hole and not is_lossy:
                done.failed[tail.topic.path] = f"offset {tail.end} is missing in the closed ledgers"
            else:
                uploads.add(tail)
        try:
            async for frame, record in _wanted(opened, uploads.frames):
                await uploads.take(frame, record)
            await uploads.finish(done)
        finally:
            await uploads.close()

    async def _remove(self, ledgers: Mapping[LedgerId, Stored], done: TailRecoveryReport) -> None:
        for ledger, stored in ledgers.items():
            try:
                await self._records.remove(ledger, revision=stored.revision)
            except LedgerRecordChanged as error:
                if error.found is not None:
                    raise
            done.removed.append(ledger)


def unsettled(states: Mapping[TopicKey, TopicState], origin: StorageId) -> dict[TopicKey, TopicState]:
    """The topics of which only the ledgers of this disk know the end."""
    return {
        topic: state for topic, state in states.items() if state.storage_id == origin and not state.is_settled
    }


async def read_tails(
    states: dict[TopicKey, TopicState], ledgers: Sequence[LedgerReader], *, is_partial: bool = False
) -> Tails:
    """What the ledgers hold of these topics. ``is_partial``: ledgers that are not closed count as far as any
    disk has them without a hole. Raises BytesMissing."""
    tails = Tails(states)
    for ledger in ledgers:
        await ledger.locate()
        is_closed = ledger.record.state is LedgerState.CLOSED
        end = ledger.record.end if is_closed else ledger.known_end
        try:
            async for records in ledger.records(min(ledger.start, end), end):
                for record in records:
                    tails.take(record, ledger.ledger)
        except BytesMissing:
            if not is_partial:
                raise
    return tails


async def _wanted(
    ledgers: Sequence[LedgerReader], frames: Mapping[tuple[LedgerId, int], Frame]
) -> AsyncIterator[tuple[Frame, Record]]:
    """The records of these frames, in the order of the ledgers."""
    for ledger in ledgers:
        positions = [position for owner, position in frames if owner == ledger.ledger]
        if not positions:
            continue
        last = max(positions)
        async for records in ledger.records(min(positions), ledger.record.end):
            for record in records:
                frame = frames.get((ledger.ledger, record.position))
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
    """All topics of one tail recovery, within bounds of memory. Owned by one task and those that it
    starts."""

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
        self.frames: dict[tuple[LedgerId, int], Frame] = {}
        """Those that are wanted."""
        self._of_frame: dict[tuple[LedgerId, int], _Upload] = {}

    def add(self, tail: Tail) -> None:
        upload = self._uploads[tail.topic.topic_id] = _Upload(tail)
        for frame in tail.frames:
            key = frame.ledger, frame.position
            self.frames[key], self._of_frame[key] = frame, upload

    async def take(self, frame: Frame, record: Record) -> None:
        """A wanted frame; those of one topic come in order."""
        upload = self._of_frame[frame.ledger, frame.position]
        if upload.error is not None:
            return
        try:
            batch = RecordBatch.parse(record.payload)
        except (BatchCorrupt, UnsupportedBatch) as error:
            # Of this topic alone: the others of the disk would wait for a frame that is not theirs. What was
            # taken before it may be registered, what follows may not, and the topic is not sealed.
            path = upload.tail.topic.path
            upload.error = TailBroken(
                f"topic {path}: the frame of offset {frame.start} in ledger {frame.ledger} at "
                f"{frame.position} cannot be parsed: {error}"
            )
            log.error("tail recovery: failed topic=%s error=%s", path, upload.error)
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

    async def finish(self, done: TailRecoveryReport) -> None:
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
        """Upload what is held of the topic, after what went before it."""
        if upload.task is not None:
            await upload.task
        load = _Load(upload.batches, upload.headers, upload.held_bytes, seals)
        upload.batches, upload.headers, upload.held_bytes = [], [], 0
        upload.task = asyncio.create_task(
            self._carry(upload, load), name=f"tail_recovery {upload.tail.topic.path}"
        )

    async def _carry(self, upload: _Upload, load: _Load) -> None:
        try:
            if upload.error is None:
                await self._store(upload, load)
        except Exception as error:  # noqa: BLE001 (of one topic; the others of the disk must not wait for it)
            upload.error = error
            log.warning(
                "tail recovery: failed topic=%s error=%s: %s",
                upload.tail.topic.path,
                type(error).__name__,
                error,
            )
        finally:
            self._held -= load.size
            self._freed.set()

    async def _store(self, upload: _Upload, load: _Load) -> None:
        tail, known = upload.tail, upload.producers
        catalog, epoch = Catalog(self._metadata, tail.topic), tail.state.epoch
        known.sources.learn(await marks_of(load.batches, known.sources.known(), self._threads))
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
                epoch=epoch, end=tail.end, producers=known.states(), origins=known.sources.origin_marks()
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
                origins=known.sources.origin_marks(),
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
            # Its objects were listed and removed while this one was on its way; no broker looks again.
            await self._objects.delete([segment.key])
            raise
        return None

    async def _make(self, topic: TopicKey, epoch: int, batches: list[RecordBatch]) -> Segment:
        """A segment, when it is time to register it. The last one to be made lets those go that wait: nothing
        waits for a segment that is not being made."""
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
