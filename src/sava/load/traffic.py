"""Producers of a load, the pace that they keep, and consumers.

``LoadPace`` says when messages are due. They are due whether or not the earlier ones were answered: a load
that waits for a slow cluster before it sends the next message would not notice that the cluster is slow.

Each producer has a window of chunks in flight; a chunk is what was due at the same time. A producer hands its
chunks over in the order of their sequences, and has room for all that may be in flight: a chunk that waited
for room while its successor found some would change the order, and the tally would blame the cluster for it.

Consumers are all of one subscription; each batch is acked as a whole. ``LoadSubscription`` asks the cluster
the two things that messages do not say: what should come, and whether more is to come. A pause says neither:
a broker may be gone, and another one about to take over.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final, Literal

from sava.api.admin_client import AdminClient
from sava.client import Batch, Client, ClientError, Consumer, OutcomeUnknown, Producer, Timeout, Unavailable
from sava.client.subscribe_stream import SubscriptionType
from sava.errors import RetryableError, SavaError
from sava.load.figures import Meter
from sava.load.tally import DeliveryTally, LoadSource, Maker, Owed, PayloadKind, Range
from sava.proto import topics_admin_pb2 as pb

TURN_S: Final = 0.001
"""How finely a rate is kept. What is due in between goes together."""
NANOSECONDS: Final = 1_000_000_000


class LoadPace:
    """The moments, in nanoseconds since 1970, from now on. Without a rate everything is due when asked.

    rate     a second; None: no bound.
    seconds  for how long; None: without an end.
    delay    of the first, in seconds: several that keep a rate together take turns."""

    def __init__(self, rate: float | None, seconds: float | None = None, *, delay: float = 0.0) -> None:
        self._rate = rate
        began = time.time_ns()
        self._began = began + int(delay * NANOSECONDS)
        self._end = None if seconds is None else began + int(seconds * NANOSECONDS)
        self._given = 0

    @property
    def is_over(self) -> bool:
        return self._end is not None and time.time_ns() >= self._end

    async def due(self, most: int) -> list[int]:
        """The next moments: at least one, at most ``most``, when they have come; none if the time is over.
        Each caller gets moments of its own, so several can ask at the same time."""
        if self._rate is None:
            return [] if self.is_over else [time.time_ns()] * most
        first = self._given
        if self._is_behind_the_end(self._moment(first)):
            return []
        self._given += 1
        left = self._moment(first) - time.time_ns()
        if left > 0:
            await asyncio.sleep(max(left / NANOSECONDS, TURN_S))
        times = [self._moment(first)]
        now = time.time_ns()
        while len(times) < most:
            moment = self._moment(self._given)
            if moment > now or self._is_behind_the_end(moment):
                break
            times.append(moment)
            self._given += 1
        return times

    def _is_behind_the_end(self, moment: int) -> bool:
        return self._end is not None and moment >= self._end

    def _moment(self, number: int) -> int:
        assert self._rate is not None
        return self._began + int(number / self._rate * NANOSECONDS)


CHUNK_MESSAGES: Final = 1000
CHUNK_BYTES: Final = 1 << 20
CHUNKS_IN_FLIGHT: Final = 16
MAX_FAILURES: Final = 1000
"""A producer stops after this number of failed chunks."""
FAILURES: Final = (Timeout, OutcomeUnknown, Unavailable)
"""What may pass, and is counted. Anything else ends the run: repeating it would not help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Production:
    topic: str
    run: int
    producers: int = 1
    count: int | None = None
    """Messages of all producers together; None: until the time is over."""
    seconds: float | None = None
    rate: float | None = None
    """Messages a second, all producers together; None: as fast as they can."""
    size: tuple[int, int] = (1024, 1024)
    keys: int = 0
    partitions: int | None = None
    reliable: bool | None = True
    compression: Literal["lz4", "zstd"] | None = None
    linger_ms: float = 0
    in_flight: int = CHUNKS_IN_FLIGHT

    def source(self, number: int) -> LoadSource:
        return LoadSource(self.run, number, self.keys)

    def pace(self, number: int) -> LoadPace:
        """Of one producer. They take turns: all at the same moment would be a burst, and not a rate."""
        if self.rate is None:
            return LoadPace(None, self.seconds)
        return LoadPace(self.rate / self.producers, self.seconds, delay=number / self.rate)


@dataclass(frozen=True, slots=True)
class ProducerReport:
    """What one producer did."""

    source: LoadSource
    end: int
    unacknowledged: Sequence[Range]


class Sender:
    """One producer. Owned by one event loop."""

    def __init__(self, producer: Producer, load: Production, number: int, meter: Meter) -> None:
        self._producer = producer
        self._load = load
        self._number = number
        self._source = load.source(number)
        self._maker = Maker(self._source, *load.size)
        self._meter = meter
        self._left = None if load.count is None else _share(load.count, load.producers, number)
        self._chunk = max(1, min(CHUNK_MESSAGES, CHUNK_BYTES // load.size[1]))
        self._window = asyncio.Semaphore(load.in_flight)
        self._next = 0
        self._unacknowledged: list[Range] = []
        self._failures = 0
        self._failures_in_a_row = 0
        self._error: ClientError | None = None

    async def run(self) -> ProducerReport:
        if await self._send_all(self._load.pace(self._number)):
            await self._send_end()
        return ProducerReport(self._source, self._next, tuple(self._unacknowledged))

    async def _send_all(self, pace: LoadPace) -> bool:
        """Returns False when the producer gave up."""
        async with asyncio.TaskGroup() as group:
            while self._left != 0:
                await self._window.acquire()
                if self._is_hopeless(pace):
                    await self._give_up(pace)
                    return False
                times = await self._due(pace)
                if not times:
                    break
                group.create_task(self._send(self._next, times))
                self._next += len(times)
        return True

    def _is_hopeless(self, pace: LoadPace) -> bool:
        """What was due while the cluster was away is sent when it is back, after the end too. But with a
        cluster that does not come back, a run of a minute would wait for each chunk of it in turn."""
        is_enough = pace.is_over or (
            self._load.seconds is None and self._failures_in_a_row >= 2 * self._load.in_flight
        )
        return self._failures >= MAX_FAILURES or (self._failures_in_a_row > 0 and is_enough)

    async def _give_up(self, pace: LoadPace) -> None:
        """What was due until the end has not been published either."""
        assert self._error is not None
        while pace.is_over and self._left != 0 and (times := await self._due(pace)):
            self._meter.fail(len(times), self._error)

    async def _due(self, pace: LoadPace) -> list[int]:
        times = await pace.due(self._chunk if self._left is None else min(self._chunk, self._left))
        if self._left is not None:
            self._left -= len(times)
        return times

    async def _send(self, first: int, times: list[int]) -> None:
        try:
            payloads = self._maker.payloads(first, times)
            await self._producer.send_many(payloads, keys=self._maker.keys(first, len(times)))
            now = time.time_ns()
            self._meter.add(len(payloads), sum(map(len, payloads)))
            self._meter.latency.record_since(times, now)
            self._failures_in_a_row = 0
        except FAILURES as error:
            self._meter.fail(len(times), error)
            self._failures += 1
            self._failures_in_a_row += 1
            self._error = error
            self._note((first, first + len(times)))
        finally:
            self._window.release()

    def _note(self, failed: Range) -> None:
        """Chunks fail side by side, and nearly in order."""
        ranges = self._unacknowledged
        if ranges and ranges[-1][1] == failed[0]:
            ranges[-1] = (ranges[-1][0], failed[1])
        else:
            ranges.append(failed)

    async def _send_end(self) -> None:
        """Tell consumers what to expect. It is not counted: it is not part of what was measured."""
        maker, ranges = self._maker, self._unacknowledged
        notices = [maker.gap(start, end - start) for start, end in ranges]
        notices.append(maker.end(self._next, sum(end - start for start, end in ranges)))
        first, self._next = self._next, self._next + 1
        keys = maker.keys(first, 1)
        try:
            await self._producer.send_many(notices, keys=keys and keys * len(notices))
        except FAILURES:
            ranges.append((first, first + 1))


async def produce(client: Client, load: Production, meter: Meter) -> list[ProducerReport]:
    """Returns what each producer did. The time that is measured is from the first message to the last
    receipt."""
    producers = [
        client.producer(
            load.topic,
            name=f"bench-{load.run:08x}-{number}",
            reliable=load.reliable,
            partitions=load.partitions,
            linger_ms=load.linger_ms,
            compression=load.compression,
            max_pending=load.in_flight * CHUNK_MESSAGES + 1,
        )
        for number in range(load.producers)
    ]
    await producers[0].open()  # alone: it creates the topic
    await asyncio.gather(*(producer.open() for producer in producers[1:]))
    senders = [Sender(producer, load, number, meter) for number, producer in enumerate(producers)]
    meter.begin()
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(sender.run()) for sender in senders]
    except BaseExceptionGroup as errors:
        raise _first(errors) from errors
    finally:
        await asyncio.gather(*(producer.close(timeout=1) for producer in producers))
    return [task.result() for task in running]


def _share(total: int, parts: int, number: int) -> int:
    return total // parts + (number < total % parts)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


class Silent(RetryableError):
    """No message arrived for long although the subscription has more, as far as is known; or no broker serves
    all of the topic at the moment."""


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
            raise Silent(f"topic {self.topic} is not served as a whole: {described.reason}")
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
