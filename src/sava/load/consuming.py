"""Consumers of a load: all of one subscription, a batch at a time, each batch acked as a whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final, Literal

from sava.client import Batch, Client, Consumer
from sava.client.consumer import SubscriptionType
from sava.load.figures import Meter
from sava.load.tally import Tally

POLL_S: Final = 0.05
"""How soon an end is noticed while nothing comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumption:
    topic: str
    subscription: str
    type: SubscriptionType = "exclusive"
    consumers: int = 1
    start: Literal["earliest", "latest"] = "earliest"
    count: int | None = None
    seconds: float | None = None
    idle_s: float | None = 3.0
    """End when nothing has come for so long; None: only as the other two say."""
    receive_queue: int = 10_000


class Receivers:
    """Open when entered. Owned by one event loop."""

    def __init__(self, client: Client, load: Consumption, tally: Tally, meter: Meter) -> None:
        self._load = load
        self._tally = tally
        self._meter = meter
        self._stack = AsyncExitStack()
        self._consumers = [
            client.consumer(
                load.topic,
                subscription=load.subscription,
                type=load.type,
                start=load.start,
                name=f"{load.subscription}-{number}",
                receive_queue=load.receive_queue,
            )
            for number in range(load.consumers)
        ]
        self._began: float | None = None
        self._last = time.perf_counter()

    async def __aenter__(self) -> Receivers:
        for consumer in self._consumers:
            await self._stack.enter_async_context(consumer)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def idle_s(self) -> float:
        return time.perf_counter() - self._last

    async def run(self, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Until the load's own end, or until ``is_over`` says so. Returns whether everything was read:
        nothing came any more, rather than that this was enough. What was left unread then is not lost."""
        self._last = time.perf_counter()
        end = None if self._load.seconds is None else time.perf_counter() + self._load.seconds
        async with asyncio.TaskGroup() as group:
            receiving = [
                group.create_task(self._receive(number, consumer, end, is_over))
                for number, consumer in enumerate(self._consumers)
            ]
        await asyncio.gather(*(consumer.flush() for consumer in self._consumers))
        return all(task.result() for task in receiving)

    async def _receive(
        self, number: int, consumer: Consumer, end: float | None, is_over: Callable[[], bool]
    ) -> bool:
        while not self._is_enough(end):
            if is_over() or self._is_idle:
                return True
            batch = await consumer.receive_batch(self._left(), timeout=POLL_S)
            if batch is not None:
                self._take(number, batch)
                await consumer.ack(batch)
        return False

    def _is_enough(self, end: float | None) -> bool:
        return self._left() == 0 or (end is not None and time.perf_counter() >= end)

    @property
    def _is_idle(self) -> bool:
        return self._load.idle_s is not None and self.idle_s >= self._load.idle_s

    def _left(self) -> int | None:
        return None if self._load.count is None else max(self._load.count - self._meter.count, 0)

    def _take(self, number: int, batch: Batch) -> None:
        now = time.time_ns()
        payloads = batch.payloads()
        ends = 0
        for stretch in self._tally.take((batch.topic, number), payloads):
            if stretch.is_end:
                ends += len(stretch.sequences)
            else:
                self._meter.latency.record_all((now - each) // 1000 for each in stretch.times)
        self._last = time.perf_counter()
        if self._began is None:
            self._began = self._last
        # To the last message: waiting for what does not come is not part of a rate.
        self._meter.seconds = self._last - self._began
        self._meter.add(len(payloads) - ends, sum(map(len, payloads)))
