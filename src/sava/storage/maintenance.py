"""Maintenance: what the owner of a topic does with its segments from time to time: drop what retention lets
go, merge small ones, and delete objects that nothing names.

None of it is ever urgent, and none of it changes what the topic's messages are, but for those that
retention lets go.

**ExpiryClock.** The time by which stored things may be deleted, safe against one clock that is wrong.

Retention compares a segment's stamp with now. If both come from brokers' clocks, one wrong clock is enough:

    broker A   stores a segment at noon; it is to be kept for an hour
    broker B   takes the topic over; its clock is a day ahead
    B          the segment is 24 hours old: deleted, together with everything that was stored that day

The object store has a clock, too: it stamps every object that it takes. So now is the *smaller* of the
broker's clock and the store's, and a segment is stamped with the *larger* of the two (``segment``).
Whichever of them is wrong, ahead or behind, a message lives at least as long as its policy says; it may
live longer by the difference.

The metadata store's clock (``clock_ms`` of its machine) is no third witness. It is the largest stamp of any
leader so far: after one leader with a wrong clock it stays ahead.

The store is asked every ``ASK_S``, by a small object. In between the monotonic clock, which no operator
sets, carries its answer on. If the store cannot be asked, it cannot delete either: the caller leaves
everything as it is. Where brokers keep objects in a local directory, the store's clock is the machine's.
Then a clock that is wrong from the start has no witness; one that jumps later has one until the store is
asked again.

**Retention.** What a topic may forget, and the deletion of what is no longer needed.

Whole segments go, oldest first: descriptors in the catalog, then objects. A crash in between leaves objects
that nothing names, which ``orphans`` finds; the other order would leave a descriptor without its object,
which is a hole.

A segment's age counts from when it was stored, by the later of two clocks: the broker's that stored it and
the object store's. It is over by the earlier of the same two (``expiry_clock``). Publish times are the
producers' to choose: one message from a machine whose clock is a year ahead would keep its segment for a
year, and a backfill of old data would be deleted as soon as it arrived. So a message lives at least as long
as the policy says, and at most as much longer as its segment was open, or holds an age of
(``housekeeping``).

Only what the catalog has is ever dropped: the tail of an open topic is in its owner's journal and no
concern of retention.

**Merging.** Many small segments become few large ones, with the same messages at the same offsets.

A topic to which little is published gets a small segment every minute, and another at every move. Each has
a descriptor in the metadata store, which every broker holds in memory, and is an object that costs a
request to each reader. So neighbours are joined: eight of a kind become one, eight of these the next
larger kind, until a segment is large enough. How many a topic has depends on its bytes, not on how long
they took to come.

**No reader or producer waits, and nothing is ever missing.** In this order, because each step relies on the
one before:

    read the parts -> write_segment (verified) -> Catalog.replace -> delete the parts' objects

    crash before      what is there            afterwards
    replace           parts, orphan object     the same parts are taken again; ``orphans`` removes the object
    delete            merged, orphan objects   ``orphans`` removes them

The descriptors change in one transaction, so there is no revision at which an offset is in none of them or
in two. Objects of parts go at once, not after a while: a job that reads the topic's folder with a glob
would count their messages twice for as long. A reader of Sava's that comes to an object which has gone asks
for the descriptors again (``tiered``), Spark's tasks ask the owner.

**What the sweep must not see.** Between write and replace the new object is an orphan by every sign but its
age. A process that was frozen for hours in between, and that sweeps when it wakes up, would delete the object
and then name it; so a topic is never swept while it is merged (``TopicLog``), and a merge whose owner was
replaced meanwhile fails by its epoch.

**Which ones.** Neighbours of about one size: no part has more than half of what it becomes, so a byte is
written again only when its segment at least doubles. By size before compression, which is what a merge takes
in memory. Where messages are deleted by age, a segment goes with its youngest message, so that one must not
hold a much older one: ``max_span_ms`` (``math.inf``: any).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import islice
from typing import Final

import msgspec

from sava.records import RecordBatch
from sava.storage.catalog import Catalog
from sava.storage.errors import Fenced, SegmentConflict, TopicGone
from sava.storage.objectstore import ObjectStore
from sava.storage.orphans import sweep_orphans
from sava.storage.segment import SegmentReader, write_segment
from sava.storage.staging import store_time_ms
from sava.storage.tiered import KnownSegments
from sava.storage.types import Segment
from sava.tasks import cancelled

# -- the time by which things may be deleted -------------------------------------------------------


_log = logging.getLogger(__name__)

ASK_S: Final = 600.0
TOLERATED_MS: Final = 60_000
"""Clocks that differ by more are reported."""


class ExpiryClock:
    """Of one broker. Owned by the event loop."""

    def __init__(self, store: ObjectStore, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._monotonic = monotonic
        self._asked: tuple[int, float] | None = None
        """What the store's clock said, and when that was."""
        self._is_reported = False

    async def now_ms(self) -> int:
        """What is due by this time may be deleted. Raises ObjectStoreUnavailable."""
        now = self._monotonic()
        if self._asked is None or now - self._asked[1] >= ASK_S:
            # The moment after the answer: what the answer took makes the estimate late, and never early.
            self._asked = await store_time_ms(self._store), self._monotonic()
        store_ms, at = self._asked
        store_ms += int((self._monotonic() - at) * 1000)
        own_ms = time.time_ns() // 1_000_000
        self._report(own_ms - store_ms)
        return min(own_ms, store_ms)

    def _report(self, ahead_ms: int) -> None:
        """Once for each time that the clocks part."""
        is_apart = abs(ahead_ms) > TOLERATED_MS
        if is_apart and not self._is_reported:
            _log.warning(
                "storage: this broker's clock is %.0f s %s that of the object store %s; nothing is deleted "
                "before both agree that it is due. Set the clock (NTP); `sava doctor` compares all brokers",
                *(abs(ahead_ms) / 1000, "ahead of" if ahead_ms > 0 else "behind", self._store.url),
            )
        self._is_reported = is_apart


# -- retention -------------------------------------------------------------------------------------


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """None: no limit. With both, a segment goes as soon as one of them lets it."""

    max_age_ms: int | None = None
    max_bytes: int | None = None
    """Stored bytes that are kept at least: a segment goes when those after it have this much without it."""

    def __post_init__(self) -> None:
        if min(self.max_age_ms or 0, self.max_bytes or 0) < 0:
            raise ValueError("retention limits must not be negative")


def expired_end(segments: Sequence[Segment], policy: RetentionPolicy, now_ms: int) -> int:
    """The offset before which ``policy`` lets everything go; the first segment's start when nothing may.
    ``segments`` are all of the topic, in order."""
    kept_bytes = sum(segment.size for segment in segments)
    end = segments[0].start if segments else 0
    for segment in segments:
        kept_bytes -= segment.size
        is_old = policy.max_age_ms is not None and segment.created_ms + policy.max_age_ms <= now_ms
        is_surplus = policy.max_bytes is not None and kept_bytes >= policy.max_bytes
        if not (is_old or is_surplus):
            # Also when a later one is old (its writer's clock went back): a hole is worse than a segment too
            # many.
            break
        end = segment.end
    return end


async def drop_expired(
    catalog: Catalog,
    store: ObjectStore,
    policy: RetentionPolicy,
    *,
    epoch: int,
    now_ms: int,
    keep_from: int | None = None,
) -> list[Segment]:
    """Drop what ``policy`` lets go, as the owner of ``epoch``; returns what went. ``keep_from``: nothing from
    this offset on goes, whatever the policy says (the slowest subscription's cursor, where unread messages
    must stay).

    Raises Fenced: another broker owns the topic and its retention. A failure after the catalog's part leaves
    orphans."""
    before = expired_end(await catalog.segments(), policy, now_ms)
    if keep_from is not None:
        before = min(before, keep_from)
    dropped = await catalog.drop(epoch=epoch, before=before)
    await store.delete([segment.key for segment in dropped])
    return dropped


# -- merging ---------------------------------------------------------------------------------------


MERGE_PARTS: Final = 8
"""How many of a kind are left as they are. More of them would mean more descriptors, fewer that messages are
written again more often."""
MERGE_SIZES: Final = 4
"""Of a size: below 4 KiB, 32 KiB, 256 KiB and 2 MiB, where a merged segment has at most 16 MiB. What is
larger is left as it is: eight of them would not fit."""
MAX_MERGE_PARTS: Final = 64
"""Parts of one merge, whose descriptors go in one transaction."""


def worth_merging(
    segments: Sequence[Segment], *, max_bytes: int, max_span_ms: float
) -> Iterator[Sequence[Segment]]:
    """Runs of neighbours, of the smallest kind that has any. ``segments`` are all of a topic, in order."""
    for kind in reversed(range(1, MERGE_SIZES + 1)):
        runs = [
            run
            for run in _runs(segments, max_bytes // MERGE_PARTS**kind, max_bytes, max_span_ms)
            if len(run) >= MERGE_PARTS and 2 * max(each.raw_bytes for each in run) <= _raw_bytes(run)
        ]
        if runs:
            yield from runs
            return


def _runs(
    segments: Sequence[Segment], below: int, max_bytes: int, max_span_ms: float
) -> Iterator[list[Segment]]:
    """Neighbours that are all smaller than ``below``, as many as make one segment."""
    run: list[Segment] = []
    for segment in segments:
        if not 0 < segment.raw_bytes < below:  # 0: not known
            yield run
            run = []
            continue
        longer = [*run, segment]
        if len(longer) > MAX_MERGE_PARTS or _raw_bytes(longer) > max_bytes or _span_ms(longer) > max_span_ms:
            yield run
            longer = [segment]
        run = longer
    yield run


def _raw_bytes(segments: Sequence[Segment]) -> int:
    return sum(segment.raw_bytes for segment in segments)


def _span_ms(segments: Sequence[Segment]) -> int:
    created = [segment.created_ms for segment in segments]
    return max(created) - min(created)


async def merge_segments(
    parts: Sequence[Segment],
    catalog: Catalog,
    store: ObjectStore,
    reader: SegmentReader,
    *,
    epoch: int,
    threads: Executor | None = None,
) -> Segment:
    """Make one segment of neighbours, as the owner of ``epoch``. Needs memory for all their messages.

    Raises SegmentConflict (they are not what the topic has any more), ObjectMissing, Fenced, TopicGone, and
    what keeps the object store or the metadata store from being used. Whatever it raises, every message is in
    one segment; objects that nothing names may be left."""
    batches: list[RecordBatch] = []
    for part in parts:
        batches += [batch async for batch in reader.read(part, part.start, part.end)]
    writing = write_segment(
        store,
        catalog.topic,
        epoch=epoch,
        batches=batches,
        created_ms=max(part.created_ms for part in parts),
        threads=threads,
    )
    del batches  # once encoded, they are not held while the object is on its way
    merged = await writing
    try:
        await catalog.replace(parts, merged, epoch=epoch)
    except (SegmentConflict, TopicGone):
        # No transaction on its way will name it, and a reader that lists the folder would count its messages
        # too. After any other error it may be named; if it is not, it is swept.
        await store.delete([merged.key])
        raise
    await store.delete([part.key for part in parts])
    return merged


# -- one topic's maintenance -----------------------------------------------------------------------


MERGES_A_TURN: Final = 16
"""Of one topic in its turn."""
NEWEST_SEGMENTS: Final = 4096
"""How many of the newest segments are looked at; what is before was looked at when it was new."""
MERGE_SPANS: Final = 8
"""A merged segment holds messages of an eighth of the time that retention keeps them: that is how much longer
they may be kept."""


class SegmentMaintenance:
    """Of one topic on its owner. Owned by the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        store: ObjectStore,
        reader: SegmentReader,
        segments: KnownSegments,
        *,
        epoch: int,
        segment_bytes: int,
        threads: Executor,
        fence: Callable[[Fenced], None],
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._reader = reader
        self._segments = segments
        self._epoch = epoch
        self._segment_bytes = segment_bytes
        self._threads = threads
        self._fence = fence
        self._is_over = False
        self._merging: asyncio.Task[None] | None = None
        self._new = MERGE_PARTS - 1
        """Segments since it was last looked whether there are many small ones. To begin with, as many as make
        it worthwhile with the next one: what earlier owners have left is not known."""
        self._writing = asyncio.Lock()
        """Objects that nothing names yet are being written: they must not be swept (see ``merging``)."""

    def registered(self) -> None:
        """There is one more segment."""
        self._new += 1

    def close(self) -> None:
        """The topic is closed: begin nothing more, and end what was begun. The lock below is no other
        opening's."""
        self._is_over = True
        if self._merging is not None:
            self._merging.cancel()

    async def enforce_retention(
        self, policy: RetentionPolicy, *, now_ms: int, keep_from: int | None
    ) -> list[Segment]:
        """Drop the segments that the policy lets go (see ``drop_expired``); returns them."""
        try:
            return await drop_expired(
                self._catalog, self._store, policy, epoch=self._epoch, now_ms=now_ms, keep_from=keep_from
            )
        except Fenced as error:
            self._fence(error)
            raise
        finally:
            self._segments.forget()  # also after a failure: the descriptors may be gone already

    async def merge_segments(self, policy: RetentionPolicy | None) -> int:
        """Make few of many small segments (see ``merging``); returns how many went into larger ones. Looks at
        nothing before there are enough new ones. Called again, it comes to the larger kinds."""
        if self._new < MERGE_PARTS:
            return 0
        max_age_ms = policy.max_age_ms if policy is not None else None
        runs = worth_merging(
            (await self._segments.all())[-NEWEST_SEGMENTS:],
            max_bytes=self._segment_bytes,
            max_span_ms=math.inf if max_age_ms is None else max_age_ms / MERGE_SPANS,
        )
        count = 0
        for run in islice(runs, MERGES_A_TURN):
            if self._is_over:
                return count
            self._merging = asyncio.create_task(self._merge(run), name="sava-merge")
            try:
                await asyncio.wait([self._merging])
            finally:
                await cancelled(self._merging)
            if not self._merging.cancelled():
                self._merging.result()
                count += len(run)
        if not count:
            self._new = 0
        return count

    async def _merge(self, run: Sequence[Segment]) -> None:
        async with self._writing:
            await self._merge_alone(run)

    async def _merge_alone(self, run: Sequence[Segment]) -> None:
        try:
            merged = await merge_segments(
                run, self._catalog, self._store, self._reader, epoch=self._epoch, threads=self._threads
            )
        except Fenced as error:
            self._fence(error)
            raise
        except BaseException:
            self._segments.forget()  # they may be others by now
            raise
        self._segments.merged(run, merged)

    async def sweep_orphans(self, *, now_ms: int) -> int:
        """Delete objects that nothing names and nothing can name any more; returns how many went."""
        async with self._writing:
            return len(await sweep_orphans(self._catalog, self._store, now_ms=now_ms))
