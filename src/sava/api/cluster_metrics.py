"""What a broker tells Prometheus about its place in the cluster: whether it is there, which topics it has,
what it passes on to others, and, while it leads, what the controller does.

The downtime of a move is measured by the broker that the topic came to, from when its view said *moving*
until it said that the topic was taken up. So each move is counted once in the whole cluster, whoever leads.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sava.cluster.controller import Controller
from sava.cluster.eviction import Evictor
from sava.cluster.records import Mode
from sava.cluster.registration import Registrar
from sava.cluster.view import ClusterView
from sava.cluster.writer_tending import WriterMaintenance
from sava.cluster.writers import Writers
from sava.metadata.suspicion import Suspicion
from sava.topics.names import TopicName
from sava.topics.specs import OwnershipState

_DOWNTIMES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterParts:
    """What is read when scraped."""

    broker: int
    view: ClusterView
    registrar: Registrar
    controller: Controller
    forwards: Mapping[str, int]
    """Calls that another broker answered, by kind: the port, or ``leader``."""
    writers: Writers
    tending: WriterMaintenance
    suspicion: Suspicion
    evictor: Evictor


def observe_cluster(registry: CollectorRegistry, parts: ClusterParts) -> None:
    downtime = Histogram(
        "sava_topic_move_downtime_seconds",
        "From the request to the owner of a topic until this broker had taken it up.",
        buckets=_DOWNTIMES,
        registry=registry,
    )
    registrations = CounterMetric(
        "sava_broker_registrations",
        "How often this broker came to be there: once, and again whenever it had lost its lease.",
        registry=registry,
    )
    parts.view.listen(MoveTimes(parts.view, parts.broker, downtime.observe).look)
    parts.registrar.listen(registrations.inc)
    registry.register(ClusterCollector(parts))


class MoveTimes:
    """How long topics that came to this broker were on their way. Owned by the event loop."""

    def __init__(self, view: ClusterView, broker: int, observe: Callable[[float], None]) -> None:
        self._view = view
        self._broker = broker
        self._observe = observe
        self._began: dict[TopicName, float] = {}

    def look(self, topics: frozenset[TopicName] | None) -> None:
        """As a listener of the view. A move that the view began with in the middle is not counted."""
        now = time.monotonic()
        for name in list(self._began) if topics is None else topics:
            entry = self._view.entry(name)
            if entry is None:
                self._began.pop(name, None)
            elif entry.record.state is OwnershipState.MOVING:
                self._began.setdefault(name, now)
            elif entry.record.state is OwnershipState.ASSIGNED and entry.record.incarnation:
                began = self._began.pop(name, None)
                came_here = entry.record.owner == self._broker != entry.record.from_broker
                if began is not None and came_here:
                    self._observe(now - began)


class ClusterCollector(Collector):
    def __init__(self, parts: ClusterParts) -> None:
        self._parts = parts

    def collect(self) -> Iterable[Metric]:
        yield from self._of_broker()
        yield from self._of_controller()
        yield from self._of_writers()
        yield from self._of_suspicion()
        forwards = CounterMetricFamily(
            "sava_forwarded_calls",
            "Calls passed on: those of a port to a topic's owner, and those that only the leader answers.",
            labels=("kind",),
        )
        for kind, count in sorted(self._parts.forwards.items()):
            forwards.add_metric((kind,), count)
        yield forwards

    def _of_broker(self) -> Iterable[Metric]:
        view, broker = self._parts.view, self._parts.broker
        yield _gauge(
            "sava_broker_registered", "1 while the others know of it.", self._parts.registrar.is_registered
        )
        yield _gauge("sava_cluster_brokers", "Brokers that are registered.", len(view.brokers))
        mode = GaugeMetricFamily(
            "sava_broker_mode", "1 for the mode that this broker is in.", labels=("mode",)
        )
        for each in Mode:
            mode.add_metric((each.value,), float(view.mode(broker).mode is each))
        yield mode
        states = Counter(entry.record.state for entry in view.owned_by(broker))
        owned = GaugeMetricFamily(
            "sava_broker_topics",
            "Topics that are this broker's, by the state of their ownership.",
            labels=("state",),
        )
        for state in OwnershipState:
            owned.add_metric((state.value,), states[state])
        yield owned

    def _of_suspicion(self) -> Iterable[Metric]:
        suspicions = CounterMetricFamily(
            "sava_cluster_suspicions",
            "While this broker led: doubts about a broker, and what came of asking the others, by evidence.",
            labels=("outcome", "sign"),
        )
        for (outcome, sign), count in sorted(self._parts.suspicion.counts.items()):
            suspicions.add_metric((outcome, sign), count)
        yield suspicions
        evictions = CounterMetricFamily(
            "sava_cluster_evictions",
            "Registrations that this broker ended early while it led, by the evidence of the suspicion.",
            labels=("sign",),
        )
        for sign, count in sorted(self._parts.evictor.evictions.items()):
            evictions.add_metric((sign,), count)
        yield evictions

    def _of_writers(self) -> Iterable[Metric]:
        writers = self._parts.writers
        for name, text, count in (
            (
                "sava_writer_batches_decided",
                "Exactly-once batches decided through this broker.",
                writers.decided,
            ),
            (
                "sava_writer_batches_published",
                "Exactly-once batches that this broker has published, whoever decided them.",
                writers.published,
            ),
            (
                "sava_writer_messages",
                "Messages of the exactly-once batches that this broker has published.",
                writers.messages,
            ),
        ):
            yield CounterMetricFamily(name, text, value=count)
        if self._parts.controller.is_leading:  # every broker knows of all; told by one, they are counted once
            yield _gauge(
                "sava_writer_batches_unpublished",
                "Exactly-once batches that are decided and not published yet.",
                self._parts.tending.unpublished,
            )

    def _of_controller(self) -> Iterable[Metric]:
        controller = self._parts.controller
        for name, text, count in (
            ("sava_controller_moves", "Moves that are over, while this broker led.", controller.moves),
            (
                "sava_controller_move_failures",
                "Moves that came to nothing, while this broker led.",
                controller.move_failures,
            ),
            ("sava_controller_assignments", "Topics given to a broker.", controller.assignments),
        ):
            yield CounterMetricFamily(name, text, value=count)
        if not controller.is_leading:
            return  # what it knew when it led is not so any more
        for name, text, value in (
            ("sava_controller_orphan_topics", "Topics whose owner is gone.", controller.orphans),
            ("sava_controller_unplaced_topics", "Topics that no broker can take.", controller.unplaced),
            (
                "sava_controller_imbalance",
                "Standard deviation of loads over their mean.",
                controller.imbalance,
            ),
            ("sava_controller_pass_seconds", "Of the last look at all topics.", controller.pass_seconds),
        ):
            yield _gauge(name, text, value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))
