"""Attacks with too much of something, on a real broker in a process of its own: hostile patterns, long names,
compressed requests, compressed batches, connections that never begin. After each the broker has grown by a
bounded amount, and meanwhile other clients are served.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc import aio

from sava.proto import (
    admin_pb2,
    brokers_pb2,
    danube_admin_pb2,
    danube_api_pb2,
    danube_schema_pb2,
    ledgers_pb2,
    pipelines_pb2,
    replica_pb2,
    replication_pb2,
    streams_pb2,
    topics_admin_pb2,
    writers_pb2,
)
from sava.proto import danube_schema_pb2_grpc as schema_rpc
from sava.proto import streams_pb2 as pb
from sava.proto import streams_pb2_grpc as rpc
from sava.records import Compression, RecordBatch
from sava.topics.producers import producer_id
from tests.support.brokers import Standalone

HEALTHY_S: Final = 1.0
"""Of an answer of ``/healthz``: 100 ms, and the rest for a machine that runs other tests. A broker that holds
the interpreter's lock answers after seconds, or never."""
PATIENCE_S: Final = 60.0


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with Standalone(tmp_path_factory.mktemp("broker")) as broker:
        broker.ready()
        yield broker


@pytest.fixture
async def channel(broker: Standalone) -> AsyncIterator[aio.Channel]:
    async with aio.insecure_channel(
        broker.address, options=(("grpc.max_send_message_length", -1),)
    ) as channel:
        yield channel


def resident_mb(broker: Standalone) -> float:
    line = next(
        each for each in Path(f"/proc/{broker.pid}/status").read_text().splitlines() if "VmRSS" in each
    )
    return int(line.split()[1]) / 1024


@asynccontextmanager
async def watched(broker: Standalone) -> AsyncIterator[Watched]:
    """Asks for the broker's health all the time, and looks how much memory it has."""
    seen = Watched(resident_mb(broker))

    async def look() -> None:
        while True:
            started = time.monotonic()
            reader, writer = await asyncio.open_connection("127.0.0.1", broker.http_port)
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert b" 200 " in await reader.readline()
            writer.close()
            seen.answers.append(time.monotonic() - started)
            seen.peak_mb = max(seen.peak_mb, resident_mb(broker))
            await asyncio.sleep(0.01)

    looking = asyncio.ensure_future(look())
    try:
        yield seen
        await asyncio.sleep(0.1)
    finally:
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking


class Watched:
    def __init__(self, before_mb: float) -> None:
        self.before_mb = self.peak_mb = before_mb
        self.answers: list[float] = []

    @property
    def grown_mb(self) -> float:
        return self.peak_mb - self.before_mb


# -- patterns ------------------------------------------------------------------------------------------------


async def test_hostile_patterns_leave_the_broker_healthy(broker: Standalone, channel: aio.Channel) -> None:
    schemas = schema_rpc.SchemaRegistryStub(channel)
    pattern = "^a*a*a*a*b$"

    async def register(subject: str, document: Any) -> None:
        request = danube_schema_pb2.RegisterSchemaRequest(
            subject=subject, schema_type="json_schema", schema_definition=json.dumps(document).encode()
        )
        await schemas.RegisterSchema(request, timeout=PATIENCE_S)

    async def attack(number: int) -> None:
        subject = f"hostile-{number}"
        await register(subject, {"patternProperties": {pattern: {"type": "integer"}}})
        with suppress(aio.AioRpcError):
            await register(subject, {"properties": {"a" * 1500: {"type": "integer"}}})
        with suppress(aio.AioRpcError):
            many = {f"(?:a|b)*a(?:a|b){{{size}}}c": {"type": "integer"} for size in range(100, 200)}
            names = {"ab" * 400 + str(index): {"type": "integer"} for index in range(100)}
            await register(subject, {"patternProperties": many, "properties": names})
            await register(subject, {"patternProperties": many, "properties": {**names, "c": True}})

    async with watched(broker) as seen:
        await asyncio.wait_for(asyncio.gather(*map(attack, range(8))), PATIENCE_S)
    assert max(seen.answers) < HEALTHY_S


# -- long texts ----------------------------------------------------------------------------------------------

CLIENT_FILES = (streams_pb2, danube_api_pb2, danube_schema_pb2, writers_pb2, replica_pb2)
ADMIN_FILES = (
    admin_pb2, brokers_pb2, topics_admin_pb2, ledgers_pb2, pipelines_pb2, replication_pb2, danube_admin_pb2,
)  # fmt: skip
LONG: Final = 3_000
"""Short enough for an error that repeats it to come through to a client."""
SHOWN: Final = 200
_SKIPPED: Final = {"Init", "Bind", "Drain", "SnapshotNow"}
"""What would end the broker's life as it is, whatever the text."""


def methods(files: tuple[Any, ...]) -> list[MethodDescriptor]:
    return [
        method
        for file in files
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
        if method.name not in _SKIPPED
    ]


def requests(method: MethodDescriptor) -> Iterator[Any]:
    """One request for each text of the call's message, with that text too long."""
    fields = method.input_type.fields
    for field in fields:
        if field.type == FieldDescriptor.TYPE_STRING and not field.is_repeated:
            request = GetMessageClass(method.input_type)()
            for other in fields:
                if other.type == FieldDescriptor.TYPE_STRING and not other.is_repeated:
                    setattr(request, other.name, _plausible(other.name))
            for long in ("x" * LONG, "/default/" + "x" * LONG, "/" + "x" * LONG + "/y", "ж" * (LONG // 6)):
                setattr(request, field.name, long)
                yield request


def _plausible(name: str) -> str:
    if "topic" in name:
        return "/default/plausible"
    return {"subscription_type": "shared", "schema_type": "string", "address": "127.0.0.1:1"}.get(
        name, "plausible"
    )


@pytest.mark.parametrize("port", ["client", "admin"])
async def test_errors_repeat_little_of_what_was_sent(broker: Standalone, port: str) -> None:
    address, files = (broker.address, CLIENT_FILES) if port == "client" else (broker.admin, ADMIN_FILES)
    refused, talkative = 0, []
    async with aio.insecure_channel(address) as channel:
        for method in methods(files):
            for request in requests(method):
                text = await _error(channel, method, request)
                refused += text is not None
                if _repeated(text or "") > SHOWN:
                    talkative.append((method.full_name, (text or "")[:60]))
    assert not talkative, {name for name, _ in talkative}
    assert refused > 20


def _repeated(text: str) -> int:
    longest = max((len(run[0]) for run in re.finditer(r"(.)\1*", text, re.DOTALL)), default=0)
    return max(longest, text.count("\\u0436"))


async def _error(channel: aio.Channel, method: MethodDescriptor, request: Any) -> str | None:
    path = f"/{method.containing_service.full_name}/{method.name}"
    response = GetMessageClass(method.output_type)
    serialize, parse = type(request).SerializeToString, response.FromString
    try:
        if method.client_streaming:
            call: Any = channel.stream_stream(path, serialize, parse)(iter((request,)), timeout=10)
            await call.read()
        elif method.server_streaming:
            await channel.unary_stream(path, serialize, parse)(request, timeout=0.5).read()
        else:
            await channel.unary_unary(path, serialize, parse)(request, timeout=5)
    except aio.AioRpcError as error:
        return error.details()
    return None


async def test_requests_compressed_by_grpc_take_no_memory(broker: Standalone) -> None:
    options = (("grpc.max_send_message_length", -1),)
    request = pb.LookUpRequest(topic="x" * 20_000_000)
    async with (
        watched(broker) as seen,
        aio.insecure_channel(broker.address, compression=grpc.Compression.Gzip, options=options) as channel,
    ):
        streams = rpc.StreamsStub(channel)
        ends = await asyncio.gather(
            *(streams.LookUp(request, timeout=PATIENCE_S) for _ in range(8)), return_exceptions=True
        )
    assert all(isinstance(end, aio.AioRpcError) for end in ends)
    assert seen.grown_mb < 60


# -- connections ---------------------------------------------------------------------------------------------

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", PREFACE[:10], PREFACE], ids=["nothing", "half", "no settings"])
@pytest.mark.parametrize("port", ["client", "admin"])
async def test_connections_that_do_not_begin_are_dropped(broker: Standalone, port: str, sent: bytes) -> None:
    number = broker.port if port == "client" else int(broker.admin.rpartition(":")[2])
    connections = []
    for _ in range(50):
        reader, writer = await asyncio.open_connection("127.0.0.1", number)
        writer.write(sent)
        connections.append((reader, writer))
    async with asyncio.timeout(30):
        await asyncio.gather(*(_ended(reader) for reader, _ in connections))
    for _, writer in connections:
        writer.close()


async def _ended(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await reader.read(65536):
            pass


# -- batches -------------------------------------------------------------------------------------------------


class Publishing:
    """A producer by the bare protocol."""

    def __init__(self, channel: aio.Channel, topic: str, name: str) -> None:
        self.name = name
        streams: Any = rpc.StreamsStub(channel)
        self._call = streams.Publish()
        self._topic = topic
        self._sequence = itertools.count()

    async def open(self) -> int:
        opening = pb.OpenProducer(topic=self._topic, producer_name=self.name)
        await self._call.write(pb.PublishRequest(open=opening))
        answer = await self._call.read()
        if not isinstance(answer, pb.PublishResponse):
            raise RuntimeError(await self._call.details())
        return int(answer.opened.producer_id)

    async def send(self, batch: bytes) -> Any:
        """The broker's answer; None if it ended the stream."""
        with suppress(aio.AioRpcError):
            await self._call.write(pb.PublishRequest(batch=batch))
            return await self._call.read()
        return None

    async def end(self) -> str:
        """Why the broker ended it."""
        return str(await self._call.details())


def bomb(producer: int) -> bytes:
    """56 MB in two kilobytes."""
    return RecordBatch.encode(
        [b"\0" * (56 << 20)], publish_time=1, producer_id=producer, base_sequence=0, codec=Compression.ZSTD
    ).to_bytes()


async def test_a_foreign_batch_is_refused_before_it_is_decompressed(
    broker: Standalone, channel: aio.Channel
) -> None:
    data = bomb(producer_id(1, "somebody") + 1)
    streams = [Publishing(channel, "/default/foreign", f"p{index}") for index in range(30)]
    await asyncio.gather(*(stream.open() for stream in streams))
    async with watched(broker) as seen:
        await asyncio.gather(*(stream.send(data) for stream in streams))
    assert all("producer id" in end for end in [await stream.end() for stream in streams])
    assert seen.grown_mb < 50


async def test_batches_that_grow_are_decompressed_within_a_budget(
    broker: Standalone, channel: aio.Channel
) -> None:
    """Thirty at a time, too large for the topic once decompressed, while another client publishes."""
    attackers = [Publishing(channel, "/default/bombs", f"p{index}") for index in range(30)]
    ids = await asyncio.gather(*(stream.open() for stream in attackers))
    bombs = [bomb(each) for each in ids]
    async with aio.insecure_channel(broker.address, options=(("grpc.use_local_subchannel_pool", 1),)) as mine:
        quiet = Publishing(mine, "/default/quiet", "me")
        own = await quiet.open()
        took: list[float] = []

        async def publish() -> None:
            for sequence in itertools.count():
                batch = RecordBatch.encode([b"x"], publish_time=1, producer_id=own, base_sequence=sequence)
                started = time.monotonic()
                assert (await quiet.send(batch.to_bytes())).receipts
                took.append(time.monotonic() - started)
                await asyncio.sleep(0.01)

        publishing = asyncio.ensure_future(publish())
        async with watched(broker) as seen:
            pairs = zip(attackers, bombs, strict=True)
            await asyncio.gather(*(stream.send(data) for stream, data in pairs))
        publishing.cancel()
        with suppress(asyncio.CancelledError):
            await publishing
    assert all("limit" in end for end in [await stream.end() for stream in attackers])
    assert seen.grown_mb < 300
    assert sorted(took)[int(len(took) * 0.99)] < 2.0
    assert max(seen.answers) < HEALTHY_S
