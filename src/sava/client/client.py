"""Client: the way into a cluster. It makes producers, consumers and readers, which share its connections."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Literal, Self, TypeVar

from sava.client.connection import Connection
from sava.client.consumer import Consumer
from sava.client.messages import Codec, End, SchemaCodec, Start, codec_of
from sava.client.producer import Producer
from sava.client.publish_stream import ProducerOptions
from sava.client.reader import Reader, ReaderOptions
from sava.client.subscribe_stream import ConsumerOptions, SubscriptionType
from sava.proto import streams_pb2 as pb
from sava.security.credentials import Tls, Token

Made = TypeVar("Made", Producer, Consumer, Reader)


class Client:
    """addresses  ``"http://host:6650"``, ``https://`` or ``host:port``; several as a list or with commas
    between.
               Any broker of the cluster will do, and one that answers is enough.
    token      goes with every call as ``authorization: Bearer …``: the token, a Path of the file that has it,
               which is read each time, or a callable, also an async one, which is asked each time.
    tls        files for ``https``; see Tls. With a token the client needs no certificate.
    timeout    seconds for looking up and opening, retries included.

    Owned by one event loop, as is everything made from it.
    """

    def __init__(
        self,
        addresses: str | Iterable[str],
        *,
        token: Token | None = None,
        tls: Tls | None = None,
        timeout: float = 10.0,
    ) -> None:
        self._connection = Connection(addresses, token=token, tls=tls, timeout=timeout)
        self._made: list[Producer | Consumer | Reader] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close everything that was made from this client, then the connections."""
        made, self._made = self._made, []
        await asyncio.gather(*(each.close() for each in made if not each.is_closed))
        await self._connection.close()

    async def schema(self, subject: str, *, version: int | None = None) -> SchemaCodec:
        """A registered schema, the latest version by default, as the codec of producers and consumers: values
        in and out, and each message with the numbers of its schema."""
        request = pb.SchemaRequest(subject=subject, version=version or 0)
        schema = await self._connection.ask("Schema", request)
        return await asyncio.to_thread(codec_of, subject, schema)

    def producer(
        self,
        topic: str,
        *,
        name: str | None = None,
        reliable: bool | None = True,
        partitions: int | None = None,
        exclusive: bool = False,
        linger_ms: float = 5,
        max_batch_messages: int = 10_000,
        max_batch_bytes: int = 1 << 20,
        max_pending: int = 100_000,
        compression: Literal["lz4", "zstd"] | None = None,
        schema: str | None = None,
        codec: Codec | None = None,
        timeout: float = 30.0,
    ) -> Producer:
        """A producer, to be opened with ``async with`` or ``open()``.

        name                who publishes. The producer that was opened last has the name, also after brokers
                            have failed: one that was opened before it ends with ProducerFenced. By default a
                            generated one, which no other producer has.
        reliable            what the topic must be, and becomes if it does not exist: True keeps messages,
                            False passes them on to the consumers that are connected. None takes either.
        partitions          create the topic with this many partitions, or add the missing ones.
        exclusive           refuse all other producers of the topic.
        linger_ms           how long a message may wait for others to share its batch; 0 sends at once, and
                            what comes while a batch is under way shares the next.
        max_batch_messages, max_batch_bytes
                            a batch that has reached one of them goes without lingering.
        max_pending         messages without a receipt; ``send`` waits when there are this many.
        compression         of batches.
        schema              the subject that the messages follow.
        codec               makes payloads of values.
        timeout             seconds until a message that has no receipt fails, retries included.
        """
        options = ProducerOptions(
            name=name or f"producer-{secrets.token_hex(6)}",
            is_name_generated=not name,
            reliable=reliable,
            partitions=partitions,
            exclusive=exclusive,
            linger_ms=linger_ms,
            max_batch_messages=max_batch_messages,
            max_batch_bytes=max_batch_bytes,
            max_pending=max_pending,
            compression=compression,
            schema=schema,
            codec=codec,
            timeout=timeout,
        )
        return self._remembered(Producer(self._connection, topic, options))

    def consumer(
        self,
        topic: str,
        *,
        subscription: str,
        type: SubscriptionType = "shared",  # noqa: A002 (users know it by this name)
        name: str | None = None,
        start: Start = "earliest",
        key_filters: Sequence[str] = (),
        receive_queue: int = 10_000,
        codec: Codec | None = None,
    ) -> Consumer:
        """A consumer, to be opened with ``async with`` or ``open()``.

        subscription   whose messages it takes; it is created if it does not exist.
        type           how several consumers of the subscription share them: "exclusive" (there is one),
                       "shared", "failover" (one, and another when it leaves), "key_shared" (each key to one).
        name           takes the place of a consumer of this name. By default a new one.
        start          where a subscription that does not exist yet begins: "earliest", "latest", an offset,
                       or a datetime.
        key_filters    of a key-shared consumer: globs with * and ?.
        receive_queue  messages that may be on their way to the application.
        codec          makes values of payloads: ``message.value``.
        """
        options = ConsumerOptions(
            subscription=subscription,
            type=type,
            name=name or f"consumer-{secrets.token_hex(6)}",
            start=start,
            key_filters=key_filters,
            receive_queue=receive_queue,
            codec=codec,
        )
        return self._remembered(Consumer(self._connection, topic, options))

    def reader(
        self,
        topic: str,
        *,
        start: Start = "earliest",
        end: End = None,
        codec: Codec | None = None,
        timeout: float = 60.0,
    ) -> Reader:
        """A reader, to be opened with ``async with`` or ``open()``.

        start    "earliest", "latest", an offset (of each partition), or a datetime.
        end      exclusive: an offset (of each partition), a datetime, or "latest" for what is there now.
                 None: it waits for more.
        codec    makes values of payloads: ``message.value``.
        timeout  seconds without a broker until reading fails.
        """
        options = ReaderOptions(start=start, end=end, timeout=timeout, codec=codec)
        return self._remembered(Reader(self._connection, topic, options))

    def _remembered(self, made: Made) -> Made:
        self._made = [each for each in self._made if not each.is_closed]
        self._made.append(made)
        return made
