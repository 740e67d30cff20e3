"""Store: a model of the metadata store. Transactions are atomic, linearizable and durable; what is faulty is
getting an answer.

While there is no leader, or the broker is cut off, a request has an unknown outcome: it never arrives, it
takes effect and the answer is lost, or it takes effect long after its sender has stopped to wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from random import Random
from typing import Any, NamedTuple

from tests.mirror_sim.net import RAFT, Net
from tests.sim.schedule import Schedule

Key = tuple[Any, ...]
TIMEOUT_US = 300_000


class Held(NamedTuple):
    value: Any
    revision: int


ABSENT = Held(None, 0)


class Outcome(NamedTuple):
    """``is_known`` False: nobody knows whether it happened. LedgerRefused: ``found`` is what is there."""

    is_known: bool
    succeeded: bool = False
    revision: int = 0
    found: Mapping[Key, Held] = {}


Changed = Callable[[Key, Any, Any], None]


class Store:
    def __init__(self, schedule: Schedule, net: Net, rng: Random, changed: Changed) -> None:
        self._schedule = schedule
        self._net = net
        self._rng = rng
        self._changed = changed
        self._data: dict[Key, Held] = {}
        self._revision = 0
        self.leaderless_until = 0

    def get(self, key: Key) -> Held:
        """As it is (for the simulator, and for reads that are linearizable by construction)."""
        return self._data.get(key, ABSENT)

    def items(self, kind: str) -> Iterator[tuple[Key, Held]]:
        for key in sorted(key for key in self._data if key[0] == kind):
            yield key, self._data[key]

    def is_reachable(self, broker: int) -> bool:
        is_cut = self._net.is_cut(broker, RAFT) or self._net.is_cut(RAFT, broker)
        return not is_cut and self._schedule.now >= self.leaderless_until

    def read(self, broker: int, answer: Callable[[], None]) -> None:
        """Calls back when the caller may look (``get``, ``items``), or never."""
        if self.is_reachable(broker):
            self._schedule.after(2 * self._net.delay(), self._answer, broker, answer)

    def _answer(self, broker: int, answer: Callable[[], None]) -> None:
        if self.is_reachable(broker):
            answer()

    def txn(
        self,
        broker: int,
        compares: Mapping[Key, int],
        puts: Mapping[Key, Any],
        answer: Callable[[Outcome], None],
    ) -> None:
        """Put if all keys have these revisions (0: absent); None deletes."""
        if not self.is_reachable(broker):
            if self._rng.random() < 0.3:  # it was on its way
                late = self._rng.randrange(2_000_000)
                self._schedule.after(late, self._apply, compares, puts)
            self._schedule.after(TIMEOUT_US, answer, Outcome(is_known=False))
            return
        self._schedule.after(self._net.delay(), self._arrive, broker, compares, puts, answer)

    def _arrive(
        self,
        broker: int,
        compares: Mapping[Key, int],
        puts: Mapping[Key, Any],
        answer: Callable[[Outcome], None],
    ) -> None:
        outcome = self._apply(compares, puts)
        if self.is_reachable(broker):
            self._schedule.after(self._net.delay(), answer, outcome)
        else:
            self._schedule.after(TIMEOUT_US, answer, Outcome(is_known=False))

    def _apply(self, compares: Mapping[Key, int], puts: Mapping[Key, Any]) -> Outcome:
        if any(self.get(key).revision != revision for key, revision in compares.items()):
            return Outcome(is_known=True, found={key: self.get(key) for key in compares})
        self._revision += 1
        for key, value in puts.items():
            before = self.get(key).value
            if value is None:
                self._data.pop(key, None)
            else:
                self._data[key] = Held(value, self._revision)
            self._changed(key, before, value)
        return Outcome(is_known=True, succeeded=True, revision=self._revision)
