"""Brokers of one cluster in one process: real topics, agents, views and gRPC between them; metadata in
memory.

Who serves what is decided by ``Director``, which does what the test says, where a cluster has a controller
that does what it thinks best.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from grpc import aio

from sava.api import danube
from sava.api.admin.brokers import Brokers, BrokersService
from sava.api.admin.descriptions import Partitions
from sava.api.admin.topics import NamespacesService, SubscriptionsService, TopicsService, Unloading
from sava.api.admin_client import AdminClient
from sava.cluster import records
from sava.cluster.agent import Agent
from sava.cluster.controller import Controller
from sava.cluster.drains import DrainStatus
from sava.cluster.loads import Loads
from sava.cluster.moves import Move
from sava.cluster.rebalancer import Balance, Rebalanced
from sava.cluster.records import BrokerMode, NotController, Registration
from sava.cluster.registration import Registrar
from sava.cluster.view import ClusterView, TopicRouter
from sava.config import Auth, Config
from sava.metadata.errors import Unavailable
from sava.metadata.node import RaftNode
from sava.peers.channels import PeerChannels
from sava.peers.forwarding import Forwarder
from sava.peers.partition_calls import PartitionCalls
from sava.proto import brokers_pb2_grpc, topics_admin_pb2_grpc
from sava.raft.types import Membership, NodeId
from sava.schemas.registry import SchemaRegistry
from sava.security.store import SecurityPolicies
from sava.supervisor import Supervisor
from sava.topics import specs
from sava.topics.errors import TopicUnknown
from sava.topics.names import TopicName
from sava.topics.ownership import WrongState
from sava.topics.rules import TopicSchemas
from sava.topics.served import ServedTopics
from sava.topics.specs import OwnershipState
from tests.support.guards import guard_of
from tests.support.topics import QUICK, World, others
from tests.support.waiting import PATIENCE_S
from tests.unit.cluster.fakes import Life

LEADER = 1


@dataclass
class Core:
    """What Raft says, as far as the services look."""

    leader: int = LEADER
    node: int = LEADER
    membership: Membership = field(default_factory=Membership)


@dataclass
class Barrier:
    """``failure``: why no majority confirms a read; empty: one does."""

    failure: str = ""

    async def wait(self, timeout: float) -> None:
        if self.failure:
            raise Unavailable(self.failure)


@dataclass
class FakeNode:
    core_status: Core | None = field(default_factory=Core)
    barrier: Barrier = field(default_factory=Barrier)


class Director:
    """In a controller's place: assigns new topics where ``place`` says, and moves what it is told to move."""

    def __init__(self, broker: int, world: World, view: ClusterView) -> None:
        self.broker = broker
        self.leads = broker == LEADER
        self.loads = Loads(interval_s=30.0)
        self.place: Callable[[TopicName], int] = lambda name: LEADER
        self.moved: list[tuple[TopicName, int]] = []
        self.refusals: dict[TopicName, Exception] = {}
        self.taken_back: dict[TopicName, str] = {}
        """Moves that come to nothing, and why."""
        self.statuses: list[DrainStatus] = []
        self.drained: list[tuple[int, BrokerMode]] = []
        self.activated: list[tuple[int, str]] = []
        self.balanced: Balance | None = None
        self.rebalanced: Rebalanced | None = None
        self.asked: list[tuple[bool, int]] = []
        self._world = world
        self._view = view

    async def assign(self, name: TopicName, broker: int) -> None:
        await self._world.step("assign", name, owner=broker)

    async def assign_new(self) -> None:
        """Each topic as soon as it is seen."""
        while True:
            for entry in [entry for entry in self._view.entries() if self._is_new(entry.name)]:
                with suppress(WrongState):  # the view has not caught up with the last time
                    await self.assign(entry.name, self.place(entry.name))
            await asyncio.sleep(0.005)

    def _is_new(self, name: TopicName) -> bool:
        entry = self._view.entry(name)
        return (
            entry is not None
            and entry.record.state is OwnershipState.UNASSIGNED
            and not self._view.is_deleting(name)
            and self.place(name) != 0
        )

    # -- as a controller -----------------------------------------------------------------------

    def _check(self) -> None:
        if not self.leads:
            raise NotController(LEADER)

    async def move(self, name: TopicName, *, target: int = 0, reason: str, timeout_ms: int) -> Move:
        self._check()
        if name in self.refusals:
            raise self.refusals[name]
        entry = self._view.entry(name)
        if entry is None:
            raise TopicUnknown(name)
        owner = entry.record.owner
        if name in self.taken_back:
            return Move(name, owner, owner, entry.record.epoch, error=self.taken_back[name])
        target = target or next(broker for broker in sorted(self._view.brokers) if broker != owner)
        began = time.monotonic()
        await self._world.step(
            "move", name, target=target, from_broker=owner, reason=reason, timeout_ms=timeout_ms
        )
        await self._view.wait(lambda: self._state(name) is OwnershipState.SEALED, timeout=PATIENCE_S)
        await self.assign(name, target)
        await self._view.wait(lambda: self._view.held(name).record.incarnation != 0, timeout=PATIENCE_S)
        self.moved.append((name, target))
        record = self._view.held(name).record
        downtime_ms = round(1000 * (time.monotonic() - began))
        return Move(name, owner, target, record.epoch, record.end, downtime_ms=downtime_ms)

    def _state(self, name: TopicName) -> OwnershipState:
        return self._view.held(name).record.state

    async def drain(self, broker: int, mode: BrokerMode) -> AsyncIterator[DrainStatus]:
        self._check()
        self.drained.append((broker, mode))
        for status in self.statuses:
            yield status

    def plan_drain(self, broker: int, mode: BrokerMode) -> DrainStatus:
        self._check()
        topics = tuple(sorted(entry.name for entry in self._view.owned_by(broker)))
        return DrainStatus(len(topics), 0, 0, len(topics), topics=topics, is_done=True)

    async def activate(self, broker: int, reason: str) -> bool:
        self._check()
        self.activated.append((broker, reason))
        return False

    def balance(self) -> Balance:
        self._check()
        assert self.balanced is not None
        return self.balanced

    async def rebalance(self, *, dry_run: bool, max_moves: int) -> Rebalanced:
        self._check()
        self.asked.append((dry_run, max_moves))
        assert self.rebalanced is not None
        return self.rebalanced

    def begin_rebalance(self, *, max_moves: int) -> asyncio.Task[Rebalanced]:
        return asyncio.create_task(self.rebalance(dry_run=False, max_moves=max_moves))


@dataclass
class BrokerAt:
    """One broker, and a client of its admin port."""

    broker: int
    client: AdminClient
    channel: aio.Channel
    topics: ServedTopics
    view: ClusterView
    life: Life
    director: Director
    node: FakeNode
    forwarder: Forwarder
    agent: Agent

    async def topic(self, method: str, request: Any) -> Any:
        return await self.client.call(getattr(self.client.topics, method), request)

    async def subscription(self, method: str, request: Any) -> Any:
        return await self.client.call(getattr(self.client.subscriptions, method), request)

    async def brokers(self, method: str, request: Any) -> Any:
        return await self.client.call(getattr(self.client.brokers, method), request)


class Site:
    """``async with site.broker(1) as one, site.broker(2) as two``"""

    def __init__(self, path: Path, config: Config = Config()) -> None:  # noqa: B008 (frozen)
        self.world = World(path)
        self.config = config

    async def register(self, broker: int, *, admin: str = "", incarnation: int = 0) -> None:
        registration = Registration(
            broker=broker,
            incarnation=incarnation or broker,
            client=f"b{broker}:6650",
            admin=admin or f"b{broker}:50051",
            raft=f"b{broker}:7650",
            http=f"b{broker}:9040",
            store_id="s",
            version="1",
            started_ms=5,
        )
        key = records.registration_key(broker)
        await self.world.metadata.put(key, specs.encode(registration))

    async def unregister(self, broker: int) -> None:
        await self.world.metadata.delete(records.registration_key(broker))

    @asynccontextmanager
    async def broker(self, broker: int = 1) -> AsyncIterator[BrokerAt]:
        async with AsyncExitStack() as stack:
            yield await self._start(broker, stack)

    async def _start(self, broker: int, stack: AsyncExitStack) -> BrokerAt:
        world, life = self.world, Life(broker)
        view = ClusterView(world.metadata)
        view.start(Supervisor())
        stack.push_async_callback(view.close)
        agents: list[Agent] = []
        topics = await stack.enter_async_context(
            world.topics(
                self.config,
                QUICK,
                broker=broker,
                kind=ServedTopics,
                incarnation=lambda: life.incarnation,
                others=others(released=lambda names: agents[0].released(names)),
            )
        )
        agent = Agent(view, world.metadata, topics, broker=broker, registrar=cast(Registrar, life))
        agents.append(agent)
        agent.start(Supervisor())
        stack.push_async_callback(agent.close)
        router = TopicRouter(view, topics.registry)
        peers = PeerChannels(router, Auth())
        stack.push_async_callback(peers.close)
        forwarder = Forwarder(router, peers, lambda: LEADER, guard=guard_of(broker))
        director = Director(broker, world, view)
        node = FakeNode(Core(node=broker))
        server = aio.server()
        self._add_services(server, forwarder, topics, view, router, director, node)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        stack.push_async_callback(server.stop, None)
        await self.register(broker, admin=f"127.0.0.1:{port}")
        await view.wait(lambda: broker in view.brokers, timeout=PATIENCE_S)
        client = await stack.enter_async_context(AdminClient(f"127.0.0.1:{port}"))
        channel = aio.insecure_channel(f"127.0.0.1:{port}")
        stack.push_async_callback(channel.close, None)
        return BrokerAt(broker, client, channel, topics, view, life, director, node, forwarder, agent)

    def _add_services(
        self,
        server: aio.Server,
        forwarder: Forwarder,
        topics: ServedTopics,
        view: ClusterView,
        router: TopicRouter,
        director: Director,
        node: FakeNode,
    ) -> None:
        store, controller = self.world.metadata, cast(Controller, director)
        parts = Partitions(topics, store, view, PartitionCalls(router, forwarder))
        unloading = Unloading(parts, controller, timeout_ms=10_000)
        brokers = Brokers(cast(RaftNode, node), view)
        own = forwarder.serving(server, "admin")
        topics_admin_pb2_grpc.add_NamespacesServicer_to_server(
            NamespacesService(topics, self.config.policies), own
        )
        topics_admin_pb2_grpc.add_TopicsServicer_to_server(TopicsService(parts, unloading, store), own)
        topics_admin_pb2_grpc.add_SubscriptionsServicer_to_server(SubscriptionsService(parts), own)
        brokers_pb2_grpc.add_BrokersServicer_to_server(BrokersService(brokers, controller, topics), own)
        danube.register_admin_services(
            server,
            node=cast(RaftNode, node),
            brokers=brokers,
            controller=controller,
            parts=parts,
            unloading=unloading,
            schemas=SchemaRegistry(store),
            topic_schemas=TopicSchemas(store),
            forwarder=forwarder,
            security=SecurityPolicies(store),
        )


def members(*nodes: int) -> Membership:
    return Membership(
        voters=tuple(NodeId(node) for node in nodes),
        addresses=tuple((NodeId(node), f"b{node}:7650") for node in nodes),
    )
