"""Merging: which segments become one, and that no message is ever in none of them, or in two."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sava.metadata.errors import OutcomeUnknown
from sava.storage.broker_storage import StorageOptions
from sava.storage.catalog import (
    HOLD_KEY,
    Catalog,
    Hold,
    StorageHeld,
    is_held,
)
from sava.storage.errors import Fenced, ObjectStoreUnavailable, SegmentConflict, TopicGone
from sava.storage.maintenance import (
    MAX_MERGE_PARTS,
    MERGE_PARTS,
    MERGE_SIZES,
    RetentionPolicy,
    merge_segments,
    worth_merging,
)
from sava.storage.objectstore import ObjectStore
from sava.storage.orphans import sweep_orphans
from sava.storage.segment import SegmentReader
from sava.storage.tiered import KnownSegments
from sava.storage.topic_log import TopicLog
from sava.storage.types import Segment
from sava.storage.uploader import UploadOptions
from tests.support.messages import TOPIC, keys, read_messages, write
from tests.support.storage import Cluster, contents, expected, numbered
from tests.unit.storage.faults import (
    BROKEN,
    UNKNOWN,
    Fault,
    FaultyBackend,
    FaultyMetadata,
    after,
    before,
    lose_answer,
    refuse,
)
from tests.unit.storage.resting import lose_sight

KIB, MIB = 1 << 10, 1 << 20
MAX_BYTES = 16 * MIB
FAR = 1 << 50
"""A time at which no grace is left."""


def sized(*sizes: int, minutes: int = 1) -> list[Segment]:
    """Neighbours of these sizes before compression, one made every so many minutes."""
    return [
        Segment(
            topic_id=7,
            start=number,
            end=number + 1,
            epoch=1,
            key=f"{number}",
            size=1,
            crc32c=0,
            footer_size=1,
            footer_crc32c=0,
            min_publish_time=0,
            max_publish_time=0,
            created_ms=number * minutes * 60_000,
            raw_bytes=size,
        )
        for number, size in enumerate(sizes)
    ]


def chosen(*sizes: int, max_span_ms: float = math.inf) -> list[tuple[int, int]]:
    runs = worth_merging(sized(*sizes), max_bytes=MAX_BYTES, max_span_ms=max_span_ms)
    return [(run[0].start, run[-1].end) for run in runs]


# -- which ones --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "runs"),
    [
        ([], []),
        ([KIB] * 7, []),
        ([KIB] * 8, [(0, 8)]),
        ([KIB] * 100, [(0, 64), (64, 100)]),
        ([3 * MIB] * 20, []),
        ([MIB] * 20, [(0, 16)]),
        ([10 * MIB] + [KIB] * 8, [(1, 9)]),
        ([KIB] * 4 + [3 * MIB] + [KIB] * 4, []),
        ([30 * KIB] * 8 + [KIB] * 7, [(0, 15)]),
        ([30 * KIB] * 8 + [KIB] * 8, [(8, 16)]),
        ([MIB] + [KIB] * 7, []),
        ([MIB, KIB] * 4, [(0, 8)]),
        ([0] * 20, []),
    ],
    ids=[
        "nothing",
        "too few",
        "eight of a kind",
        "as many as one transaction takes",
        "large ones",
        "as many as fit",
        "small ones behind a large one",
        "a large one in between",
        "seven small ones go with larger ones",
        "the smallest kind first",
        "not for the sake of a few bytes",
        "of two kinds in turns",
        "of unknown size",
    ],
)
def test_which_are_merged(sizes: list[int], runs: list[tuple[int, int]]) -> None:
    assert chosen(*sizes) == runs


def test_what_is_merged_is_not_much_older_than_what_it_goes_with() -> None:
    hour = 3_600_000
    assert chosen(*[KIB] * 60, max_span_ms=hour / 4) == [(0, 16), (16, 32), (32, 48), (48, 60)]
    assert chosen(*[KIB] * 60, max_span_ms=hour / 10) == []


@given(st.lists(st.integers(1, 4 * MIB), max_size=300))
def test_however_large_they_are_few_are_left_and_little_is_written(sizes: list[int]) -> None:
    """Segments come one by one, and are merged as soon as that is worth it."""
    segments: list[Segment] = []
    written = 0
    for number, size in enumerate(sizes):
        segments += [msgspec.structs.replace(sized(size)[0], start=number, end=number + 1)]
        while runs := list(worth_merging(segments, max_bytes=MAX_BYTES, max_span_ms=math.inf)):
            for run in runs:
                at = segments.index(run[0])
                assert segments[at : at + len(run)] == run, "neighbours"
                raw_bytes = sum(each.raw_bytes for each in run)
                assert raw_bytes <= MAX_BYTES
                assert MERGE_PARTS <= len(run) <= MAX_MERGE_PARTS
                written += raw_bytes
                segments[at : at + len(run)] = [
                    msgspec.structs.replace(run[0], end=run[-1].end, raw_bytes=raw_bytes)
                ]
    assert [each.start for each in segments[1:]] == [each.end for each in segments[:-1]]
    large = sum(each.raw_bytes >= MAX_BYTES / MERGE_PARTS for each in segments)
    assert len(segments) <= (large + 1) * MERGE_PARTS * MERGE_SIZES
    assert written <= 24 * sum(sizes), "a byte is written again only when its segment doubles"


# -- one merge ---------------------------------------------------------------------------------


@pytest.fixture
async def catalog(metadata: FaultyMetadata) -> Catalog:
    catalog = Catalog(metadata, TOPIC)
    await catalog.claim(epoch=1, storage_id="a", has_tail=False)
    return catalog


async def three(catalog: Catalog, store: ObjectStore) -> list[Segment]:
    """Segments of ten messages each."""
    segments = [await write(store, start, start + 10, created_ms=start) for start in (0, 10, 20)]
    for segment in segments:
        await catalog.register(segment, epoch=1, producers=(), origins=())
    return segments


async def everything(catalog: Catalog, store: ObjectStore) -> list[int]:
    """The offsets, by the payloads that they should have."""
    reader = SegmentReader(store)
    return [
        int(message.payload)
        for segment in await catalog.segments()
        for message in await read_messages(reader, segment)
    ]


async def test_neighbours_become_one(catalog: Catalog, store: ObjectStore) -> None:
    parts = await three(catalog, store)
    state = await catalog.load()
    merged = await merge_segments(parts[:2], catalog, store, SegmentReader(store), epoch=1)
    assert (merged.start, merged.end, merged.created_ms) == (0, 20, 10)
    assert (merged.min_publish_time, merged.max_publish_time) == (0, 38)
    assert await catalog.segments() == [merged, parts[2]]
    assert await catalog.load() == state
    assert await keys(store) == [merged.key, parts[2].key], "who lists the folder sees each message once"
    await SegmentReader(store).verify(merged)
    assert await everything(catalog, store) == list(range(30))


async def test_a_later_owner_merges_what_earlier_ones_have_left(catalog: Catalog, store: ObjectStore) -> None:
    parts = await three(catalog, store)
    await catalog.seal(epoch=1, end=30, producers=(), origins=())
    await catalog.claim(epoch=5, storage_id="b", has_tail=False)
    fourth = await write(store, 30, 40, epoch=5)
    await catalog.register(fourth, epoch=5, producers=(), origins=())
    merged = await merge_segments([*parts, fourth], catalog, store, SegmentReader(store), epoch=5)
    assert await catalog.segments() == [merged]
    assert await everything(catalog, store) == list(range(40))


async def test_who_lost_the_topic_merges_nothing(catalog: Catalog, store: ObjectStore) -> None:
    parts = await three(catalog, store)
    await catalog.seal(epoch=1, end=30, producers=(), origins=())
    await catalog.claim(epoch=2, storage_id="b", has_tail=False)
    with pytest.raises(Fenced):
        await merge_segments(parts, catalog, store, SegmentReader(store), epoch=1)
    assert await catalog.segments() == parts
    assert await everything(catalog, store) == list(range(30))
    assert len(await sweep_orphans(catalog, store, now_ms=FAR)) == 1


async def test_what_retention_drops_meanwhile_stays_dropped(
    catalog: Catalog, store: ObjectStore, metadata: FaultyMetadata
) -> None:
    """The parts are read; retention drops the first of them; the catalog is asked to name the merged one."""
    parts = await three(catalog, store)

    async def drop() -> None:
        dropped = await Catalog(metadata._real, TOPIC).drop(epoch=1, before=10)
        await store.delete([each.key for each in dropped])

    metadata.plan("txn", before(drop))
    with pytest.raises(SegmentConflict, match="is not registered any more"):
        await merge_segments(parts, catalog, store, SegmentReader(store), epoch=1)
    assert await catalog.segments() == parts[1:]
    assert await keys(store) == [each.key for each in parts[1:]], "the merged object is gone"


async def test_a_topic_that_is_deleted_meanwhile_leaves_no_object(
    catalog: Catalog, store: ObjectStore, metadata: FaultyMetadata
) -> None:
    parts = await three(catalog, store)

    async def delete() -> None:
        await store.delete([each.key for each in await Catalog(metadata._real, TOPIC).delete_all()])

    metadata.plan("txn", before(delete))
    with pytest.raises(TopicGone):
        await merge_segments(parts, catalog, store, SegmentReader(store), epoch=1)
    assert await keys(store) == []


async def test_an_answer_that_is_lost_is_asked_for_again(
    catalog: Catalog, store: ObjectStore, metadata: FaultyMetadata
) -> None:
    parts = await three(catalog, store)
    metadata.plan("txn", lose_answer(UNKNOWN))
    merged = await merge_segments(parts, catalog, store, SegmentReader(store), epoch=1)
    assert await catalog.segments() == [merged]
    assert await keys(store) == [merged.key]


@pytest.mark.parametrize("takes_effect", [False, True])
async def test_an_outcome_that_stays_unknown_deletes_nothing(
    catalog: Catalog, store: ObjectStore, metadata: FaultyMetadata, takes_effect: bool
) -> None:
    """The answer is lost, and the catalog cannot be read afterwards. The parts may still be the topic's, and
    so may the merged one."""
    parts = await three(catalog, store)
    lose_sight(metadata, lose_answer(UNKNOWN) if takes_effect else refuse(UNKNOWN))
    with pytest.raises(OutcomeUnknown):
        await merge_segments(parts, catalog, store, SegmentReader(store), epoch=1)
    assert len(await keys(store)) == 4
    assert len(await catalog.segments()) == (1 if takes_effect else 3)
    assert await everything(catalog, store) == list(range(30))


async def test_an_upload_meanwhile_is_kept(
    catalog: Catalog, store: ObjectStore, metadata: FaultyMetadata
) -> None:
    parts = await three(catalog, store)
    fourth = await write(store, 30, 40)

    async def register() -> None:
        await Catalog(metadata._real, TOPIC).register(fourth, epoch=1, producers=(), origins=())

    metadata.plan("txn", before(register))
    merged = await merge_segments(parts, catalog, store, SegmentReader(store), epoch=1)
    assert await catalog.segments() == [merged, fourth]


@pytest.mark.parametrize(
    ("method", "fault", "is_merged"),
    [
        ("get_ranges_async", refuse(BROKEN), False),
        ("put_async", refuse(BROKEN), False),
        ("put_async", lose_answer(BROKEN), False),
        ("get_async", refuse(BROKEN), False),
        ("delete_async", refuse(BROKEN), True),
        ("delete_async", lose_answer(BROKEN), True),
    ],
)
async def test_whatever_fails_every_message_is_in_one_segment(
    catalog: Catalog,
    store: ObjectStore,
    backend: FaultyBackend,
    method: str,
    fault: Fault,
    is_merged: bool,
) -> None:
    parts = await three(catalog, store)
    backend.plan(method, fault)
    with pytest.raises(ObjectStoreUnavailable):
        await merge_segments(parts, catalog, store, SegmentReader(store), epoch=1)
    assert backend.is_done
    assert len(await catalog.segments()) == (1 if is_merged else 3)
    assert await everything(catalog, store) == list(range(30))
    await sweep_orphans(catalog, store, now_ms=FAR)
    assert await keys(store) == [each.key for each in await catalog.segments()]


# -- held --------------------------------------------------------------------------------------


async def held(metadata: FaultyMetadata, until_ms: int = FAR) -> None:
    await metadata._real.put(HOLD_KEY, msgspec.json.encode(Hold(until_ms=until_ms)))


async def test_what_is_held_is_neither_merged_nor_dropped(
    catalog: Catalog, store: ObjectStore, metadata: FaultyMetadata
) -> None:
    parts = await three(catalog, store)
    await held(metadata)
    with pytest.raises(StorageHeld, match="sava storage release"):
        await merge_segments(parts, catalog, store, SegmentReader(store), epoch=1)
    with pytest.raises(StorageHeld):
        await catalog.drop(epoch=1, before=10)
    fourth = await write(store, 30, 40)
    await catalog.register(fourth, epoch=1, producers=(), origins=())
    assert await catalog.segments() == [*parts, fourth]
    await metadata._real.delete(HOLD_KEY)
    merged = await merge_segments(parts, catalog, store, SegmentReader(store), epoch=1)
    assert await catalog.segments() == [merged, fourth]


@pytest.mark.parametrize("change", ["merge", "drop"])
async def test_a_hold_that_comes_at_the_last_moment_counts(
    catalog: Catalog, store: ObjectStore, metadata: FaultyMetadata, change: str
) -> None:
    """It was looked whether there is one; it comes; the transaction is sent."""
    parts = await three(catalog, store)
    metadata.plan("txn", before(lambda: held(metadata)))
    changing: Awaitable[Any] = (
        merge_segments(parts, catalog, store, SegmentReader(store), epoch=1)
        if change == "merge"
        else catalog.drop(epoch=1, before=10)
    )
    with pytest.raises(StorageHeld):
        await changing
    assert await catalog.segments() == parts
    assert await everything(catalog, store) == list(range(30))


async def test_a_merge_that_came_before_the_hold_is_done(
    catalog: Catalog, store: ObjectStore, metadata: FaultyMetadata
) -> None:
    """It took effect, its answer was lost, and then came the hold: the object is named and must stay."""
    parts = await three(catalog, store)
    metadata.plan("txn", lambda call: after(lambda: held(metadata))(lambda: lose_answer(UNKNOWN)(call)))
    merged = await merge_segments(parts, catalog, store, SegmentReader(store), epoch=1)
    assert await catalog.segments() == [merged]
    assert await everything(catalog, store) == list(range(30))


async def test_a_hold_ends_by_itself(metadata: FaultyMetadata) -> None:
    real = metadata._real
    assert not await is_held(real, now_ms=0)
    await held(metadata, until_ms=1000)
    assert await is_held(real, now_ms=999)
    assert not await is_held(real, now_ms=1000)
    assert await real.get(HOLD_KEY) is None
    await real.put(HOLD_KEY, b"for ever")
    assert await is_held(real, now_ms=FAR), "what cannot be read is not over"


# -- on the owner ------------------------------------------------------------------------------

NO_CACHE = StorageOptions(cache_bytes=0, upload=UploadOptions(segment_age_s=3600))


@pytest.fixture
def cluster(tmp_path: Path, metadata: FaultyMetadata, store: ObjectStore) -> Cluster:
    return Cluster(tmp_path, metadata, store)


async def stored(log: TopicLog, start: int, end: int) -> None:
    """Each message in a segment of its own."""
    for offset in range(start, end):
        await log.append(numbered(offset, offset + 1, time=offset + 1))
        await log._parts.uploader.flush(log._backlog, offset + 1)


async def test_an_owner_merges_when_there_are_many(cluster: Cluster) -> None:
    async with cluster.broker(options=NO_CACHE) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await stored(log, 0, 7)
        assert await log.maintenance.merge_segments(None) == 0
        await stored(log, 7, 14)
        assert await log.maintenance.merge_segments(None) == 0, "looks at every eighth"
        await stored(log, 14, 15)
        assert await log.maintenance.merge_segments(None) == 15
        [merged] = await log.segments()
        assert [merged] == await cluster.catalog().segments()
        await stored(log, 15, 27)
        assert await log.maintenance.merge_segments(None) == 0, "the merged one has more than half"
        await stored(log, 27, 40)
        assert await log.maintenance.merge_segments(None) == 26
        assert await contents(log) == expected(0, 40)
        assert await cluster.object_count() == 1
        assert await log.maintenance.merge_segments(None) == 0


async def test_what_an_earlier_owner_has_left_is_merged_with_the_next_segment(cluster: Cluster) -> None:
    async with cluster.broker("a") as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await stored(log, 0, 10)
        await log.seal()
    async with cluster.broker("b") as storage:
        log = await storage.open_topic(TOPIC, epoch=2)
        assert await log.maintenance.merge_segments(None) == 0, "nobody looks at topics that rest"
        await stored(log, 10, 11)
        assert await log.maintenance.merge_segments(None) == 11
        assert await contents(log) == expected(0, 11)


async def test_retention_by_age_keeps_segments_short(cluster: Cluster) -> None:
    async with cluster.broker() as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await stored(log, 0, 10)
        assert await log.maintenance.merge_segments(RetentionPolicy(max_age_ms=0)) == 0


@pytest.mark.parametrize("seen", range(1, 12))
async def test_a_reader_goes_on_where_its_segments_were_merged(cluster: Cluster, seen: int) -> None:
    """It has read some messages when those before and behind it are merged, and their objects deleted."""
    async with cluster.broker(options=NO_CACHE) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await stored(log, 0, 12)
        found = []
        async for batch in log.read(0):
            found += [payload.decode() for payload in batch.payloads()]
            if len(found) == seen:
                assert await log.maintenance.merge_segments(None) == 12
        assert found == expected(0, 12)


async def test_a_reader_that_knows_old_descriptors_asks_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were read before the merge, and the answer came after it."""
    monkeypatch.setattr(KnownSegments, "merged", lambda *_: None)
    async with cluster.broker(options=NO_CACHE) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await stored(log, 0, 12)
        assert len(await log.segments()) == 12
        assert await log.maintenance.merge_segments(None) == 12
        assert await log.offset_at(5) == 4
        assert await contents(log, 3) == expected(3, 12)


async def test_what_is_lost_is_not_taken_for_merged(cluster: Cluster) -> None:
    async with cluster.broker(options=NO_CACHE) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await stored(log, 0, 2)
        await cluster.store.delete([(await log.segments())[0].key])
        for reading in (contents(log), log.offset_at(0)):
            with pytest.raises(Exception, match="offset 0 is missing"):
                await reading


async def test_an_object_that_is_about_to_be_named_is_not_swept(
    cluster: Cluster, metadata: FaultyMetadata
) -> None:
    """The merged object is there, and the process is frozen for a day. It sweeps when it wakes up, before the
    catalog has named the object."""
    async with cluster.broker(options=NO_CACHE) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await stored(log, 0, 8)
        sweeping: list[asyncio.Task[int]] = []

        async def wake_up() -> None:
            sweeping.append(asyncio.create_task(log.maintenance.sweep_orphans(now_ms=FAR)))
            await asyncio.wait(sweeping, timeout=0.5)

        metadata.plan("txn", before(wake_up))
        assert await log.maintenance.merge_segments(None) == 8
        await sweeping[0]
        assert await contents(log) == expected(0, 8)


@pytest.mark.parametrize("ends", ["close", "seal"])
async def test_a_topic_that_ends_does_not_wait_for_a_merge(
    cluster: Cluster, backend: FaultyBackend, ends: str
) -> None:
    """The object store does not answer."""
    async with cluster.broker(options=NO_CACHE) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await stored(log, 0, 8)
        has_begun = asyncio.Event()

        async def stuck(call: Callable[[], Awaitable[Any]]) -> Any:
            has_begun.set()
            await asyncio.Event().wait()

        backend.plan("put_async", stuck)
        merging_ = asyncio.create_task(log.maintenance.merge_segments(None))
        await has_begun.wait()
        await getattr(log, ends)()
        assert await merging_ == 0
        again = await storage.open_topic(TOPIC, epoch=2)
        assert await contents(again) == expected(0, 8)


async def test_a_merge_of_which_the_owner_hears_nothing_is_found_later(
    cluster: Cluster, metadata: FaultyMetadata
) -> None:
    """The registration of a segment had no answer, then the segment was merged, and now it is repeated."""
    async with cluster.broker(options=NO_CACHE) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await stored(log, 0, 9)
        catalog = Catalog(metadata._real, TOPIC)

        async def merge_all() -> None:
            await merge_segments(
                await catalog.segments(), catalog, cluster.store, SegmentReader(cluster.store), epoch=1
            )

        metadata.plan("txn", lambda call: after(merge_all)(lambda: lose_answer(UNKNOWN)(call)))
        await stored(log, 9, 10)
        assert await contents(log) == expected(0, 10)
        await stored(log, 10, 11)
        assert await contents(log) == expected(0, 11)
