"""The loads as a user asks for them: each from its parameters to its outcome, which is there at any time,
so that whoever breaks a run off still learns what it has found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, replace
from typing import Any, Final, Protocol

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


class Run(Protocol):
    def outcome(self) -> Outcome:
        """What has been found so far; also when the run was broken off."""


class ProduceRun:
    def __init__(self, load: Production) -> None:
        self._load = load
        self._meter = Meter()

    async def go(self, client: Client, tell: Tell) -> None:
        meter = self._meter
        async with _telling(tell, lambda rate: f"published {_progress(meter, rate)}", meter):
            await produce(client, self._load, meter)

    def outcome(self) -> Outcome:
        return Outcome(
            load="produce",
            run=f"{self._load.run:08x}",
            parameters=_parameters(self._load),
            flows={"published": self._meter.flow()},
        )


class ConsumeRun:
    def __init__(self, load: Consumption, tally: Tally, run: int) -> None:
        self._load = load
        self._tally = tally
        self._run = run
        self._meter = Meter()
        self._is_all_read = False

    async def go(self, client: Client, tell: Tell) -> None:
        meter, tally = self._meter, self._tally
        async with (
            _telling(tell, lambda rate: f"consumed {_progress(meter, rate)}{_faults(tally)}", meter),
            Receivers(client, self._load, tally, meter) as receivers,
        ):
            self._is_all_read = await receivers.run()

    def outcome(self) -> Outcome:
        return Outcome(
            load="consume",
            run=f"{self._run:08x}",
            parameters=_parameters(self._load),
            flows={"consumed": self._meter.flow()},
            count=self._tally.count(is_all_read=self._is_all_read),
        )


class LatencyRun:
    """Publish and consume at the same time; consumers are there before the first message."""

    def __init__(self, load: Production, consumption: Consumption) -> None:
        self._load = load
        self._consumption = consumption
        self._published, self._consumed = Meter(), Meter()
        self._tally = Tally(by_key=consumption.type == "key_shared", run=load.run)
        self._is_published = self._is_all_read = False

    async def go(self, client: Client, tell: Tell) -> None:
        load = self._load
        async with client.producer(load.topic, reliable=load.reliable, partitions=load.partitions):
            pass  # now there is such a topic to subscribe to
        waits = replace(self._consumption, start="latest", count=None, seconds=None, idle_s=None)
        async with (
            _telling(tell, self._line, self._published),
            Receivers(client, waits, self._tally, self._consumed) as receivers,
        ):
            await self._go_both_ways(client, receivers)

    async def _go_both_ways(self, client: Client, receivers: Receivers) -> None:
        def is_over() -> bool:
            return self._is_published and (self._tally.has_all() or receivers.idle_s >= DRAIN_S)

        receiving = asyncio.create_task(receivers.run(is_over))
        producing = asyncio.create_task(produce(client, self._load, self._published))
        try:
            await asyncio.wait((receiving, producing), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()  # it ends by itself only when it cannot go on
            for each in await producing:
                self._tally.sent(each.source, each.end, each.unacknowledged)
            self._is_published = True
            self._is_all_read = await receiving
        finally:
            for task in (producing, receiving):
                task.cancel()
            await asyncio.gather(producing, receiving, return_exceptions=True)

    def _line(self, rate: float) -> str:
        p99 = self._consumed.latency.percentile(99) / 1000
        so_far = f"published {_progress(self._published, rate)}, consumed {self._consumed.count:,}"
        return f"{so_far}, p99 {p99:.1f} ms{_faults(self._tally)}"

    def outcome(self) -> Outcome:
        return Outcome(
            load="latency",
            run=f"{self._load.run:08x}",
            parameters={**_parameters(self._load), **_parameters(self._consumption)},
            flows={"published": self._published.flow(), "consumed": self._consumed.flow()},
            count=self._tally.count(is_all_read=self._is_all_read),
        )


class MetadataRun:
    def __init__(self, load: Calls) -> None:
        self._load = load
        self._meter = Meter()

    async def go(self, client: AdminClient, tell: Tell) -> None:
        meter, operation = self._meter, self._load.operation
        async with _telling(tell, lambda rate: f"{operation}: {_progress(meter, rate, 'calls')}", meter):
            await Callers(client, self._load, meter).run()

    def outcome(self) -> Outcome:
        return Outcome(
            load="metadata",
            run=f"{self._load.run:08x}",
            parameters=_parameters(self._load),
            flows={"done": self._meter.flow()},
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
