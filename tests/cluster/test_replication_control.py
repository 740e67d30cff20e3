"""Replication of a cluster of three brokers: whichever is asked, and whichever leads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sava.proto import pipelines_pb2
from sava.proto import replication_pb2 as pb
from tests.cluster.harness import Brokers, until
from tests.integration.harness import BrokerProcess
from tests.standalone import Standalone


@pytest.fixture
def west(tmp_path: Path) -> Iterator[Standalone]:
    directory = tmp_path / "west"
    directory.mkdir()
    with Standalone(directory, SAVA__CLUSTER_NAME="west") as broker:
        yield broker


async def ask(broker: BrokerProcess, method: str, request: Any) -> Any:
    return await broker.client.call(getattr(broker.client.replication, method), request, timeout=30)


async def status(broker: BrokerProcess) -> pb.LinkTopic:
    (found,) = (await ask(broker, "GetReplicationStatus", pb.GetReplicationStatusRequest())).topics
    assert isinstance(found, pb.LinkTopic)
    return found


async def test_any_broker_answers_and_the_next_leader_knows_what_runners_have_reported(
    trio: Brokers, west: Standalone
) -> None:
    """A runner has reported once; the leader is killed. Its successor must neither forget the policy nor take
    the partition for lost before the runner could be heard of again."""
    await trio.create("/default/orders")
    leader = await trio.leader()
    first, second = (broker for broker in trio.running if broker is not leader)

    async def is_added() -> bool:
        await ask(first, "AddRemote", pb.Remote(name="west", service=f"127.0.0.1:{west.port}"))
        return True

    await until(is_added, "west is a remote")
    policy = pb.ReplicationPolicy(remotes=["west"])
    set_ = await ask(second, "SetReplication", pb.SetReplicationRequest(scope="default", policy=policy))
    assert set_.is_set
    pipelines = first.client.pipelines
    join = pipelines_pb2.JoinRunnerRequest(runner="test", ttl_ms=60_000, kinds=["replicate"])
    await first.client.call(pipelines.JoinRunner, join, timeout=30)
    claim = pipelines_pb2.ClaimPipelineRequest(name="replicate-west", runner="test")
    assert (await first.client.call(pipelines.ClaimPipeline, claim, timeout=30)).is_granted
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
