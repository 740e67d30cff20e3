"""Brokers that are stopped with their connections open (SIGSTOP), under a produce loop for each topic."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path

from sava.client import Client
from tests.support.brokers import BrokerProcess, Brokers
from tests.support.waiting import PATIENCE_S, until

PAUSE_S = 0.02
LEAVE_S = 5.0
"""In which a client must have left a stopped broker: 2 s on a machine that has nothing else to do."""


class Load:
    """One message at a time into one topic; when each was acknowledged."""

    def __init__(self, client: Client, topic: str) -> None:
        self.topic = topic
        self.acked: list[float] = []
        self.sent = 0
        self._client = client
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        async with self._client.producer(self.topic, linger_ms=0, timeout=PATIENCE_S) as producer:
            while not self._stopping.is_set():
                await producer.send(b"%d" % self.sent)
                self.sent += 1
                self.acked.append(time.monotonic())
                await asyncio.sleep(PAUSE_S)

    async def progressed(self, messages: int = 5) -> None:
        wanted = len(self.acked) + messages

        async def has_more() -> bool:
            if self._task.done():
                self._task.result()
            return len(self.acked) >= wanted

        await until(has_more, f"{self.topic} takes messages")

    def longest_gap(self, since: float) -> float:
        times = [since, *(at for at in self.acked if at > since)]
        return max((late - early for early, late in pairwise(times)), default=0.0)

    async def finish(self) -> None:
        """All that was acknowledged is there, once, in order."""
        self._stopping.set()
        await self._task
        async with self._client.reader(self.topic, end="latest") as reader:
            found = [message.payload async for message in reader]
        assert found == [b"%d" % number for number in range(self.sent)]


async def test_a_stopped_mirror_delays_no_topic_of_another_owner(
    tmp_path: Path,
) -> None:
    """Schedule: three brokers with topics each. One that does not lead is stopped: it owns some topics, and
    mirrors the others. Topics of others go on as if nothing had happened. Producers of its own topics leave
    it long before gRPC's keepalive would tell them (15 s), and continue when another broker has their topic.
    Then it continues, and the next one is stopped at once: the first is a mirror that the remaining owner
    avoids, and is all that this owner has left."""
    async with Brokers(3, tmp_path, upload_interval_s=3600) as cluster:
        topics = [f"/default/t{number}" for number in range(6)]
        for topic in topics:
            await cluster.create(topic)
        for topic in topics:
            await cluster.served(topic)
        first, second = [each for each in cluster.brokers if each is not await cluster.leader()]
        async with cluster.sava_client() as client:
            loads = [Load(client, topic) for topic in topics]
            for load in loads:
                await load.progressed(30)
            for victim in (first, second):
                await _stop_and_continue(cluster, victim, loads)
            for load in loads:
                await load.finish()


async def _stop_and_continue(cluster: Brokers, victim: BrokerProcess, loads: list[Load]) -> None:
    number = await cluster.id_of(victim)
    asked = next(each for each in cluster.brokers if each is not victim)
    own = {
        load.topic
        for load in loads
        if (await cluster.describe(load.topic, through=asked)).broker_id == number
    }
    victim.pause()
    began = time.monotonic()
    moved = 0.0

    async def are_elsewhere() -> bool:
        described = [await cluster.describe(topic, through=asked) for topic in own]
        return all(each.broker_id not in (0, number) and each.state == "open" for each in described)

    try:
        await until(are_elsewhere, "another broker has its topics")
        moved = time.monotonic() - began
        for load in loads:
            await load.progressed()
    finally:
        victim.resume()
    gaps = {load.topic: load.longest_gap(began) for load in loads}
    print(f"served elsewhere after {moved:.2f} s; gaps", {topic: f"{gap:.2f}" for topic, gap in gaps.items()})
    for topic, gap in gaps.items():
        if topic in own:
            assert gap < max(moved, LEAVE_S) + 2.0, "its producer left the silent broker long before"
        else:
            assert gap < LEAVE_S, "its owner acknowledges with the other mirror"
