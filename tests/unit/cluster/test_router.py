"""Who has a topic: at once if somebody has, and otherwise as soon as somebody has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from sava.cluster import records
from sava.cluster.records import BrokerMode, Mode
from sava.cluster.view import ClusterView, NotServed, TopicRouter
from sava.metadata.commands import Put
from sava.supervisor import Supervisor
from sava.topics import specs
from sava.topics.errors import TopicMismatch, TopicUnknown
from sava.topics.names import TopicName
from sava.topics.registry import Registry
from sava.topics.specs import Ownership, OwnershipState, TopicSpec
from tests.support.waiting import FAR_S, PATIENCE_S, until
from tests.unit.cluster.fakes import ORDERS, FaultyStore, new_store, register, step, write

S = OwnershipState


@pytest.fixture
async def store() -> AsyncIterator[FaultyStore]:
    store = await new_store(ORDERS)
    for broker in (1, 2):
        await register(store, broker)
    yield store
    store.close()


@pytest.fixture
async def router(store: FaultyStore) -> AsyncIterator[TopicRouter]:
    view = ClusterView(store)
    view.start(Supervisor())
    await until(lambda: view.is_ready)
    yield TopicRouter(view, Registry(store))
    await view.close()


async def seen(router: TopicRouter, state: OwnershipState, name: TopicName = ORDERS) -> None:
    await router._view.wait(lambda: router._view.held(name).record.state is state, timeout=PATIENCE_S)


async def asked(router: TopicRouter, **options: float) -> asyncio.Task[int]:
    """A question that waits."""
    task = asyncio.create_task(router.owner(ORDERS, **options))  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert not task.done()
    return task


async def test_the_owner_is_known_without_waiting(store: FaultyStore, router: TopicRouter) -> None:
    assert router.current(ORDERS) == 0
    await step(store, "assign", owner=2)
    await seen(router, S.ASSIGNED)
    assert router.current(ORDERS) == 2
    assert await router.owner(ORDERS, timeout=0) == 2
    registration = router.registration(2)
    assert registration is not None
    assert registration.client == "b2:1"
    assert router.registration(9) is None


async def test_a_topic_that_moves_is_waited_for(store: FaultyStore, router: TopicRouter) -> None:
    await step(store, "assign", owner=1)
    await step(store, "move", target=2)
    await seen(router, S.MOVING)
    assert router.current(ORDERS) == 0
    task = await asked(router)
    await step(store, "seal", end=3)
    await step(store, "assign", owner=2)
    assert await task == 2


async def test_an_owner_that_is_not_registered_has_nothing(store: FaultyStore, router: TopicRouter) -> None:
    await step(store, "assign", owner=3)
    await seen(router, S.ASSIGNED)
    assert router.current(ORDERS) == 0
    task = await asked(router)
    await register(store, 3)
    assert await task == 3


async def test_a_topic_that_does_not_exist_is_told_from_one_not_seen_yet(
    store: FaultyStore, router: TopicRouter
) -> None:
    with pytest.raises(TopicUnknown):
        await router.owner(TopicName("default", "nothing"))
    fresh = TopicName("default", "fresh")
    await Registry(store).create(fresh, reliable=True)
    assert not router._view.has(fresh), "the view had no turn yet"
    task = asyncio.create_task(router.owner(fresh))
    await asyncio.sleep(0.01)
    await step(store, "assign", fresh, owner=2)
    assert await task == 2


async def test_a_partitioned_topic_has_no_owner_of_its_own(store: FaultyStore, router: TopicRouter) -> None:
    parts = TopicName("default", "parts")
    await Registry(store).create(parts, reliable=True, partitions=2)
    with pytest.raises(TopicMismatch):
        await router.owner(parts)


async def test_a_topic_that_is_deleted_meanwhile_is_unknown_at_once(
    store: FaultyStore, router: TopicRouter
) -> None:
    task = await asked(router, timeout=FAR_S)
    family = await Registry(store).begin_delete(ORDERS)
    await Registry(store).finish_delete(family)
    with pytest.raises(TopicUnknown):
        await asyncio.wait_for(task, PATIENCE_S)


async def test_a_broker_that_refused_is_the_answer_again_after_a_change(
    store: FaultyStore, router: TopicRouter
) -> None:
    await step(store, "assign", owner=2)
    await seen(router, S.ASSIGNED)
    task = await asked(router, but_not=2, timeout=FAR_S)
    await step(store, "take", incarnation=1)
    assert await asyncio.wait_for(task, PATIENCE_S) == 2, "it has taken the topic up"
    task = await asked(router, but_not=2, timeout=FAR_S)
    await register(store, 2, incarnation=5)
    assert await asyncio.wait_for(task, PATIENCE_S) == 2, "it was restarted"
    task = await asked(router, but_not=2, timeout=FAR_S)
    await step(store, "orphan")
    await step(store, "recover")
    await step(store, "assign", owner=1)
    assert await asyncio.wait_for(task, PATIENCE_S) == 1, "another has it"
    assert await router.owner(ORDERS, but_not=2) == 1


async def test_a_broker_that_refused_is_the_answer_again_when_the_time_is_over(
    store: FaultyStore, router: TopicRouter
) -> None:
    await step(store, "assign", owner=2)
    await seen(router, S.ASSIGNED)
    assert await router.owner(ORDERS, but_not=2, timeout=0.02) == 2


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (None, "no broker has taken it up yet"),
        (
            Ownership(state=S.SEALED, epoch=2, error="disk full"),
            r"no broker has taken it up yet \(disk full\)",
        ),
        (Ownership(state=S.MOVING, epoch=2, owner=1), "broker 1 is handing it over"),
        (Ownership(state=S.ASSIGNED, epoch=2, owner=8), "its broker 8 is gone"),
        (
            Ownership(state=S.ORPHAN, epoch=2, owner=8),
            "broker 8 is gone, and its journal is not recovered yet",
        ),
        (Ownership(state=S.DELETING, epoch=2, owner=1), "it is being deleted"),
    ],
)
async def test_when_the_time_is_over_it_says_why(
    store: FaultyStore, router: TopicRouter, record: Ownership | None, reason: str
) -> None:
    if record is not None:
        await write(store, ORDERS, record)
        await router._view.wait(lambda: router._view.held(ORDERS).record == record, timeout=PATIENCE_S)
    with pytest.raises(NotServed, match=reason):
        await router.owner(ORDERS, timeout=0.02)


async def test_without_an_active_broker_it_says_so(store: FaultyStore, router: TopicRouter) -> None:
    await store.delete(records.registration_key(1))
    await store.put(records.mode_key(2), specs.encode(BrokerMode(mode=Mode.DRAINED)))
    await router._view.wait(lambda: not router._view.active, timeout=PATIENCE_S)
    with pytest.raises(NotServed, match="no broker is active"):
        await router.owner(ORDERS, timeout=0.02)


async def test_a_record_that_cannot_be_read_is_the_reason(store: FaultyStore, router: TopicRouter) -> None:
    await store.put(specs.ownership_key(ORDERS), b"{")
    await router._view.wait(lambda: bool(router._view.fault(ORDERS)), timeout=PATIENCE_S)
    with pytest.raises(NotServed, match="cannot be read"):
        await router.owner(ORDERS, timeout=0.02)


async def test_a_store_that_does_not_answer_does_not_hold_a_caller_longer(
    store: FaultyStore, router: TopicRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hang(*args: object, **options: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(store, "get", hang)
    with pytest.raises(NotServed):
        await router.owner(TopicName("default", "nothing"), timeout=0.02)


async def test_a_thousand_wait_for_topics_of_a_broker_that_is_gone(
    store: FaultyStore, router: TopicRouter
) -> None:
    names = [TopicName("default", f"t{index}") for index in range(1000)]
    for start in range(0, 1000, 100):
        chosen = range(start, start + 100)
        spec = [TopicSpec(topic_id=index + 10, reliable=True) for index in chosen]
        keys = [specs.spec_key(names[index]) for index in chosen]
        await store.txn((), [Put(key, specs.encode(each)) for key, each in zip(keys, spec, strict=True)])
    tasks = [asyncio.create_task(router.owner(name, timeout=PATIENCE_S)) for name in names]
    await asyncio.sleep(0.05)
    began = time.thread_time()
    for name in names:
        await step(store, "assign", name, owner=2)
        await asyncio.sleep(0)
    assert set(await asyncio.gather(*tasks)) == {2}
    assert time.thread_time() - began < 2


async def test_a_lookup_of_a_served_topic_takes_microseconds(store: FaultyStore, router: TopicRouter) -> None:
    await step(store, "assign", owner=2)
    await seen(router, S.ASSIGNED)
    took = []
    for _ in range(5):
        began = time.thread_time()
        for _ in range(1000):
            await router.owner(ORDERS)
        took.append((time.thread_time() - began) / 1000)
    assert min(took) < 20e-6, f"{min(took) * 1e6:.1f} µs"
