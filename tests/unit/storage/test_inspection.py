"""Looking at stored topics from outside: all that is wrong is named, and nothing that is only new."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest

from sava.metadata.store import RangeResult
from sava.storage import inspection, keys
from sava.storage.catalog import Catalog
from sava.storage.errors import CatalogBusy, DataGap, InvalidStorageName
from sava.storage.inspection import InspectedTopic, NotInSegments, UnknownTopic, Verification
from sava.storage.objectstore import ObjectStore
from sava.storage.segment import write_segment
from sava.storage.types import Segment, TopicKey
from tests.support.memory_store import MemoryStore
from tests.support.messages import TOPIC, numbered, write

NAME = InspectedTopic("default", "orders")


class World:
    """A topic of three segments, 0..10, 10..25 and 25..40, in a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = ObjectStore.open(path.as_uri())
        self.metadata = MemoryStore()
        self.segments: list[Segment] = []

    async def fill(self, topic: TopicKey = TOPIC, ends: tuple[int, ...] = (10, 25, 40)) -> None:
        catalog = Catalog(self.metadata, topic)
        await catalog.claim(epoch=1, storage_id="disk", has_tail=False)
        start = 0
        for end in ends:
            segment = await write(self.store, start, end, topic=topic)
            await catalog.register(segment, epoch=1, producers=(), origins=())
            self.segments.append(segment)
            start = end

    def file(self, number: int) -> Path:
        return self.path / self.segments[number].key

    async def verify(self, topic: InspectedTopic | None = None) -> tuple[Verification, list[str]]:
        check = Verification(self.metadata, self.store, topic)
        await check.list_objects()
        return check, [f"{fault.topic.path}: {fault.text}" async for fault in check.faults(lambda size: None)]


@pytest.fixture
async def world(tmp_path: Path) -> World:
    world = World(tmp_path)
    await world.fill()
    return world


# -- looking -------------------------------------------------------------------------------------


async def test_topics_are_found_by_their_records_and_nothing_else_is(world: World) -> None:
    """Names that sort around each other, a topic called like a record, and keys that belong to no topic."""
    names = ["orders-", "orders.eu", "state", "objects", "zaba"]
    for number, name in enumerate(names):
        await world.fill(TopicKey("default", name, 10 + number), ends=(3,))
    await world.fill(TopicKey("other", "orders", 20), ends=(3,))
    await world.metadata.put("/storage/topics/stray", b"")
    await world.metadata.put("/storage/other", b"")

    found = [name async for name in inspection.topics(world.metadata)]

    assert sorted(found) == sorted(
        [NAME, InspectedTopic("other", "orders"), *(InspectedTopic("default", n) for n in names)]
    )


async def test_a_topic_is_seen_with_its_state_and_segments(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_PAGE", 2)
    view = await inspection.read_topic(world.metadata, NAME)
    assert view.state is not None
    assert (view.state.start, view.state.end, view.state.sealed) == (0, 40, False)
    assert list(view.segments) == world.segments
    assert not list(view.faults())


async def test_what_changes_while_it_is_read_is_read_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first page is read, a segment is registered, the second page is read: no gap."""
    monkeypatch.setattr(inspection, "_PAGE", 2)
    records = Interrupted(world.metadata)
    segment = await write(world.store, 40, 50)

    async def register() -> None:
        await Catalog(world.metadata, TOPIC).register(segment, epoch=1, producers=(), origins=())

    records.after_call[2] = register
    view = await inspection.read_topic(records, NAME)
    assert [each.end for each in view.segments] == [10, 25, 40, 50]
    assert not list(view.faults())


async def test_records_that_never_stand_still_are_not_guessed_at(world: World) -> None:
    records = Interrupted(world.metadata)
    key = keys.state_key(TOPIC)

    async def touch() -> None:
        kv = await world.metadata.get(key)
        assert kv is not None
        await world.metadata.put(key, kv.value)

    records.after_call.update(dict.fromkeys(range(1, 100), touch))
    with pytest.raises(CatalogBusy):
        await inspection.read_topic(records, NAME)


class Interrupted:
    """Does something after the n-th read."""

    def __init__(self, metadata: MemoryStore) -> None:
        self._metadata = metadata
        self._calls = 0
        self.after_call: dict[int, Callable[[], Awaitable[None]]] = {}

    async def range(self, prefix: str, *, limit: int = 0, start_after: str = "") -> RangeResult:
        result = await self._metadata.range(prefix, limit=limit, start_after=start_after)
        self._calls += 1
        if self._calls in self.after_call:
            await self.after_call[self._calls]()
        return result


@pytest.mark.parametrize("path", ["orders", "/orders", "/a/b/c", "default/orders", "//", "/a/b*"])
def test_a_name_that_is_none_is_refused(path: str) -> None:
    with pytest.raises(InvalidStorageName):
        InspectedTopic.parse(path)


# -- reading messages ----------------------------------------------------------------------------


async def payloads(world: World, *range_: int | None) -> list[int]:
    view = await inspection.known_topic(world.metadata, NAME)
    return [
        int(each) async for batch in inspection.read(view, world.store, *range_) for each in batch.payloads()
    ]


async def test_messages_are_read_over_segments(world: World) -> None:
    assert await payloads(world) == list(range(40))
    assert await payloads(world, 8, 27) == list(range(8, 27))
    assert await payloads(world, 40) == []


async def test_offsets_that_are_not_in_segments_are_named_with_where_they_are(world: World) -> None:
    with pytest.raises(NotInSegments, match=r"segments hold 0\.\.40; what follows is in journal disk"):
        await payloads(world, 39, 41)
    await Catalog(world.metadata, TOPIC).seal(epoch=1, end=40, producers=(), origins=())
    with pytest.raises(NotInSegments, match="nothing exists beyond"):
        await payloads(world, 41)
    with pytest.raises(UnknownTopic, match="/default/other"):
        await inspection.known_topic(world.metadata, InspectedTopic("default", "other"))


async def test_a_gap_is_not_passed_over(world: World) -> None:
    await world.metadata.delete(keys.segment_key(TOPIC, 10))
    assert await payloads(world, 0, 10) == list(range(10))
    with pytest.raises(DataGap, match="offset 10"):
        await payloads(world, 0, 26)


# -- verifying -----------------------------------------------------------------------------------


async def test_what_is_as_described_is_counted(world: World) -> None:
    await world.fill(TopicKey("default", "payments", 8), ends=(5,))
    read: list[int] = []
    check = Verification(world.metadata, world.store)
    total = await check.list_objects()
    assert [fault async for fault in check.faults(read.append)] == []
    assert (check.topics, check.segments, check.messages) == (2, 4, 45)
    assert sum(read) == total == check.size


async def test_every_kind_of_damage_is_named_at_once(world: World) -> None:
    """A flipped byte, a cut object, a deleted object, a deleted descriptor and an orphan, each in a topic of
    its own; one that is sound among them."""
    topics = [TopicKey("default", f"topic-{number}", 100 + number) for number in range(5)]
    for topic in topics:
        await world.fill(topic)
    flipped, cut, lost, unnamed, orphan = (world.segments[3 * n + 4] for n in range(5))
    damage(world.path / flipped.key)
    (world.path / cut.key).write_bytes((world.path / cut.key).read_bytes()[:-20])
    (world.path / lost.key).unlink()
    await world.metadata.delete(keys.segment_key(topics[3], unnamed.start))
    extra = await write(world.store, 10, 30, topic=topics[4])
    age(world, unnamed, extra)

    check, faults = await world.verify()

    told = dict(line.split(": ", 1) for line in faults if "topic-3" not in line)
    assert told == {
        "/default/topic-0": f"{flipped.key}: the checksum does not match; offsets 10..25 cannot be relied on",
        "/default/topic-1": (
            f"{cut.key} has {cut.size - 20} bytes instead of {cut.size}; offsets 10..25 cannot be relied on"
        ),
        "/default/topic-2": f"there is no object {lost.key}; offsets 10..25 cannot be relied on",
        "/default/topic-4": f"no descriptor names the object {extra.key} ({extra.size} bytes)",
    }
    assert [line for line in faults if "topic-3" in line] == [
        "/default/topic-3: offsets 10..25 are in no segment",
        f"/default/topic-3: no descriptor names the object {unnamed.key} ({unnamed.size} bytes)",
    ]
    assert (check.topics, check.segments) == (6, 18 - 4)
    assert orphan.key not in "".join(faults)


def age(world: World, *segments: Segment) -> None:
    """As if they had been written long ago."""
    for segment in segments:
        os.utime(world.path / segment.key, (0, 0))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


async def test_descriptors_that_lie_about_their_object(world: World) -> None:
    """Size, checksums and times agree with nothing if the descriptor was changed."""
    segment = world.segments[1]
    for change, expected in (
        ({"footer_crc32c": 1}, "checksum of the footer"),
        ({"crc32c": 1}, "the checksum does not match"),
        ({"size": segment.size + 1}, "instead of"),
        ({"max_publish_time": 0}, "publish times"),
        ({"epoch": 9}, "names another's object"),
        ({"topic_id": 9}, "is of topic id 9"),
    ):
        await put_descriptor(world, msgspec.structs.replace(segment, **change))
        _, faults = await world.verify(NAME)
        assert any(expected in line for line in faults), (expected, faults)
    await put_descriptor(world, segment)
    assert (await world.verify(NAME))[1] == []


async def put_descriptor(world: World, segment: Segment) -> None:
    await world.metadata.put(keys.segment_key(TOPIC, 10), msgspec.json.encode(segment))


async def test_records_that_cannot_be_read_do_not_hide_the_others(world: World) -> None:
    await world.metadata.put(keys.segment_key(TOPIC, 10), b"{not json")
    damage(world.file(2))
    _, faults = await world.verify()
    assert "objects/00000000000000000010 cannot be read" in faults[0]
    assert "offsets 10..25 are in no segment" in faults[1]
    assert "the checksum does not match" in faults[2]
    await world.metadata.delete(keys.state_key(TOPIC))
    assert any("without a state" in line for line in (await world.verify())[1])


async def test_an_upload_under_way_is_not_wrong(world: World) -> None:
    """It can still be registered; once the end has passed it, it cannot."""
    early = await write(world.store, 40, 50)
    check, faults = await world.verify()
    assert (faults, check.unregistered) == ([], 1)
    late = await write(world.store, 40, 60)
    await Catalog(world.metadata, TOPIC).register(late, epoch=1, producers=(), origins=())
    check, faults = await world.verify()
    assert (faults, check.unregistered) == ([], 1)  # by now it is too late for it, but it is young
    age(world, early)
    check, faults = await world.verify()
    assert check.unregistered == 0
    assert faults == [f"/default/orders: no descriptor names the object {early.key} ({early.size} bytes)"]


async def test_a_merge_that_takes_long_is_not_wrong(world: World) -> None:
    """The merged object is there, and the metadata store takes its time to name it. Whoever deletes it on the
    strength of what is said here would lose messages."""
    merged = await write(world.store, 0, 25)
    check, faults = await world.verify()
    assert (faults, check.unregistered) == ([], 1)
    age(world, merged)
    assert len((await world.verify())[1]) == 1


async def test_what_a_deleted_topic_left_behind_is_named(world: World) -> None:
    """Of another name, and of the same name under an older id. What is not Sava's is left alone."""
    gone = await write(world.store, 0, 5, topic=TopicKey("default", "gone", 3))
    older = await write(world.store, 0, 5, topic=TopicKey("default", "orders", 2))
    age(world, gone, older)
    (world.path / "topics" / "default" / "orders" / "README").write_text("mine")
    check, faults = await world.verify()
    assert faults == [
        f"/default/orders: no descriptor names the object {older.key} ({older.size} bytes)",
        f"/default/gone: no descriptor names the object {gone.key} ({gone.size} bytes)",
    ]
    assert check.foreign == 1
    with pytest.raises(UnknownTopic):
        await world.verify(InspectedTopic("default", "never"))


async def test_what_retention_drops_meanwhile_is_no_loss(world: World) -> None:
    """The descriptors are read, then retention drops the first segment and deletes its object."""
    catalog = Catalog(world.metadata, TOPIC)
    records = Interrupted(world.metadata)

    async def drop() -> None:
        dropped = await catalog.drop(epoch=1, before=10)
        await world.store.delete([segment.key for segment in dropped])

    records.after_call[3] = drop  # after the name, the state and the records
    check = Verification(records, world.store)
    await check.list_objects()
    assert [fault async for fault in check.faults(lambda size: None)] == []
    assert check.segments == 2


async def test_a_large_segment_is_read_in_parts(world: World) -> None:
    """Several row groups and chunks; the damage in one of them is found."""
    topic = TopicKey("default", "large", 9)
    catalog = Catalog(world.metadata, topic)
    await catalog.claim(epoch=1, storage_id="disk", has_tail=False)
    batches = [
        each.assigned(topic_id=9, epoch=1, base_offset=each.base_offset) for each in numbered(0, 40_000)
    ]
    segment = await write_segment(world.store, topic, epoch=1, batches=batches, created_ms=0)
    await catalog.register(segment, epoch=1, producers=(), origins=())
    check, faults = await world.verify(InspectedTopic("default", "large"))
    assert (faults, check.messages) == ([], 40_000)
    damage(world.path / segment.key)
    assert len((await world.verify())[1]) == 1
