"""Feed: one consumer's stream out of one partition.

Deliveries go to the consumer's queue as they come; the broker sends no more than the credits it was granted,
so the queue is bounded without the stream ever having to stop. Acks and credits gather and go back in large
steps.

When a stream ends, the broker hands out again what was delivered and not acked. So the part of the queue that
the application has not seen is dropped, and acks that may have been lost are sent first thing on the next
stream, before any credit: what is acked does not come back. If it does all the same (a broker that restarted
may have begun to deliver from an older cursor), it is acked once more and not shown again.

Owned by one event loop; only the feed's own task writes to its stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from sava.client.acks import AckBook, Range
from sava.client.backoff import Backoff
from sava.client.batch import Batch
from sava.client.codec import Codec
from sava.client.connection import Connection
from sava.client.errors import ClientError, Closed, Unavailable
from sava.client.stream import Route, Stream, both, open_stream
from sava.errors import SavaError
from sava.proto import streams_pb2 as pb
from sava.records import RecordBatch
from sava.tasks import cancelled, is_done_within

log = logging.getLogger(__name__)

ACK_LINGER_S: Final = 0.005
CONFIRM_EVERY_S: Final = 1.0
"""How often the broker is asked to tell that acks are stored: this bounds what is kept to be sent again."""


@dataclass(frozen=True, slots=True)
class FeedOptions:
    subscription: str
    consumer: str
    type: pb.SubscriptionType.ValueType
    key_filters: tuple[str, ...]
    credits: int
    codec: Codec | None


@dataclass(frozen=True, slots=True)
class FeedHooks:
    """What a feed tells its consumer."""

    deliver: Callable[[Feed, Batch], None]
    drop: Callable[[Feed], None]
    """Everything delivered so far that the application has not seen is void."""
    end: Callable[[SavaError], None]


class Feed:
    def __init__(
        self,
        connection: Connection,
        partition: pb.Partition,
        start: pb.Position,
        options: FeedOptions,
        hooks: FeedHooks,
    ) -> None:
        self.topic = partition.topic
        self._connection = connection
        self._route = Route(connection, partition.topic, partition.address)
        self._options = options
        self._hooks = hooks
        self._opening = pb.OpenConsumer(
            topic=partition.topic,
            subscription=options.subscription,
            consumer_name=options.consumer,
            type=options.type,
            key_filters=options.key_filters,
            start=start,
        )
        self._loop = asyncio.get_running_loop()
        self._backoff = Backoff()
        self._book = AckBook()
        self._reliable = True
        self._voided: list[Range] = []
        """Acked before the stream was opened, and then not known to be stored."""
        self._voided_until = 0
        self._nacks: deque[pb.Nacks] = deque()
        self._consumed = 0
        self._wake = asyncio.Event()
        self._acks_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._confirmed_at = 0.0
        self._wants_receipt = False
        self._flushes: list[tuple[int, asyncio.Future[None]]] = []
        self._failure: ClientError | None = None
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._task = asyncio.create_task(self._run(), name=f"sava consumer of {self.topic}")
        self._task.add_done_callback(self._ran)

    async def opened(self, timeout: float) -> None:
        """When the first stream is open. Raises what the broker refused, or Unavailable."""
        if not await is_done_within(timeout, self._opened):
            raise self._failure or Unavailable(f"{self.topic} was not opened within {timeout} s")

    # -- what the application answers ----------------------------------------------------

    def ack(self, offset: int) -> None:
        if not self._reliable:
            return
        self._book.add(offset)
        if self._timer is None:
            self._timer = self._loop.call_later(ACK_LINGER_S, self._send_acks)
        elif self._book.is_large:
            self._send_acks()

    def ack_ranges(self, ranges: Sequence[Range]) -> None:
        if not self._reliable:
            return
        for start, end in ranges:
            self._book.add_range(start, end)
        if self._timer is None:
            self._timer = self._loop.call_later(ACK_LINGER_S, self._send_acks)

    def nack(self, ranges: Sequence[Range], delay_ms: int, reason: str) -> None:
        flat = [offset for pair in ranges for offset in pair]
        self._nacks.append(pb.Nacks(ranges=flat, delay_ms=delay_ms, reason=reason))
        self._wake.set()

    def consumed(self, messages: int) -> None:
        """The application has taken these out of the queue."""
        self._consumed += messages
        if self._consumed * 2 >= self._options.credits:
            self._wake.set()

    async def flush(self) -> None:
        """When all acks so far are stored."""
        if not self._reliable or self._book.is_confirmed or self._task.done():
            return
        stored: asyncio.Future[None] = self._loop.create_future()
        self._flushes.append((0, stored))
        self._wants_receipt = True
        self._send_acks()
        await stored

    async def close(self) -> None:
        """End at once; see ``flush``."""
        await cancelled(self._task)
        self._stop(Closed("the consumer is closed"))

    def _send_acks(self) -> None:
        self._acks_due = True
        self._wake.set()

    # -- streams -----------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._session()
            except Unavailable as error:
                log.info("consumer: the stream of %s has ended: %s", self.topic, error)
                self._failure = error
            except SavaError as error:
                self._end(error)
                return
            finally:
                self._hooks.drop(self)
            await self._backoff.pause(self._failure)

    def _ran(self, task: asyncio.Task[None]) -> None:
        """Not foreseen: a mistake here, or in a callable that gives tokens. Those who wait must not wait for
        ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("consumer: %s failed", self.topic, exc_info=error)
            self._end(ClientError(f"the consumer of {self.topic} failed: {error!r}"))

    def _end(self, error: SavaError) -> None:
        self._stop(error)
        if self._opened.done():
            self._hooks.end(error)
        else:
            self._opened.set_exception(error)
            self._opened.exception()  # whoever waits gets it; that nobody does is no mistake

    async def _session(self) -> None:
        """One stream, from its opening to its end, which is always an error."""
        target = await self._route.find()
        async with open_stream(self._connection, "Subscribe", target) as stream:
            opened = (await stream.open(pb.SubscribeRequest(open=self._opening))).opened
            self._reliable = opened.reliable
            self._voided = self._book.rewind()
            self._consumed = 0
            self._nacks.clear()
            if not self._book.is_empty:
                self._wants_receipt = True
                # Deliveries that were on their way may pass the first receipt; none passes the one after it.
                self._voided_until = await self._write_acks(stream)
            await stream.write(pb.SubscribeRequest(credits=self._options.credits))
            if not self._opened.done():
                self._opened.set_result(None)
            self._wake.set()
            await both(self._receive(stream), self._transmit(stream))

    async def _receive(self, stream: Stream) -> None:
        while True:
            response = await stream.receive()
            for delivered in response.delivered:
                self._deliver(delivered)
            if response.acks_stored:
                self._stored(response.acks_stored)
            else:
                self._backoff.reset()

    def _deliver(self, delivered: pb.Delivered) -> None:
        records = RecordBatch.parse(delivered.batch)
        records.verify_crc()
        flat = delivered.ranges
        batch = Batch(
            records,
            topic=self.topic,
            ranges=tuple(zip(flat[::2], flat[1::2], strict=True)),
            attempt=delivered.attempt,
            codec=self._options.codec,
        )
        unseen = self._unseen(batch) if self._voided else batch
        if unseen is not None:
            self._hooks.deliver(self, unseen)

    def _unseen(self, batch: Batch) -> Batch | None:
        """What of a batch the application has not acked already; the rest is acked again."""
        unseen = batch.without(self._voided)
        if unseen is not batch:
            kept = [] if unseen is None else list(unseen.ranges)
            self.ack_ranges(_difference(batch.ranges, kept))
            self.consumed(len(batch) - (0 if unseen is None else len(unseen)))
        return unseen

    def _stored(self, receipt: int) -> None:
        self._book.stored(receipt)
        if receipt > self._voided_until:
            self._voided = []
        waiting = [(number, future) for number, future in self._flushes if number > receipt or not number]
        for number, future in self._flushes:
            if 0 < number <= receipt and not future.done():
                future.set_result(None)
        self._flushes = waiting

    async def _transmit(self, stream: Stream) -> None:
        while True:
            self._wake.clear()
            while self._nacks:
                await stream.write(pb.SubscribeRequest(nacks=self._nacks.popleft()))
            if self._consumed * 2 >= self._options.credits:
                granted, self._consumed = self._consumed, 0
                await stream.write(pb.SubscribeRequest(credits=granted))
            if self._acks_due:
                await self._write_acks(stream)
            await self._wake.wait()

    async def _write_acks(self, stream: Stream) -> int:
        """Returns the receipt that was asked for, 0 for none."""
        self._acks_due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._loop.time()
        wants_receipt = self._wants_receipt or now - self._confirmed_at > CONFIRM_EVERY_S
        if self._book.is_empty and not self._wants_receipt:
            return 0
        self._wants_receipt = False
        ranges, receipt = self._book.take(receipt=wants_receipt)
        if receipt:
            self._confirmed_at = now
            self._flushes = [(number or receipt, future) for number, future in self._flushes]
        await stream.write(pb.SubscribeRequest(acks=pb.Acks(ranges=ranges, receipt=receipt)))
        return receipt

    def _stop(self, error: SavaError) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for _, future in self._flushes:
            if not future.done():
                future.set_exception(error)
        self._flushes = []


def _difference(ranges: Sequence[Range], kept: Sequence[Range]) -> list[Range]:
    """What of ``ranges`` is not in ``kept``, which is a part of it."""
    left: list[Range] = []
    for start, end in ranges:
        for kept_start, kept_end in kept:
            if kept_end <= start or kept_start >= end:
                continue
            if kept_start > start:
                left.append((start, kept_start))
            start = kept_end
        if start < end:
            left.append((start, end))
    return left
