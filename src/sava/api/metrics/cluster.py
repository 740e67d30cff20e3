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
from typing import Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client import Counter as CounterMetric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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
    writers: Writers
    tending: WriterMaintenance
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
        yield from self._of_suspicion()
        forwards = CounterMetricFamily(
            "sava_forwarded_calls",
            "Calls forwarded to a topic's owner or to the leader.",
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
            "Topics that this broker owns, by state.",
            labels=("state",),
        )
        for state in OwnershipState:
            owned.add_metric((state.value,), states[state])
        yield owned

    def _of_suspicion(self) -> Iterable[Metric]:
        suspicions = CounterMetricFamily(
            "sava_cluster_suspicions",
            "Doubts of this broker, as leader, about others, by outcome and evidence.",
            labels=("outcome", "sign"),
        )
        for (outcome, sign), count in sorted(self._parts.suspicion.counts.items()):
            suspicions.add_metric((outcome, sign), count)
        yield suspicions
        evictions = CounterMetricFamily(
            "sava_cluster_evictions",
            "Registrations that this broker, as leader, ended early, by the evidence.",
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
                "Exactly-once batches published by this broker.",
                writers.published,
            ),
            (
                "sava_writer_messages",
                "Messages of the batches that this broker published.",
                writers.messages,
            ),
        ):
            yield CounterMetricFamily(name, text, value=count)
        if self._parts.controller.is_leading:  # every broker knows all; one reports them: each counts once
            yield _gauge(
                "sava_writer_batches_unpublished",
                "Exactly-once batches that are decided and not published yet.",
                self._parts.tending.unpublished,
            )

    def _of_controller(self) -> Iterable[Metric]:
        controller = self._parts.controller
        for name, text, count in (
            ("sava_controller_moves", "Finished moves, while this broker led.", controller.moves),
            (
                "sava_controller_move_failures",
                "Failed moves, while this broker led.",
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
            ("sava_controller_pass_seconds", "Time of the last look at all topics.", controller.pass_seconds),
        ):
            yield _gauge(name, text, value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


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


class ReplicationCollector(Collector):
    def __init__(self, control: Control) -> None:
        self._control = control

    def collect(self) -> Iterable[Metric]:
        try:
            statuses = self._control.status()
        except NotController:
            return
        except RecordCorrupt as error:
            log.error("replication: %s", error)
            return
        yield from self._connections(statuses)
        yield from self._backlogs(statuses)
        yield from self._work(statuses)

    def _connections(self, statuses: list[TopicStatus]) -> Iterable[Metric]:
        connected = _replication_gauge(
            "sava_replication_connected_count", "Partitions of the topic that are copied."
        )
        lost = [
            _replication_gauge("sava_replication_disconnected_count", _DISCONNECTED),
            _replication_gauge(
                "pulsar_replication_disconnected_count", _DISCONNECTED + " The name that PIP-370 gives it."
            ),
        ]
        states = GaugeMetricFamily(
            "sava_replication_partitions", "Partitions of the topic by state.", labels=(*LABELS, "state")
        )
        unsynced = _replication_gauge(
            "sava_replication_unsynced_subscriptions",
            "Subscriptions whose positions cannot be copied at present.",
        )
        for status in statuses:
            labels = self._labels(status)
            connected.add_metric(labels, status.connected)
            for family in lost:
                family.add_metric(labels, status.disconnected)
            for state, count in sorted(Counter(each.report.state for each in status.partitions).items()):
                states.add_metric((*labels, state), count)
            unsynced.add_metric(
                labels, sum(len(each.report.unsynced_subscriptions) for each in status.partitions)
            )
        yield connected
        yield from lost
        yield states
        yield unsynced

    def _backlogs(self, statuses: list[TopicStatus]) -> Iterable[Metric]:
        messages = _replication_gauge("sava_replication_backlog", "Messages that are not copied yet.")
        seconds = _replication_gauge(
            "sava_replication_delay_seconds", "Age of the oldest message that is not copied yet."
        )
        for status in statuses:
            backlogs = [each.backlog for each in status.partitions]
            ages = [each.backlog_s for each in status.partitions]
            if min(backlogs) >= 0:
                messages.add_metric(self._labels(status), sum(backlogs))
            if min(ages) >= 0:
                seconds.add_metric(self._labels(status), max(ages))
        yield messages
        yield seconds

    def _work(self, statuses: list[TopicStatus]) -> Iterable[Metric]:
        rate = _replication_gauge("sava_replication_rate_out", "Messages a second that are copied.")
        throughput = _replication_gauge("sava_replication_throughput_out", "Bytes a second that are copied.")
        counters = {
            name: CounterMetricFamily(f"sava_replication_{name}", text, labels=LABELS)
            for name, text in _COUNTERS
        }
        for status in statuses:
            labels, reports = self._labels(status), [each.report for each in status.partitions]
            rate.add_metric(labels, sum(each.rate for each in reports))
            throughput.add_metric(labels, sum(each.bytes_rate for each in reports))
            for name, family in counters.items():
                family.add_metric(labels, sum(getattr(each, name) for each in reports))
        yield rate
        yield throughput
        yield from counters.values()

    def _labels(self, status: TopicStatus) -> tuple[str, str, str, str]:
        name = status.topic.name
        return self._control.remotes.own().cluster_name, name.topic.namespace, str(name.topic), name.remote


def _replication_gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=LABELS)


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
        states = GaugeMetricFamily(
            "sava_pipeline_state", "1 for the state that it is in.", labels=(*labels, "state")
        )
        rows = CounterMetricFamily("sava_pipeline_rows", "Rows read, by all runners.", labels=labels)
        restarts = CounterMetricFamily("sava_pipeline_restarts", "Restarts after an error.", labels=labels)
        rate = GaugeMetricFamily("sava_pipeline_rows_per_second", "Rows a second, lately.", labels=labels)
        lag = GaugeMetricFamily(
            "sava_pipeline_lag_messages", "Messages behind its topics; absent if unknown.", labels=labels
        )
        age = GaugeMetricFamily(
            "sava_pipeline_lag_seconds",
            "For how long it has been behind; absent if unknown.",
            labels=labels,
        )
        for pipeline in found:
            names, status = (pipeline.name, pipeline.record.kind), pipeline.status
            for state in PipelineState:
                states.add_metric((*names, state.value), float(status.state is state))
            rows.add_metric(names, status.rows)
            restarts.add_metric(names, status.restarts)
            rate.add_metric(names, status.rate)
            if status.lag_messages >= 0:
                lag.add_metric(names, status.lag_messages)
            if status.lag_seconds >= 0:
                age.add_metric(names, status.lag_seconds)
        yield from (states, rows, restarts, rate, lag, age)
