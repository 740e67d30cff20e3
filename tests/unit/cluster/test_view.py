"""What a node knows of the cluster, event by event, and how it goes on after what it could not follow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from sava.cluster import records, view
from sava.cluster.records import BrokerMode, Mode
from sava.cluster.view import ClusterView
from sava.metadata.commands import Put
from sava.metadata.watch import HubLimits
from sava.supervisor import Supervisor
from sava.topics import ownership, specs
from sava.topics.names import TopicName
from sava.topics.registry import Registry
from sava.topics.specs import Ownership, OwnershipState, TopicSpec
from tests.support.memory_store import MemoryStore
from tests.support.waiting import PATIENCE_S, until
from tests.unit.cluster.fakes import ORDERS, FaultyStore, new_store, register, step, write

PARTS = TopicName("default", "parts")


@pytest.fixture
async def store() -> AsyncIterator[FaultyStore]:
    store = await new_store(ORDERS)
    yield store
    store.close()


async def started(store: MemoryStore) -> ClusterView:
    seen = ClusterView(store)
    seen.start(Supervisor())
    await until(lambda: seen.is_ready)
    return seen


async def test_it_knows_what_is_there_and_follows_what_happens(store: FaultyStore) -> None:
    await register(store, 1)
    seen = await started(store)
    told: list[frozenset[TopicName] | None] = []
    seen.listen(told.append)
    entry = seen.entry(ORDERS)
    assert entry is not None
    assert (entry.record.state, entry.revision) == (OwnershipState.UNASSIGNED, 0)
    await step(store, "assign", owner=1)
    await register(store, 2)
    await store.put(records.mode_key(2), specs.encode(BrokerMode(mode=Mode.DRAINING)))
    await seen.wait(lambda: seen.mode(2).mode is Mode.DRAINING, timeout=PATIENCE_S)
    assert told == [frozenset({ORDERS}), None, None]
    assert [entry.name for entry in seen.owned_by(1)] == [ORDERS]
    assert seen.names_of(1) == {ORDERS}
    assert seen.counts() == {1: 1, 2: 0}
    assert [each.broker for each in seen.active] == [1]
    await store.delete(records.registration_key(1))
    await seen.wait(lambda: 1 not in seen.brokers, timeout=PATIENCE_S)
    assert seen.counts() == {1: 1, 2: 0}, "what it owned is still its own"
    await seen.close()


async def test_a_change_of_owner_changes_both_counts(store: FaultyStore) -> None:
    seen = await started(store)
    await step(store, "assign", owner=1)
    await step(store, "move", target=2)
    await step(store, "seal", end=5)
    await seen.wait(lambda: seen.held(ORDERS).record.state is OwnershipState.SEALED, timeout=PATIENCE_S)
    assert seen.counts() == {}
    await step(store, "assign", owner=2)
    await seen.wait(lambda: seen.counts() == {2: 1}, timeout=PATIENCE_S)
    assert seen.owned_by(1) == []
    await seen.close()


async def test_a_partitioned_topic_is_its_partitions(store: FaultyStore) -> None:
    seen = await started(store)
    await Registry(store).create(PARTS, reliable=True, partitions=2)
    await seen.wait(lambda: seen.has(PARTS.partition(1)), timeout=PATIENCE_S)
    assert seen.entry(PARTS) is None
    assert not seen.has(PARTS)
    await Registry(store).begin_delete(PARTS)
    await seen.wait(lambda: seen.is_deleting(PARTS.partition(0)), timeout=PATIENCE_S)
    assert seen.entry(PARTS.partition(0)) is not None, "somebody has to let go of it"
    assert not seen.has(PARTS.partition(0))
    await seen.close()


async def test_a_plain_topic_that_comes_back_partitioned_has_no_entry(store: FaultyStore) -> None:
    seen = await started(store)
    assert seen.entry(ORDERS) is not None
    await store.put(specs.spec_key(ORDERS), specs.encode(TopicSpec(topic_id=9, reliable=True, partitions=3)))
    await seen.wait(lambda: seen.entry(ORDERS) is None, timeout=PATIENCE_S)
    assert list(seen.entries()) == []
    await seen.close()


async def test_a_view_that_fell_behind_begins_anew_with_everything() -> None:
    """More happens between two of its turns than the watch can hold: it is told Compacted, reads all, and
    goes on from there, with what was deleted in between gone."""
    store = MemoryStore(hub_limits=HubLimits(queue_batches=4, history_revisions=4))
    spec = specs.encode(TopicSpec(topic_id=1, reliable=True))
    gone = TopicName("default", "gone")
    await store.put(specs.spec_key(gone), spec)
    await write(store, gone, Ownership(epoch=1, owner=1))
    seen = await started(store)
    names = [TopicName("default", f"t{index}") for index in range(50)]
    await store.delete_prefix(specs.topic_prefix(gone))
    for name in names:
        await store.put(specs.spec_key(name), spec)
    assert store.hub.gaps
    await seen.wait(lambda: {entry.name for entry in seen.entries()} == set(names), timeout=PATIENCE_S)
    assert seen.counts() == {}
    await write(store, names[0], Ownership(epoch=1, owner=3))
    await seen.wait(lambda: seen.counts() == {3: 1}, timeout=PATIENCE_S)
    await seen.close()
    store.close()


async def test_a_gap_among_brokers_alone_begins_everything_anew() -> None:
    """One of the two watches ends, and the other must not go on beside a second one of its kind."""
    store = MemoryStore(hub_limits=HubLimits(queue_batches=4, history_revisions=4))
    seen = await started(store)
    for broker in range(1, 20):
        await register(store, broker)
    await seen.wait(lambda: len(seen.brokers) == 19, timeout=PATIENCE_S)
    assert store.hub.watchers == 2
    await seen.close()
    assert store.hub.watchers == 0
    store.close()


async def test_one_record_that_cannot_be_read_hides_nothing_else(
    store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """And it is not taken for an absent one: a topic whose ownership cannot be read is not unassigned."""
    other = TopicName("default", "other")
    await Registry(store).create(other, reliable=True)
    await store.put(specs.ownership_key(ORDERS), b"{")
    await store.put(records.registration_key(7), b"[]")
    await store.put("/cluster/register/strange", b"?")
    seen = await started(store)
    assert seen.entry(ORDERS) is None
    assert [entry.name for entry in seen.entries()] == [other]
    assert "ownership cannot be read" in seen.fault(ORDERS)
    assert 7 not in seen.brokers
    assert "ownership cannot be read" in caplog.text
    await store.put(specs.spec_key(other), b"x")
    await seen.wait(lambda: seen.entry(other) is None, timeout=PATIENCE_S)
    await write(store, ORDERS, Ownership(epoch=3, owner=1))  # repaired
    await seen.wait(lambda: seen.entry(ORDERS) is not None, timeout=PATIENCE_S)
    assert seen.fault(ORDERS) == ""
    await seen.close()


async def test_a_broker_whose_mode_cannot_be_read_gets_nothing(store: FaultyStore) -> None:
    await register(store, 1)
    seen = await started(store)
    await store.put(records.mode_key(1), b"?")
    await seen.wait(lambda: not seen.active, timeout=PATIENCE_S)
    assert seen.mode(1).mode is Mode.DRAINED
    await store.delete(records.mode_key(1))
    await seen.wait(lambda: len(seen.active) == 1, timeout=PATIENCE_S)
    await seen.close()


async def test_who_waits_for_a_topic_is_not_asked_about_others(store: FaultyStore) -> None:
    seen = await started(store)
    asked = 0

    def is_assigned() -> bool:
        nonlocal asked
        asked += 1
        return seen.held(ORDERS).record.owner == 1

    waiting = asyncio.create_task(seen.wait(is_assigned, timeout=PATIENCE_S, about=ORDERS))
    for index in range(10):
        await write(store, TopicName("default", f"t{index}"), Ownership(epoch=1, owner=2))
    await seen.wait(lambda: seen.counts() == {2: 10}, timeout=PATIENCE_S)
    assert asked == 1
    await register(store, 1)  # concerns everybody
    await step(store, "assign", owner=1)
    await waiting
    assert asked <= 3
    with pytest.raises(TimeoutError):
        await seen.wait(lambda: False, timeout=0.01, about=ORDERS)
    await seen.close()


async def test_a_store_that_closes_its_watches_is_not_asked_in_a_circle(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = await started(store)
    loads = 0

    def load() -> int:
        nonlocal loads
        loads += 1
        return store.local.revision

    monkeypatch.setattr(seen, "_load", load)
    monkeypatch.setattr(view, "RETRY_S", 0.05)
    began = time.monotonic()
    store.close()
    await asyncio.sleep(0.2)  # nothing to wait for: it must be quiet
    assert loads <= 1 + (time.monotonic() - began) / 0.05
    await seen.close()


async def test_ten_thousand_topics_are_read_fast_and_an_event_is_cheap() -> None:
    """Half a second, and microseconds for an event."""
    store = MemoryStore()
    topics = [TopicName("default", f"topic-{index}") for index in range(10_000)]
    for start in range(0, len(topics), 100):
        puts: list[Put] = []
        for index, name in enumerate(topics[start : start + 100], start):
            spec = TopicSpec(topic_id=index + 1, reliable=True, created_ms=1)
            record = Ownership(epoch=1, owner=1 + index % 3, incarnation=1, reason="create", since_ms=1)
            puts.append(Put(specs.spec_key(name), specs.encode(spec)))
            puts.append(Put(specs.ownership_key(name), specs.encode(record)))
        await store.txn((), puts)
    seen = ClusterView(store)
    took = min(_timed(seen._load) for _ in range(3))
    assert len(list(seen.entries())) == 10_000
    assert took < 0.5, f"{took:.3f} s"
    key = specs.ownership_key(topics[0])
    value = specs.encode(ownership.after("take", topics[0], seen.held(topics[0]).record, incarnation=2))
    await store.put(key, value)
    kv = store.local.get(key)

    def events() -> None:
        for _ in range(1000):
            seen._apply(key, kv)
            seen._tell(frozenset({topics[0]}))

    each = min(_timed(events) for _ in range(5)) / 1000
    assert each < 50e-6, f"{each * 1e6:.1f} µs"
    assert seen.counts()[1] == 3334
    store.close()


def _timed(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began
