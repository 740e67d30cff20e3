"""A cluster without brokers: records, a controller, and stand-ins that do with the records what agents do.

A stand-in takes up what it is assigned, seals what it is asked to hand over, and stops at once when it is
killed. Of reliable topics it writes the storage state as an owner does: not sealed while it serves (unless it
is told to be at rest), sealed once it has handed over.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from sava.cluster import records
from sava.cluster.controller import Controller
from sava.cluster.records import BrokerMode, Mode, Registration
from sava.cluster.view import ClusterView, TopicEntry
from sava.config import Config, LoadManagerSettings, RebalancingSettings
from sava.metadata.commands import Delete, Put
from sava.metadata.records import unchanged
from sava.storage import catalog, keys
from sava.storage.errors import ObjectStoreUnavailable
from sava.storage.types import TopicKey, TopicState
from sava.supervisor import Supervisor
from sava.topics import ownership, specs
from sava.topics.names import TopicName
from sava.topics.specs import Ownership, OwnershipState, TopicSpec
from tests.support.memory_store import MemoryStore
from tests.support.waiting import PATIENCE_S, until

S = OwnershipState


def topic(index: int | str) -> TopicName:
    return TopicName("default", f"t{index}")


def registration(broker: int, incarnation: int = 1, store_id: str = "shared") -> Registration:
    return Registration(
        broker=broker, incarnation=incarnation, client="", admin="", raft="", http="", store_id=store_id
    )


def storage_key(name: TopicName, topic_id: int) -> TopicKey:
    return TopicKey(name.namespace, name.topic, topic_id)


class FakeBroker:
    def __init__(self, world: World, broker: int, *, store_id: str = "shared") -> None:
        self.world, self.broker, self.store_id = world, broker, store_id
        self.lease = 0
        self.serving: dict[TopicName, tuple[int, int]] = {}
        """Topic id and epoch of each."""
        self.fails: Callable[[TopicName], str] = lambda name: ""
        """Why a topic cannot be handed over."""
        self.hangs = False
        self.refuses_to_load = False
        self.is_clean = True
        self._woken = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        world.view.listen(lambda topics: self._woken.set())

    async def start(self) -> None:
        store = self.world.store
        self.lease = await store.grant_lease(600_000)
        value = specs.encode(registration(self.broker, self.lease, self.store_id))
        await store.put(records.registration_key(self.broker), value, lease=self.lease)
        self._woken.set()
        self._task = asyncio.create_task(self._run())

    async def leave(self) -> None:
        """It was asked to stop, and says so."""
        described = registration(self.broker, self.lease, self.store_id)
        value = specs.encode(msgspec.structs.replace(described, is_leaving=True))
        await self.world.store.put(records.registration_key(self.broker), value, lease=self.lease)

    def wake(self) -> None:
        self._woken.set()

    @property
    def is_alive(self) -> bool:
        return self._task is not None

    async def die(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            self.serving.clear()
            await self.world.store.revoke_lease(self.lease)

    async def _run(self) -> None:
        while True:
            await self._woken.wait()
            self._woken.clear()
            if self.hangs:
                continue
            for entry in self.world.view.owned_by(self.broker):
                await asyncio.sleep(0)
                await self._follow(entry)

    async def _follow(self, entry: TopicEntry) -> None:
        record = entry.record
        match record.state:
            case S.ASSIGNED if self.refuses_to_load and not record.incarnation:
                await self._step(
                    entry, "give_back", failures=record.failures + 1, from_broker=self.broker, error="disk"
                )
            case S.ASSIGNED if self.serving.get(entry.name) != (entry.spec.topic_id, record.epoch):
                await self._take(entry)
            case S.ORPHAN:
                await self._take(entry)
            case S.MOVING:
                error = self.fails(entry.name)
                self.serving.pop(entry.name, None)
                if error:
                    await self._step(entry, "roll_back", error=error)
                else:
                    await self._step(
                        entry,
                        "seal",
                        end=7 if entry.spec.reliable else 0,
                        state=self._state(entry, sealed=True),
                    )
            case S.DELETING:
                self.serving.pop(entry.name, None)
                await self._step(entry, "release")

    async def _take(self, entry: TopicEntry) -> None:
        if await self._step(entry, "take", incarnation=self.lease, state=self._state(entry, sealed=False)):
            self.serving[entry.name] = entry.spec.topic_id, entry.record.epoch + 1

    def _state(self, entry: TopicEntry, *, sealed: bool) -> Put | None:
        if not entry.spec.reliable:
            return None
        key = storage_key(entry.name, entry.spec.topic_id)
        state = TopicState(
            topic_id=entry.spec.topic_id,
            epoch=entry.record.epoch + (not sealed),
            storage_id=str(self.broker),
            end=7,
            sealed=sealed,
            is_clean=not sealed and self.is_clean,
        )
        return Put(keys.state_key(key), msgspec.json.encode(state))

    async def _step(self, entry: TopicEntry, step: str, state: Put | None = None, **changes: Any) -> bool:
        record = ownership.after(step, entry.name, entry.record, **changes)
        key = specs.ownership_key(entry.name)
        puts = [Put(key, specs.encode(record)), *filter(None, [state])]
        return (await self.world.store.txn((unchanged(key, entry.revision),), puts)).succeeded


@dataclass
class FakeLeadership:
    now: int = 1

    def term(self) -> int:
        return self.now


@dataclass
class World:
    store: MemoryStore
    view: ClusterView
    leadership: FakeLeadership
    controller: Controller
    brokers: dict[int, FakeBroker] = field(default_factory=dict)
    topic_ids: int = 0
    deletions: int = 0
    tended: int = 0
    owners: dict[tuple[TopicName, int, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    """Of each topic, its id and epoch: whoever was its owner then."""
    epochs: dict[tuple[TopicName, int], int] = field(default_factory=dict)

    stores_down: set[int] = field(default_factory=set)
    """Brokers whose object store takes no writes."""
    prepared: list[TopicName] = field(default_factory=list)

    async def prepare(self, owner: int, topic: TopicName) -> None:
        if owner in self.stores_down:
            raise ObjectStoreUnavailable("the object store takes no writes: down")
        self.prepared.append(topic)

    async def add(self, *brokers: int, store_id: str = "shared") -> None:
        for broker in brokers:
            self.brokers[broker] = FakeBroker(self, broker, store_id=store_id)
            await self.brokers[broker].start()

    async def create(self, names: Iterable[TopicName], *, reliable: bool = False) -> None:
        puts = []
        for name in names:
            self.topic_ids += 1
            puts.append(
                Put(
                    specs.spec_key(name),
                    specs.encode(TopicSpec(topic_id=self.topic_ids, reliable=reliable)),
                )
            )
        for start in range(0, len(puts), 400):
            await self.store.txn((), puts[start : start + 400])

    async def delete(self, name: TopicName) -> None:
        await self.store.txn((), (Delete(specs.ownership_key(name)), Delete(specs.spec_key(name))))

    async def set_mode(self, broker: int, mode: Mode) -> None:
        await self.store.put(records.mode_key(broker), specs.encode(BrokerMode(mode=mode)))

    def record(self, name: TopicName) -> Ownership:
        return ownership.held(self.store.local.get(specs.ownership_key(name))).record

    def states(self) -> dict[TopicName, OwnershipState]:
        return {entry.name: entry.record.state for entry in self.view.entries()}

    def topic_id(self, name: TopicName) -> int:
        kv = self.store.local.get(specs.spec_key(name))
        return specs.decode(kv, TopicSpec).topic_id if kv is not None else 0

    def storage_state(self, name: TopicName) -> TopicState | None:
        return catalog.known_state(self.store.local, storage_key(name, self.topic_id(name)))

    def is_served(self, name: TopicName) -> bool:
        record = self.record(name)
        owner = self.brokers.get(record.owner)
        return (
            record.state is S.ASSIGNED
            and owner is not None
            and owner.lease == record.incarnation
            and owner.serving.get(name) == (self.topic_id(name), record.epoch)
        )

    async def sees(self, condition: Callable[[], bool], timeout: float = PATIENCE_S) -> None:
        await self.view.wait(condition, timeout=timeout)

    async def served(self, names: Iterable[TopicName], timeout: float = PATIENCE_S) -> None:
        """Until each has an owner that serves it."""
        names = list(names)
        await until(lambda: all(self.is_served(name) for name in names), timeout=timeout)

    def watch_invariants(self) -> None:
        """At most one owner in an epoch, and epochs that only grow."""

        watch = self.store.watch(specs.TOPICS)

        async def follow() -> None:
            lives: dict[TopicName, int] = {}
            async for batch in watch:
                for event in batch.events:
                    _, _, namespace, name, what = event.key.split("/")
                    if what == "spec" and event.kv is not None:
                        lives[TopicName(namespace, name)] = specs.decode(event.kv, TopicSpec).topic_id
                    if what == "ownership" and event.kv is not None:
                        owned = TopicName(namespace, name)
                        self._check(owned, lives[owned], specs.decode(event.kv, Ownership))

        self.follower = asyncio.create_task(follow())

    def _check(self, name: TopicName, life: int, record: Ownership) -> None:
        assert record.epoch >= self.epochs.get((name, life), 0), f"{name}: the epoch went back"
        self.epochs[name, life] = record.epoch
        if record.owner and record.state in (S.ASSIGNED, S.MOVING):
            self.owners[name, life, record.epoch].add(record.owner)
            assert len(self.owners[name, life, record.epoch]) == 1, f"{name}: two owners in {record.epoch}"


def config(strategy: str = "fair", **rebalancing: Any) -> Config:
    values = {"enabled": False, "min_topic_age_seconds": 0, "cooldown_seconds": 0} | rebalancing
    return Config(
        load_manager=LoadManagerSettings.model_validate(
            {"assignment_strategy": strategy, "rebalancing": RebalancingSettings(**values)}
        )
    )


async def stay() -> None:
    """There is nobody else who could lead."""


@asynccontextmanager
async def world(settings: Config | None = None, *, leads: bool = True) -> AsyncIterator[World]:
    store = MemoryStore()
    view = ClusterView(store)
    leadership = FakeLeadership(int(leads))
    made: World

    async def finish_deletions() -> None:
        made.deletions += 1

    async def maintain_writers() -> None:
        made.tended += 1

    controller = Controller(
        view,
        store,
        settings or config(),
        leadership,
        broker=1,
        finish_deletions=finish_deletions,
        maintain_writers=maintain_writers,
        prepare_move=lambda owner, topic, timeout: made.prepare(owner, topic),
    )
    made = World(store, view, leadership, controller)
    view.start(Supervisor())
    controller.start(Supervisor(), stay)
    try:
        yield made
    finally:
        for broker in made.brokers.values():
            await broker.die()
        await controller.close()
        await view.close()
        store.close()
