"""A cluster that sends, without brokers: records, a view of them, and a remote that says what a test has laid
down."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sava.cluster.pipelines import LONGEST_TTL_MS, Pipelines, RunnerRecord
from sava.cluster.view import ClusterView
from sava.replication import records
from sava.replication.control import Control
from sava.replication.links import KIND, Extent, LinkName, Links, pipeline_name
from sava.replication.matrix import Mismatch, Settings, There
from sava.replication.policies import Scope
from sava.replication.records import LinkRecord, PartitionReport, PolicyRecord, RemoteRecord
from sava.replication.remotes import ClusterIdentity, Remotes, Shape
from sava.replication.slots import ReplicationSlots
from sava.replication.status import Reports, Statuses, TopicReport, TopicStatus
from sava.supervisor import Supervisor
from sava.topics import specs
from sava.topics.names import TopicName
from sava.topics.registry import Namespaces, Registry
from sava.topics.specs import Position
from tests.support.memory_store import MemoryStore
from tests.support.waiting import PATIENCE_S

EAST, WEST, NORTH = (
    ClusterIdentity("east", "id-east"),
    ClusterIdentity("west", "id-west"),
    ClusterIdentity("north", "id-north"),
)
ORDERS = TopicName("default", "orders")


class FakeRemote:
    def __init__(self, identity: ClusterIdentity) -> None:
        self.identity = identity
        self.namespaces = {"default"}
        self.topics: dict[str, There] = {}
        self.subjects: dict[str, str] = {}
        self.trouble: Exception | None = None

    def has(self, topic: str, partitions: int, **more: Any) -> None:
        self.topics[topic] = There(remote="", partitions=partitions, **more)

    def shape(self, name: str, topic: str) -> Shape:
        found = self.topics.get(topic)
        is_there = topic.split("/")[1] in self.namespaces
        there = There(
            remote=name,
            namespace_exists=is_there,
            exists=found is not None,
            partitions=found.partitions if found else 0,
            reliable=found.reliable if found else True,
            missing=found.missing if found else (),
            topic_ids=found.topic_ids if found else (),
        )
        return Shape(topic, there, self.subjects.get(topic, ""))


class FakeCalls:
    """``RemoteCalls``: remotes by their address."""

    def __init__(self) -> None:
        self.remotes: dict[str, FakeRemote] = {}

    def _remote(self, record: RemoteRecord) -> FakeRemote:
        remote = self.remotes[record.service]
        if remote.trouble is not None:
            raise remote.trouble
        return remote

    async def hello(self, remote: RemoteRecord) -> ClusterIdentity:
        return self._remote(remote).identity

    async def describe(self, name: str, remote: RemoteRecord, topics: Sequence[str]) -> list[Shape]:
        return [self._remote(remote).shape(name, topic) for topic in topics]


class FakePins:
    """``Pins``: cursors are records, as their owners would write them."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.trouble: Exception | None = None
        self.starts: dict[tuple[TopicName, str], Position] = {}
        self.rewound: list[tuple[TopicName, str, Position]] = []

    async def pin(self, topic: TopicName, cursor: str, start: Position) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.starts[topic, cursor] = start
        await self._store.put(specs.subscription_key(topic, cursor), b"{}")

    async def rewind(self, topic: TopicName, cursor: str, start: Position) -> None:
        if self.trouble is not None:
            raise self.trouble
        self.rewound.append((topic, cursor, start))

    async def unpin(self, topic: TopicName, cursor: str) -> None:
        if self.trouble is not None:
            raise self.trouble
        del self.starts[topic, cursor]
        await self._store.delete(specs.subscription_key(topic, cursor))


class Leadership:
    current = 1

    def term(self) -> int:
        return self.current


class World:
    def __init__(self, store: MemoryStore, *, may_create: bool, mismatch: Mismatch) -> None:
        self.store = store
        self.view = ClusterView(store)
        self.registry = Registry(store)
        self.namespaces = Namespaces(store)
        self.pipelines = Pipelines(store)
        self.leadership = Leadership()
        self.ends: dict[TopicName, Extent] = {}
        """Of partitions that somebody serves."""
        self.calls = FakeCalls()
        self.pins = FakePins(store)
        self.cursors = ReplicationSlots(
            store, pin=self.pins.pin, rewind=self.pins.rewind, unpin=self.pins.unpin
        )
        self.links = Links(self.view, store, self.pipelines, self.leadership, self.extents, self.cursors)
        self.reports = Reports(store)
        self.statuses = Statuses(self.links, self.reports, self.pipelines, self.extents)
        self.control = Control(
            store=store,
            view=self.view,
            remotes=Remotes(store, self.calls, lambda: EAST),
            links=self.links,
            reports=self.reports,
            statuses=self.statuses,
            settings=Settings(may_create=may_create, mismatch=mismatch),
        )

    async def extents(self, names: Sequence[TopicName]) -> Mapping[TopicName, Extent]:
        return {name: self.ends[name] for name in names if name in self.ends}

    async def add_remote(self, name: str = "west", identity: ClusterIdentity = WEST) -> FakeRemote:
        remote = self.calls.remotes[f"{name}:6650"] = FakeRemote(identity)
        await self.control.remotes.add(name, given(f"{name}:6650"))
        return remote

    async def create(self, name: TopicName = ORDERS, *, partitions: int = 0, reliable: bool = True) -> None:
        await self.registry.create(name, partitions=partitions, reliable=reliable)
        await self.seen(name)

    async def grow(self, partitions: int, name: TopicName = ORDERS) -> None:
        await self.registry.grow(name, partitions)
        await self.seen(name)

    async def delete(self, name: TopicName = ORDERS) -> None:
        family = await self.registry.begin_delete(name)
        await self.registry.finish_delete(family)
        await self.seen(name)

    async def seen(self, name: TopicName = ORDERS) -> None:
        """Until the view shows what the store has of a topic."""

        def is_shown() -> bool:
            spec = self.registry.get_local(name)
            parts = [name.partition(index) for index in range(spec.partitions)] if spec else []
            return self.view.spec(name) == spec and all(self.view.spec(part) for part in parts)

        await self.view.wait(is_shown, timeout=PATIENCE_S)

    async def replicate(self, scope: str = "default", **policy: Any) -> None:
        """Whatever remotes have."""
        wanted = PolicyRecord(**{"remotes": ("west",), **policy})
        assert (await self.control.set(Scope.parse(scope), wanted, skip_checks=True)).is_set

    def record(self, remote: str = "west", name: TopicName = ORDERS) -> LinkRecord | None:
        kv = self.store.local.get(records.link_key(remote, name))
        return specs.decode(kv, LinkRecord) if kv is not None else None

    def linked(self) -> list[str]:
        """What is copied where."""
        return [f"{each.name.topic} to {each.name.remote}" for each in self.links.topics()]

    def pipeline_names(self) -> list[str]:
        return sorted(each.name for each in self.pipelines.known())

    async def claim(self, runner: str = "runner-1", remote: str = "west") -> int:
        """The pipeline of the remote, by a runner that lives."""
        await self.pipelines.join(runner, RunnerRecord(kinds=(KIND,)), ttl_ms=LONGEST_TTL_MS)
        return (await self.pipelines.claim(pipeline_name(remote), runner)).number

    async def report(self, *partitions: PartitionReport, name: TopicName = ORDERS, **more: Any) -> None:
        await self.claim()
        topic = next(each for each in self.links.topics() if each.name == LinkName("west", name))
        told = TopicReport(
            **{
                "topic_ids": topic.wanted.topic_ids,
                "generation": topic.record.generation,
                "remote_topic_ids": (),
                "is_tombstone": False,
                "begins": (),
                "partitions": partitions,
                **more,
            }
        )
        await self.control.report("west", "runner-1", {name: told})

    def status(self, name: TopicName = ORDERS) -> TopicStatus:
        return next(each for each in self.control.status() if each.topic.name.topic == name)


def given(service: str, **more: Any) -> RemoteRecord:
    """As an operator gives it."""
    return RemoteRecord(service=service, cluster_name="", cluster_id="", **more)


@asynccontextmanager
async def world(*, may_create: bool = True, mismatch: Mismatch = Mismatch.PIP370) -> AsyncIterator[World]:
    made = World(MemoryStore(), may_create=may_create, mismatch=mismatch)
    await made.namespaces.ensure(["default", "shop"])
    made.view.start(Supervisor())
    try:
        await made.view.wait(lambda: made.view.is_ready, timeout=PATIENCE_S)
        yield made
    finally:
        await made.view.close()
