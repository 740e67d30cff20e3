"""Producers of few names that open, stand still, come back and publish in any order, while brokers restart
and hand the topic over, and metadata writes are lost or come late. The last open has the name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sava.config import PolicySettings
from sava.errors import RetryableError
from sava.metadata.errors import OutcomeUnknown
from sava.storage.broker_storage import BrokerStorage
from sava.storage.errors import Fenced
from sava.storage.topic_log import TopicLog
from sava.topics.errors import ProducerFenced, TopicMoved
from sava.topics.producers import AccessMode, ProducerHandle, TopicProducers
from sava.topics.publishing import Publisher
from sava.topics.rules import TopicLimits
from sava.topics.specs import TopicSpec
from tests.support.memory_store import MemoryStore
from tests.support.storage import TOPIC, Cluster
from tests.support.topics import batch_of
from tests.unit.storage.faults import UNAVAILABLE, UNKNOWN, FaultyMetadata, lose_answer, refuse
from tests.unit.topics.test_producers import NAME
from tests.unit.topics.test_publishing import unchecked

NAMES = ("p", "q")
BROKERS = "ab"
PASSING = (RetryableError, OutcomeUnknown, Fenced, TopicMoved)


@dataclass(eq=False)
class App:
    """An application's producer."""

    name: str
    turn: int
    """In which it was opened; those of one turn were opened at the same time."""
    number: int = 0
    stream: ProducerHandle | None = None


class World:
    def __init__(self, path: Path, dice: Random) -> None:
        self.dice = dice
        self.metadata = FaultyMetadata()
        self.cluster = Cluster(path, metadata=self.metadata)
        self.brokers: dict[str, BrokerStorage] = {}
        self.owner = "a"
        self.epoch = 1
        self.turn = 0
        self.apps: list[App] = []
        self.lost_turn = dict.fromkeys(NAMES, 0)
        """When an open of the name was last left without an answer."""
        self.winner: dict[tuple[str, int], App] = {}
        """Of those that were opened at the same time, the one that has the name."""
        self.late: list[Callable[[], Awaitable[Any]]] = []
        self.refused = self.accepted = 0
        self.log: TopicLog
        self.producers: TopicProducers

    async def start(self) -> None:
        for name in BROKERS:
            self.brokers[name] = await self.cluster.start(name)
        await self._serve()

    async def _serve(self) -> None:
        """The owner takes the topic up, under its epoch."""
        self.metadata._planned.clear()
        self.log = await self.brokers[self.owner].open_topic(TOPIC, epoch=self.epoch)
        limits, gate = TopicLimits(self.metadata, PolicySettings()), unchecked(MemoryStore())
        publisher = Publisher(NAME, self.log, limits, gate)
        self.producers = TopicProducers(
            TopicSpec(topic_id=TOPIC.topic_id, reliable=True), self.epoch, publisher, self.log.epochs
        )

    async def step(self) -> None:
        self.turn += 1
        if self.dice.random() < 0.2:
            self._plan_trouble()
        steps = [self.open, self.open_at_once, self.come_back, self.come_back, self.publish, self.publish]
        steps += [self.arrive] if self.late else []
        steps += [self.restart, self.hand_over] if self.dice.random() < 0.4 else []
        await self.dice.choice(steps)()

    # -- applications --------------------------------------------------------------------------

    async def open(self, name: str | None = None) -> None:
        app = App(name or self.dice.choice(NAMES), self.turn)
        if await self._connected(app):
            self.apps.append(app)

    async def open_at_once(self) -> None:
        name = self.dice.choice(NAMES)
        await asyncio.gather(*(self.open(name) for _ in range(3)))

    async def come_back(self) -> None:
        if not self.apps:
            return
        app = self.dice.choice(self.apps[-6:])
        is_last = self._may_continue(app)
        try:
            is_connected = await self._connected(app)
        except ProducerFenced:
            self.refused += 1
            later = max(each.turn for each in self.apps if each.name == app.name)
            is_rival = self.winner.get((app.name, app.turn), app) is not app
            assert app.turn < max(later, self.lost_turn[app.name]) or is_rival or self._has_peers(app)
            return
        if is_connected:
            assert is_last, f"{app} came back although another one was opened after it"
            self.accepted += 1
            self.winner.setdefault((app.name, app.turn), app)

    async def publish(self) -> None:
        connected = [app for app in self.apps if app.stream is not None]
        if not connected:
            return
        app = self.dice.choice(connected)
        assert app.stream is not None
        is_last = self._may_continue(app)
        try:
            await (await app.stream.begin(batch_of(app.stream, "m")))
        except (*PASSING, ProducerFenced):
            app.stream = None
            return
        assert is_last, f"{app} published although another one was opened after it"
        self.winner.setdefault((app.name, app.turn), app)

    async def _connected(self, app: App) -> bool:
        try:
            app.stream = await self.producers.open(
                app.name,
                access=AccessMode.SHARED,
                schema_subject="",
                takeover=True,
                presented=app.number,
            )
        except PASSING:
            if not app.number:
                self.lost_turn[app.name] = self.turn
            return False
        except ProducerFenced:
            if app.number:
                raise
            return False  # another one was opened at the same time
        assert not app.number or app.number == app.stream.number
        app.number = app.stream.number
        return True

    def _may_continue(self, app: App) -> bool:
        """No other one was opened after it, and it has not lost against one that was at the same time."""
        is_last = all(each.turn <= app.turn for each in self.apps if each.name == app.name)
        return is_last and self.winner.get((app.name, app.turn), app) is app

    def _has_peers(self, app: App) -> bool:
        return any(e.turn == app.turn and e.name == app.name for e in self.apps if e is not app)

    # -- brokers -------------------------------------------------------------------------------

    async def restart(self) -> None:
        """The process of the owner ends where it is; the next one has its disk."""
        storage = self.brokers[self.owner]
        self.metadata._planned.clear()
        self.producers.end(TopicMoved(NAME))
        await storage.close()
        self.brokers[self.owner] = await self.cluster.start(self.owner)
        await self._serve()

    async def hand_over(self) -> None:
        self.metadata._planned.clear()
        self.producers.end(TopicMoved(NAME))
        await self.log.seal()
        await self.log.close()
        self.owner = next(name for name in BROKERS if name != self.owner)
        self.epoch += 1
        await self._serve()

    def _plan_trouble(self) -> None:
        async def delay(call: Callable[[], Awaitable[Any]]) -> Any:
            self.late.append(call)
            self.metadata.plan("get", refuse(UNAVAILABLE))
            raise UNKNOWN

        self.metadata.plan(
            "txn", self.dice.choice([lose_answer(UNKNOWN), refuse(UNKNOWN), refuse(UNAVAILABLE), delay])
        )

    async def arrive(self) -> None:
        for call in self.late:
            await call()
        self.late.clear()

    async def stop(self) -> None:
        for storage in self.brokers.values():
            await storage.close()


@pytest.mark.parametrize("seed", range(30))
async def test_the_last_open_has_the_name(tmp_path: Path, seed: int) -> None:
    world = World(tmp_path, Random(seed))
    await world.start()
    try:
        for _ in range(150):
            await world.step()
    finally:
        await world.stop()
    assert world.refused > 5
    assert world.accepted > 5
