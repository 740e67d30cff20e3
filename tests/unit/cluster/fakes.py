"""A metadata store that fails on demand, and topics that do nothing but follow the rules of ownership."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sava.cluster import records
from sava.cluster.records import Registration
from sava.metadata.commands import Compare, KeyValue, Operation, Put, TxnResult
from sava.metadata.errors import OutcomeUnknown
from sava.metadata.records import unchanged
from sava.topics import ownership, specs
from sava.topics.errors import NotOwner
from sava.topics.names import TopicName
from sava.topics.ownership import KnownOwnership
from sava.topics.registry import Namespaces, Registry
from sava.topics.specs import Ownership, OwnershipState
from tests.support.memory_store import MemoryStore

ORDERS = TopicName("default", "orders")


class FaultyStore(MemoryStore):
    """``before[method]`` runs before a call and may raise or wait; ``lost[method]`` counts answers that are
    lost after the call took effect."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        self.lost: dict[str, int] = defaultdict(int)
        self.calls: dict[str, int] = defaultdict(int)

    async def _meet(self, method: str) -> None:
        self.calls[method] += 1
        if method in self.before:
            await self.before[method]()

    def _answer(self, method: str) -> None:
        if self.lost[method]:
            self.lost[method] -= 1
            raise OutcomeUnknown("the answer was lost")

    async def txn(
        self, compare: Sequence[Compare], then: Sequence[Operation], *args: Any, **options: Any
    ) -> TxnResult:
        await self._meet("txn")
        result = await super().txn(compare, then, *args, **options)
        self._answer("txn")
        return result

    async def get(self, key: str, **options: Any) -> KeyValue | None:
        await self._meet("get")
        return await super().get(key, **options)

    async def grant_lease(self, ttl_ms: int, *, timeout: float = 10.0) -> int:
        await self._meet("grant_lease")
        return await super().grant_lease(ttl_ms, timeout=timeout)

    async def keep_alive(self, lease: int, *, timeout: float = 10.0) -> int:
        await self._meet("keep_alive")
        return await super().keep_alive(lease, timeout=timeout)


def registration(broker: int, incarnation: int = 1) -> Registration:
    host = f"b{broker}"
    return Registration(
        broker=broker,
        incarnation=incarnation,
        client=f"{host}:1",
        admin=f"{host}:2",
        raft=f"{host}:3",
        http=f"{host}:4",
        store_id="s",
    )


async def new_store(*topics: TopicName, **options: Any) -> FaultyStore:
    store = FaultyStore(**options)
    await Namespaces(store).ensure(("default",))
    for name in topics:
        await Registry(store).create(name, reliable=True)
    return store


async def register(store: MemoryStore, broker: int, incarnation: int = 1) -> None:
    await store.put(records.registration_key(broker), specs.encode(registration(broker, incarnation)))


def held(store: MemoryStore, name: TopicName = ORDERS) -> KnownOwnership:
    return ownership.known(store.local, name)


async def write(store: MemoryStore, name: TopicName, record: Ownership) -> None:
    await store.put(specs.ownership_key(name), specs.encode(record))


async def step(store: MemoryStore, step: str, name: TopicName = ORDERS, **changes: Any) -> None:
    """As a controller writes it."""
    record, revision = held(store, name)
    key = specs.ownership_key(name)
    value = specs.encode(ownership.after(step, name, record, **changes))
    assert (await store.txn((unchanged(key, revision),), (Put(key, value),))).succeeded


@dataclass
class Life:
    """A registration without a lease: ``incarnation`` is what the test says."""

    incarnation: int = 1
    listeners: list[Callable[[], None]] = field(default_factory=list)
    is_leaving: bool = False

    @property
    def is_registered(self) -> bool:
        return self.incarnation != 0

    def listen(self, listener: Callable[[], None]) -> None:
        self.listeners.append(listener)

    def begin(self, incarnation: int) -> None:
        self.incarnation = incarnation
        for listener in self.listeners:
            listener()


@dataclass
class FakeTopic:
    epoch: int
    is_serving: bool = True


class FakeTopics:
    """Takes up and gives up by the records, and remembers the calls. ``ends`` is what all brokers of a test
    share: how far each topic goes."""

    def __init__(
        self, store: MemoryStore, broker: int, life: Life, ends: dict[TopicName, int] | None = None
    ) -> None:
        self._store = store
        self._registry = Registry(store)
        self.broker = broker
        self.life = life
        self.ends = {} if ends is None else ends
        self.topics: dict[TopicName, FakeTopic] = {}
        self.calls: list[tuple[str, str]] = []
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}

    @property
    def loaded(self) -> MappingProxyType[TopicName, FakeTopic]:
        return MappingProxyType(self.topics)

    def count(self, call: str) -> int:
        return sum(each == call for each, _ in self.calls)

    async def _meet(self, call: str, name: TopicName) -> None:
        self.calls.append((call, str(name)))
        await asyncio.sleep(0)
        if call in self.before:
            await self.before[call]()

    async def get(self, name: TopicName) -> object:
        held = await ownership.take(
            self._registry,
            self._store,
            name,
            self.broker,
            incarnation=self.life.incarnation,
        )
        await self._meet("get", name)
        topic = self.topics[name] = FakeTopic(held.epoch)
        return topic

    async def hand_over(self, name: TopicName, *, timeout: float) -> int:
        try:
            await self._meet("hand_over", name)
            record = held(self._store, name).record
            topic = self.topics.get(name)
            if record.state is not OwnershipState.MOVING or (
                topic is not None and topic.epoch != record.epoch
            ):
                raise NotOwner(name, record.owner)
            self.ends[name] = self.ends.get(name, 0) + 10
            return self.ends[name]
        finally:
            self.topics.pop(name, None)

    async def drop(self, name: TopicName, why: str) -> None:
        await self._meet("drop", name)
        self.topics.pop(name, None)

    async def drop_all(self) -> None:
        self.topics.clear()

    async def release(self, name: TopicName) -> None:
        await self._meet("release", name)
        self.topics.pop(name, None)
        await step(self._store, "release", name)


def failing(error: Exception, times: int) -> Callable[[], Awaitable[None]]:
    left = times

    async def fail() -> None:
        nonlocal left
        if left:
            left -= 1
            raise error

    return fail


async def never() -> None:
    await asyncio.Event().wait()
