"""ConsumerIds and ConsumerRecords: the ids under which consumers of Danube's protocol come back.

A client of that protocol subscribes once and gets an id. After a broken stream it comes back with nothing but
the id, to a broker that may have been restarted in between, and it does not look at errors. So the id is
computed (topic id, then a hash of subscription and name) and what it stands for is kept in the metadata
store. Two names with one hash get ids next to each other.

Records go with their subscription, and when their consumer was not seen for a day. Not sooner: a client waits
for the broker that it was with, which may be frozen or down for hours, and comes back with its id. The Python
client asks after its health until the first error; from then on no broker can make it subscribe again, and an
id that was forgotten meanwhile gets no messages for as long as the client runs. How long it was away counts
from the start of the topic on this broker at most: while the broker was down no consumer could come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import google_crc32c

from sava.metadata.commands import Delete, KeyValue, Operation, Put
from sava.topics import specs
from sava.topics.names import TopicName
from sava.topics.specs import ConsumerRecord, SubscriptionType
from sava.topics.tenure import Tenure

FORGET_S: Final = 86_400.0
MAX_PER_SUBSCRIPTION: Final = 1000
STEP: Final = 400
"""Operations in one transaction, below the store's limit."""

_HASH_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class KnownConsumer:
    """Whom an id stands for: enough to subscribe again."""

    consumer_id: int
    topic: TopicName
    subscription: str
    name: str
    type: SubscriptionType
    key_filters: tuple[str, ...] = ()


@dataclass(slots=True)
class _Seen:
    consumer: KnownConsumer
    at: float


def topic_of_consumer(consumer_id: int) -> int:
    return consumer_id >> _HASH_BITS


class ConsumerIds:
    """Of one topic; owned by the event loop. Says what is to be written, and does not write itself."""

    def __init__(
        self, topic: TopicName, topic_id: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._topic = topic
        self._topic_id = topic_id
        self._clock = clock
        self._by_id: dict[int, _Seen] = {}

    def load(self, kv: KeyValue, subscription: str) -> None:
        record = specs.decode(kv, ConsumerRecord)
        self._by_id[record.consumer_id] = _Seen(
            KnownConsumer(
                record.consumer_id,
                self._topic,
                subscription,
                specs.consumer_of_key(kv.key),
                record.type,
                record.key_filters,
            ),
            self._clock(),
        )

    def get(self, consumer_id: int) -> KnownConsumer | None:
        seen = self._by_id.get(consumer_id)
        return seen.consumer if seen is not None else None

    def id_of(self, subscription: str, name: str) -> int:
        """The id that this name has, or would get."""
        low = int(google_crc32c.value(f"{subscription}\0{name}".encode()))
        while True:
            candidate = self._topic_id << _HASH_BITS | low
            known = self.get(candidate)
            if known is None or (known.subscription, known.name) == (subscription, name):
                return candidate
            low = low + 1 & (1 << _HASH_BITS) - 1

    def remember(self, consumer: KnownConsumer) -> list[Operation]:
        """What makes the store know it; nothing if it does. Those not seen for the longest time make room."""
        older = self._by_id.get(consumer.consumer_id)
        self._by_id[consumer.consumer_id] = _Seen(consumer, self._clock())
        if older is not None and older.consumer == consumer:
            return []
        record = ConsumerRecord(
            consumer_id=consumer.consumer_id,
            type=consumer.type,
            key_filters=consumer.key_filters,
        )
        key = specs.consumer_key(self._topic, consumer.subscription, consumer.name)
        surplus = self._of(consumer.subscription)[:-MAX_PER_SUBSCRIPTION]
        return [Put(key, specs.encode(record)), *self._drop(surplus)]

    def touch(self, subscription: str, name: str) -> None:
        """It is here."""
        seen = self._by_id.get(self.id_of(subscription, name))
        if seen is not None:
            seen.at = self._clock()

    def forget_absent(self, forget_s: float = FORGET_S) -> list[Operation]:
        """Those not seen for ``forget_s`` go; what removes them from the store."""
        before = self._clock() - forget_s
        return self._drop([seen for seen in self._by_id.values() if seen.at <= before])

    def forget(self, consumer_id: int) -> None:
        self._by_id.pop(consumer_id, None)

    def forget_subscription(self, subscription: str) -> None:
        self._drop(self._of(subscription))

    def _of(self, subscription: str) -> list[_Seen]:
        """Oldest first."""
        found = [seen for seen in self._by_id.values() if seen.consumer.subscription == subscription]
        return sorted(found, key=lambda seen: seen.at)

    def _drop(self, gone: list[_Seen]) -> list[Operation]:
        for seen in gone:
            del self._by_id[seen.consumer.consumer_id]
        return [
            Delete(specs.consumer_key(self._topic, seen.consumer.subscription, seen.consumer.name))
            for seen in gone
        ]


class ConsumerRecords:
    """The ids of one topic and their records, which only the topic's owner writes."""

    def __init__(self, tenure: Tenure, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.ids = ConsumerIds(tenure.name, tenure.located.spec.topic_id, clock=clock)
        self._tenure = tenure

    async def remember(self, consumer: KnownConsumer) -> None:
        """Returns when the id will be known after a restart."""
        operations = self.ids.remember(consumer)
        if not operations:
            return
        try:
            await self._tenure.write(operations)
        except BaseException:
            self.ids.forget(consumer.consumer_id)  # not known to be stored: to be written the next time
            raise

    async def forget_absent(self, present: Iterable[tuple[str, str]]) -> None:
        """All but those who are here (subscription and name) and those seen lately."""
        for subscription, name in present:
            self.ids.touch(subscription, name)
        operations = self.ids.forget_absent()
        for start in range(0, len(operations), STEP):
            await self._tenure.write(operations[start : start + STEP])
