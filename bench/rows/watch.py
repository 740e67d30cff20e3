"""Watch delivery: from the moment that a put is called until its event is in the watcher's hands, one put at
a time.

Sava's watcher sits in the process of the node, as brokers' watchers do; etcd's sits behind its gRPC API, and
both its put and its watch go through grpc.aio. The row "from outside" gives Sava the very same way, at a
leader in another process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from bench import etcd
from bench.arrivals import arriving
from bench.clusters import etcd_or_none
from bench.plan import VALUE, Plan
from bench.report import Quantity, Row, Target
from bench.samples import Contestant, Figure, Sample, interleave
from bench.sava import SavaCluster

SECTION = "watch"
KEY = "/watched/key"
NO_SLOWER = Target("no slower than etcd", at_most=1.0)


async def run(plan: Plan) -> list[Row]:
    async with SavaCluster(plan.folder / "watch-sava") as sava, etcd_or_none(plan, "watch-etcd") as other:
        await sava.lead_here()
        contestants: dict[str, Contestant] = {"sava": lambda: _embedded(sava, plan)}
        if other is not None:
            contestants["etcd"] = lambda: _etcd(other, plan)
        figures = await interleave(plan.rounds, contestants)
        await sava.lead_elsewhere()
        figures |= await interleave(
            plan.rounds,
            {"sava follower": lambda: _embedded(sava, plan), "sava outside": lambda: _outside(sava, plan)},
        )
    theirs = _quantity(figures.get("etcd"))
    return [
        Row(SECTION, "watch delivery: p50", _quantity(figures["sava"]), theirs, NO_SLOWER),
        Row(SECTION, "watch delivery at a follower: p50", _quantity(figures["sava follower"]), theirs),
        Row(SECTION, "watch delivery from outside: p50", _quantity(figures["sava outside"]), theirs),
    ]


def _quantity(figure: Figure | None) -> Quantity | None:
    return figure.latency() if figure else None


async def _embedded(sava: SavaCluster, plan: Plan) -> Sample:
    async with _local_watch(sava) as arrivals:
        return await _deliveries(lambda: sava.store.put(KEY, VALUE), arrivals, plan.watched_puts)


@contextlib.asynccontextmanager
async def _local_watch(sava: SavaCluster) -> AsyncIterator[asyncio.Queue[float]]:
    watch = sava.store.watch(KEY)

    async def events() -> AsyncIterator[int]:
        async for batch in watch:
            yield len(batch.events)

    async with arriving(events(), watch.close) as times:
        yield times


async def _outside(sava: SavaCluster, plan: Plan) -> Sample:
    leader = await sava.leading_broker()
    async with leader.watching(KEY) as arrivals:
        return await _deliveries(lambda: leader.put(KEY, VALUE), arrivals, plan.watched_puts)


async def _etcd(cluster: etcd.EtcdCluster, plan: Plan) -> Sample:
    leader = await cluster.leader()
    request = etcd.put_request(KEY, VALUE)
    async with etcd.watching(leader, KEY) as arrivals:
        return await _deliveries(lambda: leader.call(etcd.PUT, request), arrivals, plan.watched_puts)


async def _deliveries(
    put: Callable[[], Awaitable[object]], arrivals: asyncio.Queue[float], count: int
) -> Sample:
    latencies = []
    started = time.perf_counter()
    for _ in range(count):
        called = time.perf_counter()
        await put()
        latencies.append(await asyncio.wait_for(arrivals.get(), 10.0) - called)
    return Sample(count, time.perf_counter() - started, latencies)
