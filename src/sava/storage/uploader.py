"""Uploader: turns what the journal holds into segments, one background task for all topics of a broker.

For each segment, in this order, because each step relies on the one before it being durable:

    read the range from the journal -> write_segment -> Catalog.register -> Journal.release

The first two are done by another process where there is much to write (``segment_process``), the others here.

    crash before      what is there            at the next start
    write_segment     journal                  the same range is taken again
    register          journal, orphan object   the same range is taken again, under another key
    release           journal, segment         the state says where segments end: the journal lets go of it

Where the next segment begins is not the uploader's to remember: it is the registered end, read from the state
at every opening. (A position kept apart from it would skip offsets whenever the two disagree.)

A segment that was written but whose registration failed or is in doubt is kept and registered again: of two
segments with the same start only one can ever be registered, and the one in doubt may be it. A registration
can even be left behind from before a restart of this broker:

    register 10..20 sent ─▶ broker restarts, reads state: end 10 ─▶ the registration takes effect: end 20
                            writes and registers 10..25 ─▶ conflict

Under one epoch only this journal's frames are ever registered, so what is there has the same content: the
state is read again and the next segment begins at its end. (The object just written stays as an orphan.)

When is a range due: enough bytes for a segment, or old enough, or its topic is being sealed, or the journal
is half full (then the topic that holds its oldest frames goes first, whatever its size). A topic with little
in the journal may wait longer: a small segment costs about as much as one of a megabyte, and readers, merges
and the metadata store have to do with each. It waits no longer than the others once the journal holds more
than ``QUIET_JOURNAL_BYTES``, since nothing that came after its oldest frame is trimmed before it.

One range is in memory at a time, or small ones of up to ``PASS_TOPICS`` topics that together are no more:
they are written in one pass and registered side by side. When the object store is down, each topic is tried
again with growing pauses; the journal grows up to its limit, and then appends wait (``Journal.reserve``).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from heapq import nsmallest
from typing import Final

import msgspec

from sava.errors import HostError, SavaError
from sava.records import Header, RecordBatch
from sava.storage.catalog import Catalog
from sava.storage.errors import DataGap, Fenced, ObjectStoreUnavailable, SegmentConflict, TopicGone
from sava.storage.journal import Journal
from sava.storage.journal_index import FrameDamaged
from sava.storage.objectstore import ObjectStore, check_writable
from sava.storage.producers import ProducerTable
from sava.storage.segment_process import (
    SIDE_BY_SIDE,
    LeftToBroker,
    MadeSegment,
    SegmentProcess,
    SegmentProcessDied,
    SegmentRange,
    make_segment,
)
from sava.storage.types import OriginMark, ProducerState, Segment, TopicState
from sava.supervisor import Supervisor
from sava.tasks import Backoff, cancelled

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 30.0
PASS_TOPICS: Final = 64
"""Small ranges that are written together."""
QUIET_BYTES: Final = 64 << 10
QUIET_TIMES: Final = 5
QUIET_JOURNAL_BYTES: Final = 256 << 20
"""While the journal holds less, quiet topics may wait: what they hold there holds all that came after it."""
_FRESH_S: Final = 1.0
"""A write that the object store took this long ago still counts: moves that begin together ask once. That it
took none counts only for those who waited for that answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadOptions:
    segment_bytes: int = 16 << 20
    """Of the batches that make a segment, as they are in the journal."""
    segment_age_s: float = 60.0
    """How long messages may be in the journal only."""
    quiet_age_s: float | None = None
    """The same of a topic that has less than ``QUIET_BYTES`` there, while the journal holds little; None:
    five times as long."""
    clean_after_s: float = 2.0
    """How long a topic is idle, with everything in segments, before it is marked clean."""
    has_process: bool = False
    """Whether segments are made in a process of their own (``segment_process``)."""

    @property
    def quiet_s(self) -> float:
        return QUIET_TIMES * self.segment_age_s if self.quiet_age_s is None else self.quiet_age_s


@dataclass(frozen=True, slots=True)
class _Written:
    """A verified object that is to be registered."""

    segment: Segment
    producers: tuple[ProducerState, ...]
    origins: tuple[OriginMark, ...]
    taken_bytes: int


class Backlog:
    """What a topic has in the journal and not yet in segments: ``state.end .. durable end``. Owned by the
    event loop; the uploader alone moves its beginning, the TopicLog its end."""

    def __init__(
        self,
        catalog: Catalog,
        state: TopicState,
        *,
        held_bytes: int,
        skips: Callable[[int], Iterable[ProducerState]],
        registered: Callable[[Segment], None],
        caught_up: Callable[[], None],
        fenced: Callable[[Fenced], None],
    ) -> None:
        """``state`` as it was claimed."""
        self.topic = catalog.topic
        self.epoch = state.epoch
        self.catalog = catalog
        self.state = state
        self.producers = ProducerTable(state.producers, state.origins)
        """As of ``state.end``."""
        self._skips = skips
        """Positions of sources as of an end that no frame has."""
        self.held_bytes = held_bytes
        self.since = time.monotonic()
        self.flushes = 0
        """Callers that wait until it is empty: it goes before others."""
        self.written: _Written | None = None
        self.error: Exception | None = None
        self.retry_at = 0.0
        self._retry = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self.is_failing = False
        """Whether the last attempt came to nothing."""
        self.changed = asyncio.Event()
        self._on_registered = registered
        self._caught_up = caught_up
        self.fence = fenced

    def grew(self, header: Header, segment_bytes: int) -> bool:
        """Whether the uploader should look: the first bytes begin to grow old, or it is no quiet topic any
        more, or there are enough."""
        before = self.held_bytes
        if not before:
            self.since = time.monotonic()
        self.held_bytes += header.length
        if self.held_bytes >= segment_bytes or not before:
            return True
        return before < QUIET_BYTES <= self.held_bytes

    @property
    def is_urgent(self) -> bool:
        return self.flushes > 0

    def due_at(self, options: UploadOptions, *, is_pressed: bool, is_roomy: bool) -> float | None:
        """From when on a segment is to be made; None: not as far as is known."""
        if not self.held_bytes:
            return None
        is_due = self.is_urgent or is_pressed or self.held_bytes >= options.segment_bytes
        is_quiet = is_roomy and self.held_bytes < QUIET_BYTES
        age_s = options.quiet_s if is_quiet else options.segment_age_s
        return max(self.retry_at, 0.0 if is_due else self.since + age_s)

    def catch_up_with_skips(self, end: int) -> None:
        """What is known of producers is as of this end but for them."""
        self.producers.sources.keep(self._skips(end))

    def registered(self, state: TopicState, written: _Written) -> None:
        self._moved(state, self.held_bytes - written.taken_bytes)
        self._on_registered(written.segment)

    def adopt(self, state: TopicState, held_bytes: int) -> None:
        """An earlier opening on this broker has registered more than was known."""
        self.producers = ProducerTable(state.producers, state.origins)
        self._moved(state, held_bytes)

    def starts_at(self, start: int) -> None:
        """Retention has dropped what is before. It may overtake an answer to a registration, so that the
        start never goes back."""
        self.state = msgspec.structs.replace(self.state, start=max(start, self.state.start))

    def _moved(self, state: TopicState, held_bytes: int) -> None:
        start = self.state.start
        self.state, self.held_bytes = state, held_bytes
        self.starts_at(start)
        self.written = None
        self.since = time.monotonic()
        self.error, self.is_failing, self.retry_at = None, False, 0.0
        self._retry.reset()
        if not held_bytes:
            self._caught_up()

    def failed(self, error: Exception) -> None:
        self.error, self.is_failing = error, True
        self.retry_at = time.monotonic() + self._retry.next()

    def tell(self) -> None:
        """Wake the callers that wait for progress."""
        self.changed.set()
        self.changed.clear()


class Uploader:
    """One task, which alone uploads. Everything else here is called on the same event loop."""

    def __init__(
        self,
        store: ObjectStore,
        journal: Journal,
        options: UploadOptions,
        supervisor: Supervisor,
        process: SegmentProcess | None = None,
    ) -> None:
        self._store = store
        self._journal = journal
        self.options = options
        self.segments = 0
        """That were registered."""
        self.failures = 0
        """Attempts that came to nothing."""
        self._seen_at = float("-inf")
        self._trouble: ObjectStoreUnavailable | None = None
        """What was last seen of the object store, and when."""
        self._checking = asyncio.Lock()
        self.backlogs: set[Backlog] = set()
        """Of the topics that are open."""
        self.woken = asyncio.Event()
        """Set when something may be due."""
        self.threads = ThreadPoolExecutor(1, thread_name_prefix="sava-upload")
        """One: malloc keeps the memory of a segment for every thread that has ever made one."""
        self._process = process
        self._slots = asyncio.Semaphore(SIDE_BY_SIDE)
        self._task = supervisor.essential(self._run(), name="uploader")

    def attach(self, backlog: Backlog) -> None:
        self.backlogs.add(backlog)
        self.woken.set()

    @property
    def failing(self) -> int:
        """Topics whose last attempt came to nothing."""
        return sum(1 for backlog in self.backlogs if backlog.is_failing)

    async def flush(self, backlog: Backlog, end: int, *, is_patient: bool = True) -> None:
        """Wait until everything before ``end`` is in registered segments. Raises what makes that impossible
        (HostError); what may pass is tried again as long as the caller waits, unless it is not patient:
        then the first failure is raised."""
        final = (HostError, Fenced) if is_patient else (Exception,)
        backlog.flushes += 1
        backlog.retry_at, backlog.error = 0.0, None
        self.woken.set()
        try:
            while backlog.state.end < end:
                await backlog.changed.wait()
                if isinstance(backlog.error, final):
                    raise backlog.error
        finally:
            backlog.flushes -= 1

    async def check_store(self) -> None:
        """Raise ObjectStoreUnavailable unless the object store took a write just now, or takes one at
        once."""
        asked = time.monotonic()
        async with self._checking:
            is_fresh = self._trouble is None and time.monotonic() - self._seen_at < _FRESH_S
            if not is_fresh and self._seen_at < asked:
                try:
                    await check_writable(self._store)
                    self._saw_store(None)
                except ObjectStoreUnavailable as error:
                    self._saw_store(error)
            if self._trouble is not None:
                raise self._trouble

    def _saw_store(self, trouble: ObjectStoreUnavailable | None) -> None:
        self._seen_at, self._trouble = time.monotonic(), trouble

    async def close(self) -> None:
        """Stop at once: what is not registered stays in the journal."""
        await cancelled(self._task)
        if self._process is not None:
            await self._process.close()
        await asyncio.to_thread(self.threads.shutdown)

    # -- the task ----------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self.woken.clear()
            chosen, due_at = self._choose()
            if chosen:
                await self._advance(chosen)
                continue
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due_at is None else due_at - time.monotonic()):
                    await self.woken.wait()

    def _choose(self) -> tuple[list[Backlog], float | None]:
        """Whose turn it is, or when to look again. Of those that are due: topics that are being sealed first,
        then the one that holds the journal's oldest frames; with a small one others that are."""
        now, is_pressed = time.monotonic(), self._journal.is_pressed
        is_roomy = self._journal.held_bytes < QUIET_JOURNAL_BYTES
        due = {
            backlog: due_at
            for backlog in self.backlogs
            if (due_at := backlog.due_at(self.options, is_pressed=is_pressed, is_roomy=is_roomy)) is not None
        }
        ready = [backlog for backlog, due_at in due.items() if due_at <= now]
        if not ready:
            return [], min(due.values(), default=None)
        first = min(ready, key=self._rank)
        if not self._is_small(first):
            return [first], now
        alike = [each for each in ready if self._is_small(each) and each.is_urgent == first.is_urgent]
        return nsmallest(PASS_TOPICS, alike, key=self._rank), now

    def _is_small(self, backlog: Backlog) -> bool:
        return backlog.held_bytes * PASS_TOPICS <= self.options.segment_bytes

    def _rank(self, backlog: Backlog) -> tuple[bool, int]:
        position = self._journal.holdings.index(backlog.topic.topic_id).lowest_position
        return not backlog.is_urgent, position or 0

    async def _advance(self, chosen: Sequence[Backlog]) -> None:
        """Each one segment further, or one failure more: a topic in trouble does not keep the others
        waiting."""
        unwritten = [backlog for backlog in chosen if backlog.written is None]
        made = dict(zip(unwritten, await self._write(unwritten), strict=True))
        await asyncio.gather(*(self._finish(backlog, made.get(backlog)) for backlog in chosen))

    async def _finish(self, backlog: Backlog, made: MadeSegment | BaseException | None) -> None:
        """``made``: None when its segment was written before."""
        try:
            if isinstance(made, BaseException):
                raise made
            if made is not None:
                backlog.written = self._written(backlog, made)
            await self._register(backlog)
        except Fenced as error:
            self.backlogs.discard(backlog)
            backlog.error = error
            backlog.fence(error)
        except SavaError as error:
            _log.warning(
                "uploader: failed, will be tried again topic=%s error=%s: %s",
                backlog.topic.path,
                type(error).__name__,
                error,
            )
            self._failed(backlog, error)
        except Exception as error:  # noqa: BLE001
            # A bug in one topic's data must not end the task that all topics need.
            _log.exception("uploader: failed, will be tried again topic=%s", backlog.topic.path)
            self._failed(backlog, error)
        finally:
            backlog.tell()

    def _failed(self, backlog: Backlog, error: Exception) -> None:
        self.failures += 1
        backlog.failed(error)

    async def _register(self, backlog: Backlog) -> None:
        written = backlog.written
        assert written is not None
        try:
            state = await backlog.catalog.register(
                written.segment, epoch=backlog.epoch, producers=written.producers, origins=written.origins
            )
            backlog.registered(state, written)
            self.segments += 1
        except SegmentConflict:
            state = await self._catch_up(backlog)
        except TopicGone:
            # Its objects were listed and removed while this one was on its way; no sweep will look again.
            await self._store.delete([written.segment.key])
            raise
        self._journal.release(backlog.topic.topic_id, state.end)

    async def _catch_up(self, backlog: Backlog) -> TopicState:
        """(Called while a SegmentConflict is handled.)"""
        state = await backlog.catalog.load()
        if state is None or state.epoch != backlog.epoch or state.end <= backlog.state.end:
            raise
        backlog.adopt(state, self._journal.holdings.index(backlog.topic.topic_id).bytes_from(state.end))
        return state

    # -- writing -----------------------------------------------------------------------------

    async def _write(self, backlogs: Sequence[Backlog]) -> list[MadeSegment | BaseException]:
        """The next segment of each, in the process for that if it is worth it; or what went wrong."""
        size = sum(min(backlog.held_bytes, self.options.segment_bytes) for backlog in backlogs)
        if self._process is None or not self._process.is_worth(size, len(backlogs)):
            return await self._write_here(backlogs)
        outcomes: list[MadeSegment | BaseException]
        try:
            outcomes = [*await self._process.write([self._range(backlog) for backlog in backlogs])]
        except SegmentProcessDied as error:
            return [error] * len(backlogs)
        except OSError as error:
            _log.warning("uploader: no process for segments can be started: %s", error)
            return await self._write_here(backlogs)
        except Exception as error:  # noqa: BLE001 (``_finish`` says what it was)
            return [error] * len(backlogs)
        left = [index for index, each in enumerate(outcomes) if isinstance(each, LeftToBroker)]
        for index, outcome in zip(
            left, await self._write_here([backlogs[each] for each in left]), strict=True
        ):
            outcomes[index] = outcome
        return outcomes

    def _range(self, backlog: Backlog) -> SegmentRange:
        index = self._journal.holdings.index(backlog.topic.topic_id)
        spans = index.spans(backlog.state.end, self.options.segment_bytes)
        return SegmentRange(backlog.topic, backlog.epoch, spans, backlog.producers.sources.known())

    async def _write_here(self, backlogs: Sequence[Backlog]) -> list[MadeSegment | BaseException]:
        return await asyncio.gather(*map(self._write_one, backlogs), return_exceptions=True)

    async def _write_one(self, backlog: Backlog) -> MadeSegment:
        async with self._slots:
            batches = await self._collect(backlog)
            known = backlog.producers.sources.known()
            return await make_segment(self._store, backlog.topic, backlog.epoch, batches, known, self.threads)

    def _written(self, backlog: Backlog, made: MadeSegment) -> _Written:
        self._saw_store(None)
        backlog.producers.sources.learn(made.marks)
        for header in made.headers:
            backlog.producers.follow(header)
        backlog.catch_up_with_skips(made.segment.end)
        origins = backlog.producers.sources.origin_marks()
        return _Written(made.segment, backlog.producers.states(), origins, made.taken_bytes)

    async def _collect(self, backlog: Backlog) -> list[RecordBatch]:
        start = backlog.state.end
        try:
            batches = await self._journal.read(backlog.topic.topic_id, start, self.options.segment_bytes)
        except FrameDamaged as error:
            raise error.of(backlog.topic.path) from error
        if not batches or batches[0].base_offset != start:
            raise DataGap(
                f"topic {backlog.topic.path}: offset {start} is not in the journal and in no segment"
            )
        return batches
