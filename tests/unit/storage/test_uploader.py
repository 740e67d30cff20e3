"""From the journal into segments: when, in which order, and through all kinds of trouble."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.storage import uploader
from sava.storage.broker_storage import StorageOptions
from sava.storage.errors import ObjectStoreUnavailable, SegmentCorrupt
from sava.storage.journal import JournalOptions
from sava.storage.objectstore import ObjectStore
from sava.storage.topic_log import TopicLog
from sava.storage.types import TopicKey
from sava.storage.uploader import UploadOptions
from tests.support.memory_store import MemoryStore
from tests.support.storage import (
    EAGER,
    LAZY,
    OTHER,
    TOPIC,
    Cluster,
    append_each,
    batch,
    contents,
    expected,
)
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


async def until_stored(log: TopicLog, end: int) -> None:
    """Without asking for it."""
    while log.stored_offset < end:
        await log._backlog.changed.wait()


async def test_enough_bytes_make_a_segment(cluster: Cluster) -> None:
    options = StorageOptions(upload=UploadOptions(segment_bytes=10_000, segment_age_s=3600))
    async with cluster.broker(options=options) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await log.append(batch("x" * 4000))
        await log.append(batch("x" * 4000))
        await asyncio.sleep(0.02)
        assert log.stored_offset == 0
        for _ in range(10):
            await log.append(batch("x" * 4000))
        await until_stored(log, 10)
        for segment in await cluster.catalog().segments():
            assert segment.end - segment.start == 2, "as many batches as fit"
        assert storage.journal.holdings.index(TOPIC.topic_id).start >= 10


async def test_age_makes_a_segment(cluster: Cluster) -> None:
    options = StorageOptions(upload=UploadOptions(segment_age_s=0.05))
    async with cluster.broker(options=options) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 3)
        await until_stored(log, 3)


async def test_a_quiet_topic_waits_longer_within_limits(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = StorageOptions(upload=UploadOptions(segment_age_s=0.05, quiet_age_s=3600))
    async with cluster.broker(options=options) as storage:
        quiet = await storage.open_topic(OTHER, epoch=1)
        log = await storage.open_topic(TOPIC, epoch=1)
        await append_each(quiet, 0, 1)
        await log.append(batch("x" * uploader.QUIET_BYTES))
        await until_stored(log, 1)
        assert quiet.stored_offset == 0
        await append_each(log, 1, 2)
        await log.append(batch("x" * uploader.QUIET_BYTES))
        await until_stored(log, 3)
        assert quiet.stored_offset == 0
        monkeypatch.setattr(uploader, "QUIET_JOURNAL_BYTES", 1000)
        await append_each(log, 3, 4)
        await until_stored(quiet, 1)


def test_a_quiet_topic_waits_five_times_as_long_by_default() -> None:
    assert UploadOptions(segment_age_s=60).quiet_s == 300
    assert UploadOptions(segment_age_s=60, quiet_age_s=60).quiet_s == 60


async def test_what_a_restart_finds_grows_old_as_well(cluster: Cluster) -> None:
    async with cluster.broker() as storage:
        await append_each(await storage.open_topic(TOPIC, epoch=1), 0, 3)
    async with cluster.broker(options=StorageOptions(upload=UploadOptions(segment_age_s=0.05))) as storage:
        await until_stored(await storage.open_topic(TOPIC, epoch=2), 3)


async def test_a_journal_under_pressure_uploads_whoever_holds_it(cluster: Cluster) -> None:
    """A quiet topic with one small message must not keep the journal of a busy one from being trimmed."""
    options = StorageOptions(
        journal=JournalOptions(file_bytes=4096, max_held_bytes=60_000),
        upload=UploadOptions(segment_bytes=20_000, segment_age_s=3600),
    )
    async with cluster.broker(options=options) as storage:
        quiet = await storage.open_topic(TopicKey("default", "quiet", 1), epoch=1)
        busy = await storage.open_topic(TOPIC, epoch=1)
        await append_each(quiet, 0, 1)
        for _ in range(300):
            await busy.append(batch("x" * 1000))
        assert quiet.stored_offset == 1
        assert storage.journal.held_bytes <= 62_000


async def test_a_topic_that_is_sealed_goes_before_the_others(cluster: Cluster) -> None:
    options = StorageOptions(upload=UploadOptions(segment_bytes=1000, segment_age_s=3600))
    store = SlowStore.open("memory://")
    cluster.store = store
    async with cluster.broker(options=options) as storage:
        others = [await storage.open_topic(TopicKey("default", f"t{n}", 100 + n), epoch=1) for n in range(20)]
        log = await storage.open_topic(TOPIC, epoch=1)
        for other in others:
            await other.append(batch("x" * 2000))
        await append_each(log, 0, 1)
        await log.seal()
        # In the order of their appends all twenty would be stored first; some are while a busy machine seals.
        assert sum(other.stored_offset for other in others) < 10


class SlowStore(ObjectStore):
    async def put_new(self, key: str, data: object) -> None:
        await asyncio.sleep(0.02)
        await super().put_new(key, data)  # type: ignore[arg-type]


# -- trouble ------------------------------------------------------------------------------------


class TroubledStore(ObjectStore):
    """Answers the next puts with these; then as usual."""

    troubles: list[Exception | str]

    async def put_new(self, key: str, data: object) -> None:
        trouble = self.troubles.pop(0) if self.troubles else None
        if isinstance(trouble, Exception):
            raise trouble
        if trouble == "cut":
            data = b"".join([data] if isinstance(data, bytes) else data)[:-10]  # type: ignore[arg-type]
        await super().put_new(key, data)  # type: ignore[arg-type]
        if trouble == "answer lost":
            raise ObjectStoreUnavailable("timeout")


@pytest.mark.parametrize(
    "trouble",
    [ObjectStoreUnavailable("down"), "answer lost", "cut", ValueError("a bug")],
    ids=["down", "answer lost", "object cut short", "bug"],
)
async def test_an_object_store_in_trouble_is_asked_again(cluster: Cluster, trouble: Exception | str) -> None:
    store = TroubledStore.open("memory://")
    assert isinstance(store, TroubledStore)
    store.troubles = [trouble, trouble]
    cluster.store = store
    options = StorageOptions(upload=UploadOptions(segment_age_s=0))
    async with cluster.broker(options=options) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 5)
        await until_stored(log, 5)
        assert not store.troubles
        assert await contents(log) == expected(0, 5)
        assert log.stored_offset == 5
        assert (storage.uploader.failures, storage.uploader.failing) == (2, 0)


async def test_what_cannot_be_undone_by_waiting_is_told_to_who_seals(cluster: Cluster) -> None:
    store = TroubledStore.open("memory://")
    assert isinstance(store, TroubledStore)
    store.troubles = ["cut"]
    cluster.store = store
    async with cluster.broker() as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 5)
        with pytest.raises(SegmentCorrupt):
            await log.seal()
        await append_each(log, 5, 6)
        assert (await log.seal()).end == 6


class TroubledMetadata(MemoryStore):
    troubles: list[str]

    async def txn(self, *args: Any, **kwargs: Any) -> Any:
        trouble = self.troubles.pop(0) if self.troubles else None
        if trouble == "refused":
            raise Unavailable("no leader")
        result = await super().txn(*args, **kwargs)
        if trouble == "answer lost":
            raise OutcomeUnknown("no answer")
        return result


@pytest.mark.parametrize("trouble", ["refused", "answer lost"])
async def test_a_registration_in_trouble_uses_the_object_that_was_written(
    tmp_path: Path, trouble: str
) -> None:
    metadata = TroubledMetadata()
    metadata.troubles = []
    cluster = Cluster(tmp_path, metadata=metadata)
    async with cluster.broker() as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 5)
        metadata.troubles = [trouble]
        await log.seal()
        assert await contents(log) == expected(0, 5)
    assert await cluster.object_count() == 1
    assert [(each.start, each.end) for each in await cluster.catalog().segments()] == [(0, 5)]


async def test_one_topic_in_trouble_does_not_keep_the_others_waiting(cluster: Cluster) -> None:
    class NotThisOne(ObjectStore):
        async def put_new(self, key: str, data: object) -> None:
            if "/orders/" in key:
                raise ObjectStoreUnavailable("no right to write there")
            await super().put_new(key, data)  # type: ignore[arg-type]

    cluster.store = NotThisOne.open("memory://")
    async with cluster.broker(options=StorageOptions(upload=UploadOptions(segment_age_s=0))) as storage:
        bad = await storage.open_topic(TOPIC, epoch=1)
        good = await storage.open_topic(TopicKey("default", "good", 100), epoch=1)
        await append_each(bad, 0, 3)
        await append_each(good, 0, 3)
        await until_stored(good, 3)
        assert bad.stored_offset == 0
        assert await contents(bad) == expected(0, 3)
        assert storage.uploader.failing == 1
        assert storage.uploader.segments >= 1


async def test_closing_in_the_middle_of_an_upload_loses_nothing(cluster: Cluster) -> None:
    started = asyncio.Event()

    class Hanging(ObjectStore):
        async def put_new(self, key: str, data: object) -> None:
            started.set()
            await asyncio.Event().wait()

    working, cluster.store = cluster.store, Hanging.open("memory://")
    async with cluster.broker(options=StorageOptions(upload=UploadOptions(segment_age_s=0))) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 3)
        await started.wait()
    cluster.store = working
    async with cluster.broker(options=LAZY) as storage:
        log = await storage.open_topic(TOPIC, epoch=2)
        assert await contents(log) == expected(0, 3)
        assert (await log.seal()).end == 3


async def test_an_upload_that_a_deletion_overtakes_leaves_no_object(cluster: Cluster) -> None:
    """An object is on its way ─▶ the topic is deleted: objects are listed and removed ─▶ the object arrives.
    Nobody would ever look for it again, so whoever wrote it removes it."""
    started, goes_on = asyncio.Event(), asyncio.Event()

    class Held(ObjectStore):
        async def put_new(self, key: str, data: object) -> None:
            started.set()
            await goes_on.wait()
            await super().put_new(key, data)  # type: ignore[arg-type]

    cluster.store = Held.open("memory://")
    async with cluster.broker(options=EAGER) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 3)
        await started.wait()
        backlog = log._backlog
        await storage.delete_topic(TOPIC)
        assert await cluster.object_count() == 0
        goes_on.set()
        async with asyncio.timeout(PATIENCE_S):
            await backlog.changed.wait()
        assert await cluster.object_count() == 0
