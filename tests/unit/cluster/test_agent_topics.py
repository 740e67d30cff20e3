"""Agents with the real parts: topics, journals, segments, leases. The test plays the controller."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sava.cluster.agent import Agent
from sava.cluster.registration import Registrar
from sava.cluster.view import ClusterView
from sava.supervisor import Supervisor
from sava.topics.served import ServedTopics
from sava.topics.specs import OwnershipState
from tests.support.storage import contents
from tests.support.topics import ORDERS, World, others, publish
from tests.support.waiting import until
from tests.unit.cluster.fakes import registration

S = OwnershipState


@dataclass
class ServingBroker:
    topics: ServedTopics
    registrar: Registrar
    agent: Agent

    def is_serving(self, world: World) -> bool:
        topic = self.topics.loaded.get(ORDERS)
        return topic is not None and topic.is_serving and topic.epoch == world.ownership().epoch


@asynccontextmanager
async def broker_of(world: World, broker: int) -> AsyncIterator[ServingBroker]:
    topics: ServedTopics
    agent: Agent

    async def on_lost() -> None:
        await topics.drop_all("the registration is lost")

    registrar = Registrar(
        world.metadata,
        lambda incarnation: registration(broker, incarnation),
        broker=broker,
        ttl_ms=5000,
        on_lost=on_lost,
    )
    view = ClusterView(world.metadata)
    async with world.topics(
        broker=broker,
        kind=ServedTopics,
        incarnation=lambda: registrar.incarnation,
        others=others(released=lambda names: agent.released(names)),
    ) as topics:
        agent = Agent(view, world.metadata, topics, broker=broker, registrar=registrar)
        view.start(Supervisor())
        registrar.start(Supervisor())
        agent.start(Supervisor())
        try:
            await until(lambda: registrar.is_registered)
            yield ServingBroker(topics, registrar, agent)
        finally:
            await agent.close()
            await registrar.close()
            await view.close()


async def test_messages_go_with_the_topic_from_broker_to_broker(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.assigned(1)
    written: list[str] = []
    async with broker_of(world, 1) as one, broker_of(world, 2) as two:
        both = {1: one, 2: two}
        for turn in range(10):
            here, there = 1 + turn % 2, 2 - turn % 2
            await until(partial(both[here].is_serving, world))
            assert ORDERS not in both[there].topics.loaded
            topic = await both[here].topics.get(ORDERS)
            payloads = [f"{turn}-{index}" for index in range(3)]
            assert await publish(topic, *payloads) == [len(written) + index for index in range(3)]
            written += payloads
            await world.step("move", target=there, timeout_ms=10_000)
            await until(lambda: world.ownership().state is S.SEALED)
            assert world.ownership().end == len(written)
            await world.step("assign", owner=there)
        await until(lambda: one.is_serving(world))
        topic = await one.topics.get(ORDERS)
        assert topic.log is not None
        assert await contents(topic.log) == written


async def test_a_lost_lease_drops_topics_and_the_next_one_takes_them_up_whole(
    tmp_path: Path,
) -> None:
    world = World(tmp_path)
    await world.assigned(1)
    async with broker_of(world, 1) as broker:
        await until(lambda: broker.is_serving(world))
        topic = await broker.topics.get(ORDERS)
        await publish(topic, "a", "b")
        first = broker.registrar.incarnation
        await world.metadata.revoke_lease(first)
        await world.step("orphan")  # as the controller sees it
        await until(lambda: broker.registrar.incarnation not in (0, first))
        await until(lambda: broker.is_serving(world))
        assert world.ownership().incarnation == broker.registrar.incarnation
        assert not topic.is_serving
        topic = await broker.topics.get(ORDERS)
        assert topic.log is not None
        assert await contents(topic.log) == ["a", "b"]


async def test_a_deleted_topic_is_let_go_by_its_owner(tmp_path: Path) -> None:
    """Asked of a broker that does not have it."""
    world = World(tmp_path)
    await world.assigned(1)
    async with broker_of(world, 1) as one, broker_of(world, 2) as two:
        await until(lambda: one.is_serving(world))
        await two.topics.delete(ORDERS)
        assert ORDERS not in one.topics.loaded
        assert await one.topics.registry.get(ORDERS) is None
