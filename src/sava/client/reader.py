"""Reader: the messages of a topic from a position on, without a subscription: nothing is acked or remembered.

Each partition has a task that keeps a stream open and knows the next offset, so that after a break it
continues where it was, without a gap and without a repetition. All of them put what they read into one
bounded queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Self

from sava.client.connection import (
    OPEN_TIMEOUT_S,
    Connection,
    ReconnectBackoff,
    Route,
    TopicSession,
    open_stream,
)
from sava.client.errors import ClientError, Closed, Refused, Unavailable
from sava.client.messages import (
    Batch,
    Codec,
    End,
    Start,
    microseconds,
    position_of,
)
from sava.errors import SavaError
from sava.proto import streams_pb2 as pb
from sava.records import Message, RecordBatch
from sava.tasks import cancelled

log = logging.getLogger(__name__)

QUEUED_RESPONSES: Final = 4
"""Of about a megabyte each."""
LONGEST_ATTEMPT_S: Final = 30.0
"""A look-up and an attempt to connect take less, so a stream that lived longer was one, even if there was
nothing to read."""


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """As in ``Client.reader``, where they are explained."""

    start: Start
    end: End
    timeout: float
    codec: Codec | None

    def __post_init__(self) -> None:
        position_of(self.start)
        if self.end is not None and (self.end == "earliest" or isinstance(self.end, bool)):
            raise Refused(f'end {self.end!r}: "latest", an offset, a datetime or None')


class Reader(TopicSession):
    """Made by ``Client.reader``. Owned by one event loop."""

    def __init__(self, connection: Connection, topic: str, options: ReaderOptions) -> None:
        super().__init__(connection, topic)
        self._options = options
        self._queue: asyncio.Queue[list[Batch]] = asyncio.Queue(QUEUED_RESPONSES)
        self._batches: Iterator[Batch] = iter(())
        self._messages: Iterator[Message] = iter(())
        self._streams: list[asyncio.Task[None]] = []
        self._running = 0
        self._error: SavaError | None = Closed(f"the reader of {topic} is not open")

    async def open(self) -> None:
        """Find the partitions and where to begin. Raises TopicUnknown, Refused, Unavailable."""
        options = self._options
        found = await self._connection.look_up(self.topic)
        streams = [_ReadStream(self._connection, partition, options) for partition in found.partitions]
        await asyncio.gather(*(stream.resolve(options.start, options.end) for stream in streams))
        self._error = None
        for stream in streams:
            self._begin(stream)
        if found.partition_count and options.end is None:
            self._watch_partitions(self._streams, self._add_new)

    async def close(self) -> None:
        self._is_closed = True
        self._error = Closed(f"the reader of {self.topic} is closed")
        await cancelled(self._watch, *self._streams)
        self._batches, self._messages = iter(()), iter(())
        while not self._queue.empty():
            self._queue.get_nowait()
        self._wake()

    async def _add_new(self, partitions: Sequence[pb.Partition]) -> None:
        start = self._options.start
        for partition in partitions:
            stream = _ReadStream(self._connection, partition, self._options)
            await stream.resolve(start if isinstance(start, datetime) else "earliest", None)
            self._begin(stream)

    def _begin(self, stream: _ReadStream) -> None:
        self._running += 1
        task = asyncio.create_task(stream.run(self._queue), name=f"sava reader of {stream.topic}")
        task.add_done_callback(self._ended)
        self._streams.append(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running -= 1
        if not task.cancelled() and (error := task.exception()) is not None and self._error is None:
            self._error = error if isinstance(error, SavaError) else ClientError(f"reading failed: {error!r}")
        if not self._running or self._error is not None:
            self._wake()

    def _wake(self) -> None:
        """A caller that waits for the queue looks again. A full one needs no waking."""
        if not self._queue.full():
            self._queue.put_nowait([])

    # -- reading -----------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        for message in self._messages:
            return message
        batch = await self.next_batch()
        if batch is None:
            raise StopAsyncIteration
        self._messages = iter(batch)
        return next(self._messages)

    async def batches(self) -> AsyncIterator[Batch]:
        """The same messages, a batch at a time."""
        while (batch := await self.next_batch()) is not None:
            yield batch

    async def next_batch(self) -> Batch | None:
        """The next messages of one partition; None at the end."""
        while True:
            for batch in self._batches:
                return batch
            found = await self.next_batches()
            if found is None:
                return None
            self._batches = iter(found)

    async def next_batches(self) -> list[Batch] | None:
        """As they came from the broker, together: about a megabyte, or what there was; None at the end. For
        callers that pay for each call, such as another thread."""
        while True:
            if self._queue.empty():
                if self._is_closed:
                    return None
                if self._error is not None:
                    raise self._error.again() if isinstance(self._error, ClientError) else self._error
                if not self._running:
                    return None
            if found := await self._queue.get():
                return found


class _ReadStream:
    def __init__(self, connection: Connection, partition: pb.Partition, options: ReaderOptions) -> None:
        self.topic = partition.topic
        self._connection = connection
        self._route = Route(connection, partition.topic, partition.address)
        self._options = options
        self._backoff = ReconnectBackoff()
        self._start = pb.Position(earliest=True)
        self._next: int | None = None
        """The offset to continue with, once it is known."""
        self._end: int | None = None
        self._healthy_at = 0.0

    async def resolve(self, start: Start, end: End) -> None:
        """Turn positions that move into offsets: a stream that breaks before its first message must not skip
        any when "latest" is later by then."""
        if start == "earliest" and end is None:
            return
        if isinstance(start, int) and isinstance(end, int):
            self._next, self._end = start, end
            return
        if isinstance(start, datetime) or start == "latest" or end is not None:
            at_start = await self._offsets(start if isinstance(start, datetime) else None)
            match start:
                case "earliest":
                    self._next = at_start.start_offset
                case "latest":
                    self._next = at_start.next_offset
                case datetime():
                    self._next = at_start.offset
                case int():
                    self._next = start
            if isinstance(end, datetime):
                self._end = (await self._offsets(end)).offset
            else:
                self._end = at_start.next_offset if end == "latest" else end
        elif isinstance(start, int):
            self._next = start

    async def _offsets(self, time: datetime | None) -> pb.OffsetsResponse:
        request = pb.OffsetsRequest(topic=self.topic)
        if time is not None:
            request.publish_time = microseconds(time)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._connection.timeout
        while True:
            target = await self._route.find()
            try:
                response: pb.OffsetsResponse = await self._connection.call(
                    "Offsets", request, target=target, timeout=min(deadline - loop.time(), OPEN_TIMEOUT_S)
                )
            except Unavailable as error:
                delay = self._backoff.delay(error)
                if loop.time() + delay > deadline:
                    raise
                await asyncio.sleep(delay)
            else:
                self._backoff.reset()
                self._route.stay(target)
                return response

    async def run(self, queue: asyncio.Queue[list[Batch]]) -> None:
        """Until the end is reached. Raises Refused, or Unavailable when there was no stream for too long."""
        loop = asyncio.get_running_loop()
        self._healthy_at = loop.time()
        while not self._is_done:
            began = loop.time()
            try:
                await self._session(queue)
            except Unavailable as error:
                log.info("reader: the stream of %s has ended: %s", self.topic, error)
                if loop.time() - began > LONGEST_ATTEMPT_S:
                    self._healthy_at = loop.time()
                if loop.time() - self._healthy_at > self._options.timeout:
                    raise
                await asyncio.sleep(self._backoff.delay(error))

    @property
    def _is_done(self) -> bool:
        return self._end is not None and self._next is not None and self._next >= self._end

    async def _session(self, queue: asyncio.Queue[list[Batch]]) -> None:
        request = pb.ReadRequest(topic=self.topic, start=self._start)
        if self._next is not None:
            request.start.CopyFrom(pb.Position(offset=self._next))
        if self._end is not None:
            request.end = self._end
        target = await self._route.find()
        async with open_stream(self._connection, "Read", target, request) as stream:
            while not self._is_done:
                batches = [self._trimmed(data) for data in (await stream.receive()).batches]
                self._backoff.reset()
                await queue.put([batch for batch in batches if batch is not None])
                self._healthy_at = asyncio.get_running_loop().time()

    def _trimmed(self, data: bytes) -> Batch | None:
        """A batch without what was read before, or is beyond the end."""
        records = RecordBatch.parse(data)
        records.verify_crc()
        start = records.base_offset if self._next is None else max(self._next, records.base_offset)
        end = records.next_offset if self._end is None else min(self._end, records.next_offset)
        if start >= end:
            return None
        self._next = end
        return Batch(records.slice(start, end), topic=self.topic, codec=self._options.codec)
