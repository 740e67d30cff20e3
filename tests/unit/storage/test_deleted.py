"""What arrives of a topic after it was deleted goes too, and nothing else."""

from __future__ import annotations

import pytest

from sava.metadata.errors import Unavailable
from sava.storage.catalog import Catalog
from sava.storage.errors import ObjectStoreUnavailable
from sava.storage.objectstore import ObjectStore
from sava.storage.orphans import GRACE_MS, NOTES, delete_topic, note_deleted, sweep_deleted
from sava.storage.types import TopicKey
from tests.support.messages import TOPIC, keys, write
from tests.unit.storage.faults import BROKEN, UNAVAILABLE, FaultyBackend, FaultyMetadata, before, refuse

NOON = 1_000_000_000


async def notes(metadata: FaultyMetadata) -> int:
    return len((await metadata.range(NOTES)).kvs)


async def delete(metadata: FaultyMetadata, store: ObjectStore, topic: TopicKey = TOPIC) -> None:
    await note_deleted(metadata, topic, now_ms=NOON)
    await delete_topic(Catalog(metadata, topic), store)


async def test_what_arrives_after_the_deletion_goes_an_hour_later(
    metadata: FaultyMetadata, store: ObjectStore
) -> None:
    """Its writer was killed before it could remove it. It is younger than an hour itself."""
    await delete(metadata, store)
    late = await write(store, 0, 10)
    assert (await sweep_deleted(metadata, store, now_ms=NOON + GRACE_MS - 1)).objects == 0
    assert (await keys(store), await notes(metadata)) == ([late.key], 1)
    assert (await sweep_deleted(metadata, store, now_ms=NOON + GRACE_MS)).objects == 1
    assert (await keys(store), await notes(metadata)) == ([], 0)


async def test_the_topic_that_has_the_name_now_is_not_touched(
    metadata: FaultyMetadata, store: ObjectStore
) -> None:
    await delete(metadata, store)
    await write(store, 0, 10)
    successor = TopicKey("default", "orders", 9)
    catalog = Catalog(metadata, successor)
    await catalog.claim(epoch=1, storage_id="b", has_tail=False)
    named = await write(store, 0, 10, topic=successor)
    await catalog.register(named, epoch=1, producers=(), origins=())
    upload = await write(store, 10, 20, topic=successor)
    assert (await sweep_deleted(metadata, store, now_ms=NOON + GRACE_MS)).objects == 1
    assert await keys(store) == []
    assert await catalog.segments() == [named]
    assert await keys(store, successor) == [named.key, upload.key]


async def test_what_cannot_be_deleted_is_tried_again(
    metadata: FaultyMetadata, store: ObjectStore, backend: FaultyBackend
) -> None:
    await delete(metadata, store)
    await write(store, 0, 10)
    backend.plan("delete_async", refuse(BROKEN))
    with pytest.raises(ObjectStoreUnavailable):
        await sweep_deleted(metadata, store, now_ms=NOON + GRACE_MS)
    assert await notes(metadata) == 1
    assert (await sweep_deleted(metadata, store, now_ms=NOON + GRACE_MS)).objects == 1


async def test_a_note_that_cannot_be_written_stops_the_deletion(
    metadata: FaultyMetadata, store: ObjectStore
) -> None:
    await write(store, 0, 10)
    metadata.plan("txn", refuse(UNAVAILABLE))
    with pytest.raises(Unavailable):
        await delete(metadata, store)
    assert len(await keys(store)) == 1


async def test_a_deletion_that_is_repeated_meanwhile_keeps_its_note(
    metadata: FaultyMetadata, store: ObjectStore
) -> None:
    """What may arrive after the second deletion is looked for an hour after that one."""
    await delete(metadata, store)
    metadata.plan("txn", before(lambda: note_deleted(metadata, TOPIC, now_ms=NOON + GRACE_MS)))
    await sweep_deleted(metadata, store, now_ms=NOON + GRACE_MS)
    assert await notes(metadata) == 1


async def test_many(metadata: FaultyMetadata, store: ObjectStore) -> None:
    """More than one page, and those whose time has not come stay."""
    for number in range(600):
        at_ms = NOON + (number % 2)
        await note_deleted(metadata, TopicKey("default", "t", number + 1), now_ms=at_ms)
    assert (await sweep_deleted(metadata, store, now_ms=NOON + GRACE_MS)).objects == 0
    assert await notes(metadata) == 300


async def test_a_note_that_cannot_be_read_is_skipped_and_counted(
    metadata: FaultyMetadata, store: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes first, and the sweep of all brokers stopped at it: what arrived of topics behind it stayed."""
    await metadata.put(f"{NOTES}{1:020}", b"?")
    await delete(metadata, store)
    await write(store, 0, 10)
    assert await sweep_deleted(metadata, store, now_ms=NOON + GRACE_MS) == (1, 1)
    assert f"key={NOTES}{1:020}" in caplog.text
    assert await keys(store) == []
    assert await notes(metadata) == 1, "what it says may still be found out by hand"
