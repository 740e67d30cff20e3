"""Source copiers: what is copied of a source is there once and in order, whoever sends it, however often."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from sava.storage import source_positions
from sava.storage.broker_storage import StorageOptions
from sava.storage.source_positions import SourcePositionMismatch, SourceProgress, TooManySources
from sava.storage.topic_log import TopicLog
from sava.topics.errors import MessageInvalid
from sava.topics.source_copier import Copied, CopyCounts, SourceCopier
from sava.wal import DiskFull
from tests.sim.disk import SimDisk
from tests.support.copying import Origins
from tests.support.storage import EAGER, LAZY, TOPIC, Cluster, batch, contents
from tests.support.waiting import PATIENCE_S, until
from tests.unit.topics.copies import copier_into, kill


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.fixture
async def log(cluster: Cluster) -> AsyncIterator[TopicLog]:
    async with cluster.broker() as broker:
        yield await broker.open_topic(TOPIC, epoch=1)


async def copy(copier: SourceCopier, origins: Origins, start: int, end: int, **more: bool) -> Copied:
    return await (await copier.begin(origins.source_range(start, end, **more)))


# -- one source ------------------------------------------------------------------------------------


async def test_a_copy_continues_at_the_source_position(cluster: Cluster, log: TopicLog) -> None:
    eu = Origins("eu").publish(50, skip=(3, 4, 19, 40))
    copier = await copier_into(log, eu.source, cluster.metadata)
    assert await copier.progress() == SourceProgress(False, 0, 0)
    assert await copy(copier, eu, 10, 20, begin=True) == Copied(20, 20, 9, 0, 0)
    assert await copy(copier, eu, 20, 45) == Copied(45, 45, 24, 0, 0)
    assert await copier.progress() == SourceProgress(True, 45, 45)
    assert await contents(log) == [payload for payload in eu.payloads if 10 <= int(payload[5:]) < 45]


@pytest.mark.parametrize(
    ("start", "end", "begin"),
    [
        pytest.param(10, 20, False, id="repeated"),
        pytest.param(15, 25, False, id="overlapping"),
        pytest.param(21, 25, False, id="a gap"),
        pytest.param(0, 20, True, id="begun again"),
        pytest.param(20, 25, True, id="begun where it is"),
    ],
)
async def test_whatever_does_not_follow_is_refused_with_the_position(
    cluster: Cluster, log: TopicLog, start: int, end: int, begin: bool
) -> None:
    eu = Origins("eu").publish(50)
    copies = CopyCounts()
    copier = await copier_into(log, eu.source, cluster.metadata, copies)
    await copy(copier, eu, 0, 20, begin=True)
    with pytest.raises(SourcePositionMismatch) as refused:
        await copier.begin(eu.source_range(start, end, begin=begin))
    assert (refused.value.is_known, refused.value.position) == (True, 20)
    assert copies.refused == 1
    assert await contents(log) == eu.payloads[:20]
    await copy(copier, eu, 20, 25)


async def test_a_stranger_must_say_that_it_begins(cluster: Cluster, log: TopicLog) -> None:
    eu = Origins("eu").publish(5)
    copier = await copier_into(log, eu.source, cluster.metadata)
    with pytest.raises(SourcePositionMismatch) as refused:
        await copier.begin(eu.source_range(0, 5))
    assert not refused.value.is_known
    assert log.next_offset == 0


async def test_a_failed_range_in_a_row_of_several_takes_those_behind_it_along(cluster: Cluster) -> None:
    """Pulsar's issue 26113. Three sends are under way; the first fails alone, and the connection lives on:

        E3 fails   E4, E5 are persisted, and the watermark passes E3
        E3 again   below the watermark: "duplicate", acknowledged, lost

    Here E4 does not follow when E3 is not there, neither on its way nor later, and E3 comes once."""
    sim = SimDisk(Random(5))
    eu = Origins("eu").publish(10)
    async with cluster.broker(disk=sim) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        copier = await copier_into(log, eu.source, cluster.metadata)
        await copy(copier, eu, 0, 3, begin=True)
        sim.set_capacity(sim.used + 3000)
        e3 = await copier.begin(eu.source_range(3, 4, size=300_000))
        e4 = await copier.begin(eu.source_range(4, 5))
        e5 = await copier.begin(eu.source_range(5, 6))
        outcomes = await asyncio.gather(e3, e4, e5, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [DiskFull] * 3
        assert await copier.progress() == SourceProgress(True, 3, 3)
        sim.set_capacity(None)
        for late in (4, 5):
            with pytest.raises(SourcePositionMismatch):
                await copier.begin(eu.source_range(late, late + 1))
        for again in (3, 4, 5):
            while True:
                try:
                    await copy(copier, eu, again, again + 1)
                    break
                except DiskFull:  # until the journal has seen that there is room
                    await asyncio.sleep(0)
        with pytest.raises(SourcePositionMismatch):
            await copier.begin(eu.source_range(3, 4))
        assert await contents(log) == eu.payloads[:6]


async def test_a_refused_range_leaves_those_behind_it_without_a_place(
    cluster: Cluster, log: TopicLog
) -> None:
    """The same, when the first of the row was never accepted."""
    eu = Origins("eu").publish(10)
    copier = await copier_into(log, eu.source, cluster.metadata)
    await copy(copier, eu, 0, 3, begin=True)
    bad = eu.source_range(3, 4)._replace(offsets=[3, 3])
    with pytest.raises(MessageInvalid):
        await copier.begin(bad)
    with pytest.raises(SourcePositionMismatch):
        await copier.begin(eu.source_range(4, 5))
    await copy(copier, eu, 3, 5)
    assert await contents(log) == eu.payloads[:5]


async def test_two_that_copy_at_once_share_the_work_without_knowing(cluster: Cluster, log: TopicLog) -> None:
    """Each starts from what it was told and keeps several ranges under way."""
    eu = Origins("eu").publish(400, skip=range(0, 400, 7))

    async def run(number: int) -> None:
        copier, rng = await copier_into(log, eu.source, cluster.metadata), Random(number)
        while True:
            progress = await copier.progress()
            position = progress.position
            if position == 400:
                return
            under_way = []
            try:
                for index in range(rng.randrange(1, 5)):
                    end = min(400, position + rng.randrange(1, 9))
                    begin = not progress.is_known and not index
                    under_way.append(await copier.begin(eu.source_range(position, end, begin=begin)))
                    position = end
                    if position == 400:
                        break
            except SourcePositionMismatch:
                pass
            await asyncio.gather(*under_way)
            await asyncio.sleep(0)

    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(run(1), run(2))
    assert await contents(log) == eu.payloads


async def test_a_position_that_is_told_is_durable(cluster: Cluster, log: TopicLog) -> None:
    """A copier that asks while another's range is on its way to the disk gets the answer when it is there: a
    source that lets go of what was only accepted would have it nowhere if the disk refused."""
    eu = Origins("eu").publish(10)
    copier = await copier_into(log, eu.source, cluster.metadata)
    await copy(copier, eu, 0, 1, begin=True)
    under_way = await copier.begin(eu.source_range(1, 10))
    assert not under_way.done()
    other = await copier_into(log, eu.source, cluster.metadata)
    assert await other.progress() == SourceProgress(True, 10, 10)
    assert log.next_offset == 10
    assert (await under_way).position == 10


async def test_somebody_who_never_pauses_does_not_keep_the_position_from_others(
    cluster: Cluster, log: TopicLog
) -> None:
    eu = Origins("eu").publish(4000)
    copier = await copier_into(log, eu.source, cluster.metadata)
    under_way = await copier.begin(eu.source_range(0, 1, begin=True))
    asked = asyncio.create_task(log.sources.progress(eu.source.key))
    for start in range(1, 4000):
        following = await copier.begin(eu.source_range(start, start + 1))
        await under_way  # and the next one is on its way already
        under_way = following
        if asked.done():
            break
    assert asked.done()
    assert 0 < (await asked).position < 4000
    await under_way


async def test_what_is_too_large_for_a_batch_becomes_several_links(
    cluster: Cluster, log: TopicLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sava.records.header.MAX_COUNT", 16)
    eu = Origins("eu").publish(60, skip=(15, 16, 59))
    copier = await copier_into(log, eu.source, cluster.metadata)
    copied = await (await copier.begin(eu.source_range(0, 60, begin=True, batches=6)))
    assert copied == Copied(60, 60, 57, 0, 0)
    assert await contents(log) == eu.payloads
    ends = [each.header.next_sequence async for each in log.read(0)]
    assert len(ends) > 3
    assert ends[-1] == 60
    assert ends == sorted(ends)


async def test_a_source_or_a_topic_that_was_created_again_begins_anew(cluster: Cluster) -> None:
    old, new = Origins("eu", 7).publish(5), Origins("eu", 8).publish(5)
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        await copy(await copier_into(log, old.source, cluster.metadata), old, 0, 5, begin=True)
        recreated = await copier_into(log, new.source, cluster.metadata)
        assert await recreated.progress() == SourceProgress(False, 0, 0)
        await copy(recreated, new, 0, 5, begin=True)
        assert await contents(log) == old.payloads + new.payloads
        other = type(TOPIC)(TOPIC.namespace, "again", TOPIC.topic_id + 1)
        log = await broker.open_topic(other, epoch=1)
        copier = await copier_into(log, old.source, cluster.metadata)
        assert not (await copier.progress()).is_known


async def test_a_cluster_that_was_set_up_anew_under_its_name_is_another(
    cluster: Cluster, log: TopicLog
) -> None:
    """It gives out the same topic ids and offsets again: by these its messages would be below the mark that
    the old cluster's have left, and lost as duplicates."""
    old = Origins("eu", cluster_id="first").publish(10)
    new = Origins("eu", cluster_id="second").publish(5)
    await copy(await copier_into(log, old.source, cluster.metadata), old, 0, 10, begin=True)
    copied = await copy(await copier_into(log, new.source, cluster.metadata), new, 0, 5, begin=True)
    assert (copied.appended, copied.duplicates) == (5, 0)
    assert await contents(log) == old.payloads + new.payloads


async def test_source_positions_are_not_forgotten_for_producers_and_are_bounded(
    cluster: Cluster, log: TopicLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sava.storage.producers.MAX_PRODUCERS", 3)
    monkeypatch.setattr(source_positions, "MAX_SOURCES", 2)
    many = [Origins("eu", topic_id).publish(2) for topic_id in (1, 2, 3)]
    for each in many[:2]:
        await copy(await copier_into(log, each.source, cluster.metadata), each, 0, 1, begin=True)
    for producer in range(1, 10):
        await log.append(batch("x", producer=producer))
    for each in many[:2]:
        copier = await copier_into(log, each.source, cluster.metadata)
        await copy(copier, each, 1, 2)
    with pytest.raises(TooManySources):
        await (await copier_into(log, many[2].source, cluster.metadata)).begin(
            many[2].source_range(0, 1, begin=True)
        )


async def test_origins_are_bounded(cluster: Cluster, log: TopicLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are in the topic's record: whoever sent a new one with each message would fill it."""
    monkeypatch.setattr(source_positions, "MAX_ORIGINS", 3)
    relay = Origins("africa")
    for topic_id in range(4):
        relay.relay(Origins("eu", topic_id).publish(1))
    copier = await copier_into(log, relay.source, cluster.metadata)
    with pytest.raises(TooManySources):
        await copier.begin(relay.source_range(0, 4, begin=True))
    await copy(copier, relay, 0, 3, begin=True)
    with pytest.raises(TooManySources):
        await copier.begin(relay.source_range(3, 4))
    assert log.next_offset == 3


# -- ranges that bring nothing ------------------------------------------------------------------


async def test_a_range_without_messages_moves_the_position_and_is_noted_soon(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sava.storage.source_keeping.NOTE_S", 0.01)
    eu = Origins("eu").publish(30, skip=range(5, 30))
    async with cluster.broker(options=EAGER) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        copier = await copier_into(log, eu.source, cluster.metadata)
        await copy(copier, eu, 0, 5, begin=True)
        await log._parts.uploader.flush(log._backlog, 5)
        assert await copy(copier, eu, 5, 20) == Copied(20, 5, 0, 0, 0)
        assert await copier.progress() == SourceProgress(True, 20, 5)
        await until(lambda: log.sources.positions.settled(eu.source.key).kept == 20)
    async with cluster.broker("b") as broker:  # on another disk: all is in segments, and so at rest
        state = await cluster.catalog().load()
        assert state is not None
        assert state.producers[0].next_sequence == 20


async def test_a_range_without_messages_is_carried_by_the_seal(cluster: Cluster) -> None:
    eu = Origins("eu").publish(30, skip=range(5, 30))
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        copier = await copier_into(log, eu.source, cluster.metadata)
        await copy(copier, eu, 0, 5, begin=True)
        await copy(copier, eu, 5, 20)
        await log.seal()
    async with cluster.broker("b") as broker:
        log = await broker.open_topic(TOPIC, epoch=2)
        copier = await copier_into(log, eu.source, cluster.metadata)
        assert await copier.progress() == SourceProgress(True, 20, 20)


async def test_a_range_without_messages_that_nobody_noted_is_sent_once_more(cluster: Cluster) -> None:
    sim = SimDisk(Random(1))
    eu = Origins("eu").publish(30, skip=range(5, 20))
    broker = await cluster.start(disk=sim)
    log = await broker.open_topic(TOPIC, epoch=1)
    copier = await copier_into(log, eu.source, cluster.metadata)
    await copy(copier, eu, 0, 5, begin=True)
    assert (await copy(copier, eu, 5, 20)).kept == 5
    killed = await kill(broker, sim)
    async with cluster.broker(disk=killed) as broker:
        log = await broker.open_topic(TOPIC, epoch=2)
        copier = await copier_into(log, eu.source, cluster.metadata)
        assert await copier.progress() == SourceProgress(True, 5, 5)
        with pytest.raises(SourcePositionMismatch):
            await copier.begin(eu.source_range(20, 30))
        await copy(copier, eu, 5, 30)
        assert await contents(log) == eu.payloads


# -- restarts and moves ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [LAZY, EAGER], ids=["from the journal", "from segments"])
async def test_positions_and_marks_are_found_again(cluster: Cluster, options: StorageOptions) -> None:
    eu = Origins("eu").publish(20)
    asia = Origins("asia").relay(eu, 0, 15).publish(5)
    async with cluster.broker(options=options) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        await copy(await copier_into(log, eu.source, cluster.metadata), eu, 0, 10, begin=True)
        if options is EAGER:
            await log._parts.uploader.flush(log._backlog, 10)
    async with cluster.broker(options=options) as broker:
        log = await broker.open_topic(TOPIC, epoch=2)
        copier = await copier_into(log, asia.source, cluster.metadata)
        assert await copy(copier, asia, 0, 20, begin=True) == Copied(20, 20, 10, 10, 0)
        copier = await copier_into(log, eu.source, cluster.metadata)
        assert await copier.progress() == SourceProgress(True, 10, 10)
        assert await copy(copier, eu, 10, 20) == Copied(20, 20, 5, 5, 0)
        found = await contents(log)
        await log.seal()
    async with cluster.broker("b") as broker:
        log = await broker.open_topic(TOPIC, epoch=3)
        more = eu.publish(2)
        copier = await copier_into(log, more.source, cluster.metadata)
        await copy(copier, more, 20, 22)
        late = Origins("africa").relay(more)
        copied = await copy(await copier_into(log, late.source, cluster.metadata), late, 0, 22, begin=True)
        assert (copied.appended, copied.duplicates) == (0, 22)
        assert await contents(log) == [*found, "eu/7/20", "eu/7/21"]


async def test_a_lost_answer_is_found_out_by_asking(cluster: Cluster) -> None:
    """The broker dies between the sync and the receipt; the copier asks the next owner for the position."""
    sim = SimDisk(Random(2))
    eu = Origins("eu").publish(10)
    broker = await cluster.start(disk=sim)
    log = await broker.open_topic(TOPIC, epoch=1)
    copier = await copier_into(log, eu.source, cluster.metadata)
    await (await copier.begin(eu.source_range(0, 6, begin=True)))  # and nobody hears of it
    killed = await kill(broker, sim)
    async with cluster.broker(disk=killed) as broker:
        log = await broker.open_topic(TOPIC, epoch=2)
        copier = await copier_into(log, eu.source, cluster.metadata)
        with pytest.raises(SourcePositionMismatch) as refused:
            await copier.begin(eu.source_range(0, 6, begin=True))
        assert refused.value.position == 6
        await copy(copier, eu, 6, 10)
        assert await contents(log) == eu.payloads
