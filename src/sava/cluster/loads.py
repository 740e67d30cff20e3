"""Loads: what brokers report of themselves, and how much that is in one number.

Brokers tell the leader every now and then what they are busy with. Nothing of it is replicated: a new leader
hears it all again within one interval, and until then goes by the number of topics.

The number depends on the strategy, and only compares brokers of one moment with one another:

* ``fair``: topics.
* ``balanced``: 0.3 work + 0.35 CPU % + 0.35 memory %, where the work is the sum over its topics of 0.2 for
  being there, 0.3 for each MB/s, 0.3 for each producer and consumer, and 0.2 for 10,000 messages of backlog.
* ``weighted_load``: each of CPU, memory, MB/s, connections and topics as a part of the largest in the
  cluster, weighted 25, 25, 25, 15 and 10, which makes 100 for a broker that is first in everything. CPU or
  memory of which a broker has used up 70 % is what runs out first, and gets half of the weight.

A broker without a fresh report counts as what the others' topics weigh on average, times the number of its
own; without any report the load is the number of topics. Topics that came or went since the report are
counted the same way, so that a thousand that are assigned at once do not all go to the broker whose report
was the best.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, Literal, NamedTuple

import msgspec

Strategy = Literal["round_robin", "fair", "balanced", "weighted_load"]

FRESH_INTERVALS: Final = 3
"""A broker whose last report is older has stopped reporting."""
BACKLOG_UNIT: Final = 10_000
SCARCE: Final = 0.7
WEIGHTS: Final = {"cpu": 25.0, "memory": 25.0, "traffic": 25.0, "connections": 15.0, "topics": 10.0}


class TopicLoad(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    messages_per_second: float = 0.0
    megabytes_per_second: float = 0.0
    producers: int = 0
    consumers: int = 0
    backlog: int = 0

    @property
    def work(self) -> float:
        connections = self.producers + self.consumers
        traffic = 0.3 * self.megabytes_per_second
        return 0.2 + traffic + 0.3 * connections + 0.2 * self.backlog / BACKLOG_UNIT


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    broker_id: int
    cpu_percent: float = 0.0
    memory_percent: float = 0.0
    topics: tuple[TopicLoad, ...] = ()


class Totals(NamedTuple):
    """A report, summed up once: it is looked at far more often than it comes."""

    work: float
    cpu_percent: float
    memory_percent: float
    megabytes_per_second: float
    connections: int
    topics: int

    @classmethod
    def of(cls, report: LoadReport) -> Totals:
        return cls(
            work=sum(topic.work for topic in report.topics),
            cpu_percent=report.cpu_percent,
            memory_percent=report.memory_percent,
            megabytes_per_second=sum(topic.megabytes_per_second for topic in report.topics),
            connections=sum(topic.producers + topic.consumers for topic in report.topics),
            topics=len(report.topics),
        )


class _Heard(NamedTuple):
    at: float
    report: LoadReport
    totals: Totals


class Loads:
    """The last report of each broker. Owned by the event loop."""

    def __init__(self, *, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._fresh_s = FRESH_INTERVALS * interval_s
        self._clock = clock
        self._heard: dict[int, _Heard] = {}

    def record(self, report: LoadReport) -> None:
        self._heard = {broker: heard for broker in self._heard if (heard := self._fresh(broker)) is not None}
        self._heard[report.broker_id] = _Heard(self._clock(), report, Totals.of(report))

    def of(self, broker: int) -> LoadReport | None:
        """None: it has not reported lately."""
        heard = self._fresh(broker)
        return heard.report if heard is not None else None

    def totals(self, broker: int) -> Totals | None:
        """None: it has not reported lately."""
        heard = self._fresh(broker)
        return heard.totals if heard is not None else None

    def work_of(self, broker: int) -> Mapping[str, float]:
        """Of each topic that the broker reported lately."""
        report = self.of(broker)
        return {topic.topic: topic.work for topic in report.topics} if report is not None else {}

    def _fresh(self, broker: int) -> _Heard | None:
        heard = self._heard.get(broker)
        return heard if heard is not None and self._clock() - heard.at <= self._fresh_s else None

    def by_broker(self, strategy: Strategy, counts: Mapping[int, int]) -> dict[int, float]:
        """The load of each broker in ``counts``, which says how many topics it has now."""
        fresh = {broker: totals for broker in counts if (totals := self._usable(broker)) is not None}
        if strategy in ("fair", "round_robin") or not fresh:
            return {broker: float(count) for broker, count in counts.items()}
        reported = _balanced(fresh) if strategy == "balanced" else _weighted(fresh)
        each = sum(reported.values()) / max(sum(totals.topics for totals in fresh.values()), 1)
        return {
            broker: max(0.0, reported[broker] + each * (count - fresh[broker].topics))
            if broker in fresh
            else each * count
            for broker, count in counts.items()
        }

    def _usable(self, broker: int) -> Totals | None:
        """A machine that says it uses neither CPU nor memory cannot tell."""
        totals = self.totals(broker)
        return totals if totals is not None and (totals.cpu_percent or totals.memory_percent) else None


def _balanced(reports: Mapping[int, Totals]) -> dict[int, float]:
    return {
        broker: 0.3 * totals.work + 0.35 * totals.cpu_percent + 0.35 * totals.memory_percent
        for broker, totals in reports.items()
    }


def _weighted(reports: Mapping[int, Totals]) -> dict[int, float]:
    metrics = {
        broker: {
            "cpu": totals.cpu_percent / 100,
            "memory": totals.memory_percent / 100,
            "traffic": totals.megabytes_per_second,
            "connections": float(totals.connections),
            "topics": float(totals.topics),
        }
        for broker, totals in reports.items()
    }
    largest = {name: max(each[name] for each in metrics.values()) for name in WEIGHTS}
    weights = _weights(largest)
    return {
        broker: sum(weights[name] * value / largest[name] for name, value in each.items() if largest[name])
        for broker, each in metrics.items()
    }


def _weights(largest: Mapping[str, float]) -> dict[str, float]:
    scarcest = max(("cpu", "memory"), key=lambda name: largest[name])
    if largest[scarcest] <= SCARCE:
        return dict(WEIGHTS)
    rest = sum(weight for name, weight in WEIGHTS.items() if name != scarcest)
    return {name: 50.0 if name == scarcest else 50.0 * weight / rest for name, weight in WEIGHTS.items()}
