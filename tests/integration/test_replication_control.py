"""Replication as operators see it, with two clusters of one broker each: east sends, west receives.

Each test has a namespace of its own, in both clusters, and a policy only there.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from sava.errors import SavaError
from sava.proto import replication_pb2 as pb
from sava.proto import topics_admin_pb2
from tests.support.brokers import Standalone, sava
from tests.support.network import free_ports
from tests.support.replication import Side
from tests.support.waiting import until

STRICT = {"SAVA__REPLICATION__PARTITION_MISMATCH_POLICY": "strict"}


async def set_policy(side: Side, scope: str) -> pb.SetReplicationResponse:
    request = pb.SetReplicationRequest(scope=scope, policy=pb.ReplicationPolicy(remotes=["west"]))
    response: pb.SetReplicationResponse = await side.replication("SetReplication", request)
    return response


class Pair:
    def __init__(self, east: Standalone, west: Standalone) -> None:
        self.east, self.west = Side(east), Side(west)

    @property
    def service(self) -> str:
        return f"127.0.0.1:{self.west.broker.port}"

    async def ready(self) -> None:
        await asyncio.gather(self.east.ready(), self.west.ready())

    async def begin(self, namespace: str) -> None:
        """Both have the namespace, and east knows west."""
        await self.ready()
        await asyncio.gather(self.east.namespace(namespace), self.west.namespace(namespace))
        await self.east.add("west", self.service)

    async def replicate(self, scope: str) -> pb.SetReplicationResponse:
        return await set_policy(self.east, scope)

    async def clear(self, scope: str) -> None:
        await self.east.replication("ClearReplication", pb.ClearReplicationRequest(scope=scope))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    def side(name: str) -> Standalone:
        return Standalone(tmp_path_factory.mktemp(name), SAVA__CLUSTER_NAME=name)

    with side("east") as east, side("west") as west:
        yield Pair(east, west)


async def test_remotes_are_added_listed_tested_and_removed(pair: Pair) -> None:
    await pair.ready()
    east = pair.east
    out, _ = await east.command("remotes", "add", "west", "--service", pair.service)
    assert out.startswith("remote west is cluster west (id ")
    out, _ = await east.command("remotes", "list", "-o", "json")
    (listed,) = json.loads(out)
    assert (listed["name"], listed["cluster_name"], "token" in listed) == ("west", "west", False)
    tested = await east.replication("TestRemote", pb.TestRemoteRequest(name="west"))
    assert (tested.is_reachable, tested.cluster_name, list(tested.differences)) == (True, "west", [])
    await east.command("remotes", "remove", "west")
    assert not (await east.replication("ListRemotes", pb.ListRemotesRequest())).remotes
    with pytest.raises(SavaError, match="there is no remote west"):
        await east.replication("TestRemote", pb.TestRemoteRequest(name="west"))


async def test_this_cluster_and_those_of_its_name_cannot_be_remotes(pair: Pair, tmp_path: Path) -> None:
    await pair.ready()
    with pytest.raises(SavaError, match="this cluster itself"):
        await pair.east.add("me", f"127.0.0.1:{pair.east.broker.port}")
    with Standalone(tmp_path, SAVA__CLUSTER_NAME="east") as twin:
        await Side(twin).ready()
        with pytest.raises(SavaError, match=r"both clusters are called east.* set another cluster_name"):
            await pair.east.add("twin", twin.url)


async def test_a_remote_that_cannot_be_reached_is_not_added(pair: Pair) -> None:
    await pair.ready()
    (dead,) = free_ports(1)
    _, err = await pair.east.command("remotes", "add", "gone", "--service", f"127.0.0.1:{dead}", code=1)
    assert err.startswith(f"sava: remote gone was not added: could not connect to 127.0.0.1:{dead} (")


async def test_differences_are_shown_and_keep_a_policy_from_being_set(
    pair: Pair,
) -> None:
    """Unless the operator says otherwise."""
    await pair.begin("checks")
    east, west = pair.east, pair.west
    await asyncio.gather(east.create("/checks/orders", 2), west.create("/checks/orders", 1))
    await east.create("/checks/new", 3)
    dry = ("replication", "set", "checks", "--remote", "west", "--dry-run")
    out, _ = await east.command(*dry)
    assert "2 partitions" in out
    assert "partition 1 is not copied" in out
    assert "it will be created at west with 3 partitions" in out
    out, err = await east.command("replication", "set", "checks", "--remote", "west", code=1)
    assert "partition 1 is not copied" in out
    assert "--skip-checks" in err
    scope = pb.GetReplicationRequest(scope="/checks/orders")
    assert not (await east.replication("GetReplication", scope)).from_scope
    await east.command("replication", "set", "checks", "--remote", "west", "--skip-checks")
    held = await east.replication("GetReplication", scope)
    assert (held.from_scope, list(held.policy.remotes)) == ("checks", ["west"])
    assert await west.topics("checks") == ["/checks/orders", "/checks/orders-part-0"]  # nothing was created
    tested = await east.replication("TestRemote", pb.TestRemoteRequest(name="west"))
    assert {each.topic for each in tested.differences} == {"/checks/orders", "/checks/new"}
    with pytest.raises(SavaError, match="used by the policy of checks"):
        await east.replication("RemoveRemote", pb.RemoveRemoteRequest(name="west"))
    await east.command("replication", "clear", "checks")


async def test_a_namespace_that_is_missing_there_is_told(pair: Pair) -> None:
    await pair.begin("shared")
    await pair.east.namespace("alone")
    response = await pair.replicate("alone")
    assert not response.is_set
    (found,) = response.remotes[0].differences
    assert (found.topic, found.what, found.blocks) == ("alone", "namespace", True)


async def test_a_pipeline_comes_and_goes_with_the_policy(pair: Pair) -> None:
    await pair.begin("comes")
    east = pair.east
    assert await east.pipelines() == []
    assert (await pair.replicate("comes")).is_set
    assert await east.pipelines() == []  # there is nothing to copy yet
    await east.create("/comes/orders", 2)

    async def is_noticed() -> bool:
        return await east.pipelines() == ["replicate-west"]

    await until(is_noticed, "a topic that was created under a policy is replicated")
    await pair.clear("comes")
    assert await east.pipelines() == []


async def test_without_a_runner_everything_is_disconnected_and_the_backlog_grows(pair: Pair) -> None:
    await pair.begin("down")
    east = pair.east
    await east.create("/down/orders", 2)
    assert (await pair.replicate("/down/orders")).is_set
    (found,) = await east.status("/down/orders")
    assert (found.connected_count, found.disconnected_count) == (0, 2)
    assert {each.state for each in found.partitions} == {"waiting_runner"}

    await sava_produce(east, "/down/orders", 10)

    async def is_noticed() -> bool:
        (now,) = await east.status("/down/orders")
        return sum(each.backlog for each in now.partitions) == 10

    await until(is_noticed, "the backlog is that of the source")
    labels = '{cluster="east",namespace="down",remote_cluster="west",topic="/down/orders"}'
    metrics = await east.metrics()
    for name in ("sava_replication_disconnected_count", "pulsar_replication_disconnected_count"):
        assert metrics[f"{name}{labels}"] == 2
    assert metrics[f"sava_replication_backlog{labels}"] == 10
    assert metrics[f"sava_replication_delay_seconds{labels}"] > 0
    await pair.clear("/down/orders")
    assert await east.status("/down/orders") == []
    assert f"sava_replication_backlog{labels}" not in await east.metrics()


async def sava_produce(side: Side, topic: str, count: int) -> None:
    await sava("produce", topic, "--service", side.broker.url, *map(str, range(count)))


async def test_a_runner_is_told_what_to_copy_and_is_believed(pair: Pair) -> None:
    await pair.begin("runs")
    east = pair.east
    await east.create("/runs/orders", 2)
    await pair.replicate("/runs/orders")
    await east.claim("replicate-west", "test")
    link: pb.Link = await east.replication("GetLink", pb.GetLinkRequest(remote="west"))
    assert (link.cluster_name, link.remote.cluster_name, link.may_create) == ("east", "west", True)
    assert link.mismatch_policy == "pip370"
    (topic,) = link.topics
    assert (topic.topic, topic.partition_count, len(topic.topic_ids)) == ("/runs/orders", 2, 2)

    topic.remote_topic_ids.extend((71, 72))
    topic.partitions.add(partition=0, state="active", position=5, end=7, oldest_us=1)
    topic.partitions.add(partition=1, state="denied", reason="no permission")
    report = pb.ReportLinkRequest(remote="west", runner="test", topics=[topic])
    await east.replication("ReportLink", report)
    (found,) = await east.status("/runs/orders")
    assert (found.connected_count, found.disconnected_count) == (1, 1)
    assert list(found.remote_topic_ids) == [71, 72]
    assert (found.partitions[0].backlog, found.partitions[1].reason) == (2, "no permission")

    topic.is_tombstone = True
    await east.replication("ReportLink", report_of(topic))
    (found,) = await east.status("/runs/orders")
    assert found.is_tombstone
    again = pb.RecreateRemoteTopicRequest(topic="/runs/orders", remote="west")
    await east.replication("RecreateRemoteTopic", again)
    await east.replication("ReportLink", report_of(topic))  # it has not heard of that yet
    (found,) = await east.status("/runs/orders")
    assert (found.is_tombstone, list(found.remote_topic_ids), found.generation) == (False, [], 1)
    await east.leave("test")
    await pair.clear("/runs/orders")


def report_of(topic: pb.LinkTopic) -> pb.ReportLinkRequest:
    return pb.ReportLinkRequest(remote="west", runner="test", topics=[topic])


async def test_partitions_added_here_are_asked_for_there(pair: Pair) -> None:
    await pair.begin("grows")
    east, west = pair.east, pair.west
    await asyncio.gather(east.create("/grows/orders", 2), west.create("/grows/orders", 2))
    await pair.replicate("/grows/orders")
    grow = topics_admin_pb2.GrowTopicRequest(name="/grows/orders", partitions=4)
    await east.call("topics", "GrowTopic", grow)
    link: pb.Link = await east.replication("GetLink", pb.GetLinkRequest(remote="west"))
    (topic,) = (each for each in link.topics if each.topic == "/grows/orders")
    assert (topic.partition_count, topic.grow_to) == (4, 4)
    assert len(await west.topics("grows")) == 3  # it is for whoever copies to add them
    await pair.clear("/grows/orders")


async def test_what_was_set_is_there_after_a_restart(pair: Pair) -> None:
    await pair.begin("stays")
    east = pair.east
    await east.create("/stays/orders")
    await pair.replicate("stays")
    (before,) = await east.status("/stays/orders")
    await asyncio.to_thread(east.broker.stop)
    east.broker.start()
    await east.ready()

    async def is_known() -> bool:
        found = await east.status("/stays/orders")
        return [list(each.topic_ids) for each in found] == [list(before.topic_ids)]

    await until(is_known, "the policy is still there")
    assert await east.pipelines() == ["replicate-west"]
    await pair.clear("stays")


async def test_strictly_other_partitions_keep_a_policy_from_being_set(pair: Pair, tmp_path: Path) -> None:
    await pair.begin("strictly")
    await pair.west.create("/strictly/orders", 4)
    with Standalone(tmp_path, SAVA__CLUSTER_NAME="strict", **STRICT) as broker:
        strict = Side(broker)
        await strict.ready()
        await strict.namespace("strictly")
        await strict.create("/strictly/orders", 2)
        await strict.add("west", pair.service)
        response = await set_policy(strict, "strictly")
        assert not response.is_set
        assert "partition_mismatch_policy is strict" in response.remotes[0].differences[0].consequence
    await pair.east.create("/strictly/orders", 2)
    response = await pair.replicate("strictly")
    assert response.is_set  # by the proposal, all of it is copied
    assert [each.what for each in response.remotes[0].differences] == ["partitions"]
    await pair.clear("strictly")


async def test_pulsar_s_name_for_the_setting_is_taken(pair: Pair, tmp_path: Path) -> None:
    await pair.begin("pulsar")
    environment = {"SAVA__CREATETOPICTOREMOTECLUSTERFORREPLICATION": "false"}
    with Standalone(tmp_path, SAVA__CLUSTER_NAME="manual", **environment) as broker:
        manual = Side(broker)
        await manual.ready()
        await manual.namespace("pulsar")
        await manual.create("/pulsar/orders", 2)
        await manual.add("west", pair.service)
        response = await set_policy(manual, "pulsar")
        assert response.is_set
        assert "replication may not create it" in response.remotes[0].differences[0].consequence
        link: pb.Link = await manual.replication("GetLink", pb.GetLinkRequest(remote="west"))
        assert not link.may_create
