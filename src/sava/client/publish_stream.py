"""A producer's stream into one partition.

Messages gather in the open batch at the end of the queue. The task of a ``PublishStream`` keeps a gRPC stream
open, moves batches from the queue into the window when they are ready and the window has room, and settles
them as receipts come:

    send ─▶ queue [sealed][sealed][open] ─▶ window (at most 16, numbered) ─▶ stream ─▶ receipts settle

A batch is ready when it is sealed (full, flushed, or another one follows it) or has lingered. Without linger
it is ready at once if nothing is in flight; otherwise what comes meanwhile gathers, and the next receipt
sends it.

When a stream ends, the next one is opened with the same producer name, and the window says what is sent again
and how it is numbered (see ``SendWindow``). A batch whose time is up fails: with Timeout or Unavailable if it
was never sent, with OutcomeUnknown otherwise, and then it stays in the window, settled, until a new stream
tells whether its sequence is taken.

Owned by one event loop; only its own task writes to its stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sava.client.connection import ClientStream, Connection, PartitionStream, both, open_stream
from sava.client.errors import (
    ClientError,
    DuplicateForgotten,
    OutcomeUnknown,
    ProducerFenced,
    Refused,
    Timeout,
    Unavailable,
)
from sava.client.messages import Codec, schema_of
from sava.client.outgoing import UNKNOWN_OFFSET, EncodedBatch, PendingLimit, ProducerBatch, SendWindow, Stamp
from sava.errors import CallerError
from sava.proto import streams_pb2 as pb
from sava.records import MAX_BATCH_BYTES, MAX_COUNT, Compression, RecordBatch
from sava.tasks import cancelled

log = logging.getLogger(__name__)


MAX_SINGLES: Final = 1000
"""Messages sent one by one in a batch. Thousands of callers that wait for one batch continue together when it
has its receipt, and then wait together while the next is on its way; in several batches, some work while
others wait."""


STUCK_S: Final = 1.0
"""A batch that was due this long ago and is still here waits for more than its turn: a broker is gone, or its
disk is full."""


_COMPRESSION: Final = {None: Compression.NONE, "lz4": Compression.LZ4, "zstd": Compression.ZSTD}
_DELIVERY: Final = {None: pb.ANY, True: pb.RELIABLE, False: pb.NON_RELIABLE}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerOptions:
    """As in ``Client.producer``, where they are explained."""

    name: str
    is_name_generated: bool
    reliable: bool | None = True
    partitions: int | None = None
    exclusive: bool = False
    linger_ms: float
    max_batch_messages: int
    max_batch_bytes: int
    max_pending: int
    compression: str | None = None
    schema: str | None = None
    codec: Codec | None = None
    timeout: float

    def __post_init__(self) -> None:
        if self.compression not in _COMPRESSION:
            raise Refused(f'compression {self.compression!r}: "lz4", "zstd" or None')
        if not 0 < self.max_batch_messages <= MAX_COUNT or self.max_pending < 1:
            raise Refused(f"max_batch_messages is 1 to {MAX_COUNT}, max_pending at least 1")
        if not 0 < self.max_batch_bytes <= MAX_BATCH_BYTES or self.linger_ms < 0 or self.timeout <= 0:
            raise Refused(
                f"max_batch_bytes is 1 to {MAX_BATCH_BYTES}, linger_ms not negative, timeout above 0"
            )

    @property
    def delivery(self) -> pb.Delivery.ValueType:
        return _DELIVERY[self.reliable]

    @property
    def max_messages(self) -> int:
        """In one batch."""
        return min(self.max_batch_messages, self.max_pending)


class PublishStream(PartitionStream):
    def __init__(
        self,
        connection: Connection,
        topic: str,
        address: str,
        options: ProducerOptions,
        pending: PendingLimit,
        *,
        producer_epoch: int = 0,
    ) -> None:
        """``producer_epoch``: what the first partition has given this producer; 0: this is the first."""
        super().__init__(connection, topic, address, "producer")
        self.producer_epoch = producer_epoch
        """Of the producer's open. Presented by each stream from then on: a broker that knows a higher one has
        given the name to another producer, and this one ends."""
        self.error: ClientError | None = None
        """Set when the stream has ended for good: nothing can be sent any more."""
        self.largest = MAX_BATCH_BYTES
        """Message that the topic takes."""
        self.degraded = 0
        """Messages that were acknowledged on fewer disks than they should be on."""
        self.open_batch: ProducerBatch | None = None
        """The end of the queue, while messages can be added to it."""
        self._options = options
        self._pending = pending
        self._queue: deque[ProducerBatch] = deque()
        self._window = SendWindow(succeed=self._succeed, fail=self._fail_batch)
        self._ended_with: ClientError | None = None
        self._linger_s = options.linger_ms / 1000
        self._max_messages = options.max_messages
        self._single_limit = min(options.max_messages, MAX_SINGLES)
        schema_id, schema_version = schema_of(options.codec)
        self._stamp = Stamp(options.name, _COMPRESSION[options.compression], schema_id, schema_version)
        self._wake = asyncio.Event()
        self._linger: asyncio.TimerHandle | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._stream: ClientStream | None = None
        self._is_open = False
        self._is_reliable = True
        """What the broker said of the topic."""
        self._opening = pb.OpenProducer(
            topic=topic,
            producer_name=options.name,
            access_mode=pb.EXCLUSIVE if options.exclusive else pb.SHARED,
            delivery=options.delivery,
            schema_subject=options.schema or "",
            is_name_generated=options.is_name_generated,
        )

    # -- gathering -----------------------------------------------------------------

    @property
    def is_stuck(self) -> bool:
        """What is added now would wait for long."""
        return bool(self._queue) and self._queue[0].ready_at + STUCK_S < self._loop.time()

    def refusal(self, size: int) -> ClientError:
        """Why it does not take a message of this size."""
        if self.error is not None:
            return self.error.again()
        return Refused(f"a message of {size} bytes: {self.topic} takes {self.largest} at most")

    def append(
        self,
        payload: bytes,
        key: str | None,
        attributes: Mapping[str, str] | None,
        publish_time: int | None,
        size: int,
    ) -> asyncio.Future[int]:
        """A message; resolves with its offset. Its room must be taken."""
        batch = self.open_batch
        if batch is None or batch.size + size > self._options.max_batch_bytes:
            batch = self._begin()
        future = self._loop.create_future()
        batch.add(payload, key, attributes, publish_time, size, future)
        if len(batch.payloads) >= self._single_limit:
            self._seal()
        return future

    def extend(
        self,
        payloads: Sequence[bytes],
        keys: Sequence[str | None] | None,
        attributes: Sequence[Mapping[str, str]] | None,
        publish_time: int | None,
        size: int,
    ) -> asyncio.Future[int]:
        """Messages for one batch; resolves with the offset of the first. Their room must be taken."""
        batch = self.open_batch
        if (
            batch is None
            or batch.size + size > self._options.max_batch_bytes
            or len(batch) + len(payloads) > self._max_messages
        ):
            batch = self._begin()
        future: asyncio.Future[int] = self._loop.create_future()
        batch.extend(payloads, keys, attributes, publish_time, size, future)
        if len(batch) >= self._max_messages:
            self._seal()
        return future

    def put(self, records: RecordBatch) -> asyncio.Future[int]:
        """A batch that is encoded already, behind what was sent before; resolves with the offset of its first
        message. Its room must be taken."""
        self._seal()
        future: asyncio.Future[int] = self._loop.create_future()
        self._enqueue(
            EncodedBatch(records, deadline=self._loop.time() + self._options.timeout, waiter=future)
        )
        return future

    async def flush(self) -> None:
        """Until the outcome of everything sent before is known."""
        self._seal()
        last = self._queue[-1] if self._queue else self._window.batches[-1] if len(self._window) else None
        if last is not None and not last.is_settled:
            watcher = self._loop.create_future()
            last.watchers.append(watcher)
            await watcher

    async def close(self) -> None:
        """End at once. What has no receipt fails."""
        await cancelled(self._task)
        self._end(Unavailable("the producer was closed before its messages were sent"))

    def _begin(self) -> ProducerBatch:
        now = self._loop.time()
        batch = ProducerBatch(ready_at=now + self._linger_s, deadline=now + self._options.timeout)
        self._enqueue(batch)
        self.open_batch = batch
        return batch

    def _enqueue(self, batch: ProducerBatch) -> None:
        self._queue.append(batch)
        if self._expiry is None:
            self._expiry = self._loop.call_at(batch.deadline, self._expire)
        self._wake.set()

    def _seal(self) -> None:
        self.open_batch = None
        self._wake.set()

    def _take(self) -> ProducerBatch | None:
        """The next batch to send, if one is ready."""
        if not self._queue or self._window.is_full:
            return None
        head = self._queue[0]
        if head is self.open_batch:
            if not self._linger_s and len(self._window):
                return None
            if (left := head.ready_at - self._loop.time()) > 0:
                self._linger = self._loop.call_later(left, self._wake.set)
                return None
            self.open_batch = None
        return self._queue.popleft()

    # -- streams -----------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._is_open = False
            try:
                await self._session()
            except Unavailable as error:
                log.info("producer: the stream of %s has ended: %s", self.topic, error)
                self._failure = error
                if self._is_open and error.is_elsewhere and not self._is_reliable:
                    self._window.refuse_all()
            except (Refused, DuplicateForgotten) as error:
                if not self._is_open or isinstance(error, ProducerFenced):
                    self._end(error)
                    return
                self._ended_with = error
            except ClientError as error:
                self._end(error)
                return
            finally:
                self._stream = None
            await asyncio.sleep(self._backoff.delay(self._failure))

    async def _session(self) -> None:
        """One stream, from its opening to its end, which is always an error."""
        target = await self._route.find()
        async with open_stream(self._connection, "Publish", target, owes=self._is_owed) as stream:
            self._opening.producer_epoch = self.producer_epoch
            opened = (await stream.open(pb.PublishRequest(open=self._opening))).opened
            self.producer_epoch = opened.producer_epoch
            self._is_open = True
            self._stream = stream
            self._failure = None
            self._resume(opened)
            await both(self._receive(stream), self._transmit(stream))

    def _is_owed(self) -> bool:
        """Whether the broker owes an answer: to the opening, or receipts."""
        return not self._is_open or len(self._window) > 0

    def _resume(self, opened: pb.ProducerOpened) -> None:
        self.largest = opened.max_message_size or MAX_BATCH_BYTES
        self._is_reliable = opened.reliable
        ended_with, self._ended_with = self._ended_with, None
        self._window.resume(
            producer_id=opened.producer_id,
            expected=opened.next_sequence,
            reliable=opened.reliable,
            ended_with=ended_with,
        )
        if not self._opened.done():
            self._opened.set_result(None)

    async def _receive(self, stream: ClientStream) -> None:
        while True:
            response = await stream.receive()
            receipts = response.receipts
            for receipt in receipts:
                self._window.receipt(receipt.base_sequence, receipt.base_offset)
                if receipt.is_degraded:
                    self._is_degraded(receipt.count)
            if receipts:
                self._backoff.reset()
                self._wake.set()
                if not len(self._window):
                    # A caller that waited for a receipt goes first, and what it sends now is on its way
                    # before the next read is asked for, which takes gRPC as long as a write.
                    await asyncio.sleep(0)
            if response.ending:
                raise Unavailable(f"topic {self.topic} has gone to another broker", response.ending)

    def _is_degraded(self, count: int) -> None:
        if not self.degraded:
            log.warning(
                "producer: messages are on fewer disks than they should be, for want of brokers topic=%s",
                self.topic,
            )
        self.degraded += count

    async def _transmit(self, stream: ClientStream) -> None:
        for batch in tuple(self._window.batches):
            if not batch.is_settled:
                await self._send(stream, batch)
        while True:
            next_batch = self._take()
            if next_batch is None:
                self._wake.clear()
                await self._wake.wait()
                self._stop_linger()
            elif self._is_encoded(next_batch):
                await self._send(stream, next_batch)

    def _is_encoded(self, batch: ProducerBatch) -> bool:
        """Number and encode a batch. One that the format cannot hold fails, and its number is the next
        one's."""
        self._window.push(batch)
        try:
            batch.encode(self._stamp, self._window.producer_id)
        except CallerError as error:
            self._window.drop_last()
            self._fail_batch(batch, Refused(str(error)))
            return False
        return True

    async def _send(self, stream: ClientStream, batch: ProducerBatch) -> None:
        data = batch.encode(self._stamp, self._window.producer_id)
        batch.was_sent = True
        await stream.write(pb.PublishRequest(batch=bytes(data)))

    def _stop_linger(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    # -- settling -----------------------------------------------------------------

    def _succeed(self, batch: ProducerBatch, base_offset: int) -> None:
        if not batch.is_settled:
            batch.succeed(base_offset)
            self._pending.give_back(len(batch), batch.size)

    def _fail_batch(self, batch: ProducerBatch, error: ClientError) -> None:
        if not batch.is_settled:
            batch.fail(error)
            self._pending.give_back(len(batch), batch.size)

    def _expire(self) -> None:
        """Fail what has waited too long. Deadlines are in the order of the batches."""
        now = self._loop.time()
        seconds = self._options.timeout
        for batch in self._window.batches:
            if batch.deadline > now or batch.is_settled:
                continue
            if batch.was_sent:
                self._fail_batch(batch, OutcomeUnknown(f"sent, and no receipt came within {seconds} s"))
            else:
                self._fail_batch(batch, self._too_late())
            if self._stream is not None:
                self._stream.call.cancel()  # the next one tells which sequences are taken
        while self._queue and self._queue[0].deadline <= now:
            batch = self._queue.popleft()
            if batch is self.open_batch:
                self.open_batch = None
            self._fail_batch(batch, self._too_late())
        waiting = [batch.deadline for batch in self._window.batches if not batch.is_settled]
        waiting.extend(batch.deadline for batch in self._queue)
        self._expiry = self._loop.call_at(waiting[0], self._expire) if waiting else None

    def _too_late(self) -> ClientError:
        if self._failure is not None:
            return self._failure
        return Timeout(f"not sent within {self._options.timeout} s: the broker takes in less than is sent")

    def _end(self, error: ClientError) -> None:
        """Nothing can be sent any more."""
        if self.error is not None:
            return
        self.error = error
        for timer in (self._linger, self._expiry):
            if timer is not None:
                timer.cancel()
        # A status comes behind the receipts of all that was taken, so what has none was not taken; without a
        # status nothing is known of what was sent.
        is_told = self._is_open and isinstance(error, Refused)
        unknown = OutcomeUnknown(f"sent, and no receipt came before the producer ended: {error}")
        for batch in tuple(self._window.batches):
            if self._window.is_known(batch):
                self._succeed(batch, UNKNOWN_OFFSET)
            else:
                self._fail_batch(batch, error if is_told or not batch.was_sent else unknown)
        for batch in self._queue:
            self._fail_batch(batch, error)
        self._window.batches.clear()
        self._queue.clear()
        self.open_batch = None
        self._fail_opening(error)
