"""Topics that come, and topics that leave.

Creation: a producer of a topic that does not exist is opened, and sends one message; the clock stops when
that is acknowledged. Drain: all topics are on one broker, with some messages in each that are in no segment
yet; it is told to give them away, and the clock stops when the last is served elsewhere."""

from __future__ import annotations

import time

from bench.plan import Plan
from bench.processes import ProcessFailedError
from bench.report import Quantity, Row, Target, duration
from bench.rows.cluster.moves import SECTION
from bench.trio import Trio
from bench.worker import Worker

CREATED = 100
QUICK_CREATED = 30
DRAINED = 200
MESSAGES = 5

CREATE = Target("p50 at most 50 ms", at_most=0.05, of_peer=False)
DRAIN = Target("at most 20 s", at_most=20.0, of_peer=False)


async def create(plan: Plan) -> list[Row]:
    count = QUICK_CREATED if plan.quick else CREATED
    async with (
        Trio(plan.folder / "creation") as trio,
        Worker("sava", plan.folder, trio.addresses) as sava,
    ):
        await sava.sample("first_acks", prefix="/default/warm-up", count=5)
        sample = await sava.sample("first_acks", prefix="/default/new", count=count)
    figure = Quantity(sample.at(0.5), "seconds", f"p99 {duration(sample.at(0.99))}")
    return [Row(SECTION, f"new topic, first message acknowledged: p50 of {count}", figure, None, CREATE)]


async def drain(plan: Plan) -> list[Row]:
    async with (
        Trio(plan.folder / "drain") as trio,
        Worker("sava", plan.folder, trio.addresses) as sava,
    ):
        left, *others = await trio.followers() + [await trio.leading_broker()]
        for other in others:
            await trio.drain(other)  # of nothing: what is created now comes to the one that is left
        await sava.do("fill_each", prefix="/default/drained", topics=DRAINED, messages=MESSAGES)
        for other in others:
            await trio.activate(other)
        began = time.perf_counter()
        moved = await trio.drain(left)
        taken = time.perf_counter() - began
    if moved != DRAINED:
        raise ProcessFailedError(f"{moved} of {DRAINED} topics moved")
    rate = f"{DRAINED / taken:,.0f} topics/s"
    name = f"{DRAINED} topics with {MESSAGES} messages each, drained from one broker"
    return [Row(SECTION, name, Quantity(taken, "seconds", rate), None, DRAIN)]
