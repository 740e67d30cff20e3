"""Catalog: descriptors without gaps, one owner at a time, and no failure that reads as 'empty'."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from sava.errors import SavaError
from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.storage import catalog as catalog_module
from sava.storage import keys
from sava.storage.catalog import Catalog
from sava.storage.errors import (
    CatalogBusy,
    CatalogCorrupt,
    DataGap,
    EpochTaken,
    Fenced,
    InvalidStorageName,
    NotClaimed,
    SegmentConflict,
    TailElsewhere,
    TopicGone,
    TopicSealed,
)
from sava.storage.types import ProducerState, Segment, TopicKey, TopicState
from tests.unit.storage.faults import UNAVAILABLE, UNKNOWN, FaultyMetadata, after, before, lose_answer, refuse

TOPIC = TopicKey("default", "orders", 7)
A, B = "disk-a", "disk-b"
PRODUCERS = (ProducerState(3, 20, 10, 12),)


@pytest.fixture
def catalog(metadata: FaultyMetadata) -> Catalog:
    return Catalog(metadata, TOPIC)


def segment(start: int, end: int, *, epoch: int = 1, topic_id: int = 7, suffix: str = "a") -> Segment:
    return Segment(
        topic_id=topic_id,
        start=start,
        end=end,
        epoch=epoch,
        key=f"{start}-{end}-{epoch}-{suffix}",
        size=10,
        crc32c=1,
        footer_size=5,
        footer_crc32c=2,
        min_publish_time=start,
        max_publish_time=end,
        created_ms=0,
    )


async def opened(catalog: Catalog, *ends: int, epoch: int = 1, storage_id: str = A) -> list[Segment]:
    """Claimed, with segments that end there."""
    await catalog.claim(epoch=epoch, storage_id=storage_id, has_tail=False)
    segments = [segment(start, end, epoch=epoch) for start, end in zip((0, *ends), ends, strict=False)]
    for each in segments:
        await catalog.register(each, epoch=epoch, producers=(), origins=())
    return segments


# -- owning --------------------------------------------------------------------------------


async def test_a_new_topic_is_empty_and_begins_at_zero(catalog: Catalog) -> None:
    assert await catalog.load() is None
    assert await catalog.segments() == []
    state = await catalog.claim(epoch=1, storage_id=A, has_tail=False)
    assert (state.start, state.end, state.sealed, state.epoch) == (0, 0, False, 1)
    assert await catalog.load() == state


async def test_what_one_owner_seals_the_next_one_continues(catalog: Catalog) -> None:
    """The move of the first seed: 0..22 on the old broker, 22 is the next offset on the new one."""
    await catalog.claim(epoch=1, storage_id=A, has_tail=False)
    await catalog.register(segment(0, 22), epoch=1, producers=PRODUCERS, origins=())
    await catalog.seal(epoch=1, end=22, producers=PRODUCERS, origins=())
    state = await catalog.claim(epoch=2, storage_id=B, has_tail=False)
    assert (state.start, state.end, state.sealed, state.storage_id) == (0, 22, False, B)
    assert state.producers == PRODUCERS
    await catalog.register(segment(22, 30, epoch=2), epoch=2, producers=(), origins=())
    assert [each.end for each in await catalog.segments()] == [22, 30]


async def test_an_empty_topic_moves_without_a_hole(catalog: Catalog) -> None:
    await catalog.claim(epoch=1, storage_id=A, has_tail=False)
    await catalog.seal(epoch=1, end=0, producers=(), origins=())
    assert (await catalog.claim(epoch=2, storage_id=B, has_tail=False)).end == 0


async def test_every_step_can_be_repeated(catalog: Catalog) -> None:
    for _ in range(2):
        claimed = await catalog.claim(epoch=1, storage_id=A, has_tail=False)
    assert claimed.epoch == 1
    for _ in range(2):
        state = await catalog.register(segment(0, 10), epoch=1, producers=PRODUCERS, origins=())
    assert (state.end, state.producers) == (10, PRODUCERS)
    await catalog.register(segment(10, 20), epoch=1, producers=(), origins=())
    assert (await catalog.register(segment(0, 10), epoch=1, producers=(), origins=())).end == 20, "also later"
    for _ in range(2):
        sealed = await catalog.seal(epoch=1, end=20, producers=PRODUCERS, origins=())
    assert sealed.sealed
    for _ in range(2):
        assert (await catalog.drop(epoch=1, before=15)) in ([segment(0, 10)], [])
    for _ in range(2):
        await catalog.delete_all()
    assert await catalog.load() is None


async def test_the_old_owner_is_refused_whatever_it_does(catalog: Catalog) -> None:
    await opened(catalog, 10)
    await catalog.seal(epoch=1, end=10, producers=(), origins=())
    await catalog.claim(epoch=2, storage_id=B, has_tail=False)
    before = await catalog.load()
    for step in (
        catalog.claim(epoch=1, storage_id=A, has_tail=True),
        catalog.register(segment(10, 20), epoch=1, producers=(), origins=()),
        catalog.register(segment(0, 10), epoch=1, producers=(), origins=()),
        catalog.seal(epoch=1, end=10, producers=(), origins=()),
        catalog.mark_clean(epoch=1),
        catalog.mark_dirty(epoch=1),
        catalog.drop(epoch=1, before=10),
    ):
        with pytest.raises(Fenced) as caught:
            await step
        assert (caught.value.epoch, caught.value.current) == (1, 2)
    assert await catalog.load() == before
    assert len(await catalog.segments()) == 1


async def test_a_tail_on_another_disk_is_waited_for(catalog: Catalog) -> None:
    await opened(catalog, 10)
    before = await catalog.load()
    with pytest.raises(TailElsewhere, match="from 10 on are in journal disk-a"):
        await catalog.claim(epoch=2, storage_id=B, has_tail=False)
    with pytest.raises(TailElsewhere):
        await catalog.claim(epoch=2, storage_id=A, has_tail=False)
    assert await catalog.load() == before
    state = await catalog.claim(epoch=2, storage_id=A, has_tail=True)
    assert (state.epoch, state.end) == (2, 10)


async def test_a_tail_of_long_ago_is_not_believed(catalog: Catalog) -> None:
    """A → B → A: A still has messages of its first time, and B has the last ones."""
    await opened(catalog, 10)
    await catalog.seal(epoch=1, end=10, producers=(), origins=())
    await catalog.claim(epoch=2, storage_id=B, has_tail=False)
    await catalog.mark_dirty(epoch=2)
    with pytest.raises(TailElsewhere):
        await catalog.claim(epoch=3, storage_id=A, has_tail=True)


async def test_two_brokers_with_one_epoch(catalog: Catalog) -> None:
    await catalog.claim(epoch=1, storage_id=A, has_tail=False)
    with pytest.raises(EpochTaken, match="disk-a"):
        await catalog.claim(epoch=1, storage_id=B, has_tail=True)


async def test_the_last_segment_and_the_seal_in_one_write(catalog: Catalog) -> None:
    """Also when another has registered the segment already; not if more follows it."""
    await catalog.claim(epoch=1, storage_id=A, has_tail=False)
    last = segment(0, 10)
    sealed = await catalog.register(last, epoch=1, producers=PRODUCERS, origins=(), seals=True)
    assert (sealed.sealed, sealed.end, sealed.producers) == (True, 10, PRODUCERS)
    assert await catalog.register(last, epoch=1, producers=PRODUCERS, origins=(), seals=True) == sealed
    await catalog.claim(epoch=2, storage_id=A, has_tail=False)
    first = segment(10, 20, epoch=2)
    await catalog.register(first, epoch=2, producers=(), origins=())
    assert (await catalog.register(first, epoch=2, producers=(), origins=(), seals=True)).sealed
    await catalog.claim(epoch=3, storage_id=A, has_tail=False)
    third = segment(20, 30, epoch=3)
    await catalog.register(third, epoch=3, producers=(), origins=())
    await catalog.register(segment(30, 40, epoch=3), epoch=3, producers=(), origins=())
    with pytest.raises(DataGap):
        await catalog.register(third, epoch=3, producers=(), origins=(), seals=True)


async def test_a_seal_is_final_for_its_epoch(catalog: Catalog) -> None:
    await opened(catalog, 10)
    await catalog.seal(epoch=1, end=10, producers=(), origins=())
    with pytest.raises(TopicSealed):
        await catalog.claim(epoch=1, storage_id=A, has_tail=True)
    with pytest.raises(TopicSealed):
        await catalog.register(segment(10, 20), epoch=1, producers=(), origins=())


async def test_a_seal_that_does_not_fit_the_segments(catalog: Catalog) -> None:
    """Sealing at what memory accepted, and not at what was uploaded, would lose the difference."""
    await opened(catalog, 10)
    for end in (9, 11, 0):
        with pytest.raises(DataGap):
            await catalog.seal(epoch=1, end=end, producers=(), origins=())
    await catalog.seal(epoch=1, end=10, producers=(), origins=())
    with pytest.raises(DataGap):
        await catalog.seal(epoch=1, end=11, producers=(), origins=())


async def test_whoever_has_not_claimed_may_not_write(catalog: Catalog) -> None:
    with pytest.raises(TopicGone):
        await catalog.register(segment(0, 10), epoch=1, producers=(), origins=())
    await catalog.claim(epoch=1, storage_id=A, has_tail=False)
    with pytest.raises(NotClaimed):
        await catalog.register(segment(0, 10, epoch=2), epoch=2, producers=(), origins=())


# -- registering ---------------------------------------------------------------------------


async def test_gaps_and_overlaps_are_refused(catalog: Catalog) -> None:
    await opened(catalog, 10, 20)
    with pytest.raises(DataGap, match="ends at 20, and a segment begins at 21"):
        await catalog.register(segment(21, 30), epoch=1, producers=(), origins=())
    for start, end in ((0, 10), (0, 30), (5, 10), (10, 15), (19, 30)):
        with pytest.raises(SegmentConflict):
            await catalog.register(segment(start, end, suffix="other"), epoch=1, producers=(), origins=())
    assert [each.key for each in await catalog.segments()] == ["0-10-1-a", "10-20-1-a"]


async def test_a_segment_of_elsewhere_is_refused(catalog: Catalog) -> None:
    await catalog.claim(epoch=2, storage_id=A, has_tail=False)
    for foreign in (segment(0, 5, epoch=1), segment(0, 5, epoch=2, topic_id=8), segment(0, 0, epoch=2)):
        with pytest.raises(ValueError, match="another topic or epoch"):
            await catalog.register(foreign, epoch=2, producers=(), origins=())


async def test_two_uploads_of_the_same_range_at_once(metadata: FaultyMetadata, catalog: Catalog) -> None:
    """Both read the same state; the transaction of one succeeds, and the other finds what it did."""
    await catalog.claim(epoch=1, storage_id=A, has_tail=False)
    other = Catalog(metadata, TOPIC)
    metadata.plan(
        "txn", before(lambda: other.register(segment(0, 10, suffix="b"), epoch=1, producers=(), origins=()))
    )
    with pytest.raises(SegmentConflict):
        await catalog.register(segment(0, 10), epoch=1, producers=(), origins=())
    assert [each.key for each in await catalog.segments()] == ["0-10-1-b"]


async def test_an_owner_replaced_between_its_read_and_its_write(
    metadata: FaultyMetadata, catalog: Catalog
) -> None:
    await opened(catalog, 10)
    other = Catalog(metadata, TOPIC)
    metadata.plan("txn", before(lambda: other.claim(epoch=2, storage_id=A, has_tail=True)))
    with pytest.raises(Fenced):
        await catalog.register(segment(10, 20), epoch=1, producers=(), origins=())
    assert len(await catalog.segments()) == 1


async def test_segments_of_a_range(catalog: Catalog) -> None:
    segments = await opened(catalog, 10, 20, 30)
    assert await catalog.segments(10, 20) == segments[1:2]
    assert await catalog.segments(9, 21) == segments
    assert await catalog.segments(29) == segments[2:]
    assert await catalog.segments(30) == []
    assert await catalog.segments(0, 0) == []


# -- failures ------------------------------------------------------------------------------

STEPS: list[tuple[str, Callable[[Catalog], Awaitable[object]]]] = [
    ("load", lambda catalog: catalog.load()),
    ("claim", lambda catalog: catalog.claim(epoch=2, storage_id=A, has_tail=True)),
    ("register", lambda catalog: catalog.register(segment(10, 20), epoch=1, producers=(), origins=())),
    ("repeated", lambda catalog: catalog.register(segment(0, 10), epoch=1, producers=(), origins=())),
    ("seal", lambda catalog: catalog.seal(epoch=1, end=10, producers=(), origins=())),
    ("rest", lambda catalog: catalog.mark_clean(epoch=1)),
    ("wake", lambda catalog: catalog.mark_dirty(epoch=1)),
    ("segments", lambda catalog: catalog.segments()),
    ("drop", lambda catalog: catalog.drop(epoch=1, before=10)),
    ("delete_all", lambda catalog: catalog.delete_all()),
]
WRITES = [each for each in STEPS if each[0] not in ("load", "segments", "repeated")]


@pytest.mark.parametrize(("name", "step"), STEPS, ids=[name for name, _ in STEPS])
@pytest.mark.parametrize("method", ["get", "range", "txn"])
async def test_metadata_that_does_not_answer_is_never_an_empty_topic(
    metadata: FaultyMetadata,
    catalog: Catalog,
    method: str,
    name: str,
    step: Callable[[Catalog], Awaitable[object]],
) -> None:
    await opened(catalog, 10)
    state = await catalog.load()
    metadata.calls.clear()
    metadata.plan(method, refuse(UNAVAILABLE))
    if method in await calls_of(name, step):
        with pytest.raises(Unavailable):
            await step(catalog)
        assert await catalog.load() == state


async def calls_of(name: str, step: Callable[[Catalog], Awaitable[object]]) -> set[str]:
    """The methods that a step calls when all is well."""
    metadata = FaultyMetadata()
    catalog = Catalog(metadata, TOPIC)
    await opened(catalog, 10)
    metadata.calls.clear()
    await step(catalog)
    return set(metadata.calls)


@pytest.mark.parametrize(("name", "step"), WRITES, ids=[name for name, _ in WRITES])
@pytest.mark.parametrize("took_effect", [True, False])
async def test_a_lost_answer_is_looked_up(
    metadata: FaultyMetadata,
    catalog: Catalog,
    took_effect: bool,
    name: str,
    step: Callable[[Catalog], Awaitable[object]],
) -> None:
    """Whether or not the transaction took effect, the step ends as if it had been answered."""
    untroubled = Catalog(FaultyMetadata(), TOPIC)
    await opened(untroubled, 10)
    expected = await step(untroubled)
    await opened(catalog, 10)
    metadata.plan("txn", (lose_answer if took_effect else refuse)(UNKNOWN))
    assert await step(catalog) == expected
    assert await catalog.load() == await untroubled.load()
    assert await catalog.segments() == await untroubled.segments()
    assert metadata.is_done


@pytest.mark.parametrize(("name", "step"), WRITES, ids=[name for name, _ in WRITES])
async def test_a_lost_answer_that_cannot_be_looked_up_stays_unknown(
    metadata: FaultyMetadata, catalog: Catalog, name: str, step: Callable[[Catalog], Awaitable[object]]
) -> None:
    """'Unavailable' would say that nothing happened. Repeating the step later finds out."""
    await opened(catalog, 10)

    async def disconnect() -> None:
        metadata.plan("get", refuse(UNAVAILABLE))
        metadata.plan("range", refuse(UNAVAILABLE))

    async def lose(call: Callable[[], Awaitable[object]]) -> object:
        await disconnect()
        return await lose_answer(UNKNOWN)(call)

    metadata.plan("txn", lose)
    with pytest.raises(OutcomeUnknown):
        await step(catalog)
    for method in ("get", "range"):
        metadata._planned[method].clear()
    await step(catalog)


async def test_a_late_first_transaction_and_its_repetition_happen_once(
    metadata: FaultyMetadata, catalog: Catalog
) -> None:
    """The lost transaction takes effect only after the state was read again: the repetition then fails its
    comparison."""
    await opened(catalog, 10)
    held: list[Callable[[], Awaitable[object]]] = []

    async def delay(call: Callable[[], Awaitable[object]]) -> object:
        held.append(call)
        raise UNKNOWN

    metadata.plan("txn", delay, before(lambda: held[0]()))
    state = await catalog.register(segment(10, 20), epoch=1, producers=(), origins=())
    assert state.end == 20
    assert await catalog.segments() == [segment(0, 10), segment(10, 20)]


async def test_a_repetition_that_is_not_accepted_leaves_the_first_one_unknown(
    metadata: FaultyMetadata, catalog: Catalog
) -> None:
    """It is no reason to say that nothing happened: as long as the state can be read, it goes on."""
    await opened(catalog, 10)
    metadata.plan("txn", refuse(UNKNOWN), refuse(UNAVAILABLE), lose_answer(UNKNOWN))
    state = await catalog.register(segment(10, 20), epoch=1, producers=(), origins=())
    assert state.end == 20
    metadata.plan("txn", refuse(UNKNOWN), refuse(UNAVAILABLE))
    assert await catalog.drop(epoch=1, before=10) == [segment(0, 10)]


async def test_an_answer_after_a_lost_one_is_an_answer(metadata: FaultyMetadata, catalog: Catalog) -> None:
    """The claim was lost, and another broker's came first: that is known, and so is what it means."""
    await catalog.claim(epoch=1, storage_id=A, has_tail=False)
    await catalog.seal(epoch=1, end=0, producers=(), origins=())
    other = Catalog(metadata._real, TOPIC)

    async def lose(call: Callable[[], Awaitable[object]]) -> object:
        await other.claim(epoch=2, storage_id=B, has_tail=False)
        await other.mark_dirty(epoch=2)
        raise UNKNOWN

    metadata.plan("txn", lose)
    with pytest.raises(TailElsewhere):
        await catalog.claim(epoch=3, storage_id=A, has_tail=False)


async def test_endless_conflicts_end(metadata: FaultyMetadata, catalog: Catalog) -> None:
    await opened(catalog, 10)
    kv = await metadata.get(keys.state_key(TOPIC))

    async def touch() -> None:
        await metadata._real.put(kv.key, kv.value)

    metadata.plan("txn", *[before(touch)] * 20)
    with pytest.raises(CatalogBusy):
        await catalog.register(segment(10, 20), epoch=1, producers=(), origins=())


async def test_records_that_were_lost_or_damaged_are_an_error(
    metadata: FaultyMetadata, catalog: Catalog
) -> None:
    await opened(catalog, 10, 20, 30)
    second = keys.segment_key(TOPIC, 10)
    kv = await metadata.get(second)
    await metadata._real.delete(second)
    with pytest.raises(DataGap, match="offsets from 10 on are missing"):
        await catalog.segments()
    for broken in (b"{", b"\xff", b'{"topic_id": 7}', (await metadata.get(keys.segment_key(TOPIC, 0))).value):
        await metadata._real.put(second, broken)
        with pytest.raises(CatalogCorrupt):
            await catalog.segments()
    await metadata._real.put(second, kv.value)
    await metadata._real.delete(keys.segment_key(TOPIC, 20))
    with pytest.raises(DataGap, match="end at 20, and the state says 30"):
        await catalog.segments()
    await metadata._real.delete(keys.state_key(TOPIC))
    with pytest.raises(DataGap, match="without a state"):
        await catalog.segments()
    await metadata._real.put(keys.state_key(TOPIC), b"[]")
    with pytest.raises(CatalogCorrupt):
        await catalog.load()


# -- removing ------------------------------------------------------------------------------


async def test_drop_takes_whole_segments_from_the_front(catalog: Catalog) -> None:
    segments = await opened(catalog, 10, 20, 30)
    assert await catalog.drop(epoch=1, before=9) == []
    assert await catalog.drop(epoch=1, before=25) == segments[:2]
    state = await catalog.load()
    assert state is not None
    assert (state.start, state.end) == (20, 30)
    assert await catalog.segments() == segments[2:]
    assert await catalog.drop(epoch=1, before=1000) == segments[2:]
    assert await catalog.segments() == []
    assert (await catalog.register(segment(30, 40), epoch=1, producers=(), origins=())).start == 30


async def test_many_segments_are_removed_in_steps_without_a_gap_between(
    metadata: FaultyMetadata, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "STEP", 3)
    segments = await opened(catalog, *range(10, 111, 10))
    seen: list[int] = []

    async def look() -> None:
        seen.append(len(await catalog.segments()))

    metadata.plan("txn", *[after(look)] * 3)
    assert await catalog.drop(epoch=1, before=80) == segments[:8]
    assert seen == [8, 5, 3]
    assert await catalog.delete_all() == segments[8:]
    assert (await metadata.range(keys.topic_prefix(TOPIC))).kvs == ()


async def test_many_segments_are_read_in_pages_while_others_change_them(
    metadata: FaultyMetadata, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "PAGE", 4)
    segments = await opened(catalog, *range(10, 121, 10))
    assert await catalog.segments() == segments
    metadata.plan("range", after(lambda: catalog.drop(epoch=1, before=60)))
    assert await catalog.segments() == segments[6:]
    metadata.plan(
        "range", after(lambda: catalog.register(segment(120, 130), epoch=1, producers=(), origins=()))
    )
    assert [each.end for each in await catalog.segments()] == [*range(70, 131, 10)]
    metadata.plan("range", after(catalog.delete_all))
    assert await catalog.segments() == []


async def test_an_owner_that_wakes_up_after_the_deletion(catalog: Catalog) -> None:
    await opened(catalog, 10)
    await catalog.delete_all()
    for step in (
        catalog.register(segment(10, 20), epoch=1, producers=(), origins=()),
        catalog.seal(epoch=1, end=10, producers=(), origins=()),
        catalog.drop(epoch=1, before=10),
    ):
        with pytest.raises(TopicGone):
            await step
    assert await catalog.load() is None


async def test_a_topic_created_anew_under_the_same_name(metadata: FaultyMetadata, catalog: Catalog) -> None:
    """Also when the deletion of the old one was never finished: its offsets, seal and descriptors mean
    nothing."""
    await opened(catalog, 10, 20)
    await catalog.seal(epoch=1, end=20, producers=PRODUCERS, origins=())
    new = Catalog(metadata, TopicKey("default", "orders", 9))
    assert await new.load() is None
    assert await new.segments() == []
    assert await new.delete_all() == []
    state = await new.claim(epoch=1, storage_id=B, has_tail=False)
    assert (state.topic_id, state.start, state.end, state.producers) == (9, 0, 0, ())
    assert await new.segments() == []
    for step in (
        catalog.load(),
        catalog.segments(),
        catalog.claim(epoch=5, storage_id=A, has_tail=True),
        catalog.register(segment(20, 30), epoch=1, producers=(), origins=()),
    ):
        with pytest.raises(TopicGone):
            await step
    assert await catalog.delete_all() == []
    assert await new.load() == state


# -- keys ----------------------------------------------------------------------------------


async def test_an_operator_can_read_the_records(metadata: FaultyMetadata, catalog: Catalog) -> None:
    await opened(catalog, 10)
    found = {kv.key: msgspec.json.decode(kv.value) for kv in (await metadata.range("/storage/")).kvs}
    assert list(found) == [
        "/storage/topics/default/orders/objects/00000000000000000000",
        "/storage/topics/default/orders/state",
    ]
    assert found["/storage/topics/default/orders/state"]["end"] == 10


@pytest.mark.parametrize("name", ["", "a/b", "..", ".a", "a b", "a\n", "a#", "a%41", "a*", "x" * 300, "a\0"])
def test_names_that_cannot_be_part_of_a_key(name: str) -> None:
    for topic in (TopicKey("default", name, 1), TopicKey(name, "orders", 1)):
        with pytest.raises(InvalidStorageName):
            Catalog(FaultyMetadata(), topic)


@pytest.mark.parametrize("name", ["objects", "state", "orders-part-0", "_orders_1", "a.b"])
async def test_names_that_look_like_parts_of_a_key(name: str) -> None:
    catalog = Catalog(FaultyMetadata(), TopicKey(name, name, 7))
    segments = await opened(catalog, 10, 20)
    assert await catalog.segments() == segments


def test_object_keys_are_parsed_exactly() -> None:
    name = keys.ObjectName(TOPIC, 5, 9, 3, "0af1")
    key = keys.object_key(name)
    assert key == "topics/default/orders/7/00000000000000000005-00000000000000000009-3-0af1.parquet"
    assert keys.parse_object_key(key) == name
    for other in (
        key[1:],
        key + "#1",
        key.replace("/7/", "/07/"),
        key.replace("-3-", "-٣-"),
        key.replace("0af1", "0AF1"),
        "x/" + key,
    ):
        assert keys.parse_object_key(other) is None


async def test_a_descriptor_under_a_wrong_key_is_an_error(metadata: FaultyMetadata, catalog: Catalog) -> None:
    """An unknown key is none.

    Keys beside the known ones are a newer version's business."""
    segments = await opened(catalog, 10)
    await metadata._real.put(f"{keys.topic_prefix(TOPIC)}news", b"?")
    assert await catalog.segments() == segments
    await metadata._real.put(f"{keys.segments_prefix(TOPIC)}5", msgspec.json.encode(segment(5, 10)))
    with pytest.raises(CatalogCorrupt):
        await catalog.segments()


# -- all of it at once -----------------------------------------------------------------------


@dataclass
class Owner:
    """A broker that does any of its steps at any time, under the epoch that it was given last."""

    catalog: Catalog
    storage_id: str
    epoch: int = 1
    acknowledged: list[Segment] = field(default_factory=list)

    async def work(self, dice: random.Random) -> None:
        state = await self.catalog.load()
        assert state is not None
        steps = {"register": 12, "drop": 2, "seal": 2, "rest": 2, "wake": 2, "claim": 3, "assign": 2}
        match dice.choices(list(steps), list(steps.values()))[0]:
            case "register":
                start = max(0, state.end + dice.choice([0, 0, 0, 0, 1, -1]))
                made = segment(start, start + dice.randint(1, 9), epoch=self.epoch, suffix=f"{dice.random()}")
                await self.catalog.register(made, epoch=self.epoch, producers=(), origins=())
                self.acknowledged.append(made)
            case "drop":
                await self.catalog.drop(epoch=self.epoch, before=state.start + dice.randint(0, 20))
            case "seal":
                await self.catalog.seal(epoch=self.epoch, end=state.end, producers=(), origins=())
            case "rest":
                await self.catalog.mark_clean(epoch=self.epoch)
            case "wake":
                await self.catalog.mark_dirty(epoch=self.epoch)
            case "claim":
                await self.catalog.claim(epoch=self.epoch, storage_id=self.storage_id, has_tail=True)
            case "assign":
                self.epoch = state.epoch + 1


@pytest.mark.parametrize("seed", range(20))
async def test_owners_that_cross_each_other_never_make_a_gap(seed: int, metadata: FaultyMetadata) -> None:
    """Brokers with old and new epochs do anything at any time, answers are lost, and after each step the
    catalog has every acknowledged segment exactly once, in its place, unless retention took it."""
    print(f"seed {seed}")
    dice = random.Random(seed)
    owners = [Owner(Catalog(metadata, TOPIC), storage_id) for storage_id in (A, A, B)]
    reader = Catalog(metadata, TOPIC)
    await owners[0].catalog.claim(epoch=1, storage_id=A, has_tail=False)
    for _ in range(200):
        if dice.random() < 0.3:
            metadata.plan("txn", dice.choice([lose_answer(UNKNOWN), refuse(UNKNOWN), refuse(UNAVAILABLE)]))
        results = await asyncio.gather(*(owner.work(dice) for owner in owners), return_exceptions=True)
        assert all(result is None or isinstance(result, SavaError) for result in results), results
        metadata._planned.clear()
        check(await reader.load(), await reader.segments(), owners)
    assert sum(len(owner.acknowledged) for owner in owners) > 20
    assert max(owner.epoch for owner in owners) > 3


def check(state: TopicState | None, segments: list[Segment], owners: list[Owner]) -> None:
    assert state is not None
    here = {each.start: each for each in segments}
    for owner in owners:
        for each in owner.acknowledged:
            assert each.end <= state.start or here[each.start] == each
    if segments:
        assert (segments[0].start, segments[-1].end) == (state.start, state.end)
