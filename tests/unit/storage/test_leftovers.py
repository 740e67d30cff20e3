"""Frames of topics that are not open here: let go when nobody needs them, kept when somebody may."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from sava.metadata.errors import Unavailable
from sava.storage import keys, orphans
from sava.storage.broker_storage import TopicBusy
from sava.storage.errors import CatalogCorrupt
from sava.storage.orphans import Needless, needless, topic_states
from sava.storage.types import TopicKey, TopicState
from tests.support.storage import (
    OTHER,
    TOPIC,
    Cluster,
    append_each,
    batch,
    contents,
    expected,
    small_files,
)
from tests.unit.storage.faults import FaultyMetadata, refuse

OURS, THEIRS = "ours", "theirs"
IDS_END = 1 << 40


@pytest.fixture
def cluster(tmp_path: Path, metadata: FaultyMetadata) -> Cluster:
    return Cluster(tmp_path, metadata=metadata)


async def leave(cluster: Cluster, topic: TopicKey, end: int, *, epoch: int = 1) -> None:
    """Broker a has the topic, appends and stops; what it appended is in its journal only."""
    async with cluster.broker("a") as storage:
        log = await storage.open_topic(topic, epoch=epoch)
        await append_each(log, log.next_offset, end)


def state(**fields: object) -> TopicState:
    known = {"topic_id": 7, "epoch": 5, "storage_id": OURS, "end": 20, "sealed": False}
    return msgspec.convert(known | fields, TopicState)


@pytest.mark.parametrize(
    ("found", "epoch", "verdict"),
    [
        (None, 5, Needless(0, 0)),  # deleted
        (state(), 5, Needless(20, None)),  # the tail is here
        (state(is_clean=True), 5, Needless(20, None)),  # may wake, and have a tail, under the same epoch
        (state(sealed=True), 5, Needless(20, 20)),  # handed over by us
        (state(storage_id=THEIRS, sealed=True), 3, Needless(20, 20)),
        (state(storage_id=THEIRS), 3, Needless(20, 20)),  # moved away
        (state(), 3, Needless(20, None)),  # claimed by us, nothing appended since
        (state(sealed=True), 6, Needless(20, None)),  # came back to us since the state was read
        (state(storage_id=THEIRS), 6, Needless(20, None)),
        (state(storage_id=THEIRS), 5, Needless(20, None)),  # two owners of one epoch: judged by nobody here
    ],
)
def test_what_is_needless(found: TopicState | None, epoch: int, verdict: Needless) -> None:
    assert needless(found, storage_id=OURS, epoch=epoch) == verdict


async def test_a_deleted_topic_goes_and_its_neighbour_stays(cluster: Cluster) -> None:
    await leave(cluster, TOPIC, 5)
    await leave(cluster, OTHER, 3)
    await cluster.catalog(TOPIC).delete_all()
    async with cluster.broker("a") as storage:
        assert set(storage.leftovers) == {TOPIC.topic_id, OTHER.topic_id}
        assert await storage.release_leftovers(ids_end=IDS_END) == [TOPIC.topic_id]
        assert storage.leftovers == [OTHER.topic_id]
    async with cluster.broker("a") as storage:
        assert storage.leftovers == [OTHER.topic_id], "it does not come back"
        assert await contents(await storage.open_topic(OTHER, epoch=2)) == expected(0, 3)


async def test_a_deleted_topic_whose_name_has_a_new_one(cluster: Cluster) -> None:
    await leave(cluster, TOPIC, 5)
    await cluster.catalog(TOPIC).delete_all()
    again = TopicKey(TOPIC.namespace, TOPIC.name, TOPIC.topic_id + 1)
    await leave(cluster, again, 2)
    async with cluster.broker("a") as storage:
        assert await storage.release_leftovers(ids_end=IDS_END) == [TOPIC.topic_id]
        assert await contents(await storage.open_topic(again, epoch=2)) == expected(0, 2)


async def test_a_topic_that_waits_for_its_owner_keeps_its_tail(cluster: Cluster) -> None:
    await leave(cluster, TOPIC, 5)
    async with cluster.broker("a") as storage:
        assert await storage.release_leftovers(ids_end=IDS_END) == []
        log = await storage.open_topic(TOPIC, epoch=2)
        assert await contents(log) == expected(0, 5)


async def test_a_topic_that_moved_away_with_a_tail_given_up(cluster: Cluster) -> None:
    """An operator seals it without the last frames of a; b goes on from there."""
    await leave(cluster, TOPIC, 5)
    await cluster.catalog().seal(epoch=1, end=0, producers=(), origins=())
    async with cluster.broker("b") as elsewhere:
        log = await elsewhere.open_topic(TOPIC, epoch=2)
        await log.append(batch("other"))
        async with cluster.broker("a", small_files()) as storage:
            assert await storage.release_leftovers(ids_end=IDS_END) == [TOPIC.topic_id]
            assert storage.journal.held_bytes < 300
        await log.seal()
    async with cluster.broker("a") as storage:
        assert storage.leftovers == []
        log = await storage.open_topic(TOPIC, epoch=3)
        assert await contents(log) == ["other"]


async def test_frames_whose_release_was_lost(cluster: Cluster) -> None:
    """The topic was handed over, and the note of it in the journal did not survive."""
    async with cluster.broker("a") as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 4)
        (path,) = (cluster.path / "a").glob("log-*")
        before = path.read_bytes()
        await log.seal()
    path.write_bytes(before)
    async with cluster.broker("b") as elsewhere:
        await append_each(await elsewhere.open_topic(TOPIC, epoch=2), 4, 6)
        async with cluster.broker("a") as storage:
            assert storage.leftovers == [TOPIC.topic_id]
            assert await storage.release_leftovers(ids_end=IDS_END) == [TOPIC.topic_id]


async def test_metadata_that_cannot_be_read_condemns_nothing(
    cluster: Cluster, metadata: FaultyMetadata
) -> None:
    await leave(cluster, TOPIC, 5)
    await cluster.catalog().delete_all()
    async with cluster.broker("a") as storage:
        metadata.plan("range", refuse(Unavailable("no leader")))
        with pytest.raises(Unavailable):
            await storage.release_leftovers(ids_end=IDS_END)
        assert storage.leftovers == [TOPIC.topic_id]
        await metadata.put(keys.state_key(OTHER), b"not a state")
        with pytest.raises(CatalogCorrupt):
            await storage.release_leftovers(ids_end=IDS_END)
        assert storage.leftovers == [TOPIC.topic_id]


async def test_a_topic_that_is_opened_while_the_states_are_read(
    cluster: Cluster, metadata: FaultyMetadata
) -> None:
    """It was sealed elsewhere when its state was read; then it came back, got a message, and was closed."""
    await leave(cluster, TOPIC, 2)
    await cluster.catalog().seal(epoch=1, end=0, producers=(), origins=())
    async with cluster.broker("a") as storage:

        async def slowly(call: object) -> object:
            page = await call()  # type: ignore[operator]
            log = await storage.open_topic(TOPIC, epoch=2)
            await log.append(batch("new"))
            await log.close()
            return page

        metadata.plan("range", slowly)
        assert await storage.release_leftovers(ids_end=IDS_END) == []
        log = await storage.open_topic(TOPIC, epoch=3)
        assert await contents(log) == ["new"]
        assert await storage.release_leftovers(ids_end=IDS_END) == []


async def test_nothing_is_asked_when_nothing_is_left(cluster: Cluster, metadata: FaultyMetadata) -> None:
    async with cluster.broker("a") as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 2)
        metadata.calls.clear()
        assert await storage.release_leftovers(ids_end=IDS_END) == []
        assert metadata.calls == []


async def test_a_topic_cannot_be_opened_while_it_is_let_go(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leave(cluster, TOPIC, 5)
    await cluster.catalog().delete_all()
    async with cluster.broker("a") as storage:
        disown, begun, may_end = storage.journal.disown, asyncio.Event(), asyncio.Event()

        async def slowly(topic_id: int, offset: int) -> None:
            begun.set()
            await may_end.wait()
            await disown(topic_id, offset)

        monkeypatch.setattr(storage.journal, "disown", slowly)
        releasing = asyncio.create_task(storage.release_leftovers(ids_end=IDS_END))
        await begun.wait()
        with pytest.raises(TopicBusy):
            await storage.open_topic(TOPIC, epoch=2)
        may_end.set()
        assert await releasing == [TOPIC.topic_id]


async def test_states_are_found_among_many_descriptors(
    cluster: Cluster, metadata: FaultyMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orphans, "PAGE", 3)
    for number in range(5):
        topic = TopicKey("default", f"topic-{number}", number)
        for start in range(4 * number):
            await metadata.put(keys.segment_key(topic, start), b"descriptor")
        value = msgspec.json.encode(state(topic_id=number))
        await metadata.put(keys.state_key(topic), value)
    await metadata.put("/storage/topics/default/topic-9/states", b"something else")
    metadata.calls.clear()
    assert set(await topic_states(cluster.metadata)) == set(range(5))
    assert len(metadata.calls) <= 10, "the descriptors of a topic are passed over"


async def test_a_topic_of_another_cluster_is_left_alone(cluster: Cluster) -> None:
    """Its id was never given out by this metadata store: that no state names it proves nothing."""
    await leave(cluster, TOPIC, 5)
    await cluster.metadata.delete_prefix(keys.topic_prefix(TOPIC))

    async with cluster.broker("a") as storage:
        assert await storage.release_leftovers(ids_end=TOPIC.topic_id) == []
        assert storage.leftovers == [TOPIC.topic_id]
        assert await storage.release_leftovers(ids_end=TOPIC.topic_id + 1) == [TOPIC.topic_id]
