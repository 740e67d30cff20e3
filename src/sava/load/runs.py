"""The loads as a user asks for them: each from its parameters to its outcome, which is there at any time, so
that a run that is interrupted still shows what it has found. A load of the metadata store is here as a whole:
callers that each wait for their answer, or calls at a rate.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from sava.api.admin_client import AdminClient
from sava.client import Client
from sava.errors import Outcome, RetryableError, SavaError
from sava.load.figures import LoadOutcome, Meter
from sava.load.tally import DeliveryTally
from sava.load.traffic import Consumption, LoadPace, LoadSubscription, Production, Receivers, Silent, produce
from sava.metadata.errors import OutcomeUnknown
from sava.peers.error_mapping import BrokerUnreachable
from sava.proto import admin_pb2 as pb

PREFIX: Final = "/bench/"
MAX_KEYS: Final = 10_000
"""As many as are deleted at once when the run is over."""

Operation = Literal["put", "get", "local-get", "txn"]


class KeysLeft(RetryableError):
    """A run could not delete its keys."""

    outcome = Outcome.PARTLY


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataCalls:
    run: int
    operation: Operation = "put"
    callers: int = 16
    keys: int = 1000
    value_size: int = 128
    count: int | None = None
    seconds: float | None = None
    rate: float | None = None

    @property
    def prefix(self) -> str:
        return f"{PREFIX}{self.run:08x}/"


class Callers:
    """Owned by one event loop."""

    def __init__(self, client: AdminClient, load: MetadataCalls, meter: Meter) -> None:
        self._client = client
        self._load = load
        self._meter = meter
        self._left = load.count
        self._failures_in_a_row = 0
        self._may_have_written = False
        self._value = random.randbytes(load.value_size)

    async def run(self) -> None:
        """The keys are gone afterwards. Raises KeysLeft if they are not."""
        load = self._load
        try:
            if load.operation in ("get", "local-get"):
                await self._fill()
            await self._call_all()
        finally:
            if self._may_have_written:
                await self._delete()

    async def _delete(self) -> None:
        prefix = self._load.prefix
        try:
            await self._client.call(self._client.meta.Delete, pb.DeleteRequest(key=prefix, prefix=True))
        except SavaError as error:
            raise KeysLeft(
                f"keys below {prefix} were not deleted: {error}; `sava meta delete {prefix} --prefix` does it"
            ) from error

    async def _call_all(self) -> None:
        load = self._load
        pace = LoadPace(load.rate, load.seconds)
        self._meter.begin()
        await asyncio.gather(*(self._call(pace) for _ in range(load.callers)))

    async def _fill(self) -> None:
        numbers = iter(range(self._load.keys))

        async def fill() -> None:
            for number in numbers:
                await self._put(self._key(number))

        await asyncio.gather(*(fill() for _ in range(self._load.callers)))

    async def _call(self, pace: LoadPace) -> None:
        operation = self._operation()
        while self._left != 0 and not self._is_hopeless(pace):
            if self._left is not None:
                self._left -= 1
            due = await pace.due(1)
            if not due:
                return
            try:
                await operation(self._key(random.randrange(self._load.keys)))
            except (RetryableError, OutcomeUnknown) as error:
                self._meter.fail(1, error)
                self._failures_in_a_row += 1
            else:
                self._meter.add(1, self._load.value_size)
                self._meter.latency.record((time.time_ns() - due[0]) // 1000)
                self._failures_in_a_row = 0

    def _is_hopeless(self, pace: LoadPace) -> bool:
        """Nothing is answered, and the time is over, or there is none: what was due would fail one call after
        the other, each when its time is up."""
        if not self._failures_in_a_row:
            return False
        return pace.is_over or (
            self._load.seconds is None and self._failures_in_a_row >= 2 * self._load.callers
        )

    def _operation(self) -> Any:
        return {"put": self._put, "get": self._get, "local-get": self._local_get, "txn": self._txn}[
            self._load.operation
        ]

    def _key(self, number: int) -> str:
        return f"{self._load.prefix}{number:06}"

    async def _put(self, key: str) -> None:
        await self._write(self._client.meta.Put, pb.PutRequest(key=key, value=self._value))

    async def _get(self, key: str) -> None:
        await self._client.call(self._client.meta.Get, pb.GetRequest(key=key))

    async def _local_get(self, key: str) -> None:
        await self._client.call(self._client.meta.Get, pb.GetRequest(key=key, local=True))

    async def _txn(self, key: str) -> None:
        """A compare and a put, whichever way the comparison goes."""
        put = pb.Operation(put=pb.Operation.Put(key=key, value=self._value))
        compare = pb.Compare(key=key, target=pb.Compare.VERSION, relation=pb.Compare.EQUAL, operand=0)
        request = pb.TxnRequest(compare=[compare], then=[put], otherwise=[put])
        await self._write(self._client.meta.Txn, request)

    async def _write(self, method: Any, request: Any) -> None:
        try:
            await self._client.call(method, request)
        except BrokerUnreachable:
            raise
        except (RetryableError, OutcomeUnknown, asyncio.CancelledError):
            self._may_have_written = True  # the outcome is unknown
            raise
        self._may_have_written = True


TELL_S: Final = 0.2


LoadProgress = Callable[[Callable[[], str]], None]
"""Shows how far a run is. It makes the line only if it shows it."""


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

    at, count = time.perf_counter(), 0

    def made() -> str:
        nonlocal at, count
        now = time.perf_counter()
        rate = (meter.count - count) / (now - at)
        at, count = now, meter.count
        return line(rate)

    async def tell() -> None:
        while True:
            await asyncio.sleep(TELL_S)
            progress(made)

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


LoadRun = ProduceRun | ConsumeRun | LatencyRun | MetadataRun
