"""Traffic: a shop publishes orders and a kitchen consumes them, while something happens to the cluster.

Each is a thread with a client of its own. Both look at every message: the shop at the offset that its order
was given, the kitchen at what it is handed. What the shop has an acknowledgement for must never be lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from examples.demo.orders import TOPIC, check_orders, orders
from examples.demo.steps import StepFailed, require
from sava.client import Batch
from sava.client.blocking import Client

BATCH = 50
PAUSE_S = 0.01
"""Between batches: some thousand orders a second, which leaves this machine room for the rest."""
PATIENCE_S = 60.0
"""How long the shop repeats a batch, and how long anybody waits here for the others."""


class Traffic:
    """As a context: both run inside it, and have nothing left to do when it is left."""

    def __init__(self, service: str, first: int) -> None:
        self.acknowledged = first
        """Every order before this one is stored, as far as the shop knows. Written by the shop's thread."""
        self.consumed = first
        """Every order before this one has reached the kitchen. Written by the kitchen's thread."""
        self.repeated = 0
        """Orders that reached the kitchen a second time."""
        self.longest_wait_s = 0.0
        """Of the shop, for one acknowledgement."""
        self._shop_client, self._kitchen_client = Client(service), Client(service)
        self._closing = threading.Event()
        self._shop = _in_a_thread(self._publish)
        self._kitchen = _in_a_thread(self._consume)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        if isinstance(error, KeyboardInterrupt):
            return  # the demo ends, and they with it: a broker that they wait for may take its time
        try:
            if error is None:
                self._shop.result(PATIENCE_S)
                self._kitchen.result(PATIENCE_S)
        finally:
            # Whoever still waits for the cluster is told that the client is closed.
            self._shop_client.close()
            self._kitchen_client.close()

    def wait_for(self, count: int) -> None:
        """Until so many more orders are acknowledged, and have been consumed."""
        goal = self.acknowledged + count
        deadline = time.monotonic() + PATIENCE_S
        while min(self.acknowledged, self.consumed) < goal:
            for worker in (self._shop, self._kitchen):
                if worker.done():
                    worker.result()
            if time.monotonic() > deadline:
                raise StepFailed(
                    f"{goal} orders published and consumed within {PATIENCE_S:.0f} s",
                    f"{self.acknowledged} published, {self.consumed} consumed",
                )
            time.sleep(0.01)

    def _publish(self) -> None:
        with self._shop_client.producer(TOPIC, name="shop", timeout=PATIENCE_S) as producer:
            while not self._closing.is_set():
                first = self.acknowledged
                began = time.monotonic()
                [sent] = producer.send_many(orders(first, first + BATCH))
                self.longest_wait_s = max(self.longest_wait_s, time.monotonic() - began)
                require(sent.offset == first, f"order {first} to be stored at offset {first}", sent.offset)
                self.acknowledged += BATCH
                self._closing.wait(PAUSE_S)
            require(producer.degraded == 0, "no order acknowledged with fewer copies", producer.degraded)

    def _consume(self) -> None:
        with self._kitchen_client.consumer(TOPIC, subscription="kitchen", type="exclusive") as consumer:
            while not (self._shop.done() and self.consumed >= self.acknowledged):
                batch = consumer.receive_batch(timeout=0.1)
                if batch is not None:
                    consumer.ack(batch)
                    self._take(batch)

    def _take(self, batch: Batch) -> None:
        start, end = batch.ranges[0][0], batch.ranges[-1][1]
        check_orders(start, batch.payloads())
        require(start <= self.consumed, f"offset {self.consumed} to be consumed next", start)
        self.repeated += min(self.consumed, end) - start
        self.consumed = max(self.consumed, end)


def _in_a_thread(work: Callable[[], None]) -> Future[None]:
    """One that does not keep the process from ending."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 (whoever asks for the outcome gets it)
            outcome.set_exception(error)
        else:
            outcome.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    return outcome
