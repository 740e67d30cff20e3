"""Consumer: what an application receives and acks with, over the streams of all partitions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime
from typing import Final, Self

from sava.client.connection import Connection, TopicSession
from sava.client.errors import ClientError, Closed, OutcomeUnknown, Refused
from sava.client.messages import Batch, Range, Start, position_of
from sava.client.subscribe_stream import ConsumerOptions, SubscribeHooks, SubscribeStream, coalesced
from sava.errors import SavaError
from sava.proto import streams_pb2 as pb
from sava.records import Message
from sava.tasks import cancelled

CLOSE_S: Final = 5.0
"""For acks to be stored when a consumer is closed. A cluster that has lost its majority stores none for as
long as that is so, and a consumer that leaves, perhaps because of that, does not wait for it: acks that are
not stored cost a delivery, and ``flush`` is for applications that want to know."""


class Consumer(TopicSession):
    """Made by ``Client.consumer``. Owned by one event loop.

    It reconnects for as long as it is open: a broker that is away means no messages, not an error.
    """

    def __init__(self, connection: Connection, topic: str, options: ConsumerOptions) -> None:
        super().__init__(connection, topic)
        self.subscription = options.subscription
        self.name = options.name
        self._options = options
        self._streams: dict[str, SubscribeStream] = {}
        self._queue: deque[tuple[SubscribeStream, Batch]] = deque()
        self._arrived = asyncio.Event()
        self._messages: Iterator[Message] = iter(())
        self._source: SubscribeStream | None = None
        """Where the messages being iterated came from."""
        self._error: SavaError | None = Closed(f"the consumer of {topic} is not open")

    @property
    def partitions(self) -> Collection[str]:
        """The topics that messages come from: the topic itself, or its partitions."""
        return self._streams.keys()

    async def open(self) -> None:
        """Subscribe to every partition. Raises TopicUnknown, Refused, Unavailable."""
        found = await self._connection.look_up(self.topic)
        self._error = None
        try:
            await self._add_streams(found.partitions, self._options.start)
        except BaseException:
            await self.close(timeout=0)
            raise
        if found.partition_count:
            self._watch_partitions(self._streams, self._add_new)

    async def close(self, *, timeout: float | None = None) -> None:
        """Send all acks, wait until they are stored (at most ``timeout`` seconds, by default ``CLOSE_S``),
        and leave the subscription. Messages that are not acked go to others."""
        self._is_closed = True
        self._error = Closed(f"the consumer of {self.topic} is closed")
        await cancelled(self._watch)
        try:
            async with asyncio.timeout(CLOSE_S if timeout is None else timeout):
                await asyncio.gather(*(stream.flush() for stream in self._streams.values()))
        except (TimeoutError, SavaError):
            pass  # what is not stored is delivered again
        finally:
            await asyncio.gather(*(stream.close() for stream in self._streams.values()))
            self._queue.clear()
            self._messages = iter(())
            self._arrived.set()

    async def _add_new(self, partitions: Sequence[pb.Partition]) -> None:
        """Partitions that came into being while the consumer ran: their first messages are new to it, even if
        it began with "latest"."""
        start = self._options.start
        await self._add_streams(partitions, start if isinstance(start, datetime) else "earliest")

    async def _add_streams(self, partitions: Sequence[pb.Partition], start: Start) -> None:
        share = max(self._options.receive_queue // (len(self._streams) + len(partitions)), 1)
        hooks = SubscribeHooks(self._deliver, self._drop, self._end)
        streams = {
            partition.topic: SubscribeStream(
                self._connection, partition, self._options, hooks, start=position_of(start), queue=share
            )
            for partition in partitions
        }
        self._streams.update(streams)
        try:
            await asyncio.gather(*(stream.opened(self._connection.timeout) for stream in streams.values()))
        except BaseException:
            for topic, stream in streams.items():
                await stream.close()
                del self._streams[topic]
            raise

    # -- receiving -----------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        for message in self._messages:
            return message
        try:
            self._source, batch = await self._next()
        except Closed:
            if self._is_closed:
                raise StopAsyncIteration from None
            raise
        self._messages = iter(batch)
        return next(self._messages)

    async def receive_batch(
        self, max_messages: int | None = None, *, timeout: float | None = None
    ) -> Batch | None:
        """The next messages of one partition: at least one, at most ``max_messages``. None if there is none
        within ``timeout`` seconds."""
        try:
            async with asyncio.timeout(timeout):
                _, batch = await self._next(max_messages)
        except TimeoutError:
            return None
        return batch

    async def _next(self, max_messages: int | None = None) -> tuple[SubscribeStream, Batch]:
        while not self._queue:
            if self._error is not None:
                raise self._error.again() if isinstance(self._error, ClientError) else self._error
            self._arrived.clear()
            await self._arrived.wait()
        stream, batch = self._queue.popleft()
        if max_messages is not None and len(batch) > max_messages > 0:
            batch, rest = batch.split(max_messages)
            self._queue.appendleft((stream, rest))
        stream.consumed(len(batch))
        return stream, batch

    def _deliver(self, stream: SubscribeStream, batch: Batch) -> None:
        self._queue.append((stream, batch))
        self._arrived.set()

    def _drop(self, stream: SubscribeStream) -> None:
        self._queue = deque((source, batch) for source, batch in self._queue if source is not stream)
        if self._source is stream:
            self._messages = iter(())

    def _end(self, error: SavaError) -> None:
        """One partition has failed, so the consumer ends: messages left out would go unnoticed."""
        if self._error is None:
            self._error = error
        self._arrived.set()

    # -- answering -----------------------------------------------------------------

    async def ack(self, message: Message | Batch) -> None:
        """A message, or all of a batch, is done with. It is sent in the background, see ``flush``."""
        stream = self._streams.get(message.topic or "")
        if stream is None:
            raise Refused(f"a message of {message.topic}: this consumer reads {self.topic}")
        if isinstance(message, Batch):
            stream.ack_ranges(message.ranges)
        else:
            stream.ack(_offset(message))

    async def ack_many(self, messages: Iterable[Message] | Batch) -> None:
        if isinstance(messages, Batch):
            await self.ack(messages)
            return
        for topic, ranges in _ranges_by_topic(messages).items():
            self._stream(topic).ack_ranges(ranges)

    async def nack(
        self, message: Message | Batch | Iterable[Message], *, delay_ms: int = 0, reason: str = ""
    ) -> None:
        """Deliver again: after ``delay_ms`` at least, or as the subscription's policy says if that is 0."""
        if isinstance(message, Batch):
            by_topic: dict[str, list[Range]] = {message.topic: list(message.ranges)}
        else:
            by_topic = _ranges_by_topic((message,) if isinstance(message, Message) else message)
        for topic, ranges in by_topic.items():
            self._stream(topic).nack(ranges, delay_ms, reason)

    async def flush(self, *, timeout: float | None = None) -> None:
        """Returns when all acks so far are stored. Raises OutcomeUnknown if no broker confirms that in
        time: the consumer continues to send them."""
        seconds = self._connection.timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(stream.flush() for stream in self._streams.values()))
        except TimeoutError:
            raise OutcomeUnknown(
                f"the acks were not confirmed within {seconds} s; they may be stored, now or later"
            ) from None

    def _stream(self, topic: str) -> SubscribeStream:
        try:
            return self._streams[topic]
        except KeyError:
            raise Refused(f"a message of {topic}: this consumer reads {self.topic}") from None


def _offset(message: Message) -> int:
    if message.offset is None:
        raise Refused("the message was not received: it has no offset")
    return message.offset


def _ranges_by_topic(messages: Iterable[Message]) -> dict[str, list[Range]]:
    by_topic: dict[str, list[Range]] = {}
    for message in messages:
        offset = _offset(message)
        by_topic.setdefault(message.topic or "", []).append((offset, offset + 1))
    return {topic: coalesced(ranges) for topic, ranges in by_topic.items()}
