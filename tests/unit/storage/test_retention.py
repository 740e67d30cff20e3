"""Retention: what a policy lets go, what it must keep, and that objects go after their descriptors."""

from __future__ import annotations

import msgspec
import pytest
from obstore.store import MemoryStore as MemoryBackend

from sava.storage.catalog import Catalog
from sava.storage.errors import Fenced, ObjectStoreUnavailable
from sava.storage.keys import objects_prefix
from sava.storage.maintenance import RetentionPolicy, drop_expired, expired_end
from sava.storage.objectstore import ObjectStore
from sava.storage.orphans import delete_topic, find_orphans, sweep_orphans
from sava.storage.types import Segment, TopicKey
from tests.support.messages import TOPIC, write
from tests.unit.storage.faults import BROKEN, UNAVAILABLE, FaultyBackend, FaultyMetadata, before, refuse

HOUR = 3_600_000
FAR = 1 << 50
"""A time at which no grace is left."""


def segment(start: int, end: int, *, size: int = 100, created_ms: int = 0) -> Segment:
    return Segment(
        topic_id=7,
        start=start,
        end=end,
        epoch=1,
        key=f"{start}",
        size=size,
        crc32c=0,
        footer_size=1,
        footer_crc32c=0,
        min_publish_time=0,
        max_publish_time=0,
        created_ms=created_ms,
    )


AGES = [segment(start, start + 10, created_ms=start * 100) for start in range(0, 50, 10)]
"""Five segments of 100 bytes, created at 0, 1000, 2000, 3000 and 4000."""


@pytest.mark.parametrize(
    ("policy", "now_ms", "end"),
    [
        (RetentionPolicy(), FAR, 0),
        (RetentionPolicy(max_age_ms=1000), 999, 0),
        (RetentionPolicy(max_age_ms=1000), 1000, 10),
        (RetentionPolicy(max_age_ms=1000), 4999, 40),
        (RetentionPolicy(max_age_ms=1000), FAR, 50),
        (RetentionPolicy(max_age_ms=0), 2000, 30),
        (RetentionPolicy(max_bytes=500), FAR, 0),
        (RetentionPolicy(max_bytes=499), FAR, 0),
        (RetentionPolicy(max_bytes=401), FAR, 0),
        (RetentionPolicy(max_bytes=400), FAR, 10),
        (RetentionPolicy(max_bytes=1), FAR, 40),
        (RetentionPolicy(max_bytes=0), FAR, 50),
        (RetentionPolicy(max_age_ms=1000, max_bytes=200), 1000, 30),
        (RetentionPolicy(max_age_ms=1000, max_bytes=400), 3000, 30),
    ],
)
def test_how_far_a_policy_reaches(policy: RetentionPolicy, now_ms: int, end: int) -> None:
    assert expired_end(AGES, policy, now_ms) == end


def test_nothing_and_what_retention_began_at() -> None:
    assert expired_end([], RetentionPolicy(max_bytes=0), FAR) == 0
    assert expired_end(AGES[2:], RetentionPolicy(max_age_ms=HOUR), 0) == 20


def test_a_clock_that_went_back_makes_no_hole() -> None:
    segments = [AGES[0], msgspec.structs.replace(AGES[1], created_ms=FAR), AGES[2]]
    assert expired_end(segments, RetentionPolicy(max_age_ms=1000), 10_000) == 10


def test_a_limit_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        RetentionPolicy(max_bytes=-1)


# -- with catalog and objects --------------------------------------------------------------


class Topic:
    """A topic of four segments, created an hour apart, on edges that can fail."""

    def __init__(self) -> None:
        self.metadata = FaultyMetadata()
        self.backend = FaultyBackend(MemoryBackend())
        self.store = ObjectStore("memory://", self.backend, attempts=1)
        self.catalog = Catalog(self.metadata, TOPIC)

    async def fill(self) -> list[Segment]:
        await self.catalog.claim(epoch=1, storage_id="a", has_tail=False)
        segments = []
        for number in range(4):
            start = number * 10
            segments.append(await write(self.store, start, start + 10, created_ms=number * HOUR))
            await self.catalog.register(segments[-1], epoch=1, producers=(), origins=())
        return segments

    async def objects(self, topic: TopicKey = TOPIC) -> list[str]:
        return [info.key async for info in self.store.list(objects_prefix(topic))]


@pytest.fixture
def topic() -> Topic:
    return Topic()


async def test_descriptors_go_first_and_objects_after(topic: Topic) -> None:
    segments = await topic.fill()
    seen: list[int] = []

    async def look() -> None:
        seen.append(len(await topic.catalog.segments()))

    topic.backend.plan("delete_async", before(look))
    dropped = await drop_expired(
        topic.catalog, topic.store, RetentionPolicy(max_age_ms=HOUR), epoch=1, now_ms=2 * HOUR
    )
    assert dropped == segments[:2]
    assert seen == [2]
    assert await topic.objects() == [each.key for each in segments[2:]]


async def test_unread_messages_stay_if_asked_for(topic: Topic) -> None:
    segments = await topic.fill()
    policy = RetentionPolicy(max_bytes=0)
    assert await drop_expired(topic.catalog, topic.store, policy, epoch=1, now_ms=FAR, keep_from=5) == []
    dropped = await drop_expired(topic.catalog, topic.store, policy, epoch=1, now_ms=FAR, keep_from=29)
    assert dropped == segments[:2]


async def test_an_open_topic_goes_on_where_it_was_when_all_is_dropped(topic: Topic) -> None:
    await topic.fill()
    await drop_expired(topic.catalog, topic.store, RetentionPolicy(max_bytes=0), epoch=1, now_ms=FAR)
    state = await topic.catalog.load()
    assert state is not None
    assert (state.start, state.end, state.sealed) == (40, 40, False)
    assert await topic.objects() == []
    await topic.catalog.register(await write(topic.store, 40, 50), epoch=1, producers=(), origins=())


async def test_only_the_owner_drops(topic: Topic) -> None:
    segments = await topic.fill()
    await topic.catalog.claim(epoch=2, storage_id="a", has_tail=True)
    with pytest.raises(Fenced):
        await drop_expired(topic.catalog, topic.store, RetentionPolicy(max_bytes=0), epoch=1, now_ms=FAR)
    assert await topic.objects() == [each.key for each in segments]


async def test_metadata_that_does_not_answer_deletes_nothing(topic: Topic) -> None:
    segments = await topic.fill()
    for method in ("range", "txn"):
        topic.metadata.plan(method, refuse(UNAVAILABLE))
        with pytest.raises(type(UNAVAILABLE)):
            await drop_expired(topic.catalog, topic.store, RetentionPolicy(max_bytes=0), epoch=1, now_ms=FAR)
        assert await topic.objects() == [each.key for each in segments]
    assert await topic.catalog.segments() == segments


async def test_objects_that_could_not_be_deleted_are_orphans(topic: Topic) -> None:
    segments = await topic.fill()
    topic.backend.plan("delete_async", refuse(BROKEN))
    with pytest.raises(ObjectStoreUnavailable):
        await drop_expired(topic.catalog, topic.store, RetentionPolicy(max_age_ms=0), epoch=1, now_ms=HOUR)
    assert await topic.catalog.segments() == segments[2:]
    orphans = await find_orphans(topic.catalog, topic.store, now_ms=FAR)
    assert [info.key for info in orphans] == [each.key for each in segments[:2]]
    await sweep_orphans(topic.catalog, topic.store, now_ms=FAR)
    assert await topic.objects() == [each.key for each in segments[2:]]


# -- deletion ------------------------------------------------------------------------------


async def test_a_deleted_topic_leaves_nothing(topic: Topic) -> None:
    await topic.fill()
    await write(topic.store, 40, 50)
    assert await delete_topic(topic.catalog, topic.store) == 5
    assert await topic.objects() == []
    assert await topic.catalog.load() is None
    assert await delete_topic(topic.catalog, topic.store) == 0


async def test_a_deletion_that_broke_off_is_finished_by_the_next(topic: Topic) -> None:
    await topic.fill()
    topic.backend.plan("delete_async", refuse(BROKEN))
    with pytest.raises(ObjectStoreUnavailable):
        await delete_topic(topic.catalog, topic.store)
    assert await topic.catalog.load() is None
    assert await delete_topic(topic.catalog, topic.store) == 4
    assert await topic.objects() == []


async def test_a_topic_of_the_same_name_is_not_touched_by_a_late_deletion(topic: Topic) -> None:
    await topic.fill()
    successor = TopicKey("default", "orders", 9)
    catalog = Catalog(topic.metadata, successor)
    await catalog.claim(epoch=1, storage_id="b", has_tail=False)
    segment = await write(topic.store, 0, 5, topic=successor)
    await catalog.register(segment, epoch=1, producers=(), origins=())
    assert await delete_topic(topic.catalog, topic.store) == 4
    assert await topic.objects() == []
    assert await topic.objects(successor) == [segment.key]
    assert await catalog.segments() == [segment]
