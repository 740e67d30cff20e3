"""Who serves a topic: each beginning has an epoch of its own, and nobody takes another's."""

from __future__ import annotations

import asyncio

import pytest

from sava.broker import ownership, specs
from sava.broker.errors import NotOwner, TopicUnknown
from sava.broker.names import TopicName
from sava.broker.namespaces import Namespaces
from sava.broker.registry import Registry
from sava.broker.specs import Ownership
from sava.metadata.commands import Put
from sava.metadata.memory import MemoryStore

ORDERS = TopicName("default", "orders")


@pytest.fixture
async def store() -> MemoryStore:
    store = MemoryStore()
    await Namespaces(store).ensure(("default",))
    await Registry(store).create(ORDERS, reliable=True)
    return store


async def test_every_beginning_has_the_next_epoch_and_ends_the_one_before(store: MemoryStore) -> None:
    registry = Registry(store)
    assert ownership.owner_of(store, ORDERS) == ownership.NOBODY
    first = await ownership.take(registry, store, ORDERS, 1)
    second = await ownership.take(registry, store, ORDERS, 1)
    assert (first.epoch, second.epoch) == (1, 2)
    assert not (await store.txn((first.holds,), (Put("/x", b""),))).succeeded
    assert (await store.txn((second.holds,), (Put("/x", b""),))).succeeded
    assert ownership.owner_of(store, ORDERS) == 1


async def test_another_broker_is_told_who_the_owner_is(store: MemoryStore) -> None:
    registry = Registry(store)
    await ownership.take(registry, store, ORDERS, 1)
    with pytest.raises(NotOwner) as refused:
        await ownership.take(registry, store, ORDERS, 2)
    assert refused.value.owner == 1
    await store.put(specs.ownership_key(ORDERS), specs.encode(Ownership(owner=0, epoch=7)))
    assert (await ownership.take(registry, store, ORDERS, 2)).epoch == 8


async def test_many_at_once_get_different_epochs(store: MemoryStore) -> None:
    registry = Registry(store)
    taken = await asyncio.gather(*(ownership.take(registry, store, ORDERS, 1) for _ in range(10)))
    assert sorted(tenure.epoch for tenure in taken) == list(range(1, 11))


async def test_a_topic_that_is_being_deleted_is_nobodys(store: MemoryStore) -> None:
    registry = Registry(store)
    family = await registry.begin_delete(ORDERS)
    with pytest.raises(TopicUnknown):
        await ownership.take(registry, store, ORDERS, 1)
    await registry.finish_delete(family)
    assert store.local.get(specs.ownership_key(ORDERS)) is None
