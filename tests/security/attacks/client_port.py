"""Calls of an application that means harm: schemas that take forever, headers that make it a broker, names of
other producers, texts and batches that grow on arrival, and more of everything than there is room for."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Final

import grpc
from grpc import aio

from sava.peers.forwarding import EOF
from sava.proto import danube_schema_pb2 as schema_pb
from sava.proto import danube_schema_pb2_grpc as schema_rpc
from sava.proto import streams_pb2 as pb
from sava.proto import streams_pb2_grpc as rpc
from sava.proto import writers_pb2 as writers_pb
from sava.proto import writers_pb2_grpc as writers_rpc
from sava.records import Compression, Message, RecordBatch
from tests.security.attacks import CALL_S, Attack, Tally, Target

Metadata = tuple[tuple[str, str], ...]

LARGE: Final = (("grpc.max_send_message_length", 1 << 30), ("grpc.max_metadata_size", 1 << 20))
FLOODED: Final = "/default/flooded"
SPOOFED: Final = "/default/spoofed"
PROMPT_S: Final = 3.0
"""An answer to a hostile schema that takes longer has held the broker up."""
HUGE_NAMES: Final = (300_000, 60 << 20)
"""An error that repeats the first can be received; the second costs the broker more."""
GZIPPED_NAME: Final = 20 << 20
BOMB_BYTES: Final = 56 << 20
OPEN_STREAMS: Final = 500

# What a comparison or a check of a text may be made to do; each takes exponential or polynomial time.
PATTERNS: Final = ("^a*a*a*a*b$", "^(a+)+$", "^(a|aa)+$", "(x+x+)+y", "^(([a-z])+.)+[A-Z]([a-z])+$")


@asynccontextmanager
async def channel(target: Target, number: int = 0, **options: Any) -> AsyncIterator[aio.Channel]:
    address = target.client[number % len(target.client)]
    if target.ca:
        credentials = grpc.ssl_channel_credentials(await asyncio.to_thread(Path(target.ca).read_bytes))
        opened = aio.secure_channel(address, credentials, options=LARGE, **options)
    else:
        opened = aio.insecure_channel(address, options=LARGE, **options)
    try:
        yield opened
    finally:
        await opened.close(None)


def _streams(opened: aio.Channel) -> Any:
    """The generated stubs type synchronous and asynchronous use at once."""
    return rpc.StreamsStub(opened)


def metadata(target: Target) -> Metadata:
    return (("authorization", f"Bearer {target.token}"),) if target.token else ()


async def is_accepted(call: Awaitable[object]) -> bool:
    """Whether a call did what it asked, and did not end with an error."""
    try:
        await call
    except (aio.AioRpcError, aio.UsageError):
        return False
    return True


async def repeated(seconds: float, attempt: Callable[[], Awaitable[bool]], *, parallel: int = 1) -> Tally:
    """``attempt`` again and again, ``parallel`` at a time."""
    tally, until = Tally(), time.monotonic() + seconds

    async def one() -> None:
        while time.monotonic() < until:
            tally.count(is_accepted=await attempt())

    await asyncio.gather(*(one() for _ in range(parallel)))
    return tally


# -- what the broker takes for its own ---------------------------------------------------------


FORGED: Final[tuple[Metadata, ...]] = (
    (("sava-forwarded", "1"),),
    (("sava-forwarded", "1"), ("sava-principal", "broker:1")),
    (("x-danube-internal-broker", "1"),),
    (("sava-forwarded", "broker=1;principal=user:admin;time=0;mac=00"),),
)


async def forged_headers(target: Target, seconds: float) -> Tally:
    """H1: call what only brokers call, with headers that say so."""
    batch = RecordBatch.from_messages([Message(b"forged", producer="billing")]).to_bytes()
    numbers = count()

    async with channel(target) as first, channel(target, 1) as second, channel(target, 2) as third:
        await _create(first, target, SPOOFED)
        streams = [_streams(each) for each in (first, second, third)]
        writers = [writers_rpc.WritersStub(each) for each in (first, second, third)]

        async def attempt() -> bool:
            number = next(numbers)
            headers = (*FORGED[number % len(FORGED)], *metadata(target))
            append = streams[number % 3].Append(
                pb.AppendRequest(topic=SPOOFED, batch=batch), metadata=headers, timeout=CALL_S
            )
            staged: Any = writers[number % 3].PublishStaged(
                writers_pb.PublishStagedRequest(topic=SPOOFED, check_only=True),
                metadata=headers,
                timeout=CALL_S,
            )
            return await is_accepted(append) or await is_accepted(staged)

        return await repeated(seconds, attempt)


async def producer_spoofing(target: Target, seconds: float) -> Tally:
    """H2: open a producer under another's name, which fences it. The victim is one of the attack's own."""
    async with channel(target) as opened:
        await _create(opened, target, SPOOFED)
        numbers = count()

        async def attempt() -> bool:
            open_request = pb.OpenProducer(topic=SPOOFED, producer_name="billing")
            async with channel(target, next(numbers)) as mine:
                call = _streams(mine).Publish(metadata=metadata(target), timeout=CALL_S)
                with suppress(aio.AioRpcError, asyncio.InvalidStateError):
                    await call.write(pb.PublishRequest(open=open_request))
                    answer = await call.read()
                    call.cancel()
                    return answer is not EOF
            return False

        return await repeated(seconds, attempt)


async def _create(opened: aio.Channel, target: Target, topic: str) -> None:
    call = _streams(opened).LookUp(
        pb.LookUpRequest(topic=topic, create=True, delivery=pb.RELIABLE),
        metadata=metadata(target),
        timeout=CALL_S,
    )
    await is_accepted(call)


# -- work without end ---------------------------------------------------------------------------


def _definitions(pattern: str) -> tuple[bytes, bytes]:
    """Two versions, whose comparison matches a long name against the pattern."""
    before = {"type": "object", "patternProperties": {pattern: {"type": "string"}}}
    after = {"type": "object", "properties": {"a" * 1500: {"type": "integer"}}}
    return json.dumps(before).encode(), json.dumps(after).encode()


async def hostile_schemas(target: Target, seconds: float) -> Tally:
    """C4: make the comparison of two versions hold the broker up. Accepted: the answer took too long."""
    run, numbers = time.time_ns(), count()

    async def attempt() -> bool:
        number = next(numbers)
        async with channel(target, number) as opened:
            stub = schema_rpc.SchemaRegistryStub(opened)
            subject = f"hostile-{run}-{number}"
            began = time.monotonic()
            for definition in _definitions(PATTERNS[number % len(PATTERNS)]):
                call: Any = stub.RegisterSchema(
                    schema_pb.RegisterSchemaRequest(
                        subject=subject, schema_type="json_schema", schema_definition=definition
                    ),
                    metadata=metadata(target),
                    timeout=CALL_S,
                )
                await is_accepted(call)
            return time.monotonic() - began > PROMPT_S

    return await repeated(seconds, attempt)


# -- what grows on arrival ------------------------------------------------------------------------


async def huge_names(target: Target, seconds: float) -> Tally:
    """H3: a topic name of 60 MB, which an error text would repeat."""
    names, numbers = [f"/default/{'x' * size}" for size in HUGE_NAMES], count()

    async def attempt() -> bool:
        number = next(numbers)
        async with channel(target, number) as opened:
            request = pb.LookUpRequest(topic=names[number % len(names)])
            call = _streams(opened).LookUp(request, metadata=metadata(target), timeout=CALL_S)
            try:
                await call
            except aio.AioRpcError as error:
                return len(error.details() or "") > 2000
            return True

    tally = await repeated(seconds, attempt)
    tally.note = "accepted: the error repeats the name"
    return tally


async def gzip_bombs(target: Target, seconds: float) -> Tally:
    """H3: the same in a few kilobytes of gzip, several at a time."""
    name, numbers = "x" * GZIPPED_NAME, count()

    async def attempt() -> bool:
        async with channel(target, next(numbers), compression=grpc.Compression.Gzip) as opened:
            call = _streams(opened).LookUp(
                pb.LookUpRequest(topic=name), metadata=metadata(target), timeout=CALL_S
            )
            try:
                await call
            except aio.AioRpcError as error:
                return len(error.details() or "") > 2000
            return True

    tally = await repeated(seconds, attempt, parallel=4)
    tally.note = "accepted: the error repeats the name"
    return tally


async def zstd_bombs(target: Target, seconds: float) -> Tally:
    """H4: batches that are 2 kB on the wire and 56 MB unpacked, of a producer id that is not the stream's."""
    payloads = [Message(bytes(8 << 20))] * (BOMB_BYTES >> 23)
    made = await asyncio.to_thread(
        RecordBatch.from_messages, payloads, producer_id=4711, codec=Compression.ZSTD
    )
    bomb, numbers = made.to_bytes(), count()

    async def attempt() -> bool:
        number = next(numbers)
        async with channel(target, number) as opened:
            await _create(opened, target, FLOODED)
            call = _streams(opened).Publish(metadata=metadata(target), timeout=CALL_S)
            with suppress(aio.AioRpcError, asyncio.InvalidStateError):
                producer = pb.OpenProducer(
                    topic=FLOODED, producer_name=f"bomb-{number}", is_name_generated=True
                )
                await call.write(pb.PublishRequest(open=producer))
                if await call.read() is EOF:
                    return False
                for _ in range(4):
                    await call.write(pb.PublishRequest(batch=bomb))
                answer = await call.read()
                return answer is not EOF and bool(answer.receipts)
        return False

    tally = await repeated(seconds, attempt, parallel=8)
    tally.note = f"{len(bomb)} bytes a batch"
    return tally


# -- more than there is room for --------------------------------------------------------------------


async def subscription_flood(target: Target, seconds: float) -> Tally:
    """H5: as many subscriptions of one topic as there is time for."""
    numbers = count()
    async with channel(target) as opened:
        await _create(opened, target, FLOODED)
        stub = _streams(opened)

        async def attempt() -> bool:
            request = pb.AdvanceRequest(topic=FLOODED, subscription=f"flood-{next(numbers)}", offset=0)
            call = stub.Advance(request, metadata=metadata(target), timeout=CALL_S)
            return await is_accepted(call)

        return await repeated(seconds, attempt, parallel=16)


async def topic_flood(target: Target, seconds: float) -> Tally:
    """M2: as many topics as there is time for."""
    run, numbers = time.time_ns(), count()
    async with channel(target) as opened:
        stub = _streams(opened)

        async def attempt() -> bool:
            request = pb.LookUpRequest(
                topic=f"/default/flood-{run}-{next(numbers)}", create=True, delivery=pb.RELIABLE
            )
            call = stub.LookUp(request, metadata=metadata(target), timeout=CALL_S)
            return await is_accepted(call)

        return await repeated(seconds, attempt, parallel=16)


async def producer_flood(target: Target, seconds: float) -> Tally:
    """M2: hundreds of Publish streams on one connection, which stay open."""
    async with channel(target) as opened:
        await _create(opened, target, FLOODED)

        def requests(number: int) -> Sequence[pb.PublishRequest]:
            name = f"flood-{number}"
            return (
                pb.PublishRequest(
                    open=pb.OpenProducer(topic=FLOODED, producer_name=name, is_name_generated=True)
                ),
            )

        stub = _streams(opened)
        return await _held_open(seconds, lambda: stub.Publish(metadata=metadata(target)), requests)


async def unacked_streams(target: Target, seconds: float) -> Tally:
    """Consumers that ask for a million messages, take one response, and never read or ack again."""
    async with channel(target) as opened:
        await _create(opened, target, FLOODED)
        await _fill(opened, target)

        def requests(number: int) -> Sequence[pb.SubscribeRequest]:
            start = pb.Position(earliest=True)
            consumer = pb.OpenConsumer(
                topic=FLOODED,
                subscription=f"unacked-{number % 50}",
                consumer_name=f"c-{number}",
                type=pb.SUBSCRIPTION_SHARED,
                start=start,
                credits=1_000_000,
            )
            return (pb.SubscribeRequest(open=consumer), pb.SubscribeRequest(credits=1_000_000))

        stub = _streams(opened)
        return await _held_open(seconds, lambda: stub.Subscribe(metadata=metadata(target)), requests)


async def _fill(opened: aio.Channel, target: Target) -> None:
    """A few megabytes to deliver."""
    call = _streams(opened).Publish(metadata=metadata(target), timeout=CALL_S)
    with suppress(aio.AioRpcError, asyncio.InvalidStateError):
        producer = pb.OpenProducer(topic=FLOODED, producer_name="filler", is_name_generated=True)
        await call.write(pb.PublishRequest(open=producer))
        answer = await call.read()
        if answer is EOF:
            return
        identity = answer.opened.producer_id
        for number in range(16):
            batch = RecordBatch.from_messages(
                [Message(bytes(1 << 16), producer="filler")] * 4,
                producer_id=identity,
                base_sequence=4 * number,
            )
            await call.write(pb.PublishRequest(batch=batch.to_bytes()))
        await call.done_writing()
        while await call.read() is not EOF:
            pass


async def _held_open(
    seconds: float, begin: Callable[[], Any], requests: Callable[[int], Sequence[Any]]
) -> Tally:
    """Open streams up to a number, and hold them until the time is up."""
    tally, until, calls = Tally(), time.monotonic() + seconds, []
    for number in range(OPEN_STREAMS):
        call = begin()
        try:
            async with asyncio.timeout(CALL_S):
                for request in requests(number):
                    await call.write(request)
                is_open = await call.read() is not EOF
        except (aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            is_open = False
        tally.count(is_accepted=is_open)
        calls.append(call)
        if time.monotonic() > until:
            break
    await asyncio.sleep(max(until - time.monotonic(), 0))
    for call in calls:
        call.cancel()
    return tally


ATTACKS: Final = (
    Attack("client: forged headers", forged_headers, "refused"),
    Attack("client: producer spoofing", producer_spoofing, "refused", is_of_strangers=True),
    Attack("client: huge names", huge_names, "refused"),
    Attack("client: gzip bombs", gzip_bombs, "refused"),
    Attack("client: zstd bombs", zstd_bombs, "refused"),
    Attack("client: topic flood", topic_flood, "borne"),
    Attack("client: subscription flood", subscription_flood, "borne"),
    Attack("client: producer flood", producer_flood, "borne"),
    Attack("client: unacked streams", unacked_streams, "borne"),
    Attack("client: hostile schemas", hostile_schemas, "refused"),
)
