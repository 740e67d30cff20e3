"""Durable puts: acknowledged once a majority has the entry on disk, applied at the node that was called.

Sava is embedded, so its rows call the store as the broker around it does, in this process; etcd is called
over its gRPC API by a client that costs next to nothing. The rows "from outside" take the same way into Sava
that etcd's clients take into etcd: the admin port's gRPC service, called by the same client, at a leader that
is a broker process of its own."""

from __future__ import annotations

from bench import etcd
from bench.clusters import etcd_or_none
from bench.plan import IN_FLIGHT, VALUE, Plan
from bench.report import Quantity, Row, Target, duration
from bench.samples import Contestant, Figure, Sample, closed_loop, interleave
from bench.sava import SavaCluster

SECTION = "puts"
AT_LEAST_ETCD = Target("at least etcd's rate", at_least=1.0)
NEAR_ETCD = Target("at most 1.5× etcd's p50", at_most=1.5)


async def run(plan: Plan) -> list[Row]:
    async with SavaCluster(plan.folder / "puts-sava") as sava, etcd_or_none(plan, "puts-etcd") as other:
        await sava.lead_here()
        at_leader = await interleave(plan.rounds, _contestants(plan, sava, other, through="leader"))
        await sava.lead_elsewhere()
        at_follower = await interleave(plan.rounds, _contestants(plan, sava, other, through="follower"))
        outside = await interleave(plan.rounds, _outside(plan, sava))
    return [
        _rate("durable put", at_leader, AT_LEAST_ETCD),
        _latency("durable put", at_leader, NEAR_ETCD),
        _rate("durable put through a follower", at_follower),
        _latency("durable put through a follower", at_follower),
        _rate("durable put from outside, through the admin gRPC", at_leader | outside),
        _latency("durable put from outside, through the admin gRPC", at_leader | outside),
    ]


def _contestants(
    plan: Plan, sava: SavaCluster, other: etcd.EtcdCluster | None, *, through: str
) -> dict[str, Contestant]:
    def ours(in_flight: int) -> Contestant:
        return lambda: closed_loop(sava.put, in_flight=in_flight, seconds=plan.seconds)

    def theirs(cluster: etcd.EtcdCluster, in_flight: int) -> Contestant:
        async def contestant() -> Sample:
            leader = await cluster.leader()
            node = leader if through == "leader" else (await cluster.followers())[0]
            return await etcd.puts(node, VALUE, in_flight=in_flight, seconds=plan.seconds)

        return contestant

    found: dict[str, Contestant] = {}
    for in_flight in (IN_FLIGHT, 1):
        found[f"sava {in_flight}"] = ours(in_flight)
        if other is not None:
            found[f"etcd {in_flight}"] = theirs(other, in_flight)
    return found


def _outside(plan: Plan, sava: SavaCluster) -> dict[str, Contestant]:
    def ours(in_flight: int) -> Contestant:
        async def contestant() -> Sample:
            leader = await sava.leading_broker()
            return await leader.puts(VALUE, in_flight=in_flight, seconds=plan.seconds)

        return contestant

    return {f"sava {in_flight}": ours(in_flight) for in_flight in (IN_FLIGHT, 1)}


def _rate(name: str, figures: dict[str, Figure], target: Target | None = None) -> Row:
    def quantity(who: str) -> Quantity | None:
        figure = figures.get(f"{who} {IN_FLIGHT}")
        return Quantity(figure.rate, "per second", f"p99 {duration(figure.p99)}") if figure else None

    return Row(SECTION, f"{name}, {IN_FLIGHT} in flight", quantity("sava"), quantity("etcd"), target)


def _latency(name: str, figures: dict[str, Figure], target: Target | None = None) -> Row:
    def quantity(who: str) -> Quantity | None:
        figure = figures.get(f"{who} 1")
        return figure.latency() if figure else None

    return Row(SECTION, f"{name}, 1 in flight: p50", quantity("sava"), quantity("etcd"), target)
