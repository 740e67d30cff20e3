"""Samples: what one repetition measured, and how repetitions become one figure.

Rates and percentiles are taken per repetition and their median over the repetitions is reported: a burst of
foreign load spoils one repetition, not the figure. Contestants take turns within each round, and every second
round runs backwards, so that a machine that slowly warms up or fills its disk favours none."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.report import Quantity, duration

SETTLE_S = 0.2
"""Pause after each repetition: background work it left behind (compaction, page writeback) is not the next
one's fault."""


def percentile(ordered: Sequence[float], fraction: float) -> float:
    """Nearest rank, of a sorted sequence that is not empty."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * fraction))]


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition: ``count`` operations in ``seconds``, with the latency of each where it was taken."""

    count: int
    seconds: float
    latencies: Sequence[float] = field(default=(), repr=False)

    @property
    def rate(self) -> float:
        return self.count / self.seconds

    def at(self, fraction: float) -> float:
        return percentile(sorted(self.latencies), fraction)


@dataclass(frozen=True, slots=True)
class Figure:
    """The median over all repetitions. Seconds, and operations per second; latencies are 0 where none were
    taken."""

    rate: float
    p50: float
    p99: float
    repetitions: int
    lowest_rate: float
    highest_rate: float

    def latency(self) -> Quantity:
        """The p50, with the p99 beside it."""
        return Quantity(self.p50, "seconds", f"p99 {duration(self.p99)}")

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Figure:
        rates = [sample.rate for sample in samples]
        timed = [sample for sample in samples if sample.latencies]
        return cls(
            rate=statistics.median(rates),
            p50=statistics.median(sample.at(0.50) for sample in timed) if timed else 0.0,
            p99=statistics.median(sample.at(0.99) for sample in timed) if timed else 0.0,
            repetitions=len(samples),
            lowest_rate=min(rates),
            highest_rate=max(rates),
        )


Contestant = Callable[[], Awaitable[Sample]]


async def interleave(rounds: int, contestants: Mapping[str, Contestant]) -> dict[str, Figure]:
    """Let each contestant run once per round, in turn, and give each its figure."""
    samples: dict[str, list[Sample]] = {name: [] for name in contestants}
    for number in range(rounds):
        order = list(contestants)
        for name in order if number % 2 == 0 else reversed(order):
            samples[name].append(await contestants[name]())
            await asyncio.sleep(SETTLE_S)
    return {name: Figure.of(taken) for name, taken in samples.items()}


async def closed_loop(call: Callable[[int], Awaitable[object]], *, in_flight: int, seconds: float) -> Sample:
    """``in_flight`` callers, each of which calls again as soon as its last call has returned."""
    latencies: list[float] = []
    clock = time.perf_counter
    start = clock()
    end = start + seconds

    async def caller(number: int) -> None:
        while (called := clock()) < end:
            await call(number)
            latencies.append(clock() - called)
            number += in_flight

    async with asyncio.TaskGroup() as group:
        for number in range(in_flight):
            group.create_task(caller(number))
    return Sample(len(latencies), clock() - start, latencies)


async def open_loop(
    call: Callable[[int], Awaitable[object]], *, per_second: float, until: Callable[[], bool]
) -> list[tuple[float, float]]:
    """Call at a fixed rate whatever the earlier calls do; ``(due, latency)`` of each, latency counted from
    the moment that the call was due. A closed loop would stop asking during a stall, and so count one slow
    call where there were many."""
    done: list[tuple[float, float]] = []
    clock = time.perf_counter
    start = clock()

    async def caller(number: int, due: float) -> None:
        await call(number)
        done.append((due, clock() - due))

    async with asyncio.TaskGroup() as group:
        number = 0
        while not until():
            due = start + number / per_second
            await asyncio.sleep(max(0.0, due - clock()))
            group.create_task(caller(number, due))
            number += 1
    return sorted(done)
