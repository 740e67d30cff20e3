"""Replication of a cluster of three brokers: whichever is asked, and whichever leads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sava.errors import SavaError
from sava.pipeline.cluster import ClusterAccess, ClusterClient
from sava.proto import pipelines_pb2, topics_admin_pb2
from sava.proto import replication_pb2 as pb
from sava.storage.keys import replication_slot
from tests.support.brokers import BrokerProcess, Brokers, Standalone
from tests.support.waiting import PATIENCE_S, until

CURSOR = replication_slot("west")


@pytest.fixture
def west(tmp_path: Path) -> Iterator[Standalone]:
    directory = tmp_path / "west"
    directory.mkdir()
    with Standalone(directory, SAVA__CLUSTER_NAME="west") as broker:
        yield broker


async def ask(broker: BrokerProcess, method: str, request: Any) -> Any:
    return await broker.client.call(getattr(broker.client.replication, method), request, timeout=PATIENCE_S)


async def status(broker: BrokerProcess) -> pb.LinkTopic:
    (found,) = (await ask(broker, "GetReplicationStatus", pb.GetReplicationStatusRequest())).topics
    assert isinstance(found, pb.LinkTopic)
    return found


async def replicate(first: BrokerProcess, second: BrokerProcess, west: Standalone) -> None:
    async def is_added() -> bool:
        await ask(first, "AddRemote", pb.Remote(name="west", service=f"127.0.0.1:{west.port}"))
        return True

    await until(is_added, "west is a remote")
    policy = pb.ReplicationPolicy(remotes=["west"])
    set_ = await ask(second, "SetReplication", pb.SetReplicationRequest(scope="default", policy=policy))
    assert set_.is_set


async def test_any_broker_and_the_next_leader_know_what_runners_reported(
    trio: Brokers, west: Standalone
) -> None:
    """A runner has reported once; the leader is killed. Its successor must neither forget the policy nor take
    the partition for lost before the runner could be heard of again."""
    await trio.create("/default/orders")
    leader = await trio.leader()
    first, second = (broker for broker in trio.running if broker is not leader)

    await replicate(first, second, west)
    pipelines = first.client.pipelines
    join = pipelines_pb2.JoinRunnerRequest(runner="test", ttl_ms=60_000, kinds=["replicate"])
    await first.client.call(pipelines.JoinRunner, join, timeout=PATIENCE_S)
    claim = pipelines_pb2.ClaimPipelineRequest(name="replicate-west", runner="test")
    assert (await first.client.call(pipelines.ClaimPipeline, claim, timeout=PATIENCE_S)).is_granted
    link: pb.Link = await ask(first, "GetLink", pb.GetLinkRequest(remote="west"))
    (topic,) = link.topics
    topic.partitions.add(state="active", position=7, end=7)
    report = pb.ReportLinkRequest(remote="west", runner="test", topics=[topic])
    await ask(second, "ReportLink", report)
    assert (await status(first)).connected_count == 1

    leader.kill()

    async def is_known() -> bool:
        found = await status(first)
        assert (found.connected_count, found.partitions[0].position) == (1, 7)
        return True

    await until(is_known, "the next leader knows it")


async def test_what_is_to_be_copied_again_is_kept_again_wherever_it_is_served(
    trio: Brokers, west: Standalone
) -> None:
    """All was copied, and the copy deleted. Its cursors are at the end, and nobody is there to copy:
    retention would remove what somebody has asked to be copied again."""
    await trio.create("/default/orders", partitions=3)
    parts = [f"/default/orders-part-{number}" for number in range(3)]
    first, second, third = trio.running
    async with trio.sava_client() as client:
        for part in parts:
            async with client.producer(part) as producer:
                await producer.send_many([b"a", b"b"])
    await replicate(first, second, west)

    async def cursors() -> list[int]:
        found = [await trio.describe(part) for part in parts]
        return [each.cursor for described in found for each in described.subscriptions]

    assert await cursors() == [0] * 3, "before anything is copied, all is kept"
    link = ClusterClient.of(ClusterAccess(",".join(broker.client_url for broker in trio.running)))
    try:
        ends = dict.fromkeys(parts, 2)
        assert not await asyncio.to_thread(link.advance_all, CURSOR, ends, timeout_s=10.0)
        assert await cursors() == [2] * 3
        for broker in (first, second, third):  # also those that would pass it on
            with pytest.raises(SavaError, match="are for the links of replication"):
                await seek(broker, parts[0])
        again = pb.RecreateRemoteTopicRequest(topic="/default/orders", remote="west")
        await ask(third, "RecreateRemoteTopic", again)
        assert await cursors() == [0] * 3
    finally:
        await asyncio.to_thread(link.close)


async def seek(broker: BrokerProcess, topic: str) -> None:
    earliest = topics_admin_pb2.StartPosition(earliest=True)
    request = topics_admin_pb2.SeekSubscriptionRequest(topic=topic, subscription=CURSOR, position=earliest)
    await broker.client.call(broker.client.subscriptions.SeekSubscription, request, timeout=PATIENCE_S)
