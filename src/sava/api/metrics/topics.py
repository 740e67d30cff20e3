"""What a broker tells Prometheus about its topics and subscriptions, read from them when scraped; of many of
them in parts, so that the event loop serves others in between.

**A topic with many subscriptions** (more than ``MANY``) is reported in sums, as one subscription of the name
``ALL``: ten thousand subscriptions with fourteen figures each would be a page of twenty megabytes at every
scrape, and more series than a Prometheus server takes of one target. Sums by topic are right in either form.
What a removed subscription had counted stays in the sum: a counter that falls looks like a restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sava.api.metrics import Family, counter, counters, gauge, gauges
from sava.storage.broker_storage import BrokerStorage
from sava.storage.keys import is_replication_slot
from sava.topics.dispatch.core import Counters
from sava.topics.names import TopicName
from sava.topics.non_reliable import NonReliableSubscription
from sava.topics.served import ServedTopics
from sava.topics.topic import AnySubscription, Topic

_SUBSCRIPTION: tuple[str, ...] = ("topic", "subscription")
_PART = 50
"""Topics at a time: about what a slice of the page takes."""
_CHUNK = 100
"""Subscriptions at a time, likewise."""
MANY: Final = 1000
"""Reliable subscriptions of one topic beyond which they are reported in sums."""
ALL: Final = "*"
"""No subscription has this name."""


Part = list[tuple[TopicName, Topic]]


class TopicsCollector(Collector):
    def __init__(self, topics: ServedTopics, storage: BrokerStorage) -> None:
        self._topics = topics
        self._storage = storage

    def collect(self) -> Iterable[Metric]:
        yield from self._of_storage()
        for part in self._parts():
            yield from _of_topics(part)
            yield from _of_subscriptions(part)

    def _parts(self) -> Iterator[Part]:
        """At least one: the help of each figure is there also without topics."""
        loaded = self._topics.loaded
        names = list(loaded)
        for first in range(0, max(1, len(names)), _PART):
            # What has gone since the page was begun is reported by the broker that has it now.
            yield [(name, loaded[name]) for name in names[first : first + _PART] if name in loaded]

    def _of_storage(self) -> Iterable[Metric]:
        storage, topics = self._storage, self._topics
        uploader = storage.uploader
        yield gauge(
            "sava_journal_held_bytes",
            "Bytes in the journal that are not in segments.",
            storage.journal.held_bytes,
        )
        yield gauge("sava_cache_bytes", "Bytes of recent batches.", storage.cache.held_bytes)
        yield gauge("sava_topics_served", "Topics that this broker serves.", len(topics.loaded))
        yield counter("sava_segment_uploads", "Segments written.", uploader.segments)
        yield counter(
            "sava_segment_failures",
            "Failed attempts to write a segment.",
            uploader.failures,
        )
        yield gauge(
            "sava_segment_failing_topics",
            "Topics whose last segment could not be written.",
            uploader.failing,
        )
        yield counter(
            "sava_segment_merged", "Small segments that went into larger ones.", topics.merged_segments
        )
        yield counters(
            "sava_maintenance_skipped",
            "Topics that maintenance skipped after an unexpected error, and unreadable notes of deleted "
            "topics; the log names them.",
            "kind",
            sorted(topics.skipped_maintenance.items()),
        )


def _of_topics(topics: Part) -> Iterable[Metric]:
    named = [(str(name), topic) for name, topic in topics]
    yield counters(
        "sava_topic_messages",
        "Messages published (non-reliable: since the topic was opened here).",
        "topic",
        [(name, topic.next_offset) for name, topic in named],
    )
    yield gauges(
        "sava_topic_unstored_messages",
        "Messages that are not in segments yet.",
        "topic",
        [
            (name, topic.log.next_offset - topic.log.stored_offset)
            for name, topic in named
            if topic.log is not None
        ],
    )
    yield gauges(
        "sava_topic_producers",
        "Open producers.",
        "topic",
        [(name, sum(1 for _ in topic.producers)) for name, topic in named],
    )
    yield counters(
        "sava_topic_copied_messages",
        "Messages from other clusters, by outcome.",
        ("topic", "outcome"),
        [
            ((name, outcome), count)
            for name, topic in named
            for outcome in ("appended", "duplicates", "loops")
            if (count := getattr(topic.copies, outcome))
        ],
    )
    yield counters(
        "sava_topic_position_mismatches",
        "Ranges that did not begin at the source position.",
        "topic",
        [(name, topic.copies.refused) for name, topic in named if topic.copies.refused],
    )


Figures = Mapping[str, float]
"""By the name of the family."""


def subscription_figures(
    topics: Part,
    figures: Callable[[AnySubscription], Figures],
    counted: Callable[[Counters], Figures],
) -> Iterator[list[tuple[tuple[str, str], Figures]]]:
    """Of the subscriptions of users, by topic and subscription: in parts, some of them empty, between which
    others may run. ``counted``: the figures that only grow."""
    part: list[tuple[tuple[str, str], Figures]] = []
    looked_at = 0
    for name, topic in topics:
        # A replication link's cursor is none: replication tells what links have not copied.
        found = [each for each in topic.subscriptions.values() if not is_replication_slot(each.name)]
        is_summed = topic.log is not None and len(found) > MANY
        sums: Counter[str] = Counter(counted(topic.retired)) if is_summed else Counter()
        for subscription in found:
            if is_summed:
                sums.update(figures(subscription))
            else:
                part.append(((str(name), subscription.name), figures(subscription)))
            looked_at += 1
            if not looked_at % _CHUNK:
                yield part
                part = []
        if is_summed:
            part.append(((str(name), ALL), sums))
    yield part


def _of_subscriptions(topics: Part) -> Iterable[Metric]:
    for part in subscription_figures(topics, _figures, _counted):
        families: dict[str, Family] = {
            name: gauges(f"sava_subscription_{name}", text, _SUBSCRIPTION) for name, text in _GAUGES.items()
        }
        families |= {
            name: counters(f"sava_subscription_{name}_messages", text, _SUBSCRIPTION)
            for name, text in _COUNTERS.items()
        }
        for labels, figures in part:
            for name, value in figures.items():
                families[name].add_metric(labels, value)
        yield from families.values()


_GAUGES: Final = {
    "backlog_messages": "Messages that are not acked.",
    "unacked_messages": "Delivered and not acked.",
    "consumers": "Connected consumers.",
    "blocked": "1 while a message that failed too often waits for an operator.",
    "failing": "1 while nothing can be read or dead-lettered.",
}

_COUNTERS: Final = {
    "delivered": "Messages sent to consumers.",
    "redelivered": "Messages sent to consumers again.",
    "acked": "Messages acked.",
    "nacked": "Messages given back.",
    "timed_out": "Messages not acked in time.",
    "dropped": (
        "Messages dropped by the dead-letter policy, or (non-reliable) because no consumer had room."
    ),
    "dead_lettered": "Messages moved to the dead-letter topic.",
    "skipped_by_filter": "Messages whose key no consumer accepted.",
    "skipped_by_retention": "Messages removed before they were acked.",
}


def _figures(subscription: AnySubscription) -> Figures:
    if isinstance(subscription, NonReliableSubscription):  # nothing waits there, and nothing is acked
        return {
            "consumers": len(subscription.consumers),
            "delivered": subscription.delivered,
            "dropped": subscription.dropped,
        }
    return {
        "backlog_messages": subscription.backlog,
        "unacked_messages": subscription.unacked,
        "consumers": len(subscription.consumers),
        "blocked": subscription.is_blocked,
        "failing": bool(subscription.error),
        **_counted(subscription.counters),
    }


def _counted(counters: Counters) -> Figures:
    return {name: getattr(counters, name) for name in _COUNTERS}
