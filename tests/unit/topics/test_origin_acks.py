"""Acks by origin, in the offsets of this cluster."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sava.records import RecordBatch
from sava.storage import origin_marks
from sava.storage.broker_storage import StorageOptions
from sava.storage.topic_log import TopicLog
from sava.storage.uploader import UploadOptions
from sava.topics import origin_acks
from sava.topics.origin_acks import (
    OriginAcks,
    Places,
    by_origin,
    left_over,
    translate,
)
from sava.topics.ranges import IntervalSet, Range
from tests.support.copying import Origins
from tests.support.storage import FORGETFUL, TOPIC, Cluster, batch, contents
from tests.unit.topics.copies import HERE, copier_into

EU, ASIA = Origins("eu").source.origin, Origins("asia").source.origin
SEGMENTS = StorageOptions(cache_bytes=0, upload=UploadOptions(segment_age_s=0.0))
"""Reads come from segments."""
OWN = Origins(HERE, TOPIC.topic_id).source.origin


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[TopicLog]:
    """Offsets 0..10 are eu's 0..10, 10..15 this cluster's own, 15..20 asia's, 20..30 eu's 10..20."""
    cluster = Cluster(tmp_path)
    async with cluster.broker(options=FORGETFUL) as broker:
        opened = await broker.open_topic(TOPIC, epoch=1)
        eu, asia = Origins("eu").publish(20), Origins("asia").publish(5)
        copier = await copier_into(opened, eu.source, cluster.metadata)
        await (await copier.begin(eu.source_range(0, 10, begin=True)))
        await opened.append(batch(*map(str, range(5))))
        other = await copier_into(opened, asia.source, cluster.metadata)
        await (await other.begin(asia.source_range(0, 5, begin=True)))
        await (await copier.begin(eu.source_range(10, 20)))
        yield opened


@pytest.mark.parametrize(
    ("cursor", "acks", "found"),
    [
        pytest.param(0, [OriginAcks(EU, 4, [])], ((0, 4),), id="a cursor"),
        pytest.param(0, [OriginAcks(EU, 12, [(15, 17)])], ((0, 10), (20, 22), (25, 27)), id="around others"),
        pytest.param(0, [OriginAcks(EU, 0, [(2, 3), (5, 7)])], ((2, 3), (5, 7)), id="ranges alone"),
        pytest.param(3, [OriginAcks(EU, 5, [])], ((3, 5),), id="what is below the cursor here is acked"),
        pytest.param(0, [OriginAcks(EU, 99, [(200, 300)])], ((0, 10), (20, 30)), id="what is not here yet"),
        pytest.param(
            0, [OriginAcks(OWN, 12, [(13, 99)])], ((10, 12), (13, 15)), id="its own, and no copies between"
        ),
        pytest.param(
            0,
            [OriginAcks(Origins("eu", 8).source.origin, 99, [])],
            (),
            id="another topic of the same cluster",
        ),
        pytest.param(
            0,
            [OriginAcks(EU, 10, []), OriginAcks(ASIA, 3, []), OriginAcks(OWN, 0, [(10, 15)])],
            ((0, 18),),
            id="together they are a cursor",
        ),
        pytest.param(0, [], (), id="nothing"),
    ],
)
async def test_acks_are_found_where_their_messages_are(
    log: TopicLog, cursor: int, acks: list[OriginAcks], found: tuple[tuple[int, int], ...]
) -> None:
    assert await translate(log, cursor, OWN, acks, Places()) == found


async def test_a_reader_that_is_far_behind_costs_what_it_has_read(
    log: TopicLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    take = origin_acks._Search.take

    def look(self: origin_acks._Search, each: RecordBatch) -> None:
        looked.append(each.base_offset)
        take(self, each)

    monkeypatch.setattr(origin_acks._Search, "take", look)
    monkeypatch.setattr(origin_acks, "PLACE_EVERY", 1)
    places = Places()
    assert await translate(log, 0, OWN, [OriginAcks(EU, 2, [])], places) == ((0, 2),)
    assert looked == [0]
    looked.clear()
    assert await translate(log, 0, OWN, [OriginAcks(EU, 0, [(12, 14)])], places) == ((22, 24),)
    assert looked == [0, 10, 15, 20]
    looked.clear()
    assert await translate(log, 0, OWN, [OriginAcks(EU, 0, [(14, 15)])], places) == ((24, 25),)
    assert looked == [20], "where they are is known by now, although the cursor still is at the beginning"
    looked.clear()
    assert await translate(log, 0, OWN, [OriginAcks(OWN, 0, [(12, 13)])], places) == ((12, 13),)
    assert looked == [12]


@pytest.mark.parametrize(
    ("acked", "said"),
    [
        pytest.param([(0, 4)], {EU: [(0, 4)], OWN: [(0, 4)]}, id="copies at the beginning"),
        pytest.param([(0, 12)], {EU: [(0, 10)], OWN: [(0, 12)]}, id="and some of its own"),
        pytest.param(
            [(0, 16), (18, 22)],
            {EU: [(0, 12)], ASIA: [(0, 1), (3, 5)], OWN: [(0, 16), (18, 22)]},
            id="of all, with a gap",
        ),
        pytest.param([(3, 5), (28, 30)], {EU: [(3, 5), (18, 20)], OWN: [(3, 5), (28, 30)]}, id="ranges"),
        pytest.param([], {}, id="nothing"),
    ],
)
async def test_what_is_acked_is_said_of_the_messages_that_are_here(
    log: TopicLog, acked: list[Range], said: dict[tuple[str, str], list[Range]]
) -> None:
    found = await by_origin(log, IntervalSet(acked), OWN)
    assert {each.origin: list(IntervalSet([(0, each.cursor), *each.ranges])) for each in found.acks} == said
    assert list(found.covered) == acked


async def test_what_is_too_much_for_one_question_is_said_in_pieces(log: TopicLog) -> None:
    acked, said = IntervalSet([(0, 30)]), []
    while acked:
        found = await by_origin(log, acked, OWN, at_once=12)
        said += [each for each in found.acks if each.origin == EU]
        assert found.covered
        for start, end in found.covered:
            acked.remove(start, end)
    assert [list(IntervalSet([(0, each.cursor), *each.ranges])) for each in said] == [[(0, 10)], [(10, 20)]]


async def test_one_batch_may_have_messages_of_many_origins(tmp_path: Path) -> None:
    """As a cluster in the midst passes them on, with holes of what it does not."""
    eu, asia = Origins("eu").publish(40), Origins("asia").publish(40)
    relay = Origins("africa")
    for first in range(0, 40, 4):
        relay.relay(eu, first, first + 3).relay(asia, first, first + 4).publish(1)
    cluster = Cluster(tmp_path)
    async with cluster.broker(options=FORGETFUL) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        copier = await copier_into(log, relay.source, cluster.metadata)
        await (await copier.begin(relay.source_range(0, len(relay.held), begin=True)))
        there = [(copy.cluster, copy.offset) for copy in relay.held if copy is not None]
        acked = IntervalSet([(3, 20), (31, 32), (50, 70)])
        found = await by_origin(log, acked, OWN)
        for source in (eu.source, asia.source, relay.source):
            (each,) = [each for each in found.acks if each.origin == source.origin]
            expected = [
                offset
                for place, offset in (there[offset] for offset in range(80) if offset in acked)
                if place == source.cluster
            ]
            assert [
                *range(each.cursor),
                *(o for start, end in each.ranges for o in range(start, end)),
            ] == expected
        back = await translate(log, 0, OWN, [each for each in found.acks if each.origin != OWN], Places())
        assert list(IntervalSet(back)) == list(acked)


class Site:
    """A topic of one cluster in a random test: what it holds, and what a look at each message finds."""

    def __init__(self, log: TopicLog, name: str, topic_id: int) -> None:
        self.log = log
        self.origins = Origins(name, topic_id)
        self.held: list[tuple[tuple[str, str], int]] = []

    @property
    def own(self) -> tuple[str, str]:
        return self.origins.source.origin


@pytest.mark.parametrize("seed", range(6))
async def test_there_and_back_against_a_look_at_each_message(tmp_path: Path, seed: int) -> None:
    """Two clusters with messages of each other and of a third, in different orders and with different holes:
    what is acked at one is acked at the other, as far as it is there, and nothing else."""
    chance = random.Random(seed)
    sites = []
    clusters = [Cluster(tmp_path / "a"), Cluster(tmp_path / "b")]
    options = SEGMENTS if seed % 2 else FORGETFUL
    async with clusters[0].broker(options=options) as first, clusters[1].broker(options=options) as other:
        for cluster, broker, name in zip(clusters, (first, other), ("east", "west"), strict=True):
            log = await broker.open_topic(TOPIC, epoch=1)
            site = Site(log, name, TOPIC.topic_id)
            sites.append(site)
            sources = [
                Origins(each, 7 if each == "eu" else TOPIC.topic_id) for each in ("eu", "east", "west")
            ]
            sources = [each for each in sources if each.source.cluster != name]
            copiers = [await copier_into(log, each.source, cluster.metadata) for each in sources]
            for _ in range(chance.randrange(5, 25)):
                count = chance.choice((1, 3, 40, 400))
                pick = chance.randrange(3)
                if pick == 2:
                    start = log.next_offset
                    await log.append(batch(*("x" for _ in range(count))))
                    site.held += [(site.own, offset) for offset in range(start, start + count)]
                    continue
                origins, copier = sources[pick], copiers[pick]
                start = len(origins.held)
                skip = [start + each for each in range(count) if chance.random() < 0.1]
                origins.publish(count, skip=skip)
                await (await copier.begin(origins.source_range(start, start + count, begin=not start)))
                site.held += [
                    (origins.source.origin, offset)
                    for offset in range(start, start + count)
                    if offset not in skip
                ]
        here, there = sites
        for site in sites if options is SEGMENTS else ():
            await site.log.seal()
        assert here.log.next_offset == len(here.held)
        acked = IntervalSet([(0, chance.randrange(len(here.held)))])
        for _ in range(chance.randrange(40)):
            start = chance.randrange(len(here.held))
            acked.add(start, min(len(here.held), start + chance.choice((1, 1, 50))))
        acked.remove(chance.randrange(len(here.held)), len(here.held))
        said = await by_origin(here.log, acked, here.own)
        found = IntervalSet(await translate(there.log, 0, there.own, said.acks, Places()))
        is_acked = {here.held[offset] for start, end in acked for offset in range(start, end)}
        # Here its own lie between copies, there they are without gaps: whatever its offsets say, counts.
        is_acked |= {(here.own, offset) for start, end in acked for offset in range(start, end)}
        expected = [offset for offset, each in enumerate(there.held) if each in is_acked]
        assert [offset for start, end in found for offset in range(start, end)] == expected


def test_acks_of_what_is_not_here_yet_are_left() -> None:
    acks = [
        OriginAcks(EU, 10, [(12, 20)]),
        OriginAcks(ASIA, 0, [(5, 9)]),
        OriginAcks(OWN, 99, []),
    ]
    left = left_over(acks, OWN, {EU: [(0, 15), (17, 18)]})
    assert left == [OriginAcks(EU, 0, [(15, 17), (18, 20)]), OriginAcks(ASIA, 0, [(5, 9)])]
    assert not left_over(acks, OWN, {EU: [(0, 20)], ASIA: [(0, 9)]})
    assert left_over(acks[:1], OWN, {}) == [OriginAcks(EU, 10, [(12, 20)])]


async def test_the_first_rows_of_a_segment_keep_their_own_attributes(
    tmp_path: Path,
) -> None:
    """A read that ends in the midst of a row group has its first rows, and Arrow's columns of them still have
    the attributes of all: those were looked at too, and then they were more than the rows."""
    eu, asia = Origins("eu").publish(200), Origins("asia").publish(200)
    cluster = Cluster(tmp_path)
    async with cluster.broker(options=FORGETFUL) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        copier = await copier_into(log, eu.source, cluster.metadata)
        other = await copier_into(log, asia.source, cluster.metadata)
        taken = [await copier.begin(eu.source_range(0, 200, begin=True))]
        taken.append(await other.begin(asia.source_range(0, 200, begin=True)))
        await asyncio.gather(*taken)
        await log.seal()
        assert len(await log.segments()) == 1
        for end in (1, 150, 200):
            said = await by_origin(log, IntervalSet([(0, end)]), OWN)
            assert said.acks == [OriginAcks(EU, end, []), OriginAcks(OWN, end, [])]
        said = await by_origin(log, IntervalSet([(0, 250)]), OWN)
        assert OriginAcks(ASIA, 50, []) in said.acks


# -- messages that came late -----------------------------------------------------------------------


async def test_acks_of_a_late_message_are_found_without_reading_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay has brought eu 0 … 94, 96 … 120, then come a hundred batches of this cluster, then 95 by the
    direct path, then as many batches again. By the order of the rest 95 would be before 96."""
    looked: list[int] = []
    take = origin_acks._Search.take

    def look(self: origin_acks._Search, each: RecordBatch) -> None:
        looked.append(each.base_offset)
        take(self, each)

    monkeypatch.setattr(origin_acks._Search, "take", look)
    monkeypatch.setattr(origin_acks, "PLACE_EVERY", 1)
    eu = Origins("eu").publish(121)
    relay = Origins("asia").relay(eu, skip=(95,))
    cluster = Cluster(tmp_path)
    async with cluster.broker(options=FORGETFUL) as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        relayed = await copier_into(log, relay.source, cluster.metadata)
        direct = await copier_into(log, eu.source, cluster.metadata)
        await (await relayed.begin(relay.source_range(0, 120, begin=True)))
        for number in range(100):
            await log.append(batch(f"us/1/{number}"))
        await (await direct.begin(eu.source_range(0, 121, begin=True)))
        for number in range(100):
            await log.append(batch(f"us/1/{100 + number}"))
        places = Places()
        for _ in range(2):
            looked.clear()
            found = await translate(log, 0, OWN, [OriginAcks(EU, 0, [(94, 97)])], places)
            assert found == ((94, 96), (220, 221))
            assert looked == [0, 220]
        looked.clear()
        assert await translate(log, 0, OWN, [OriginAcks(EU, 0, [(96, 97)])], places) == ((95, 96),)
        assert looked == [0], "no late one is acked"
        said = await by_origin(log, IntervalSet([(94, 96), (220, 221)]), OWN)
        assert OriginAcks(EU, 0, [(94, 97)]) in said.acks


async def test_acks_of_what_the_direct_path_will_bring_are_left_until_it_has(tmp_path: Path) -> None:
    """The relay is ahead, and 95 was not for it: an ack of 95 that came now would be about nothing here, and
    the message would be delivered when it comes."""
    eu = Origins("eu").publish(121)
    relay = Origins("asia").relay(eu, skip=(95,))
    cluster = Cluster(tmp_path)
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1)
        direct = await copier_into(log, eu.source, cluster.metadata)
        relayed = await copier_into(log, relay.source, cluster.metadata)
        await (await relayed.begin(relay.source_range(0, 120, begin=True)))
        acks = [OriginAcks(EU, 110, [])]
        assert log.sources.positions.arrived(EU) == [(0, 121)], "nobody brings the rest, as far as is known"
        await (await direct.begin(eu.source_range(10, 90, begin=True)))
        assert left_over(acks, OWN, {EU: log.sources.positions.arrived(EU)}) == [
            OriginAcks(EU, 0, [(95, 96)])
        ]
        await (await direct.begin(eu.source_range(90, 121)))
        assert not left_over(acks, OWN, {EU: log.sources.positions.arrived(EU)})
        assert await translate(log, 0, OWN, acks, Places()) == ((0, 109), (120, 121))


@pytest.mark.parametrize("seed", range(6))
async def test_acks_are_found_in_any_order_of_messages(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two relays and the direct path, none with all of eu's messages, in any order, and new lives between;
    against a look at each message."""
    monkeypatch.setattr(origin_acks, "PLACE_EVERY", 3)
    monkeypatch.setattr(origin_marks, "LATE_EACH", 4)
    chance = random.Random(seed)
    eu = Origins("eu").publish(400, skip=chance.sample(range(400), 30))
    paths = [Origins(name).relay(eu, skip=chance.sample(range(400), 80)) for name in ("asia", "africa")]
    paths.append(eu)
    held: list[int | None] = []
    cluster = Cluster(tmp_path)
    for epoch in (1, 2, 3):
        async with cluster.broker("ab"[epoch % 2] if seed % 2 else "a", options=FORGETFUL) as broker:
            log = await broker.open_topic(TOPIC, epoch=epoch)
            copiers = [await copier_into(log, path.source, cluster.metadata) for path in paths]
            at = [(await copier.progress()).position for copier in copiers]
            places = Places()
            for _ in range(25):
                pick = chance.randrange(len(paths))
                path, start = paths[pick], at[pick]
                end = min(len(path.held), start + chance.randrange(1, 20))
                if start < end:
                    await (await copiers[pick].begin(path.source_range(start, end, begin=not start)))
                    at[pick] = end
                if chance.random() < 0.3:
                    await log.append(batch("us/1/0"))
                held = [_eu_offset(payload) for payload in await contents(log)]
                first = chance.randrange(400)
                acked = IntervalSet([(first, first + chance.randrange(1, 30)), (first + 40, first + 42)])
                cursor = chance.choice((0, chance.randrange(len(held) + 1)))
                found = await translate(log, cursor, OWN, [OriginAcks(EU, 0, list(acked))], places)
                expected = [
                    here
                    for here, there in enumerate(held)
                    if here >= cursor and there is not None and there in acked
                ]
                assert [here for start, end in found for here in range(start, end)] == expected
            if seed % 2:
                await log.seal()
    copies = [there for there in held if there is not None]
    assert len(copies) == len(set(copies))
    assert copies != sorted(copies)


def _eu_offset(payload: str) -> int | None:
    return int(payload.rsplit("/", 1)[1]) if payload.startswith("eu/") else None
