"""Inspection: what storage holds of topics, and whether it is what its descriptors say, seen from outside.

For operators and tools beside a running cluster: everything here reads, nothing is opened, claimed or
repaired. A broker stops at the first thing that is wrong; here the first must not hide the others,
so records are read one by one and what is wrong becomes a ``Fault`` with a text, not an exception.

The cluster works on while it is looked at, so what looks wrong may only be new:

    descriptors, then the state   a segment is registered in between: looks like a gap. Every change writes
                                  the state record, so the records are read again until its revision is the
                                  same before and after.
    descriptor, then its object   retention has dropped both in between, or a merge has replaced them: looks
                                  like a loss. The descriptor is read again; only one that still stands
                                  accuses.
    objects, then descriptors     in this order an upload that is registered in between is known in time.
                                  What nothing names and could still be registered (``orphans``) is not
                                  wrong, and neither is what is young: a merge may be about to name it.
                                  What was listed and has been deleted since is not there to be wrong; what a
                                  merge has replaced is looked at again a moment later.

Memory: the names of the objects in question, the records of one topic, and a few row groups.

**Journals.** The journal of a stopped broker, read without changing a byte of its directory.

Opening a journal changes it: a torn tail is cut, the incarnation rises, remains are removed. An operator who
looks at the disk of a broker that does not start must leave it as it is, so the same recovery
(``wal.recovery``) and the same replay (``journal``) run here on a directory that can only be read. They say
what the next start will find, or why it will refuse.

The directory is locked as long as it is looked at: shared, so that several may look, against which a broker
that is started meanwhile finds it in use.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple, NoReturn, Protocol

import msgspec

from sava.errors import CallerError, HostError, shown
from sava.metadata.commands import KeyValue
from sava.metadata.store import RangeResult
from sava.records import RecordBatch
from sava.storage import keys
from sava.storage.catalog import decode_record
from sava.storage.errors import (
    CatalogBusy,
    CatalogCorrupt,
    DataGap,
    InvalidStorageName,
    ObjectMissing,
    SegmentCorrupt,
)
from sava.storage.journal_index import BATCH, JournalIndex, JournalReplay
from sava.storage.objectstore import ObjectInfo, ObjectStore
from sava.storage.orphans import GRACE_MS, can_be_registered
from sava.storage.segment import SegmentReader
from sava.storage.types import Segment, TopicKey, TopicState
from sava.tasks import cancelled
from sava.wal import DirectoryLocked, FileMissing, Identity, Record
from sava.wal.disk import LOCK_FILE, LocalFile
from sava.wal.format import FormatVersion, file_start, read_header
from sava.wal.reader import WalReader
from sava.wal.recovery import recover

OBJECTS: Final = "topics"
_BEHIND: Final = "\U0010ffff"
"""Sorts behind every possible rest of a key."""
_PAGE: Final = 1000
_ATTEMPTS: Final = 16
_PARALLEL: Final = 4
"""Segments verified side by side: enough to hide the way to a distant store, and no more than a few of their
chunks in memory."""
_MERGE_S: Final = 1.0
"""Within which a merge deletes what it has replaced. With a slow store it takes longer, and is accused: no
message is only there any more."""


class RecordReader(Protocol):
    """As much of a MetadataStore as is needed to look; linearizable."""

    async def range(self, prefix: str, *, limit: int = 0, start_after: str = "") -> RangeResult: ...


class UnknownTopic(CallerError):
    """Storage knows no topic of this name."""

    def __init__(self, name: InspectedTopic) -> None:
        super().__init__(
            f"storage knows no topic {name.path}; `sava storage inspect` lists those that it knows"
        )


class NotInSegments(CallerError):
    """Offsets that are elsewhere, or nowhere."""


class InspectedTopic(NamedTuple):
    namespace: str
    name: str

    @classmethod
    def parse(cls, path: str) -> InspectedTopic:
        """From ``/namespace/topic``. Raises InvalidStorageName."""
        parts = path.split("/")
        if len(parts) != 3 or parts[0]:
            raise InvalidStorageName(f"{shown(path)} is not the name of a topic: write /namespace/topic")
        keys.check_topic(TopicKey(parts[1], parts[2], 0))
        return cls(parts[1], parts[2])

    @property
    def path(self) -> str:
        return f"/{self.namespace}/{self.name}"

    @property
    def any_id(self) -> TopicKey:
        """For keys that do not depend on the topic's id."""
        return TopicKey(self.namespace, self.name, 0)


class TopicView(msgspec.Struct, frozen=True, kw_only=True):
    """The records of a topic as they were at one revision."""

    name: InspectedTopic
    state: TopicState | None
    segments: tuple[Segment, ...]
    """In the order of their keys."""
    unreadable: tuple[str, ...] = ()
    """Records that are not what their key says, in words."""

    @property
    def is_empty(self) -> bool:
        """There is no such topic, or not any more."""
        return self.state is None and not self.segments and not self.unreadable

    @property
    def keys(self) -> frozenset[str]:
        """Of the objects that are named."""
        return frozenset(segment.key for segment in self.segments)

    def faults(self) -> Iterator[str]:
        """What is wrong with the records by themselves."""
        yield from self.unreadable
        if self.state is None:
            if self.segments:
                yield f"{len(self.segments)} descriptors are there without a state"
            return
        expected = self.state.start
        for segment in self.segments:
            yield from self._faults_of(segment, self.state)
            if segment.start > expected:
                yield f"offsets {expected}..{segment.start} are in no segment"
            elif segment.start < expected:
                yield f"offsets {segment.start}..{expected} are in two segments, or retention has let them go"
            expected = max(expected, segment.end)
        if expected != self.state.end:
            yield f"the segments end at {expected}, and the state says {self.state.end}"

    def _faults_of(self, segment: Segment, state: TopicState) -> Iterator[str]:
        if segment.topic_id != state.topic_id:
            yield f"{segment.key} is of topic id {segment.topic_id}, and the state of {state.topic_id}"
        named = keys.parse_object_key(segment.key)
        topic = TopicKey(self.name.namespace, self.name.name, segment.topic_id)
        if named is None or named[:4] != (topic, segment.start, segment.end, segment.epoch):
            yield f"the descriptor of {segment.start}..{segment.end} names another's object: {segment.key}"


class Fault(NamedTuple):
    """Something that is wrong with a topic, in words."""

    topic: InspectedTopic
    text: str


# -- reading records ---------------------------------------------------------------------------


async def topics(records: RecordReader) -> AsyncIterator[InspectedTopic]:
    """All topics that have records, in order. From each, one key is read to get to the next."""
    after = ""
    while True:
        page = await records.range(keys.TOPICS, limit=1, start_after=after)
        if not page.kvs:
            return
        after = page.kvs[0].key
        namespace, _, rest = after.removeprefix(keys.TOPICS).partition("/")
        name, slash, _ = rest.partition("/")
        if slash:
            found = InspectedTopic(namespace, name)
            yield found
            after = keys.topic_prefix(found.any_id) + _BEHIND


async def known_topic(records: RecordReader, name: InspectedTopic) -> TopicView:
    """As ``read_topic``. Raises UnknownTopic."""
    view = await read_topic(records, name)
    if view.is_empty:
        raise UnknownTopic(name)
    return view


async def read_topic(records: RecordReader, name: InspectedTopic) -> TopicView:
    """State and descriptors as they were together; empty if there are none. Raises CatalogBusy."""
    state_key = keys.state_key(name.any_id)
    for _ in range(_ATTEMPTS):
        before = _revision((await records.range(state_key)).kvs, state_key)
        kvs = await _read_pages(records, keys.topic_prefix(name.any_id))
        if _revision(kvs, state_key) == before:
            return _view(name, kvs)
    raise CatalogBusy(f"topic {name.path}: its records changed under {_ATTEMPTS} attempts to read them")


async def _read_pages(records: RecordReader, prefix: str) -> list[KeyValue]:
    kvs: list[KeyValue] = []
    while True:
        page = await records.range(prefix, limit=_PAGE, start_after=kvs[-1].key if kvs else "")
        kvs += page.kvs
        if not page.more:
            return kvs


def _revision(kvs: Sequence[KeyValue], key: str) -> int:
    return next((kv.mod_revision for kv in kvs if kv.key == key), 0)


def _view(name: InspectedTopic, kvs: Sequence[KeyValue]) -> TopicView:
    state, segments, unreadable = None, [], []
    for kv in kvs:
        try:
            if kv.key == keys.state_key(name.any_id):
                state = decode_record(kv.key, kv.value, TopicState)
            elif kv.key.startswith(keys.segments_prefix(name.any_id)):
                segment = decode_record(kv.key, kv.value, Segment)
                if keys.segment_key(name.any_id, segment.start) != kv.key or segment.start >= segment.end:
                    raise CatalogCorrupt(f"{kv.key} holds the descriptor of {segment.start}..{segment.end}")
                segments.append(segment)
        except CatalogCorrupt as error:
            unreadable.append(str(error))
    return TopicView(name=name, state=state, segments=tuple(segments), unreadable=tuple(unreadable))


# -- reading messages --------------------------------------------------------------------------


async def read(
    view: TopicView, store: ObjectStore, start: int | None = None, end: int | None = None
) -> AsyncGenerator[RecordBatch, None]:
    """Batches that cover exactly ``start .. end``, by default all that segments hold. Raises NotInSegments,
    DataGap, and what ``SegmentReader.read`` raises."""
    state = view.state
    if state is None:
        raise DataGap(f"topic {view.name.path} has no state; see `sava storage verify`")
    start = state.start if start is None else start
    end = state.end if end is None else end
    if not state.start <= start <= end <= state.end:
        raise NotInSegments(_where(view.name, state, start, end))
    reader = SegmentReader(store)
    position = start
    for segment in view.segments:
        if segment.end <= position or position >= end:
            continue
        if segment.start > position:
            break
        async with aclosing(reader.read(segment, position, end)) as it:
            async for batch in it:
                position = batch.next_offset
                yield batch
    if position < end:
        raise DataGap(
            f"topic {view.name.path}: offset {position} is in no segment; see `sava storage verify`"
        )


def _where(name: InspectedTopic, state: TopicState, start: int, end: int) -> str:
    text = (
        f"topic {name.path}: offsets {start}..{end} were asked for, segments hold {state.start}..{state.end}"
    )
    if state.is_settled:
        return f"{text}, and nothing exists beyond"
    return (
        f"{text}; what follows is in journal {state.storage_id} (with its broker stopped: "
        f"`sava storage dump {state.topic_id} --journal DIR`)"
    )


# -- verifying ---------------------------------------------------------------------------------


class Verification:
    """One pass over one topic or all: ``list_objects`` first, then ``faults``; what was seen is counted on
    the way."""

    def __init__(
        self, records: RecordReader, store: ObjectStore, topic: InspectedTopic | None = None
    ) -> None:
        self._records = records
        self._store = store
        self._topic = topic
        self._reader = SegmentReader(store, footer_cache_bytes=0)
        self._listed: dict[InspectedTopic, list[tuple[keys.ObjectName, ObjectInfo]]] = defaultdict(list)
        self.topics = self.segments = self.messages = self.size = 0
        self.unregistered = 0
        """Objects that no descriptor names yet: uploads and merges that may be under way."""
        self.foreign = 0
        """Objects whose names are not Sava's."""

    async def list_objects(self) -> int:
        """Their size, all together."""
        size = 0
        prefix = OBJECTS if self._topic is None else keys.name_prefix(self._topic.any_id)
        async for info in self._store.list(prefix):
            size += info.size
            name = keys.parse_object_key(info.key)
            if name is None:
                self.foreign += 1
            else:
                self._listed[InspectedTopic(name.topic.namespace, name.topic.name)].append((name, info))
        return size

    async def faults(self, advance: Callable[[int], None]) -> AsyncGenerator[Fault, None]:
        """``advance`` is called with the size of each object that was read. Raises ObjectStoreUnavailable,
        UnknownTopic, and what keeps the records from being read."""
        async for name in self._names():
            view = await read_topic(self._records, name)
            if view.is_empty:
                continue
            self.topics += 1
            for text in view.faults():
                yield Fault(name, text)
            async with aclosing(self._verify_segments(view, advance)) as texts:
                async for text in texts:
                    yield Fault(name, text)
            async for text in self._orphans(name, view):
                yield Fault(name, text)
        if self._topic is not None and not self.topics and not self._listed:
            raise UnknownTopic(self._topic)
        for name in sorted(self._listed):
            async for text in self._orphans(name, None):
                yield Fault(name, text)

    async def _names(self) -> AsyncIterator[InspectedTopic]:
        if self._topic is not None:
            yield self._topic
            return
        async for name in topics(self._records):
            yield name

    async def _verify_segments(
        self, view: TopicView, advance: Callable[[int], None]
    ) -> AsyncGenerator[str, None]:
        """In order, a few side by side."""
        waiting = iter(view.segments)
        ahead: deque[tuple[Segment, asyncio.Task[str]]] = deque()
        try:
            while True:
                for segment in islice(waiting, _PARALLEL - len(ahead)):
                    ahead.append((segment, asyncio.create_task(self._verify(view.name, segment))))
                if not ahead:
                    return
                segment, task = ahead[0]
                text = await task
                ahead.popleft()
                advance(segment.size)
                if text:
                    yield text
        finally:
            await cancelled(*(task for _, task in ahead))

    async def _verify(self, name: InspectedTopic, segment: Segment) -> str:
        """What is wrong, in words."""
        try:
            await self._reader.verify(segment)
        except (SegmentCorrupt, ObjectMissing) as error:
            again = await self._records.range(keys.segment_key(name.any_id, segment.start))
            if segment not in _view(name, again.kvs).segments:
                return ""
            return f"{error}; offsets {segment.start}..{segment.end} cannot be relied on"
        self.segments += 1
        self.messages += segment.end - segment.start
        self.size += segment.size
        return ""

    async def _orphans(self, name: InspectedTopic, view: TopicView | None) -> AsyncIterator[str]:
        left: list[ObjectInfo] = []
        young_from_ms = time.time_ns() // 1_000_000 - GRACE_MS
        for object_name, info in self._listed.pop(name, ()):
            if view is not None and info.key in view.keys:
                continue
            state = None if view is None else view.state
            is_current = state is not None and object_name.topic.topic_id == state.topic_id
            if info.modified_ms > young_from_ms or (is_current and can_be_registered(object_name, state)):
                self.unregistered += 1
            elif await self._is_there(info.key):
                left.append(info)
        if left and view is not None:
            # A merge deletes the objects that it has replaced after that.
            await asyncio.sleep(_MERGE_S)
            view = await read_topic(self._records, name)
        for info in left:
            if (view is None or info.key not in view.keys) and await self._is_there(info.key):
                yield f"no descriptor names the object {info.key} ({info.size} bytes)"

    async def _is_there(self, key: str) -> bool:
        try:
            await self._store.head(key)
        except ObjectMissing:
            return False
        return True


# -- journals of stopped brokers -------------------------------------------------------------------


_READ_BYTES: Final = 1 << 20


class NoJournal(CallerError):
    """The directory holds no journal."""


class NotInJournal(CallerError):
    """Offsets that this journal does not hold."""


class TopicFrames(NamedTuple):
    """What the journal holds of a topic and has not released."""

    topic_id: int
    ranges: list[tuple[int, int]]
    size: int


class _ReadOnlyDirectory:
    """A ``wal.Disk`` of which only the log files are seen and nothing can be changed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def path(self) -> str:
        return str(self._path)

    def list(self) -> list[str]:
        try:
            return sorted(each.name for each in self._path.iterdir() if each.name.startswith("log-"))
        except OSError as error:
            raise NoJournal(f"{self._path}: cannot list: {error.strerror}") from error

    def open(self, name: str, *, create: bool = False) -> LocalFile:
        if create:
            self._refuse()
        path = self._path / name
        try:
            return LocalFile(path, os.open(path, os.O_RDONLY))
        except FileNotFoundError as error:
            raise FileMissing(f"{path}: cannot open: {error.strerror}") from error
        except OSError as error:
            raise HostError(f"{path}: cannot open: {error.strerror}") from error

    def _refuse(self) -> NoReturn:
        raise HostError(f"{self._path} is only looked at, and cannot be changed")

    def rename(self, old: str, new: str) -> None:
        self._refuse()

    def remove(self, name: str) -> None:
        self._refuse()

    def sync_dir(self) -> None:
        self._refuse()

    def directory(self, name: str) -> NoReturn:
        self._refuse()

    def lock(self) -> None:
        self._refuse()

    def unlock(self) -> None:
        self._refuse()


class StoppedJournal:
    """Made by ``open_stopped``, ``scan`` first. Owned by one thread."""

    def __init__(self, path: Path) -> None:
        self._disk = _ReadOnlyDirectory(path)
        self._files = [name for name in self._disk.list() if file_start(name) is not None]
        if not self._files:
            raise NoJournal(f"{path} holds no journal: give the directory that storage.journal_dir names")
        self._first = file_start(self._files[0]) or 0
        self._found = JournalReplay()
        self.identity = self._first_identity()
        """None: there is no intact header; ``scan`` says why."""
        self.size = sum((path / name).stat().st_size for name in self._files)
        self.torn_bytes = 0
        """At the end, never acknowledged: the next start cuts them off."""
        self.records = 0

    def _first_identity(self) -> Identity | None:
        file = self._disk.open(self._files[0])
        try:
            return read_header(file, self._first)
        except FormatVersion:
            return None
        finally:
            file.close()

    @property
    def file_count(self) -> int:
        return len(self._files)

    def scan(self, advance: Callable[[int], None] = lambda done: None) -> list[str]:
        """Read all of it, each record by its checksum and each batch by its own; what is wrong, in words. The
        last of them may be what keeps a broker from starting: nothing behind it was read. ``advance``
        receives how many bytes were read so far."""
        faults: list[str] = []
        try:
            recovered = recover(
                self._disk,
                owner="" if self.identity is None else self.identity.owner,
                replay=partial(self._take, faults, advance),
            )
        except HostError as error:
            return [*faults, str(error)]
        assert recovered is not None
        recovered.file.close()
        self.identity, self.torn_bytes = recovered.identity, recovered.torn_bytes
        return faults

    def _take(self, faults: list[str], advance: Callable[[int], None], record: Record) -> None:
        self.records += 1
        if record.kind == BATCH:
            try:
                RecordBatch.parse(record.payload).verify()
            except CallerError as error:
                faults.append(f"the batch at position {record.position}: {error}")
                return
        self._found.take(record)
        advance(record.position - self._first)

    @property
    def topics(self) -> list[TopicFrames]:
        held = self._found.holdings
        return [
            TopicFrames(topic_id, index.ranges, index.bytes_from(0))
            for topic_id in sorted(held.topic_ids)
            if (index := held.index(topic_id))
        ]

    def read(self, topic_id: int, start: int | None, end: int | None = None) -> Iterator[RecordBatch]:
        """Batches that cover exactly ``start .. end``: by default from the first that is held, and to the end
        of the range without a gap. Raises NotInJournal."""
        index = self._found.holdings.index(topic_id)
        position = index.start if start is None else start
        stop = next((stop for first, stop in index.ranges if first <= position < stop), None)
        if stop is None or (end is not None and not position <= end <= stop):
            held = ", ".join(f"{first}..{stop}" for first, stop in index.ranges) or "nothing"
            wanted = f"{position}..{'' if end is None else end}"
            raise NotInJournal(
                f"{self._disk.path}: offsets {wanted} of topic id {topic_id} were asked for, "
                f"and it holds {held}; `sava storage inspect --journal` lists what there is"
            )
        return self._batches(index, position, stop if end is None else end)

    def _batches(self, index: JournalIndex, position: int, end: int) -> Iterator[RecordBatch]:
        assert self.identity is not None
        reader = WalReader(self._disk, storage_id=self.identity.storage_id)
        try:
            while position < end:
                spans = index.spans(position, _READ_BYTES)
                for record in reader.read([(span.position, span.length) for span in spans]):
                    if position >= end:
                        break
                    batch = RecordBatch.parse(record.payload).slice(position, end)
                    position = batch.next_offset
                    yield batch
        finally:
            reader.close()


@contextmanager
def open_stopped(path: Path) -> Iterator[StoppedJournal]:
    """Raises DirectoryLocked while a broker runs on the directory, NoJournal."""
    with _locked(path):
        yield StoppedJournal(path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """A directory without a lock file was never opened (a copy, say): no broker can be working on it."""
    try:
        fd = os.open(path / LOCK_FILE, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        yield
        return
    except OSError as error:
        raise HostError(f"{path / LOCK_FILE}: cannot open: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise DirectoryLocked(
            f"{path} is in use by a running broker: stop it, or leave out --journal to look at segments"
        ) from error
    try:
        yield
    finally:
        os.close(fd)
