"""Producer: what an application sends with. It checks messages, chooses their partition, waits for room, and
leaves the rest to the streams."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

from sava.client.connection import Connection, TopicSession, create_partitions
from sava.client.errors import ClientError, Closed, Refused
from sava.client.messages import microseconds
from sava.client.outgoing import (
    MESSAGE_OVERHEAD,
    Columns,
    PendingLimit,
    attributes_size,
    key_size,
    payload_of,
)
from sava.client.publish_stream import ProducerOptions, PublishStream
from sava.proto import streams_pb2 as pb
from sava.records import RecordBatch
from sava.tasks import cancelled

_FNV_BASIS: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3
_FNV_MASK: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Sent:
    """Messages that are in a topic one behind the other. ``offset`` is that of the first, or
    UNKNOWN_OFFSET."""

    topic: str
    offset: int
    count: int


class Producer(TopicSession):
    """Made by ``Client.producer``. Owned by one event loop."""

    def __init__(self, connection: Connection, topic: str, options: ProducerOptions) -> None:
        super().__init__(connection, topic)
        self.name = options.name
        self._options = options
        self._codec = options.codec
        self._pending = PendingLimit(options.max_pending)
        self._streams: list[PublishStream] = []
        self._turn = 0
        self._error: ClientError | None = Closed(f"the producer of {topic} is not open")

    @property
    def degraded(self) -> int:
        """How many of its messages were acknowledged on fewer disks than they should be on, because a broker
        was alone and its cluster lets it continue (``journal.degraded: allow``)."""
        return sum(stream.degraded for stream in self._streams)

    async def open(self) -> None:
        """Find or create the topic and open a stream to each of its partitions. Raises Refused,
        Unavailable."""
        connection, options = self._connection, self._options
        if options.partitions:
            found = await create_partitions(connection, self.topic, options.partitions, options.delivery)
        else:
            found = await connection.look_up(self.topic, create=True, delivery=options.delivery)
        try:
            await self._add_streams(found.partitions)
        except BaseException:
            await self.close(timeout=0)
            raise
        self._error = None
        if found.partition_count:
            self._watch_partitions(self._streams, self._add_streams)

    async def close(self, *, timeout: float | None = None) -> None:
        """Send what is there and wait for its receipts, at most ``timeout`` seconds (by default as long as a
        message may take); then end. What has no receipt by then fails for those who wait for it."""
        self._is_closed = True
        self._error = closed = Closed(f"the producer of {self.topic} is closed")
        await cancelled(self._watch)
        try:
            async with asyncio.timeout(self._options.timeout if timeout is None else timeout):
                await self._flush()
        except TimeoutError:
            pass  # those who wait for their messages learn it
        finally:
            self._pending.fail(closed)
            await asyncio.gather(*(stream.close() for stream in self._streams))

    async def _add_streams(self, partitions: Sequence[pb.Partition]) -> None:
        """Messages go to the new streams once all of them are open. The first partition is opened before the
        others: it decides which of two producers of one name is the later one, and they follow it."""
        streams: list[PublishStream] = []
        try:
            if not self._streams:
                streams.append(self._stream(partitions[0]))
                await streams[0].opened(self._connection.timeout)
                partitions = partitions[1:]
            first = (self._streams or streams)[0]
            if first.error is not None:
                raise first.error.again()
            streams += [self._stream(partition, first.producer_epoch) for partition in partitions]
            await asyncio.gather(*(stream.opened(self._connection.timeout) for stream in streams))
        except BaseException:
            await asyncio.gather(*(stream.close() for stream in streams))
            raise
        self._streams.extend(streams)

    def _stream(self, partition: pb.Partition, producer_epoch: int = 0) -> PublishStream:
        return PublishStream(
            self._connection,
            partition.topic,
            partition.address,
            self._options,
            self._pending,
            producer_epoch=producer_epoch,
        )

    # -- sending -----------------------------------------------------------------

    def send(
        self,
        payload: Any,
        *,
        key: str | None = None,
        attributes: Mapping[str, str] | None = None,
        publish_time: int | datetime | None = None,
    ) -> asyncio.Future[int]:
        """Publish one message; to be awaited, gives its offset when it is durable. ``payload`` is bytes, or
        with a codec whatever that encodes; ``publish_time`` a datetime or microseconds, by default now.

        The message is on its way when this returns, in the order of the calls; those under way at the same
        time share batches. When too many are, it waits for room first. If the future is cancelled, the
        message may still be sent.
        """
        if self._codec is not None:
            payload = self._codec.encode(payload)
        elif type(payload) is not bytes:
            payload = payload_of(payload)
        size = len(payload) + MESSAGE_OVERHEAD
        if key is not None:
            size += key_size(key)
        if attributes:
            size += attributes_size(attributes)
        if publish_time is not None and isinstance(publish_time, datetime):
            publish_time = microseconds(publish_time)
        if self._error is not None:
            raise self._error.again()
        if not self._pending.take(1, size):
            return asyncio.ensure_future(self._send_later(payload, key, attributes, publish_time, size))
        streams = self._streams
        stream = streams[0] if len(streams) == 1 else self._choose(key)
        if stream.error is None and len(payload) <= stream.largest:
            return stream.append(payload, key, attributes, publish_time, size)
        self._pending.give_back(1, size)
        raise stream.refusal(len(payload))

    async def _send_later(
        self,
        payload: bytes,
        key: str | None,
        attributes: Mapping[str, str] | None,
        publish_time: int | None,
        size: int,
    ) -> int:
        """When there is room."""
        await self._pending.wait(1, size, self._options.timeout)
        stream = self._take_stream(self._choose(key) if self._error is None else None, len(payload), 1, size)
        return await stream.append(payload, key, attributes, publish_time, size)

    async def send_many(
        self,
        payloads: Sequence[Any],
        *,
        keys: Sequence[str | None] | None = None,
        attributes: Sequence[Mapping[str, str]] | None = None,
        publish_time: int | datetime | None = None,
    ) -> list[Sent]:
        """Publish many messages with one await; returns where they are when all are durable.

        Without keys, and with keys on a topic that is not partitioned, they keep their order, and so do the
        parts of the answer. If it fails, some of the messages may be in the topic.
        """
        columns = Columns.of(payloads, keys, attributes, self._codec)
        time = microseconds(publish_time) if isinstance(publish_time, datetime) else publish_time
        chunks = [
            (stream, chunk)
            for stream, group in self._groups(columns)
            for chunk in group.chunks(self._options.max_messages, self._options.max_batch_bytes)
        ]
        parts: list[tuple[PublishStream, int, asyncio.Future[int]]] = []
        try:
            for stream, chunk in chunks:
                part = await self._send_chunk(stream, chunk, time)
                parts.append(part)
        except BaseException:
            for _, _, future in parts:
                future.cancel()  # the messages are still sent, and no caller waits for them
            raise
        results = await asyncio.gather(*(future for _, _, future in parts), return_exceptions=True)
        sent = []
        for (used, count, _), result in zip(parts, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            sent.append(Sent(used.topic, result, count))
        return sent

    async def send_batch(self, records: RecordBatch) -> asyncio.Future[int]:
        """Publish a batch that is encoded already, as it is: not assigned, and its messages name no producer.
        For a topic, or partition, that has no partitions itself. Waits for room; the future has the offset of
        the first message when all are durable."""
        self._check()
        if len(self._streams) > 1:
            raise Refused(f"{self.topic} is partitioned: a batch goes to one of its partitions")
        count, size = len(records), records.header.length
        if not self._pending.take(count, size):
            await self._pending.wait(count, size, self._options.timeout)
        return self._take_stream(self._streams[0], 0, count, size).put(records)

    async def flush(self) -> None:
        """Send what is there without lingering, and return when the outcome of all of it is known. Errors go
        to those who sent the messages."""
        self._check()
        await self._flush()

    async def _flush(self) -> None:
        await asyncio.gather(*(stream.flush() for stream in self._streams))

    async def _send_chunk(
        self, stream: PublishStream | None, chunk: Columns, publish_time: int | None
    ) -> tuple[PublishStream, int, asyncio.Future[int]]:
        count = len(chunk.payloads)
        size = chunk.size + count * MESSAGE_OVERHEAD
        if not self._pending.take(count, size):
            self._check()
            await self._pending.wait(count, size, self._options.timeout)
        if stream is None and self._error is None:
            stream = self._choose(None)
        stream = self._take_stream(stream, chunk.largest, count, size)
        future = stream.extend(chunk.payloads, chunk.keys, chunk.attributes, publish_time, size)
        return stream, count, future

    # -- routing -----------------------------------------------------------------

    def _check(self) -> None:
        if self._error is not None:
            raise self._error.again()

    def _choose(self, key: str | None) -> PublishStream:
        """A key has its partition. Messages without one fill a batch of one partition, then one of the next:
        full batches are worth more than an even spread within milliseconds. A partition that takes none at
        present is passed over: the open batch there would gather a thousand messages that any other could
        have."""
        streams = self._streams
        if len(streams) == 1:
            return streams[0]
        if key is not None:
            return streams[partition_of(key, len(streams))]
        stream = streams[self._turn]
        if stream.open_batch is None or stream.is_stuck:
            turns = [(self._turn + step) % len(streams) for step in range(1, len(streams) + 1)]
            self._turn = next((turn for turn in turns if not streams[turn].is_stuck), turns[0])
        return streams[self._turn]

    def _take_stream(
        self, stream: PublishStream | None, largest: int, count: int, size: int
    ) -> PublishStream:
        """The stream, if it takes messages that have their room; else the room is given back."""
        if stream is not None and self._error is None and stream.error is None and largest <= stream.largest:
            return stream
        self._pending.give_back(count, size)
        self._check()
        assert stream is not None
        raise stream.refusal(largest)

    def _groups(self, columns: Columns) -> list[tuple[PublishStream | None, Columns]]:
        """Messages by stream; None for those that may go to any."""
        self._check()
        if columns.keys is None or len(self._streams) == 1:
            return [(None, columns)]
        rows: dict[int | None, list[int]] = {}
        for row, key in enumerate(columns.keys):
            index = None if key is None else partition_of(key, len(self._streams))
            rows.setdefault(index, []).append(row)
        return [
            (None if index is None else self._streams[index], columns.select(chosen))
            for index, chosen in rows.items()
        ]


@lru_cache(maxsize=1 << 16)
def fnv1a(key: str) -> int:
    """FNV-1a, 64 bits, of the key's UTF-8. A byte costs about 0.1 µs here, and keys repeat: hence the
    memory."""
    value = _FNV_BASIS
    for byte in key.encode():
        value = ((value ^ byte) * _FNV_PRIME) & _FNV_MASK
    return value


def partition_of(key: str, partitions: int) -> int:
    """Which partition a key belongs to: the same one as for Danube's clients."""
    return fnv1a(key) % partitions
