"""Calls to ``bench.echo``: the floor under every RPC in Python."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from bench import echo
from bench.load import EOF, channel_to
from bench.processes import Child, free_ports
from bench.samples import Sample, closed_loop


@contextlib.asynccontextmanager
async def echo_server(folder: Path) -> AsyncIterator[str]:
    """Its address."""
    (port,) = free_ports(1)
    server = Child([sys.executable, "-m", "bench.echo", str(port)], folder / "echo.log")
    try:
        address = f"127.0.0.1:{port}"
        async with channel_to(address) as channel:
            await asyncio.wait_for(channel.channel_ready(), 20)
        yield address
    finally:
        await server.stop()


async def unary(address: str, value: bytes, *, in_flight: int, seconds: float) -> Sample:
    async with channel_to(address) as channel:
        call = channel.unary_unary(echo.UNARY)
        await call(value)
        return await closed_loop(lambda _: call(value), in_flight=in_flight, seconds=seconds)


async def stream(address: str, value: bytes, *, in_flight: int, seconds: float) -> Sample:
    """Messages on one stream, ``in_flight`` of them unanswered; echoes come back in order, so the oldest
    waits first."""
    latencies: list[float] = []
    started = time.perf_counter()
    async with channel_to(address) as channel:
        call = channel.stream_stream(echo.STREAM)()
        gate = asyncio.Semaphore(in_flight)
        sent: list[float] = []

        async def send() -> None:
            while time.perf_counter() - started < seconds:
                await gate.acquire()
                sent.append(time.perf_counter())
                await call.write(value)
            await call.done_writing()

        sending = asyncio.create_task(send())
        try:
            while await call.read() is not EOF:
                latencies.append(time.perf_counter() - sent[len(latencies)])
                gate.release()
        finally:
            sending.cancel()
    return Sample(len(latencies), time.perf_counter() - started, latencies)
