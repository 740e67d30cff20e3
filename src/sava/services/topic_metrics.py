"""What a broker tells Prometheus about its topics and subscriptions, read from them when scraped."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sava.broker.subscription import Subscription
from sava.broker.topics import Topics
from sava.storage.broker_storage import BrokerStorage
from sava.storage.link_cursors import is_link_cursor

_TOPIC: tuple[str, ...] = ("topic",)
_SUBSCRIPTION: tuple[str, ...] = ("topic", "subscription")


class TopicsCollector(Collector):
    def __init__(self, topics: Topics, storage: BrokerStorage) -> None:
        self._topics = topics
        self._storage = storage

    def collect(self) -> Iterable[Metric]:
        yield from self._journal()
        yield from self._of_topics()
        yield from self._of_subscriptions()

    def _journal(self) -> Iterable[Metric]:
        journal = self._storage.journal
        yield GaugeMetricFamily(
            "sava_journal_held_bytes", "Bytes in the journal that are not in segments.", journal.held_bytes
        )
        yield GaugeMetricFamily(
            "sava_cache_bytes", "Bytes of recent batches.", self._storage.cache.held_bytes
        )
        yield GaugeMetricFamily(
            "sava_topics_served", "Topics that this broker serves.", len(self._topics.loaded)
        )

    def _of_topics(self) -> Iterable[Metric]:
        ends = CounterMetricFamily("sava_topic_messages", "Messages published, by offset.", labels=_TOPIC)
        stored = GaugeMetricFamily(
            "sava_topic_unstored_messages", "Messages that are not in segments yet.", labels=_TOPIC
        )
        producers = GaugeMetricFamily("sava_topic_producers", "Open producers.", labels=_TOPIC)
        copied = CounterMetricFamily(
            "sava_topic_copied_messages",
            "Messages that came from other clusters, by what became of them.",
            labels=(*_TOPIC, "outcome"),
        )
        refused = CounterMetricFamily(
            "sava_topic_chain_refusals",
            "Stretches of other clusters' topics that did not go on where the copy is.",
            labels=_TOPIC,
        )
        for name, topic in self._topics.loaded.items():
            labels = (str(name),)
            producers.add_metric(labels, sum(1 for _ in topic.producers))
            copies = topic.copies
            if copies.refused:
                refused.add_metric(labels, copies.refused)
            for outcome in ("appended", "duplicates", "loops"):
                if count := getattr(copies, outcome):
                    copied.add_metric((*labels, outcome), count)
            if topic.log is not None:
                ends.add_metric(labels, topic.log.next_offset)
                stored.add_metric(labels, topic.log.next_offset - topic.log.stored_offset)
        yield from (ends, stored, producers, copied, refused)

    def _of_subscriptions(self) -> Iterable[Metric]:
        gauges = {
            "backlog": GaugeMetricFamily(
                "sava_subscription_backlog_messages", "Messages that are not acked.", labels=_SUBSCRIPTION
            ),
            "unacked": GaugeMetricFamily(
                "sava_subscription_unacked_messages", "Delivered and not acked.", labels=_SUBSCRIPTION
            ),
            "consumers": GaugeMetricFamily(
                "sava_subscription_consumers", "Connected consumers.", labels=_SUBSCRIPTION
            ),
            "blocked": GaugeMetricFamily(
                "sava_subscription_blocked",
                "1 while a message that failed too often waits for somebody to act.",
                labels=_SUBSCRIPTION,
            ),
        }
        counters = {
            name: CounterMetricFamily(f"sava_subscription_{name}_messages", text, labels=_SUBSCRIPTION)
            for name, text in _COUNTERS.items()
        }
        for name, topic in self._topics.loaded.items():
            for subscription in topic.subscriptions.values():
                # What links have not copied is among the figures of replication.
                if isinstance(subscription, Subscription) and not is_link_cursor(subscription.name):
                    _add(gauges, counters, (str(name), subscription.name), subscription)
        yield from gauges.values()
        yield from counters.values()


_COUNTERS = {
    "delivered": "Messages sent to consumers.",
    "redelivered": "Of these, messages that had been sent before.",
    "acked": "Messages acked.",
    "nacked": "Messages given back.",
    "timed_out": "Messages not acked in time.",
    "dropped": "Messages dropped by the poison policy.",
    "dead_lettered": "Messages moved to the dead-letter topic.",
}


def _add(
    gauges: dict[str, GaugeMetricFamily],
    counters: dict[str, CounterMetricFamily],
    labels: tuple[str, str],
    subscription: Subscription,
) -> None:
    stats = subscription.stats
    gauges["backlog"].add_metric(labels, subscription.backlog)
    gauges["unacked"].add_metric(labels, stats.unacked)
    gauges["consumers"].add_metric(labels, len(subscription.consumers))
    gauges["blocked"].add_metric(labels, float(stats.blocked))
    for name, family in counters.items():
        family.add_metric(labels, getattr(stats, name))
