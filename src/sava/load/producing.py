"""Producers of a load, and the pace that they keep.

``LoadPace`` says when messages are due. They are due whether or not the earlier ones were answered: a load
that waits for a slow cluster before it sends the next message would not notice that the cluster is slow.

Each producer has a window of chunks in flight; a chunk is what was due at the same time. A producer hands its
chunks over in the order of their sequences, and has room for all that may be in flight: a chunk that waited
for room while its successor found some would change the order, and the tally would blame the cluster for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from sava.client import Client, ClientError, OutcomeUnknown, Producer, Timeout, Unavailable
from sava.load.figures import Meter
from sava.load.payload import LoadSource, Maker
from sava.load.tally import Range

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
    linger_ms: float = 5
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
        told = [maker.gap(start, end - start) for start, end in ranges]
        told.append(maker.end(self._next, sum(end - start for start, end in ranges)))
        first, self._next = self._next, self._next + 1
        keys = maker.keys(first, 1)
        try:
            await self._producer.send_many(told, keys=keys and keys * len(told))
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
