"""ForwardingServer: a gRPC server as services are registered at it, whose calls may be answered elsewhere.

Services know nothing of it, but for one thing: errors that say "not here" leave their handlers
(``faults.refuse``). A call that is answered here costs one frame more.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc
from grpc import aio

from sava.errors import SavaError
from sava.peers import deadlines, faults, relays
from sava.peers.brokers import Link, Port
from sava.peers.relays import Opening

if TYPE_CHECKING:
    from sava.peers.forwarding import Forwarder

Answer = Callable[[Any, SavaError], Awaitable[NoReturn]]
"""Ends a call with an error."""

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


class ForwardingServer:
    """To the generated code, which tells a server of handlers in two ways. Of those, methods that are
    registered one by one make grpc.aio wait for each of them anew at every call: with a hundred methods that
    is a tenth of what a small call costs. So they are not."""

    def __init__(self, server: aio.Server, forwarder: Forwarder, port: Port, answer: Answer) -> None:
        self._server = server
        self._forwarder = forwarder
        self._port = port
        self._answer = answer

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._server.add_generic_rpc_handlers(
            tuple(_Service(each, self._wrapped, self._forwarder) for each in handlers)
        )

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, object]) -> None:
        pass

    def _wrapped(self, method: str, handler: Any) -> Any:
        parse, serialize = handler.request_deserializer, _or_bytes(handler.response_serializer)
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._unary(method, handler.unary_unary), parse, serialize
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._server_stream(method, _writing(handler.unary_stream)), parse, serialize
            )
        return grpc.stream_stream_rpc_method_handler(
            self._both_ways(method, handler.stream_stream, parse), None, serialize
        )

    def _unary(self, method: str, inner: Any) -> Any:
        async def answer(request: Any, context: Any) -> Any:
            try:
                return await inner(request, context)
            except faults.ELSEWHERE as error:
                return await self._elsewhere(method, inner, request, context, error)

        return answer

    async def _elsewhere(self, method: str, inner: Any, request: Any, context: Any, error: SavaError) -> Any:
        async def here() -> Any:
            return await inner(request, context)

        async def there(link: Link, left: float) -> bytes:
            return await relays.unary(link, method, raw, left, metadata)

        try:
            if relays.is_forwarded(context):
                raise error
            raw, metadata = request.SerializeToString(), relays.metadata_of(context)
            timeout = deadlines.remaining(context, LONG_CALLS.get(method, FORWARD_S))
            return await self._forwarder.elsewhere(error, self._port, here, there, timeout=timeout)
        except SavaError as failure:
            await self._answer(context, failure)

    def _server_stream(self, method: str, inner: Any) -> Any:
        async def answer(request: Any, context: Any) -> None:
            async def here() -> None:
                await inner(request, opening)

            async def there(link: Link, _: float) -> None:
                raw, metadata = request.SerializeToString(), relays.metadata_of(context)
                left = context.time_remaining()
                trailing = await relays.server_stream(link, method, raw, left, metadata, opening.write)
                context.set_trailing_metadata(trailing)

            opening = Opening(context)
            await self._stream(opening, context, here, there)

        return answer

    def _both_ways(self, method: str, inner: Any, parse: Callable[[bytes], Any]) -> Any:
        async def answer(_: Any, context: Any) -> None:
            async def here() -> None:
                opening.rewind()
                await inner(opening, opening)

            async def there(link: Link, _: float) -> None:
                assert opening.first is not None  # handlers know their topic from the opening
                trailing = await relays.both_ways(
                    link,
                    method,
                    opening.first,
                    context.time_remaining(),
                    relays.metadata_of(context),
                    context.read,
                    opening.write,
                )
                context.set_trailing_metadata(trailing)

            opening = Opening(context, parse)
            await self._stream(opening, context, here, there)

        return answer

    async def _stream(
        self,
        opening: Opening,
        context: Any,
        here: Callable[[], Awaitable[None]],
        there: Callable[[Link, float], Awaitable[None]],
    ) -> None:
        try:
            await here()
            return
        except faults.ELSEWHERE as elsewhere:
            error: SavaError = elsewhere
        try:
            if opening.has_begun or relays.is_forwarded(context):
                raise error
            await self._forwarder.elsewhere(
                error,
                self._port,
                here,
                there,
                timeout=deadlines.remaining(context, FORWARD_S),
                may_repeat=lambda: not opening.has_begun,
            )
        except SavaError as failure:
            await self._answer(context, failure)
        except aio.InternalError:
            # The client has just left: there is nobody to tell.
            if not context.done():
                raise


class _Service(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
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
