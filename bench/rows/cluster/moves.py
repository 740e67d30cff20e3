"""Moves: a producer publishes at a fixed rate, whatever happens to earlier messages, while its topic is moved
from broker to broker.

The downtime of a move is the longest time that one message took, from the moment that it was due until it was
acknowledged, of all that were on their way between the beginning of this move and of the next. So it holds
everything that a client notices: publishing held back, the search for the new owner, and the queue that has
formed. The longest gap between two acknowledgements stands beside it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from bench.plan import Plan
from bench.report import Quantity, Row, Target, duration
from bench.samples import percentile
from bench.trio import Trio
from bench.worker import Worker

SECTION = "cluster"
MOVES = 30
QUICK_MOVES = 10
PER_SECOND = 1_000
"""The same for danube-client, although it makes a unary call for each message and two brokers work on that:
a thousand a second keep two cores busy by themselves, so that its bound is a wide one."""
PAUSE_S = 0.2
"""Between two moves, so that each begins with the traffic of every day."""

NON_RELIABLE = Target("p50 at most 100 ms", at_most=0.1, of_peer=False)
RELIABLE = Target("p50 at most 300 ms", at_most=0.3, of_peer=False)
RELIABLE_TAIL = Target("p99 at most 1 s", at_most=1.0, of_peer=False)
DANUBE = Target("p99 at most 1.5 s", at_most=1.5, of_peer=False)


@dataclass(frozen=True, slots=True)
class Downtimes:
    """Sorted, one of each for every move."""

    messages: list[float]
    gaps: list[float]

    def at(self, fraction: float) -> Quantity:
        beside = 0.99 if fraction == 0.5 else 0.5
        other = f"p{beside * 100:.0f} {duration(percentile(self.messages, beside))}"
        gap = f"gap between acks {duration(percentile(self.gaps, fraction))}"
        return Quantity(percentile(self.messages, fraction), "seconds", f"{other}, {gap}")


async def run(plan: Plan) -> list[Row]:
    count = QUICK_MOVES if plan.quick else MOVES
    async with (
        Trio(plan.folder / "moves") as trio,
        Worker("sava", plan.folder, trio.addresses) as sava,
        Worker("danube", plan.folder, trio.brokers[0].client) as danube,
    ):
        passing = await _moved(trio, sava, "/default/passing", count, reliable=False)
        kept = await _moved(trio, sava, "/default/kept", count)
        foreign = await _moved(trio, danube, "/default/foreign", count)

    def row(what: str, figure: Downtimes, fraction: float, target: Target) -> Row:
        name = (
            f"{what} moves, {PER_SECOND:,} messages/s: p{fraction * 100:.0f} of {len(figure.messages)} moves"
        )
        return Row(SECTION, name, figure.at(fraction), None, target)

    return [
        row("non-reliable topic", passing, 0.5, NON_RELIABLE),
        row("reliable topic", kept, 0.5, RELIABLE),
        row("reliable topic", kept, 0.99, RELIABLE_TAIL),
        row("danube-client's topic", foreign, 0.99, DANUBE),
    ]


async def _moved(trio: Trio, worker: Worker, topic: str, count: int, *, reliable: bool = True) -> Downtimes:
    await worker.do("begin_pace", topic=topic, reliable=reliable, per_second=PER_SECOND)
    moments = []
    for _ in range(count):
        await asyncio.sleep(PAUSE_S)
        moments.append(time.perf_counter())
        await trio.unload(topic)
    await asyncio.sleep(PAUSE_S)
    moments.append(time.perf_counter())
    return _of_each_move(moments, (await worker.do("end_pace"))["done"])


def _of_each_move(moments: list[float], done: list[list[Any]]) -> Downtimes:
    """``done``: when each message was due, and how long it took."""
    messages, gaps = [], []
    for began, ended in pairwise(moments):
        around = [(due, due + took) for due, took in done if due < ended and due + took >= began]
        acks = sorted([began, *(acked for _, acked in around)])
        messages.append(max(acked - due for due, acked in around))
        gaps.append(max(later - earlier for earlier, later in pairwise(acks)))
    return Downtimes(sorted(messages), sorted(gaps))
