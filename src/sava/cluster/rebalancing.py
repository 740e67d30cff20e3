"""Rebalancing: which topics should go elsewhere. No clock, no store: loads in, moves out.

How unequal brokers are is the coefficient of variation of their loads: standard deviation over mean. Above a
threshold, topics go from those that have clearly more than the mean to the one that has the least; the
lightest first, for those are moved fastest and disturb the fewest.

**It comes to an end.** Taking a topic of load w from a broker with load a to one with load b leaves the mean
as it is and changes the variance by 2w(w - (a - b)) over the number of brokers. So a move makes things more
equal exactly if w is less than the difference, and no other is ever proposed: moving a topic to and fro would
need the loads to become more equal both ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from sava.topics.names import TopicName

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
    """The most loaded first. If none stands out, but the ends are far apart, whoever is above the mean."""
    spread = Spread.of(list(loads.values()))
    over = [broker for broker, load in loads.items() if spread.is_over(load)]
    if not over and spread.largest - spread.smallest > max(SPAN * spread.mean, LEAST_MARGIN):
        over = [broker for broker, load in loads.items() if load > spread.mean]
    return sorted(over, key=lambda broker: (-loads[broker], broker))


def is_excluded(name: TopicName, excluded: Sequence[str]) -> bool:
    """By its name, its partitioned topic's, or its namespace's (``/namespace/*``)."""
    return any(each in excluded for each in (str(name), str(name.head), f"/{name.namespace}/*"))
