"""The client without ``async``: the same names, over one event loop in a thread of its own.

    with Client("http://127.0.0.1:6650") as client:
        with client.producer("/default/orders") as producer:
            offset = producer.send(b"…", key="k")

Any thread may call. Ctrl-C interrupts a call that waits and leaves everything usable. A process that was
forked from one that had used a client can use none: gRPC does not survive it.

A call from another thread costs tens of microseconds, so ``send_many``, ``receive_batch`` and iteration,
which hand over a batch at a time, are the fast ways. Iteration takes whole batches off the queue: after a
reconnect, messages of such a batch that were not acked yet can come again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar

from sava.client import Batch
from sava.client import Client as AsyncClient
from sava.client import Consumer as AsyncConsumer
from sava.client import Producer as AsyncProducer
from sava.client import Reader as AsyncReader
from sava.client.connection import Tls, Token
from sava.client.consumer import SubscriptionType
from sava.client.errors import Closed, Refused
from sava.client.loop_thread import LoopThread
from sava.client.messages import Codec, End, SchemaCodec, Start
from sava.client.producer import Sent
from sava.records import Message

Wrapped = TypeVar("Wrapped", AsyncProducer, AsyncConsumer, AsyncReader)

__all__ = ["Client", "Consumer", "Producer", "Reader"]


class _Facade(Generic[Wrapped]):
    """What producers, consumers and readers have in common."""

    def __init__(self, loop: LoopThread, wrapped: Wrapped) -> None:
        self._loop = loop
        self._wrapped: Wrapped = wrapped

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def topic(self) -> str:
        return self._wrapped.topic

    @property
    def is_closed(self) -> bool:
        return self._wrapped.is_closed

    def open(self) -> None:
        self._loop.run(self._wrapped.open())

    def close(self) -> None:
        self._loop.run(self._wrapped.close())


class Producer(_Facade[AsyncProducer]):
    @property
    def degraded(self) -> int:
        return self._wrapped.degraded

    @property
    def name(self) -> str:
        return self._wrapped.name

    def send(
        self,
        payload: Any,
        *,
        key: str | None = None,
        attributes: Mapping[str, str] | None = None,
        publish_time: int | datetime | None = None,
    ) -> int:
        async def send() -> int:
            return await self._wrapped.send(
                payload, key=key, attributes=attributes, publish_time=publish_time
            )

        return self._loop.run(send())

    def send_many(
        self,
        payloads: Sequence[Any],
        *,
        keys: Sequence[str | None] | None = None,
        attributes: Sequence[Mapping[str, str]] | None = None,
        publish_time: int | datetime | None = None,
    ) -> list[Sent]:
        return self._loop.run(
            self._wrapped.send_many(payloads, keys=keys, attributes=attributes, publish_time=publish_time)
        )

    def flush(self) -> None:
        self._loop.run(self._wrapped.flush())


class Consumer(_Facade[AsyncConsumer]):
    def __init__(self, loop: LoopThread, wrapped: AsyncConsumer) -> None:
        super().__init__(loop, wrapped)
        self._acked: deque[Message | Batch] = deque()
        self._is_passing = False

    @property
    def subscription(self) -> str:
        return self._wrapped.subscription

    @property
    def name(self) -> str:
        return self._wrapped.name

    def __iter__(self) -> Iterator[Message]:
        while True:
            try:
                batch = self.receive_batch()
            except Closed:
                if self.is_closed:
                    return
                raise
            if batch is not None:
                yield from batch

    def receive_batch(self, max_messages: int | None = None, *, timeout: float | None = None) -> Batch | None:
        return self._loop.run(self._wrapped.receive_batch(max_messages, timeout=timeout))

    def ack(self, message: Message | Batch) -> None:
        """As there; many acks cross to the loop's thread together."""
        if message.topic not in self._wrapped.partitions:
            raise Refused(f"a message of {message.topic}: this consumer reads {self.topic}")
        self._acked.append(message)
        if not self._is_passing:
            self._is_passing = True
            self._loop.start(self._pass_on, name=f"sava acks of {self.topic}")

    async def _pass_on(self) -> None:
        """On the loop's thread. The flag falls first: a thread that acks after that calls for another pass,
        and what was acked before is seen by this one."""
        self._is_passing = False
        messages: list[Message] = []
        while self._acked:
            acked = self._acked.popleft()
            if isinstance(acked, Batch):
                await self._wrapped.ack(acked)
            else:
                messages.append(acked)
        await self._wrapped.ack_many(messages)

    def ack_many(self, messages: Iterable[Message] | Batch) -> None:
        self._loop.run(self._wrapped.ack_many(messages))

    def nack(
        self, message: Message | Batch | Iterable[Message], *, delay_ms: int = 0, reason: str = ""
    ) -> None:
        self._loop.run(self._wrapped.nack(message, delay_ms=delay_ms, reason=reason))

    def flush(self, *, timeout: float | None = None) -> None:
        self._loop.run(self._wrapped.flush(timeout=timeout))


class Reader(_Facade[AsyncReader]):
    def __iter__(self) -> Iterator[Message]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[Batch]:
        while (batch := self._loop.run(self._wrapped.next_batch())) is not None:
            yield batch


class Client:
    """As ``sava.client.Client``, whose options are explained there."""

    def __init__(
        self,
        addresses: str | Iterable[str],
        *,
        token: Token | None = None,
        tls: Tls | None = None,
        timeout: float = 10.0,
    ) -> None:
        self._client = AsyncClient(addresses, token=token, tls=tls, timeout=timeout)
        self._loop = LoopThread()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        try:
            self._loop.run(self._client.close())
        finally:
            self._loop.close()

    def schema(self, subject: str, *, version: int | None = None) -> SchemaCodec:
        return self._loop.run(self._client.schema(subject, version=version))

    def producer(
        self,
        topic: str,
        *,
        name: str | None = None,
        reliable: bool | None = True,
        partitions: int | None = None,
        exclusive: bool = False,
        linger_ms: float = 0,
        max_batch_messages: int = 10_000,
        max_batch_bytes: int = 1 << 20,
        max_pending: int = 100_000,
        compression: Literal["lz4", "zstd"] | None = None,
        schema: str | None = None,
        codec: Codec | None = None,
        timeout: float = 30.0,
    ) -> Producer:
        """``linger_ms`` is 0 here: a thread that waits for each message has nothing to share a batch with."""
        made = self._client.producer(
            topic,
            name=name,
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
        return Producer(self._loop, made)

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
        made = self._client.consumer(
            topic,
            subscription=subscription,
            type=type,
            name=name,
            start=start,
            key_filters=key_filters,
            receive_queue=receive_queue,
            codec=codec,
        )
        return Consumer(self._loop, made)

    def reader(
        self,
        topic: str,
        *,
        start: Start = "earliest",
        end: End = None,
        codec: Codec | None = None,
        timeout: float = 60.0,
    ) -> Reader:
        made = self._client.reader(topic, start=start, end=end, codec=codec, timeout=timeout)
        return Reader(self._loop, made)
