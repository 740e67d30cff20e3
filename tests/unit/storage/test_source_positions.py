"""Positions that no frame has: when and how they get into the topic's state."""

from __future__ import annotations

from pathlib import Path

import pytest

from sava.errors import SavaError
from sava.metadata.errors import Unavailable
from sava.storage import source_keeping
from sava.storage.catalog import Catalog
from sava.storage.errors import Fenced
from sava.storage.source_positions import (
    SOURCE_BIT,
    SourceAppend,
    SourcePositions,
    SourceProgress,
)
from sava.storage.types import OriginMark, ProducerState, TopicState
from tests.support.messages import write
from tests.support.storage import TOPIC, Cluster, append_each, wake
from tests.support.waiting import until

SOURCE = SOURCE_BIT | 5


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


def skip(start: int, end: int) -> SourceAppend:
    return SourceAppend(SOURCE, start, end, not start, None, {}, {})


async def test_a_note_is_as_of_an_end_and_of_an_epoch(cluster: Cluster) -> None:
    catalog = cluster.catalog()
    claimed = await catalog.claim(epoch=1, storage_id="a", has_tail=False)
    known = (ProducerState(SOURCE, 7, 7, 0),)
    marks = (OriginMark("eu", "x", (0, 7), (0, 0), SOURCE, 3),)
    elsewhere = await catalog.note(epoch=1, end=5, producers=known, origins=marks)
    assert elsewhere == claimed, "the end is another"
    noted = await catalog.note(epoch=1, end=0, producers=known, origins=marks)
    assert (noted.producers, noted.origins, noted.is_clean) == (known, marks, True)
    assert await catalog.load() == noted
    await catalog.claim(epoch=2, storage_id="b", has_tail=False)
    with pytest.raises(Fenced):
        await catalog.note(epoch=1, end=0, producers=(), origins=())


@pytest.mark.parametrize("is_sealed", [False, True], ids=["a segment", "the seal"])
async def test_a_source_position_does_not_go_back_when_another_knows_less(
    cluster: Cluster, is_sealed: bool
) -> None:
    """Schedule: a broker loses its registration while it notes a link without messages. Who salvages its
    journal has read the state before the note, and knows of sources what is in frames. Who copies was told 9,
    and the source has let go of 4..9."""
    catalog = cluster.catalog()
    await catalog.claim(epoch=1, storage_id="a", has_tail=False)
    client, other = ProducerState(7, 3, 0, 0), ProducerState(SOURCE + 1, 8, 5, 0)
    await catalog.note(epoch=1, end=0, producers=(ProducerState(SOURCE, 9, 9, 0),), origins=())
    told = (client, ProducerState(SOURCE, 4, 0, 0), other)
    if is_sealed:
        state = await catalog.seal(epoch=1, end=0, producers=told, origins=())
    else:
        segment = await write(cluster.store, 0, 5)
        state = await catalog.register(segment, epoch=1, producers=told, origins=())
    assert set(state.producers) == {client, ProducerState(SOURCE, 9, 9, 0), other}


async def test_a_position_is_noted_while_the_topic_is_at_rest(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And stays at rest: nothing was appended, and any disk may go on with it."""
    monkeypatch.setattr(source_keeping, "NOTE_S", 0.0)
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        for start in (0, 10, 20):
            await (await log.extend(skip(start, start + 10)))
        await until(lambda: log.sources.positions.settled(SOURCE) == SourceProgress(True, 30, 30))
    state = await cluster.catalog().load()
    assert state is not None
    assert state.is_clean
    async with cluster.broker("b") as broker:
        log = await broker.open_topic(TOPIC, epoch=2)
        assert await log.sources.progress(SOURCE) == SourceProgress(True, 30, 30)


@pytest.mark.parametrize(
    "error",
    [Unavailable("no quorum"), KeyError("an error that no rule names")],
    ids=["expected", "unexpected"],
)
async def test_a_note_that_failed_is_made_again(
    cluster: Cluster, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_keeping, "NOTE_S", 0.0)
    monkeypatch.setattr(source_keeping, "RETRY_S", 0.0)
    note, failures = Catalog.note, [error, error]

    async def failing(self: Catalog, **known: object) -> TopicState:
        if failures:
            raise failures.pop()
        return await note(self, **known)  # type: ignore[arg-type]

    monkeypatch.setattr(Catalog, "note", failing)
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        await (await log.extend(skip(0, 10)))
        await until(lambda: log.sources.positions.settled(SOURCE).kept == 10)
        assert not failures


@pytest.mark.parametrize("is_sealed", [True, False], ids=["the seal", "a segment"])
async def test_a_position_behind_a_tail_is_carried_by(
    cluster: Cluster, is_sealed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_keeping, "NOTE_S", 3600.0)
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 3)
        await (await log.extend(skip(0, 10)))
        assert log.sources.positions.settled(SOURCE).kept == 0
        if is_sealed:
            await log.seal()
        else:
            await log._parts.uploader.flush(log._backlog, 3)
        state = await cluster.catalog().load()
        assert state is not None
        assert ProducerState(SOURCE, 10, 10, 3) in state.producers
        assert is_sealed or log.sources.positions.settled(SOURCE).kept == 10


async def test_a_closed_or_fenced_topic_refuses_a_position_without_messages(
    cluster: Cluster,
) -> None:
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        await wake(log)
        log.fence(Fenced("t", 1, 2))
        with pytest.raises(Fenced):
            await log.extend(skip(0, 10))
        again = await broker.open_topic(TOPIC, epoch=2)
        await again.close()
        with pytest.raises(SavaError):
            await again.extend(skip(0, 10))


def test_a_table_that_is_adopted_moves_sources_on_and_never_back() -> None:
    older = SourcePositions([ProducerState(SOURCE, 40, 30, 100)])
    older.adopt(SourcePositions([ProducerState(SOURCE, 20, 10, 50)]))
    assert older.settled(SOURCE) == SourceProgress(True, 40, 40)
    older.adopt(SourcePositions([ProducerState(SOURCE, 60, 50, 120)]))
    assert older.settled(SOURCE) == SourceProgress(True, 60, 60)
