"""Copies: what it costs that two disks of three have a message before it is acknowledged.

Two clusters of three brokers on this one machine, one of them without copies (``journal.write_quorum: 1``),
are measured in turn through Sava's own client. The copies are written to the same disk and by the same cores
as everything else here: on machines of their own they would cost a round trip and no more."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Final

from bench.plan import Plan
from bench.report import Quantity, Row, Target
from bench.rows.broker.shape import seconds, topic
from bench.samples import Contestant, Figure, Sample, interleave
from bench.trio import Trio
from bench.worker import Worker

SECTION: Final = "journal"
THROUGHPUT = Target("at least 60 % of without copies", at_least=0.6)
LATENCY = Target("at most 2.5× without copies", at_most=2.5)
PEER: Final = "no copies"


async def run(plan: Plan) -> list[Row]:
    async with AsyncExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, journal in (("copies", {}), ("alone", {"write_quorum": 1})):
            trio = await stack.enter_async_context(Trio(plan.folder / name, journal=journal))
            worker = Worker("sava", plan.folder, trio.addresses)
            workers[name] = await stack.enter_async_context(worker)

        def contestants(job: str) -> dict[str, Contestant]:
            return {name: _contestant(worker, job, plan) for name, worker in workers.items()}

        latencies = await interleave(plan.rounds, contestants("latency"))
        rates = await interleave(plan.rounds, contestants("publish_many"))
    return [_throughput(rates), _latency(latencies)]


def _contestant(worker: Worker, job: str, plan: Plan) -> Contestant:
    async def measured() -> Sample:
        return await worker.sample(job, topic=topic("copies"), seconds=seconds(plan))

    return measured


def _throughput(figures: dict[str, Figure]) -> Row:
    def rate(figure: Figure) -> Quantity:
        return Quantity(figure.rate, "per second", f"{figure.lowest_rate:,.0f} .. {figure.highest_rate:,.0f}")

    return Row(
        SECTION,
        "publish, send_many, batches of 1,000, two of three disks",
        rate(figures["copies"]),
        rate(figures["alone"]),
        THROUGHPUT,
        peer_name=PEER,
    )


def _latency(figures: dict[str, Figure]) -> Row:
    return Row(
        SECTION,
        "publish, 1 in flight, two of three disks: p50",
        figures["copies"].latency(),
        figures["alone"].latency(),
        LATENCY,
        peer_name=PEER,
    )
