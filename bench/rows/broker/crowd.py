"""Many at once: ten subscriptions of one topic, and a thousand topics that do nothing.

Fan-out: consumers are attached, then the messages are published; the clock stops when every subscription has
all of them. What it costs to keep idle topics is read from the kernel's accounts of a broker that has done
nothing but create them."""

from __future__ import annotations

import asyncio
import time

from bench.plan import Plan
from bench.processes import Child
from bench.report import Quantity, Row, Target
from bench.rows.broker.shape import SECTION, topic
from bench.samples import Contestant, Figure, Sample, interleave
from bench.standalone import standalone_broker
from bench.worker import Worker

MESSAGES = 300_000
SUBSCRIPTIONS = 10
TOPICS = 1_000
ATTACHED = 100
IDLE_S = 10.0

FAN_OUT = Target("at most 3× one subscription", at_most=3.0)
CPU = Target("less than 1 %", at_most=0.01, of_peer=False)
MEMORY = Target("less than 200 MB", at_most=200e6, of_peer=False)


async def fan_out(plan: Plan) -> list[Row]:
    async with (
        standalone_broker(plan.folder) as broker,
        Worker("sava", plan.folder, broker.address) as producer,
        Worker("sava", plan.folder, broker.address) as consumers,
    ):

        def to(subscriptions: int) -> Contestant:
            async def contestant() -> Sample:
                name = topic("fan-out")
                await consumers.do("subscribe", topic=name, subscriptions=subscriptions)
                began = time.perf_counter()
                await asyncio.gather(
                    producer.do("fill", topic=name, count=MESSAGES), consumers.do("drain", count=MESSAGES)
                )
                taken = time.perf_counter() - began
                await broker.child.quiet()
                return Sample(1, taken)

            return contestant

        figures = await interleave(plan.rounds, {"many": to(SUBSCRIPTIONS), "one": to(1)})

    def taken(figure: Figure, subscriptions: int) -> Quantity:
        delivered = f"{subscriptions * MESSAGES * figure.rate:,.0f} deliveries/s"
        return Quantity(1 / figure.rate, "seconds", delivered)

    return [
        Row(
            SECTION,
            f"fan-out of {MESSAGES:,} messages to {SUBSCRIPTIONS} subscriptions",
            taken(figures["many"], SUBSCRIPTIONS),
            taken(figures["one"], 1),
            FAN_OUT,
            peer_name="1 subscription",
        )
    ]


async def idle(plan: Plan) -> list[Row]:
    async with (
        standalone_broker(plan.folder) as broker,
        Worker("sava", plan.folder, broker.address) as sava,
    ):
        await sava.do("idle", topics=TOPICS, attached=ATTACHED)
        await broker.child.quiet()
        cpu = await _share_of_a_core(broker.child, IDLE_S)
        memory = broker.child.resident_bytes()
        await sava.do("leave")
    name = f"{TOPICS:,} idle topics with a subscription, {ATTACHED} consumers"
    return [
        Row(SECTION, f"{name}: processor", Quantity(cpu, "share"), None, CPU),
        Row(SECTION, f"{name}: resident memory", Quantity(memory, "bytes"), None, MEMORY),
    ]


async def _share_of_a_core(child: Child, seconds: float) -> float:
    before, began = child.processor_seconds(), time.perf_counter()
    await asyncio.sleep(seconds)
    return (child.processor_seconds() - before) / (time.perf_counter() - began)
