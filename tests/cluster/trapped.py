"""Brokers that can be killed at a named step (see ``broker_child``), and what must hold after any kill."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from sava.errors import SavaError
from sava.proto import admin_pb2 as admin
from sava.proto import topics_admin_pb2 as pb
from sava.storage.types import TopicState
from sava.topics.ownership import UNASSIGNED
from sava.topics.specs import Ownership, OwnershipState
from tests.cluster.broker_child import VARIABLE, Trap
from tests.support.brokers import CALL_S, BrokerProcess, Brokers
from tests.support.waiting import PATIENCE_S, until

T = TypeVar("T")

WAITS_S = 1.5
"""A topic that has been an orphan for so long, and is not settled, waits for its owner."""


class Roles(NamedTuple):
    source: BrokerProcess
    target: BrokerProcess
    controller: BrokerProcess


class TrappedBrokers(Brokers):
    def __init__(self, size: int, directory: Path, **settings: Any) -> None:
        settings.setdefault("cluster", {"registration_ttl_ms": 1500})
        super().__init__(size, directory, **settings)
        self._trap = directory / "trap"
        self.segments = directory / "segments"

    async def prepare(self) -> BrokerProcess:
        broker = await super().prepare()
        broker.run_as("tests.cluster.broker_child", **{VARIABLE: str(self._trap)})
        return broker

    async def all_running(self) -> None:
        for broker in self.brokers:
            if not broker.is_running:
                await broker.start()
            # Of a broker that was just started the others may still see the registration of its former life,
            # which ends at any moment.
            await broker.logged("this broker is registered")
        await self.registered()

    async def roles(self) -> Roles:
        """Three different brokers."""
        leader = await self.leader()
        source, target = (broker for broker in self.running if broker is not leader)
        return Roles(source, target, leader)

    def trap(self, step: str, topic: str, victim: BrokerProcess) -> None:
        Trap(step, topic, victim.pid).set(self._trap)

    async def place(self, topic: str, broker: BrokerProcess) -> None:
        if await self.owner(topic) is not broker:
            (move,) = await self.unload(topic, to=broker)
            assert not move.error, move.error

    # -- metadata ------------------------------------------------------------------------------

    async def keys(self, prefix: str) -> list[str]:
        client = self.running[0].client
        found: list[str] = []
        while True:
            request = admin.RangeRequest(prefix=prefix, start_after=found[-1] if found else "")
            page = await client.call(client.meta.Range, request, timeout=CALL_S)
            found += [kv.key for kv in page.kvs]
            if not page.more:
                return found

    async def value(self, key: str, kind: type[T]) -> T | None:
        value = await self.running[0].get(key)
        return msgspec.json.decode(value, type=kind) if value is not None else None

    async def ownership(self, topic: str) -> Ownership:
        return await self.value(f"/topics{topic}/ownership", Ownership) or UNASSIGNED

    # -- afterwards ----------------------------------------------------------------------------

    async def settle(self, topic: str, victim: BrokerProcess, *, may_need_victim: bool) -> None:
        """Until the topic is served by one broker that runs. The victim stays dead unless it alone knows how
        the topic ends."""
        deadline = time.monotonic() + PATIENCE_S
        orphan_since: float | None = None
        while True:
            record = await self._asked(self.ownership(topic)) or UNASSIGNED
            if record.incarnation and await self._asked(self._is_served_alike(topic, record)):
                return
            now = time.monotonic()
            assert now < deadline, f"{topic} is not served within {PATIENCE_S:g} s: {record}"
            if record.state is not OwnershipState.ORPHAN:
                orphan_since = None
            elif orphan_since is None:
                orphan_since = now
            elif now - orphan_since > WAITS_S and not victim.is_running:
                state = await self.value(f"/storage/topics{topic}/state", TopicState)
                assert may_need_victim, f"{topic} waits for a broker that it does not need: {state}"
                assert state is not None
                assert not state.is_settled
                await victim.start()
                orphan_since = None
            await asyncio.sleep(0.1)

    async def _asked(self, call: Awaitable[T]) -> T | None:
        """None: it cannot be told at the moment."""
        try:
            return await call
        except SavaError:
            return None

    async def _is_served_alike(self, topic: str, record: Ownership) -> bool:
        """In the eyes of all that run, by one that runs."""
        if record.state is not OwnershipState.ASSIGNED or not (await self.by_id(record.owner)).is_running:
            return False
        for broker in self.running:
            described = await self.describe(topic, through=broker)
            if (described.broker_id, described.state) != (record.owner, "open"):
                return False
        return True

    async def delete(self, topic: str, *, through: BrokerProcess) -> None:
        """Until it is gone. A deletion whose broker could not finish is repeated, as clients do."""
        client = through.client

        async def is_gone() -> bool:
            try:
                await client.call(
                    client.topics.DeleteTopic, pb.DeleteTopicRequest(name=topic), timeout=CALL_S
                )
            except SavaError as error:
                if "does not exist" not in str(error):
                    raise
            return await self.running[0].get(f"/topics{topic}/spec") is None

        await until(is_gone, f"{topic} is deleted", timeout=2 * PATIENCE_S)

    async def nothing_left(self, topic: str) -> None:
        """Of a topic that is deleted. An object that was on its way at that time may arrive a little later,
        and goes as soon as its writer finds the topic gone."""
        assert await self.keys(f"/topics{topic}/") == []
        assert await self.keys(f"/storage/topics{topic}/") == []

        async def no_objects() -> bool:
            folder = self.segments / f"topics{topic}"
            return not await asyncio.to_thread(lambda: any(path.is_file() for path in folder.rglob("*")))

        await until(no_objects, f"no object of {topic} is left")
