"""Context: what the disk and gRPC cost by themselves, in the same run. No store can be faster than these on
this machine.

``fdatasync`` is measured twice: at the growing end of a file, where the file's new size must become durable
too, and inside space allocated before, where only the data must."""

from __future__ import annotations

import asyncio

from bench import echo, echo_client
from bench.disk import sync_many
from bench.load import Load
from bench.plan import IN_FLIGHT, VALUE, Plan
from bench.report import Quantity, Row, duration
from bench.samples import Contestant, Figure, Sample, interleave

SECTION = "context"
ALLOCATED_BYTES = 1 << 20


async def run(plan: Plan) -> list[Row]:
    rows = [
        Row(SECTION, "fdatasync after an append of 200 B", (await _syncs(plan, allocated=0)).latency()),
        Row(
            SECTION,
            "fdatasync after 200 B into allocated space",
            (await _syncs(plan, allocated=ALLOCATED_BYTES)).latency(),
        ),
    ]
    async with echo_client.echo_server(plan.folder) as address:
        figures = await interleave(plan.rounds, _contestants(address, plan))
    for name, figure in figures.items():
        rate = Quantity(figure.rate, "per second", f"p50 {duration(figure.p50)}")
        rows.append(Row(SECTION, f"grpc.aio echo, {name}", rate))
    return rows


async def _syncs(plan: Plan, *, allocated: int) -> Figure:
    path = plan.folder / "fdatasync"
    samples = [
        await asyncio.to_thread(sync_many, path, VALUE, allocated=allocated) for _ in range(plan.rounds)
    ]
    return Figure.of(samples)


def _contestants(address: str, plan: Plan) -> dict[str, Contestant]:
    def unary(in_flight: int) -> Contestant:
        return lambda: echo_client.unary(address, VALUE, in_flight=in_flight, seconds=plan.seconds)

    def stream(in_flight: int) -> Contestant:
        return lambda: echo_client.stream(address, VALUE, in_flight=in_flight, seconds=plan.seconds)

    return {
        "unary, 1 in flight": unary(1),
        f"unary, {IN_FLIGHT} in flight": unary(IN_FLIGHT),
        f"unary, {IN_FLIGHT} in flight, called by h2load": lambda: _loaded(address, plan),
        "stream, 1 in flight": stream(1),
        f"stream, {IN_FLIGHT} in flight": stream(IN_FLIGHT),
    }


async def _loaded(address: str, plan: Plan) -> Sample:
    return await Load(address).run(
        echo.UNARY, VALUE, in_flight=IN_FLIGHT, seconds=plan.seconds, least_response=len(VALUE)
    )
