"""The service that other clusters copy into, at a real broker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from random import Random
from typing import Any

import grpc
import pytest
from grpc import aio

from sava.client import Client
from sava.proto import replica_pb2 as pb
from sava.records import Message, RecordBatch
from sava.storage.source_positions import origin_topic
from tests.support.brokers import Standalone
from tests.support.copying import Origins, ReplicaStream, Sender, replica, request_of, source_of
from tests.support.waiting import PATIENCE_S

TOPIC = "/default/orders"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """What it creates for other clusters does not depend on what it creates for its own clients."""
    settings = {"SAVA__CLUSTER_NAME": "us", "SAVA__AUTO_CREATE_TOPICS": "false"}
    with Standalone(tmp_path_factory.mktemp("broker"), **settings) as started:
        yield started


@pytest.fixture
async def stub(broker: Standalone) -> AsyncIterator[Any]:
    async with replica(f"127.0.0.1:{broker.port}") as opened:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await opened.Hello(pb.HelloRequest(), timeout=1, wait_for_ready=True)
                    break
                except aio.AioRpcError:
                    await asyncio.sleep(0.05)
        yield opened


async def ensure(stub: Any, topic: str, partitions: int = 0, **more: Any) -> pb.TopicShape:
    request = pb.EnsureTopicRequest(
        topic=topic, partition_count=partitions, reliable=True, cluster_name="eu", **more
    )
    shape: pb.TopicShape = await stub.EnsureTopic(request, timeout=PATIENCE_S)
    return shape


async def describe(stub: Any, *topics: str) -> list[pb.TopicShape]:
    response = await stub.DescribeTopics(pb.DescribeTopicsRequest(topics=topics), timeout=PATIENCE_S)
    return list(response.topics)


async def payloads(broker: Standalone, topic: str, count: int) -> list[str]:
    """The first of them, in order."""
    async with (
        asyncio.timeout(PATIENCE_S),
        Client([broker.url], timeout=PATIENCE_S) as client,
        client.reader(topic, start="earliest", end=count) as reader,
    ):
        return [message.payload.decode() async for message in reader]


# -- what there is ---------------------------------------------------------------------------------


async def test_hello_says_who_this_is(stub: Any) -> None:
    hello = await stub.Hello(pb.HelloRequest(), timeout=PATIENCE_S)
    assert hello.cluster_name == "us"
    assert hello.cluster_id
    assert hello.version


async def test_topics_are_described_as_they_are(stub: Any) -> None:
    await ensure(stub, "/default/plain-one")
    await ensure(stub, "/default/parts-three", 3)
    plain, parts, missing, nowhere = await describe(
        stub, "/default/plain-one", "/default/parts-three", "/default/none", "/elsewhere/t"
    )
    assert (plain.exists, plain.partition_count, len(plain.topic_ids), plain.reliable) == (True, 0, 1, True)
    assert (parts.exists, parts.partition_count, len(set(parts.topic_ids))) == (True, 3, 3)
    assert not parts.missing
    assert (missing.exists, missing.namespace_exists) == (False, True)
    assert (nowhere.exists, nowhere.namespace_exists) == (False, False)
    with pytest.raises(aio.AioRpcError) as refused:
        await describe(stub, "/default/parts-three-part-0")
    assert "ask for /default/parts-three" in str(refused.value.details())


async def test_a_topic_that_is_there_stays_as_it_is_unless_it_is_to_grow(stub: Any) -> None:
    first = await ensure(stub, "/default/grows", 2)
    assert (await ensure(stub, "/default/grows", 4)).partition_count == 2
    assert (await ensure(stub, "/default/grows")).partition_count == 2
    grown = await ensure(stub, "/default/grows", 4, grow=True)
    assert grown.partition_count == 4
    assert grown.topic_ids[:2] == first.topic_ids
    assert (await ensure(stub, "/default/grows", 3, grow=True)).partition_count == 4
    with pytest.raises(aio.AioRpcError) as refused:
        await ensure(stub, "/elsewhere/t", 2)
    assert "namespace elsewhere does not exist" in str(refused.value.details())


async def test_creating_the_same_topic_at_once_is_no_conflict(stub: Any) -> None:
    shapes = await asyncio.gather(*(ensure(stub, "/default/at-once", 3) for _ in range(5)))
    assert {tuple(shape.topic_ids) for shape in shapes} == {tuple(shapes[0].topic_ids)}


async def test_schemas_are_found_or_registered_and_the_topic_follows(stub: Any) -> None:
    await ensure(stub, "/default/typed")
    definitions = [
        json.dumps({"type": "object", "properties": {name: {"type": "string"} for name in names}}).encode()
        for names in (("a",), ("a", "b"))
    ]
    versions = []
    for definition in (*definitions, definitions[0]):
        request = pb.EnsureSchemaRequest(
            subject="typed-value", type="json_schema", definition=definition, topic="/default/typed"
        )
        versions.append(await stub.EnsureSchema(request, timeout=PATIENCE_S))
    assert [each.version for each in versions] == [1, 2, 1]
    assert len({each.schema_id for each in versions}) == 1
    assert (await describe(stub, "/default/typed"))[0].schema_subject == "typed-value"


# -- streams ---------------------------------------------------------------------------------------


async def test_a_source_is_copied_and_read_with_its_origin(stub: Any, broker: Standalone) -> None:
    topic, eu = "/default/copied", Origins("eu").publish(300, skip=range(0, 300, 9))
    shape = await ensure(stub, topic)
    stream = ReplicaStream(stub, topic, eu.source)
    opened = await stream.open()
    assert (opened.is_known, opened.position, opened.topic_id) == (False, 0, shape.topic_ids[0])
    for start in range(0, 300, 50):  # all of them before the first receipt is read
        await stream.send(eu.source_range(start, start + 50, begin=not start))
    receipts = [await stream.receive() for _ in range(6)]
    assert [receipt.position for receipt in receipts] == list(range(50, 301, 50))
    assert await stream.close() is grpc.StatusCode.OK
    assert await payloads(broker, topic, len(eu.payloads)) == eu.payloads


async def test_a_refusal_is_told_in_the_stream_with_the_position(stub: Any) -> None:
    topic, eu = "/default/refused", Origins("eu").publish(100)
    await ensure(stub, topic)
    stream = ReplicaStream(stub, topic, eu.source)
    await stream.open()
    await stream.send(eu.source_range(0, 10, begin=True))
    await stream.send(eu.source_range(20, 30))
    await stream.send(eu.source_range(10, 20))  # behind a refused one nothing is taken, whatever it is
    assert (await stream.receive()).position == 10
    ended = await stream.receive()
    assert isinstance(ended, pb.SourceEnded)
    assert (ended.code, ended.is_known, ended.position, ended.may_pass) == (
        "source_position_mismatch",
        True,
        10,
        False,
    )
    assert await stream.close() is grpc.StatusCode.FAILED_PRECONDITION
    again = ReplicaStream(stub, topic, eu.source)
    assert (await again.open()).position == 10
    again.cancel()


@pytest.mark.parametrize("what", ["no path", "no origin", "garbage", "offsets"])
async def test_what_cannot_be_copied_is_refused_and_leaves_the_position(stub: Any, what: str) -> None:
    topic, eu = "/default/garbage", Origins("eu").publish(10)
    await ensure(stub, topic)
    stream = ReplicaStream(stub, topic, eu.source)
    before = await stream.open()
    source_range = eu.source_range(0, 10, begin=True)
    messages = list(source_range.batches[0].messages())
    match what:
        case "no path":
            bad = [Message(each.payload, publish_time=1, origin=each.origin) for each in messages]
            source_range = source_range._replace(batches=[RecordBatch.from_messages(bad)])
        case "no origin":
            bad = [Message(each.payload, attributes=each.attributes, publish_time=1) for each in messages]
            source_range = source_range._replace(batches=[RecordBatch.from_messages(bad)])
        case "offsets":
            source_range = source_range._replace(offsets=[0, 1 << 40], end=1 << 41)
    if what == "garbage":
        request = pb.AppendRequest(range=pb.SourceRange(start=0, end=10, begin=True, batches=b"x" * 200))
        await stream._call.write(request)
    else:
        await stream.send(source_range)
    ended = await stream.receive()
    assert isinstance(ended, pb.SourceEnded)
    assert ended.code in ("message_invalid", "batch_corrupt")
    assert (ended.is_known, ended.position) == (before.is_known, before.position) == (False, 0)
    await stream.close()


async def test_a_cluster_of_the_same_name_is_refused(stub: Any) -> None:
    await ensure(stub, TOPIC)
    stream = ReplicaStream(stub, TOPIC, Origins("us").source)
    with pytest.raises(aio.AioRpcError, match="give one of them another cluster_name"):
        await stream.open()


async def test_two_senders_at_once_and_a_killed_broker(tmp_path: Path) -> None:
    topic, eu = "/default/contended", Origins("eu").publish(6_000, skip=range(0, 6_000, 11))
    with Standalone(tmp_path, SAVA__CLUSTER_NAME="us") as broker:
        address = f"127.0.0.1:{broker.port}"
        async with replica(address) as stub:
            await stub.Hello(pb.HelloRequest(), timeout=PATIENCE_S, wait_for_ready=True)
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        await ensure(stub, topic)
                        break
                    except aio.AioRpcError:
                        await asyncio.sleep(0.05)
        senders = [Sender(lambda: [address], topic, eu, Random(seed)) for seed in (1, 2)]
        async with asyncio.timeout(60):
            running = asyncio.gather(*(sender.run() for sender in senders))
            for share in (0.3, 0.6):
                await senders[0].beyond(int(share * len(eu.held)))
                await asyncio.to_thread(broker.kill)
                broker.start()
            await running
        assert sum(sender.refused for sender in senders), "they were in each other's way"
        assert await payloads(broker, topic, len(eu.payloads)) == eu.payloads


# -- several at once -------------------------------------------------------------------------------


def one_of_several(topic: str, topic_id: int, eu: Origins, start: int, end: int) -> pb.EachAppend:
    source_range = request_of(eu.source_range(start, end, begin=not start)).range
    stream = pb.OpenSource(topic=topic, source=source_of(eu.source))
    return pb.EachAppend(open=stream, topic_id=topic_id, range=source_range)


async def append_each(stub: Any, ranges: list[pb.EachAppend]) -> list[tuple[str, int]]:
    """Of each the code, and the position of its receipt."""
    answers: dict[int, tuple[str, int]] = {}
    async for response in stub.AppendEach(pb.AppendEachRequest(appends=ranges), timeout=PATIENCE_S):
        answers |= {each.number: (each.code, each.receipt.position) for each in response.answers}
    return [answers[number] for number in range(len(ranges))]


async def test_a_range_each_into_several_topics(stub: Any, broker: Standalone) -> None:
    """Each is taken or refused as if it had come alone, and by itself."""
    topics = [f"/default/several-{number}" for number in range(6)]
    sources = [Origins("eu", 20 + number).publish(30) for number in range(6)]
    ids = [(await ensure(stub, topic)).topic_ids[0] for topic in topics]
    for topic, eu in zip(topics, sources, strict=True):
        stream = ReplicaStream(stub, topic, eu.source)
        await stream.open()  # waits until somebody has the topic, which such a call does not
        stream.cancel()

    def ranges(start: int, end: int) -> list[pb.EachAppend]:
        return [
            one_of_several(topic, topic_id, eu, start, end)
            for topic, topic_id, eu in zip(topics, ids, sources, strict=True)
        ]

    assert await append_each(stub, ranges(0, 10)) == [("", 10)] * 6
    assert await append_each(stub, ranges(0, 10)) == [("source_position_mismatch", 0)] * 6, "repeated"
    bad = ranges(10, 20)
    bad[1].topic_id += 1000
    bad[2].open.topic = "/default/several-none"
    bad[3].range.batches = b"x" * 200
    bad[4].open.source.cluster_name = "us"
    told = await append_each(stub, bad)
    wrong = [(code, 0) for code in ("topic_mismatch", "topic_unknown", "batch_corrupt", "message_invalid")]
    assert told == [("", 20), *wrong, ("", 20)]
    again = ranges(10, 20)[1:5]
    assert await append_each(stub, again) == [("", 20)] * 4
    for topic, eu in zip(topics, sources, strict=True):
        assert await payloads(broker, topic, 20) == eu.payloads[:20]
    with pytest.raises(aio.AioRpcError, match="257 topics; one call takes 256"):
        await append_each(stub, ranges(20, 30)[:1] * 257)


async def read_each(stub: Any, tails: list[pb.Tail], max_bytes: int = 1 << 20) -> dict[int, list[int]]:
    """The offsets that came, of those that the broker has."""
    found: dict[int, list[int]] = {}
    request = pb.ReadEachRequest(tails=tails, max_bytes=max_bytes)
    async for response in stub.ReadEach(request, timeout=PATIENCE_S):
        for tail in response.tails:
            batches = [RecordBatch.parse(data) for data in tail.batches]
            found[tail.number] = [n for each in batches for n in range(each.base_offset, each.next_offset)]
    return found


async def test_the_newest_of_several_topics(stub: Any, broker: Standalone) -> None:
    """What is in memory, from the start on and no further than there is; nobody waits for more."""
    topics = [f"/default/newest-{number}" for number in range(3)]
    async with Client([broker.url], timeout=PATIENCE_S) as client:
        for topic in topics:
            await ensure(stub, topic)
            async with client.producer(topic) as producer:
                for _ in range(5):
                    await producer.send_many([b"x" * 100] * 10)
    tails = [
        pb.Tail(topic=topics[0], start=15, end=30),
        pb.Tail(topic=topics[1], start=40, end=1000),
        pb.Tail(topic="/default/none", start=0, end=10),
        pb.Tail(topic=topics[2], start=50, end=60),
        pb.Tail(topic=topics[2], start=70, end=60),
    ]
    found = await read_each(stub, tails)
    assert found == {0: list(range(15, 30)), 1: list(range(40, 50)), 3: [], 4: []}
    few = await read_each(stub, [pb.Tail(topic=topic, start=0, end=50) for topic in topics], max_bytes=2000)
    assert few == {0: list(range(10)), 1: [], 2: []}, "until it is enough"
    with pytest.raises(aio.AioRpcError, match="257 topics; one call takes 256"):
        await read_each(stub, tails[:1] * 257)


# -- acks ------------------------------------------------------------------------------------------


async def test_acks_of_the_source_are_acks_here(stub: Any, broker: Standalone) -> None:
    """Messages of this cluster lie between the copies: what was acked at the source is not delivered here,
    and nothing else is left out."""
    topic, eu = "/default/acked", Origins("eu").publish(40)
    shape = await ensure(stub, topic)
    async with Client([broker.url], timeout=PATIENCE_S) as client:
        sender = Sender(lambda: [f"127.0.0.1:{broker.port}"], topic, eu, Random(3), longest=8)
        async with client.producer(topic) as producer:
            await producer.send(b"us/1/0")
            await sender.run()
            await producer.send(b"us/1/1")
        hello = await stub.Hello(pb.HelloRequest(), timeout=PATIENCE_S)
        here = origin_topic(hello.cluster_id, shape.topic_ids[0])
        own = pb.OriginAcks(cluster_name="us", topic=here, cursor=0, ranges=[41, 42])
        cluster, there = eu.source.origin
        ranges = [12, 15, 30, 38, 50, 60]
        theirs = pb.OriginAcks(cluster_name=cluster, topic=there, cursor=10, ranges=ranges)
        request = pb.ApplyAcksRequest(
            topic=topic, subscription="s", source=source_of(eu.source), acks=[own, theirs], type=1
        )
        for _ in range(2):  # repeated: nothing changes
            assert (await stub.ApplyAcks(request, timeout=PATIENCE_S)).position == 40
        acked = {*range(10), *range(12, 15), *range(30, 38)}
        left = ["us/1/0", *(f"eu/7/{offset}" for offset in range(40) if offset not in acked)]
        found: list[str] = []
        async with client.consumer(topic, subscription="s", type="shared", name="c") as consumer:
            async with asyncio.timeout(PATIENCE_S):
                async for message in consumer:
                    found.append(message.payload.decode())
                    if len(found) == len(left):
                        break
        assert found == left
