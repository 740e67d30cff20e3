"""Rolling: three brokers are restarted one after another by SIGTERM while producers publish.

Each producer has a topic of its own and sends at a fixed rate, whatever happens to earlier messages. The wait
of a message runs from the moment that it was due until it was acknowledged, so it holds everything that a
client notices: publishing held back, the search for the new owner, and the queue that has formed. A broker is
back when every broker sees all three as active, and every journal is on three disks again. Afterwards the
topics are read from the beginning: each acknowledged message must be there once."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from bench.broker_process import Broker
from bench.plan import Plan
from bench.processes import ProcessFailedError
from bench.report import Quantity, Row, Target, duration
from bench.samples import percentile
from bench.trio import Trio
from sava.client import Client
from sava.proto import ledgers_pb2 as ledgers_pb

SECTION: Final = "rolling"
PER_SECOND: Final = 1_000
TOPICS: Final = 6
PAYLOAD: Final = bytes(range(100))
SEND_S: Final = 30.0
"""A message without an acknowledgement after this long has failed."""
BACK_S: Final = 60.0
POLL_S: Final = 0.05
CALM_S: Final = 2.0
"""Before the first restart, between two, and after the last: the traffic of every day."""

P99 = Target("p99 at most 500 ms", at_most=0.5, of_peer=False)


@dataclass(slots=True)
class Rolled:
    """What a rolling restart did to the messages that were published meanwhile."""

    waits: list[float]
    """Of every acknowledged message, sorted."""
    failed: list[str]
    lost: int
    """Acknowledged, and not in the topic."""
    doubled: int
    stops: list[float]
    """From SIGTERM until the process was gone, of each broker."""
    longest: dict[str, float] = field(default_factory=dict)
    """The longest wait that began between one restart and the next, by the broker that was restarted."""

    @property
    def p50(self) -> float:
        return statistics.median(self.waits)

    @property
    def p99(self) -> float:
        return percentile(self.waits, 0.99)

    @property
    def slowest(self) -> float:
        return self.waits[-1]


class Pace:
    """One producer at a fixed rate; owned by the event loop."""

    def __init__(self, client: Client, topic: str, per_second: float) -> None:
        self.topic = topic
        self._producer = client.producer(topic, timeout=SEND_S)
        self._interval_s = 1 / per_second
        self._stopped = asyncio.Event()
        self._sending: set[asyncio.Task[None]] = set()
        self.waits: list[tuple[float, float]] = []
        """When each acknowledged message was due, and how long it waited."""
        self.acked: set[int] = set()
        self.failed: list[str] = []

    async def open(self) -> None:
        await self._producer.open()

    async def run(self) -> None:
        """Until ``stop``; returns when the outcome of every message is known."""
        number, due = 0, time.perf_counter()
        while not self._stopped.is_set():
            if (left := due - time.perf_counter()) > 0:
                await asyncio.sleep(left)
            task = asyncio.create_task(self._send(number, due))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)
            number, due = number + 1, due + self._interval_s
        await asyncio.gather(*self._sending)
        await self._producer.close()

    def stop(self) -> None:
        self._stopped.set()

    async def _send(self, number: int, due: float) -> None:
        try:
            await self._producer.send(number.to_bytes(8) + PAYLOAD)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is one of the figures
            self.failed.append(f"{self.topic} {number}: {error}")
        else:
            self.acked.add(number)
            self.waits.append((due, time.perf_counter() - due))

    async def check(self, client: Client) -> tuple[int, int]:
        """How many acknowledged messages are not in the topic, and how many are there more than once."""
        seen: Counter[int] = Counter()
        async with client.reader(self.topic, start="earliest", end="latest") as reader:
            async for batch in reader.batches():
                seen.update(int.from_bytes(message.payload[:8]) for message in batch)
        return len(self.acked - seen.keys()), sum(1 for count in seen.values() if count > 1)


async def run(plan: Plan) -> list[Row]:
    async with Trio(plan.folder / "rolling") as trio:
        rolled = await roll(trio)
    if rolled.failed or rolled.lost or rolled.doubled:
        raise ProcessFailedError(
            f"{rolled.lost} messages lost, {rolled.doubled} doubled, {len(rolled.failed)} failed "
            f"({', '.join(rolled.failed[:3])})"
        )
    name = f"rolling restart of three brokers, {PER_SECOND:,} messages/s"
    beside = f"p50 {duration(rolled.p50)}, slowest {duration(rolled.slowest)}"
    stops = f"p50 {duration(statistics.median(rolled.stops))}"
    return [
        Row(
            SECTION,
            f"{name}: p99 of {len(rolled.waits):,} waits",
            Quantity(rolled.p99, "seconds", beside),
            None,
            P99,
        ),
        Row(SECTION, f"{name}: slowest stop", Quantity(max(rolled.stops), "seconds", stops)),
    ]


async def roll(trio: Trio, *, topics: int = TOPICS, per_second: int = PER_SECOND) -> Rolled:
    """Restart each broker of the cluster once under this load, the leader last."""
    await _mirrored(trio)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(trio.addresses, timeout=SEND_S))
        paces = [Pace(client, f"/default/rolling-{each}", per_second / topics) for each in range(topics)]
        for pace in paces:
            await pace.open()
        running = [asyncio.create_task(pace.run()) for pace in paces]
        try:
            await asyncio.sleep(CALM_S)
            stops, moments = [], []
            for broker in [*await trio.followers(), await trio.leading_broker()]:
                moments.append((broker.name, time.perf_counter()))
                stops.append(await _restart(trio, broker))
                await asyncio.sleep(CALM_S)
        finally:
            for pace in paces:
                pace.stop()
            await asyncio.gather(*running)
        checked = [await pace.check(client) for pace in paces]
    every = sorted((each for pace in paces for each in pace.waits), key=lambda each: each[1])
    ends = [moment for _, moment in moments[1:]] + [float("inf")]
    return Rolled(
        waits=[wait for _, wait in every],
        failed=[error for pace in paces for error in pace.failed],
        lost=sum(lost for lost, _ in checked),
        doubled=sum(doubled for _, doubled in checked),
        stops=stops,
        longest={
            name: max(wait for due, wait in every if began <= due + wait and due < end)
            for (name, began), end in zip(moments, ends, strict=True)
        },
    )


async def _restart(trio: Trio, broker: Broker) -> float:
    """Seconds from SIGTERM until the process was gone. Returns when the broker is back."""
    began = time.perf_counter()
    await broker.child.stop()
    seconds = time.perf_counter() - began
    await broker.disconnect()
    broker.start()
    await trio.ready()
    await trio.complete()
    await _mirrored(trio)
    return seconds


async def _mirrored(trio: Trio) -> None:
    """Until each broker writes a journal that is on three disks, all of which are connected."""
    deadline = time.monotonic() + BACK_S
    wanted = {trio.id_of(broker) for broker in trio.brokers}
    while True:
        response = await trio.brokers[0].ledgers.ListLedgers(ledgers_pb.ListLedgersRequest(), timeout=10)
        full = {
            each.broker_id
            for each in response.ledgers
            if each.state == "open" and len(each.fragments[-1].storage_ids) == len(wanted)
        }
        if full >= wanted:
            return
        if time.monotonic() > deadline:
            raise ProcessFailedError(f"the journals of {wanted - full} are not on three disks again")
        await asyncio.sleep(POLL_S)
