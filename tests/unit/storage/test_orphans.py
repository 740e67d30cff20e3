"""Orphans: only what can never be registered goes, however the sweep and an upload cross."""

from __future__ import annotations

from functools import partial

import pytest

from sava.metadata.errors import Unavailable
from sava.storage.catalog import Catalog
from sava.storage.errors import SegmentConflict
from sava.storage.keys import objects_prefix
from sava.storage.objectstore import ObjectStore
from sava.storage.orphans import GRACE_MS, find_orphans, sweep_orphans
from sava.storage.segment import SegmentReader
from sava.storage.types import Segment, TopicKey
from tests.support.messages import TOPIC, keys, read_messages, write
from tests.unit.storage.faults import UNAVAILABLE, FaultyMetadata, before, refuse

FAR = 1 << 50


@pytest.fixture
async def catalog(metadata: FaultyMetadata) -> Catalog:
    catalog = Catalog(metadata, TOPIC)
    await catalog.claim(epoch=1, storage_id="a", has_tail=False)
    return catalog


async def registered(catalog: Catalog, store: ObjectStore, start: int, end: int) -> Segment:
    segment = await write(store, start, end)
    await catalog.register(segment, epoch=1, producers=(), origins=())
    return segment


async def test_what_is_named_stays(catalog: Catalog, store: ObjectStore) -> None:
    segments = [await registered(catalog, store, start, start + 10) for start in (0, 10)]
    assert await sweep_orphans(catalog, store, now_ms=FAR) == []
    assert await keys(store) == [segment.key for segment in segments]


async def test_an_upload_that_was_repeated_leaves_one_orphan(catalog: Catalog, store: ObjectStore) -> None:
    first = await write(store, 0, 10)
    second = await registered(catalog, store, 0, 10)
    found = await find_orphans(catalog, store, now_ms=FAR)
    assert [info.key for info in found] == [first.key]
    assert len(await keys(store)) == 2, "a dry run"
    assert await sweep_orphans(catalog, store, now_ms=FAR) == found
    assert await keys(store) == [second.key]


async def test_an_upload_under_way_stays_however_old_it_is(catalog: Catalog, store: ObjectStore) -> None:
    """The broker may stall for a day between upload and registration, and register then."""
    await registered(catalog, store, 0, 10)
    waiting = await write(store, 10, 20)
    assert await sweep_orphans(catalog, store, now_ms=FAR) == []
    await catalog.register(waiting, epoch=1, producers=(), origins=())
    assert len(await read_messages(SegmentReader(store), waiting)) == 10


async def test_an_upload_of_an_owner_that_was_replaced_goes(catalog: Catalog, store: ObjectStore) -> None:
    stale = await write(store, 0, 10)
    await catalog.claim(epoch=2, storage_id="a", has_tail=True)
    found = await sweep_orphans(catalog, store, now_ms=FAR)
    assert [info.key for info in found] == [stale.key]


async def test_young_objects_stay(catalog: Catalog, store: ObjectStore) -> None:
    young = await write(store, 0, 10)
    await registered(catalog, store, 0, 10)
    created_ms = (await store.head(young.key)).modified_ms
    assert await sweep_orphans(catalog, store, now_ms=created_ms + GRACE_MS - 1) == []
    assert len(await sweep_orphans(catalog, store, now_ms=created_ms + GRACE_MS)) == 1


async def test_a_registration_between_listing_and_lookup(
    metadata: FaultyMetadata, catalog: Catalog, store: ObjectStore
) -> None:
    """Listed without a name, registered before the catalog is read, and again between its two reads."""
    for start, method in ((0, "get"), (10, "range")):
        segment = await write(store, start, start + 10)
        metadata.plan(method, before(partial(register_behind, metadata, segment)))
        assert await sweep_orphans(catalog, store, now_ms=FAR) == []
    assert len(await keys(store)) == 2
    assert len(await catalog.segments()) == 2


async def register_behind(metadata: FaultyMetadata, segment: Segment) -> None:
    await Catalog(metadata._real, TOPIC).register(segment, epoch=1, producers=(), origins=())


async def test_what_was_swept_cannot_be_registered(catalog: Catalog, store: ObjectStore) -> None:
    loser = await write(store, 0, 10)
    await registered(catalog, store, 0, 10)
    await sweep_orphans(catalog, store, now_ms=FAR)
    with pytest.raises(SegmentConflict):
        await catalog.register(loser, epoch=1, producers=(), origins=())


async def test_a_deleted_topic_is_all_orphans_and_its_successor_is_not(
    metadata: FaultyMetadata, catalog: Catalog, store: ObjectStore
) -> None:
    await registered(catalog, store, 0, 10)
    successor = TopicKey("default", "orders", 9)
    new = Catalog(metadata, successor)
    await new.claim(epoch=1, storage_id="b", has_tail=False)
    upload = await write(store, 0, 10, topic=successor)
    assert await sweep_orphans(new, store, now_ms=FAR) == []
    assert len(await sweep_orphans(catalog, store, now_ms=FAR)) == 1
    assert await keys(store) == []
    assert await keys(store, successor) == [upload.key]


async def test_what_is_not_ours_stays(catalog: Catalog, store: ObjectStore) -> None:
    names = [f"{objects_prefix(TOPIC)}/{name}" for name in ("notes.txt", "1-2-3.parquet")]
    for name in names:
        await store.put_new(name, b"x")
    assert await sweep_orphans(catalog, store, now_ms=FAR) == []
    assert await keys(store) == sorted(names)


@pytest.mark.parametrize("method", ["get", "range"])
async def test_a_catalog_that_cannot_be_read_condemns_nothing(
    metadata: FaultyMetadata, catalog: Catalog, store: ObjectStore, method: str
) -> None:
    await registered(catalog, store, 0, 10)
    metadata.plan(method, refuse(UNAVAILABLE))
    with pytest.raises(Unavailable):
        await sweep_orphans(catalog, store, now_ms=FAR)
    assert len(await keys(store)) == 1
