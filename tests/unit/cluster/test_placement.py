"""Where topics go: to the least loaded broker that can have them, taking turns."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sava.cluster import planning, records
from sava.cluster.loads import LoadReport, Loads, TopicLoad
from sava.cluster.planning import Candidate, Placement
from sava.cluster.records import BrokerMode, Mode
from sava.metadata.commands import Put
from sava.topics import specs
from tests.support.memory_store import MemoryStore
from tests.unit.cluster.fake_brokers import registration


def candidates(*brokers: int, **stores: str) -> dict[int, Candidate]:
    return {
        broker: Candidate(registration(broker, store_id=stores.get(f"b{broker}", "shared")), ())
        for broker in brokers
    }


def by_count(counts: dict[int, int], last: int = 0) -> Placement:
    loads = {broker: float(count) for broker, count in counts.items()}
    return Placement(candidates(*counts), counts, loads, last=last)


def place(placing: Placement, count: int) -> Counter[int]:
    chosen: Counter[int] = Counter()
    for _ in range(count):
        candidate = placing.choose()
        assert candidate is not None
        chosen[candidate.broker] += 1
    return chosen


def test_the_one_with_the_fewest_topics_gets_the_next() -> None:
    assert place(by_count({1: 5, 2: 0, 3: 3}), 7) == {2: 5, 3: 2}


def test_equals_take_turns_and_go_on_where_they_were() -> None:
    placing = by_count({1: 0, 2: 0, 3: 0}, last=1)
    order = [candidate.broker for _ in range(4) if (candidate := placing.choose()) is not None]
    assert order == [2, 3, 1, 2]


@given(st.dictionaries(st.integers(1, 9), st.integers(0, 50), min_size=1), st.integers(1, 300))
def test_many_in_one_go_leave_brokers_as_equal_as_one_by_one(counts: dict[int, int], topics: int) -> None:
    placed = place(by_count(counts), topics)
    after = {broker: count + placed[broker] for broker, count in counts.items()}
    got_some = [after[broker] for broker in placed]
    assert max(got_some) <= min(after.values()) + 1


def test_the_broker_that_a_topic_leaves_is_the_last_choice() -> None:
    placing = by_count({1: 0, 2: 9})
    chosen = placing.choose(leaves=1)
    assert chosen is not None
    assert chosen.broker == 2
    alone = by_count({1: 0})
    assert alone.choose(leaves=1) is not None
    assert alone.choose(leaves=1, may_return=False) is None


def test_the_target_of_a_move_gets_it_if_it_can() -> None:
    placing = Placement(candidates(1, 2, 3, b3="other"), {1: 0, 2: 50, 3: 0}, {1: 0.0, 2: 50.0, 3: 0.0})
    assert [
        candidate.broker
        for target in (2, 3, 4)
        if (candidate := placing.choose(store_id="shared", target=target)) is not None
    ] == [2, 1, 1]


def test_segments_must_be_readable_there() -> None:
    placing = Placement(candidates(1, 2, b2="other"), {}, {})
    chosen = placing.choose(store_id="other")
    assert chosen is not None
    assert chosen.broker == 2
    assert placing.choose(store_id="a third") is None


def test_nearly_equal_loads_are_equal_and_counts_decide() -> None:
    placing = Placement(candidates(1, 2, 3), {1: 9, 2: 2, 3: 1}, {1: 50.0, 2: 54.0, 3: 80.0})
    chosen = placing.choose()
    assert chosen is not None
    assert chosen.broker == 2


async def test_candidates_are_active_and_a_mode_that_cannot_be_read_is_not() -> None:
    store = MemoryStore()
    await store.put(records.mode_key(2), specs.encode(BrokerMode(mode=Mode.DRAINING)))
    await store.put(records.mode_key(3), b"?")
    await store.put(records.mode_key(4), specs.encode(BrokerMode(mode=Mode.ACTIVE, reason="again")))
    there = {broker: registration(broker) for broker in (1, 2, 3, 4, 5, 6)}
    for broker in (1, 2, 3, 4):
        await store.put(records.registration_key(broker), specs.encode(there[broker]))
    await store.put(records.registration_key(5), b"?")
    assert list(planning.candidates(there, store.local)) == [1, 4]
    store.close()


# -- loads ---------------------------------------------------------------------------------------------------


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def topics(count: int, **fields: float) -> tuple[TopicLoad, ...]:
    return tuple(TopicLoad(topic=f"/default/t{i}", **fields) for i in range(count))  # type: ignore[arg-type]


def report(broker: int, *, cpu: float, memory: float, topics: tuple[TopicLoad, ...] = ()) -> LoadReport:
    return LoadReport(broker_id=broker, cpu_percent=cpu, memory_percent=memory, topics=topics)


def test_fair_counts_topics_whatever_is_reported() -> None:
    loads = Loads(interval_s=30)
    loads.record(report(1, cpu=99, memory=99))
    assert loads.by_broker("fair", {1: 2, 2: 3}) == {1: 2.0, 2: 3.0}
    assert loads.by_broker("round_robin", {1: 2, 2: 3}) == {1: 2.0, 2: 3.0}


def test_balanced_adds_work_cpu_and_memory() -> None:
    loads = Loads(interval_s=30)
    busy = topics(1, megabytes_per_second=2.0, producers=1, consumers=2, backlog=10_000)
    loads.record(report(1, cpu=40, memory=20, topics=busy))
    work = 0.2 + 0.3 * 2 + 0.3 * 3 + 0.2
    assert loads.by_broker("balanced", {1: 1})[1] == pytest.approx(0.3 * work + 0.35 * 40 + 0.35 * 20)


def test_weighted_load_is_relative_and_scarce_resources_count_half() -> None:
    loads = Loads(interval_s=30)
    loads.record(report(1, cpu=20, memory=60, topics=topics(2, megabytes_per_second=1.0, producers=1)))
    loads.record(report(2, cpu=10, memory=60))
    counts = {1: 2, 2: 0}
    relaxed = loads.by_broker("weighted_load", counts)
    assert relaxed == pytest.approx({1: 100.0, 2: 25 * 0.5 + 25})
    loads.record(report(2, cpu=10, memory=90))
    short_of_memory = loads.by_broker("weighted_load", counts)
    rest = 50 / 75
    assert short_of_memory[2] == pytest.approx(50 + 25 * rest * 0.5)
    assert short_of_memory[1] == pytest.approx(50 * 60 / 90 + 50)


def test_a_broker_without_a_fresh_report_weighs_what_its_topics_weigh() -> None:
    clock = Clock()
    loads = Loads(interval_s=10, clock=clock)
    assert loads.by_broker("balanced", {1: 4, 2: 1}) == {1: 4.0, 2: 1.0}
    loads.record(report(1, cpu=40, memory=40, topics=topics(4)))
    known = loads.by_broker("balanced", {1: 4, 2: 1})
    assert known[2] == pytest.approx(known[1] / 4)
    clock.now = 31
    assert loads.of(1) is None
    assert loads.by_broker("balanced", {1: 4, 2: 1}) == {1: 4.0, 2: 1.0}


def test_a_report_without_cpu_and_memory_is_none() -> None:
    loads = Loads(interval_s=10)
    loads.record(report(1, cpu=0, memory=0, topics=topics(4)))
    assert loads.by_broker("balanced", {1: 4, 2: 1}) == {1: 4.0, 2: 1.0}


def test_topics_assigned_since_the_report_count() -> None:
    """Broker 2 reports half the load of broker 1. A thousand topics that come before its next report must not
    all go there."""
    loads = Loads(interval_s=30)
    loads.record(report(1, cpu=40, memory=40, topics=topics(100)))
    loads.record(report(2, cpu=20, memory=20, topics=topics(50)))
    counts = {1: 100, 2: 50}
    for _ in range(10):
        placing = Placement(candidates(1, 2), counts, loads.by_broker("balanced", counts))
        placed = place(placing, 100)
        counts = {broker: counts[broker] + placed[broker] for broker in counts}
    assert abs(counts[1] - counts[2]) < 150


async def test_a_broker_that_leaves_gets_nothing_also_if_that_was_decided_before() -> None:
    """A topic is to go to broker 2 ─▶ broker 2 says that it leaves ─▶ the decision is written: refused, for
    its registration is not the one that was looked at."""
    store = MemoryStore()
    try:
        for broker in (1, 2):
            key = records.registration_key(broker)
            await store.put(key, specs.encode(registration(broker)))
        brokers = {broker: registration(broker) for broker in (1, 2)}
        found = planning.candidates(brokers, store.local)
        assert sorted(found) == [1, 2]
        leaving = msgspec.structs.replace(registration(2), is_leaving=True)
        await store.put(records.registration_key(2), specs.encode(leaving))
        assert sorted(planning.candidates(brokers, store.local)) == [1]
        refused = await store.txn(found[2].conditions, (Put("/a", b""),))
        taken = await store.txn(found[1].conditions, (Put("/a", b""),))
        assert (refused.succeeded, taken.succeeded) == (False, True)
    finally:
        store.close()
