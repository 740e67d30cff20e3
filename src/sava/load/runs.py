"""The loads as a user asks for them: each from its parameters to its outcome, which is there at any time,
so that a run that is interrupted still shows what it has found."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any, Final, Protocol

from sava.api.admin_client import AdminClient
from sava.client import Client
from sava.load.consuming import Consumption, LoadSubscription, Receivers, Silent
from sava.load.figures import LoadOutcome, Meter
from sava.load.metadata import Callers, MetadataCalls
from sava.load.producing import Production, produce
from sava.load.tally import DeliveryTally

TELL_S: Final = 0.2


class LoadProgress(Protocol):
    """Takes a line about how far it is."""

    @property
    def is_due(self) -> bool:
        """Whether the next line would be shown."""

    def show(self, line: str) -> None: ...


class LoadRun(Protocol):
    def outcome(self) -> LoadOutcome:
        """What has been found so far; also when the run was broken off."""


class ProduceRun:
    def __init__(self, load: Production) -> None:
        self._load = load
        self._meter = Meter()

    async def go(self, client: Client, progress: LoadProgress) -> None:
        meter = self._meter
        async with _telling(progress, lambda rate: f"published {_progress(meter, rate)}", meter):
            await produce(client, self._load, meter)

    def outcome(self) -> LoadOutcome:
        return LoadOutcome(
            load="produce",
            run=f"{self._load.run:08x}",
            parameters=_parameters(self._load),
            flows={"published": self._meter.flow()},
        )


class ConsumeRun:
    def __init__(self, load: Consumption, run: int) -> None:
        self._load = load
        self._run = run
        self._meter = Meter()
        self._tally = DeliveryTally()
        self._is_all_read = False
        self._removed = 0
        self._trouble = ""

    async def go(self, client: Client, subscription: LoadSubscription, progress: LoadProgress) -> None:
        load, meter = self._load, self._meter
        began = await subscription.beginning(load.type, load.start)
        self._removed = began.removed
        self._tally = tally = DeliveryTally(
            by_key=load.type == "key_shared", owed=began.owed, partitions=began.partitions
        )
        async with (
            _telling(progress, lambda rate: f"consumed {_progress(meter, rate)}{_faults(tally)}", meter),
            Receivers(client, subscription, load, tally, meter) as receivers,
        ):
            try:
                self._is_all_read = await receivers.run()
            except Silent as error:
                self._trouble = str(error)

    def outcome(self) -> LoadOutcome:
        return LoadOutcome(
            load="consume",
            run=f"{self._run:08x}",
            parameters=_parameters(self._load),
            flows={"consumed": self._meter.flow()},
            count=self._tally.count(is_all_read=self._is_all_read),
            trouble=self._trouble,
            note=f"retention removed {self._removed} messages before this run: whether any message before "
            "those that are left is missing is unknown"
            if self._removed
            else "",
        )


class LatencyRun:
    """Publish and consume at the same time; consumers are there before the first message."""

    def __init__(self, load: Production, consumption: Consumption) -> None:
        self._load = load
        self._consumption = consumption
        self._published, self._consumed = Meter(), Meter()
        self._tally = DeliveryTally(by_key=consumption.type == "key_shared", run=load.run)
        self._is_published = self._is_all_read = False
        self._trouble = ""

    async def go(self, client: Client, subscription: LoadSubscription, progress: LoadProgress) -> None:
        load = self._load
        async with client.producer(load.topic, reliable=load.reliable, partitions=load.partitions):
            pass  # now there is such a topic to subscribe to
        async with (
            _telling(progress, self._line, self._published),
            Receivers(client, subscription, self._consumption, self._tally, self._consumed) as receivers,
        ):
            await self._go_both_ways(client, receivers)

    async def _go_both_ways(self, client: Client, receivers: Receivers) -> None:
        receiving = asyncio.create_task(
            receivers.run(
                is_enough=lambda: self._is_published and self._tally.has_all(),
                may_be_all=lambda: self._is_published,
            )
        )
        producing = asyncio.create_task(produce(client, self._load, self._published))
        try:
            await asyncio.wait((receiving, producing), return_when=asyncio.FIRST_COMPLETED)
            if receiving.done():
                receiving.result()  # it ends by itself only when it fails
            for each in await producing:
                self._tally.sent(each.source, each.end, each.unacknowledged)
            self._is_published = True
            self._is_all_read = await receiving
        except Silent as error:
            self._trouble = str(error)
        finally:
            for task in (producing, receiving):
                task.cancel()
            await asyncio.gather(producing, receiving, return_exceptions=True)

    def _line(self, rate: float) -> str:
        p99 = self._consumed.latency.percentile(99) / 1000
        so_far = f"published {_progress(self._published, rate)}, consumed {self._consumed.count:,}"
        return f"{so_far}, p99 {p99:.1f} ms{_faults(self._tally)}"

    def outcome(self) -> LoadOutcome:
        return LoadOutcome(
            load="latency",
            run=f"{self._load.run:08x}",
            # How much there is to consume is said by what is published.
            parameters={**_parameters(self._consumption), **_parameters(self._load)},
            flows={"published": self._published.flow(), "consumed": self._consumed.flow()},
            count=self._tally.count(is_all_read=self._is_all_read),
            trouble=self._trouble,
        )


class MetadataRun:
    def __init__(self, load: MetadataCalls) -> None:
        self._load = load
        self._meter = Meter()

    async def go(self, client: AdminClient, progress: LoadProgress) -> None:
        meter, operation = self._meter, self._load.operation
        async with _telling(progress, lambda rate: f"{operation}: {_progress(meter, rate, 'calls')}", meter):
            await Callers(client, self._load, meter).run()

    def outcome(self) -> LoadOutcome:
        return LoadOutcome(
            load="metadata",
            run=f"{self._load.run:08x}",
            parameters=_parameters(self._load),
            flows={"done": self._meter.flow()},
        )


@asynccontextmanager
async def _telling(progress: LoadProgress, line: Callable[[float], str], meter: Meter) -> AsyncIterator[None]:
    """Tell while the body runs, with the rate since the last time."""

    async def tell() -> None:
        at, count = time.perf_counter(), 0
        while True:
            await asyncio.sleep(TELL_S)
            if progress.is_due:
                now = time.perf_counter()
                progress.show(line((meter.count - count) / (now - at)))
                at, count = now, meter.count

    task = asyncio.create_task(tell(), name="bench: telling")
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _progress(meter: Meter, rate: float, what: str = "messages") -> str:
    failed = f", {meter.failed:,} failed" if meter.failed else ""
    return f"{meter.count:,} {what}, {rate:,.0f}/s now{failed}"


def _faults(tally: DeliveryTally) -> str:
    found = {"duplicates": tally.duplicates, "reordered": tally.reordered}
    return "".join(f", {count:,} {name}" for name, count in found.items() if count)


def _parameters(load: Production | Consumption | MetadataCalls) -> dict[str, Any]:
    given = asdict(load)
    del given["run" if "run" in given else "idle_s"]
    if "size" in given:
        low, high = given["size"]
        given["size"] = low if low == high else f"{low}-{high}"
    return given
