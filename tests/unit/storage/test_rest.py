"""At rest: when a topic goes there, and how appends get it out, in order and after the record says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sava.errors import RetryableError
from sava.metadata.errors import Unavailable
from sava.storage.broker_storage import StorageOptions
from sava.storage.errors import MarkDirtyFailed, SequenceGap
from sava.storage.journal import JournalOptions
from sava.storage.topic_log import LogStatus
from tests.support.storage import (
    TOPIC,
    Cluster,
    append_each,
    batch,
    contents,
    expected,
    numbered,
)
from tests.unit.storage.faults import UNAVAILABLE, UNKNOWN, FaultyMetadata, lose_answer, refuse
from tests.unit.storage.resting import (
    QUICK,
    TOLD,
    Held,
    lose_sight,
    marked,
    opened,
    resting,
    state_of,
    store,
)


@pytest.fixture
def cluster(tmp_path: Path, metadata: FaultyMetadata) -> Cluster:
    return Cluster(tmp_path, metadata=metadata)


# -- by itself -------------------------------------------------------------------------------------


async def test_an_idle_topic_rests_and_the_next_append_wakes_it(cluster: Cluster) -> None:
    async with cluster.broker(options=QUICK) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        for end in (3, 4, 10):
            await append_each(log, log.next_offset, end)
            assert not (await state_of(cluster)).is_clean
            assert (await marked(cluster, is_clean=True)).end == end
        assert await contents(log) == expected(0, 10)


async def test_a_topic_that_was_never_appended_to_is_at_rest_and_costs_nothing(
    cluster: Cluster, metadata: FaultyMetadata
) -> None:
    async with cluster.broker(options=QUICK) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        assert (await state_of(cluster)).is_clean
        assert log._marker._timer is None
        assert metadata.calls.count("txn") == 1, "the claim"


async def test_a_topic_at_rest_has_no_timer(cluster: Cluster) -> None:
    async with cluster.broker(options=TOLD) as broker:
        log = await opened(broker)
        timer = log._marker._timer
        assert timer is not None
        timer.cancel()
        await resting(log)
        assert log._marker._timer is None
        assert (await state_of(cluster)).is_clean


async def test_a_topic_with_a_tail_does_not_rest(cluster: Cluster) -> None:
    async with cluster.broker(options=TOLD) as broker:
        log = await opened(broker)
        await append_each(log, 5, 6)
        log._marker._due()
        assert log._marker._task is None, "the upload will say when"
        await store(log)
        await resting(log)
        assert (await state_of(cluster)).is_clean


async def test_a_topic_that_is_opened_awake_and_without_a_tail_comes_to_rest(cluster: Cluster) -> None:
    async with cluster.broker(options=TOLD) as broker:
        await opened(broker)
    assert not (await state_of(cluster)).is_clean
    async with cluster.broker(options=QUICK) as broker:
        log = await broker.open_topic(TOPIC, epoch=2)
        await marked(cluster, is_clean=True)
        await append_each(log, 5, 6)


async def test_a_wake_of_which_nothing_came_is_followed_by_rest(cluster: Cluster) -> None:
    async with cluster.broker(options=QUICK) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        with pytest.raises(SequenceGap):
            await log.append(batch("lost before", producer=5, sequence=9))
        assert not (await state_of(cluster)).is_clean
        await marked(cluster, is_clean=True)


async def test_rest_that_is_refused_leaves_the_topic_awake_and_is_tried_again(
    cluster: Cluster, metadata: FaultyMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had no effect, so appends need not wait for the metadata store to come back."""
    monkeypatch.setattr("sava.storage.clean_marker._FIRST_PAUSE_S", 0.02)
    async with cluster.broker(options=TOLD) as broker:
        log = await opened(broker)
        metadata.plan("txn", refuse(UNAVAILABLE))
        await resting(log)
        metadata.calls.clear()
        await append_each(log, 5, 6)
        assert metadata.calls == []
        await store(log)
        metadata.plan("txn", refuse(UNAVAILABLE), refuse(UNAVAILABLE))
        await resting(log)
        await marked(cluster, is_clean=True)
        assert metadata.is_done


# -- appends that come while the record is written ------------------------------------------------------


async def test_appends_wait_for_the_rest_under_way_and_share_one_wake(
    cluster: Cluster, metadata: FaultyMetadata
) -> None:
    async with cluster.broker(options=TOLD) as broker:
        log = await opened(broker)
        held = Held()
        metadata.plan("txn", held)
        resting(log)
        await held.has_come.wait()
        tasks = [asyncio.create_task(log.append(numbered(n, n + 1))) for n in range(5, 25)]
        await asyncio.sleep(0.01)
        assert log.assigned_offset == 5
        assert broker.journal.holdings.topic_ids == [], (
            "no frame before the record says that there may be one"
        )
        metadata.calls.clear()
        held.may_go_on.set()
        assert await asyncio.gather(*tasks) == list(range(5, 25))
        assert metadata.calls.count("txn") == 1
        assert not (await state_of(cluster)).is_clean


async def test_the_first_frame_comes_after_the_wake(cluster: Cluster, metadata: FaultyMetadata) -> None:
    async with cluster.broker(options=TOLD) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        held = Held()
        metadata.plan("txn", held)
        appending = asyncio.create_task(log.append(numbered(0, 1)))
        await held.has_come.wait()
        assert (log.assigned_offset, broker.journal.holdings.topic_ids) == (0, [])
        held.may_go_on.set()
        assert await appending == 0


@pytest.mark.parametrize("room", [1 << 20, 300])
async def test_nobody_overtakes_those_who_waited_for_the_wake(cluster: Cluster, room: int) -> None:
    """Appends come in every turn of the event loop: before the wake, while it is written, when it is answered
    and those who waited have yet to run; with room in the journal for many, or for one at a time."""
    options = StorageOptions(upload=TOLD.upload, journal=JournalOptions(max_in_flight_bytes=room))
    async with cluster.broker(options=options) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        for _ in range(3):
            tasks = []
            first = log.next_offset
            for n in range(first, first + 40):
                tasks.append(asyncio.create_task(log.append(numbered(n, n + 1))))
                await asyncio.sleep(0)
            assert await asyncio.gather(*tasks) == list(range(first, first + 40))
            await store(log)
            await resting(log)
        assert await contents(log) == expected(0, 120)


async def test_callers_who_leave_the_line_do_not_hold_it_up(
    cluster: Cluster, metadata: FaultyMetadata
) -> None:
    async with cluster.broker(options=TOLD) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        held = Held()
        metadata.plan("txn", held)
        tasks = [asyncio.create_task(log.append(batch(f"{n}"))) for n in range(10)]
        await held.has_come.wait()
        for task in tasks[::2]:
            task.cancel()
        held.may_go_on.set()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        assert done[1::2] == [0, 1, 2, 3, 4]
        assert await contents(log) == ["1", "3", "5", "7", "9"]
        assert not log._marker.is_on


async def test_everybody_leaving_during_a_rest_does_not_open_the_way(
    cluster: Cluster, metadata: FaultyMetadata
) -> None:
    """The rest is still being written; whoever comes next must wait for it."""
    async with cluster.broker(options=TOLD) as broker:
        log = await opened(broker)
        held = Held()
        metadata.plan("txn", held)
        resting(log)
        leaving = asyncio.create_task(log.append(numbered(5, 6)))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        staying = asyncio.create_task(log.append(numbered(5, 6)))
        await held.has_come.wait()
        assert log.assigned_offset == 5
        held.may_go_on.set()
        assert await staying == 5
        assert not (await state_of(cluster)).is_clean


async def test_no_rest_while_an_append_waits_for_room(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has passed the place where it would wake the topic."""
    async with cluster.broker(options=TOLD) as broker:
        log = await opened(broker)
        room = asyncio.Event()
        monkeypatch.setattr(broker.journal, "reserve", lambda size: room.wait())
        appending = asyncio.create_task(log.append(numbered(5, 6)))
        await asyncio.sleep(0)
        log._marker._due()
        assert log._marker._task is None
        assert log._marker._timer is not None, "it is asked again: the append may come to nothing"
        room.set()
        assert await appending == 5
        assert not (await state_of(cluster)).is_clean


# -- wakes that fail ---------------------------------------------------------------------------------------


async def test_a_wake_that_is_refused_refuses_all_who_wait(
    cluster: Cluster, metadata: FaultyMetadata
) -> None:
    async with cluster.broker(options=TOLD) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        metadata.plan("txn", refuse(UNAVAILABLE))
        outcomes = await asyncio.gather(*(log.append(batch("x")) for _ in range(3)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Unavailable] * 3
        assert (await state_of(cluster)).is_clean
        assert broker.journal.holdings.topic_ids == []
        assert log.status is LogStatus.OPEN
        await append_each(log, 0, 3)


@pytest.mark.parametrize("how", [lose_answer, refuse])
async def test_a_wake_of_unknown_outcome_appends_nothing_and_can_be_tried_again(
    cluster: Cluster, metadata: FaultyMetadata, how: Callable[..., Any]
) -> None:
    async with cluster.broker(options=TOLD) as broker:
        log = await opened(broker)
        await resting(log)
        lose_sight(metadata, how(UNKNOWN))
        with pytest.raises(MarkDirtyFailed) as caught:
            await log.append(numbered(5, 6))
        assert isinstance(caught.value, RetryableError)
        assert log.next_offset == log.assigned_offset == 5
        assert broker.journal.holdings.topic_ids == []
        await append_each(log, 5, 7)
        assert not (await state_of(cluster)).is_clean


async def test_a_wake_in_doubt_that_nobody_follows_up_is_followed_by_rest(
    cluster: Cluster, metadata: FaultyMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sava.storage.clean_marker._FIRST_PAUSE_S", 0.02)
    async with cluster.broker(options=TOLD) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        lose_sight(metadata, lose_answer(UNKNOWN))
        with pytest.raises(MarkDirtyFailed):
            await log.append(numbered(0, 1))
        await marked(cluster, is_clean=True)
