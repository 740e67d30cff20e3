"""What the leader tells Prometheus of replication, per topic and remote. Other brokers say nothing: what they
knew when they led is not so any more, and sums over brokers count each topic once.

A figure that is not known is left out. It is never 0 because nobody copies: see ``sava.replication.status``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sava.cluster.errors import NotController
from sava.replication.control import Control
from sava.replication.status import TopicStatus
from sava.topics.specs import RecordCorrupt

log = logging.getLogger(__name__)

LABELS: Final = ("cluster", "namespace", "topic", "remote_cluster")
_DISCONNECTED: Final = (
    "Partitions of the topic that are not copied: nobody does, or something keeps it from going on."
)
_COUNTERS: Final = (
    ("messages", "Messages copied."),
    ("duplicates", "Messages that had come to the remote another way before, and were left out."),
    ("skipped", "Messages that were not to be copied: they exclude the remote, or have been there."),
    ("disconnects", "How often the remote was lost."),
    ("restarts", "How often copying was begun anew because it did not get on."),
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
        connected = _gauge("sava_replication_connected_count", "Partitions of the topic that are copied.")
        lost = [
            _gauge("sava_replication_disconnected_count", _DISCONNECTED),
            _gauge(
                "pulsar_replication_disconnected_count", _DISCONNECTED + " The name that PIP-370 gives it."
            ),
        ]
        states = GaugeMetricFamily(
            "sava_replication_partitions", "Partitions of the topic by state.", labels=(*LABELS, "state")
        )
        unsynced = _gauge(
            "sava_replication_unsynced_subscriptions",
            "Replicated subscriptions, of each partition, whose positions cannot be copied at present.",
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
        messages = _gauge("sava_replication_backlog", "Messages that are not copied yet.")
        seconds = _gauge(
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
        rate = _gauge("sava_replication_rate_out", "Messages a second that are copied.")
        throughput = _gauge("sava_replication_throughput_out", "Bytes a second that are copied.")
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


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, labels=LABELS)
