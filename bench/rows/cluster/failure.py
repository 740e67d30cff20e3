"""Failure: the broker that has a topic is killed with SIGKILL, and its producers go on elsewhere.

Everything in the topics is in segments and nothing was published for a while, so others may take them up
without the dead broker. All timeouts are the default ones: a broker that is not heard of for 6 s is gone. The
clock runs from the kill until a message, sent at once after it, is acknowledged; the slowest of all topics
counts. Segments are uploaded every second here instead of every minute, so that nobody waits for that."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Final

import msgspec

from bench.broker_process import Broker
from bench.plan import Plan
from bench.processes import ProcessFailedError
from bench.report import Quantity, Row, Target, duration
from bench.rows.cluster.trio import SECTION, Trio
from sava.client import Client
from sava.proto import admin_pb2 as pb
from sava.storage.types import TopicState

TOPICS: Final = 8
KILLS: Final = 2
REST_S: Final = 30.0
GIVE_UP_S: Final = 60.0
POLL_S: Final = 0.1

TARGET = Target("at most 12 s", at_most=12.0, of_peer=False)


async def run(plan: Plan) -> list[Row]:
    kills = 1 if plan.quick else KILLS
    taken: dict[str, list[float]] = {"a follower": [], "the leader": []}
    async with Trio(plan.folder / "failure", upload_interval_seconds=1) as trio:
        for number in range(kills):
            follower, *_ = await trio.followers()
            taken["a follower"].append(await _kill(trio, follower, f"/default/followed-{number}"))
            leader = await trio.leading_broker()
            taken["the leader"].append(await _kill(trio, leader, f"/default/led-{number}"))
    return [
        Row(
            SECTION,
            f"{who} killed, its topics' next message acknowledged: slowest topic of {kills} kills",
            Quantity(max(times), "seconds", f"p50 {duration(statistics.median(times))}"),
            None,
            TARGET,
        )
        for who, times in taken.items()
    ]


async def _kill(trio: Trio, victim: Broker, prefix: str) -> float:
    """Seconds until the slowest of the victim's topics had taken a message again. They are new ones, brought
    there: a broker that comes back gets none of those that it had."""
    async with Client(trio.addresses, timeout=GIVE_UP_S) as client:
        names = [f"{prefix}-{number}" for number in range(TOPICS)]
        producers = {name: client.producer(name, timeout=GIVE_UP_S) for name in names}
        await asyncio.gather(*(producer.open() for producer in producers.values()))
        for name in producers.keys() - await _topics_of(trio, victim):
            await trio.unload(name, to=victim)
        await asyncio.gather(*(producer.send(b"before") for producer in producers.values()))
        await asyncio.gather(*(_at_rest(trio, name) for name in names))
        killed = time.perf_counter()
        victim.child.kill()
        await asyncio.gather(*(producer.send(b"after") for producer in producers.values()))
        seconds = time.perf_counter() - killed
    await victim.disconnect()
    victim.start()
    await trio.ready()
    await trio.complete()
    return seconds


async def _topics_of(trio: Trio, broker: Broker) -> set[str]:
    return {each.name for each in await trio.summaries(broker) if each.broker_id == trio.id_of(broker)}


async def _at_rest(trio: Trio, name: str) -> None:
    deadline = time.monotonic() + REST_S
    while time.monotonic() < deadline:
        request = pb.GetRequest(key=f"/storage/topics{name}/state")
        response = await trio.brokers[0].meta.Get(request, timeout=10.0)
        if response.HasField("kv"):
            state = msgspec.json.decode(response.kv.value, type=TopicState)
            if state.at_rest and state.end:
                return
        await asyncio.sleep(POLL_S)
    raise ProcessFailedError(f"{name} is not at rest after {REST_S:.0f} s")
