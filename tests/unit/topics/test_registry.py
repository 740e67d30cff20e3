"""Which topics exist: creating, growing, finding and deleting them."""

from __future__ import annotations

import asyncio

import pytest

from sava.metadata.records import RecordCorrupt
from sava.topics import specs
from sava.topics.errors import (
    NamespaceUnknown,
    TopicBeingDeleted,
    TopicExists,
    TopicMismatch,
    TopicUnknown,
)
from sava.topics.names import InvalidName, TopicName
from sava.topics.registry import MAX_PARTITIONS, Namespaces, Registry
from sava.topics.specs import NamespacePolicy, TopicSpec
from tests.support.memory_store import MemoryStore

ORDERS = TopicName("default", "orders")


@pytest.fixture
async def store() -> MemoryStore:
    store = MemoryStore()
    await Namespaces(store).ensure(("default",))
    return store


@pytest.fixture
def registry(store: MemoryStore) -> Registry:
    return Registry(store)


async def test_a_topic_is_there_once_it_was_created(registry: Registry) -> None:
    created = await registry.create(ORDERS, reliable=True)
    assert await registry.get(ORDERS) == created
    assert created.reliable
    assert created.partitions == 0
    with pytest.raises(TopicExists):
        await registry.create(ORDERS, reliable=True)


async def test_every_topic_has_an_id_of_its_own(registry: Registry) -> None:
    ids = [
        (await registry.create(TopicName("default", name), reliable=True)).topic_id
        for name in ("a", "b", "c")
    ]
    await registry.create(ORDERS, reliable=True, partitions=3)
    ids += [spec.topic_id for name, spec in (await registry.list()).items() if "orders" in name.topic]
    assert len(set(ids)) == len(ids) == 7


async def test_a_namespace_must_exist(registry: Registry) -> None:
    for name in (TopicName("nowhere", "orders"), TopicName("nowhere", "orders-part-1")):
        with pytest.raises(NamespaceUnknown):
            await registry.create(name, reliable=True)


async def test_names_that_are_prefixes_of_each_other_are_different_topics(registry: Registry) -> None:
    """/default/order, /default/orders and /default/orders-part-0 have nothing to do with one another, but for
    the last two."""
    order = TopicName("default", "order")
    await registry.create(ORDERS, reliable=True, partitions=2)
    assert await registry.partitions(order) == []
    await registry.create(order, reliable=False)
    assert await registry.partitions(order) == [order]
    assert await registry.partitions(ORDERS) == [ORDERS.partition(0), ORDERS.partition(1)]
    family = await registry.begin_delete(order)
    await registry.finish_delete(family)
    assert set(await registry.list("default")) == {ORDERS, ORDERS.partition(0), ORDERS.partition(1)}
    assert await registry.list("def") == {}


class TestPartitions:
    async def test_partitions_are_topics_of_their_own(self, registry: Registry) -> None:
        base = await registry.create(ORDERS, reliable=True, partitions=3)
        assert base.partitions == 3
        assert await registry.partitions(ORDERS) == [ORDERS.partition(index) for index in range(3)]
        assert await registry.partitions(ORDERS.partition(1)) == [ORDERS.partition(1)]
        assert (await registry.need(ORDERS.partition(2))).partitions == 0

    async def test_as_many_as_there_can_be(self, registry: Registry) -> None:
        assert (await registry.create(ORDERS, reliable=True, partitions=MAX_PARTITIONS)).partitions == 1000
        assert len(await registry.list("default")) == 1001

    @pytest.mark.parametrize("partitions", [-1, MAX_PARTITIONS + 1])
    async def test_too_many_are_refused(self, registry: Registry, partitions: int) -> None:
        with pytest.raises(InvalidName):
            await registry.create(ORDERS, reliable=True, partitions=partitions)
        with pytest.raises(InvalidName):
            await registry.create(ORDERS.partition(MAX_PARTITIONS), reliable=True)

    async def test_a_plain_topic_keeps_partitions_out_and_the_reverse(self, registry: Registry) -> None:
        await registry.create(ORDERS, reliable=True)
        with pytest.raises(TopicExists):
            await registry.ensure(ORDERS.partition(0), reliable=True)
        other = TopicName("default", "other")
        await registry.ensure(other.partition(0), reliable=True)
        with pytest.raises(TopicExists):
            await registry.create(other, reliable=True)

    async def test_a_partition_has_no_partitions(self, registry: Registry) -> None:
        for name, partitions in ((ORDERS.partition(0), 2), (ORDERS.partition(0).partition(1), 0)):
            with pytest.raises(InvalidName):
                await registry.create(name, reliable=True, partitions=partitions)

    async def test_clients_create_them_one_by_one_at_the_same_time_in_any_order(
        self, registry: Registry
    ) -> None:
        indexes = [7, 0, 3, 9, 1, 8, 2, 6, 5, 4]
        await asyncio.gather(
            *(registry.ensure(ORDERS.partition(index), reliable=True) for index in indexes * 2)
        )
        assert (await registry.need(ORDERS)).partitions == 10
        ids = {(await registry.need(name)).topic_id for name in await registry.partitions(ORDERS)}
        assert len(ids) == 10

    async def test_growing_goes_up_only(self, registry: Registry) -> None:
        await registry.create(ORDERS, reliable=True, partitions=2)
        before = await registry.need(ORDERS.partition(1))
        assert (await registry.grow(ORDERS, 4)).partitions == 4
        assert await registry.need(ORDERS.partition(1)) == before
        with pytest.raises(TopicMismatch):
            await registry.grow(ORDERS, 3)
        plain = TopicName("default", "plain")
        await registry.create(plain, reliable=True)
        with pytest.raises(TopicMismatch):
            await registry.grow(plain, 3)
        with pytest.raises(TopicUnknown):
            await registry.grow(TopicName("default", "none"), 3)


class TestEnsuring:
    async def test_what_exists_is_returned_and_what_is_missing_created(self, registry: Registry) -> None:
        created = await registry.ensure(ORDERS, reliable=None)
        assert created.reliable
        assert await registry.ensure(ORDERS, reliable=True) == created
        with pytest.raises(TopicMismatch):
            await registry.ensure(ORDERS, reliable=False)

    async def test_of_many_at_once_one_creates_it(self, registry: Registry) -> None:
        found = await asyncio.gather(*(registry.ensure(ORDERS, reliable=False) for _ in range(20)))
        assert len({spec.topic_id for spec in found}) == 1


class TestDeleting:
    async def test_what_is_marked_is_gone_for_everybody_and_its_name_is_not_free_yet(
        self, registry: Registry
    ) -> None:
        await registry.create(ORDERS, reliable=True, partitions=2)
        family = await registry.begin_delete(ORDERS)
        assert [name for name, _ in family.members] == [ORDERS.partition(0), ORDERS.partition(1)]
        assert await registry.get(ORDERS) is None
        assert await registry.get(ORDERS.partition(1)) is None
        with pytest.raises(TopicUnknown):
            await registry.locate(ORDERS.partition(1))
        for name in (ORDERS, ORDERS.partition(0), ORDERS.partition(5)):
            with pytest.raises(TopicBeingDeleted):
                await registry.create(name, reliable=True)
        assert await registry.list() == {}
        assert (await registry.list_all())[ORDERS].deleting

    async def test_a_deletion_can_be_repeated_from_any_point(
        self, registry: Registry, store: MemoryStore
    ) -> None:
        """A crash after the mark, or in the middle of removing the records."""
        await registry.create(ORDERS, reliable=True, partitions=3)
        await registry.begin_delete(ORDERS)
        await store.delete_prefix(specs.topic_prefix(ORDERS.partition(1)))
        family = await registry.begin_delete(ORDERS)
        assert [name for name, _ in family.members] == [ORDERS.partition(0), ORDERS.partition(2)]
        await registry.finish_delete(family)
        assert store.local.range(specs.TOPICS).kvs == ()
        await registry.finish_delete(family)
        assert (await registry.create(ORDERS, reliable=False)).partitions == 0

    async def test_an_old_deletion_does_not_touch_the_next_topic_of_the_name(
        self, registry: Registry
    ) -> None:
        await registry.create(ORDERS, reliable=True)
        family = await registry.begin_delete(ORDERS)
        await registry.finish_delete(family)
        await registry.create(ORDERS, reliable=True)
        await registry.finish_delete(family)
        assert await registry.get(ORDERS) is not None

    async def test_thousands_of_records_go_in_bounded_steps(
        self, registry: Registry, store: MemoryStore
    ) -> None:
        await registry.create(ORDERS, reliable=True)
        for index in range(2000):
            await store.put(specs.consumer_key(ORDERS, "s", f"c{index}"), b"{}")
        await registry.finish_delete(await registry.begin_delete(ORDERS))
        assert store.local.range(specs.TOPICS).kvs == ()

    async def test_a_partition_cannot_be_deleted_alone(self, registry: Registry) -> None:
        await registry.create(ORDERS, reliable=True, partitions=2)
        with pytest.raises(TopicMismatch):
            await registry.begin_delete(ORDERS.partition(0))
        with pytest.raises(TopicUnknown):
            await registry.begin_delete(ORDERS.partition(7))


async def test_a_policy_needs_its_topic(registry: Registry, store: MemoryStore) -> None:
    with pytest.raises(TopicUnknown):
        await registry.change_policy(ORDERS, lambda _: NamespacePolicy(max_publish_rate=5))
    await registry.create(ORDERS, reliable=True)
    await registry.change_policy(ORDERS, lambda _: NamespacePolicy(max_publish_rate=5))
    kv = store.local.get(specs.policy_key(ORDERS))
    assert kv is not None
    assert specs.decode(kv, NamespacePolicy).max_publish_rate == 5


async def test_a_record_that_cannot_be_read_is_not_taken_for_absent(
    registry: Registry, store: MemoryStore
) -> None:
    await store.put(specs.spec_key(ORDERS), b"?")
    with pytest.raises(RecordCorrupt):
        await registry.get(ORDERS)
    with pytest.raises(RecordCorrupt):
        await registry.ensure(ORDERS, reliable=True)


def test_only_the_key_of_a_spec_is_one() -> None:
    spec = TopicName("default", "spec")
    assert specs.topic_of_spec_key(specs.spec_key(spec)) == spec
    assert specs.topic_of_spec_key(specs.subscription_key(spec, "spec")) is None
    assert specs.topic_of_spec_key(specs.policy_key(spec)) is None
    assert TopicSpec(topic_id=1, reliable=True) == TopicSpec(topic_id=1, reliable=True, deleting=False)
