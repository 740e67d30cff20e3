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

import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from sava.client import Batch
from sava.client import Client as AsyncClient
from sava.client import Consumer as AsyncConsumer
from sava.client import Producer as AsyncProducer
from sava.client import Reader as AsyncReader
from sava.client.errors import Closed, Refused
from sava.client.loop_thread import LoopThread
from sava.client.messages import SchemaCodec
from sava.records import Message
from sava.security.credentials import Tls, Token

Wrapped = TypeVar("Wrapped", AsyncProducer, AsyncConsumer, AsyncReader)
Made = TypeVar("Made")
Result = TypeVar("Result")
P = ParamSpec("P")

__all__ = ["Client", "Consumer", "Producer", "Reader"]


def _waits(
    method: Callable[Concatenate[Wrapped, P], Awaitable[Result]],
) -> Callable[Concatenate[_Facade[Wrapped], P], Result]:
    """The method of the asyncio client, as one that waits for its result."""

    @wraps(method)
    def call(self: _Facade[Wrapped], /, *args: P.args, **options: P.kwargs) -> Result:
        async def work() -> Result:
            return await method(self._wrapped, *args, **options)

        return self._loop.run(work())

    there = inspect.signature(method)
    vars(call)["__signature__"] = there.replace(return_annotation=there.empty)  # it returns what is awaited
    return call


def _makes(
    make: Callable[Concatenate[AsyncClient, P], Wrapped],
    facade: Callable[[LoopThread, Wrapped], Made],
    **defaults: Any,
) -> Callable[Concatenate[Client, P], Made]:
    """The method of the asyncio client, as one that makes the facade. ``defaults`` are other ones than
    there."""

    @wraps(make)
    def call(self: Client, /, *args: P.args, **options: P.kwargs) -> Made:
        made: Any = make
        return facade(self._loop, made(self._client, *args, **{**defaults, **options}))

    there = inspect.signature(make)
    parameters = [
        each.replace(default=defaults.get(each.name, each.default)) for each in there.parameters.values()
    ]
    vars(call)["__signature__"] = there.replace(parameters=parameters, return_annotation=there.empty)
    return call


class _Facade(Generic[Wrapped]):
    """What producers, consumers and readers have in common."""

    def __init__(self, loop: LoopThread, wrapped: Wrapped) -> None:
        self.topic = wrapped.topic
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
    def is_closed(self) -> bool:
        return self._wrapped.is_closed

    def open(self) -> None:
        self._loop.run(self._wrapped.open())

    def close(self) -> None:
        self._loop.run(self._wrapped.close())


class Producer(_Facade[AsyncProducer]):
    """Made by ``Client.producer``."""

    def __init__(self, loop: LoopThread, wrapped: AsyncProducer) -> None:
        super().__init__(loop, wrapped)
        self.name = wrapped.name

    @property
    def degraded(self) -> int:
        return self._wrapped.degraded

    send = _waits(AsyncProducer.send)
    send_many = _waits(AsyncProducer.send_many)
    flush = _waits(AsyncProducer.flush)


class Consumer(_Facade[AsyncConsumer]):
    """Made by ``Client.consumer``."""

    def __init__(self, loop: LoopThread, wrapped: AsyncConsumer) -> None:
        super().__init__(loop, wrapped)
        self.subscription = wrapped.subscription
        self.name = wrapped.name
        self._acked: deque[Message | Batch] = deque()
        self._is_passing = False

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

    receive_batch = _waits(AsyncConsumer.receive_batch)
    ack_many = _waits(AsyncConsumer.ack_many)
    nack = _waits(AsyncConsumer.nack)
    flush = _waits(AsyncConsumer.flush)


class Reader(_Facade[AsyncReader]):
    """Made by ``Client.reader``."""

    def __iter__(self) -> Iterator[Message]:
        for batch in self.batches():
            yield from batch

    def batches(self) -> Iterator[Batch]:
        while (batch := self._loop.run(self._wrapped.next_batch())) is not None:
            yield batch


class Client:
    """As ``sava.client.Client``, whose options are explained there. A producer's ``linger_ms`` is 0 here: a
    thread that waits for each message has nothing to share a batch with."""

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

    producer = _makes(AsyncClient.producer, Producer, linger_ms=0)
    consumer = _makes(AsyncClient.consumer, Consumer)
    reader = _makes(AsyncClient.reader, Reader)
