"""Danube's names for a broker's figures: what its web UI and its MCP server ask Prometheus for.

Each figure is read from the same place as Sava's own figure of that kind; nothing is counted a second time,
except what only Danube's protocol has: how long ``SendMessage`` took, and which errors it ended with. Every
series has Danube's ``broker`` label, the broker's id.

Danube's exporter writes latencies as a summary, and its UI reads the quantiles, so they are offered as one:
over the last ``WINDOW`` messages of a topic. What Danube counts per topic and Sava does once for all topics
of a broker (flushes of the log) has no series.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sava.api.metrics import Family, counters, gauges
from sava.api.metrics.topics import Figures, subscription_figures
from sava.cluster.controller import Controller
from sava.storage.keys import is_replication_slot
from sava.topics.dispatch.core import Counters
from sava.topics.names import TopicName
from sava.topics.non_reliable import NonReliableSubscription
from sava.topics.served import ServedTopics
from sava.topics.topic import AnySubscription, Topic

WINDOW: Final = 256
QUANTILES: Final = (0.5, 0.95, 0.99)
PART: Final = 50
"""Topics that are read before the page's writer lets others use the event loop."""

_TOPIC: Final = ("broker", "topic")
_SUBSCRIPTION: Final = ("broker", "topic", "subscription")


@dataclass(slots=True)
class _Sent:
    """What ``SendMessage`` did for one topic."""

    failed: Counter[str] = field(default_factory=Counter)
    count: int = 0
    total_ms: float = 0.0
    recent_ms: array[float] = field(default_factory=lambda: array("f"))
    """The last ``WINDOW`` latencies, the oldest overwritten first."""

    def add(self, ms: float) -> None:
        if self.count < WINDOW:
            self.recent_ms.append(ms)
        else:
            self.recent_ms[self.count % WINDOW] = ms
        self.count += 1
        self.total_ms += ms

    def quantiles(self) -> list[tuple[float, float]]:
        ordered = sorted(self.recent_ms)
        return [(each, ordered[min(int(each * len(ordered)), len(ordered) - 1)]) for each in QUANTILES]


class SendStats:
    """What became of messages that came through Danube's protocol. Owned by the event loop; bounded by the
    topics that this broker serves, because ``keep`` forgets all others at each scrape."""

    def __init__(self) -> None:
        self.by_topic: dict[TopicName, _Sent] = {}

    def stored(self, topic: TopicName, seconds: float) -> None:
        self._of(topic).add(seconds * 1000)

    def failed(self, topic: TopicName, code: str) -> None:
        self._of(topic).failed[code] += 1

    def keep(self, served: Iterable[TopicName]) -> None:
        for gone in self.by_topic.keys() - set(served):
            del self.by_topic[gone]

    def _of(self, topic: TopicName) -> _Sent:
        sent = self.by_topic.get(topic)
        if sent is None:
            sent = self.by_topic[topic] = _Sent()
        return sent


class DanubeCollector(Collector):
    def __init__(
        self, topics: ServedTopics, controller: Controller, sends: SendStats, calls: Callable[[], int]
    ) -> None:
        self._topics = topics
        self._controller = controller
        self._sends = sends
        self._calls = calls
        self._broker = str(topics.broker)

    def collect(self) -> Iterable[Metric]:
        yield from self._of_broker()
        loaded = self._topics.loaded
        self._sends.keep(loaded)
        names = list(loaded)
        for first in range(0, max(1, len(names)), PART):
            part = [(name, loaded[name]) for name in names[first : first + PART] if name in loaded]
            yield from self._of_topics(part)
            yield from self._of_subscriptions(part)
            yield self._latencies(part)

    def _of_broker(self) -> Iterable[Metric]:
        controller, broker = self._controller, self._broker

        def here(value: float) -> list[tuple[str, float]]:
            return [(broker, value)]

        yield gauges(
            "danube_broker_topics_owned",
            "Topics that this broker serves.",
            "broker",
            here(len(self._topics.loaded)),
        )
        yield gauges(
            "danube_leader_election_state",
            "1 while this broker leads, 0 while it follows.",
            "broker",
            here(controller.is_leading),
        )
        yield counters("danube_broker_rpc", "Calls that this broker answered.", "broker", here(self._calls()))
        yield counters(
            "danube_broker_assignments",
            "Topics that this broker assigned as the leader.",
            "broker",
            here(controller.assignments),
        )
        yield gauges(
            "danube_cluster_imbalance_cv",
            "Coefficient of variation of the brokers' loads; the leader has it.",
            "broker",
            here(controller.imbalance) if controller.is_leading else (),
        )

    def _of_topics(self, topics: list[tuple[TopicName, Topic]]) -> Iterable[Metric]:
        families = {name: _family(name, text, _TOPIC) for name, text in _OF_TOPIC.items()}
        sends = counters(
            "danube_producer_send",
            "Messages that came through Danube's protocol, by what became of them.",
            (*_TOPIC, "result", "error_code"),
        )
        sizes = Metric("danube_topic_message_size_bytes", "Sizes of published messages.", "summary")
        for name, topic in topics:
            labels = (self._broker, str(name))
            messages, size = topic.published
            subscriptions = _shown(topic)
            values = {
                "danube_topic_messages_in": messages,
                "danube_topic_bytes_in": size,
                "danube_topic_active_producers": sum(1 for _ in topic.producers),
                "danube_topic_active_consumers": sum(len(each.consumers) for each in subscriptions),
                "danube_topic_active_subscriptions": len(subscriptions),
            }
            if topic.log is not None:
                values |= {
                    "danube_wal_append": messages,
                    "danube_wal_append_bytes": size,
                    "danube_cloud_upload_bytes": topic.log.uploaded_bytes,
                }
                families["danube_cloud_upload_objects"].add_metric(
                    (*labels, "ok"), topic.log.uploaded_segments
                )
            for family, value in values.items():
                families[family].add_metric(labels, value)
            named = dict(zip(_TOPIC, labels, strict=True))
            sizes.add_sample("danube_topic_message_size_bytes_sum", named, size)
            sizes.add_sample("danube_topic_message_size_bytes_count", named, messages)
            sent = self._sends.by_topic.get(name)
            if sent is not None:
                sends.add_metric((*labels, "ok", ""), sent.count)
                for code, count in sent.failed.items():
                    sends.add_metric((*labels, "error", code), count)
        return *families.values(), sends, sizes

    def _of_subscriptions(self, topics: list[tuple[TopicName, Topic]]) -> Iterable[Metric]:
        for part in subscription_figures(topics, _figures, _counted):
            families = {name: _family(name, text, _SUBSCRIPTION) for name, text in _OF_SUBSCRIPTION.items()}
            for labels, figures in part:
                for family, value in figures.items():
                    families[family].add_metric((self._broker, *labels), value)
            yield from families.values()

    def _latencies(self, topics: list[tuple[TopicName, Topic]]) -> Metric:
        name = "danube_producer_send_latency_ms"
        family = Metric(name, "How long SendMessage took, in ms, over the last messages.", "summary")
        for topic, _ in topics:
            sent = self._sends.by_topic.get(topic)
            if sent is not None and sent.count:
                labels = {"broker": self._broker, "topic": str(topic)}
                for quantile, ms in sent.quantiles():
                    family.add_sample(name, {**labels, "quantile": str(quantile)}, ms)
                family.add_sample(f"{name}_sum", labels, sent.total_ms)
                family.add_sample(f"{name}_count", labels, sent.count)
        return family


_GAUGES: Final = "active_", "lag_"
_OF_TOPIC: Final = {
    "danube_topic_messages_in": "Messages published since this broker began to serve the topic.",
    "danube_topic_bytes_in": "Bytes of messages published since this broker began to serve the topic.",
    "danube_topic_active_producers": "Open producers.",
    "danube_topic_active_consumers": "Connected consumers of all subscriptions.",
    "danube_topic_active_subscriptions": "Subscriptions.",
    "danube_wal_append": "Messages of a reliable topic that went to the journal.",
    "danube_wal_append_bytes": "Bytes of a reliable topic that went to the journal.",
    "danube_cloud_upload_bytes": "Bytes of segments that this broker wrote to the object store.",
    "danube_cloud_upload_objects": "Segments that this broker wrote to the object store.",
}
_OF_SUBSCRIPTION: Final = {
    "danube_subscription_active_consumers": "Connected consumers.",
    "danube_subscription_lag_messages": "Messages that are not acked.",
    "danube_subscription_nack": "Messages given back by consumers.",
    "danube_subscription_redelivery": "Messages sent to consumers again.",
    "danube_consumer_messages_out": "Messages sent to consumers.",
    "danube_consumer_bytes_out": "Bytes of messages sent to consumers.",
}


def _family(name: str, text: str, labels: tuple[str, ...]) -> Family:
    if name == "danube_cloud_upload_objects":
        labels = (*labels, "result")
    if any(mark in name for mark in _GAUGES):
        return gauges(name, text, labels)
    return counters(name, text, labels)


def _shown(topic: Topic) -> list[AnySubscription]:
    """The subscriptions of users: a replication link's cursor is none."""
    return [each for each in topic.subscriptions.values() if not is_replication_slot(each.name)]


def _figures(subscription: AnySubscription) -> Figures:
    consumers = {"danube_subscription_active_consumers": len(subscription.consumers)}
    if isinstance(subscription, NonReliableSubscription):
        return consumers | {
            "danube_consumer_messages_out": subscription.delivered,
            "danube_consumer_bytes_out": subscription.delivered_bytes,
        }
    lag = {"danube_subscription_lag_messages": subscription.backlog}
    return {**consumers, **lag, **_counted(subscription.counters)}


def _counted(counters: Counters) -> Figures:
    return {
        "danube_subscription_nack": counters.nacked,
        "danube_subscription_redelivery": counters.redelivered,
        "danube_consumer_messages_out": counters.delivered,
        "danube_consumer_bytes_out": counters.delivered_bytes,
    }
