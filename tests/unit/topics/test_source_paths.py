"""Sources that bring messages of the same origins: each message is there once, and none is lost, although no
path has all of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest

from sava.storage import origin_marks
from sava.storage.source_positions import OriginForgotten
from sava.storage.topic_log import TopicLog
from sava.topics.source_copier import Copied, CopyCounts, SourceCopier
from sava.wal import DiskFull
from tests.sim.disk import SimDisk
from tests.support.copying import Origins
from tests.support.storage import EAGER, LAZY, TOPIC, Cluster, contents
from tests.support.waiting import until
from tests.unit.topics.copies import copier_into


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


@pytest.fixture
async def log(cluster: Cluster) -> AsyncIterator[TopicLog]:
    async with cluster.broker() as broker:
        yield await broker.open_topic(TOPIC, epoch=1)


async def copy(copier: SourceCopier, origins: Origins, start: int, end: int, **more: bool) -> Copied:
    return await (await copier.begin(origins.source_range(start, end, **more)))


async def test_a_message_that_came_another_way_is_left_out(cluster: Cluster, log: TopicLog) -> None:
    eu = Origins("eu").publish(10)
    asia = Origins("asia").relay(eu, 0, 4).publish(3).relay(eu, 4, 10)
    copies = CopyCounts()
    direct = await copier_into(log, eu.source, cluster.metadata, copies)
    relayed = await copier_into(log, asia.source, cluster.metadata, copies)
    await copy(direct, eu, 0, 6, begin=True)
    assert await copy(relayed, asia, 0, 13, begin=True) == Copied(13, 13, 7, 6, 0)
    assert await copy(direct, eu, 6, 10) == Copied(10, 6, 0, 4, 0)
    assert await contents(log) == [
        *(f"eu/7/{offset}" for offset in range(6)),
        *(f"asia/7/{offset}" for offset in range(4, 7)),
        *(f"eu/7/{offset}" for offset in range(6, 10)),
    ]
    assert (copies.appended, copies.duplicates, copies.loops) == (13, 10, 0)


@pytest.mark.parametrize("is_moved", [False, True], ids=["at once", "by the next owner"])
async def test_a_message_that_only_the_direct_path_has_is_no_duplicate(
    cluster: Cluster, is_moved: bool
) -> None:
    """The direct path is slow, and eu 95 is not for asia:

    eu ─▶ asia ─▶ us   brings eu 90 … 94, 96 … 120; a watermark would be at 121
    eu ─▶ us           brings 90 … 120: 95 is below the watermark, "duplicate", lost"""
    eu = Origins("eu").publish(121)
    asia = Origins("asia").relay(eu, 90, skip=(95,))
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        direct = await copier_into(log, eu.source, cluster.metadata)
        await copy(direct, eu, 0, 90, begin=True)
        relayed = await copier_into(log, asia.source, cluster.metadata)
        assert (await copy(relayed, asia, 0, 30, begin=True)).appended == 30
        if is_moved:
            await log.seal()
    async with cluster.broker("b" if is_moved else "a") as broker:
        log = await broker.open_topic(TOPIC, epoch=2)
        direct = await copier_into(log, eu.source, cluster.metadata)
        copied = await copy(direct, eu, 90, 121)
        assert (copied.appended, copied.duplicates) == (1, 30)
        assert await contents(log) == [*eu.payloads[:95], *eu.payloads[96:], eu.payloads[95]]
        assert log.sources.positions.marks([eu.source.origin])[eu.source.origin].ranges == [(0, 121)]


async def test_history_from_a_relay_is_taken_if_the_direct_path_began_later(
    cluster: Cluster, log: TopicLog
) -> None:
    eu = Origins("eu").publish(40)
    asia = Origins("asia").relay(eu)
    direct = await copier_into(log, eu.source, cluster.metadata)
    await copy(direct, eu, 30, 40, begin=True)
    relayed = await copier_into(log, asia.source, cluster.metadata)
    assert await copy(relayed, asia, 0, 40, begin=True) == Copied(40, 40, 30, 10, 0)
    assert sorted(await contents(log)) == sorted(eu.payloads)


@pytest.mark.parametrize("how", ["a segment", "the note", "the seal", "the journal", "a tail"])
async def test_what_the_direct_path_passes_without_messages_leaves_no_hole(
    cluster: Cluster, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whichever way it is remembered that it passed: holes that stay would add up."""
    monkeypatch.setattr("sava.storage.source_keeping.NOTE_S", 0.0 if how == "the note" else 3600.0)
    eu = Origins("eu").publish(30, skip=range(5, 20))
    options = LAZY if how in ("the journal", "a tail") else EAGER
    async with cluster.broker(options=options) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        copier = await copier_into(log, eu.source, cluster.metadata)
        await copy(copier, eu, 0, 5, begin=True)
        if how != "the journal":
            await log._parts.uploader.flush(log._backlog, 5)
        await copy(copier, eu, 5, 20)
        if how == "the note":
            await until(lambda: log.sources.positions.settled(eu.source.key).kept == 20)
        elif how == "the seal":
            await log.seal()
        else:
            await copy(copier, eu, 20, 30)
        if how == "a segment":
            await log._parts.uploader.flush(log._backlog, 15)
    async with cluster.broker("b" if how == "the seal" else "a", options=options) as broker:
        log = await broker.open_topic(TOPIC, epoch=2)
        await log.sources.learned()
        found = log.sources.positions.marks([eu.source.origin])[eu.source.origin]
        assert found.ranges == [(0, 20 if how in ("the note", "the seal") else 30)]


async def test_one_path_with_any_number_of_holes_is_never_refused(
    cluster: Cluster, log: TopicLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other message is not for asia, which alone brings eu, and has got one of them late."""
    monkeypatch.setattr(origin_marks, "MAX_RANGES", 8)
    eu = Origins("eu").publish(200)
    asia = Origins("asia").relay(eu, skip=range(0, 200, 2)).relay(eu, 20, 21).publish(1)
    copier = await copier_into(log, asia.source, cluster.metadata)
    for start in range(0, 102, 6):
        await copy(copier, asia, start, start + 6, begin=not start)
    assert await contents(log) == asia.payloads


async def test_what_cannot_be_judged_is_refused_with_the_way_out(
    cluster: Cluster, log: TopicLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The relay is far ahead and has left more holes than can be remembered. The direct path goes on as far
    as it is certain what is here; what follows may be here or not."""
    monkeypatch.setattr(origin_marks, "MAX_RANGES", 8)
    eu = Origins("eu").publish(200)
    asia = Origins("asia").relay(eu, 50, skip=range(52, 200, 3))
    direct = await copier_into(log, eu.source, cluster.metadata)
    relayed = await copier_into(log, asia.source, cluster.metadata)
    await copy(direct, eu, 0, 40, begin=True)
    await copy(relayed, asia, 0, 100, begin=True)
    assert (await copy(direct, eu, 40, 50)).appended == 10
    with pytest.raises(OriginForgotten, match="Remove this link"):
        await direct.begin(eu.source_range(50, 60))
    assert (await direct.progress()).position == 50
    assert sorted(await contents(log)) == sorted({*eu.payloads[:50], *asia.payloads})
    # Somebody agrees to go on without: then what the direct path has passed is not waited for.
    end = log.sources.positions.marks([eu.source.origin])[eu.source.origin].vague[1]
    await (await direct.begin(eu.source_range(50, end)._replace(batches=(), offsets=())))
    copied = await copy(direct, eu, end, 200)
    assert copied.appended == sum(offset % 3 == 52 % 3 for offset in range(end, 200))


async def test_what_was_in_this_cluster_does_not_come_back(cluster: Cluster, log: TopicLog) -> None:
    us = Origins("us", 3).publish(5)
    eu = Origins("eu").publish(2).relay(us).publish(2)
    copier = await copier_into(log, eu.source, cluster.metadata)
    assert await copy(copier, eu, 0, 9, begin=True) == Copied(9, 9, 4, 0, 5)
    assert await contents(log) == ["eu/7/0", "eu/7/1", "eu/7/7", "eu/7/8"]


async def test_what_is_left_out_for_something_in_flight_shares_its_fate(cluster: Cluster) -> None:
    """The schedule of ``source_positions``: path 1 has 50..60 in flight, so path 2 leaves them out. The disk
    refuses: neither position may be further than before, or 50..60 would be nowhere."""
    sim = SimDisk(Random(5))
    eu = Origins("eu").publish(60)
    asia = Origins("asia").relay(eu)
    async with cluster.broker(disk=sim) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        direct = await copier_into(log, eu.source, cluster.metadata)
        relayed = await copier_into(log, asia.source, cluster.metadata)
        await copy(direct, eu, 0, 50, begin=True)
        await copy(relayed, asia, 0, 50, begin=True)
        sim.set_capacity(sim.used + 3000)
        first = await direct.begin(eu.source_range(50, 60, size=300_000))
        second = await relayed.begin(asia.source_range(50, 60))
        outcomes = await asyncio.gather(first, second, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [DiskFull] * 2
        assert (await direct.progress()).position == (await relayed.progress()).position == 50
        sim.set_capacity(None)
        while True:
            try:
                assert (await copy(relayed, asia, 50, 60)).appended == 10
                break
            except DiskFull:
                await asyncio.sleep(0)
        assert await copy(direct, eu, 50, 60) == Copied(60, 50, 0, 10, 0)
        assert await contents(log) == eu.payloads


async def test_a_waiting_range_is_cut_again_when_its_messages_came_elsewhere(
    cluster: Cluster, log: TopicLog
) -> None:
    """Both were cut before either was taken: of 0..40 each has the marks of an empty topic."""
    eu = Origins("eu").publish(40)
    asia = Origins("asia").relay(eu)
    direct = await copier_into(log, eu.source, cluster.metadata)
    relayed = await copier_into(log, asia.source, cluster.metadata)
    large = 64 << 10  # read and cut in threads, side by side
    outcomes = await asyncio.gather(
        direct.begin(eu.source_range(0, 40, begin=True, size=large)),
        relayed.begin(asia.source_range(0, 40, begin=True, size=large)),
    )
    copied = await asyncio.gather(*outcomes)
    assert sorted(each.appended for each in copied) == [0, 40]
    assert [payload.strip() for payload in await contents(log)] == eu.payloads
