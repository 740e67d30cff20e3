"""Ten thousand topics on three brokers.

The controller, on the leader, looks at all of them every few seconds, and says how long that took among its
metrics. Look-ups are what clients begin with: one after the other, of topics chosen at random, at a broker
that does not lead. Beside them, look-ups at the same broker before there were other topics."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
import urllib.request
from collections.abc import Callable
from typing import Any, Final

from bench.broker_process import Broker
from bench.load import channel_to
from bench.plan import Plan
from bench.processes import ProcessFailedError
from bench.report import Quantity, Row, Target, duration
from bench.rows.cluster.moves import SECTION
from bench.samples import Figure, closed_loop
from bench.trio import Trio
from sava.proto import streams_pb2 as pb
from sava.proto import streams_pb2_grpc as rpc

PARTITIONS: Final = 500
TOPICS: Final = 10_000
QUICK_TOPICS: Final = 2_000
ALONE: Final = "/default/alone"
WARM_UP_S: Final = 0.5
PASSES: Final = 2
SERVED_S: Final = 90.0
POLL_S: Final = 0.5
PASS: Final = "sava_controller_pass_seconds"

CONTROLLER = Target("at most 1 s", at_most=1.0, of_peer=False)
LOOK_UP = Target("p99 at most 5 ms", at_most=0.005, of_peer=False)


async def run(plan: Plan) -> list[Row]:
    count = QUICK_TOPICS if plan.quick else TOPICS
    async with Trio(plan.folder / "many") as trio:
        leader, follower = await trio.leading_broker(), (await trio.followers())[0]
        await trio.create(ALONE, reliable=True)
        alone = await _look_ups(plan, follower, lambda: ALONE)
        began = time.perf_counter()
        for number in range(count // PARTITIONS):
            await trio.create(_head(number), reliable=True, partitions=PARTITIONS)
        await _all_served(trio, follower, count + 1)
        created = time.perf_counter() - began
        passes = await _passes(leader)
        await follower.child.quiet()
        crowded = await _look_ups(plan, follower, lambda: _any_of(count))
    topics = f"{count:,} topics"
    made = f"all were created and served after {duration(created)}"
    return [
        Row(
            SECTION,
            f"{topics}: the controller's look at all",
            Quantity(statistics.median(passes), "seconds", f"longest {duration(max(passes))}; {made}"),
            None,
            CONTROLLER,
        ),
        Row(
            SECTION,
            f"{topics}: look-up at a follower, 1 in flight: p99",
            _p99(crowded),
            _p99(alone),
            LOOK_UP,
            peer_name="1 topic",
        ),
    ]


def _p99(figure: Figure) -> Quantity:
    return Quantity(figure.p99, "seconds", f"p50 {duration(figure.p50)}")


async def _look_ups(plan: Plan, broker: Broker, choose: Callable[[], str]) -> Figure:
    async with channel_to(broker.client) as channel:
        stub: Any = rpc.StreamsStub(channel)

        async def look_up(_: int) -> None:
            found = await stub.LookUp(pb.LookUpRequest(topic=choose()), timeout=10.0)
            assert found.partitions[0].address, found

        await closed_loop(look_up, in_flight=1, seconds=WARM_UP_S)
        return Figure.of(
            [await closed_loop(look_up, in_flight=1, seconds=plan.seconds) for _ in range(plan.rounds)]
        )


def _any_of(count: int) -> str:
    return f"{_head(random.randrange(count // PARTITIONS))}-part-{random.randrange(PARTITIONS)}"


def _head(number: int) -> str:
    return f"/default/many-{number}"


async def _all_served(trio: Trio, follower: Broker, count: int) -> None:
    """Until each has a broker that has taken it up: that is what raises its epoch."""
    deadline = time.monotonic() + SERVED_S
    while True:
        listed = [each for each in await trio.summaries(follower) if not each.partitions]
        served = sum(1 for each in listed if each.state == "assigned" and each.epoch)
        if served == count:
            return
        if time.monotonic() > deadline:
            raise ProcessFailedError(f"{served} of {count} topics were served after {SERVED_S:.0f} s")
        await asyncio.sleep(POLL_S)


async def _passes(leader: Broker) -> list[float]:
    """Of looks one after another, by the values that differ."""
    seen: list[float] = []
    deadline = time.monotonic() + SERVED_S
    while len(seen) <= PASSES:
        value = await asyncio.to_thread(_metric, leader.http, PASS)
        if not seen or seen[-1] != value:
            seen.append(value)
        if time.monotonic() > deadline:
            raise ProcessFailedError(f"{len(seen)} looks at all topics within {SERVED_S:.0f} s")
        await asyncio.sleep(POLL_S)
    return seen[1:]  # the first was under way while topics were still being taken up


def _metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as response:
        for line in response.read().decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.split()[1])
    raise ProcessFailedError(f"{address} has no metric {name}")
