"""Reads of one key with a value of 200 bytes.

``local`` in Sava and ``serializable`` in etcd promise the same: what this node has applied, perhaps a moment
behind. Here embedding pays: Sava's is a look-up in the caller's own process, etcd's is a call to another one.
Linearizable reads confirm with a majority that the leader still leads, in both; concurrent ones share that
round."""

from __future__ import annotations

import asyncio
import time

from bench import etcd
from bench.clusters import etcd_or_none
from bench.plan import IN_FLIGHT, VALUE, Plan
from bench.report import Quantity, Row, Target, duration
from bench.samples import Contestant, Figure, Sample, closed_loop, interleave
from bench.sava import SavaCluster

SECTION = "reads"
FIFTY_TIMES = Target("at least 50× etcd's serializable rate", at_least=50.0)
AT_LEAST_ETCD = Target("at least etcd's rate", at_least=1.0)

SLICE = 2_000
"""Local reads between two turns of the event loop: a millisecond or so, so that the node keeps its
heartbeats."""


async def run(plan: Plan) -> list[Row]:
    async with SavaCluster(plan.folder / "reads-sava") as sava, etcd_or_none(plan, "reads-etcd") as other:
        await sava.lead_here()
        for number in range(IN_FLIGHT):
            await sava.put(number)
        contestants: dict[str, Contestant] = {
            "sava local": lambda: _local_reads(sava, plan.seconds),
            "sava linearizable": lambda: _linearizable(sava, plan, IN_FLIGHT),
            "sava linearizable 1": lambda: _linearizable(sava, plan, 1),
        }
        if other is not None:
            leader = await other.leader()
            await etcd.puts(leader, VALUE, in_flight=1, seconds=0.1)
            for serializable, name in ((True, "local"), (False, "linearizable")):
                contestants[f"etcd {name}"] = _etcd_reads(
                    other, plan, serializable=serializable, in_flight=64
                )
            contestants["etcd linearizable 1"] = _etcd_reads(other, plan, serializable=False, in_flight=1)
        figures = await interleave(plan.rounds, contestants)
        await sava.lead_elsewhere()
        figures |= await interleave(plan.rounds, _away_from_the_leader(plan, sava))
    return [
        _row("local read", "local", "local", figures, FIFTY_TIMES),
        _row(
            f"linearizable read, {IN_FLIGHT} in flight",
            "linearizable",
            "linearizable",
            figures,
            AT_LEAST_ETCD,
        ),
        _row("linearizable read, 1 in flight", "linearizable 1", "linearizable 1", figures),
        _row(f"linearizable read at a follower, {IN_FLIGHT} in flight", "follower", "linearizable", figures),
        _row(f"local read from outside, {IN_FLIGHT} in flight", "outside local", "local", figures),
        _row(f"linearizable read from outside, {IN_FLIGHT} in flight", "outside", "linearizable", figures),
    ]


def _away_from_the_leader(plan: Plan, sava: SavaCluster) -> dict[str, Contestant]:
    async def outside(local: bool) -> Sample:
        leader = await sava.leading_broker()
        return await leader.gets(local=local, in_flight=IN_FLIGHT, seconds=plan.seconds)

    return {
        "sava follower": lambda: _linearizable(sava, plan, IN_FLIGHT),
        "sava outside local": lambda: outside(local=True),
        "sava outside": lambda: outside(local=False),
    }


async def _local_reads(sava: SavaCluster, seconds: float) -> Sample:
    keys = [sava.key(number % IN_FLIGHT) for number in range(SLICE)]
    get = sava.store.local.get
    count, spent = 0, 0.0
    while spent < seconds / 2:
        before = time.perf_counter()
        for key in keys:
            get(key)
        spent += time.perf_counter() - before
        count += SLICE
        await asyncio.sleep(0)
    assert get(keys[0]) is not None
    return Sample(count, spent)


async def _linearizable(sava: SavaCluster, plan: Plan, in_flight: int) -> Sample:
    return await closed_loop(
        lambda number: sava.store.get(sava.key(number % IN_FLIGHT)), in_flight=in_flight, seconds=plan.seconds
    )


def _etcd_reads(cluster: etcd.EtcdCluster, plan: Plan, *, serializable: bool, in_flight: int) -> Contestant:
    async def contestant() -> Sample:
        leader = await cluster.leader()
        return await etcd.gets(leader, serializable=serializable, in_flight=in_flight, seconds=plan.seconds)

    return contestant


def _row(name: str, ours: str, theirs: str, figures: dict[str, Figure], target: Target | None = None) -> Row:
    return Row(SECTION, name, _rate(figures[f"sava {ours}"]), _rate(figures.get(f"etcd {theirs}")), target)


def _rate(figure: Figure | None) -> Quantity | None:
    if figure is None:
        return None
    return Quantity(figure.rate, "per second", f"p50 {duration(figure.p50)}" if figure.p50 else "")
