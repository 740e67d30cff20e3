"""Messages over HTTP, for people and programs without a client library: publish, read, follow, subscribe.

Everything is a stream or call of the ``Streams`` service on this broker's own port (see ``gateway``), with
the caller's credentials. A topic that another broker serves is reached through this one.

**Publish** takes JSON lines, a JSON object or array of them, or an Arrow stream; it answers when everything
is durable, with the offsets. A request is one open and one batch per partition: an error says what is stored.

**Read** gives a bounded range, from an offset or a time on, filtered here; at most ``MAX_SCANNED`` messages
are looked at per request, and ``next`` says where the next request begins. **Follow** gives server-sent
events.

**Subscribe** is a held consumer: ``receive`` opens it and hands messages out, ``ack`` and ``nack`` answer
them. A consumer that no request has used for ``IDLE_S`` is closed, and what it had unacked is delivered
again.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import secrets
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import grpc
import msgspec
from aiohttp import web
from grpc import aio

from sava.client.messages import Batch, SchemaCodec, codec_of
from sava.client.producer import partition_of
from sava.console.gateway import NDJSON, ApiError, caller_metadata, failed, json_response, line, status_error
from sava.errors import SavaError
from sava.proto import streams_pb2 as pb
from sava.proto import streams_pb2_grpc as rpc
from sava.records import Message, RecordBatch
from sava.tasks import cancelled

ARROW: Final = "application/vnd.apache.arrow.stream"
PARQUET: Final = "application/vnd.apache.parquet"

MAX_PUBLISH_BYTES: Final = 16 << 20
MAX_PUBLISHED: Final = 100_000
"""Messages of one request."""
MAX_LIMIT: Final = 10_000
MAX_SCANNED: Final = 100_000
SCAN_S: Final = 5.0
"""For one read; what it has found by then is the answer."""
READ_BYTES: Final = 64 << 20
"""What one read may hold."""
SHOWN_BYTES: Final = 64 << 10
"""Of each payload, unless the caller asks for more."""
MAX_CONSUMERS: Final = 256
"""Held at a time, of all callers."""
MAX_FOLLOWERS: Final = 256
IDLE_S: Final = 60.0
CALL_S: Final = 15.0
LONGEST_WAIT_S: Final = 30.0
GATHER_S: Final = 0.02
"""After the first message, for those that come with it."""
MAX_CREDITS: Final = 10_000
PING_S: Final = 15.0
"""Between signs of life of a stream of events without any."""
MAX_CODECS: Final = 1_000

_RELATIVE: Final = re.compile(r"-(\d{1,9})(s|m|h|d)")
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TYPES: Final = {
    "exclusive": pb.SUBSCRIPTION_EXCLUSIVE,
    "shared": pb.SUBSCRIPTION_SHARED,
    "failover": pb.SUBSCRIPTION_FAILOVER,
    "key_shared": pb.SUBSCRIPTION_KEY_SHARED,
}


def bad(message: str) -> ApiError:
    return ApiError(HTTPStatus.BAD_REQUEST, "request_invalid", message)


# -- what callers write --------------------------------------------------------------------------


def topic_of(request: web.Request) -> str:
    return f"/{request.match_info['namespace']}/{request.match_info['name']}"


def position(text: str) -> pb.Position:
    """``earliest``, ``latest``, an offset, ``-5m``, or a time as in RFC 3339. Raises ApiError."""
    if text in ("earliest", "latest"):
        return pb.Position(**{text: True})
    if text.isascii() and text.isdecimal() and len(text) < 20:
        return pb.Position(offset=int(text))
    if match := _RELATIVE.fullmatch(text):
        ago = int(match[1]) * _UNITS[match[2]]
        return pb.Position(publish_time=time.time_ns() // 1000 - ago * 1_000_000)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise bad(f"start {text[:100]!r}: earliest, latest, an offset, -5m or a time with a zone") from None
    if moment.tzinfo is None:
        raise bad(f"the time {text[:100]} has no zone; write 2026-01-31T12:00:00Z")
    return pb.Position(publish_time=int(moment.timestamp() * 1_000_000))


def count_of(value: Any, what: str, *, default: int, most: int) -> int:
    if value is None:
        return default
    text = str(value)
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text[:12]) <= most:
        raise bad(f"{what} is a number from 1 to {most}")
    return int(text)


async def body_of(request: web.Request, limit: int) -> bytes:
    parts, size = [], 0
    async for part in request.content.iter_any():
        size += len(part)
        if size > limit:
            raise ApiError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "request_invalid", f"a body of at most {limit} bytes"
            )
        parts.append(part)
    return b"".join(parts)


class _Given(msgspec.Struct, forbid_unknown_fields=True):
    """One message of a request."""

    payload: Any = None
    payload_base64: str | None = None
    key: str | None = None
    attributes: dict[str, str] = {}

    def content(self) -> bytes:
        """A text as it is; any other value as JSON."""
        if self.payload_base64 is not None:
            try:
                return base64.b64decode(self.payload_base64, validate=True)
            except binascii.Error:
                raise bad("payload_base64 is not base64") from None
        if isinstance(self.payload, str):
            return self.payload.encode()
        return msgspec.json.encode(self.payload)


_one: Final = msgspec.json.Decoder(_Given)
_many: Final = msgspec.json.Decoder(list[_Given] | _Given)


class Outgoing(NamedTuple):
    payloads: list[bytes]
    keys: list[str | None] | None
    attributes: list[Mapping[str, str]] | None

    @classmethod
    def parse(cls, kind: str, data: bytes) -> Outgoing:
        """Raises ApiError."""
        if kind == ARROW:
            return cls._of_arrow(data)
        try:
            if kind == NDJSON:
                given = [_one.decode(each) for each in data.splitlines() if each.strip()]
            elif kind == "application/json":
                decoded = _many.decode(data)
                given = decoded if isinstance(decoded, list) else [decoded]
            else:
                raise ApiError(
                    HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                    "request_invalid",
                    f"messages come as application/json, {NDJSON} or {ARROW}",
                )
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise bad(f"not a message: {str(error)[:200]}") from None
        return cls._checked(
            [each.content() for each in given],
            [each.key for each in given] if any(each.key is not None for each in given) else None,
            [each.attributes for each in given] if any(each.attributes for each in given) else None,
        )

    @classmethod
    def _of_arrow(cls, data: bytes) -> Outgoing:
        import pyarrow as pa

        try:
            table = pa.ipc.open_stream(data).read_all()
            payloads = table.column("payload").cast(pa.binary()).to_pylist()
            keys = table.column("key").cast(pa.string()).to_pylist() if "key" in table.column_names else None
            pairs = table.column("attributes").to_pylist() if "attributes" in table.column_names else None
        except (pa.ArrowException, KeyError, ValueError) as error:
            raise bad(f"not an Arrow stream with a payload column: {str(error)[:200]}") from None
        if any(payload is None for payload in payloads):
            raise bad("a payload is null")
        return cls._checked(payloads, keys, [dict(each or ()) for each in pairs] if pairs else None)

    @classmethod
    def _checked(
        cls, payloads: list[bytes], keys: list[str | None] | None, attributes: list[Any] | None
    ) -> Outgoing:
        if not 0 < len(payloads) <= MAX_PUBLISHED:
            raise bad(f"{len(payloads)} messages; a request has 1 to {MAX_PUBLISHED}")
        return cls(payloads, keys, attributes)

    def select(self, rows: Sequence[int]) -> Outgoing:
        keys, attributes = self.keys, self.attributes
        return Outgoing(
            [self.payloads[row] for row in rows],
            None if keys is None else [keys[row] for row in rows],
            None if attributes is None else [attributes[row] for row in rows],
        )

    def by_partition(self, count: int) -> dict[int, Outgoing]:
        """A key has its partition; messages without one go to one partition together."""
        if count <= 1:
            return {0: self}
        chosen = secrets.randbelow(count)
        rows: dict[int, list[int]] = {}
        for row in range(len(self.payloads)):
            key = None if self.keys is None else self.keys[row]
            rows.setdefault(chosen if key is None else partition_of(key, count), []).append(row)
        return {index: self.select(each) for index, each in sorted(rows.items())}

    def batch(self, producer: str, producer_id: int, base_sequence: int) -> bytes:
        encoded = RecordBatch.encode(
            self.payloads,
            publish_time=time.time_ns() // 1000,
            keys=self.keys,
            attributes=self.attributes,
            producer=producer,
            producer_id=producer_id,
            base_sequence=base_sequence,
        )
        return bytes(encoded.data)


# -- what callers read ----------------------------------------------------------------------------


def as_json(
    message: Message, *, shown: int = SHOWN_BYTES, codec: SchemaCodec | None = None
) -> dict[str, Any]:
    payload = message.payload
    body: dict[str, Any] = {
        "topic": message.topic,
        "offset": message.offset,
        "publish_time": moment_of(message.publish_time),
        "key": message.key,
        "attributes": dict(message.attributes),
        "size": len(payload),
        "producer": message.producer,
        "schema_id": message.schema_id,
        "schema_version": message.schema_version,
        "origin": None if message.origin is None else message.origin._asdict(),
    }
    cut = payload[:shown]
    if is_cut := len(cut) < len(payload):
        body["is_cut"] = is_cut
    try:
        body["payload"] = cut.decode()
    except UnicodeDecodeError as error:
        if is_cut and error.start > len(cut) - 4:  # in the middle of a character
            body["payload"] = cut[: error.start].decode()
        else:
            body["payload_base64"] = base64.b64encode(cut).decode("ascii")
    if codec is not None:
        try:
            body["value"] = msgspec.to_builtins(codec.decode(payload), enc_hook=str)
        except Exception as error:  # noqa: BLE001 (codecs of three libraries raise what they like)
            body["value_error"] = str(error)[:200]
    return body


def moment_of(microseconds: int) -> str:
    seconds, rest = divmod(microseconds, 1_000_000)
    moment = datetime.fromtimestamp(seconds, UTC).replace(microsecond=rest)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


class Filter(NamedTuple):
    """What a reader wants to see of what it reads."""

    key: str | None
    contains: bytes | None
    attribute: tuple[str, str] | None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Filter:
        contains, attribute = query.get("contains"), query.get("attribute")
        name, found, value = (attribute or "").partition("=")
        if attribute is not None and not found:
            raise bad("attribute is written name=value")
        return cls(
            query.get("key"), contains.encode() if contains else None, (name, value) if attribute else None
        )

    @property
    def is_empty(self) -> bool:
        return self.key is None and self.contains is None and self.attribute is None

    def takes(self, message: Message) -> bool:
        return (
            (self.key is None or message.key == self.key)
            and (self.contains is None or self.contains in message.payload)
            and (self.attribute is None or message.attributes.get(self.attribute[0]) == self.attribute[1])
        )


class MessagesApi:
    """Owned by the event loop."""

    def __init__(self, client: str) -> None:
        """The address of this broker's own client port."""
        self._channel = aio.insecure_channel(
            client,
            options=(
                ("grpc.max_send_message_length", 96 << 20),
                ("grpc.max_receive_message_length", 96 << 20),
            ),
        )
        self._streams: Any = rpc.StreamsStub(self._channel)
        self._codecs: dict[tuple[str, int], SchemaCodec | None] = {}
        self._consumers: dict[str, HeldConsumer] = {}
        self._followers = 0
        self._sweep: asyncio.TimerHandle | None = None

    def add_routes(self, router: web.UrlDispatcher) -> None:
        topic = "/v1/topics/{namespace}/{name}"
        router.add_post(f"{topic}/messages", self._publish)
        router.add_get(f"{topic}/messages", self._read)
        router.add_get(f"{topic}/messages/follow", self._follow)
        held = f"{topic}/subscriptions/{{subscription}}"
        router.add_post(f"{held}/receive", self._receive)
        router.add_post(f"{held}/ack", self._ack)
        router.add_post(f"{held}/nack", self._ack)

    async def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        await asyncio.gather(*(consumer.close() for consumer in self._consumers.values()))
        await self._channel.close(None)

    # -- publish -----------------------------------------------------------------------------

    async def _publish(self, request: web.Request) -> web.Response:
        topic, metadata = topic_of(request), caller_metadata(request)
        outgoing = Outgoing.parse(request.content_type, await body_of(request, MAX_PUBLISH_BYTES))
        found = await self._look_up(topic, metadata, create=True)
        stored: list[dict[str, Any]] = []
        for index, part in outgoing.by_partition(found.partition_count).items():
            partition = found.partitions[index].topic
            try:
                offset = await self._publish_part(partition, part, found.reliable, metadata)
            except ApiError as error:
                error.body |= {"stored": stored}
                raise
            stored.append({"topic": partition, "offset": offset, "count": len(part.payloads)})
        return json_response({"stored": stored})

    async def _publish_part(self, topic: str, part: Outgoing, reliable: bool, metadata: Any) -> int:
        """The offset of the first message. Raises ApiError, whose outcome is unknown once it was sent."""
        name, is_sent = f"http-{secrets.token_hex(8)}", False
        call = self._streams.Publish(timeout=CALL_S, metadata=metadata)
        try:
            await call.write(
                pb.PublishRequest(
                    open=pb.OpenProducer(
                        topic=topic,
                        producer_name=name,
                        delivery=pb.RELIABLE if reliable else pb.NON_RELIABLE,
                        is_name_generated=True,
                    )
                )
            )
            opened = (await _next(call)).opened
            data = part.batch(name, opened.producer_id, opened.next_sequence)
            is_sent = True
            await call.write(pb.PublishRequest(batch=data))
            while not (response := await _next(call)).receipts:
                if response.ending:
                    raise ApiError(
                        HTTPStatus.SERVICE_UNAVAILABLE, response.ending, f"{topic} is moving; retry"
                    )
            return int(response.receipts[0].base_offset)
        except SavaError as error:
            raise failed(error) from None
        except (aio.AioRpcError, asyncio.InvalidStateError) as error:
            raise await self._ended(call, error, is_change=is_sent) from None
        finally:
            call.cancel()

    async def _ended(self, call: Any, error: Exception, *, is_change: bool) -> ApiError:
        """How a stream ended, whose writer may have noticed it first."""
        if isinstance(error, aio.AioRpcError):
            return status_error(error, check="GET …/messages" if is_change else None)
        with suppress(TimeoutError):
            async with asyncio.timeout(CALL_S):
                await call.code()
        try:
            await _next(call)
        except aio.AioRpcError as ended:
            return status_error(ended, check="GET …/messages" if is_change else None)
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "unavailable", "the stream has ended", "unknown")

    # -- read ----------------------------------------------------------------------------------

    async def _read(self, request: web.Request) -> web.Response:
        query = request.query
        limit = count_of(query.get("limit"), "limit", default=100, most=MAX_LIMIT)
        shown = count_of(query.get("max_payload"), "max_payload", default=SHOWN_BYTES, most=READ_BYTES)
        start, wanted = position(query.get("start", "earliest")), Filter.of(query)
        topic, metadata = topic_of(request), caller_metadata(request)
        found = await self._look_up(topic, metadata)
        scans = await asyncio.gather(
            *(
                _Scan(self._streams, each.topic, metadata, wanted, limit).run(start)
                for each in found.partitions
            )
        )
        messages = [message for scan in scans for message in scan.found]
        messages.sort(key=lambda each: (each.publish_time, each.topic or "", each.offset or 0))
        messages = messages[:limit]
        _rewind(scans, messages)
        if PARQUET in request.headers.get("Accept", ""):
            return _as_parquet(messages, topic)
        codecs = {
            version: await self._codec(found.schema_subject, version, metadata)
            for version in {each.schema_version for each in messages}
            if version
        }
        return _as_answer(request, messages, scans, shown, codecs)

    async def _codec(self, subject: str, version: int, metadata: Any) -> SchemaCodec | None:
        """None for one that is not to be had: the payload is shown all the same."""
        if not subject:
            return None
        known = (subject, version)
        if known not in self._codecs:
            try:
                schema = await self._streams.Schema(
                    pb.SchemaRequest(subject=subject, version=version), timeout=CALL_S, metadata=metadata
                )
                codec = await asyncio.to_thread(codec_of, subject, schema)
            except (aio.AioRpcError, SavaError):
                return None
            while len(self._codecs) >= MAX_CODECS:
                del self._codecs[next(iter(self._codecs))]
            self._codecs[known] = codec
        return self._codecs[known]

    async def _look_up(self, topic: str, metadata: Any, *, create: bool = False) -> pb.LookUpResponse:
        try:
            found: pb.LookUpResponse = await self._streams.LookUp(
                pb.LookUpRequest(topic=topic, create=create, delivery=pb.RELIABLE if create else pb.ANY),
                timeout=CALL_S,
                metadata=metadata,
            )
        except aio.AioRpcError as error:
            raise status_error(error) from None
        return found

    # -- follow ----------------------------------------------------------------------------------

    async def _follow(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events. The id of an event is where the next one begins, for ``Last-Event-ID``."""
        if self._followers >= MAX_FOLLOWERS:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS, "too_many", f"{MAX_FOLLOWERS} requests follow topics already"
            )
        wanted, metadata = Filter.of(request.query), caller_metadata(request)
        shown = count_of(
            request.query.get("max_payload"), "max_payload", default=SHOWN_BYTES, most=READ_BYTES
        )
        start = position(request.query.get("start", "latest"))
        found = await self._look_up(topic_of(request), metadata)
        resumed = _event_id(request.headers.get("Last-Event-ID", ""))
        queue: asyncio.Queue[Batch | ApiError] = asyncio.Queue(8)
        self._followers += 1
        tasks = [
            asyncio.create_task(
                _follow_partition(self._streams, each.topic, resumed.get(each.topic, start), metadata, queue)
            )
            for each in found.partitions
        ]
        try:
            return await self._send_events(request, queue, wanted, shown, found.schema_subject, metadata)
        finally:
            self._followers -= 1
            await cancelled(*tasks)

    async def _send_events(
        self,
        request: web.Request,
        queue: asyncio.Queue[Batch | ApiError],
        wanted: Filter,
        shown: int,
        subject: str,
        metadata: Any,
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        while True:
            try:
                async with asyncio.timeout(PING_S):
                    item = await queue.get()
            except TimeoutError:
                await response.write(b": nothing new\n\n")
                continue
            if isinstance(item, ApiError):
                await response.write(b"event: error\ndata: " + line(item.body) + b"\n")
                return response
            lines = []
            for message in item:
                if wanted.is_empty or wanted.takes(message):
                    codec = await self._codec(subject, message.schema_version or 0, metadata)
                    body = as_json(message, shown=shown, codec=codec if message.schema_version else None)
                    at = f"{message.topic}={(message.offset or 0) + 1}".encode()
                    lines.append(b"id: " + at + b"\ndata: " + msgspec.json.encode(body) + b"\n\n")
            if lines:
                await response.write(b"".join(lines))

    # -- subscribe ---------------------------------------------------------------------------------

    async def _receive(self, request: web.Request) -> web.Response:
        options = await _options(request)
        most = count_of(options.get("max_messages"), "max_messages", default=100, most=MAX_CREDITS)
        wait_s = min(
            count_of(options.get("wait_ms"), "wait_ms", default=1, most=60_000) / 1000, LONGEST_WAIT_S
        )
        consumer = await self._consumer(request, options)
        received = await consumer.receive(most, wait_s)
        codecs = {
            version: await self._codec(consumer.subject, version, caller_metadata(request))
            for version in {message.schema_version for _, message in received}
            if version
        }
        return json_response(
            {
                "consumer": consumer.id,
                "messages": [
                    as_json(message, shown=READ_BYTES, codec=codecs.get(message.schema_version or 0))
                    | {"attempt": attempt}
                    for attempt, message in received
                ],
            }
        )

    async def _ack(self, request: web.Request) -> web.Response:
        options = await _options(request)
        consumer = self._held(request, options)
        ranges = _ranges(options.get("messages"), consumer.topic)
        is_nack = request.path.endswith("/nack")
        delay_ms = count_of(options.get("delay_ms"), "delay_ms", default=0, most=86_400_000)
        for topic, of_topic in ranges.items():
            await consumer.answer(topic, of_topic, is_nack=is_nack, delay_ms=delay_ms)
        return json_response({})

    async def _consumer(self, request: web.Request, options: Mapping[str, Any]) -> HeldConsumer:
        if options.get("consumer") is not None:
            return self._held(request, options)
        if len(self._consumers) >= MAX_CONSUMERS:
            raise ApiError(HTTPStatus.TOO_MANY_REQUESTS, "too_many", f"{MAX_CONSUMERS} consumers are open")
        kind = _TYPES.get(options.get("type", "shared"))
        if kind is None:
            raise bad(f"type is one of {', '.join(_TYPES)}")
        start = position(str(options.get("start", "latest")))
        metadata = caller_metadata(request)
        found = await self._look_up(topic_of(request), metadata)
        consumer = HeldConsumer(topic_of(request), found.schema_subject, metadata)
        subscription = request.match_info["subscription"]
        self._consumers[consumer.id] = consumer
        try:
            await consumer.open(self._streams, found.partitions, subscription, kind, start)
        except BaseException:
            del self._consumers[consumer.id]
            await consumer.close()
            raise
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(IDLE_S / 4, self._close_idle)
        return consumer

    def _held(self, request: web.Request, options: Mapping[str, Any]) -> HeldConsumer:
        """Of the same caller: the id alone opens nothing."""
        consumer = self._consumers.get(str(options.get("consumer")))
        if consumer is None or consumer.metadata != caller_metadata(request):
            raise ApiError(
                HTTPStatus.NOT_FOUND,
                "consumer_unknown",
                f"no such consumer: one that is idle for {IDLE_S:g} s is closed; receive opens another",
            )
        consumer.used_at = time.monotonic()
        return consumer

    def _close_idle(self) -> None:
        now = time.monotonic()
        for name, consumer in list(self._consumers.items()):
            if now - consumer.used_at > IDLE_S or consumer.has_ended:
                del self._consumers[name]
                consumer.end()
        self._sweep = (
            asyncio.get_running_loop().call_later(IDLE_S / 4, self._close_idle) if self._consumers else None
        )


# -- reading a partition ----------------------------------------------------------------------------


class _Scan:
    """A bounded look at one partition, from a position to the end that it has now."""

    def __init__(self, streams: Any, topic: str, metadata: Any, wanted: Filter, limit: int) -> None:
        self.topic = topic
        self.found: list[Message] = []
        self.scanned = 0
        self.next_offset = 0
        self.end = 0
        self._streams = streams
        self._metadata = metadata
        self._wanted = wanted
        self._limit = limit
        self._bytes = 0

    async def run(self, start: pb.Position) -> _Scan:
        try:
            await self._run(start)
        except aio.AioRpcError as error:
            raise status_error(error) from None
        return self

    async def _run(self, start: pb.Position) -> None:
        asked = pb.OffsetsRequest(topic=self.topic)
        if start.WhichOneof("kind") == "publish_time":
            asked.publish_time = start.publish_time
        offsets = await self._streams.Offsets(asked, timeout=CALL_S, metadata=self._metadata)
        self.end = offsets.next_offset
        match start.WhichOneof("kind"):
            case "offset":
                self.next_offset = max(start.offset, offsets.start_offset)
            case "publish_time":
                self.next_offset = offsets.offset
            case "latest":
                self.next_offset = max(offsets.start_offset, offsets.next_offset - self._limit)
            case _:
                self.next_offset = offsets.start_offset
        if self.next_offset >= self.end:
            return
        request = pb.ReadRequest(
            topic=self.topic, start=pb.Position(offset=self.next_offset), end=self.end, max_bytes=1 << 20
        )
        call = self._streams.Read(request, timeout=SCAN_S + CALL_S, metadata=self._metadata)
        deadline = time.monotonic() + SCAN_S
        try:
            async for response in call:
                for batch in response.batches:
                    if self._is_done_with(batch) or time.monotonic() > deadline:
                        return
        finally:
            call.cancel()

    def _is_done_with(self, data: bytes) -> bool:
        for message in Batch(RecordBatch.parse(data), topic=self.topic):
            if len(self.found) >= self._limit or self.scanned >= MAX_SCANNED or self._bytes > READ_BYTES:
                return True
            self.next_offset = (message.offset or 0) + 1
            self.scanned += 1
            if self._wanted.is_empty or self._wanted.takes(message):
                self.found.append(message)
                self._bytes += len(message.payload)
        return False


def _rewind(scans: Iterable[_Scan], kept: Iterable[Message]) -> None:
    """What was found beyond the limit is read again by the next request."""
    shown = {(message.topic, message.offset) for message in kept}
    for scan in scans:
        left = [each.offset or 0 for each in scan.found if (each.topic, each.offset) not in shown]
        if left:
            scan.next_offset = min(left)


def _as_answer(
    request: web.Request,
    messages: Sequence[Message],
    scans: Sequence[_Scan],
    shown: int,
    codecs: Mapping[int, SchemaCodec | None],
) -> web.Response:
    bodies = [as_json(each, shown=shown, codec=codecs.get(each.schema_version or 0)) for each in messages]
    if NDJSON in request.headers.get("Accept", ""):
        return web.Response(body=b"".join(map(line, bodies)), content_type=NDJSON)
    return json_response(
        {
            "messages": bodies,
            "next": {scan.topic: scan.next_offset for scan in scans},
            "end": {scan.topic: scan.end for scan in scans},
            "scanned": sum(scan.scanned for scan in scans),
        }
    )


def _as_parquet(messages: Sequence[Message], topic: str) -> web.Response:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table(
        {
            "topic": pa.array([each.topic for each in messages], pa.string()),
            "offset": pa.array([each.offset for each in messages], pa.int64()),
            "publish_time": pa.array([each.publish_time for each in messages], pa.timestamp("us", "UTC")),
            "key": pa.array([each.key for each in messages], pa.string()),
            "payload": pa.array([each.payload for each in messages], pa.binary()),
            "attributes": pa.array(
                [list(each.attributes.items()) for each in messages], pa.map_(pa.string(), pa.string())
            ),
        }
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    name = topic.strip("/").replace("/", "-")
    return web.Response(
        body=sink.getvalue().to_pybytes(),
        content_type=PARQUET,
        headers={"Content-Disposition": f'attachment; filename="{name}.parquet"'},
    )


def _event_id(text: str) -> dict[str, pb.Position]:
    topic, found, offset = text.partition("=")
    return {topic: position(offset)} if found else {}


async def _follow_partition(
    streams: Any, topic: str, start: pb.Position, metadata: Any, queue: asyncio.Queue[Batch | ApiError]
) -> None:
    """Until the request ends. A topic that moves is read on at its new place."""
    while True:
        call = streams.Read(pb.ReadRequest(topic=topic, start=start, max_bytes=256 << 10), metadata=metadata)
        try:
            async for response in call:
                for data in response.batches:
                    batch = Batch(RecordBatch.parse(data), topic=topic)
                    await queue.put(batch)
                    start = pb.Position(offset=batch.ranges[-1][1])
        except aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                await queue.put(status_error(error))
                return
        finally:
            call.cancel()
        await asyncio.sleep(0.5)


# -- a held consumer ----------------------------------------------------------------------------------


class HeldConsumer:
    """A consumer that several requests share: a stream to each partition, and what they have delivered."""

    def __init__(self, topic: str, subject: str, metadata: Any) -> None:
        self.id = secrets.token_urlsafe(16)
        self.topic = topic
        self.subject = subject
        self.metadata = metadata
        self.used_at = time.monotonic()
        self._delivered: deque[tuple[int, Message]] = deque()
        self._arrived = asyncio.Event()
        self._calls: dict[str, Any] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._error: ApiError | None = None

    @property
    def has_ended(self) -> bool:
        return self._error is not None

    async def open(
        self,
        streams: Any,
        partitions: Iterable[pb.Partition],
        subscription: str,
        kind: pb.SubscriptionType.ValueType,
        start: pb.Position,
    ) -> None:
        """Raises ApiError."""
        for partition in partitions:
            call = self._calls[partition.topic] = streams.Subscribe(metadata=self.metadata)
            try:
                async with asyncio.timeout(CALL_S):
                    await call.write(
                        pb.SubscribeRequest(
                            open=pb.OpenConsumer(
                                topic=partition.topic,
                                subscription=subscription,
                                consumer_name=f"http-{self.id[:8]}",
                                type=kind,
                                start=start,
                            )
                        )
                    )
                    await _next(call)
            except aio.AioRpcError as error:
                raise status_error(error) from None
            except TimeoutError:
                raise ApiError(
                    HTTPStatus.GATEWAY_TIMEOUT, "unavailable", f"{partition.topic} did not answer"
                ) from None
            self._tasks.append(asyncio.create_task(self._take(partition.topic, call)))

    async def _take(self, topic: str, call: Any) -> None:
        moved = f"{topic} has moved; open another consumer"
        try:
            while True:
                for delivered in (await _next(call)).delivered:
                    self._deliver(topic, delivered)
                self._arrived.set()
        except asyncio.InvalidStateError:
            self._error = ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "unavailable", moved)
        except aio.AioRpcError as error:
            self._error = status_error(error)
        except SavaError as error:
            self._error = failed(error)
        self._arrived.set()

    def _deliver(self, topic: str, delivered: pb.Delivered) -> None:
        pairs = tuple(zip(delivered.ranges[::2], delivered.ranges[1::2], strict=True))
        batch = Batch(RecordBatch.parse(delivered.batch), topic=topic, ranges=pairs)
        self._delivered.extend((delivered.attempt, message) for message in batch)

    async def receive(self, most: int, wait_s: float) -> list[tuple[int, Message]]:
        """As many as there are, at most ``most``; waits for the first. Raises ApiError when it has ended."""
        if not self._delivered:
            for call in self._calls.values():
                await self._write(call, pb.SubscribeRequest(credits=most))
            self._arrived.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while not self._delivered and self._error is None:
                        await self._arrived.wait()
                        self._arrived.clear()
            if len(self._delivered) < most:
                await asyncio.sleep(GATHER_S)
        if not self._delivered and self._error is not None:
            raise self._error
        return [self._delivered.popleft() for _ in range(min(most, len(self._delivered)))]

    async def answer(self, topic: str, ranges: Sequence[int], *, is_nack: bool, delay_ms: int) -> None:
        call = self._calls.get(topic)
        if call is None:
            raise bad(f"{topic[:200]}: this consumer reads {self.topic}")
        if is_nack:
            request = pb.SubscribeRequest(nacks=pb.Nacks(ranges=ranges, delay_ms=delay_ms))
        else:
            request = pb.SubscribeRequest(acks=pb.Acks(ranges=ranges))
        await self._write(call, request)

    async def _write(self, call: Any, request: pb.SubscribeRequest) -> None:
        if self._error is not None:
            raise self._error
        try:
            async with asyncio.timeout(CALL_S):
                await call.write(request)
        except (aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            raise self._error or ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "unavailable",
                "the consumer has ended; open another",
                "unknown",
            ) from None

    def end(self) -> None:
        for call in self._calls.values():
            call.cancel()

    async def close(self) -> None:
        self.end()
        await cancelled(*self._tasks)


async def _options(request: web.Request) -> dict[str, Any]:
    data = await body_of(request, 1 << 20)
    try:
        options = msgspec.json.decode(data or b"{}", type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise bad("the body must be a JSON object") from None
    return options


def _ranges(messages: Any, topic: str) -> dict[str, list[int]]:
    """Offsets as the wire has them (start, end, start, end), by partition. Raises ApiError."""
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_CREDITS:
        raise bad(
            f"messages: a list of 1 to {MAX_CREDITS}, each with an offset, and its topic if partitioned"
        )
    offsets: dict[str, set[int]] = {}
    for each in messages:
        offset = each.get("offset") if isinstance(each, dict) else each
        of_topic = each.get("topic", topic) if isinstance(each, dict) else topic
        if not isinstance(offset, int) or not 0 <= offset < 1 << 62 or not isinstance(of_topic, str):
            raise bad("an offset is a number from 0 on")
        offsets.setdefault(of_topic, set()).add(offset)
    return {name: list(_joined(sorted(found))) for name, found in offsets.items()}


def _joined(offsets: Sequence[int]) -> Iterator[int]:
    start = end = offsets[0]
    for offset in offsets:
        if offset > end:
            yield from (start, end)
            start = offset
        end = offset + 1
    yield from (start, end)


async def _next(call: Any) -> Any:
    """The next answer of a stream. Raises AioRpcError when there is none."""
    response = await call.read()
    if response is aio.EOF:  # type: ignore[attr-defined]  # which the stubs do not know
        raise asyncio.InvalidStateError
    return response
