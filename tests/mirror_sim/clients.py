"""Producers: publish to whoever owns a topic; every message is another one, whatever became of the last."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.mirror_sim.records import topic_key

if TYPE_CHECKING:
    from tests.mirror_sim.world import World

MS = 1000
PATIENCE_US = 1000 * MS


class Producer:
    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._rng = world.rng(f"producer{number}")
        self._left = world.knobs.messages // world.knobs.producers
        self._call = 0
        self.is_stopped = False
        self.acked = 0

    def start(self) -> None:
        self._world.after(self._rng.randrange(100 * MS), self._next)

    def _next(self) -> None:
        if self.is_stopped or self._left <= 0:
            return
        self._call += 1
        self._world.after(PATIENCE_US, self._give_up, self._call)
        self.publish(self._rng.randrange(self._world.knobs.topics), self._call)

    def publish(self, topic: int, call: int) -> None:
        """To somebody who believes to own the topic: clients may know no better than a broker that was
        replaced long ago."""
        owners = [
            broker.ledger
            for broker in self._world.brokers.values()
            if broker.ledger is not None and topic in broker.ledger.served and not broker.is_paused
        ]
        if not owners:
            self._again(call)
            return
        hash_ = self._rng.getrandbits(32)
        owner = self._rng.choice(owners)
        owner.publish(topic, hash_, lambda is_acked: self._answered(call, is_acked))

    def _answered(self, call: int, is_acked: bool) -> None:
        if call == self._call and is_acked:
            self._left -= 1
            self.acked += 1
        self._again(call)

    def _give_up(self, call: int) -> None:
        self._again(call)

    def _again(self, call: int) -> None:
        if call == self._call:
            self._call += 1
            think = self._world.knobs.think_ms * MS
            self._world.after(think // 2 + self._rng.randrange(think), self._next)


class Prober:
    """After healing: does every topic accept a message?"""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng("prober")
        self.acked: set[int] = set()

    def probe(self) -> None:
        for topic in range(self._world.knobs.topics):
            record = self._world.store.get(topic_key(topic)).value
            if topic not in self.acked and record.ledger is not None:
                ledger = self._world.brokers[record.ledger.broker].ledger
                if ledger is not None and ledger.id == record.ledger:
                    ledger.publish(topic, self._rng.getrandbits(32), self._done(topic))

    def _done(self, topic: int) -> Callable[[bool], None]:
        return lambda is_acked: self.acked.add(topic) if is_acked else None
