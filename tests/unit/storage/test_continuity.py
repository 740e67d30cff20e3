"""Offsets go on over moves, restarts and deletions: nothing lost, nothing renumbered, nothing invented."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from sava.metadata.errors import Unavailable
from sava.records import RecordBatch
from sava.storage.catalog import Catalog
from sava.storage.errors import DataGap, EpochTaken, Fenced, TailElsewhere, TopicSealed
from sava.storage.journal_index import JournalCorrupt
from sava.storage.segment import write_segment
from sava.storage.topic_log import LogStatus, TopicClosed
from sava.storage.types import TopicKey
from tests.support.memory_store import MemoryStore
from tests.support.storage import (
    EAGER,
    FORGETFUL,
    LAZY,
    TOPIC,
    Cluster,
    append_each,
    batch,
    contents,
    expected,
    numbered,
    small_files,
)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


async def move(cluster: Cluster, broker: str, epoch: int, start: int, end: int) -> None:
    """One broker's turn: it goes on at ``start``, appends up to ``end`` and hands over."""
    async with cluster.broker(broker) as storage:
        log = await storage.open_topic(TOPIC, epoch=epoch)
        assert log.next_offset == start
        await append_each(log, start, end)
        assert await contents(log) == expected(0, end)
        state = await log.seal()
        assert (state.end, state.sealed, state.epoch) == (end, True, epoch)


async def test_the_next_owner_goes_on_at_22_and_a_cursor_at_6_misses_nothing(cluster: Cluster) -> None:
    await move(cluster, "a", 1, 0, 22)
    async with cluster.broker("b") as storage:
        log = await storage.open_topic(TOPIC, epoch=2)
        assert log.next_offset == 22
        await append_each(log, 22, 28)
        assert log.stored_offset == 22, "22.. are in the journal of b"
        assert await contents(log, 6) == expected(6, 28)
        assert await contents(log, 6, 22) == expected(6, 22)


async def test_topics_that_come_and_go_leave_nothing_in_the_memory_of_a_broker(cluster: Cluster) -> None:
    """Each closed log was kept for an opening that might come: with its segments and producers, for every
    topic that was ever here."""
    async with cluster.broker("a") as storage:
        logs = [await storage.open_topic(TopicKey("d", f"t{n}", n), epoch=1) for n in range(1, 4)]
        sealed, closed, staying = logs
        for log in logs:
            await append_each(log, 0, 2)
        await sealed.seal()
        gone = [weakref.ref(sealed), weakref.ref(closed)]
        for log in (sealed, closed):
            await log.close()
        logs.clear()
        del sealed, closed, log
        for _ in range(4):
            await asyncio.sleep(0)  # what was called back in these turns of the loop is let go
        gc.collect()
        assert [each() for each in gone] == [None, None]
        again = await storage.open_topic(TopicKey("d", "t2", 2), epoch=2)
        assert (again.next_offset, staying.next_offset) == (2, 2)


async def test_back_to_a_broker_that_still_has_old_files(cluster: Cluster) -> None:
    for turn, broker in enumerate("ab"):
        await move(cluster, broker, turn + 1, 22 * turn, 22 * turn + 22)
    assert list((cluster.path / "a").glob("log-*"))
    await move(cluster, "a", 3, 44, 50)
    await move(cluster, "b", 4, 50, 51)


async def test_several_moves_in_a_row(cluster: Cluster) -> None:
    end = 0
    for turn in range(9):
        await move(cluster, "abc"[turn % 3], turn + 1, end, end + turn * 3 % 7)
        end += turn * 3 % 7


@pytest.mark.parametrize("ending", ["handed over", "fenced", "dropped"])
async def test_a_topic_that_has_gone_leaves_nothing_in_memory(cluster: Cluster, ending: str) -> None:
    """Topics come and go for as long as a broker lives. Each that had gone to another broker, and was deleted
    there, stayed in the memory of every broker that had ever had it, with its producers."""
    async with cluster.broker("a", LAZY) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 3)
        if ending == "handed over":
            await log.seal()
        elif ending == "fenced":
            log.fence(Fenced(TOPIC.path, 1, 2))
        await log.close()
        gone = weakref.ref(log)
        del log
        async with asyncio.timeout(20):
            while gone() is not None:  # callbacks and the uploader's thread let go of it in their own time
                gc.collect()
                await asyncio.sleep(0.01)
        with pytest.raises(Fenced if ending != "handed over" else TopicSealed):
            await storage.open_topic(TOPIC, epoch=0 if ending != "handed over" else 1)
        again = await storage.open_topic(TOPIC, epoch=2)
        assert await contents(again) == expected(0, 3)


async def test_an_empty_topic_starts_at_0_however_often_it_moves(cluster: Cluster) -> None:
    for turn in range(4):
        await move(cluster, "ab"[turn % 2], turn + 1, 0, 0)
    assert await cluster.object_count() == 0
    await move(cluster, "a", 5, 0, 1)
    await move(cluster, "b", 6, 1, 2)


async def test_a_topic_deleted_and_made_again_under_its_name_starts_anew(cluster: Cluster) -> None:
    again = TopicKey(TOPIC.namespace, TOPIC.name, TOPIC.topic_id + 1)
    async with cluster.broker("a") as storage:
        log = await storage.open_topic(TOPIC, epoch=3)
        await append_each(log, 0, 5)
        await cluster.catalog().delete_all()
        log = await storage.open_topic(again, epoch=1)
        assert log.next_offset == 0
        await log.append(batch("new"))
    async with cluster.broker("a") as storage:
        assert set(storage.leftovers) == {TOPIC.topic_id, again.topic_id}
        log = await storage.open_topic(again, epoch=2)
        assert await contents(log) == ["new"]
        await log.seal()
    async with cluster.broker("b") as storage:
        log = await storage.open_topic(again, epoch=3)
        assert await contents(log) == ["new"]
        assert log.next_offset == 1


async def test_the_owner_of_a_deleted_topic_is_refused(cluster: Cluster) -> None:
    again = TopicKey(TOPIC.namespace, TOPIC.name, TOPIC.topic_id + 1)
    async with cluster.broker("a") as old, cluster.broker("b") as new:
        zombie = await old.open_topic(TOPIC, epoch=3)
        await append_each(zombie, 0, 5)
        log = await new.open_topic(again, epoch=1)
        await log.append(batch("new"))
        with pytest.raises(Fenced):
            await zombie.seal()
        assert zombie.status is LogStatus.FENCED
        assert await contents(log) == ["new"]


@pytest.mark.parametrize("options", [LAZY, EAGER, FORGETFUL])
@pytest.mark.parametrize("same_epoch", [True, False])
async def test_a_broker_that_restarts_goes_on_from_its_journal(
    cluster: Cluster, options: object, same_epoch: bool
) -> None:
    end = 0
    for life in range(5):
        async with cluster.broker(options=small_files(options)) as storage:  # type: ignore[arg-type]
            log = await storage.open_topic(TOPIC, epoch=1 if same_epoch else life + 1)
            assert log.next_offset == end
            assert await contents(log) == expected(0, end)
            await append_each(log, end, end + 30)
            end += 30
            if life == 2:
                await log._parts.uploader.flush(log._backlog, end - 10)


async def test_a_topic_whose_tail_is_on_another_disk_waits_for_it(cluster: Cluster) -> None:
    async with cluster.broker("a") as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 5)
    async with cluster.broker("b") as storage:
        with pytest.raises(TailElsewhere):
            await storage.open_topic(TOPIC, epoch=2)
    async with cluster.broker("a") as storage:
        log = await storage.open_topic(TOPIC, epoch=3)
        assert await contents(log) == expected(0, 5)
        await log.seal()
    await move(cluster, "b", 4, 5, 6)


async def test_a_tail_that_was_given_up_never_comes_back(cluster: Cluster) -> None:
    """An operator seals the topic at 5 while broker a, with 5..9, is away. Whatever a does later, and
    whenever it crashes, 5..9 are what the next owners made of them."""
    async with cluster.broker("a") as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 5)
        await log._parts.uploader.flush(log._backlog, 5)
        for _ in range(4):
            await log.append(batch("given up"))
    await cluster.catalog().seal(epoch=1, end=5, producers=(), origins=())
    async with cluster.broker("a") as storage:  # claims, and is gone before it appends anything
        assert (await storage.open_topic(TOPIC, epoch=2)).next_offset == 5
    async with cluster.broker("a") as storage:
        log = await storage.open_topic(TOPIC, epoch=3)
        assert log.next_offset == 5
        await append_each(log, 5, 7)
    await_next = await cluster.start("a")
    log = await await_next.open_topic(TOPIC, epoch=4)
    assert await contents(log) == expected(0, 7)
    await await_next.close()


# -- unknown is not empty ----------------------------------------------------------------------------


class Unreadable(MemoryStore):
    is_up = True

    async def get(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_up:
            raise Unavailable("no leader")
        return await super().get(*args, **kwargs)


async def test_a_state_that_cannot_be_read_is_a_failure_to_open(tmp_path: Path) -> None:
    metadata = Unreadable()
    cluster = Cluster(tmp_path, metadata=metadata)
    await move(cluster, "a", 1, 0, 22)
    async with cluster.broker("b") as storage:
        metadata.is_up = False
        with pytest.raises(Unavailable):
            await storage.open_topic(TOPIC, epoch=2)
        assert storage.topics == {}
        metadata.is_up = True
        log = await storage.open_topic(TOPIC, epoch=2)
        assert log.next_offset == 22


async def test_frames_of_a_topic_unknown_to_metadata_are_not_overwritten(tmp_path: Path) -> None:
    """The metadata of another cluster, or an old copy of it: starting at 0 would renumber what is there."""
    async with (before := Cluster(tmp_path)).broker() as storage:
        await append_each(await storage.open_topic(TOPIC, epoch=1), 0, 3)
    async with Cluster(tmp_path).broker() as storage:
        with pytest.raises(JournalCorrupt):
            await storage.open_topic(TOPIC, epoch=1)
    async with before.broker() as storage:
        assert await contents(await storage.open_topic(TOPIC, epoch=2)) == expected(0, 3)


async def test_a_journal_that_begins_behind_the_segments_is_a_gap(cluster: Cluster) -> None:
    options = small_files()
    async with cluster.broker(options=options) as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        for offset in range(60):
            await log.append(batch(str(offset) + "x" * 200))
    files = sorted((cluster.path / "a").glob("log-*"))
    assert len(files) > 3
    files[0].unlink()
    async with cluster.broker(options=options) as storage:
        with pytest.raises(DataGap):
            await storage.open_topic(TOPIC, epoch=2)


async def test_a_lost_object_is_a_gap_and_not_the_next_offset(cluster: Cluster) -> None:
    await move(cluster, "a", 1, 0, 10)
    await move(cluster, "a", 2, 10, 20)
    first = (await cluster.catalog().segments())[0]
    await cluster.store.delete([first.key])
    async with cluster.broker("b") as storage:
        log = await storage.open_topic(TOPIC, epoch=3)
        with pytest.raises(DataGap):
            await contents(log)
        assert await contents(log, 10) == expected(10, 20)


# -- two owners ----------------------------------------------------------------------------------------


async def test_an_old_epoch_is_refused_wherever_it_writes(cluster: Cluster) -> None:
    async with cluster.broker("a") as old, cluster.broker("b") as new:
        zombie = await old.open_topic(TOPIC, epoch=1)
        await append_each(zombie, 0, 3)
        await zombie._parts.uploader.flush(zombie._backlog, 3)
        await zombie.append(batch("on its way"))
        # By an operator: a counts as lost.
        await cluster.catalog().seal(epoch=1, end=3, producers=(), origins=())
        log = await new.open_topic(TOPIC, epoch=2)
        await append_each(log, 3, 6)
        with pytest.raises(Fenced):
            await zombie.seal()
        with pytest.raises(Fenced):
            await zombie.append(batch("too late"))
        with pytest.raises(Fenced):
            await old.open_topic(TOPIC, epoch=1)
        with pytest.raises(EpochTaken):
            await old.open_topic(TOPIC, epoch=2)
        await log.seal()
        assert await contents(log) == expected(0, 6)


async def test_a_sealed_epoch_is_over(cluster: Cluster) -> None:
    async with cluster.broker("a") as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 3)
        await log.seal()
        with pytest.raises(TopicClosed):
            await log.append(batch("late"))
        with pytest.raises(TopicSealed):
            await storage.open_topic(TOPIC, epoch=1)
        assert (await storage.open_topic(TOPIC, epoch=2)).next_offset == 3


async def test_a_registration_left_behind_by_an_earlier_life_is_adopted(cluster: Cluster) -> None:
    """The broker restarts while its registration is under way; it takes effect after the state was read."""
    async with cluster.broker("a") as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 6)
    placed: list[RecordBatch] = [
        numbered(0, 4).assigned(topic_id=TOPIC.topic_id, epoch=1, base_offset=0),
    ]
    async with cluster.broker("a") as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        late = await write_segment(cluster.store, TOPIC, epoch=1, batches=placed, created_ms=1)
        await Catalog(cluster.metadata, TOPIC).register(late, epoch=1, producers=(), origins=())
        await append_each(log, 6, 8)
        assert (await log.seal()).end == 8
        assert await contents(log) == expected(0, 8)
        assert [(each.start, each.end) for each in await cluster.catalog().segments()] == [(0, 4), (4, 8)]


async def test_an_owner_that_was_fenced_and_comes_back_knows_its_producers(cluster: Cluster) -> None:
    """A broker stands still until others take it for gone ─▶ it is told that its right is over ─▶ nobody else
    can have the topic, whose tail is on its disk, and it takes it up again. Batches that were acknowledged,
    and those that were written and could not be acknowledged any more, are in the topic once: whoever repeats
    them gets their offsets."""
    async with cluster.broker() as storage:
        log = await storage.open_topic(TOPIC, epoch=1)
        for sequence in range(3):
            assert await log.append(batch(str(sequence), producer=5, sequence=sequence)) == sequence
        in_flight = await log.begin(batch("3", producer=5, sequence=3))
        log.fence(Fenced(TOPIC.path, 1, 1, "it has another owner by now"))
        with pytest.raises(Fenced):
            await in_flight
        await log.close()
        log = await storage.open_topic(TOPIC, epoch=2)
        assert log.next_offset == 4
        assert log.next_sequence(5) == 4
        for sequence in range(4):
            assert await log.append(batch(str(sequence), producer=5, sequence=sequence)) == sequence
        assert await log.append(batch("4", producer=5, sequence=4)) == 4
        assert await contents(log) == expected(0, 5)
