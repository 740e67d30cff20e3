"""What a broker tells Prometheus about its topics and subscriptions, read from them when scraped; of many of
them in parts, so that whoever writes the page can do something else in between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sava.broker.names import TopicName
from sava.broker.non_reliable import NonReliableSubscription
from sava.broker.subscription import Subscription
from sava.broker.topic import Topic
from sava.broker.topics import Topics
from sava.storage.broker_storage import BrokerStorage
from sava.storage.link_cursors import is_link_cursor

_TOPIC: tuple[str, ...] = ("topic",)
_SUBSCRIPTION: tuple[str, ...] = ("topic", "subscription")
_PART = 50
"""Topics at a time: about what a slice of ``metrics_page`` bears, with some subscriptions each."""


Part = list[tuple[TopicName, Topic]]


class TopicsCollector(Collector):
    def __init__(self, topics: Topics, storage: BrokerStorage) -> None:
        self._topics = topics
        self._storage = storage

    def collect(self) -> Iterable[Metric]:
        yield from self._journal()
        yield from self._segments()
        for part in self._parts():
            yield from _of_topics(part)
            yield from _of_subscriptions(part)

    def _parts(self) -> Iterator[Part]:
        """At least one: what each figure means is told also where there are no topics."""
        loaded = self._topics.loaded
        names = list(loaded)
        for first in range(0, max(1, len(names)), _PART):
            # What has gone since the page was begun is told by who has it now.
            yield [(name, loaded[name]) for name in names[first : first + _PART] if name in loaded]

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

    def _segments(self) -> Iterable[Metric]:
        uploader = self._storage.uploader
        yield CounterMetricFamily("sava_segment_uploads", "Segments written.", value=uploader.segments)
        yield CounterMetricFamily(
            "sava_segment_failures",
            "Attempts to write a segment that came to nothing.",
            value=uploader.failures,
        )
        yield GaugeMetricFamily(
            "sava_segment_failing_topics",
            "Topics whose last attempt to write a segment came to nothing.",
            uploader.failing,
        )
        yield CounterMetricFamily(
            "sava_segment_merged",
            "Small segments that went into larger ones.",
            value=self._topics.merged_segments,
        )
        skipped = CounterMetricFamily(
            "sava_maintenance_skipped",
            "Topics that maintenance left out after an unexpected error, and notes of deleted topics that it "
            "cannot read; the log names them.",
            labels=("kind",),
        )
        for kind, count in sorted(self._topics.skipped_maintenance.items()):
            skipped.add_metric((kind,), count)
        yield skipped


def _of_topics(topics: Part) -> Iterable[Metric]:
    ends = CounterMetricFamily(
        "sava_topic_messages",
        "Messages published: of a reliable topic all, by offset; of another those since it was opened here.",
        labels=_TOPIC,
    )
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
    for name, topic in topics:
        labels = (str(name),)
        producers.add_metric(labels, sum(1 for _ in topic.producers))
        copies = topic.copies
        if copies.refused:
            refused.add_metric(labels, copies.refused)
        for outcome in ("appended", "duplicates", "loops"):
            if count := getattr(copies, outcome):
                copied.add_metric((*labels, outcome), count)
        ends.add_metric(labels, topic.next_offset)
        if topic.log is not None:
            stored.add_metric(labels, topic.log.next_offset - topic.log.stored_offset)
    yield from (ends, stored, producers, copied, refused)


def _of_subscriptions(topics: Part) -> Iterable[Metric]:
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
        "failing": GaugeMetricFamily(
            "sava_subscription_failing",
            "1 while nothing can be read, or handed on to the dead-letter topic.",
            labels=_SUBSCRIPTION,
        ),
    }
    counters = {
        name: CounterMetricFamily(f"sava_subscription_{name}_messages", text, labels=_SUBSCRIPTION)
        for name, text in _COUNTERS.items()
    }
    for name, topic in topics:
        for subscription in topic.subscriptions.values():
            labels = (str(name), subscription.name)
            if isinstance(subscription, NonReliableSubscription):
                _add_transient(gauges, counters, labels, subscription)
            elif not is_link_cursor(subscription.name):  # replication tells what links have not copied
                _add(gauges, counters, labels, subscription)
    yield from gauges.values()
    yield from counters.values()


_COUNTERS = {
    "delivered": "Messages sent to consumers.",
    "redelivered": "Messages sent to consumers that had been sent before.",
    "acked": "Messages acked.",
    "nacked": "Messages given back.",
    "timed_out": "Messages not acked in time.",
    "dropped": (
        "Messages dropped by the poison policy; of a non-reliable topic, those that no consumer had room for."
    ),
    "dead_lettered": "Messages moved to the dead-letter topic.",
    "skipped_by_filter": "Messages whose key no consumer accepted.",
    "skipped_by_retention": "Messages removed before they were acked.",
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
    gauges["failing"].add_metric(labels, float(bool(stats.error)))
    for name, family in counters.items():
        family.add_metric(labels, getattr(stats, name))


def _add_transient(
    gauges: dict[str, GaugeMetricFamily],
    counters: dict[str, CounterMetricFamily],
    labels: tuple[str, str],
    subscription: NonReliableSubscription,
) -> None:
    """Nothing waits there, and nothing is acked."""
    gauges["consumers"].add_metric(labels, len(subscription.consumers))
    counters["delivered"].add_metric(labels, subscription.delivered)
    counters["dropped"].add_metric(labels, subscription.dropped)
