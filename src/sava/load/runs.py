"""The loads as a user asks for them: each from its parameters to its outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from typing import Any, Final

from sava.client import Client
from sava.load.consuming import Consumption, Receivers
from sava.load.figures import Meter, Outcome
from sava.load.metadata import Callers, Calls
from sava.load.producing import Production, produce
from sava.load.tally import Tally
from sava.services.admin_client import AdminClient

TELL_S: Final = 0.2
DRAIN_S: Final = 10.0
"""How long what was published may be on its way to consumers that hear nothing."""

Tell = Callable[[str], None]
"""Takes a line about how far it is, now and then."""


async def run_produce(client: Client, load: Production, tell: Tell) -> Outcome:
    meter = Meter()
    async with _telling(tell, lambda rate: f"published {_progress(meter, rate)}", meter):
        _, seconds = await produce(client, load, meter)
    return Outcome(
        load="produce",
        run=f"{load.run:08x}",
        parameters=_parameters(load),
        flows={"published": meter.flow(seconds)},
    )


async def run_consume(client: Client, load: Consumption, tally: Tally, run: int, tell: Tell) -> Outcome:
    meter = Meter()
    async with (
        _telling(tell, lambda rate: f"consumed {_progress(meter, rate)}{_faults(tally)}", meter),
        Receivers(client, load, tally, meter) as receivers,
    ):
        await receivers.run()
    return Outcome(
        load="consume",
        run=f"{run:08x}",
        parameters=_parameters(load),
        flows={"consumed": meter.flow(receivers.seconds)},
        count=tally.count(),
    )


async def run_latency(client: Client, load: Production, consumption: Consumption, tell: Tell) -> Outcome:
    """Publish and consume at the same time; consumers are there before the first message."""
    published, consumed = Meter(), Meter()
    tally = Tally(by_key=consumption.type == "key_shared", run=load.run)
    async with client.producer(load.topic, reliable=load.reliable, partitions=load.partitions):
        pass  # now there is such a topic to subscribe to
    is_published = False
    waits = replace(consumption, start="latest", count=None, seconds=None, idle_s=None)

    def line(rate: float) -> str:
        p99 = consumed.latency.percentile(99) / 1000
        so_far = f"published {_progress(published, rate)}, consumed {consumed.count:,}"
        return f"{so_far}, p99 {p99:.1f} ms{_faults(tally)}"

    def is_over() -> bool:
        return is_published and (tally.has_all() or receivers.idle_s >= DRAIN_S)

    async with _telling(tell, line, published), Receivers(client, waits, tally, consumed) as receivers:
        receiving = asyncio.create_task(receivers.run(is_over))
        producing = asyncio.create_task(produce(client, load, published))
        try:
            await asyncio.wait((receiving, producing), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()  # it ends by itself only when it cannot go on
            sent, seconds = await producing
            for each in sent:
                tally.sent(each.source, each.end, each.unacknowledged)
            is_published = True
            await receiving
        finally:
            for task in (producing, receiving):
                task.cancel()
            await asyncio.gather(producing, receiving, return_exceptions=True)
    return Outcome(
        load="latency",
        run=f"{load.run:08x}",
        parameters={**_parameters(load), **_parameters(consumption)},
        flows={"published": published.flow(seconds), "consumed": consumed.flow(receivers.seconds)},
        count=tally.count(),
    )


async def run_metadata(client: AdminClient, load: Calls, tell: Tell) -> Outcome:
    meter = Meter()
    async with _telling(tell, lambda rate: f"{load.operation}: {_progress(meter, rate, 'calls')}", meter):
        seconds = await Callers(client, load, meter).run()
    return Outcome(
        load="metadata",
        run=f"{load.run:08x}",
        parameters=_parameters(load),
        flows={"done": meter.flow(seconds)},
    )


@asynccontextmanager
async def _telling(tell: Tell, line: Callable[[float], str], meter: Meter) -> AsyncIterator[None]:
    """Tell while the body runs, with the rate since the last time."""

    async def go_on() -> None:
        at, count = time.perf_counter(), 0
        while True:
            await asyncio.sleep(TELL_S)
            now = time.perf_counter()
            tell(line((meter.count - count) / (now - at)))
            at, count = now, meter.count

    task = asyncio.create_task(go_on(), name="bench: telling")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _progress(meter: Meter, rate: float, what: str = "messages") -> str:
    failed = f", {meter.failed:,} failed" if meter.failed else ""
    return f"{meter.count:,} {what}, {rate:,.0f}/s now{failed}"


def _faults(tally: Tally) -> str:
    count = tally.count()
    found = [
        f"{getattr(count, name):,} {name}" for name in ("duplicates", "reordered") if getattr(count, name)
    ]
    return "".join(f", {each}" for each in found)


def _parameters(load: Production | Consumption | Calls) -> dict[str, Any]:
    given = asdict(load)
    del given["run" if "run" in given else "idle_s"]
    if "size" in given:
        low, high = given["size"]
        given["size"] = low if low == high else f"{low}-{high}"
    return given
