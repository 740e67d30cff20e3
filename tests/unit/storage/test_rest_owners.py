"""At rest: an idle topic can be taken over without its owner, and no message is ever lost for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sava.storage.errors import Fenced, TailElsewhere
from sava.storage.journal_index import JournalCorrupt
from sava.storage.topic_log import LogStatus, TopicClosed, TopicLog
from tests.support.storage import (
    LAZY,
    TOPIC,
    Cluster,
    append_each,
    batch,
    contents,
    expected,
    numbered,
    wake,
)
from tests.unit.storage.faults import UNKNOWN, FaultyMetadata, before, lose_answer
from tests.unit.storage.resting import (
    QUICK,
    TOLD,
    Held,
    Late,
    lose_sight,
    marked,
    opened,
    resting,
    state_of,
)


@pytest.fixture
def cluster(tmp_path: Path, metadata: FaultyMetadata) -> Cluster:
    return Cluster(tmp_path, metadata=metadata)


# -- rests of unknown outcome --------------------------------------------------------------------------------


async def test_a_late_rest_finds_the_topic_awake(cluster: Cluster, metadata: FaultyMetadata) -> None:
    """The rest's answer is lost, and the record says 'awake' when the next append looks:

        rest sent ─▶ no answer ─▶ append: the record says 'awake' ─▶ 5 is acknowledged
                                  the rest takes effect: 'nothing beyond 5' ─▶ B gives out 5 again

    So the append writes the record before, and the rest comes too late."""
    async with cluster.broker("a", TOLD) as here, cluster.broker("b", TOLD) as there:
        log = await opened(here)
        late = Late()
        lose_sight(metadata, late)
        await resting(log)
        assert not (await state_of(cluster)).is_clean
        await append_each(log, 5, 6)
        assert not (await late.arrive()).succeeded
        with pytest.raises(TailElsewhere):
            await there.open_topic(TOPIC, epoch=2)
        await append_each(log, 6, 8)
        assert await contents(log) == expected(0, 8)


async def test_a_late_rest_of_an_earlier_opening_finds_the_topic_awake(
    cluster: Cluster, metadata: FaultyMetadata
) -> None:
    """As above, with the topic closed and opened again under the same epoch in between, which writes nothing:
    an opening without a tail does not believe 'awake'."""
    async with cluster.broker("a", TOLD) as here, cluster.broker("b", TOLD) as there:
        log = await opened(here)
        late = Late()
        lose_sight(metadata, late)
        await resting(log)
        await log.close()
        log = await here.open_topic(TOPIC, epoch=1)
        await append_each(log, 5, 6)
        assert not (await late.arrive()).succeeded
        with pytest.raises(TailElsewhere):
            await there.open_topic(TOPIC, epoch=2)


async def test_a_rest_of_unknown_outcome_counts_as_rest(cluster: Cluster, metadata: FaultyMetadata) -> None:
    """It took effect, B went on, and A, which was never told of either, acknowledges nothing."""
    async with cluster.broker("a", TOLD) as here, cluster.broker("b", TOLD) as there:
        old = await opened(here)
        lose_sight(metadata, lose_answer(UNKNOWN))
        await resting(old)
        new = await there.open_topic(TOPIC, epoch=2)
        with pytest.raises(Fenced):
            await old.append(batch("never told to anybody"))
        await append_each(new, 5, 8)
        assert await contents(new) == expected(0, 8)


# -- the next owner ------------------------------------------------------------------------------------------


async def test_the_owner_rests_and_dies_and_another_goes_on(cluster: Cluster) -> None:
    """A: append 0..5, upload, rest, gone for ever. B: claims at 5; what A was told of producers is known."""
    async with cluster.broker("a", QUICK) as here:
        log = await here.open_topic(TOPIC, epoch=1)
        await log.append(numbered(0, 5, producer=9))
        await marked(cluster, is_clean=True)
    async with cluster.broker("b", TOLD) as there:
        log = await there.open_topic(TOPIC, epoch=2)
        assert log.next_offset == 5
        assert await log.append(numbered(0, 5, producer=9)) == 0, "repeated"
        assert await log.append(numbered(5, 6, producer=9, sequence=5)) == 5
        assert await contents(log) == expected(0, 6)


async def test_the_owner_wakes_and_appends_and_dies_and_the_topic_waits_for_it(cluster: Cluster) -> None:
    async with cluster.broker("a", TOLD) as here:
        log = await opened(here)
        await resting(log)
        await append_each(log, 5, 6)
    async with cluster.broker("b", TOLD) as there:
        with pytest.raises(TailElsewhere):
            await there.open_topic(TOPIC, epoch=2)
    async with cluster.broker("a", TOLD) as here:
        log = await here.open_topic(TOPIC, epoch=3)
        await append_each(log, 6, 8)
        assert await contents(log) == expected(0, 8)


async def test_the_owner_wakes_and_dies_before_it_appends_and_comes_back(cluster: Cluster) -> None:
    """Only its disk knows that nothing followed the wake."""
    async with cluster.broker("a", TOLD) as here:
        await wake(await opened(here))
    async with cluster.broker("b", TOLD) as there:
        with pytest.raises(TailElsewhere):
            await there.open_topic(TOPIC, epoch=2)
    async with cluster.broker("a", QUICK) as here:
        await here.open_topic(TOPIC, epoch=3)
        await marked(cluster, is_clean=True)
    async with cluster.broker("b", TOLD) as there:
        await append_each(await there.open_topic(TOPIC, epoch=4), 5, 6)


async def test_the_old_owner_at_rest_is_fenced_by_its_first_append(cluster: Cluster) -> None:
    async with cluster.broker("a", TOLD) as here, cluster.broker("b", TOLD) as there:
        old = await opened(here)
        await resting(old)
        new = await there.open_topic(TOPIC, epoch=2)
        outcomes = await asyncio.gather(*(old.append(batch("x")) for _ in range(3)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Fenced] * 3
        assert old.status is LogStatus.FENCED
        assert here.journal.holdings.topic_ids == []
        await append_each(new, 5, 8)
        with pytest.raises(Fenced):
            await old.append(batch("x"))
        assert await contents(new) == expected(0, 8)


async def test_a_claim_between_the_read_and_the_write_of_a_wake(
    cluster: Cluster, metadata: FaultyMetadata
) -> None:
    async with cluster.broker("a", TOLD) as here, cluster.broker("b", TOLD) as there:
        old = await opened(here)
        await resting(old)
        taken: list[TopicLog] = []

        async def take() -> None:
            taken.append(await there.open_topic(TOPIC, epoch=2))

        metadata.plan("txn", before(take))
        with pytest.raises(Fenced):
            await old.append(batch("x"))
        await append_each(taken[0], 5, 6)


async def test_a_wake_between_the_read_and_the_write_of_a_claim(
    cluster: Cluster, metadata: FaultyMetadata
) -> None:
    async with cluster.broker("a", TOLD) as here, cluster.broker("b", TOLD) as there:
        log = await opened(here)
        await resting(log)
        metadata.plan("txn", before(lambda: append_each(log, 5, 6)))
        with pytest.raises(TailElsewhere):
            await there.open_topic(TOPIC, epoch=2)
        await append_each(log, 6, 7)


async def test_a_topic_goes_round_by_resting_only(cluster: Cluster) -> None:
    end = 0
    for turn in range(7):
        async with cluster.broker("abc"[turn % 3], QUICK) as broker:
            log = await broker.open_topic(TOPIC, epoch=turn + 1)
            assert log.next_offset == end
            await append_each(log, end, end + turn % 3)
            end += turn % 3
            assert (await marked(cluster, is_clean=True)).end == end
            assert await contents(log) == expected(0, end)


@pytest.mark.parametrize("same_epoch", [True, False])
async def test_the_same_disk_goes_on_from_rest(cluster: Cluster, same_epoch: bool) -> None:
    for life in range(4):
        async with cluster.broker("a", QUICK) as broker:
            log = await broker.open_topic(TOPIC, epoch=1 if same_epoch else life + 1)
            await append_each(log, 5 * life, 5 * life + 5)
            assert await contents(log) == expected(0, 5 * life + 5)
            await marked(cluster, is_clean=True)


async def test_messages_beyond_a_rest_are_never_passed_over(cluster: Cluster) -> None:
    """They cannot exist. If they do, somebody was told of them."""
    async with cluster.broker("a", TOLD) as broker:
        await append_each(await broker.open_topic(TOPIC, epoch=1), 0, 3)
        await cluster.catalog().mark_clean(epoch=1)
        with pytest.raises(JournalCorrupt, match="beyond 0, where it is clean"):
            await broker.open_topic(TOPIC, epoch=2)


# -- ending --------------------------------------------------------------------------------------------------


async def test_a_topic_at_rest_can_be_sealed(cluster: Cluster) -> None:
    async with cluster.broker("a", TOLD) as here:
        log = await opened(here)
        await resting(log)
        state = await log.seal()
        assert (state.end, state.sealed, state.is_clean) == (5, True, False)
    async with cluster.broker("b", TOLD) as there:
        await append_each(await there.open_topic(TOPIC, epoch=2), 5, 6)


async def test_a_seal_during_a_rest(cluster: Cluster, metadata: FaultyMetadata) -> None:
    async with cluster.broker("a", TOLD) as here:
        log = await opened(here)
        held = Held()
        metadata.plan("txn", held)
        resting(log)
        await held.has_come.wait()
        waiting = asyncio.create_task(log.append(numbered(5, 6)))
        await asyncio.sleep(0)
        state = await log.seal()
        with pytest.raises(TopicClosed):
            await waiting
        held.may_go_on.set()
        assert await state_of(cluster) == state
        assert state.sealed


@pytest.mark.parametrize("step", ["rest", "wake"])
async def test_a_topic_that_is_closed_while_its_record_is_written(
    cluster: Cluster, metadata: FaultyMetadata, step: str
) -> None:
    """Whoever waited is refused, and the next opening goes on."""
    async with cluster.broker("a", TOLD) as here:
        log = await opened(here)
        if step == "wake":
            await resting(log)
        held = Held()
        metadata.plan("txn", held)
        if step == "rest":
            resting(log)
        waiting = asyncio.create_task(log.append(numbered(5, 6)))
        await held.has_come.wait()
        await log.close()
        with pytest.raises(TopicClosed):
            await waiting
        await append_each(await here.open_topic(TOPIC, epoch=2), 5, 6)


async def test_an_upload_that_ends_after_the_topic_was_closed_sets_no_timer(cluster: Cluster) -> None:
    async with cluster.broker("a", LAZY) as here:
        log = await here.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 3)
        await log.close()
        log._backlog._caught_up()
        assert log._marker._timer is None or log._marker._timer.cancelled()
