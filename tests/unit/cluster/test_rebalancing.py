"""Rebalancing: topics go from those that have too much, never to and fro, and within limits."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sava.cluster.loads import LoadReport, TopicLoad
from sava.cluster.rebalancer import (
    Movable,
    Spread,
    is_excluded,
    plan_moves,
)
from sava.cluster.records import NotController, RebalanceRunning
from tests.support.waiting import until
from tests.unit.cluster.fake_brokers import World, config, topic, world

# -- pure ----------------------------------------------------------------------------------------------------


def cluster(*loads: list[float]) -> tuple[dict[int, float], dict[int, list[Movable]]]:
    movable = {
        broker: [Movable(topic(f"{broker}-{index}"), load) for index, load in enumerate(topics)]
        for broker, topics in enumerate(loads, start=1)
    }
    return {broker: sum(each.load for each in topics) for broker, topics in movable.items()}, movable


def imbalance(loads: dict[int, float]) -> float:
    return Spread.of(list(loads.values())).imbalance


def test_the_imbalance_is_deviation_over_mean() -> None:
    assert Spread.of([10.0, 10.0]).imbalance == 0.0
    assert Spread.of([0.0, 20.0]).imbalance == 1.0
    assert Spread.of([]).imbalance == Spread.of([0.0, 0.0]).imbalance == 0.0
    assert Spread.of([5.0, 10.0, 15.0]).imbalance == pytest.approx(0.40825, abs=1e-4)


def test_who_stands_out() -> None:
    uneven = Spread.of([100.0, 100.0, 400.0])
    assert uneven.is_over(400.0)
    assert not uneven.is_over(100.0)
    few = Spread.of([2.0, 0.0])
    assert not few.is_over(2.0)
    assert not few.is_under(0.0)


def test_an_even_cluster_is_left_alone() -> None:
    loads, movable = cluster([1.0] * 10, [1.0] * 9, [1.0] * 11)
    assert plan_moves(loads, movable, threshold=0.2, limit=10) == []


def test_an_empty_broker_gets_topics_until_the_threshold_is_met() -> None:
    loads, movable = cluster([1.0] * 20, [1.0] * 20, [])
    moves = plan_moves(loads, movable, threshold=0.3, limit=100)
    assert {move.to_broker for move in moves} == {3}
    assert {move.from_broker for move in moves} == {1, 2}
    for move in moves:
        loads[move.from_broker] -= 1
        loads[move.to_broker] += 1
    assert imbalance(loads) <= 0.3
    assert len({move.topic for move in moves}) == len(moves)


def test_the_lightest_go_first_and_no_more_than_allowed() -> None:
    loads, movable = cluster([5.0, 1.0, 3.0, 9.0, 2.0], [])
    moves = plan_moves(loads, movable, threshold=0.2, limit=2)
    assert [move.load for move in moves] == [1.0, 2.0]


def test_one_heavy_topic_stays_where_it_is() -> None:
    """Elsewhere it would weigh as much: moving it gains nothing, and it would be moved for ever."""
    loads, movable = cluster([100.0], [], [])
    assert plan_moves(loads, movable, threshold=0.2, limit=10) == []


def test_a_topic_goes_only_where_it_fits() -> None:
    loads, movable = cluster([1.0] * 20, [], [1.0])
    moves = plan_moves(loads, movable, threshold=0.2, limit=5, fits=lambda each, broker: broker == 3)
    assert {move.to_broker for move in moves} == {3}


def test_excluded_by_name_by_partitioned_topic_or_by_namespace() -> None:
    part = topic("x").partition(2)
    assert is_excluded(topic("x"), ("/default/tx",))
    assert is_excluded(part, ("/default/tx",))
    assert is_excluded(topic("x"), ("/default/*",))
    assert not is_excluded(topic("x"), ("/default/t", "/other/*"))


@given(
    st.lists(st.lists(st.floats(0.01, 1000), max_size=12), min_size=2, max_size=6),
    st.sampled_from((0.2, 0.3, 0.4)),
)
def test_every_move_makes_brokers_more_equal_so_it_comes_to_an_end(
    topics: list[list[float]], threshold: float
) -> None:
    loads, movable = cluster(*topics)
    for _ in range(200):
        moves = plan_moves(loads, movable, threshold=threshold, limit=3)
        if not moves:
            break
        for move in moves:
            before = imbalance(loads)
            assert before > threshold
            moved = next(each for each in movable[move.from_broker] if each.topic == move.topic)
            movable[move.from_broker].remove(moved)
            movable[move.to_broker].append(moved)
            loads = {broker: sum(each.load for each in has) for broker, has in movable.items()}
            assert imbalance(loads) < before
    else:
        raise AssertionError("it goes on and on")


# -- rounds --------------------------------------------------------------------------------------------------


async def uneven(w: World, topics: int = 12) -> None:
    """Everything is at broker 1."""
    names = [topic(index) for index in range(topics)]
    await w.add(1)
    await w.create(names)
    await w.served(names)
    await w.add(2)
    await w.sees(lambda: 2 in w.view.brokers)


async def test_a_round_moves_topics_until_brokers_are_equal_enough() -> None:
    async with world(config(max_moves_per_hour=10)) as w:
        await uneven(w)
        before = w.controller.balance()
        assert before.coefficient_of_variation == 1.0
        assert [each.is_overloaded for each in before.brokers] == [True, False]
        assert [each.is_underloaded for each in before.brokers] == [False, True]
        planned = await w.controller.rebalance(dry_run=True, max_moves=0)
        assert w.view.counts() == {1: 12, 2: 0}
        done = await w.controller.rebalance(dry_run=False, max_moves=0)
        assert [move.topic for move in done.moves] == [move.topic for move in planned.moves]
        assert not any(move.error for move in done.moves)
        assert done.after.coefficient_of_variation <= done.after.threshold == 0.3
        assert done.after.moves_last_hour == len(done.moves) == w.controller.moves
        assert (await w.controller.rebalance(dry_run=False, max_moves=0)).moves == ()


async def test_a_round_keeps_to_the_moves_of_an_hour_unless_it_is_told_a_number() -> None:
    async with world(config(max_moves_per_hour=2)) as w:
        await uneven(w, topics=20)
        assert len((await w.controller.rebalance(dry_run=False, max_moves=0)).moves) == 2
        assert len((await w.controller.rebalance(dry_run=False, max_moves=0)).moves) == 0
        assert len((await w.controller.rebalance(dry_run=False, max_moves=3)).moves) == 3


@pytest.mark.parametrize(
    "limit", [{"min_topic_age_seconds": 60}, {"exclude_topics": ("/default/*",)}, {"min_brokers": 3}]
)
async def test_what_must_not_move_does_not(limit: dict[str, Any]) -> None:
    async with world(config(**limit)) as w:
        await uneven(w)
        assert (await w.controller.rebalance(dry_run=True, max_moves=0)).moves == ()


async def test_a_move_that_fails_ends_the_round() -> None:
    async with world() as w:
        await uneven(w)
        w.brokers[1].fails = lambda name: "the object store is down"
        done = await w.controller.rebalance(dry_run=False, max_moves=5)
        assert [move.error for move in done.moves] == ["the object store is down"]
        assert w.controller.move_failures == 1


async def test_a_move_that_its_owner_postpones_ends_the_round_and_is_not_counted() -> None:
    """The object store is down ─▶ a round says so, and neither uses up the moves of the hour nor begins the
    pause before the next round."""
    async with world(config(max_moves_per_hour=1)) as w:
        names = [topic(index) for index in range(12)]
        await w.add(1)
        await w.create(names, reliable=True)
        await w.served(names)
        await w.add(2)
        await w.sees(lambda: 2 in w.view.brokers)
        w.stores_down.add(1)
        done = await w.controller.rebalance(dry_run=False, max_moves=0)
        assert ["object store" in move.error for move in done.moves] == [True]
        assert done.after.moves_last_hour == 0
        w.stores_down.clear()
        done = await w.controller.rebalance(dry_run=False, max_moves=0)
        assert [move.error for move in done.moves] == [""]


async def test_rounds_come_by_themselves_and_one_at_a_time() -> None:
    async with world(config(enabled=True, check_interval_seconds=1, max_moves_per_hour=100)) as w:
        await uneven(w)
        w.brokers[1].hangs = True
        await until(lambda: any(entry.record.reason == "rebalance" for entry in w.view.entries()))
        with pytest.raises(RebalanceRunning):
            await w.controller.rebalance(dry_run=False, max_moves=1)
        w.brokers[1].hangs = False
        w.brokers[1].wake()
        await until(lambda: w.view.counts()[2] >= 4)
        assert w.controller.balance().is_enabled


async def test_loads_that_are_reported_decide_when_they_are_to() -> None:
    """Broker 1 has fewer topics, and far more to do."""
    async with world(config("balanced")) as w:
        await w.add(1, 2)
        names = [topic(index) for index in range(10)]
        await w.create(names)
        await w.served(names)
        for broker, cpu in ((1, 90.0), (2, 5.0)):
            owned = [str(entry.name) for entry in w.view.owned_by(broker)]
            loads = tuple(TopicLoad(topic=name, producers=3) for name in owned)
            w.controller.loads.record(
                LoadReport(broker_id=broker, cpu_percent=cpu, memory_percent=cpu, topics=loads)
            )
        planned = await w.controller.rebalance(dry_run=True, max_moves=1)
        assert [(move.from_broker, move.to_broker) for move in planned.moves] == [(1, 2)]
        assert planned.before.strategy == "balanced"
        assert planned.before.brokers[0].cpu_percent == 90.0


async def test_only_the_leader_knows_the_balance() -> None:
    async with world(leads=False) as w:
        with pytest.raises(NotController):
            w.controller.balance()
        with pytest.raises(NotController):
            await asyncio.wait_for(w.controller.rebalance(dry_run=True, max_moves=0), 1)
