"""One hundred thousand keys: restart, memory, and puts while a snapshot is taken.

Restart: one node is killed with SIGKILL and started again; the clock runs from the start of the process until
it answers a linearizable read of the last key written. It has a snapshot to load and ``TAIL_PUTS`` log
entries to replay on top.

Memory: resident bytes of the largest node process after all that.

Snapshot: puts are called 200 times a second, whatever happens to earlier ones, while all three nodes take
snapshots at the same time, as they do in life, where each counts the same log entries. A snapshot's
time ends 0.2 s after it is durable, because old files are deleted then. etcd has no like step: its state is
a database file that is always on disk."""

from __future__ import annotations

import asyncio
import statistics
import time

from bench import etcd
from bench.clusters import etcd_or_none
from bench.plan import VALUE, Plan
from bench.report import Quantity, Row, Target, duration
from bench.samples import open_loop, percentile
from bench.sava import SavaCluster

SECTION = "scale"
PUTS_PER_SECOND = 200.0
TAIL_PUTS = 5_000
PAUSE_S = 0.2

RESTART = Target("at most 3 s", at_most=3.0, of_peer=False)
MEMORY = Target("less than 400 MB", at_most=400e6, of_peer=False)
SNAPSHOT = Target("p99 at most 100 ms", at_most=0.100, of_peer=False)


async def run(plan: Plan) -> list[Row]:
    theirs_restart = theirs_memory = None
    async with SavaCluster(plan.folder / "scale-sava") as sava:
        await sava.lead_here()
        await sava.fill(plan.keys)
        await sava.snapshot_everywhere()
        await sava.put_many(TAIL_PUTS)
        restarts = [await _restart_sava(sava, number) for number in range(plan.restarts)]
        calm, during = await _puts_while_snapshots(plan, sava)
        memory = max(broker.child.resident_bytes() for broker in sava.brokers)
    async with etcd_or_none(plan, "scale-etcd") as other:
        if other is not None:
            await etcd.fill(await other.leader(), plan.keys, VALUE)
            times = [await _restart_etcd(other, number) for number in range(plan.restarts)]
            theirs_restart = _median(times)
            sizes = [node.child.resident_bytes() for node in other.nodes if node.child is not None]
            theirs_memory = Quantity(max(sizes), "bytes")
    keys = f"{plan.keys:,} keys"
    calm_p99 = f"p99 {duration(percentile(calm, 0.99))} without"
    return [
        Row(SECTION, f"{keys}: restart to serving", _median(restarts), theirs_restart, RESTART),
        Row(SECTION, f"{keys}: resident memory", Quantity(memory, "bytes"), theirs_memory, MEMORY),
        Row(
            SECTION,
            f"{keys}: put while a snapshot is taken: p99",
            Quantity(percentile(during, 0.99), "seconds", f"slowest {duration(during[-1])}, {calm_p99}"),
            None,
            SNAPSHOT,
        ),
    ]


def _median(times: list[float]) -> Quantity:
    return Quantity(statistics.median(times), "seconds", f"slowest {duration(max(times))}")


async def _restart_sava(sava: SavaCluster, number: int) -> float:
    broker = sava.brokers[number % len(sava.brokers)]
    await sava.put(number)
    broker.child.kill()
    started = time.perf_counter()
    broker.start()
    await broker.serving(sava.key(number))
    return time.perf_counter() - started


async def _restart_etcd(cluster: etcd.EtcdCluster, number: int) -> float:
    node = (await cluster.followers())[number % 2]
    assert node.child is not None
    node.child.kill()
    started = time.perf_counter()
    cluster.restart(node)
    await node.connect()
    await cluster.ready()
    return time.perf_counter() - started


async def _puts_while_snapshots(plan: Plan, sava: SavaCluster) -> tuple[list[float], list[float]]:
    """Sorted latencies of the puts that were due outside and inside the time of snapshots and their
    aftermath."""
    taken: list[tuple[float, float]] = []
    end = time.perf_counter() + plan.snapshot_seconds

    async def snapshots() -> None:
        while time.perf_counter() < end:
            await asyncio.sleep(PAUSE_S)
            began = time.perf_counter()
            await sava.snapshot_everywhere()
            # What the snapshot made superfluous is deleted right after it, and that may hurt too.
            await asyncio.sleep(PAUSE_S)
            taken.append((began, time.perf_counter()))

    task = asyncio.create_task(snapshots())
    try:
        done = await open_loop(sava.put, per_second=PUTS_PER_SECOND, until=task.done)
    finally:
        task.cancel()
    await task
    during = [latency for due, latency in done if any(began <= due <= ended for began, ended in taken)]
    calm = [latency for due, latency in done if not any(began <= due <= ended for began, ended in taken)]
    return sorted(calm), sorted(during)
