"""Gigabyte: a broker dies with a gigabyte in its journal that is in no segment yet.

Many topics have less than a segment each, so that nothing was uploaded. By the survivors' own figures: the
time from the claim of the journal until it was closed (the copies fenced, read and verified), and the time in
which all of it became segments. Then each topic is asked for its end."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from typing import Final

from bench.broker_process import Broker
from bench.plan import Plan
from bench.processes import ProcessFailedError
from bench.report import Quantity, Row, Target, duration
from bench.rows.journal.copies import SECTION
from bench.trio import Trio
from sava.client import Client

TOPICS: Final = 80
QUICK_TOPICS: Final = 8
MESSAGES: Final = 1_300
PAYLOAD: Final = bytes(range(250)) * 40
DONE_S: Final = 120.0
POLL_S: Final = 0.1

RECOVERED = Target("at most 10 s", at_most=10.0, of_peer=False)


async def run(plan: Plan) -> list[Row]:
    count = QUICK_TOPICS if plan.quick else TOPICS
    async with Trio(plan.folder / "gigabyte", upload_interval_seconds=3600) as trio:
        victim, *others = [*await trio.followers(), await trio.leading_broker()]
        for other in others:
            await trio.drain(other)  # of nothing: what is created now comes to the one that is left
        names = [f"/default/large-{number}" for number in range(count)]
        async with Client(trio.addresses, timeout=DONE_S) as client:
            for name in names:
                async with client.producer(name) as producer:
                    await producer.send_many([PAYLOAD] * MESSAGES)
        for other in others:
            await trio.activate(other)
        began = time.perf_counter()
        victim.child.kill()
        await _until_salvaged(others, count)
        served = await _until_served(trio, others[0], names) - began
        closing = await _sum(others, "sava_ledger_recovery_seconds_total")
        salvaging = await _sum(others, "sava_ledger_tail_recovery_seconds_total")
        size = await _sum(others, "sava_ledger_recovered_bytes_total")
    what = f"{size / 1e9:.2f} GB of journal in {count} topics"
    beside = f"closed after {duration(closing)}, segments after {duration(salvaging)} more"
    return [
        Row(
            SECTION,
            f"{what}: from claim to segments",
            Quantity(
                closing + salvaging, "seconds", f"{beside}; all served {duration(served)} after the kill"
            ),
            None,
            RECOVERED,
        )
    ]


async def _until_salvaged(brokers: list[Broker], count: int) -> None:
    deadline = time.monotonic() + DONE_S
    while await _sum(brokers, "sava_ledger_recovered_topics_total") < count:
        if time.monotonic() > deadline:
            raise ProcessFailedError(f"not all topics were salvaged within {DONE_S:.0f} s")
        await asyncio.sleep(POLL_S)


async def _until_served(trio: Trio, through: Broker, names: list[str]) -> float:
    deadline = time.monotonic() + DONE_S
    wanted = set(names)
    while True:
        listed = await trio.summaries(through)
        if wanted <= {each.name for each in listed if each.state == "assigned" and each.epoch > 1}:
            return time.perf_counter()
        if time.monotonic() > deadline:
            raise ProcessFailedError(f"not all topics were served within {DONE_S:.0f} s")
        await asyncio.sleep(POLL_S)


async def _sum(brokers: list[Broker], metric: str) -> float:
    return sum([await asyncio.to_thread(_metric, broker.http, metric) for broker in brokers])


def _metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        for line in response.read().decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
    raise ProcessFailedError(f"{address} has no metric {name}")
