"""Election: the leader's process is killed with SIGKILL, and a client at a survivor writes until a write
succeeds.

All nodes are processes with default timeouts, and both systems notice a silent leader after 1 to 2 s by
default. The clock runs from the kill. The client calls at once and then anew every 50 ms without giving up
the earlier calls; the first success counts. So the figure says when the cluster serves again. One call alone
may take longer: etcd holds a write that was on its way to the dead leader for 7 s before it fails, Sava sends
it again to the new leader.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import Any

from bench import etcd
from bench.clusters import etcd_or_none
from bench.plan import VALUE, Plan
from bench.processes import ProcessFailedError
from bench.report import Quantity, Row, Target, duration
from bench.sava import SavaCluster

SECTION = "election"
LIMIT_S = 3.0
GIVE_UP_S = 30.0
AGAIN_S = 0.05
CALL_S = 10.0


async def run(plan: Plan) -> list[Row]:
    ours, theirs = [], []
    async with (
        SavaCluster(plan.folder / "election-sava", hosted=False) as sava,
        etcd_or_none(plan, "election-etcd") as other,
    ):
        for number in range(plan.kills):
            ours.append(await _kill_sava(sava, number))
            if other is not None:
                theirs.append(await _kill_etcd(other, number))
    return [
        Row(
            SECTION,
            f"leader killed, write through a survivor: slowest of {plan.kills}",
            _slowest(ours),
            _slowest(theirs) if theirs else None,
            Target(f"within {LIMIT_S:.0f} s, every time", at_most=LIMIT_S, of_peer=False),
        )
    ]


def _slowest(times: list[float]) -> Quantity:
    return Quantity(max(times), "seconds", f"p50 {duration(statistics.median(times))}")


async def _kill_sava(cluster: SavaCluster, number: int) -> float:
    leader = await cluster.leading_broker()
    survivors = [broker for broker in cluster.brokers if broker is not leader]
    survivor = survivors[number % len(survivors)]
    await survivor.put("/election/before", VALUE)
    leader.child.kill()
    seconds = await _until_written(lambda: survivor.put("/election/after", VALUE, timeout_s=CALL_S))
    leader.start()
    await cluster.ready()
    return seconds


async def _kill_etcd(cluster: etcd.EtcdCluster, number: int) -> float:
    leader = await cluster.leader()
    survivors = [node for node in cluster.nodes if node is not leader]
    survivor = survivors[number % len(survivors)]
    await survivor.call(etcd.PUT, etcd.put_request("election/before", VALUE))
    assert leader.child is not None
    leader.child.kill()
    request = etcd.put_request("election/after", VALUE)
    seconds = await _until_written(lambda: survivor.call(etcd.PUT, request, timeout_s=CALL_S))
    cluster.restart(leader)
    await leader.connect()
    await cluster.ready()
    return seconds


async def _until_written(write: Callable[[], Coroutine[Any, Any, object]]) -> float:
    """Seconds from now until the first of the calls, one more every ``AGAIN_S``, has succeeded."""
    killed = time.perf_counter()
    calls: set[asyncio.Task[object]] = set()
    try:
        while time.perf_counter() - killed < GIVE_UP_S:
            calls.add(asyncio.create_task(write()))
            done, calls = await asyncio.wait(calls, timeout=AGAIN_S, return_when=asyncio.FIRST_COMPLETED)
            if any(call.exception() is None for call in done):
                return time.perf_counter() - killed
            if done:
                await asyncio.sleep(AGAIN_S)
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    raise ProcessFailedError(f"no write succeeded within {GIVE_UP_S:.0f} s of the leader's death")
