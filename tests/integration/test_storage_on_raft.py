"""Storage whose catalog is the replicated store: three Raft nodes with sockets and disks in this process, and
brokers' storage on the stores of different nodes. Topics move, nodes stop at the worst moment, and every
message stays at its offset."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from sava import config
from sava.errors import HostError, RetryableError
from sava.metadata.commands import Compare, Operation, Put, TxnResult
from sava.metadata.errors import OutcomeUnknown
from sava.metadata.store import ClusterOperations, MetadataStore, RaftStore
from sava.raft import NO_NODE
from sava.server import Broker, raft_address
from sava.storage.broker_storage import BrokerStorage, StorageOptions
from sava.storage.inspection import InspectedTopic, Verification
from sava.storage.objectstore import ObjectStore
from sava.storage.topic_log import TopicLog
from sava.storage.types import TopicState
from sava.supervisor import Supervisor
from sava.wal import LocalDisk
from tests.support.brokers import FAST, storage_in
from tests.support.network import free_ports
from tests.support.one_disk import OneDisk
from tests.support.storage import EAGER, LAZY, TOPIC, append_each, contents, expected, numbered
from tests.support.waiting import HURRIES, PATIENCE_S

NAME = InspectedTopic(TOPIC.namespace, TOPIC.name)


class MetadataNode:
    """A metadata node that can stop and come back."""

    def __init__(self, directory: Path) -> None:
        names = ("client", "admin", "raft", "prometheus")
        overlay = {
            "broker": {"host": "127.0.0.1", "ports": dict(zip(names, free_ports(4), strict=True))},
            "meta_store": {**FAST, "data_dir": str(directory)},
            "storage": storage_in(directory),
        }
        self._settings = config.load(None, {}, overlay)
        self.address = raft_address(self._settings)
        self._broker: Broker | None = None

    async def start(self) -> None:
        broker = Broker(self._settings)
        await broker.start()
        self._broker = broker

    @property
    def broker(self) -> Broker:
        assert self._broker is not None
        return self._broker

    @property
    def store(self) -> RaftStore:
        return RaftStore(self.broker.node)

    @property
    def is_leader(self) -> bool:
        return self._broker is not None and self._broker.node.replica.is_leader

    def die(self) -> None:
        """From one moment to the next, as by a failed disk: it answers nobody any more."""
        self.broker.node.fail(HostError("made to fail"))

    async def close(self) -> None:
        if self._broker is not None:
            broker, self._broker = self._broker, None
            await broker.close()


class World:
    """Three nodes; objects and the brokers' journals in directories beside them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.nodes = [MetadataNode(path / f"node-{number}") for number in range(3)]
        self.objects = ObjectStore.open((path / "objects").as_uri())

    async def start(self) -> None:
        for node in self.nodes:
            await node.start()
        await ClusterOperations(self.nodes[0].broker.node).init([node.address for node in self.nodes])

    async def leader(self) -> MetadataNode:
        """After a linearizable read, which passes when there is one."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for node in self.nodes:
                    if node.is_leader:
                        await node.store.get("/")
                        return node
                await self.nodes[0].store.get("/")

    async def followers(self) -> list[MetadataNode]:
        leader = await self.leader()
        return [node for node in self.nodes if node is not leader]

    @asynccontextmanager
    async def storage(
        self, name: str, metadata: MetadataStore, options: StorageOptions = LAZY
    ) -> AsyncIterator[BrokerStorage]:
        """A broker's storage from its start to its stop."""
        failures: list[BaseException] = []
        storage = await BrokerStorage.open(
            LocalDisk(self.path / name),
            broker=name,
            store=self.objects,
            metadata=metadata,
            options=options,
            fail=failures.append,
            supervisor=Supervisor(),
        )
        await storage.journal.begin_generation(OneDisk())
        try:
            yield storage
        finally:
            await storage.close()
        assert not failures

    async def verify(self, metadata: MetadataStore, messages: int) -> None:
        """Every segment is as described, they follow each other, and nothing lies beside them."""
        check = Verification(metadata, self.objects, NAME)
        await check.list_objects()
        assert [fault.text async for fault in check.faults(lambda size: None)] == []
        assert check.messages == messages

    async def stop(self) -> None:
        await asyncio.gather(*(node.close() for node in self.nodes))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    (tmp_path / "objects").mkdir()
    world = World(tmp_path)
    try:
        await world.start()
        yield world
    finally:
        await world.stop()


async def repeated(attempt: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat what may be repeated: refused without effect, or of unknown outcome."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await attempt()
            except (RetryableError, OutcomeUnknown):
                await asyncio.sleep(0)  # also an attempt that fails at once lets the deadline pass


# -- moving ------------------------------------------------------------------------------------------


async def test_a_topic_moves_to_another_broker_and_back(world: World) -> None:
    """Each broker asks another node. A consumer at 6 reads on over all moves; what segments hold and what is
    in the journal follow each other."""
    first, second, third = world.nodes
    async with world.storage("a", first.store) as a, world.storage("b", second.store) as b:
        log = await a.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 22)
        await log.seal()
        log = await b.open_topic(TOPIC, epoch=2)
        assert log.next_offset == 22
        await append_each(log, 22, 30)
        assert await contents(log, 6) == expected(6, 30)
        await log.seal()
        log = await a.open_topic(TOPIC, epoch=3)
        assert log.next_offset == 30
        await append_each(log, 30, 35)
        assert await contents(log, 6) == expected(6, 35)
    # The broker stops with 30..35 in its journal only, and comes back on another node's store.
    async with world.storage("a", third.store) as a:
        log = await a.open_topic(TOPIC, epoch=4)
        assert await contents(log) == expected(0, 35)
        await log.seal()
    await world.verify(second.store, 35)


async def test_all_nodes_restart_and_the_topic_goes_on(world: World) -> None:
    async with world.storage("a", world.nodes[0].store) as a:
        log = await a.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 10)
        await log.seal()
        log = await a.open_topic(TOPIC, epoch=2)
        await append_each(log, 10, 12)
    await world.stop()
    for node in world.nodes:
        await node.start()
    await world.leader()
    async with world.storage("a", world.nodes[1].store) as a:
        log = await a.open_topic(TOPIC, epoch=3)
        assert await contents(log) == expected(0, 12)
        await log.append(numbered(12, 15))
        await log.seal()
    await world.verify(world.nodes[2].store, 15)


# -- the leader stops ----------------------------------------------------------------------------------


class Watched:
    """A node's store; ``at`` is called when a transaction that matches is about to be sent."""

    def __init__(
        self, store: RaftStore, matches: Callable[[TopicState], bool], at: Callable[[], None]
    ) -> None:
        self._store = store
        self._matches = matches
        self._at: Callable[[], None] | None = at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    @property
    def has_happened(self) -> bool:
        return self._at is None

    async def txn(self, compare: Sequence[Compare], then: Sequence[Operation], **more: Any) -> TxnResult:
        at = self._at
        states = [each for each in then if isinstance(each, Put) and each.key.endswith("/state")]
        if at is None or not any(
            self._matches(msgspec.json.decode(s.value, type=TopicState)) for s in states
        ):
            return await self._store.txn(compare, then, **more)
        self._at = None
        sent = asyncio.ensure_future(self._store.txn(compare, then, **more))
        await asyncio.sleep(0)  # it is on its way
        at()
        return await sent


@pytest.mark.parametrize("change", ["claim", "register", "seal"])
async def test_the_leader_dies_while_a_follower_forwards_a_change(world: World, change: str) -> None:
    """Whether the change took effect is decided by the state that is read afterwards; no message is lost and
    none gets a second offset."""
    leader = await world.leader()
    follower, other = await world.followers()
    matches: dict[str, Callable[[TopicState], bool]] = {
        "claim": lambda state: not state.sealed and state.end == 0,
        "register": lambda state: not state.sealed and state.end == 22,
        "seal": lambda state: state.sealed,
    }
    watched = Watched(follower.store, matches[change], leader.die)
    async with world.storage("a", cast(MetadataStore, watched)) as a:
        log: TopicLog = await repeated(lambda: a.open_topic(TOPIC, epoch=1))
        await append_each(log, 0, 22)
        await repeated(log.seal)
        assert watched.has_happened
    async with world.storage("b", other.store) as b:
        log = await repeated(lambda: b.open_topic(TOPIC, epoch=2))
        assert log.next_offset == 22
        await append_each(log, 22, 25)
        assert await contents(log) == expected(0, 25)
        await repeated(log.seal)
    await world.verify(other.store, 25)


async def test_a_broker_dies_with_the_leader_in_it_in_the_middle_of_a_seal(world: World) -> None:
    """Storage and leader in one process, as a real broker has them. The others elect a leader; the broker
    comes back, and goes on where it was, whether or not the seal took effect."""
    node = await world.leader()
    other = (await world.followers())[0]
    watched = Watched(node.store, lambda state: state.sealed, node.die)
    async with world.storage("a", cast(MetadataStore, watched)) as a:
        log = await a.open_topic(TOPIC, epoch=1)
        await append_each(log, 0, 22)
        for seconds in HURRIES:
            with pytest.raises((RetryableError, OutcomeUnknown, TimeoutError)):
                await log.seal(timeout=seconds)
            if watched.has_happened:
                break
        assert watched.has_happened
    await node.close()
    await repeated(lambda: other.store.put("/works", b"again"))
    await node.start()
    async with world.storage("a", node.store) as a:
        log = await repeated(lambda: a.open_topic(TOPIC, epoch=2))
        assert log.next_offset == 22
        await append_each(log, 22, 25)
        assert await contents(log) == expected(0, 25)
        await repeated(log.seal)
    async with world.storage("b", other.store) as b:
        log = await repeated(lambda: b.open_topic(TOPIC, epoch=3))
        assert log.next_offset == 25
        assert await contents(log) == expected(0, 25)
    await world.verify(other.store, 25)


async def test_segments_are_registered_while_leaders_come_and_go(world: World) -> None:
    """Appends go on all the time: they need the disk alone. Registrations wait for a leader, in order."""
    store_of = world.nodes[0]
    async with world.storage("a", store_of.store, EAGER) as a:
        log = await a.open_topic(TOPIC, epoch=1)
        for change in range(3):
            await append_each(log, 20 * change, 20 * change + 10)
            leader = await world.leader()
            if leader is store_of:
                await ClusterOperations(leader.broker.node).transfer(
                    NO_NODE, world.nodes[1].address, timeout=PATIENCE_S
                )
            else:
                leader.die()
                await append_each(log, 20 * change + 10, 20 * change + 15)
                await leader.close()
                await leader.start()
            await append_each(log, log.next_offset, 20 * change + 20)
        await repeated(log.seal)
        assert await contents(log) == expected(0, 60)
    await world.verify(world.nodes[2].store, 60)
