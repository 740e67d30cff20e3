"""Writes that take effect and whose answers are lost: what was asked for is done once, and the caller learns
it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sava.config import PolicySettings
from sava.schemas.registry import SchemaRegistry
from sava.schemas.types import TopicSchema
from sava.storage.types import TopicKey
from sava.topics import ownership, specs
from sava.topics.errors import ConsumerClosed, NamespaceNotEmpty, SubscriptionUnknown, TopicUnknown
from sava.topics.names import TopicName
from sava.topics.registry import Namespaces, Registry
from sava.topics.rules import SchemaChecks, TopicLimits
from sava.topics.specs import NamespacePolicy
from tests.support.topics import GIVEN, ORDERS, SLOW, World, options
from tests.unit.storage.faults import UNKNOWN, Call, FaultyMetadata, lose_answer


class Losing(World):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metadata = self.faults = FaultyMetadata()

    def lose(self) -> None:
        """The answer to the next write."""
        self.faults.plan("txn", lose_answer(UNKNOWN))


@pytest.fixture
def world(tmp_path: Path) -> Losing:
    return Losing(tmp_path)


class TestRegistry:
    async def test_a_topic_is_created_once(self, world: Losing) -> None:
        """Schedule: the record is written, the answer is lost; it is read back."""
        await Namespaces(world.metadata).ensure(("default",))
        registry = Registry(world.metadata)
        world.lose()
        spec = await registry.create(ORDERS, reliable=True)
        assert await registry.list() == {ORDERS: spec}

    async def test_partitions_are_added_once(self, world: Losing) -> None:
        """Schedule: the topic and its partitions are written in one transaction, the answer is lost."""
        await Namespaces(world.metadata).ensure(("default",))
        registry = Registry(world.metadata)
        world.lose()
        spec = await registry.create(ORDERS, reliable=True, partitions=3)
        assert spec.partitions == 3
        assert await registry.list() == {
            ORDERS: spec,
            **{ORDERS.partition(n): await registry.need(ORDERS.partition(n)) for n in range(3)},
        }
        assert await registry.last_id() == spec.topic_id + 3

    async def test_a_deletion_that_was_begun_continues(self, world: Losing) -> None:
        """Schedule: the record is marked, the answer is lost."""
        await world.assigned(1)
        registry = Registry(world.metadata)
        world.lose()
        family = await registry.begin_delete(ORDERS)
        with pytest.raises(TopicUnknown):
            await registry.need(ORDERS)
        await registry.finish_delete(family)
        assert world.metadata.local.range(specs.TOPICS).kvs == ()

    @pytest.mark.parametrize("of", ["topic", "namespace"])
    async def test_a_policy_is_changed(self, world: Losing, of: str) -> None:
        """Schedule: the policy is written, the answer is lost."""
        await world.assigned(1)
        limits = TopicLimits(world.metadata, PolicySettings())
        change: Callable[[NamespacePolicy], NamespacePolicy] = lambda _: NamespacePolicy(  # noqa: E731
            max_producers_per_topic=3
        )
        world.lose()
        if of == "topic":
            await Registry(world.metadata).change_policy(ORDERS, change)
        else:
            await Namespaces(world.metadata).change_policy("default", change)
        assert limits.of(ORDERS).max_producers_per_topic == 3

    async def test_a_namespace_that_got_a_topic_while_it_was_deleted_stays(self, world: Losing) -> None:
        """Schedule: the deletion looks and finds no topic; a topic is created; the namespace's record is
        removed, and the answer is lost. The deletion must look once more and put the record back: a topic
        would be left in a namespace that does not exist."""
        namespaces, registry = Namespaces(world.metadata), Registry(world.faults._real)
        await namespaces.create("shop", NamespacePolicy(max_publish_rate=7))

        async def overtake(call: Call) -> Any:
            await registry.create(TopicName("shop", "sales"), reliable=True)
            await call()
            raise UNKNOWN

        world.faults.plan("txn", overtake)
        with pytest.raises(NamespaceNotEmpty):
            await namespaces.delete("shop")
        assert (await namespaces.policy("shop")).max_publish_rate == 7

    async def test_a_topic_takes_its_first_subject(self, world: Losing) -> None:
        """Schedule: the topic's schema is written, the answer is lost. The producer that named it is not
        refused."""
        await world.assigned(1)
        checks = SchemaChecks(world.metadata, SchemaRegistry(world.metadata))
        world.lose()
        assert await checks._assign(ORDERS, "numbers") == "numbers"
        found = world.metadata.local.get(specs.schema_key(ORDERS))
        assert found is not None
        assert specs.decode(found, TopicSchema).subject == "numbers"


class TestOwnership:
    async def test_a_topic_is_taken_up_once(self, world: Losing) -> None:
        """Schedule: the ownership is written, the answer is lost. One tenure begins, not two."""
        await world.assigned(1)
        world.lose()
        tenure = await ownership.take(Registry(world.metadata), world.metadata, ORDERS, 1)
        assert (tenure.epoch, world.ownership().epoch) == (2, 2)
        await tenure.check()

    async def test_an_owner_that_lets_go_removes_what_it_has(
        self, world: Losing, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Schedule: the topic is being deleted by another broker; its owner writes that it let go, and the
        answer is lost. What its journal and its store hold of the topic goes all the same: no other broker
        may reach it."""
        await world.assigned(1)
        removed: list[TopicKey] = []
        async with world.topics(broker=1, options=SLOW, **GIVEN) as topics:
            await topics.get(ORDERS)
            await world.step("delete")
            delete = topics._storage.delete_topic

            async def delete_topic(topic: TopicKey) -> None:
                removed.append(topic)
                await delete(topic)

            monkeypatch.setattr(topics._storage, "delete_topic", delete_topic)
            world.lose()
            await topics.release(ORDERS)
            assert world.ownership().owner == 0
            assert [topic.name for topic in removed] == [ORDERS.topic]


class TestSubscriptions:
    async def test_a_subscription_is_created_once(self, world: Losing) -> None:
        """Schedule: the subscription and its cursor are written, the answer is lost."""
        await world.assigned(1)
        async with world.topics(broker=1, options=SLOW, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            world.lose()
            consumer = await topic.subscribe(options())
            assert list(topic.subscriptions) == ["s"]
            assert not consumer.is_closed

    async def test_a_setting_takes_effect(self, world: Losing) -> None:
        """Schedule: the setting is written, the answer is lost. The subscription that is in use follows it:
        otherwise it would do so after the next restart, when no operator expects it."""
        await world.assigned(1)
        async with world.topics(broker=1, options=SLOW, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            await topic.subscribe(options())
            world.lose()
            await topic.reliable.set_max_unacked("s", 7)
            assert topic.reliable.need("s").spec.max_unacked_messages == 7

    async def test_a_setting_ahead_of_its_subscription_is_applied(self, world: Losing) -> None:
        """Schedule: the setting is written, the answer is lost; then the subscription is created."""
        await world.assigned(1)
        async with world.topics(broker=1, options=SLOW, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            world.lose()
            await topic.reliable.set_max_unacked("s", 7, ahead=True)
            await topic.subscribe(options())
            assert topic.reliable.need("s").spec.max_unacked_messages == 7

    async def test_a_subscription_is_removed(self, world: Losing) -> None:
        """Schedule: its records are removed, the answer is lost. Its consumers end: what stayed here would
        deliver messages whose acks are never stored."""
        await world.assigned(1)
        async with world.topics(broker=1, options=SLOW, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            consumer = await topic.subscribe(options())
            world.lose()
            await topic.unsubscribe("s")
            with pytest.raises(SubscriptionUnknown):
                topic.reliable.need("s")
            with pytest.raises(ConsumerClosed):
                await consumer.receive()
