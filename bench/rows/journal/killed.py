"""Killed: the owner of a topic is killed with SIGKILL while its newest messages are in its journal only.

Whoever takes the topic up has them from mirrors: the journal is fenced, closed, and what was not in segments
is uploaded by a broker that has a copy. All timeouts are the default ones: a broker that is not heard of for
6 s is gone. The clock runs from the kill until a message, sent at once after it, is acknowledged. Every third
victim leads the cluster, too, as by chance: an election comes first then, and leases begin anew."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Final

from bench.broker_process import Broker
from bench.plan import Plan
from bench.report import Quantity, Row, Target, duration
from bench.rows.cluster.trio import Trio
from sava.client import Client

SECTION: Final = "journal"
KILLS: Final = 9
QUICK_KILLS: Final = 2
MESSAGES: Final = 200
GIVE_UP_S: Final = 60.0
MIRRORED_S: Final = 2.0
"""A broker that came back is a mirror again after so long."""

MEDIAN = Target("p50 at most 6 s", at_most=6.0, of_peer=False)
SLOWEST = Target("p99 at most 12 s", at_most=12.0, of_peer=False)


async def run(plan: Plan) -> list[Row]:
    kills = QUICK_KILLS if plan.quick else KILLS
    following: list[float] = []
    leading: list[float] = []
    async with Trio(plan.folder / "killed") as trio:
        for number in range(kills):
            leads = number % 3 == 2
            victim = await trio.leading_broker() if leads else (await trio.followers())[number % 2]
            (leading if leads else following).append(await _kill(trio, victim, f"/default/killed-{number}"))
    every = sorted([*following, *leading])
    beside = f"followers p50 {duration(statistics.median(following))}"
    if leading:
        beside += f", leaders p50 {duration(statistics.median(leading))}"
    name = "owner killed, tail on mirrors, next message acknowledged"
    return [
        Row(
            SECTION,
            f"{name}: p50 of {kills} kills",
            Quantity(statistics.median(every), "seconds", beside),
            None,
            MEDIAN,
        ),
        Row(SECTION, f"{name}: slowest", Quantity(every[-1], "seconds", ""), None, SLOWEST),
    ]


async def _kill(trio: Trio, victim: Broker, topic: str) -> float:
    """Seconds until a message was acknowledged again."""
    async with Client(trio.addresses, timeout=GIVE_UP_S) as client:
        producer = client.producer(topic, timeout=GIVE_UP_S)
        await producer.open()
        if trio.id_of(victim) not in await _owner(trio, topic):
            await trio.unload(topic, to=victim)
        await producer.send_many([b"before"] * MESSAGES)
        killed = time.perf_counter()
        victim.child.kill()
        offset = await producer.send(b"after")
        seconds = time.perf_counter() - killed
        assert offset == MESSAGES, f"{offset} after {MESSAGES} messages"
    await victim.disconnect()
    victim.start()
    await trio.ready()
    await trio.complete()
    await asyncio.sleep(MIRRORED_S)
    return seconds


async def _owner(trio: Trio, topic: str) -> set[int]:
    return {each.broker_id for each in await trio.summaries(trio.brokers[0]) if each.name == topic}
