"""The audit of a real cluster: what callers did and were refused is in the log and in the topic, and they can
neither write nor read it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from sava.client import Client, ClientError
from sava.errors import SavaError
from sava.proto import security_pb2 as pb
from sava.proto import topics_admin_pb2 as topics_pb
from sava.security import audit
from tests.security.secured_cluster import SecuredCluster
from tests.support.waiting import PATIENCE_S, until

TOPIC = "/default/orders"
DELETE = "/sava.admin.Topics/DeleteTopic"
REFUSED = r"has no permission|may not write"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecuredCluster]:
    async with SecuredCluster(2, tmp_path_factory.mktemp("audit"), logging={"format": "json"}) as running:
        await running.create(TOPIC)
        await running.bind("alice", "producer", topic=TOPIC)
        yield running


async def events_of(cluster: SecuredCluster, **wanted: str) -> list[dict[str, Any]]:
    """What the topic has by now with these fields."""
    found = []
    async with cluster.client_of("root") as client, client.reader(audit.TOPIC) as reader:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    message = await asyncio.wait_for(anext(reader), 0.5)
                    event = json.loads(bytes(message.payload))
                    assert message.attributes["decision"] == event["decision"]
                    assert message.attributes["principal"] == event["principal"]
                    if wanted.items() <= event.items():
                        found.append(event)
        except TimeoutError:
            return found


async def test_a_refused_call_is_in_the_log_and_in_the_topic(cluster: SecuredCluster) -> None:
    async with cluster.admin_of("eve", broker=1) as eve:
        with pytest.raises(SavaError, match=REFUSED):
            await eve.ask(topics_pb.DeleteTopicRequest(name=TOPIC))
    line = json.loads(await cluster.brokers[1].logged(f'"principal": "user:eve", "method": "{DELETE}"'))
    assert line["logger"] == "sava.audit"
    assert line["decision"] == "denied"
    assert line["peer"].startswith("ipv4:127.0.0.1:")

    async def is_there() -> bool:
        return bool(await events_of(cluster, principal="user:eve", method=DELETE))

    await until(is_there, "the event is in the topic")
    (event,) = await events_of(cluster, principal="user:eve", method=DELETE)
    assert event["resource"] == f"topic {TOPIC}"
    assert event["permission"] == "manage-topic"
    assert event["credential"] == "token"
    assert len(event["token_id"]) == 32
    assert event["broker"] == str(await cluster.id_of(cluster.brokers[1]))
    assert "manage-topic" in event["reason"]


async def test_changes_are_recorded_with_who_made_them_and_reads_are_not(cluster: SecuredCluster) -> None:
    async with cluster.admin_of("root") as root:
        await root.ask(topics_pb.CreateTopicRequest(name="/default/made", reliable=True))
        await root.ask(topics_pb.DescribeTopicRequest(name="/default/made"))

    async def is_there() -> bool:
        return bool(await events_of(cluster, resource="topic /default/made"))

    await until(is_there, "the event is in the topic")
    (event,) = await events_of(cluster, resource="topic /default/made")
    assert (event["principal"], event["decision"]) == ("user:root", "allowed")
    assert event["method"] == "/sava.admin.Topics/CreateTopic"


async def test_a_call_without_a_token_is_recorded_with_its_address(cluster: SecuredCluster) -> None:
    urls = [cluster.brokers[0].client_url]
    stranger = Client(urls, tls=cluster.tls, timeout=2)
    async with stranger:
        with pytest.raises(ClientError):
            async with stranger.producer(TOPIC):
                pass

    async def is_there() -> bool:
        return bool(await events_of(cluster, principal="anonymous:anonymous", decision="denied"))

    await until(is_there, "the event is in the topic")


@pytest.mark.parametrize("name", ["alice", "root"])
async def test_no_client_writes_to_the_topic_or_makes_one_beside_it(
    name: str, cluster: SecuredCluster
) -> None:
    async with cluster.client_of(name, timeout=2) as client:
        with pytest.raises(ClientError):
            async with client.producer(audit.TOPIC) as producer:
                await producer.send(b"forged")
    async with cluster.admin_of(name) as admin:
        with pytest.raises(SavaError, match=REFUSED):
            await admin.ask(topics_pb.CreateTopicRequest(name="/system/other", reliable=True))
    assert not [event for event in await events_of(cluster) if event.get("forged")]


async def test_only_administrators_read_the_topic(cluster: SecuredCluster) -> None:
    await cluster.bind("nosy", "reader")
    await cluster.bind("admin", "admin")
    async with cluster.client_of("nosy", timeout=2) as client:
        with pytest.raises(ClientError):
            async with client.reader(audit.TOPIC) as reader:
                await asyncio.wait_for(anext(reader), 5)
    async with cluster.client_of("admin") as client, client.reader(audit.TOPIC) as reader:
        assert await asyncio.wait_for(anext(reader), PATIENCE_S)


async def test_a_flood_of_denials_is_a_few_events_with_their_count(cluster: SecuredCluster) -> None:
    async with cluster.admin_of("mallory") as mallory:

        async def attempt() -> None:
            with pytest.raises(SavaError, match=REFUSED):
                await mallory.ask(topics_pb.DeleteTopicRequest(name=TOPIC))

        await asyncio.gather(*(attempt() for _ in range(200)))

    async def all_are_there() -> bool:
        return (
            sum(event["count"] for event in await events_of(cluster, principal="user:mallory", method=DELETE))
            == 200
        )

    await until(all_are_there, "all denials are counted")
    assert len(await events_of(cluster, principal="user:mallory", method=DELETE)) < 100


async def test_a_quota_in_the_metadata_store_holds_on_every_broker(cluster: SecuredCluster) -> None:
    await cluster.limit(pb.Quota(principal="user:alice", max_streams=1))
    async with cluster.client_of("alice", timeout=3) as client:
        async with client.producer(TOPIC, name="first") as first:
            await first.send(b"1")
            with pytest.raises(ClientError, match="max_streams"):
                async with client.producer(TOPIC, name="second"):
                    pass
            await first.send(b"2")
        async with client.producer(TOPIC, name="second") as second:
            await second.send(b"3")
    metrics = [(await broker.http("/metrics"))[1] for broker in cluster.brokers]
    assert any(
        'sava_quota_refused_total{principal="user:alice",quota="max_streams"}' in text for text in metrics
    )


async def test_what_a_handler_denies_is_recorded_too(cluster: SecuredCluster) -> None:
    """Bob may produce, and not under the name of Alice's producer."""
    await cluster.bind("bob", "producer", topic=TOPIC)
    async with cluster.client_of("alice") as client, client.producer(TOPIC, name="alices") as producer:
        await producer.send(b"1")
    async with cluster.client_of("bob", timeout=2) as client:
        with pytest.raises(ClientError, match="belongs to user:alice"):
            async with client.producer(TOPIC, name="alices"):
                pass

    async def is_there() -> bool:
        return bool(await events_of(cluster, principal="user:bob", decision="denied"))

    await until(is_there, "the event is in the topic")
    event = (await events_of(cluster, principal="user:bob", decision="denied"))[0]
    assert event["method"] == "/sava.streams.Streams/Publish"
    assert "belongs to user:alice" in event["reason"]
