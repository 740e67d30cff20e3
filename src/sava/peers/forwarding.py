"""Forwarder: calls for topics that another broker serves are answered by that broker, through this one.

A client may stay with the broker that it knows. A handler that finds its topic elsewhere raises NotOwner
(NotController: what only the leader decides); instead of an answer the call then gets another broker:

    client ──▶ this broker ─ NotOwner ─▶ who has it? (waits, bounded) ──▶ this one: the handler again
                                                                     └─▶ another: the same call, as bytes

**Nothing is done twice.** A call is repeated only if the answer says that it had no effect (the other broker
does not have the topic either), or if nothing was sent for want of a connection. A call that was sent and has
no answer ends UNAVAILABLE, and its client, who knows what the call is about, decides.

**One hop.** A forwarded call says so, and is never forwarded again: two brokers with different views would
play ball with it. It is refused instead, and the first broker asks its view again. Who its caller is travels
with it, by a header that only brokers can make (``guard``); the caller's token does not.

**Streams** are passed on message by message, as bytes, in both directions; a slow reader is waited for.
Until the owner has answered the opening, nothing more is read from the client: so an owner that refuses can
be exchanged for another unnoticed. From then on a stream ends when the owner ends it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from typing import Any, Final, NoReturn, TypeVar, cast

import grpc
from google.protobuf.message import Message
from grpc import aio

from sava.cluster.records import NotController
from sava.cluster.view import NotServed, TopicRouter
from sava.errors import SavaError
from sava.peers import error_mapping
from sava.peers.channels import (
    PeerChannel,
    PeerChannels,
    Port,
    Unreachable,
)
from sava.peers.error_mapping import Relayed
from sava.peers.guard import AUTHORIZATION, FORWARDED, AnswerError, Guard, Metadata
from sava.proto import streams_pb2 as pb
from sava.records import RecordBatch
from sava.security import calls
from sava.tasks import cancelled, first_write
from sava.topics.errors import NotOwner
from sava.topics.names import TopicName

Reply = TypeVar("Reply", bound=Message)
T = TypeVar("T")

Write = Callable[[bytes], Awaitable[None]]
Check = Callable[[Any, Any], None]
"""Raises unless a stream may be opened by this request, in this context."""

EOF: Final[Any] = vars(aio)["EOF"]  # the type stubs do not know it
_OF_THE_CONNECTION: Final = frozenset(
    ("user-agent", "te", "content-type", "host", "accept-encoding", AUTHORIZATION, FORWARDED)
)

ROUNDS: Final = 3
LAG_S: Final = 0.5
"""How far one broker's view may be behind another's: for this time a broker that has just refused is not
asked again unless something is known to have changed."""
POLL_S: Final = 0.02
LOCATE_S: Final = 3.0

FORWARD_S: Final = 10.0
"""For calls whose caller has set no deadline."""
LONG_CALLS: Final = {
    "/danube_admin.BrokerAdmin/UnloadBroker": 4.4,
    "/danube_admin.BrokerAdmin/TriggerRebalance": 4.4,
    "/danube_admin.TopicAdmin/UnloadTopic": 600.0,
    "/sava.admin.Brokers/Rebalance": 600.0,
    "/sava.admin.Replication/SetReplication": 30.0,
    "/sava.streams.Streams/Offsets": 35.0,
}
"""Calls that are answered when topics have moved, or have grown, or other clusters were asked, and how long
that may take at most. Those of Danube's brokers answer as far as they have come before danube-admin, which
sends no deadline, gives the call up after five seconds; a tenth is kept back at each broker on the way."""
NOT_THERE: Final = frozenset(("not_owner", "topic_moved", "not_controller"))
"""Codes that say: it had no effect here, ask another broker."""


class _Here(Exception):
    """Another broker was to be asked for a topic, and this one has it by now."""


class Forwarder:
    """Owned by the event loop. ``leader`` says which broker leads, 0 if that is not known."""

    def __init__(
        self, router: TopicRouter, peers: PeerChannels, leader: Callable[[], int], *, guard: Guard
    ) -> None:
        self.broker = guard.identity.broker
        self.guard = guard
        self._router = router
        self._peers = peers
        self._leader = leader
        self.forwards: Counter[str] = Counter()
        """Calls that were passed on, by kind: the port, or ``leader``."""
        self.refusals: Counter[str] = Counter()
        """Calls that this broker ended with an error of its own, by the error's code."""
        self.calls = 0
        """Calls that came to this broker, on any port."""

    def serving(
        self, server: aio.Server, port: Port, answer: AnswerError = error_mapping.answer
    ) -> aio.Server:
        """``server`` as services should be registered at it so that their calls are guarded and forwarded.
        ``answer`` ends a call with an error in the manner of the services."""
        return cast(aio.Server, ForwardingServer(server, self, port, answer))

    def metadata(self, method: str, context: Any) -> Metadata:
        """What the caller has sent with its call (traces), and who the caller is."""
        sent = tuple(
            (key, value)
            for key, value in context.invocation_metadata() or ()
            if key not in _OF_THE_CONNECTION and not key.startswith((":", "grpc-"))
        )
        return (*sent, self.guard.identity.pass_on(method, calls.current.get()))

    # -- for this broker's own use ---------------------------------------------------------------

    async def ask(
        self,
        port: Port,
        method: str,
        request: Message,
        reply_type: type[Reply],
        *,
        topic: TopicName | None = None,
        broker: int = 0,
        timeout: float = FORWARD_S,
    ) -> Reply:
        """A unary call that this broker makes for itself, to the broker that has ``topic``, or to ``broker``,
        which must not be this one. ``method`` is its path: ``/sava.admin.Topics/DescribeTopic``. Raises
        Relayed with what the other broker answered, NotOwner if this broker has the topic by now (the other
        one is not the owner), and what keeps it from being asked."""

        async def here() -> Reply:
            raise _Here

        async def there(link: PeerChannel, left: float) -> Reply:
            metadata = (self.guard.identity.own(method),)
            return reply_type.FromString(await relay_unary(link, method, raw, left, metadata))

        raw = request.SerializeToString()
        if topic is not None:
            try:
                return await self.elsewhere(NotOwner(topic, 0), port, here, there, timeout=timeout)
            except _Here:
                raise NotOwner(topic, self.broker) from None
        return await there(await self._peers.link(broker, port, timeout=timeout), timeout)

    async def ask_leader(
        self, method: str, request: Message, reply_type: type[Reply], *, timeout: float
    ) -> Reply | None:
        """A unary call to the admin port of the broker that leads. None if that is this one, or is not known.
        Raises as ``ask`` does."""
        leader = self._leader()
        if leader in (0, self.broker):
            return None
        return await self.ask("admin", method, request, reply_type, broker=leader, timeout=timeout)

    async def publish_elsewhere(self, topic: TopicName, batch: RecordBatch) -> None:
        """To the end of a topic that another broker has; as it is, without deduplication: a caller that
        repeats it after an error may have it there twice. Raises NotServed for what passes."""
        request = pb.AppendRequest(topic=str(topic), batch=batch.to_bytes())
        try:
            await self.ask("client", "/sava.streams.Streams/Append", request, pb.AppendResponse, topic=topic)
        except Relayed as error:
            if error.status is not grpc.StatusCode.UNAVAILABLE:
                raise
            raise NotServed(topic, str(error)) from error

    async def locate(self, topic: TopicName) -> tuple[int, str]:
        """Who has a topic, and where clients reach it; 0 and nothing if no broker has it for a while."""
        try:
            owner = await self._router.owner(topic, timeout=LOCATE_S)
        except NotServed:
            return 0, ""
        registration = self._router.registration(owner)
        return (owner, registration.client) if registration is not None else (0, "")

    async def owner_link(self, topic: TopicName, port: Port, *, timeout: float) -> PeerChannel | None:
        """A connection to the broker that has the topic; None if that is this one. Raises NotServed,
        TopicUnknown, Unreachable."""
        deadline = asyncio.get_running_loop().time() + timeout
        owner = await self._find(NotOwner(topic, 0), timeout, but_not=self.broker)
        if owner == self.broker:
            return None
        left = deadline - asyncio.get_running_loop().time()
        link = await self._peers.link(owner, port, timeout=max(left, 0.0))
        self.forwards[port] += 1
        return link

    # -- rounds --------------------------------------------------------------------------------

    async def elsewhere(
        self,
        error: SavaError,
        port: Port,
        here: Callable[[], Awaitable[T]],
        there: Callable[[PeerChannel, float], Awaitable[T]],
        *,
        timeout: float,
        may_repeat: Callable[[], bool] = lambda: True,
    ) -> T:
        """Wherever the topic of ``error`` is by now (or the leader): ``here`` on this broker, ``there`` on
        another, until one has it. Raises the last error; all of them are SavaErrors."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        last = self.broker
        failure: SavaError = error
        for _ in range(ROUNDS):
            last = await self._find(error, deadline - loop.time(), but_not=last)
            try:
                if last == self.broker:
                    return await here()
                link = await self._peers.link(last, _port(error, port), timeout=deadline - loop.time())
                self.forwards["leader" if isinstance(error, NotController) else port] += 1
                return await there(link, deadline - loop.time())
            except error_mapping.ELSEWHERE as elsewhere:
                failure = error = elsewhere
            except Unreachable as unreached:
                failure = unreached
            except Relayed as answered:
                if answered.code not in NOT_THERE:
                    raise
                failure = answered
            if not may_repeat() or loop.time() >= deadline:
                break
        raise failure

    async def _find(self, error: SavaError, left: float, *, but_not: int) -> int:
        """Not ``but_not``, which does not have it, unless nothing else is known for a while."""
        if isinstance(error, NotController):
            return await self._find_leader(error, left, but_not)
        assert isinstance(error, NotOwner)
        topic = TopicName.parse(error.topic)
        lag = min(left, LAG_S)
        try:
            return await self._router.owner(topic, timeout=lag, but_not=but_not)
        except NotServed:
            return await self._router.owner(topic, timeout=max(left - lag, 0.0))

    async def _find_leader(self, error: NotController, left: float, but_not: int) -> int:
        loop = asyncio.get_running_loop()
        now = loop.time()
        while (leader := self._leader()) in (0, but_not):
            waited = loop.time() - now
            if leader and waited >= LAG_S:
                break
            if waited >= left:
                raise NotController(leader) from error
            await asyncio.sleep(POLL_S)
        return leader


def _port(error: SavaError, port: Port) -> Port:
    return "admin" if isinstance(error, NotController) else port


# -- one call, made again at another broker, as bytes ------------------------------------------
#
# Errors of the other broker are ``Relayed``. A slow reader is waited for: a message is read from one side
# when the one before it was taken by the other, and HTTP/2's flow control does the rest.


def is_forwarded() -> bool:
    """Whether the running call came through another broker, or from it, and must not be sent to a third."""
    return calls.current.get().forwarder != 0


def is_from_broker() -> bool:
    """Whether another broker makes the running call for itself, and not for a client of its."""
    return calls.current.get().is_own


@contextmanager
def _relayed(link: PeerChannel) -> Iterator[None]:
    try:
        yield
    except aio.AioRpcError as error:
        raise error_mapping.relayed(error, target=link.name) from None
    except aio.UsageError:
        raise Unreachable(f"{link.name} was registered again") from None
    except asyncio.CancelledError:
        # A channel that is closed cancels its calls, and a call that is cancelled cancels who awaits it.
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Relayed(grpc.StatusCode.UNAVAILABLE, f"{link.name} is gone") from None


async def relay_unary(
    link: PeerChannel, method: str, request: bytes, timeout: float, metadata: Metadata
) -> bytes:
    with _relayed(link):
        reply: bytes = await link.unary(method)(request, timeout=timeout, metadata=metadata)
    return reply


async def relay_server_stream(
    link: PeerChannel, method: str, request: bytes, timeout: float | None, metadata: Metadata, write: Write
) -> Metadata:
    """Until the other broker ends it. The trailing metadata of its end."""
    with _relayed(link):
        call = link.server_stream(method)(request, timeout=timeout, metadata=metadata)
        try:
            async for reply in call:
                await write(reply)
            return await _trailing(call)
        finally:
            call.cancel()


async def relay_both_ways(
    link: PeerChannel,
    method: str,
    first: bytes,
    timeout: float | None,
    metadata: Metadata,
    read: Callable[[], Awaitable[Any]],
    write: Write,
) -> Metadata:
    """Until the other broker ends it. ``first`` was read already; what follows is read when the other broker
    has answered it."""
    sending: asyncio.Task[None] | None = None
    with _relayed(link):
        call = link.both_ways(method)(timeout=timeout, metadata=metadata)
        try:
            # If the call has ended, reading tells why.
            with suppress(aio.AioRpcError, asyncio.InvalidStateError):
                await first_write(call, first)
            async for reply in call:
                if sending is None:
                    sending = asyncio.create_task(_send(call, read))
                await write(reply)
            return await _trailing(call)
        finally:
            call.cancel()
            await cancelled(sending)


async def _send(call: Any, read: Callable[[], Awaitable[Any]]) -> None:
    with suppress(aio.AioRpcError, asyncio.InvalidStateError):
        while (request := await read()) is not EOF:
            await call.write(request)
        await call.done_writing()


async def _trailing(call: Any) -> Metadata:
    return tuple(await call.trailing_metadata() or ())


class RewindableStream:
    """A stream's context, as a handler sees it: it knows whether the client has got anything yet, and keeps
    the request that opened the stream until then."""

    def __init__(
        self, context: Any, parse: Callable[[bytes], Any] | None = None, check: Check | None = None
    ) -> None:
        """``check``: raises unless the stream may be opened so."""
        self._context = context
        self._parse = parse
        self._check = check
        self._again: bytes | None = None
        self.first: bytes | None = None
        self.has_begun = False

    def rewind(self) -> None:
        """Let the opening be read once more."""
        self._again = self.first

    async def read(self) -> Any:
        assert self._parse is not None
        if self._again is not None:
            request, self._again = self._again, None
        else:
            request = await self._context.read()
            if request is EOF:
                return request
            if self.first is None and not self.has_begun:
                self.first = request
                if self._check is not None:
                    opening = self._parse(request)
                    self._check(opening, self._context)
                    return opening
        return self._parse(request)

    async def write(self, response: Any) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.first = None
        await self._context.write(response)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


# -- the calls of a port -----------------------------------------------------------------------


class ForwardingServer:
    """A gRPC server as services are registered at it. What a handler raises on purpose becomes the call's
    answer; after an error that says "not here", another broker may answer the call. Services know nothing of
    it. A call that is answered here costs one frame more.

    The generated code registers handlers at a server in two ways. Of those, methods that are registered one
    by one make grpc.aio wait for each of them again at every call: with a hundred methods that is a tenth
    of what a small call costs. So they are not."""

    def __init__(self, server: aio.Server, forwarder: Forwarder, port: Port, answer: AnswerError) -> None:
        self._server = server
        self._forwarder = forwarder
        self._port = port
        self._guard = forwarder.guard
        self._end = answer

    async def _answer(self, context: Any, error: SavaError) -> NoReturn:
        if not isinstance(error, Relayed):
            self._forwarder.refusals[error_mapping.code_of(error)] += 1
            self._guard.refused(error)
        await self._end(context, error)

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._server.add_generic_rpc_handlers(
            tuple(_ForwardedService(each, self._wrapped, self._forwarder) for each in handlers)
        )

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, object]) -> None:
        pass

    def _wrapped(self, method: str, handler: Any) -> Any:
        parse, serialize = handler.request_deserializer, _or_bytes(handler.response_serializer)
        guard, answer = self._guard, self._answer
        if handler.unary_unary is not None:
            unary = guard.unary(method, self._unary(method, handler.unary_unary), answer)
            return grpc.unary_unary_rpc_method_handler(unary, parse, serialize)
        if handler.unary_stream is not None:
            inner = self._server_stream(method, _writing(handler.unary_stream))
            stream = guard.server_stream(method, inner, answer)
            return grpc.unary_stream_rpc_method_handler(stream, parse, serialize)
        both_ways = guard.both_ways(method, self._both_ways(method, handler.stream_stream, parse), answer)
        return grpc.stream_stream_rpc_method_handler(both_ways, None, serialize)

    def _unary(self, method: str, inner: Any) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            try:
                return await inner(request, context)
            except error_mapping.ELSEWHERE as error:
                return await self._elsewhere(method, inner, request, context, error)
            except SavaError as error:
                await self._answer(context, error)

        return answer

    async def _here(self, inner: Any, request: Any, context: Any) -> Any:
        """The handler's answer. An error of it that another broker cannot change ends the call at once."""
        try:
            return await inner(request, context)
        except error_mapping.ELSEWHERE:
            raise
        except SavaError as error:
            await self._answer(context, error)

    async def _elsewhere(self, method: str, inner: Any, request: Any, context: Any, error: SavaError) -> Any:
        async def here() -> Any:
            return await self._here(inner, request, context)

        async def there(link: PeerChannel, left: float) -> bytes:
            return await relay_unary(link, method, raw, left, metadata)

        try:
            if is_forwarded():
                raise error
            raw, metadata = request.SerializeToString(), self._forwarder.metadata(method, context)
            timeout = error_mapping.remaining(context, LONG_CALLS.get(method, FORWARD_S))
            return await self._forwarder.elsewhere(error, self._port, here, there, timeout=timeout)
        except SavaError as failure:
            await self._answer(context, failure)

    def _server_stream(self, method: str, inner: Any) -> Any:
        async def answer(request: Any, context: Any) -> None:
            async def here() -> None:
                await self._here(inner, request, opening)

            async def there(link: PeerChannel, _: float) -> None:
                raw, metadata = request.SerializeToString(), self._forwarder.metadata(method, context)
                left = context.time_remaining()
                trailing = await relay_server_stream(link, method, raw, left, metadata, opening.write)
                context.set_trailing_metadata(trailing)

            opening = RewindableStream(context)
            await self._stream(opening, context, here, there)

        return answer

    def _both_ways(self, method: str, inner: Any, parse: Callable[[bytes], Any]) -> Any:
        check = self._guard.opening_check(method)

        async def answer(_: Any, context: Any) -> None:
            async def here() -> None:
                opening.rewind()
                await self._here(inner, opening, opening)

            async def there(link: PeerChannel, _: float) -> None:
                assert opening.first is not None  # handlers know their topic from the opening
                trailing = await relay_both_ways(
                    link,
                    method,
                    opening.first,
                    context.time_remaining(),
                    self._forwarder.metadata(method, context),
                    context.read,
                    opening.write,
                )
                context.set_trailing_metadata(trailing)

            opening = RewindableStream(context, parse, check)
            await self._stream(opening, context, here, there)

        return answer

    async def _stream(
        self,
        opening: RewindableStream,
        context: Any,
        here: Callable[[], Awaitable[None]],
        there: Callable[[PeerChannel, float], Awaitable[None]],
    ) -> None:
        try:
            try:
                await here()
                return
            except error_mapping.ELSEWHERE as elsewhere:
                error: SavaError = elsewhere
            if opening.has_begun or is_forwarded():
                raise error
            await self._forwarder.elsewhere(
                error,
                self._port,
                here,
                there,
                timeout=error_mapping.remaining(context, FORWARD_S),
                may_repeat=lambda: not opening.has_begun,
            )
        except SavaError as failure:
            await self._answer(context, failure)
        except aio.InternalError:
            # The client has just left.
            if not context.done():
                raise


class _ForwardedService(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    def __init__(self, inner: Any, wrapped: Callable[[str, Any], Any], forwarder: Forwarder) -> None:
        self._inner = inner
        self._forwarder = forwarder
        self._wrapped = wrapped
        self._handlers: dict[str, Any] = {}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method
        handler = self._handlers.get(method)
        if handler is None:
            found = self._inner.service(handler_call_details)
            if found is None:
                return None
            handler = self._handlers[method] = self._wrapped(method, found)
        self._forwarder.calls += 1
        return handler


def _or_bytes(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """What another broker has answered is bytes already."""

    def serialized(response: Any) -> bytes:
        return response if type(response) is bytes else serialize(response)

    return serialized


def _writing(inner: Any) -> Any:
    """A handler that yields its responses, as one that writes them."""
    if not inspect.isasyncgenfunction(inner):
        return inner

    async def write_all(request: Any, context: Any) -> None:
        async with aclosing(inner(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write_all
