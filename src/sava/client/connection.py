"""The client's way to the brokers of a cluster: channels, calls, look-ups of topics, and streams.

``Connection`` has one channel per address, made when first needed. It looks topics up through the addresses
that the user gave, in turn, and if none of them answers, through brokers that look-ups have named. Streams
(``open_stream``) go where ``Route`` says: to the broker that serves the topic, and when that cannot be
reached, to the one that answered the look-up, which forwards. The client leaves a broker that falls silent
within a few seconds (``liveness``), and asks it last for a while. Owned by one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Final, Self, cast

from grpc import aio

from sava.client.errors import (
    ClientError,
    Closed,
    Refused,
    TopicUnknown,
    Unanswered,
    Unauthenticated,
    Unavailable,
    error_of,
    of_change,
)
from sava.client.liveness import Liveness, Options, WatchedCall
from sava.errors import SavaError
from sava.proto import streams_pb2 as pb
from sava.proto import streams_pb2_grpc as rpc
from sava.records import MAX_BATCH_BYTES
from sava.security.credentials import Credentials, CredentialsInvalid, Metadata, Token
from sava.security.credentials import Tls as Tls
from sava.tasks import Backoff, cancelled, first_write, is_done_within, spawn

log = logging.getLogger(__name__)

FIRST_DELAY_S: Final = 0.05
LONGEST_DELAY_S: Final = 2.0
"""Of the pauses before a reconnect."""

OPEN_TIMEOUT_S: Final = 10.0
"""For one attempt to open a stream, or one unary call."""

LEAVE_S: Final = 20.0
"""For the calls on a connection that is left; longer than gRPC's keepalive takes."""

CHANGES: Final = frozenset(
    {"Append", "Advance", "Commit", "EnsureTopic", "EnsureSchema", "ApplyAcks", "ReportLink"}
    | {"JoinRunner", "LeaveRunner", "ClaimPipeline", "ReportPipeline", "ReleasePipeline"}
)
"""Calls that change something, beside those whose request says ``create``. All of them may be repeated."""

MAX_KNOWN: Final = 32
"""Addresses that the client tries."""

STATUS_S: Final = 1.0
"""For the status of a stream to arrive after a write has failed."""

LOOK_UP_EVERY_S: Final = 30.0
"""A topic can grow: how often a client looks for new partitions."""

_MAX_MESSAGE_BYTES: Final = MAX_BATCH_BYTES + (1 << 20)
_OPTIONS: Final = (
    ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    # The backstop behind ``liveness``: a broker that vanished is noticed after 5 + 10 seconds. The timeout
    # needs both names: by the first alone, gRPC waits a minute for the answer to a ping. It is the longer of
    # the two because the answer may have to wait for batches on a slow line.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # The time that an attempt to connect has; gRPC's name for it says something else.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


_first_user: int | None = None
"""The process that made the first channel. gRPC has threads that do not go with a fork, so it cannot be used
in a child of that process: its calls would never end."""


def parse_addresses(addresses: str | Iterable[str]) -> tuple[list[str], bool]:
    """Targets as gRPC writes them, and whether they are to be reached by TLS. Raises Refused."""
    texts = addresses.split(",") if isinstance(addresses, str) else list(addresses)
    targets, schemes = [], set()
    for text in map(str.strip, texts):
        scheme, found, target = text.partition("://")
        if not found:
            scheme, target = "", text
        host, _, port = target.rstrip("/").rpartition(":")
        if scheme not in ("", "http", "https") or not host or not port.isdecimal():
            raise Refused(f"address {text!r}: written http://host:port, https://host:port or host:port")
        targets.append(f"{host}:{port}")
        schemes.add(scheme)
    if not targets:
        raise Refused("a client needs the address of at least one broker")
    if "https" in schemes and schemes != {"https"}:
        raise Refused("addresses: either all or none of them are https")
    return targets, "https" in schemes


class ReconnectBackoff(Backoff):
    """Pauses before the next attempt to reach a broker. A topic that has moved is no reason to wait: the
    first look-up after that goes out at once, and is answered when there is an owner."""

    def __init__(self) -> None:
        super().__init__(FIRST_DELAY_S, LONGEST_DELAY_S)

    def delay(self, failure: ClientError | None = None) -> float:
        is_first, delay = self.is_first, self.next()
        return 0.0 if is_first and failure is not None and failure.is_elsewhere else delay


class Connection:
    def __init__(
        self, addresses: str | Iterable[str], *, token: Token | None, tls: Tls | None, timeout: float
    ) -> None:
        self.targets, is_https = parse_addresses(addresses)
        self.timeout = timeout
        try:
            self._credentials = Credentials(tls=tls or (Tls() if is_https else None), token=token)
            self._credentials.check()
        except CredentialsInvalid as error:
            raise Refused(str(error)) from None
        self._doubted: Metadata | None = None
        """With what a broker has refused a stream last, until it accepts something else."""
        self._channels: dict[str, aio.Channel] = {}
        self._liveness: dict[str, Liveness] = {}
        self._left: dict[asyncio.Task[None], aio.Channel] = {}
        """Connections to brokers that fell silent, until the last call on them has ended."""
        self._known = list(self.targets)
        self._turn = 0
        self._is_closed = False

    async def close(self) -> None:
        self._is_closed = True
        channels, liveness = [*self._channels.values(), *self._left.values()], list(self._liveness.values())
        leaving = list(self._left)
        self._channels.clear()
        self._liveness.clear()
        await cancelled(*leaving)
        await asyncio.gather(*(liveness.close() for liveness in liveness))
        await asyncio.gather(*(channel.close(None) for channel in channels))

    def stub(self, target: str, service: Callable[[aio.Channel], Any] = rpc.StreamsStub) -> Any:
        """The generated stubs type synchronous and asynchronous use at once; here it is asynchronous only."""
        if self._is_closed:
            raise Closed("the client is closed")
        _check_not_forked()
        channel = self._channels.get(target)
        if channel is None:
            channel = self._channels[target] = self._open_channel(target, _OPTIONS)
        return service(channel)

    def liveness(self, target: str) -> Liveness:
        found = self._liveness.get(target)
        if found is None:
            found = self._liveness[target] = Liveness(target, self._open_channel, self._leave)
        return found

    def _open_channel(self, target: str, options: Options) -> aio.Channel:
        try:
            return self._credentials.open_channel(target, options)
        except CredentialsInvalid as error:
            raise Refused(str(error)) from None

    def _leave(self, target: str) -> None:
        """The broker is silent. A machine that comes back does not know the old connection, and gRPC would
        try it until its own keepalive gives up."""
        channel = self._channels.pop(target, None)
        if channel is not None:
            # Calls that were not given up (no one watches them) end by that keepalive, with a status.
            task = asyncio.create_task(channel.close(LEAVE_S))
            self._left[task] = channel
            task.add_done_callback(self._left.pop)

    def is_silent(self, target: str) -> bool:
        return target in self._liveness and self._liveness[target].is_silent

    async def metadata(self) -> Metadata:
        """What goes with every call. Raises Refused, Unauthenticated."""
        try:
            shown = await self._credentials.metadata()
        except CredentialsInvalid as error:
            raise Refused(str(error)) from None
        if shown and shown == self._doubted:
            raise Unauthenticated("a broker has refused the token, and its source gives the same again")
        return shown

    def accepted(self, shown: Metadata) -> None:
        if self._doubted is not None and self._doubted != shown:
            self._doubted = None

    def doubted(self, error: Unauthenticated, shown: Metadata, *, was_accepted: bool) -> ClientError:
        """A broker has refused what was shown, or does no longer accept it: tokens end, and the source may
        have a new one, which is worth one attempt. A source that gives a new one each time gets no more."""
        if not self._credentials.is_renewable:
            return error
        if not was_accepted and self._doubted not in (None, shown):
            return error
        self._doubted = shown
        return Unavailable(f"{error}; the client asks for another token", error.code)

    async def call(
        self,
        method: str,
        request: Any,
        *,
        target: str,
        timeout: float,
        service: Callable[[aio.Channel], Any] = rpc.StreamsStub,
    ) -> Any:
        """One unary call, one attempt; a second one if the token has ended meanwhile."""
        shown = await self.metadata()
        try:
            return await self._call(method, request, shown, target, timeout, service)
        except Unauthenticated:
            renewed = await self._credentials.renewed(shown)
            if renewed is None:
                raise
        return await self._call(method, request, renewed, target, timeout, service)

    async def _call(
        self,
        method: str,
        request: Any,
        metadata: Metadata,
        target: str,
        timeout: float,
        service: Callable[[aio.Channel], Any],
    ) -> Any:
        loop, liveness = asyncio.get_running_loop(), self.liveness(target)
        began = loop.time()
        changes = method in CHANGES or getattr(request, "create", False)
        call = getattr(self.stub(target, service), method)(
            request, timeout=max(timeout, 0.001), metadata=metadata
        )
        with liveness.watch(call, lambda: True) as waiting:
            try:
                response = await call
            except aio.AioRpcError as error:
                raise (of_change if changes else error_of)(error, target) from None
            except asyncio.CancelledError:
                if not waiting.was_given_up():
                    raise
                unheard = silent(target)
                raise (Unanswered(str(unheard)) if changes else unheard) from None
        liveness.answered(loop.time() - began)
        return response

    async def ask(
        self,
        method: str,
        request: Any,
        *,
        timeout: float | None = None,
        attempt: float = OPEN_TIMEOUT_S,
        service: Callable[[aio.Channel], Any] = rpc.StreamsStub,
    ) -> Any:
        """A unary call to whichever address answers, each being given ``attempt`` seconds for it. Raises what
        the broker refused, or Unavailable when the time is up."""
        timeout = self.timeout if timeout is None else timeout
        response, _ = await self._ask_any(method, request, timeout, attempt, service)
        return response

    async def look_up(
        self,
        topic: str,
        *,
        create: bool = False,
        delivery: pb.Delivery.ValueType = pb.ANY,
        timeout: float | None = None,
    ) -> pb.LookUpResponse:
        request = pb.LookUpRequest(topic=topic, create=create, delivery=delivery)
        response = cast(pb.LookUpResponse, await self.ask("LookUp", request, timeout=timeout))
        self._learn(response)
        return response

    async def locate(self, topic: str, *, but_not: str, timeout: float) -> str:
        """The target for a stream of one topic or partition. ``but_not`` failed just now: the broker that
        answers is a way around it."""
        response, answered = await self._ask_any("LookUp", pb.LookUpRequest(topic=topic), timeout)
        self._learn(response)
        address = next((partition.address for partition in response.partitions), "")
        return answered if address in ("", but_not) or self.is_silent(address) else str(address)

    def _learn(self, found: pb.LookUpResponse) -> None:
        """A broker that the user did not name may live longer than those that are named."""
        for partition in found.partitions:
            if partition.address and partition.address not in self._known and len(self._known) < MAX_KNOWN:
                self._known.append(partition.address)

    async def _ask_any(
        self,
        method: str,
        request: Any,
        timeout: float,
        attempt: float = OPEN_TIMEOUT_S,
        service: Callable[[aio.Channel], Any] = rpc.StreamsStub,
    ) -> tuple[Any, str]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        backoff = ReconnectBackoff()
        failure = Unavailable(f"no broker was asked within {timeout} s")
        while True:
            for _ in range(len(self._known)):
                if self.is_silent(self._known[self._turn]) and not all(map(self.is_silent, self._known)):
                    self._turn = (self._turn + 1) % len(self._known)
                    continue
                target = self._known[self._turn]
                share = (deadline - loop.time()) / len(self.targets)
                try:
                    response = await self.call(
                        method, request, target=target, timeout=min(share, attempt), service=service
                    )
                    return response, target
                except Unavailable as error:
                    if isinstance(failure, Unanswered) and not isinstance(error, Unanswered):
                        # An earlier attempt may have happened, whatever became of the later ones.
                        error = Unanswered(f"{error}; an earlier attempt may have happened", error.code)
                    failure = error
                    if self._known[self._turn] == target:
                        # Else another call that failed with it has passed it: past both would be past one
                        # that was not asked, and of two addresses back to this one.
                        self._turn = (self._turn + 1) % len(self._known)
            delay = backoff.delay()
            if loop.time() + delay >= deadline:
                raise failure
            await asyncio.sleep(delay)


def silent(target: str) -> Unavailable:
    return Unavailable(f"broker {target} has fallen silent: it answers neither a call nor a new connection")


def _check_not_forked() -> None:
    global _first_user  # the process itself is what is asked about
    if _first_user is None:
        _first_user = os.getpid()
    elif _first_user != os.getpid():
        raise Refused(
            "this process was forked from one that had used a client, and gRPC does not survive that: "
            "fork before the first use, or start processes by spawning them"
        )


# -- streams -----------------------------------------------------------------


class ClientStream:
    """One gRPC stream of a producer, consumer or reader. Errors are the client's types; an end without an
    error is Unavailable, for none of Sava's streams ends by itself while the client wants it."""

    def __init__(
        self, call: Any, target: str, waiting: WatchedCall, accepted: Callable[[], None] = lambda: None
    ) -> None:
        """``waiting``: how its broker is watched. ``accepted`` is called when the broker has
        answered at all."""
        self.call = call
        """gRPC's."""
        self._target = target
        self._waiting = waiting
        self._accepted = accepted
        self.is_accepted = False
        # Not call.read(): it drops what has arrived once the status is there.
        self._responses = aiter(call)

    async def write(self, request: Any) -> None:
        await self._written(self.call.write(request))

    async def _written(self, writing: Coroutine[Any, Any, None]) -> None:
        try:
            await writing
        except aio.AioRpcError as error:
            raise error_of(error, self._target) from None
        except asyncio.InvalidStateError:
            raise self._ended() from None
        except asyncio.CancelledError:
            if not self._waiting.was_given_up():
                raise
            raise silent(self._target) from None

    async def receive(self) -> Any:
        try:
            response = await anext(self._responses)
        except aio.AioRpcError as error:
            raise error_of(error, self._target) from None
        except StopAsyncIteration:
            raise self._ended() from None
        except asyncio.CancelledError:
            if not self._waiting.was_given_up():
                raise
            raise silent(self._target) from None
        self._waiting.liveness.heard()
        if not self.is_accepted:
            self.is_accepted = True
            self._accepted()
        return response

    def _ended(self) -> Unavailable:
        if self._waiting.is_given_up:
            return silent(self._target)
        return Unavailable(f"broker {self._target} has ended the stream")

    async def open(self, request: Any) -> Any:
        """The answer to the request that opens a stream. Both have one deadline: a request waits for a
        connection, and a broker that stands still accepts connections."""
        began = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await self._written(first_write(self.call, request))
                response = await self.receive()
        except TimeoutError:
            raise Unavailable(f"broker {self._target} did not answer within {OPEN_TIMEOUT_S} s") from None
        self._waiting.liveness.answered(asyncio.get_running_loop().time() - began)
        return response


class Route:
    """Where the streams of one topic or partition go: to the broker that serves it, and after a failure
    wherever a new look-up says."""

    def __init__(self, connection: Connection, topic: str, address: str) -> None:
        self._connection = connection
        self._topic = topic
        self._next = address
        self._last = ""

    async def find(self) -> str:
        target = self._next
        if not target or self._connection.is_silent(target):
            target = await self._connection.locate(self._topic, but_not=self._last, timeout=OPEN_TIMEOUT_S)
        self._next, self._last = "", target
        return target

    def stay(self, target: str) -> None:
        """The target is good: go there again without a look-up."""
        self._next = target


@asynccontextmanager
async def open_stream(
    connection: Connection,
    method: str,
    target: str,
    *request: Any,
    owes: Callable[[], bool] = lambda: True,
    service: Callable[[aio.Channel], Any] = rpc.StreamsStub,
    timeout: float | None = None,
) -> AsyncIterator[ClientStream]:
    """``owes``: whether the broker owes this stream an answer now; it ends if a broker that does is
    silent. ``timeout``: when it ends in any case."""
    metadata = await connection.metadata()
    call = getattr(connection.stub(target, service), method)(*request, timeout=timeout, metadata=metadata)
    stream: ClientStream | None = None
    try:
        with connection.liveness(target).watch(call, owes) as waiting:
            stream = ClientStream(call, target, waiting, lambda: connection.accepted(metadata))
            yield stream
    except Unauthenticated as error:
        was_accepted = stream is not None and stream.is_accepted
        raise connection.doubted(error, metadata, was_accepted=was_accepted) from None
    finally:
        call.cancel()


async def both(reading: Coroutine[Any, Any, None], writing: Coroutine[Any, Any, None]) -> None:
    """The two directions of a stream, until one fails. Raises its error; that of the reading side, which has
    the broker's status, if there are two."""
    read, write = asyncio.create_task(reading), asyncio.create_task(writing)
    try:
        await asyncio.wait((read, write), return_when=asyncio.FIRST_COMPLETED)
        if not read.done():
            await asyncio.wait((read,), timeout=STATUS_S)
    finally:
        await cancelled(read, write)
    for task in (read, write):
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
    raise Unavailable("the stream was given up")


class PartitionStream(ABC):
    """A stream of a producer or consumer to one partition, opened again whenever it breaks. Owned by one
    event loop; only its own task writes to it."""

    def __init__(self, connection: Connection, topic: str, address: str, what: str) -> None:
        self.topic = topic
        self._connection = connection
        self._what = what
        self._route = Route(connection, topic, address)
        self._backoff = ReconnectBackoff()
        self._loop = asyncio.get_running_loop()
        self._failure: Unavailable | None = None
        """Why there is no stream."""
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._task = asyncio.create_task(self._run(), name=f"sava {what} of {topic}")
        self._task.add_done_callback(self._ran)

    async def opened(self, timeout: float) -> None:
        """When the first stream is open. Raises what the broker refused, or Unavailable."""
        if not await is_done_within(timeout, self._opened):
            raise self._failure or Unavailable(f"{self.topic} was not opened within {timeout} s")

    @abstractmethod
    async def _run(self) -> None:
        """One stream after the other, until one ends for good."""

    @abstractmethod
    def _end(self, error: ClientError) -> None:
        """There will be no stream any more."""

    def _ran(self, task: asyncio.Task[None]) -> None:
        """Not foreseen: a mistake here, or in a callable that gives tokens. No caller may wait without
        end."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: %s failed", self._what, self.topic, exc_info=error)
            self._end(ClientError(f"the {self._what} of {self.topic} failed: {error!r}"))

    def _fail_opening(self, error: SavaError) -> None:
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # a caller that waits gets it; that none does is no mistake


# -- partitions --------------------------------------------------------------


class TopicSession(ABC):
    """What producers, consumers and readers have in common. Owned by one event loop."""

    def __init__(self, connection: Connection, topic: str) -> None:
        self.topic = topic
        self._connection = connection
        self._watch: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @abstractmethod
    async def open(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    def _watch_partitions(
        self, known: Collection[object], grown: Callable[[Sequence[pb.Partition]], Awaitable[None]]
    ) -> None:
        """Report the partitions that come after those that are ``known`` by then, until ``_watch`` is
        cancelled."""
        self._watch = spawn(self._look_for_more(known, grown), name=f"sava partitions of {self.topic}")

    async def _look_for_more(
        self, known: Collection[object], grown: Callable[[Sequence[pb.Partition]], Awaitable[None]]
    ) -> None:
        while True:
            await asyncio.sleep(LOOK_UP_EVERY_S)
            try:
                found = (await self._connection.look_up(self.topic)).partitions
                if len(found) > len(known):
                    await grown(found[len(known) :])
            except ClientError as error:
                log.info("client: could not look up the partitions of %s: %s", self.topic, error)


async def create_partitions(
    connection: Connection, topic: str, count: int, delivery: pb.Delivery.ValueType
) -> pb.LookUpResponse:
    """The topic with at least ``count`` partitions. Asking for a partition is what creates it."""
    try:
        found = await connection.look_up(topic)
    except TopicUnknown:
        found = pb.LookUpResponse()
    if found.partition_count >= count:
        return found
    for index in range(found.partition_count, count):
        await connection.look_up(f"{topic}-part-{index}", create=True, delivery=delivery)
    return await connection.look_up(topic)
