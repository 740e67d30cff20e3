"""A right to write that is given and taken outside of storage: without it nothing is written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sava.metadata.commands import Compare, Relation, Target
from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.storage import catalog as catalog_module
from sava.storage.catalog import Catalog, known_state
from sava.storage.errors import CatalogBusy, Fenced
from sava.storage.topic_log import LogStatus
from sava.storage.types import TopicKey, TopicState
from tests.support.storage import TOPIC, Cluster, append_each, batch
from tests.unit.storage.faults import (
    UNAVAILABLE,
    UNKNOWN,
    FaultyMetadata,
    after,
    before,
    lose_answer,
    refuse,
)
from tests.unit.storage.test_catalog import A, B, opened, segment

OWNER = "/owner"


class Right:
    """Of whoever the record names; the record may be written again meanwhile."""

    def __init__(self, metadata: FaultyMetadata, name: bytes) -> None:
        self._metadata = metadata
        self._name = name
        self._revision = 0
        self.asked = 0

    @classmethod
    async def give(cls, metadata: FaultyMetadata, name: bytes = b"a") -> Right:
        right = cls(metadata, name)
        right._revision = (await metadata._real.put(OWNER, name)).revision
        return right

    @property
    def holds(self) -> Compare:
        return Compare(OWNER, Target.MOD_REVISION, Relation.EQUAL, self._revision)

    async def still_holds(self) -> bool:
        self.asked += 1
        kv = await self._metadata.get(OWNER)
        if kv is None or kv.value != self._name:
            return False
        self._revision = kv.mod_revision
        return True


STEPS: list[tuple[str, Callable[[Catalog], Awaitable[object]]]] = [
    ("claim", lambda catalog: catalog.claim(epoch=2, storage_id=A, has_tail=True)),
    ("register", lambda catalog: catalog.register(segment(10, 20), epoch=1, producers=(), origins=())),
    ("seal", lambda catalog: catalog.seal(epoch=1, end=10, producers=(), origins=())),
    ("rest", lambda catalog: catalog.mark_clean(epoch=1)),
    ("wake", lambda catalog: catalog.mark_dirty(epoch=1)),
    ("drop", lambda catalog: catalog.drop(epoch=1, before=10)),
]
every_step = pytest.mark.parametrize("step", [step for _, step in STEPS], ids=[name for name, _ in STEPS])
Step = Callable[[Catalog], Awaitable[object]]


@every_step
async def test_without_the_right_nothing_is_written(metadata: FaultyMetadata, step: Step) -> None:
    """Also if nobody has claimed the topic since."""
    right = await Right.give(metadata)
    catalog = Catalog(metadata, TOPIC, right)
    await opened(catalog, 10)
    state, segments = await catalog.load(), await catalog.segments()
    await Right.give(metadata, b"b")
    with pytest.raises(Fenced, match="topic /default/orders: it has another owner by now"):
        await step(catalog)
    assert (await catalog.load(), await catalog.segments()) == (state, segments)
    assert right.asked == 1


@every_step
async def test_a_right_that_was_written_anew_goes_on(metadata: FaultyMetadata, step: Step) -> None:
    """Somebody wants the topic moved: the record changes, and its owner has work to do first."""
    catalog = Catalog(metadata, TOPIC, await Right.give(metadata))
    untroubled = Catalog(FaultyMetadata(), TOPIC)
    await opened(catalog, 10)
    await opened(untroubled, 10)
    await Right.give(metadata)
    assert await step(catalog) == await step(untroubled)
    assert await catalog.load() == await untroubled.load()


@every_step
async def test_a_right_that_is_lost_between_read_and_write(metadata: FaultyMetadata, step: Step) -> None:
    catalog = Catalog(metadata, TOPIC, await Right.give(metadata))
    await opened(catalog, 10)
    state = await catalog.load()
    metadata.plan("txn", before(lambda: Right.give(metadata, b"b")))
    with pytest.raises(Fenced):
        await step(catalog)
    assert await catalog.load() == state


@every_step
async def test_when_it_cannot_be_asked_nothing_was_written(metadata: FaultyMetadata, step: Step) -> None:
    right = await Right.give(metadata)
    catalog = Catalog(metadata, TOPIC, right)
    await opened(catalog, 10)
    state = await catalog.load()
    await Right.give(metadata, b"b")

    async def still_holds() -> bool:
        raise UNAVAILABLE

    right.still_holds = still_holds  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await step(catalog)
    assert await catalog.load() == state


@every_step
async def test_it_is_not_asked_while_all_is_well(metadata: FaultyMetadata, step: Step) -> None:
    right = await Right.give(metadata)
    catalog = Catalog(metadata, TOPIC, right)
    await opened(catalog, 10)
    await step(catalog)
    assert right.asked == 0


async def test_a_state_that_changed_says_more_than_the_right(metadata: FaultyMetadata) -> None:
    """The next owner has claimed the topic already: its epoch is told."""
    right = await Right.give(metadata)
    catalog = Catalog(metadata, TOPIC, right)
    await opened(catalog, 10)
    other = Catalog(metadata._real, TOPIC)

    async def replaced() -> None:
        await Right.give(metadata, b"b")
        await other.claim(epoch=2, storage_id=A, has_tail=True)

    metadata.plan("txn", before(replaced))
    with pytest.raises(Fenced) as caught:
        await catalog.register(segment(10, 20), epoch=1, producers=(), origins=())
    assert caught.value.current == 2
    assert right.asked == 0


async def test_a_lost_answer_and_a_lost_right(metadata: FaultyMetadata) -> None:
    """What took effect before the right ended is done; what did not never will."""
    catalog = Catalog(metadata, TOPIC, await Right.give(metadata))
    await opened(catalog, 10)

    async def lose(call: Callable[[], Awaitable[object]]) -> object:
        await call()
        await Right.give(metadata, b"b")
        raise UNKNOWN

    metadata.plan("txn", lose)
    assert (await catalog.mark_clean(epoch=1)).is_clean
    catalog = Catalog(metadata, TOPIC, await Right.give(metadata))
    metadata.plan("txn", refuse(UNKNOWN), before(lambda: Right.give(metadata, b"b")))
    with pytest.raises(Fenced):
        await catalog.mark_dirty(epoch=1)


async def test_a_lost_answer_and_a_right_that_cannot_be_asked_for(metadata: FaultyMetadata) -> None:
    right = await Right.give(metadata)
    catalog = Catalog(metadata, TOPIC, right)
    await opened(catalog, 10)

    async def still_holds() -> bool:
        raise UNAVAILABLE

    right.still_holds = still_holds  # type: ignore[method-assign]
    metadata.plan("txn", refuse(UNKNOWN), before(lambda: Right.give(metadata)))
    with pytest.raises(OutcomeUnknown):
        await catalog.mark_clean(epoch=1)


async def test_a_right_that_changes_all_the_time(metadata: FaultyMetadata) -> None:
    catalog = Catalog(metadata, TOPIC, await Right.give(metadata))
    await opened(catalog, 10)
    metadata.plan("txn", *[before(lambda: Right.give(metadata))] * 20)
    with pytest.raises(CatalogBusy):
        await catalog.mark_clean(epoch=1)


async def test_answers_that_are_lost_all_the_time_leave_the_outcome_unknown(metadata: FaultyMetadata) -> None:
    """The last of the transactions may still take effect: 'busy' would say that it did not."""
    catalog = Catalog(metadata, TOPIC)
    await opened(catalog, 10)
    metadata.plan("txn", *[refuse(UNKNOWN)] * 20)
    with pytest.raises(OutcomeUnknown):
        await catalog.mark_clean(epoch=1)
    metadata._planned.clear()
    metadata.plan("txn", *[refuse(UNKNOWN)] * 20)
    with pytest.raises(OutcomeUnknown):
        await catalog.drop(epoch=1, before=10)


async def test_a_right_that_is_lost_between_two_steps_of_a_removal(
    metadata: FaultyMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "STEP", 1)
    catalog = Catalog(metadata, TOPIC, await Right.give(metadata))
    segments = await opened(catalog, 10, 20, 30)
    metadata.plan("txn", after(lambda: Right.give(metadata, b"b")))
    with pytest.raises(Fenced):
        await catalog.drop(epoch=1, before=30)
    assert await catalog.segments() == segments[1:]


async def test_an_owner_without_the_right_wakes_nothing_and_acknowledges_nothing(
    tmp_path: Path, metadata: FaultyMetadata
) -> None:
    """Nobody has claimed the topic yet: whoever will finds it at rest."""
    cluster = Cluster(tmp_path, metadata=metadata)
    async with cluster.broker() as broker:
        log = await broker.open_topic(TOPIC, epoch=1, guard=await Right.give(metadata))
        await Right.give(metadata, b"b")
        with pytest.raises(Fenced):
            await log.append(batch("x"))
        assert log.status is LogStatus.FENCED
        with pytest.raises(Fenced):
            await broker.open_topic(TOPIC, epoch=2, guard=Right(metadata, b"a"))
        log = await broker.open_topic(TOPIC, epoch=2, guard=await Right.give(metadata))
        await append_each(log, 0, 3)
        await Right.give(metadata)
        assert (await log.seal()).end == 3


async def test_the_state_as_this_node_knows_it(metadata: FaultyMetadata) -> None:
    assert known_state(metadata.local, TOPIC) is None
    catalog = Catalog(metadata, TOPIC)
    state = await catalog.claim(epoch=1, storage_id=B, has_tail=False)
    assert known_state(metadata.local, TOPIC) == state
    assert state.is_settled
    await catalog.mark_dirty(epoch=1)
    known = known_state(metadata.local, TOPIC)
    assert isinstance(known, TopicState)
    assert not known.is_settled
    for other in (6, 8):
        assert known_state(metadata.local, TopicKey(TOPIC.namespace, TOPIC.name, other)) is None


@pytest.mark.parametrize("took_effect", [True, False])
async def test_a_lost_answer_is_looked_up_with_a_right_too(
    metadata: FaultyMetadata, took_effect: bool
) -> None:
    catalog = Catalog(metadata, TOPIC, await Right.give(metadata))
    await opened(catalog, 10)
    metadata.plan("txn", (lose_answer if took_effect else refuse)(UNKNOWN))
    assert (await catalog.mark_clean(epoch=1)).is_clean
    assert (await catalog.load() or TopicState(topic_id=0, epoch=0, storage_id="")).is_clean
