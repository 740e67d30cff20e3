"""Replication between two clusters of one broker each, by one runner with Spark on two cores (``local[2]``).

All of it shares the machine: both brokers, the runner, and whoever produces and reads. What is copied is
counted by the offsets of the target, and how late it is by a reader there, from the publish times of the
messages."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from bench.plan import Plan
from bench.processes import Child, ProcessFailedError
from bench.report import Quantity, Row, Target, duration
from bench.samples import percentile
from bench.servers import Server
from bench.standalone import standalone_broker
from bench.worker import Worker
from sava.api.admin_client import AdminClient
from sava.pipeline.cluster import ClusterAccess, ClusterClient
from sava.proto import pipelines_pb2
from sava.proto import replication_pb2 as pb

SECTION: Final = "replication"
REMOTE: Final = "west"
LAG_RATE: Final = 1_000
LIVE_RATE: Final = 100_000
READY_S: Final = 60.0
PATIENCE_S: Final = 120.0
POLL_S: Final = 0.02

HISTORY = Target("at least 100,000/s", at_least=1e5, of_peer=False)
LIVE = Target("at least 50,000/s", at_least=5e4, of_peer=False)
LAG_P50 = Target("p50 at most 1 s", at_most=1.0, of_peer=False)
LAG_P99 = Target("p99 at most 3 s", at_most=3.0, of_peer=False)
MANY_P50 = replace(LAG_P50, is_aim=True)
MANY_P99 = replace(LAG_P99, is_aim=True)


@dataclass(frozen=True)
class Sizes:
    history: int
    live_s: float
    lag_s: float
    topics: int = 100


FULL = Sizes(history=2_000_000, live_s=15.0, lag_s=30.0)
QUICK = Sizes(history=500_000, live_s=5.0, lag_s=8.0)


async def run(plan: Plan) -> list[Row]:
    sizes = QUICK if plan.quick else FULL
    async with (
        standalone_broker(plan.folder, SAVA__CLUSTER_NAME="east") as east,
        standalone_broker(plan.folder, SAVA__CLUSTER_NAME="west") as west,
        AdminClient(east.admin) as admin,
        Worker("sava", plan.folder, east.address) as producer,
        Worker("sava", plan.folder, west.address) as reader,
    ):
        pair = Pair(east, west, admin, producer, reader)
        await pair.add_remote()
        await producer.do("fill", topic="/default/warm", count=20_000)
        await producer.do("fill", topic="/default/history", count=sizes.history)
        await pair.until_stored("/default/history")
        async with pair.runner(plan):
            await pair.replicate("/default/warm")
            await pair.until_copied("/default/warm", 20_000)
            return [
                await _history(pair, sizes),
                await _live(pair, sizes),
                *await _lag(pair, sizes),
                *await _many(pair, sizes),
            ]


class Pair:
    """Two clusters, and what is done with them."""

    def __init__(
        self, east: Server, west: Server, admin: AdminClient, producer: Worker, reader: Worker
    ) -> None:
        self._east, self._west = east, west
        self._admin = admin
        self.producer, self.reader = producer, reader

    async def add_remote(self) -> None:
        remote = pb.Remote(name=REMOTE, service=self._west.address)
        await self._call(self._admin.replication.AddRemote, remote)

    async def replicate(self, scope: str) -> None:
        policy = pb.ReplicationPolicy(remotes=[REMOTE], start="earliest")
        request = pb.SetReplicationRequest(scope=scope, policy=policy)
        response = await self._call(self._admin.replication.SetReplication, request)
        if not response.is_set:
            raise ProcessFailedError(f"the policy of {scope} was not set: {response}")

    async def pipelines(self) -> int:
        response = await self._call(self._admin.pipelines.ListPipelines, pipelines_pb2.ListPipelinesRequest())
        return len(response.pipelines)

    async def _call(self, method: Any, request: Any) -> Any:
        """Brokers that have just started are not ready at once."""
        return await self._admin.call(method, request, timeout=READY_S)

    @contextlib.asynccontextmanager
    async def runner(self, plan: Plan) -> AsyncIterator[None]:
        command = [sys.executable, "-m", "sava.cli", "pipelines", "run", "--master", "local[2]"]
        options = ["--admin", self._east.admin, "--checkpoints", str(plan.folder / "checkpoints")]
        child = Child([*command, *options], plan.folder / "runner.log")
        try:
            yield
            child.check()
        finally:
            await child.stop()

    # -- how far -------------------------------------------------------------------------------

    async def copied(self, topics: Sequence[str]) -> int:
        """Messages at the target; 0 of topics that are not there."""
        return sum(extent.end for extent in (await _extents(self._west, topics)).values())

    async def until_copied(self, topic: str, count: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while await self.copied([topic]) < count:
            if time.monotonic() > deadline:
                raise ProcessFailedError(f"{topic}: not copied within {PATIENCE_S:g} s")
            await asyncio.sleep(POLL_S)

    async def until_stored(self, topic: str) -> None:
        """All but what is too little for a segment is in segments."""
        before = -1
        while True:
            extent = (await _extents(self._east, [topic]))[topic]
            if extent.stored == before and extent.stored > 0.9 * extent.end:
                return
            before = extent.stored
            await asyncio.sleep(1.0)


async def _extents(server: Server, topics: Sequence[str]) -> dict[str, Any]:
    """Of those that are there."""

    def ask() -> dict[str, Any]:
        link = ClusterClient.of(ClusterAccess(server.address))
        known = {each.topic for each in link.topics()}
        return link.extents([topic for topic in topics if topic in known])

    return await asyncio.to_thread(ask)


async def _history(pair: Pair, sizes: Sizes) -> Row:
    began = time.perf_counter()
    await pair.replicate("/default/history")
    await pair.until_copied("/default/history", sizes.history)
    rate = Quantity(sizes.history / (time.perf_counter() - began), "per second")
    return Row(SECTION, "history of one partition, from its policy to the last message", rate, target=HISTORY)


async def _live(pair: Pair, sizes: Sizes) -> Row:
    """Only what has arrived while it was produced counts."""
    topic = "/default/live"
    await pair.producer.do("fill", topic=topic, count=20_000)
    await pair.replicate(topic)
    await pair.until_copied(topic, 20_000)
    before, began = await pair.copied([topic]), time.perf_counter()
    sent = await pair.producer.do("paced_batches", topic=topic, per_second=LIVE_RATE, seconds=sizes.live_s)
    seconds = time.perf_counter() - began
    rate = Quantity((await pair.copied([topic]) - before) / seconds, "per second")
    produced = f"{sent['count'] / sent['seconds']:,.0f}/s were produced at the same time"
    return Row(SECTION, "live tail of one partition", rate, target=LIVE, note=produced)


async def _lag(pair: Pair, sizes: Sizes) -> list[Row]:
    topic = "/default/lag"
    await pair.producer.do("fill", topic=topic, count=1_000)
    await pair.replicate(topic)
    await pair.until_copied(topic, 1_000)
    lags = await _lags(pair, [topic], sizes)
    return _lag_rows(lags, f"{LAG_RATE:,} messages/s, one topic", LAG_P50, LAG_P99)


async def _many(pair: Pair, sizes: Sizes) -> list[Row]:
    topics = [f"/default/many-{number}" for number in range(sizes.topics)]
    await pair.producer.do("fill_each", prefix="/default/many", topics=sizes.topics, messages=100)
    before = time.perf_counter()
    await pair.replicate("default")
    deadline = time.monotonic() + PATIENCE_S
    while await pair.copied(topics) < 100 * sizes.topics:
        if time.monotonic() > deadline:
            raise ProcessFailedError(f"{sizes.topics} topics: not copied within {PATIENCE_S:g} s")
        await asyncio.sleep(POLL_S)
    taken = duration(time.perf_counter() - before)
    lags = await _lags(pair, topics, sizes)
    name = f"{LAG_RATE:,} messages/s over {sizes.topics} topics"
    pipelines = await pair.pipelines()
    note = f"pipelines: {pipelines}; all topics created and their first 100 messages copied after {taken}"
    return _lag_rows(lags, name, MANY_P50, MANY_P99, note)


async def _lags(pair: Pair, topics: list[str], sizes: Sizes) -> list[float]:
    await pair.reader.do("watch_lags", topics=topics)
    sent = await pair.producer.do("pace_each", topics=topics, per_second=LAG_RATE, seconds=sizes.lag_s)
    await asyncio.sleep(LAG_P99.at_most or 0)
    lags: list[float] = (await pair.reader.do("end_watch"))["lags"]
    if len(lags) < sent["count"]:
        raise ProcessFailedError(f"{sent['count']} messages were produced, and {len(lags)} have come")
    return sorted(lags)


def _lag_rows(
    lags: list[float], name: str, p50_target: Target, p99_target: Target, note: str = ""
) -> list[Row]:
    p50, p99 = percentile(lags, 0.5), percentile(lags, 0.99)
    worst = f"slowest {duration(lags[-1])}"
    return [
        Row(SECTION, f"lag, {name}", Quantity(p50, "seconds"), target=p50_target, note=note),
        Row(SECTION, f"lag, {name}", Quantity(p99, "seconds", worst), target=p99_target),
    ]
