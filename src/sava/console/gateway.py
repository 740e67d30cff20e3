"""Gateway: calls of the HTTP API, made as gRPC calls to this broker.

    HTTP request ─▶ fields of the request message ─▶ a call to this broker's own port ─▶ JSON

The call takes the caller's ``Authorization`` header with it and goes the way of every other call, so that it
is authenticated, authorized, audited and forwarded like one: there is no second way in. It goes over a
port on loopback that this broker opens for itself, which is plain also where the others have TLS.

A method with one answer gives one JSON object; a method with several gives a line for each as it comes
(``application/x-ndjson``), and an error after the first as a last line ``{"error": ...}``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final, cast

import grpc
import msgspec
from aiohttp import web
from google.protobuf import json_format
from google.protobuf.message import Message
from grpc import aio

from sava.api.messages import as_dict
from sava.console.routes import CLIENT_SERVICES, ROUTES, ApiRoute
from sava.errors import SavaError
from sava.peers import error_mapping
from sava.proto import brokers_pb2, topics_admin_pb2

log = logging.getLogger(__name__)

MAX_BODY_BYTES: Final = 1 << 20
NDJSON: Final = "application/x-ndjson"
_OPTIONS: Final = (
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.max_receive_message_length", 64 << 20),
)

_STATUS: Final = {
    grpc.StatusCode.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.FAILED_PRECONDITION: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.OUT_OF_RANGE: HTTPStatus.BAD_REQUEST,
    grpc.StatusCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: HTTPStatus.CONFLICT,
    grpc.StatusCode.ABORTED: HTTPStatus.CONFLICT,
    grpc.StatusCode.UNAUTHENTICATED: HTTPStatus.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: HTTPStatus.FORBIDDEN,
    grpc.StatusCode.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    grpc.StatusCode.UNIMPLEMENTED: HTTPStatus.NOT_IMPLEMENTED,
    grpc.StatusCode.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
}
_MISSING: Final = ("_unknown", "_not_found", "not_found")
"""How codes of errors end that say that something is not there."""


LIST_TOPICS: Final = ApiRoute("GET", "/v1/topics", "sava.admin.Topics/ListTopics")
LIST_BROKERS: Final = ApiRoute("GET", "/v1/brokers", "sava.admin.Brokers/ListBrokers")
LISTED_S: Final = 1.0
MAX_LISTED: Final = 64
MAX_PAGE: Final = 1_000


class ApiError(Exception):
    """An answer of the API that is an error."""

    def __init__(self, status: HTTPStatus, code: str, message: str, outcome: str = "not done") -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"error": {"code": code, "message": message, "outcome": outcome}}

    def response(self) -> web.Response:
        return json_response(self.body, self.status)


def json_response(value: Any, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def status_error(error: aio.AioRpcError, *, check: str | None = None) -> ApiError:
    """``check``: the call was a change, it may have been sent, and this shows whether it took effect."""
    raised = error_mapping.raised_by(error, target="the broker", check=check)
    trailing = cast(error_mapping.Trailing, error.trailing_metadata() or ())
    named = dict(trailing).get(error_mapping.CODE_KEY)
    code = named if isinstance(named, str) else error_mapping.code_of(raised)
    status = _STATUS.get(error.code(), HTTPStatus.INTERNAL_SERVER_ERROR)
    return ApiError(_missing(status, code), code, str(raised), raised.outcome.value)


def _missing(status: HTTPStatus, code: str) -> HTTPStatus:
    """gRPC's status for a request that cannot be done also stands for one about what is not there."""
    is_missing = status is HTTPStatus.BAD_REQUEST and code.endswith(_MISSING)
    return HTTPStatus.NOT_FOUND if is_missing else status


def caller_metadata(request: web.Request) -> tuple[tuple[str, str], ...]:
    """What of a request goes with the call: who makes it."""
    token = request.headers.get("Authorization", "")
    return (("authorization", token),) if token else ()


class Gateway:
    """Owned by the event loop."""

    def __init__(self, admin: str, client: str) -> None:
        """Addresses of this broker's own ports."""
        self._admin = aio.insecure_channel(admin, options=_OPTIONS)
        self._client = aio.insecure_channel(client, options=_OPTIONS)
        self._listed: dict[tuple[Any, str], tuple[float, list[dict[str, Any]]]] = {}
        """What topics there are, until when, by caller and namespace."""

    async def close(self) -> None:
        await self._admin.close(None)
        await self._client.close(None)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        router.add_get("/v1/topics", self._topics)
        for route in ROUTES:
            router.add_route(route.verb, route.pattern, self._handler(route))

    async def call(self, route: ApiRoute, message: Message, request: web.Request) -> Message:
        """Raises ApiError."""
        channel = self._channel(route)
        method = channel.unary_unary(
            f"/{route.method}", type(message).SerializeToString, route.response_type.FromString
        )
        try:
            answer: Message = await method(
                message, timeout=route.timeout_s, metadata=caller_metadata(request)
            )
        except aio.AioRpcError as error:
            raise status_error(error, check=_check(route)) from None
        return answer

    async def _topics(self, request: web.Request) -> web.Response:
        """A page of the topics whose names contain a text, with their owners' addresses. What a broker says
        of all topics is kept for ``LISTED_S``, by caller: a console asks again and again."""
        search, namespace = request.query.get("search", "").lower(), request.query.get("namespace", "")
        offset, limit = (_number(request, name, default) for name, default in (("offset", 0), ("limit", 100)))
        metadata = caller_metadata(request)
        kept = self._listed.get((metadata, namespace))
        if kept is None or kept[0] < time.monotonic():
            kept = (time.monotonic() + LISTED_S, await self._all_topics(namespace, request))
            while len(self._listed) >= MAX_LISTED:
                del self._listed[next(iter(self._listed))]
            self._listed[metadata, namespace] = kept
        found = [each for each in kept[1] if search in each["name"].lower()]
        return json_response({"topics": found[offset : offset + limit], "total": len(found)})

    async def _all_topics(self, namespace: str, request: web.Request) -> list[dict[str, Any]]:
        listed: Any = await self.call(
            LIST_TOPICS, topics_admin_pb2.ListTopicsRequest(namespace=namespace), request
        )
        addresses: dict[int, str] = {}
        with suppress(ApiError):  # a caller may see topics, and not brokers
            there: Any = await self.call(LIST_BROKERS, brokers_pb2.ListBrokersRequest(local=True), request)
            addresses = {each.broker_id: each.client_addr for each in there.brokers}
        return [
            as_dict(each) | {"broker": addresses.get(each.broker_id, "")}
            for each in listed.topics
            if not each.partition_of
        ]

    def _channel(self, route: ApiRoute) -> aio.Channel:
        return self._client if route.service in CLIENT_SERVICES else self._admin

    def _handler(self, route: ApiRoute) -> Any:
        has_several = route.descriptor.server_streaming

        async def handle(request: web.Request) -> web.StreamResponse:
            message = await read_request(route, request)
            if has_several:
                return await self._answer_lines(route, message, request)
            return json_response(as_dict(await self.call(route, message, request)))

        return handle

    async def _answer_lines(
        self, route: ApiRoute, message: Message, request: web.Request
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": NDJSON, "Cache-Control": "no-store"})
        method = self._channel(route).unary_stream(
            f"/{route.method}", type(message).SerializeToString, route.response_type.FromString
        )
        call = method(message, timeout=route.timeout_s, metadata=caller_metadata(request))
        try:
            async for answer in call:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(line(as_dict(answer)))
        except aio.AioRpcError as error:
            failure = status_error(error, check=_check(route))
            if not response.prepared:
                raise failure from None
            await response.write(line(failure.body))
        finally:
            call.cancel()
        if not response.prepared:
            await response.prepare(request)
        await response.write_eof()
        return response


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    if not (text.isascii() and text.isdecimal()) or len(text) > 9:
        raise ApiError(HTTPStatus.BAD_REQUEST, "query_invalid", f"{name} is a number")
    return min(int(text), MAX_PAGE) if name == "limit" else int(text)


def _check(route: ApiRoute) -> str | None:
    return None if route.verb == "GET" else f"GET {route.path}"


def line(value: Any) -> bytes:
    return msgspec.json.encode(value) + b"\n"


async def read_request(route: ApiRoute, request: web.Request) -> Message:
    """The message that a request stands for: its body, over that its query, over that its path. Raises
    ApiError."""
    tree = await read_json(request)
    if not isinstance(tree, dict):
        raise ApiError(HTTPStatus.BAD_REQUEST, "body_invalid", "the body must be a JSON object")
    tree |= _from_query(route, request.query)
    tree |= route.fields(request.match_info)
    message = route.request_type()
    try:
        json_format.ParseDict(tree, message, max_recursion_depth=20)
    except json_format.ParseError as error:
        text = f"the request does not fit {route.descriptor.input_type.name}: {str(error)[:200]}"
        raise ApiError(HTTPStatus.BAD_REQUEST, "body_invalid", text) from None
    return message


async def read_json(request: web.Request) -> Any:
    """The body; an empty one is an empty object. Raises ApiError."""
    if not request.can_read_body:
        return {}
    if request.content_type != "application/json":
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "body_invalid", "send the body as application/json")
    data = await request.content.read(MAX_BODY_BYTES + 1)
    while data and len(data) <= MAX_BODY_BYTES and (more := await request.content.read(MAX_BODY_BYTES)):
        data += more
    if len(data) > MAX_BODY_BYTES:
        raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body_invalid", f"at most {MAX_BODY_BYTES} bytes")
    try:
        return msgspec.json.decode(data) if data else {}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ApiError(HTTPStatus.BAD_REQUEST, "body_invalid", "the body is not JSON") from None


def _from_query(route: ApiRoute, query: Mapping[str, str]) -> dict[str, Any]:
    known = {field.name: field for field in route.query_fields()}
    tree: dict[str, Any] = {}
    for name, value in query.items():
        field = known.get(name)
        if field is None:
            allowed = ", ".join(sorted(known)) or "none"
            raise ApiError(
                HTTPStatus.BAD_REQUEST,
                "query_invalid",
                f"{name[:200]} is no parameter of this call; there are: {allowed}",
            )
        tree[name] = value == "true" if field.type == field.TYPE_BOOL else value
    return tree


def failed(error: SavaError) -> ApiError:
    """What a client of this process has raised."""
    code = error_mapping.code_of(error)
    status = _STATUS.get(error_mapping.status_of(error), HTTPStatus.INTERNAL_SERVER_ERROR)
    return ApiError(_missing(status, code), code, str(error), error.outcome.value)
