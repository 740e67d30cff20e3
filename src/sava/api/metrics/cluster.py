"""Metrics of the cluster: whether this broker is registered, which topics it has, what it passes on, and,
while it leads, what the controller does; replication per topic and remote; pipelines.

The downtime of a move is measured by the broker that the topic came to, from when its view said *moving*
until it said that the topic was taken up. So each move is counted once in the whole cluster, whichever broker
leads.

Only the leader has the metrics of replication and of pipelines: what other brokers knew when they led is not
so any more, and sums over brokers count each topic and each pipeline once. A figure that is not known is left
out. It is never 0 because no runner copies (see ``sava.replication.status``), and what a runner does not
report any more does not stay as it was: without a runner the rate of a pipeline is 0 and its lag is left out.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sava.api.metrics import counter, counters, gauge, gauges
from sava.cluster.controller import Controller
from sava.cluster.pipelines import Pipelines, PipelineState
from sava.cluster.records import Mode, NotController
from sava.cluster.registration import Evictor, Registrar
from sava.cluster.view import ClusterView
from sava.cluster.writer_maintenance import WriterMaintenance
from sava.cluster.writers import Writers
from sava.errors import SavaError
from sava.metadata.records import RecordCorrupt
from sava.metadata.suspicion import Suspicion
from sava.replication.control import Control
from sava.replication.records import PartitionReport
from sava.replication.status import TopicStatus
from sava.topics.names import TopicName
from sava.topics.specs import OwnershipState

_DOWNTIMES = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSources:
    """What is read when scraped."""

    broker: int
    view: ClusterView
    registrar: Registrar
    controller: Controller
    forwards: Mapping[str, int]
    """Calls that another broker answered, by kind: the port, or ``leader``."""
    refusals: Mapping[str, int]
    """Calls that this broker ended with an error, by its code."""
    writers: Writers
    writer_maintenance: WriterMaintenance
    suspicion: Suspicion
    evictor: Evictor


def observe_cluster(registry: CollectorRegistry, parts: ClusterSources) -> None:
    downtime = Histogram(
        "sava_topic_move_downtime_seconds",
        "From the request to a topic's owner until this broker serves it.",
        buckets=_DOWNTIMES,
        registry=registry,
    )
    registrations = CounterMetric(
        "sava_broker_registrations",
        "Registrations of this broker: one more after each lost lease.",
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
    def __init__(self, parts: ClusterSources) -> None:
        self._parts = parts

    def collect(self) -> Iterable[Metric]:
        yield from self._of_broker()
        yield from self._of_controller()
        yield from self._of_writers()
        yield counters(
            "sava_cluster_suspicions",
            "While this broker led: doubts about a broker, and what came of asking the others, by evidence.",
            ("outcome", "sign"),
            sorted(self._parts.suspicion.counts.items()),
        )
        yield counters(
            "sava_cluster_evictions",
            "Registrations that this broker ended early while it led, by the evidence of the suspicion.",
            "sign",
            sorted(self._parts.evictor.evictions.items()),
        )
        yield counters(
            "sava_forwarded_calls",
            "Calls forwarded to a topic's owner or to the leader.",
            "kind",
            sorted(self._parts.forwards.items()),
        )
        yield counters(
            "sava_refused_calls",
            "Calls and streams that this broker ended with an error, by its code; limit_reached names a "
            "limit, owned_by_another a caller who has taken what is not theirs.",
            "code",
            sorted(self._parts.refusals.items()),
        )

    def _of_broker(self) -> Iterable[Metric]:
        view, broker = self._parts.view, self._parts.broker
        own = view.mode(broker).mode
        states = Counter(entry.record.state for entry in view.owned_by(broker))
        yield gauge(
            "sava_broker_registered", "1 while the others know of it.", self._parts.registrar.is_registered
        )
        yield gauge("sava_cluster_brokers", "Brokers that are registered.", len(view.brokers))
        yield gauges(
            "sava_broker_mode",
            "1 for the mode that this broker is in.",
            "mode",
            ((mode.value, own is mode) for mode in Mode),
        )
        yield gauges(
            "sava_broker_topics",
            "Topics that this broker owns, by state.",
            "state",
            ((state.value, states[state]) for state in OwnershipState),
        )

    def _of_writers(self) -> Iterable[Metric]:
        writers = self._parts.writers
        yield counter(
            "sava_writer_batches_decided",
            "Exactly-once batches decided through this broker.",
            writers.decided,
        )
        yield counter(
            "sava_writer_batches_published",
            "Exactly-once batches that this broker has published, whichever broker decided them.",
            writers.published,
        )
        yield counter(
            "sava_writer_messages",
            "Messages of the exactly-once batches that this broker has published.",
            writers.messages,
        )
        if self._parts.controller.is_leading:  # every broker knows of all; from one alone, they count once
            yield gauge(
                "sava_writer_batches_unpublished",
                "Exactly-once batches that are decided and not published yet.",
                self._parts.writer_maintenance.unpublished,
            )

    def _of_controller(self) -> Iterable[Metric]:
        led = self._parts.controller
        yield counter("sava_controller_moves", "Moves that are over, while this broker led.", led.moves)
        yield counter(
            "sava_controller_move_failures",
            "Moves that came to nothing, while this broker led.",
            led.move_failures,
        )
        yield counter("sava_controller_assignments", "Topics given to a broker.", led.assignments)
        if not led.is_leading:
            return  # what it knew when it led is not so any more
        yield gauge("sava_controller_orphan_topics", "Topics whose owner is gone.", led.orphans)
        yield gauge("sava_controller_unplaced_topics", "Topics that no broker can take.", led.unplaced)
        yield gauge(
            "sava_controller_imbalance", "Standard deviation of loads over their mean.", led.imbalance
        )
        yield gauge("sava_controller_pass_seconds", "Time of the last look at all topics.", led.pass_seconds)


# -- replication -----------------------------------------------------------------------------------


log = logging.getLogger(__name__)

LABELS: Final = ("cluster", "namespace", "topic", "remote_cluster")
_DISCONNECTED: Final = "Partitions of the topic that are not copied."
_COUNTERS: Final = (
    ("messages", "Messages copied."),
    ("duplicates", "Messages left out because the remote had them."),
    ("skipped", "Messages left out because they exclude the remote, or have been there."),
    ("disconnects", "How often the remote was lost."),
    ("restarts", "Restarts of copying that made no progress."),
)


_Statuses = list[tuple[tuple[str, ...], TopicStatus]]
"""With their labels."""


class ReplicationCollector(Collector):
    def __init__(self, control: Control) -> None:
        self._control = control

    def collect(self) -> Iterable[Metric]:
        try:
            found = self._control.status()
        except NotController:
            return
        except RecordCorrupt as error:
            log.error("replication: %s", error)
            return
        statuses = [(self._labels(status), status) for status in found]
        yield from self._connections(statuses)
        yield from self._backlogs(statuses)
        yield from self._work(statuses)

    def _connections(self, statuses: _Statuses) -> Iterable[Metric]:
        lost = [(labels, status.disconnected) for labels, status in statuses]
        yield gauges(
            "sava_replication_connected_count",
            "Partitions of the topic that are copied.",
            LABELS,
            [(labels, status.connected) for labels, status in statuses],
        )
        yield gauges("sava_replication_disconnected_count", _DISCONNECTED, LABELS, lost)
        pip_370 = _DISCONNECTED + " The name that PIP-370 gives it."
        yield gauges("pulsar_replication_disconnected_count", pip_370, LABELS, lost)
        yield gauges(
            "sava_replication_partitions",
            "Partitions of the topic by state.",
            (*LABELS, "state"),
            [
                ((*labels, state), count)
                for labels, status in statuses
                for state, count in sorted(Counter(each.report.state for each in status.partitions).items())
            ],
        )
        yield gauges(
            "sava_replication_unsynced_subscriptions",
            "Subscriptions whose positions cannot be copied at present.",
            LABELS,
            _sums(statuses, lambda report: len(report.unsynced_subscriptions)),
        )

    def _backlogs(self, statuses: _Statuses) -> Iterable[Metric]:
        backlogs = [(labels, [each.backlog for each in status.partitions]) for labels, status in statuses]
        ages = [(labels, [each.backlog_s for each in status.partitions]) for labels, status in statuses]
        yield gauges(
            "sava_replication_backlog",
            "Messages that are not copied yet.",
            LABELS,
            [(labels, sum(each)) for labels, each in backlogs if min(each) >= 0],
        )
        yield gauges(
            "sava_replication_delay_seconds",
            "Age of the oldest message that is not copied yet.",
            LABELS,
            [(labels, max(each)) for labels, each in ages if min(each) >= 0],
        )

    def _work(self, statuses: _Statuses) -> Iterable[Metric]:
        rates = _sums(statuses, lambda report: report.rate)
        yield gauges("sava_replication_rate_out", "Messages a second that are copied.", LABELS, rates)
        rates = _sums(statuses, lambda report: report.bytes_rate)
        yield gauges("sava_replication_throughput_out", "Bytes a second that are copied.", LABELS, rates)
        for name, text in _COUNTERS:
            yield counters(f"sava_replication_{name}", text, LABELS, _sums(statuses, attrgetter(name)))

    def _labels(self, status: TopicStatus) -> tuple[str, ...]:
        name = status.topic.name
        return self._control.remotes.own().cluster_name, name.topic.namespace, str(name.topic), name.remote


def _sums(
    statuses: _Statuses, figure: Callable[[PartitionReport], float]
) -> list[tuple[tuple[str, ...], float]]:
    """Over the partitions of each topic."""
    return [(labels, sum(figure(each.report) for each in status.partitions)) for labels, status in statuses]


# -- pipelines -------------------------------------------------------------------------------------


class PipelinesCollector(Collector):
    def __init__(self, pipelines: Pipelines, is_leading: Callable[[], bool]) -> None:
        self._pipelines = pipelines
        self._is_leading = is_leading

    def collect(self) -> Iterable[Metric]:
        if not self._is_leading():
            return
        try:
            found = self._pipelines.known()
        except SavaError as error:
            log.error("pipelines: no metrics error=%s", error)
            return
        labels = ("pipeline", "kind")
        statuses = [((each.name, each.record.kind), each.status) for each in found]
        yield gauges(
            "sava_pipeline_state",
            "1 for the state that it is in.",
            (*labels, "state"),
            [
                ((*names, state.value), status.state is state)
                for names, status in statuses
                for state in PipelineState
            ],
        )

        def figures(name: str) -> list[tuple[tuple[str, str], float]]:
            return [(names, getattr(status, name)) for names, status in statuses]

        def known(name: str) -> list[tuple[tuple[str, str], float]]:
            return [each for each in figures(name) if each[1] >= 0]

        yield counters("sava_pipeline_rows", "Rows read, by all runners.", labels, figures("rows"))
        yield counters(
            "sava_pipeline_restarts",
            "Times that it was begun again after an error.",
            labels,
            figures("restarts"),
        )
        yield gauges("sava_pipeline_rows_per_second", "Rows a second, lately.", labels, figures("rate"))
        yield gauges(
            "sava_pipeline_lag_messages",
            "Behind its topics; absent if not known.",
            labels,
            known("lag_messages"),
        )
        yield gauges(
            "sava_pipeline_lag_seconds",
            "For how long it has been behind; absent if unknown.",
            labels,
            known("lag_seconds"),
        )
