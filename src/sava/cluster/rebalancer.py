"""Rebalancer: measures how unequal brokers are, plans which topics should go elsewhere, and moves them one
after another, within limits.

How unequal brokers are is the coefficient of variation of their loads: standard deviation over mean. Above a
threshold, topics go from those that have clearly more than the mean to the one that has the least; the
lightest first, for those are moved fastest and disturb the fewest.

**It comes to an end.** Taking a topic of load w from a broker with load a to one with load b leaves the mean
as it is and changes the variance by 2w(w - (a - b)) over the number of brokers. So a move makes things more
equal exactly if w is less than the difference, and no other is ever proposed: moving a topic to and fro would
need the loads to become more equal both ways.

**Limits.** A pause lies between automatic runs, and they move a limited number of topics an hour, for a move
costs clients a reconnection. A run that an operator asks for comes at once, and moves as many topics as it
says. A move that its owner postpones, because the object store takes no writes, ends the run and is not
counted. Only the leader remembers the number of moves: a new one begins to count again.

The plan (``plan_moves``) has no clock and no store: loads in, moves out.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from sava.cluster.loads import Loads
from sava.cluster.moves import Move
from sava.cluster.planning import store_of
from sava.cluster.records import MovePostponed, RebalanceRunning
from sava.cluster.view import ClusterView, TopicEntry
from sava.config import LoadManagerSettings
from sava.errors import SavaError
from sava.topics.names import TopicName
from sava.topics.specs import OwnershipState

THRESHOLDS: Final = {"conservative": 0.40, "moderate": 0.30, "aggressive": 0.20}
UNEVEN: Final = 0.3
"""Beyond this, half the distance from the mean is enough to count as over- or underloaded."""
MARGIN: Final = 0.2
LEAST_MARGIN: Final = 2.0
"""A broker with two topics is not overloaded because another has none."""
SPAN: Final = 0.1
TINY: Final = 1e-9


@dataclass(frozen=True, slots=True)
class BrokerLoad:
    broker: int
    load: float
    topics: int
    is_overloaded: bool = False
    is_underloaded: bool = False
    cpu_percent: float = 0.0
    memory_percent: float = 0.0
    megabytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Balance:
    strategy: str
    coefficient_of_variation: float
    threshold: float
    mean_load: float
    max_load: float
    min_load: float
    std_deviation: float
    brokers: tuple[BrokerLoad, ...]
    """The active ones, by id."""
    is_enabled: bool
    moves_last_hour: int


@dataclass(frozen=True, slots=True)
class PlannedMove:
    topic: TopicName
    from_broker: int
    to_broker: int
    load: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class Rebalanced:
    moves: tuple[PlannedMove, ...]
    before: Balance
    after: Balance


class Spread(NamedTuple):
    """Loads, summed up."""

    mean: float
    deviation: float
    largest: float
    smallest: float

    @classmethod
    def of(cls, loads: Sequence[float]) -> Spread:
        if not loads:
            return cls(0.0, 0.0, 0.0, 0.0)
        mean = math.fsum(loads) / len(loads)
        variance = math.fsum((load - mean) ** 2 for load in loads) / len(loads)
        return cls(mean, math.sqrt(variance), max(loads), min(loads))

    @property
    def imbalance(self) -> float:
        """The coefficient of variation; 0 where there is no load at all."""
        return self.deviation / self.mean if self.mean > 0 else 0.0

    @property
    def margin(self) -> float:
        """How far from the mean is too far."""
        factor = 0.5 if self.imbalance > UNEVEN else 1.0
        return factor * max(self.deviation, MARGIN * self.mean, LEAST_MARGIN)

    def is_over(self, load: float) -> bool:
        return load > self.mean + self.margin

    def is_under(self, load: float) -> bool:
        return load < self.mean - self.margin


class Movable(NamedTuple):
    """A topic that may be moved, and its part of its broker's load."""

    topic: TopicName
    load: float
    store_id: str = ""
    """Of a reliable topic: only brokers with this object store can serve it."""


def plan_moves(
    loads: Mapping[int, float],
    movable: Mapping[int, Sequence[Movable]],
    *,
    threshold: float,
    limit: int,
    fits: Callable[[Movable, int], bool] = lambda topic, broker: True,
) -> list[PlannedMove]:
    """At most ``limit`` moves that make the loads of these brokers more equal, each after the ones before it.
    ``movable`` names the brokers that may give topics away."""
    loads = dict(loads)
    left = {
        broker: sorted(topics, key=lambda each: (each.load, each.topic)) for broker, topics in movable.items()
    }
    moves: list[PlannedMove] = []
    while len(moves) < limit and Spread.of(list(loads.values())).imbalance > threshold:
        move = _next_move(loads, left, fits)
        if move is None:
            break
        loads[move.from_broker] -= move.load
        loads[move.to_broker] += move.load
        moves.append(move)
    return moves


def _next_move(
    loads: Mapping[int, float], left: Mapping[int, list[Movable]], fits: Callable[[Movable, int], bool]
) -> PlannedMove | None:
    for donor in _donors(loads):
        topics = left.get(donor, [])
        for receiver in sorted(loads, key=lambda broker: (loads[broker], broker)):
            difference = loads[donor] - loads[receiver]
            for index, topic in enumerate(topics):
                if topic.load >= difference - TINY * max(1.0, loads[donor]):
                    break  # the others are heavier
                if topic.load > 0 and fits(topic, receiver):
                    del topics[index]
                    return PlannedMove(topic.topic, donor, receiver, topic.load)
    return None


def _donors(loads: Mapping[int, float]) -> list[int]:
    """The most loaded first. If none stands out, but the ends are far apart, those above the mean."""
    spread = Spread.of(list(loads.values()))
    over = [broker for broker, load in loads.items() if spread.is_over(load)]
    if not over and spread.largest - spread.smallest > max(SPAN * spread.mean, LEAST_MARGIN):
        over = [broker for broker, load in loads.items() if load > spread.mean]
    return sorted(over, key=lambda broker: (-loads[broker], broker))


def is_excluded(name: TopicName, excluded: Sequence[str]) -> bool:
    """By its name, its partitioned topic's, or its namespace's (``/namespace/*``)."""
    return any(each in excluded for each in (str(name), str(name.head), f"/{name.namespace}/*"))


log = logging.getLogger(__name__)

HOUR_S: Final = 3600.0
MAX_REMEMBERED: Final = 10_000
UNKNOWN_WORK: Final = 0.2
"""Of a topic that its broker has not reported yet: that of one without clients."""

MoveTo = Callable[[TopicName, int], Awaitable[Move]]


class Rebalancer:
    """Owned by the event loop."""

    def __init__(
        self,
        view: ClusterView,
        loads: Loads,
        config: LoadManagerSettings,
        move: MoveTo,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._view = view
        self._loads = loads
        self._config = config
        self._move = move
        self._clock = clock
        self._moved_at: deque[float] = deque(maxlen=MAX_REMEMBERED)
        self._last_round = float("-inf")
        """The last that moved something."""
        self._is_running = False

    # -- measuring ---------------------------------------------------------------------------

    def balance(self) -> Balance:
        counts, loads = self._measure()
        spread = Spread.of(list(loads.values()))
        strategy = self._config.assignment_strategy
        return Balance(
            strategy="fair" if strategy == "round_robin" else strategy,
            coefficient_of_variation=spread.imbalance,
            threshold=self._threshold,
            mean_load=spread.mean,
            max_load=spread.largest,
            min_load=spread.smallest,
            std_deviation=spread.deviation,
            brokers=tuple(
                self._broker(broker, load, counts[broker], spread) for broker, load in loads.items()
            ),
            is_enabled=self._config.rebalancing.enabled,
            moves_last_hour=self._moves_last_hour(),
        )

    @property
    def imbalance(self) -> float:
        return Spread.of(list(self._measure()[1].values())).imbalance

    def _measure(self) -> tuple[dict[int, int], dict[int, float]]:
        """Topics and load of each active broker, by id."""
        counts = self._view.counts()
        active = {each.broker: counts.get(each.broker, 0) for each in self._view.active}
        return active, self._loads.by_broker(self._config.assignment_strategy, active)

    def _broker(self, broker: int, load: float, topics: int, spread: Spread) -> BrokerLoad:
        totals = self._loads.totals(broker)
        return BrokerLoad(
            broker,
            load,
            topics,
            is_overloaded=spread.is_over(load),
            is_underloaded=spread.is_under(load),
            cpu_percent=totals.cpu_percent if totals is not None else 0.0,
            memory_percent=totals.memory_percent if totals is not None else 0.0,
            megabytes_per_second=totals.megabytes_per_second if totals is not None else 0.0,
        )

    @property
    def _threshold(self) -> float:
        return THRESHOLDS[self._config.rebalancing.aggressiveness]

    # -- one round ---------------------------------------------------------------------------

    async def run_automatic(self) -> None:
        """If it is time, and something is to be gained."""
        config = self._config.rebalancing
        is_too_early = self._clock() - self._last_round < config.cooldown_seconds
        if not config.enabled or is_too_early or self._is_running:
            return
        done = await self.run(dry_run=False, max_moves=0)
        if done.moves:
            log.info(
                "rebalancing: round done moves=%d failed=%d error=%s imbalance=%.2f before=%.2f",
                len(done.moves),
                sum(1 for move in done.moves if move.error),
                done.moves[-1].error or "-",
                done.after.coefficient_of_variation,
                done.before.coefficient_of_variation,
            )

    async def run(self, *, dry_run: bool, max_moves: int) -> Rebalanced:
        """``max_moves`` 0: as many as the configuration allows in this hour. A move that fails ends the
        round: what stands in its way may stand in the next one's. Raises RebalanceRunning."""
        if self._is_running:
            raise RebalanceRunning
        before = self.balance()
        planned = self._plan(max_moves or self._allowance())
        if dry_run:
            return Rebalanced(tuple(planned), before, before)
        self._is_running = True
        try:
            done: list[PlannedMove] = []
            for move in planned:
                done.append(await self._do(move))
                if done[-1].error:
                    break
        finally:
            self._is_running = False
        return Rebalanced(tuple(done), before, self.balance())

    async def _do(self, move: PlannedMove) -> PlannedMove:
        began = self._clock()
        try:
            error = (await self._move(move.topic, move.to_broker)).error
        except MovePostponed as postponed:
            return replace(move, error=str(postponed))
        except SavaError as failure:
            error = str(failure)
        self._moved_at.append(began)
        self._last_round = self._clock()
        return replace(move, error=error)

    def _plan(self, limit: int) -> list[PlannedMove]:
        _, loads = self._measure()
        if limit <= 0 or len(loads) < max(self._config.rebalancing.min_brokers, 2):
            return []
        movable = {broker: self._movable(broker, loads[broker]) for broker in loads}
        stores = {each.broker: each.store_id for each in self._view.active}
        return plan_moves(
            loads,
            movable,
            threshold=self._threshold,
            limit=limit,
            fits=lambda topic, broker: not topic.store_id or stores[broker] == topic.store_id,
        )

    def _movable(self, broker: int, load: float) -> list[Movable]:
        """A broker that is giving a topic away already gives none."""
        owned = self._view.owned_by(broker)
        if any(entry.record.state is OwnershipState.MOVING for entry in owned):
            return []
        if self._config.assignment_strategy in ("fair", "round_robin"):
            work = dict.fromkeys((str(entry.name) for entry in owned), 1.0)
        else:
            reported = self._loads.work_of(broker)
            work = {str(entry.name): reported.get(str(entry.name), UNKNOWN_WORK) for entry in owned}
        total = sum(work.values())
        now_ms = time.time_ns() // 1_000_000
        return [
            Movable(entry.name, load * work[str(entry.name)] / total, store_of(entry, self._view.brokers))
            for entry in owned
            if self._may_move(entry, now_ms)
        ]

    def _may_move(self, entry: TopicEntry, now_ms: int) -> bool:
        config, record = self._config.rebalancing, entry.record
        return (
            record.state is OwnershipState.ASSIGNED
            and record.incarnation != 0
            and now_ms - record.since_ms >= config.min_topic_age_seconds * 1000
            and not is_excluded(entry.name, config.exclude_topics)
            and not self._view.is_deleting(entry.name)
        )

    # -- limits ------------------------------------------------------------------------------

    def _moves_last_hour(self) -> int:
        while self._moved_at and self._clock() - self._moved_at[0] > HOUR_S:
            self._moved_at.popleft()
        return len(self._moved_at)

    def _allowance(self) -> int:
        return max(0, self._config.rebalancing.max_moves_per_hour - self._moves_last_hour())
