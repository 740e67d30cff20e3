"""A consumer's stream out of one partition, and the acks that go back on it.

Deliveries go to the consumer's queue as they come; the broker sends no more than the credits it was granted,
so the queue is bounded without the stream ever having to stop. Acks and credits gather and go back in large
steps.

When a stream ends, the broker hands out again what was delivered and not acked. So the part of the queue that
the application has not seen is dropped, and acks that may have been lost are sent first thing on the next
stream, before any credit: what is acked does not come back. If it does all the same (a broker that restarted
may have begun to deliver from an older cursor), it is acked once more and not shown again.

Owned by one event loop; only its own task writes to its stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from sava.client.connection import ClientStream, Connection, PartitionStream, both, open_stream
from sava.client.errors import Closed, Refused, Unavailable
from sava.client.messages import Batch, Codec, Range, Start, difference, position_of
from sava.errors import SavaError
from sava.proto import streams_pb2 as pb
from sava.records import RecordBatch
from sava.tasks import cancelled

log = logging.getLogger(__name__)

ACK_LINGER_S: Final = 0.005
MAX_RANGES: Final = 1_000
"""In one message; more acks go without waiting for others."""
CONFIRM_EVERY_S: Final = 1.0
"""How often the client asks the broker whether acks are stored: this bounds what is kept to be sent again."""


SubscriptionType = Literal["exclusive", "shared", "failover", "key_shared"]

_TYPES: Final[dict[str, pb.SubscriptionType.ValueType]] = {
    "exclusive": pb.SUBSCRIPTION_EXCLUSIVE,
    "shared": pb.SUBSCRIPTION_SHARED,
    "failover": pb.SUBSCRIPTION_FAILOVER,
    "key_shared": pb.SUBSCRIPTION_KEY_SHARED,
}


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """As in ``Client.consumer``, where they are explained."""

    subscription: str
    type: SubscriptionType
    name: str
    start: Start
    key_filters: Sequence[str]
    receive_queue: int
    codec: Codec | None

    def __post_init__(self) -> None:
        if self.type not in _TYPES:
            raise Refused(f"subscription type {self.type!r}: one of {', '.join(_TYPES)}")
        if not 0 < self.receive_queue <= 1_000_000:
            raise Refused("receive_queue is 1 to 1000000 messages")
        position_of(self.start)


@dataclass(frozen=True, slots=True)
class SubscribeHooks:
    """What a stream reports to its consumer."""

    deliver: Callable[[SubscribeStream, Batch], None]
    drop: Callable[[SubscribeStream], None]
    """What was delivered and the application has not seen comes again: forget it."""
    end: Callable[[SavaError], None]


class SubscribeStream(PartitionStream):
    def __init__(
        self,
        connection: Connection,
        partition: pb.Partition,
        options: ConsumerOptions,
        hooks: SubscribeHooks,
        *,
        start: pb.Position,
        queue: int,
    ) -> None:
        """``queue``: the messages that may be on their way, as credits."""
        super().__init__(connection, partition.topic, partition.address, "consumer")
        self._credits = queue
        self._options = options
        self._hooks = hooks
        self._opening = pb.OpenConsumer(
            topic=partition.topic,
            subscription=options.subscription,
            consumer_name=options.name,
            type=_TYPES[options.type],
            key_filters=options.key_filters,
            start=start,
        )
        self._acks = AckTracker()
        self._reliable = True
        self._resent: list[Range] = []
        """Acked before the stream was opened, and then not known to be stored."""
        self._resent_until = 0
        self._nacks: deque[pb.Nacks] = deque()
        self._consumed = 0
        self._wake = asyncio.Event()
        self._acks_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._confirmed_at = 0.0
        self._wants_receipt = False
        self._flushes: list[tuple[int, asyncio.Future[None]]] = []

    # -- what the application answers ----------------------------------------------------

    def ack(self, offset: int) -> None:
        if not self._reliable:
            return
        self._acks.add(offset)
        if self._timer is None:
            self._timer = self._loop.call_later(ACK_LINGER_S, self._send_acks)
        elif self._acks.is_large:
            self._send_acks()

    def ack_ranges(self, ranges: Sequence[Range]) -> None:
        if not self._reliable:
            return
        for start, end in ranges:
            self._acks.add_range(start, end)
        if self._timer is None:
            self._timer = self._loop.call_later(ACK_LINGER_S, self._send_acks)

    def nack(self, ranges: Sequence[Range], delay_ms: int, reason: str) -> None:
        self._nacks.append(pb.Nacks(ranges=_flat(ranges), delay_ms=delay_ms, reason=reason))
        self._wake.set()

    def consumed(self, messages: int) -> None:
        """The application has taken these out of the queue."""
        self._consumed += messages
        if self._consumed * 2 >= self._credits:
            self._wake.set()

    async def flush(self) -> None:
        """When all acks so far are stored."""
        if not self._reliable or self._acks.is_confirmed or self._task.done():
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
            await asyncio.sleep(self._backoff.delay(self._failure))

    def _end(self, error: SavaError) -> None:
        self._stop(error)
        if self._opened.done():
            self._hooks.end(error)
        self._fail_opening(error)

    async def _session(self) -> None:
        """One stream, from its opening to its end, which is always an error."""
        target = await self._route.find()
        async with open_stream(self._connection, "Subscribe", target) as stream:
            opened = (await stream.open(pb.SubscribeRequest(open=self._opening))).opened
            self._reliable = opened.reliable
            self._resent = self._acks.rewind()
            self._consumed = 0
            self._nacks.clear()
            if not self._acks.is_empty:
                self._wants_receipt = True
                # Deliveries that were on their way may pass the first receipt; none passes the one after it.
                self._resent_until = await self._write_acks(stream)
            await stream.write(pb.SubscribeRequest(credits=self._credits))
            if not self._opened.done():
                self._opened.set_result(None)
            self._wake.set()
            await both(self._receive(stream), self._transmit(stream))

    async def _receive(self, stream: ClientStream) -> None:
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
        unseen = self._unseen(batch) if self._resent else batch
        if unseen is not None:
            self._hooks.deliver(self, unseen)

    def _unseen(self, batch: Batch) -> Batch | None:
        """What of a batch the application has not acked already; the rest is acked again."""
        unseen = batch.without(self._resent)
        if unseen is not batch:
            kept = [] if unseen is None else list(unseen.ranges)
            self.ack_ranges(difference(batch.ranges, kept))
            self.consumed(len(batch) - (0 if unseen is None else len(unseen)))
        return unseen

    def _stored(self, receipt: int) -> None:
        self._acks.stored(receipt)
        if receipt > self._resent_until:
            self._resent = []
        waiting = [(number, future) for number, future in self._flushes if number > receipt or not number]
        for number, future in self._flushes:
            if 0 < number <= receipt and not future.done():
                future.set_result(None)
        self._flushes = waiting

    async def _transmit(self, stream: ClientStream) -> None:
        while True:
            self._wake.clear()
            while self._nacks:
                await stream.write(pb.SubscribeRequest(nacks=self._nacks.popleft()))
            if self._consumed * 2 >= self._credits:
                granted, self._consumed = self._consumed, 0
                await stream.write(pb.SubscribeRequest(credits=granted))
            if self._acks_due:
                await self._write_acks(stream)
            await self._wake.wait()

    async def _write_acks(self, stream: ClientStream) -> int:
        """Returns the receipt that was asked for, 0 for none."""
        self._acks_due = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._loop.time()
        wants_receipt = self._wants_receipt or now - self._confirmed_at > CONFIRM_EVERY_S
        if self._acks.is_empty and not self._wants_receipt:
            return 0
        self._wants_receipt = False
        ranges, receipt = self._acks.take(receipt=wants_receipt)
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


# -- acks --------------------------------------------------------------------


class AckTracker:
    """What an application has acked of one partition, and how far the broker has stored it.

        add ─▶ the run that grows ─▶ runs ─▶ take: on the wire ─▶ unconfirmed ─▶ stored: forgotten

    Acks that were sent are kept until a receipt says that they are stored. A stream that breaks, or a broker
    that restarts, loses those that were not; they are sent again first thing on the next stream, and messages
    that come once more although they are acked are not shown to the application again.

    Offsets are acked mostly in order, so an ack usually moves the end of a run by one. Owned by the stream of
    one partition; no I/O, no clock.
    """

    def __init__(self) -> None:
        self._start = 0
        self._end = 0
        self._runs: list[Range] = []
        self._sent: list[Range] = []
        """Sent since a receipt was last asked for."""
        self._awaited: deque[tuple[int, list[Range]]] = deque()
        self._receipt = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return self._start == self._end and not self._runs

    @property
    def is_large(self) -> bool:
        return len(self._runs) >= MAX_RANGES

    @property
    def is_confirmed(self) -> bool:
        """Whether all that was acked is known to be stored."""
        return self.is_empty and not self._sent and not self._awaited

    def add(self, offset: int) -> None:
        if offset == self._end:
            self._end += 1
        else:
            self.add_range(offset, offset + 1)

    def add_range(self, start: int, end: int) -> None:
        if start != self._end:
            self._close_run()
            self._start = start
        self._end = end

    def take(self, *, receipt: bool) -> tuple[list[int], int]:
        """The ranges to send (start, end, …), and a receipt to ask for or 0. A receipt covers all that was
        taken before, too."""
        self._close_run()
        ranges, self._runs = coalesced(self._runs), []
        self._sent.extend(ranges)
        if not receipt:
            return _flat(ranges), 0
        self._receipt += 1
        self._awaited.append((self._receipt, self._sent))
        self._sent = []
        return _flat(ranges), self._receipt

    def stored(self, receipt: int) -> None:
        while self._awaited and self._awaited[0][0] <= receipt:
            self._awaited.popleft()

    def rewind(self) -> list[Range]:
        """The stream is gone: everything unconfirmed is to be sent again. Returns it."""
        runs = [run for _, ranges in self._awaited for run in ranges]
        self._awaited.clear()
        self._close_run()
        self._runs = coalesced([*runs, *self._sent, *self._runs])
        self._sent = []
        return list(self._runs)

    def _close_run(self) -> None:
        if self._start < self._end:
            self._runs.append((self._start, self._end))
        self._start = self._end = 0


def coalesced(ranges: Iterable[Range]) -> list[Range]:
    """Ascending, and joined where they touch."""
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def _flat(ranges: Iterable[Range]) -> list[int]:
    return [offset for pair in ranges for offset in pair]
