"""Context: what the disk and gRPC cost by themselves, in the same run. No store can be faster than these on
this machine.

``fdatasync`` is measured twice: at the growing end of a file, where the file's new size must become durable
too, and inside space allocated before, where only the data must."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from bench import echo
from bench.load import EOF, Load, channel_to
from bench.plan import IN_FLIGHT, VALUE, Plan
from bench.processes import Child, free_ports
from bench.report import Quantity, Row, duration
from bench.samples import Figure, Sample, closed_loop, interleave

SECTION = "context"
SYNCS = 300
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
    async with _echo_server(plan) as address:
        figures = await interleave(
            plan.rounds,
            {
                "unary, 1 in flight": lambda: _unary(address, plan, in_flight=1),
                f"unary, {IN_FLIGHT} in flight": lambda: _unary(address, plan, in_flight=IN_FLIGHT),
                f"unary, {IN_FLIGHT} in flight, called by h2load": lambda: _loaded(address, plan),
                "stream, 1 in flight": lambda: _stream(address, plan, in_flight=1),
                f"stream, {IN_FLIGHT} in flight": lambda: _stream(address, plan, in_flight=IN_FLIGHT),
            },
        )
    for name, figure in figures.items():
        rate = Quantity(figure.rate, "per second", f"p50 {duration(figure.p50)}")
        rows.append(Row(SECTION, f"grpc.aio echo, {name}", rate))
    return rows


async def _syncs(plan: Plan, *, allocated: int) -> Figure:
    path = plan.folder / "fdatasync"
    return Figure.of([await asyncio.to_thread(_sync_many, path, allocated) for _ in range(plan.rounds)])


def _sync_many(path: Path, allocated: int) -> Sample:
    latencies = []
    started = time.perf_counter()
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        if allocated:
            os.pwrite(file, bytes(allocated), 0)
            os.fsync(file)
        for number in range(SYNCS):
            before = time.perf_counter()
            os.pwrite(file, VALUE, number * len(VALUE))
            os.fdatasync(file)
            latencies.append(time.perf_counter() - before)
    finally:
        os.close(file)
        path.unlink()
    return Sample(SYNCS, time.perf_counter() - started, latencies)


@contextlib.asynccontextmanager
async def _echo_server(plan: Plan) -> AsyncIterator[str]:
    (port,) = free_ports(1)
    server = Child([sys.executable, "-m", "bench.echo", str(port)], plan.folder / "echo.log")
    try:
        address = f"127.0.0.1:{port}"
        async with channel_to(address) as channel:
            await asyncio.wait_for(channel.channel_ready(), 20)
        yield address
    finally:
        await server.stop()


async def _unary(address: str, plan: Plan, *, in_flight: int) -> Sample:
    async with channel_to(address) as channel:
        call = channel.unary_unary(echo.UNARY)
        await call(VALUE)
        return await closed_loop(lambda _: call(VALUE), in_flight=in_flight, seconds=plan.seconds)


async def _loaded(address: str, plan: Plan) -> Sample:
    return await Load(address).run(
        echo.UNARY, VALUE, in_flight=IN_FLIGHT, seconds=plan.seconds, least_response=len(VALUE)
    )


async def _stream(address: str, plan: Plan, *, in_flight: int) -> Sample:
    """Messages on one stream, ``in_flight`` of them unanswered; echoes come back in order, so the oldest
    waits first."""
    latencies: list[float] = []
    started = time.perf_counter()
    async with channel_to(address) as channel:
        stream = channel.stream_stream(echo.STREAM)()
        gate = asyncio.Semaphore(in_flight)
        sent: list[float] = []

        async def send() -> None:
            while time.perf_counter() - started < plan.seconds:
                await gate.acquire()
                sent.append(time.perf_counter())
                await stream.write(VALUE)
            await stream.done_writing()

        sending = asyncio.create_task(send())
        try:
            while await stream.read() is not EOF:
                latencies.append(time.perf_counter() - sent[len(latencies)])
                gate.release()
        finally:
            sending.cancel()
    return Sample(len(latencies), time.perf_counter() - started, latencies)
