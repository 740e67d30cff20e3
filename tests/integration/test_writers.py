"""Exactly-once batches against one real broker, over gRPC, with the command line that shows them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode, aio

from sava.api.admin_client import AdminClient
from sava.client import Client
from sava.proto import topics_admin_pb2 as topics_pb
from sava.proto import writers_pb2 as pb
from tests.support.brokers import Standalone, sava
from tests.support.clients import Writing
from tests.support.objects import batch
from tests.support.waiting import PATIENCE_S, until

EXPIRY_S = 4


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("writers")
    with Standalone(directory, SAVA__STORAGE__STAGING_EXPIRY_SECONDS=str(EXPIRY_S)) as started:
        yield started


@pytest.fixture
async def client(broker: Standalone) -> AsyncIterator[Client]:
    async with Client(broker.url) as connected:
        yield connected


@pytest.fixture
async def writing(broker: Standalone, client: Client) -> AsyncIterator[Writing]:
    async with client.producer("/default/ready"):
        pass  # the broker serves
    async with Writing(broker.url) as made:
        assert made.expires_s == EXPIRY_S / 2
        yield made


async def create(broker: Standalone, name: str, **options: Any) -> None:
    async with AdminClient(broker.admin) as admin:
        request = topics_pb.CreateTopicRequest(name=f"/default/{name}", reliable=True, **options)
        await admin.call(admin.topics.CreateTopic, request, timeout=PATIENCE_S)


def code_of(error: aio.AioRpcError) -> Any:
    trailing: Any = error.trailing_metadata() or ()
    return dict(tuple(trailing)).get("sava-code")


async def read(client: Client, topic: str) -> list[bytes]:
    async with client.reader(f"/default/{topic}", end="latest") as reader:
        return [each.payload async for each in reader]


def numbered(start: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(start, end)]


async def test_a_batch_over_topics_and_tasks_is_published_once(
    broker: Standalone, client: Client, writing: Writing
) -> None:
    await create(broker, "a")
    await create(broker, "b", partitions=2)
    sections = [
        *await writing.stage(a=[batch(numbered(0, 10)), batch(numbered(10, 15))]),
        *await writing.stage(a=[batch(numbered(15, 20))], **{"b-part-0": [batch([b"x"])]}),
        *await writing.stage(**{"b-part-1": [batch([b"y", b"z"])]}),
    ]
    done = await writing.commit(0, sections)
    assert done.decided_now
    assert {each.topic: each.messages for each in done.published} == {
        "/default/a": 20,
        "/default/b-part-0": 1,
        "/default/b-part-1": 2,
    }
    assert await read(client, "a") == numbered(0, 20)
    assert await read(client, "b-part-1") == [b"y", b"z"]
    again = await writing.commit(0, sections)
    assert not again.decided_now
    other = await writing.stage(a=[batch([b"other"])])
    assert not (await writing.commit(0, other, run="run-2")).decided_now
    assert await read(client, "a") == numbered(0, 20)
    await writing.commit(1, await writing.stage(a=[batch(numbered(20, 30))]), run="run-2")
    assert await read(client, "a") == numbered(0, 30)
    with pytest.raises(aio.AioRpcError) as refused:
        await writing.commit(2, await writing.stage(a=[batch([b"zombie"])]), run="run-1")
    assert refused.value.code() is StatusCode.FAILED_PRECONDITION
    assert code_of(refused.value) == "writer_fenced"
    assert await read(client, "a") == numbered(0, 30)


async def test_what_is_refused_by_one_topic_is_published_to_none(
    broker: Standalone, client: Client, writing: Writing
) -> None:
    await create(broker, "c")
    await create(broker, "strict")
    async with AdminClient(broker.admin) as admin:
        policy = topics_pb.Policy(max_message_size=100)
        request = topics_pb.SetTopicPolicyRequest(name="/default/strict", policy=policy)
        await admin.call(admin.topics.SetTopicPolicy, request, timeout=PATIENCE_S)
    sections = await writing.stage(c=[batch([b"c"])], strict=[batch([bytes(200)])])
    unknown = pb.Section()
    unknown.CopyFrom(sections[1])
    unknown.topic = "/default/does-not-exist"
    for second, code in ((sections[1], "message_too_large"), (unknown, "topic_unknown")):
        with pytest.raises(aio.AioRpcError) as refused:
            await writing.commit(0, [sections[0], second])
        assert refused.value.code() is StatusCode.FAILED_PRECONDITION
        assert code_of(refused.value) == code
    assert await read(client, "c") == []
    assert (await writing.commit(0, sections[:1])).decided_now
    assert await read(client, "c") == [b"c"]


async def test_a_batch_larger_than_a_frame_is_published_in_order(
    broker: Standalone, client: Client, writing: Writing
) -> None:
    await create(broker, "large")
    payloads = [b"%07d" % number + bytes(100_000) for number in range(250)]
    sections = []
    for start in range(0, 250, 50):
        batches = [batch(payloads[first : first + 10]) for first in range(start, start + 50, 10)]
        sections += await writing.stage(large=batches)
    await writing.commit(0, sections)
    await writing.commit(0, sections)
    found = await read(client, "large")
    assert [each[:7] for each in found] == [each[:7] for each in payloads]


async def test_what_was_staged_too_long_ago_is_refused_and_soon_removed(
    broker: Standalone, client: Client, writing: Writing
) -> None:
    await create(broker, "d")
    sections = await writing.stage(d=[batch([b"late"])])

    async def is_gone() -> bool:
        return sections[0].key not in await writing.staged()

    await until(is_gone, "what was staged is removed", timeout=4 * EXPIRY_S)
    with pytest.raises(aio.AioRpcError) as refused:
        await writing.commit(0, sections)
    assert code_of(refused.value) == "staged_expired"
    assert await read(client, "d") == []


async def test_writers_are_listed_and_forgotten_by_commands(
    broker: Standalone, client: Client, writing: Writing
) -> None:
    await create(broker, "e")
    await writing.commit(7, await writing.stage(e=[batch([b"1", b"2"])]))
    _, out, _ = await sava("writers", "list", "-o", "json", admin=broker.admin)
    (listed,) = [each for each in json.loads(out) if each["writer"] == writing.writer]
    assert (listed["batch"], listed["messages"], listed["is_published"], listed["query"]) == (7, 2, True, "q")
    _, table, _ = await sava("writers", "list", admin=broker.admin)
    assert writing.writer in table
    with pytest.raises(aio.AioRpcError, match="sava writers forget"):
        await writing.commit(0, await writing.stage(e=[batch([b"3"])]), query="new")
    _, out, _ = await sava("writers", "forget", writing.writer, admin=broker.admin)
    assert out == f"writer {writing.writer} forgotten\n"
    code, _, err = await sava("writers", "forget", writing.writer, admin=broker.admin, check=False)
    assert (code, "there is no writer" in err) == (1, True)
    await writing.commit(0, await writing.stage(e=[batch([b"3"])]), query="new")
    assert await read(client, "e") == [b"1", b"2", b"3"]
