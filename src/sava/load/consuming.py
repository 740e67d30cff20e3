"""Consumers of a load: all of one subscription, a batch at a time, each batch acked as a whole.

``LoadSubscription`` asks the cluster the two things that messages do not say: what should come, and whether
more is to come. A pause says neither: a broker may be gone, and another one about to take over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final, Literal

from sava.api.admin_client import AdminClient
from sava.client import Batch, Client, Consumer
from sava.client.consumer import SubscriptionType
from sava.errors import RetryableError, SavaError
from sava.load.figures import Meter
from sava.load.payload import PayloadKind
from sava.load.tally import DeliveryTally, Owed
from sava.proto import topics_admin_pb2 as pb


class TopicUnserved(RetryableError):
    """No broker serves the topic, or all of it, at the moment."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where consuming begins."""

    owed: Owed
    partitions: int
    removed: int = 0
    """Messages that retention has removed before."""


class LoadSubscription:
    def __init__(self, admin: AdminClient, topic: str, name: str) -> None:
        self._admin = admin
        self.topic = topic
        self.name = name
        self.is_used = False
        """Whether a consumer has started: the subscription may exist since then."""

    async def beginning(self, type_: SubscriptionType, start: Literal["earliest", "latest"]) -> Beginning:
        """Before the first consumer is there. Raises what the broker refuses, or RetryableError."""
        described = await self._describe(self.topic)
        parts = [await self._describe(name) for name in described.partitions] or [described]
        count = len(parts)
        if any(each.subscription == self.name for each in described.subscriptions):
            # Earlier consumers have acked everything up to some place, unless several shared it.
            is_in_order = type_ in ("exclusive", "failover")
            return Beginning(Owed.REST if is_in_order else Owed.SOME, count)
        removed = sum(each.start_offset for each in parts)
        is_kept = all(each.HasField("start_offset") for each in parts)
        if start == "earliest" and is_kept and not removed:
            return Beginning(Owed.ALL, count)
        return Beginning(Owed.REST, count, removed)

    async def left(self) -> int:
        """Messages that are not acked. Raises RetryableError if no broker knows."""
        described = await self._describe(self.topic)
        if described.reason:
            raise TopicUnserved(f"topic {self.topic} is not served as a whole: {described.reason}")
        found = (each.backlog for each in described.subscriptions if each.subscription == self.name)
        return sum(found)

    async def delete(self) -> None:
        request = pb.DeleteSubscriptionRequest(topic=self.topic, subscription=self.name)
        await self._admin.call(self._admin.subscriptions.DeleteSubscription, request)

    async def _describe(self, name: str) -> pb.TopicDescription:
        described: pb.TopicDescription = await self._admin.call(
            self._admin.topics.DescribeTopic, pb.DescribeTopicRequest(name=name)
        )
        return described


POLL_S: Final = 0.05
"""How soon an end is noticed while nothing comes."""
ASK_S: Final = 0.5
"""How often the cluster is asked whether there is more while nothing comes."""
PATIENCE_S: Final = 30.0
"""How long messages that are there may not come. A broker that was killed is replaced in half of that."""


class Silent(RetryableError):
    """No message arrived for long, although the subscription has more, as far as its backlog can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    topic: str
    subscription: str
    type: SubscriptionType = "exclusive"
    consumers: int = 1
    start: Literal["earliest", "latest"] = "earliest"
    count: int | None = None
    seconds: float | None = None
    idle_s: float = 3.0
    """The run ends after this time without messages, if the subscription has none left."""
    receive_queue: int = 10_000


class Receivers:
    """Open when entered. Owned by one event loop."""

    def __init__(
        self,
        client: Client,
        subscription: LoadSubscription,
        load: Consumption,
        tally: DeliveryTally,
        meter: Meter,
    ) -> None:
        self._subscription = subscription
        self._load = load
        self._tally = tally
        self._meter = meter
        self._stack = AsyncExitStack()
        self._consumers = [
            client.consumer(
                load.topic,
                subscription=load.subscription,
                type=load.type,
                start=load.start,
                name=f"{load.subscription}-{number}",
                receive_queue=load.receive_queue,
            )
            for number in range(load.consumers)
        ]
        self._last = time.perf_counter()
        self._next_offsets: dict[tuple[str, int], int] = {}

    async def __aenter__(self) -> Receivers:
        self._subscription.is_used = True
        for consumer in self._consumers:
            await self._stack.enter_async_context(consumer)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(
        self,
        *,
        is_enough: Callable[[], bool] = lambda: False,
        may_be_all: Callable[[], bool] = lambda: True,
    ) -> bool:
        """Until the load's own end, or ``is_enough``, or until nothing comes any more when that
        ``may_be_all``. Returns whether everything was read: what was left unread is not lost. Raises
        Silent."""
        end = None if self._load.seconds is None else time.perf_counter() + self._load.seconds
        receiving = [
            asyncio.create_task(self._receive(number, consumer))
            for number, consumer in enumerate(self._consumers)
        ]
        watching = asyncio.create_task(self._watch(end, is_enough, may_be_all))
        try:
            done, _ = await asyncio.wait((watching, *receiving), return_when=asyncio.FIRST_COMPLETED)
            for task in done - {watching}:
                task.result()  # it ends by itself when it has enough, or fails
            return watching in done and watching.result()
        finally:
            for task in (watching, *receiving):
                task.cancel()
            await asyncio.gather(watching, *receiving, return_exceptions=True)

    async def _receive(self, number: int, consumer: Consumer) -> None:
        while (left := self._left()) != 0:
            batch = await consumer.receive_batch(left)
            assert batch is not None
            self._take(number, batch)
            await consumer.ack(batch)

    async def _watch(
        self, end: float | None, is_enough: Callable[[], bool], may_be_all: Callable[[], bool]
    ) -> bool:
        """Returns whether everything was read."""
        self._last = time.perf_counter()
        asked = 0.0
        while not is_enough():
            await asyncio.sleep(POLL_S)
            now = time.perf_counter()
            if end is not None and now >= end:
                return False
            if not may_be_all():
                self._last = now
            if now - self._last < self._load.idle_s or now - asked < ASK_S:
                continue
            if await self._is_drained(self._last):
                return True
            asked = now
        return True

    async def _is_drained(self, last: float) -> bool:
        """Raises Silent."""
        try:
            left = await self._subscription.left()
            trouble = f"{left} messages of subscription {self._subscription.name} are not acked"
        except SavaError as error:
            left, trouble = -1, f"the backlog is unknown: {error}"
        if self._last > last:
            return False  # something came meanwhile
        if left == 0:
            return True
        patience = max(PATIENCE_S, self._load.idle_s)
        if time.perf_counter() - last >= patience:
            raise Silent(f"no message arrived for {patience:g} s, and {trouble}")
        return False

    def _left(self) -> int | None:
        return None if self._load.count is None else max(self._load.count - self._meter.count, 0)

    def _take(self, number: int, batch: Batch) -> None:
        now = time.time_ns()
        payloads = batch.payloads()
        taken = self._tally.take(
            batch.topic,
            payloads,
            consumer=number if self._load.type == "shared" else 0,
            is_again=self._is_again(number, batch),
        )
        others = 0
        for each in taken:
            if each.kind is PayloadKind.MESSAGE:
                self._meter.latency.record_since(each.times, now)
            else:
                others += len(each.sequences)
        self._last = time.perf_counter()
        self._meter.add(len(payloads) - others, sum(map(len, payloads)))

    def _is_again(self, number: int, batch: Batch) -> bool:
        """Whether it may have been on its way to another consumer, which then left: of a shared subscription
        each gets its own messages in order, and those of others when they come."""
        if self._load.type != "shared" or self._load.consumers == 1:
            return False
        place = batch.topic, number
        next_offset = self._next_offsets.get(place, 0)
        self._next_offsets[place] = max(next_offset, batch.ranges[-1][1])
        return batch.ranges[0][0] < next_offset
