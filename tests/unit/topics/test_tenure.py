"""A broker's hold on a topic: when it begins, what it outlives, and what ends it."""

from __future__ import annotations

import asyncio

import pytest

from sava.metadata.commands import Put
from sava.metadata.errors import Unavailable
from sava.metadata.records import absent
from sava.topics import ownership, specs
from sava.topics.errors import NotOwner, TopicUnknown
from sava.topics.ownership import Tenure
from sava.topics.registry import Registry
from sava.topics.specs import OwnershipState
from tests.support.topics import ORDERS, World
from tests.unit.storage.faults import UNAVAILABLE, FaultyMetadata, after, refuse


@pytest.fixture
async def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("world"))
    world.metadata = FaultyMetadata()
    return world


async def begin(world: World, broker: int = 1, **more: object) -> Tenure:
    return await ownership.take(Registry(world.metadata), world.metadata, ORDERS, broker, **more)  # type: ignore[arg-type]  # only forwards


X = (Put("/x", b""),)


class TestBeginning:
    async def test_every_beginning_has_the_next_epoch_and_ends_the_one_before(self, world: World) -> None:
        await world.assigned(1)
        first = await begin(world, incarnation=7)
        second = await begin(world, incarnation=7)
        assert (first.epoch, second.epoch) == (2, 3)
        assert not (await world.metadata.txn((first.holds,), X)).succeeded
        assert (await world.metadata.txn((second.holds,), X)).succeeded
        assert (world.ownership().owner, world.ownership().incarnation) == (1, 7)

    async def test_many_at_once_get_different_epochs(self, world: World) -> None:
        await world.assigned(1)
        taken = await asyncio.gather(*(begin(world) for _ in range(10)))
        assert sorted(held.epoch for held in taken) == list(range(2, 12))

    async def test_another_broker_is_told_who_the_owner_is(self, world: World) -> None:
        await world.assigned(1)
        with pytest.raises(NotOwner) as refused:
            await begin(world, broker=2)
        assert refused.value.owner == 1

    @pytest.mark.parametrize("step", ["move", "delete"])
    async def test_what_its_owner_is_giving_up_is_not_taken_up_again(self, world: World, step: str) -> None:
        await world.assigned(1)
        await world.step(step)
        with pytest.raises(NotOwner) as refused:
            await begin(world)
        assert refused.value.owner == 0

    async def test_an_owner_that_comes_back_takes_up_what_it_left_behind(self, world: World) -> None:
        await world.assigned(1)
        await world.step("orphan")
        with pytest.raises(NotOwner) as refused:
            await begin(world, broker=2)
        assert refused.value.owner == 0
        assert (await begin(world, incarnation=8)).epoch == 2
        assert world.ownership().state is OwnershipState.ASSIGNED

    async def test_what_nobody_has_is_for_the_controller_to_give(self, world: World) -> None:
        await world.assigned(1)
        await world.step("give_back")
        with pytest.raises(NotOwner) as refused:
            await begin(world)
        assert refused.value.owner == 0
        await world.step("assign", owner=2)
        assert (await begin(world, broker=2)).epoch == 3

    async def test_a_topic_that_is_being_deleted_is_nobodys(self, world: World) -> None:
        await world.assigned(1)
        family = await Registry(world.metadata).begin_delete(ORDERS)
        with pytest.raises(TopicUnknown):
            await begin(world)
        await Registry(world.metadata).finish_delete(family)
        assert world.metadata.local.get(specs.ownership_key(ORDERS)) is None


class TestGoingOn:
    async def test_it_outlives_the_beginning_of_a_move(self, world: World) -> None:
        await world.assigned(1)
        held = await begin(world)
        before = held.holds
        await world.step("move", target=2)
        assert not (await world.metadata.txn((held.holds,), X)).succeeded
        assert await held.still_holds()
        assert held.holds != before
        assert (await world.metadata.txn((held.holds,), X)).succeeded

    async def test_a_write_is_tried_again_under_the_record_as_it_is_now(self, world: World) -> None:
        await world.assigned(1)
        held = await begin(world)
        await world.step("move", target=2)
        assert (await held.write(X)).succeeded

    async def test_a_condition_of_its_own_that_does_not_hold_is_no_end(self, world: World) -> None:
        await world.assigned(1)
        held = await begin(world)
        await world.metadata.put("/x", b"")
        assert not (await held.write(X, absent("/x"))).succeeded

    @pytest.mark.parametrize("step", ["orphan", "give_back", "delete"])
    async def test_every_other_change_is_its_end(self, world: World, step: str) -> None:
        """Also an orphan's, whose epoch is the same: the cluster has given its owner up."""
        lost: list[Tenure] = []
        await world.assigned(1)
        held = await begin(world, lost=lost.append)
        await world.step(step)
        assert not await held.still_holds()
        with pytest.raises(NotOwner):
            await held.write(X)
        assert lost == [held, held]
        assert world.metadata.local.get("/x") is None

    async def test_a_move_that_was_taken_back_is_its_end_too(self, world: World) -> None:
        await world.assigned(1)
        held = await begin(world)
        await world.step("move", target=2)
        await world.step("roll_back")
        assert not await held.still_holds()

    async def test_a_record_that_cannot_be_read_says_nothing(self, world: World) -> None:
        lost: list[Tenure] = []
        await world.assigned(1)
        held = await begin(world, lost=lost.append)
        world.metadata.plan("get", refuse(UNAVAILABLE))  # type: ignore[attr-defined]  # of FaultyMetadata
        with pytest.raises(Unavailable):
            await held.still_holds()
        assert lost == []
        assert await held.still_holds()

    async def test_an_overtaken_answer_does_not_bring_back_an_older_revision(self, world: World) -> None:
        await world.assigned(1)
        held = await begin(world)

        async def move_and_notice() -> None:
            await world.step("move", target=2)
            await held.check()

        world.metadata.plan("get", after(move_and_notice))  # type: ignore[attr-defined]  # of FaultyMetadata
        await held.check()
        assert (await world.metadata.txn((held.holds,), X)).succeeded


class TestResuming:
    async def test_a_move_is_finished_under_its_own_epoch(self, world: World) -> None:
        await world.assigned(1)
        epoch = (await begin(world)).epoch
        await world.step("move", target=2)
        resumed = await ownership.resume(Registry(world.metadata), world.metadata, ORDERS, 1)
        assert resumed.epoch == epoch
        assert (await resumed.write(X)).succeeded

    @pytest.mark.parametrize("broker", [1, 2])
    async def test_there_is_nothing_to_resume_but_an_own_move(self, world: World, broker: int) -> None:
        await world.assigned(1)
        if broker == 2:
            await world.step("move", target=2)
        with pytest.raises(NotOwner):
            await ownership.resume(Registry(world.metadata), world.metadata, ORDERS, broker)
