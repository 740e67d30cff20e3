"""LastHour: what a broker and its topics did in the last hour, for plots without Prometheus.

Every five seconds the messages published, delivered and not acked are read from the topics that are served
here, and kept as rates in rings of ``KEPT`` samples. The times are multiples of five seconds on every broker,
so that the samples of several brokers can be added. Topics without traffic and backlog take no room, and of
the others ``MAX_TOPICS`` are kept; the one that has been quiet for longest goes first.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from sava.proto import brokers_pb2 as pb
from sava.storage.keys import is_replication_slot
from sava.supervisor import Supervisor
from sava.tasks import Slices, cancelled
from sava.topics.names import TopicName
from sava.topics.non_reliable import NonReliableSubscription
from sava.topics.served import ServedTopics
from sava.topics.topic import Topic

EVERY_S: Final = 5
KEPT: Final = 720
MAX_TOPICS: Final = 1_000


class Activity(NamedTuple):
    """Of a topic, or of all: two counters and a gauge."""

    published: float = 0.0
    delivered: float = 0.0
    backlog: float = 0.0

    def plus(self, other: Activity) -> Activity:
        return Activity(*map(sum, zip(self, other, strict=True)))


class Sample(NamedTuple):
    time: int
    messages_in: float
    messages_out: float
    backlog: float


class Ring:
    """The last samples of one thing; a time without one is zero."""

    def __init__(self) -> None:
        self._columns = [array("f", bytes(4 * KEPT)) for _ in range(3)]
        self.first = 0
        self.last = 0

    def put(self, sample: Sample) -> None:
        self.first = self.first or sample.time
        if self.last:
            for missed in range(max(self.last, sample.time - KEPT * EVERY_S) + EVERY_S, sample.time, EVERY_S):
                self._write(Sample(missed, 0.0, 0.0, 0.0))
        self._write(sample)
        self.last = sample.time

    def _write(self, sample: Sample) -> None:
        at = sample.time // EVERY_S % KEPT
        for column, value in zip(self._columns, sample[1:], strict=True):
            column[at] = value

    def samples(self) -> Iterator[Sample]:
        if not self.last:
            return
        for moment in range(max(self.first, self.last - (KEPT - 1) * EVERY_S), self.last + 1, EVERY_S):
            at = moment // EVERY_S % KEPT
            yield Sample(moment, *(column[at] for column in self._columns))


def together(parts: Iterable[Iterable[Sample]]) -> list[Sample]:
    """Samples of several, added by their times."""
    sums: dict[int, Sample] = {}
    for part in parts:
        for each in part:
            known = sums.get(each.time)
            if known is None:
                sums[each.time] = each
            else:
                values = (one + other for one, other in zip(known[1:], each[1:], strict=True))
                sums[each.time] = Sample(each.time, *values)
    return [sums[moment] for moment in sorted(sums)]


class LastHour:
    """Owned by the event loop."""

    def __init__(self, topics: ServedTopics) -> None:
        self._topics = topics
        self._own = Ring()
        self._rings: OrderedDict[TopicName, Ring] = OrderedDict()
        self._before: dict[TopicName, Activity] = {}
        self._sampled_at = time.monotonic()
        self._sampling: asyncio.Task[None] | None = None

    def start(self, supervisor: Supervisor) -> None:
        self._sampling = supervisor.repeated(self._run, name="history")

    async def close(self) -> None:
        await cancelled(self._sampling)

    def of_broker(self) -> list[Sample]:
        return list(self._own.samples())

    def of_topic(self, name: TopicName) -> list[Sample]:
        ring = self._rings.get(name)
        return [] if ring is None else list(ring.samples())

    async def _run(self) -> None:
        sampled = 0
        while True:
            moment = int(time.time() // EVERY_S + 1) * EVERY_S
            if moment == sampled:  # the last sleep ended a little early
                moment += EVERY_S
            await asyncio.sleep(max(0.0, moment - time.time()))
            began, self._sampled_at = self._sampled_at, time.monotonic()
            sampled = moment
            await self.sample(moment, self._sampled_at - began)

    async def sample(self, moment: int, seconds: float) -> None:
        """``seconds``: since the last sample."""
        slices = Slices()
        before, self._before = self._before, {}
        total = Activity()
        for name, topic in list(self._topics.loaded.items()):
            now = _totals(topic)
            self._before[name] = now
            was = before.get(name)
            if was is not None:
                rates = Activity(
                    max(now.published - was.published, 0) / seconds,
                    max(now.delivered - was.delivered, 0) / seconds,
                    now.backlog,
                )
                total = total.plus(rates)
                self._keep(name, Sample(moment, *rates))
            await slices.next()
        self._own.put(Sample(moment, *total))
        self._forget(moment)

    def _keep(self, name: TopicName, sample: Sample) -> None:
        is_busy = any(sample[1:])
        ring = self._rings.get(name)
        if ring is None:
            if not is_busy:
                return
            while len(self._rings) >= MAX_TOPICS:
                self._rings.popitem(last=False)
            ring = self._rings[name] = Ring()
        ring.put(sample)
        if is_busy:
            self._rings.move_to_end(name)

    def _forget(self, moment: int) -> None:
        """Topics that have left for an hour."""
        for name, ring in list(self._rings.items()):
            if ring.last < moment - KEPT * EVERY_S:
                del self._rings[name]


def _totals(topic: Topic) -> Activity:
    delivered = backlog = 0
    for subscription in topic.subscriptions.values():
        if isinstance(subscription, NonReliableSubscription):
            delivered += subscription.delivered
        elif not is_replication_slot(subscription.name):
            delivered += subscription.counters.delivered
            backlog += subscription.backlog
    return Activity(topic.next_offset, delivered, backlog)


def as_message(samples: Sequence[Sample]) -> pb.History:
    return pb.History(
        times=[each.time for each in samples],
        messages_in=[each.messages_in for each in samples],
        messages_out=[each.messages_out for each in samples],
        backlog=[each.backlog for each in samples],
    )


def of_message(history: pb.History) -> list[Sample]:
    return list(map(Sample, history.times, history.messages_in, history.messages_out, history.backlog))
