"""Which open of a producer's name is the last one: the rule, its writes, and what remains of it when topics
move."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from sava.errors import SavaError
from sava.metadata.errors import OutcomeUnknown
from sava.storage import producers
from sava.storage.errors import Fenced, TopicSealed
from sava.storage.producers import (
    EpochRequest,
    Granted,
    ProducerEpochs,
    grant,
)
from sava.storage.topic_log import TopicClosed
from sava.storage.types import EpochTable
from tests.support.storage import TOPIC, Cluster, batch
from tests.unit.storage.faults import UNAVAILABLE, UNKNOWN, FaultyMetadata, lose_answer, refuse

P, Q = 11, 12
BLANK = EpochTable()


class TestGrant:
    def test_each_open_is_beyond_all_before_it(self) -> None:
        """Also of other names: a name that was forgotten gets no number twice."""
        table, numbers = grant(BLANK, [EpochRequest(P, 0), EpochRequest(Q, 0), EpochRequest(P, 0)])
        assert numbers == [1, 2, 3]
        assert (table.last, table.known) == (3, ((Q, 2), (P, 3)))
        assert grant(table, [EpochRequest(Q, 0, above=100)]).numbers == [101]

    def test_the_current_number_continues_and_a_lower_one_is_fenced(self) -> None:
        table = grant(BLANK, [EpochRequest(P, 0), EpochRequest(P, 0)]).table
        assert grant(table, [EpochRequest(P, 2), EpochRequest(P, 1)]) == (table, [2, 2])

    def test_a_higher_number_becomes_the_current_one(self) -> None:
        """A partition takes over the number of the first one; what it gives out next is beyond it."""
        table, numbers = grant(
            BLANK, [EpochRequest(P, 0), EpochRequest(P, 50), EpochRequest(P, 49), EpochRequest(Q, 0)]
        )
        assert numbers == [1, 50, 50, 51]
        assert table.last == 51

    def test_the_lowest_number_is_forgotten_and_then_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A zombie must not come in because its successor's open was forgotten."""
        monkeypatch.setattr(producers, "MAX_NAMES", 2)
        table = grant(BLANK, [EpochRequest(P, 0)]).table
        table = grant(table, [EpochRequest(P, 0)]).table
        for other in (21, 22):
            table = grant(table, [EpochRequest(other, 0)]).table
        assert (table.known, table.floor) == (((21, 3), (22, 4)), 2)
        assert grant(table, [EpochRequest(P, 1), EpochRequest(P, 2)]) == (table, [0, 0])
        assert grant(table, [EpochRequest(P, 0)]).numbers == [5]

    def test_those_that_are_connected_are_forgotten_last(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(producers, "MAX_NAMES", 2)
        table = grant(BLANK, [EpochRequest(P, 0), EpochRequest(Q, 0)]).table
        table = grant(table, [EpochRequest(21, 0)], in_use={P}).table
        assert (table.known, table.floor) == (((P, 1), (21, 3)), 2)
        assert grant(table, [EpochRequest(P, 1)]).numbers == [1]

    def test_who_asks_is_not_forgotten_and_the_bound_holds(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(producers, "MAX_NAMES", 2)
        table = grant(BLANK, [EpochRequest(P, 0), EpochRequest(Q, 0)]).table
        table = grant(table, [EpochRequest(21, 0)], in_use={P, Q}).table
        assert [producer for producer, _ in table.known] == [Q, 21]


class Writes:
    """A metadata store that answers when it is let."""

    def __init__(self) -> None:
        self.table = BLANK
        self.groups: list[int] = []
        self.may_answer = asyncio.Event()
        self.error: SavaError | None = None

    async def __call__(self, asks: Sequence[EpochRequest]) -> Granted:
        self.groups.append(len(asks))
        granted = grant(self.table, asks)
        await self.may_answer.wait()
        if self.error is not None:
            raise self.error
        self.table = granted.table
        return granted


class TestWriting:
    async def test_no_open_is_answered_before_it_is_durable(self) -> None:
        writes = Writes()
        epochs = ProducerEpochs(BLANK, writes)
        opening = asyncio.ensure_future(epochs.open(P))
        await asyncio.sleep(0.01)
        assert not opening.done()
        assert epochs.current(P) == 0
        writes.may_answer.set()
        assert await opening == 1
        assert epochs.current(P) == 1

    async def test_opens_that_wait_share_a_write_and_reconnects_need_none(self) -> None:
        writes = Writes()
        epochs = ProducerEpochs(BLANK, writes)
        opening = [asyncio.ensure_future(epochs.open(producer)) for producer in range(100)]
        await asyncio.sleep(0)
        more = [asyncio.ensure_future(epochs.open(producer)) for producer in range(50)]
        writes.may_answer.set()
        assert [await each for each in opening + more] == list(range(1, 151))
        assert sum(writes.groups) == 150
        assert len(writes.groups) <= 2
        count = len(writes.groups)
        assert await epochs.present(0, 101) == 101
        assert await epochs.present(0, 1) == 101
        assert len(writes.groups) == count

    async def test_a_failed_write_fails_its_opens_and_the_next_ones_go_through(self) -> None:
        writes = Writes()
        writes.error = UNAVAILABLE
        writes.may_answer.set()
        epochs = ProducerEpochs(BLANK, writes)
        with pytest.raises(type(UNAVAILABLE)):
            await epochs.open(P)
        writes.error = None
        assert await epochs.open(P) == 1

    async def test_an_end_fails_those_who_wait(self) -> None:
        writes = Writes()
        epochs = ProducerEpochs(BLANK, writes)
        first = asyncio.ensure_future(epochs.open(P))
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(epochs.open(P))
        await asyncio.sleep(0)
        epochs.close(TopicClosed("over"))
        for each in (first, second):
            with pytest.raises(TopicClosed):
                await asyncio.wait_for(each, 5)
        with pytest.raises(TopicClosed):
            await epochs.open(P)

    async def test_a_caller_that_leaves_keeps_nobody_waiting(self) -> None:
        writes = Writes()
        epochs = ProducerEpochs(BLANK, writes)
        first = asyncio.ensure_future(epochs.open(P))
        second = asyncio.ensure_future(epochs.open(Q))
        await asyncio.sleep(0.01)
        first.cancel()
        writes.may_answer.set()
        assert await second == 2
        assert epochs.current(P) == 1


class TestTopicLog:
    async def test_an_open_without_a_message_survives_a_restart(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path)
        async with cluster.broker() as storage:
            log = await storage.open_topic(TOPIC, epoch=1)
            assert await log.epochs.open(P) == 1
            assert await log.epochs.open(P) == 2
        async with cluster.broker() as storage:
            log = await storage.open_topic(TOPIC, epoch=1)
            assert log.epochs.current(P) == 2
            assert await log.epochs.present(P, 1) == 2

    async def test_uploads_a_seal_and_rest_keep_the_numbers(self, tmp_path: Path) -> None:
        """What a segment, a seal or a rest writes is as of an offset; numbers are as of now."""
        cluster = Cluster(tmp_path)
        async with cluster.broker("a") as first, cluster.broker("b") as second:
            log = await first.open_topic(TOPIC, epoch=1)
            await log.append(batch("a", producer=P))
            assert await log.epochs.open(P) == 1
            await log._parts.uploader.flush(log._backlog, log.next_offset)
            assert await log.epochs.open(P) == 2
            await cluster.catalog().mark_clean(epoch=1)
            await log.append(batch("b", producer=P, sequence=1))
            await log.seal()
            moved = await second.open_topic(TOPIC, epoch=2)
            assert await moved.epochs.present(P, 1) == 2
            assert await moved.epochs.open(P) == 3

    async def test_an_owner_that_was_replaced_gives_no_number(self, tmp_path: Path) -> None:
        """Two brokers that both gave out 2 would have two producers of one name."""
        cluster = Cluster(tmp_path)
        async with cluster.broker("a") as first, cluster.broker("b") as second:
            old = await first.open_topic(TOPIC, epoch=1)
            assert await old.epochs.open(P) == 1
            new = await second.open_topic(TOPIC, epoch=2)
            with pytest.raises(Fenced):
                await old.epochs.open(P)
            with pytest.raises(Fenced):
                await old.append(batch("late"))
            assert await new.epochs.open(P) == 2

    async def test_a_sealed_topic_gives_no_number(self, tmp_path: Path) -> None:
        cluster = Cluster(tmp_path)
        async with cluster.broker() as storage:
            log = await storage.open_topic(TOPIC, epoch=1)
            await log.seal()
            with pytest.raises(TopicClosed):
                await log.epochs.open(P)
            with pytest.raises(TopicSealed):
                await cluster.catalog().grant_epochs(epoch=1, asks=[EpochRequest(P, 0)], in_use=tuple)

    async def test_a_number_of_unknown_outcome_is_given_to_nobody(self, tmp_path: Path) -> None:
        """The answer to a write is lost twice, and the open with it. Its number may be in the record."""
        metadata = FaultyMetadata()
        cluster = Cluster(tmp_path, metadata=metadata)
        async with cluster.broker() as storage:
            log = await storage.open_topic(TOPIC, epoch=1)
            metadata.plan("txn", lose_answer(UNKNOWN))
            assert await log.epochs.open(P) == 2
            metadata.plan("txn", lose_answer(UNKNOWN))
            metadata.plan("get", lambda call: call(), refuse(UNAVAILABLE))
            with pytest.raises(OutcomeUnknown):
                await log.epochs.open(P)
            assert await log.epochs.open(P) == 4
            assert metadata.is_done
