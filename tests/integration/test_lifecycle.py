"""Founding a cluster, growing and shrinking it, handing over, stopping and coming back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sava.cluster import records
from sava.metadata.errors import IdentityConflict, InvalidRequest, NotInitialized, Unavailable
from sava.proto import admin_pb2 as pb
from sava.raft.types import MembershipRefused
from tests.support.brokers import BrokerProcess, Cluster, sava
from tests.support.long import only_long
from tests.support.network import free_ports
from tests.support.waiting import PATIENCE_S


async def change(broker: BrokerProcess, method: str, request: object) -> Any:
    client = broker.client
    return await client.call(getattr(client.cluster, method), request, timeout=PATIENCE_S)


async def test_init_is_idempotent_and_refuses_another_list(tmp_path: Path) -> None:
    async with Cluster(3, tmp_path) as cluster:
        first, second, third = cluster.brokers
        await first.logged("waiting for cluster initialization")
        with pytest.raises(NotInitialized):
            await first.put("/x", b"1", timeout=1.0)
        assert (await first.http("/healthz"))[0] == 200
        assert (await first.http("/readyz"))[0] == 503

        founded = await cluster.init()
        assert not founded.already_initialized
        before = await first.status()
        again = await cluster.init()
        assert again.already_initialized
        assert again.cluster_id == founded.cluster_id
        reversed_order = await cluster.init([third, second, first])
        assert reversed_order.already_initialized

        with pytest.raises(IdentityConflict, match="another list"):
            await cluster.init([first, second])
        after = await first.status()
        assert (after.voters, after.cluster_id, after.current_term) == (
            before.voters,
            before.cluster_id,
            before.current_term,
        )
        await first.logged("this broker is registered")
        assert (await first.http("/readyz"))[0] == 200


async def test_a_broker_that_was_moved_says_where_the_others_look_for_it(tmp_path: Path) -> None:
    """A broker is stopped, and started with its directory at another address: nobody talks to it any more,
    and all it said was that no leader is known."""
    async with Cluster(2, tmp_path) as cluster:
        await cluster.init()
        moved = cluster.brokers[1]
        await moved.stop()
        await moved.start()
        assert not [line for line in moved.lines if "the others send to" in line]
        await moved.stop()
        port = free_ports(1)[0]
        moved.add_arguments("--raft-port", str(port))
        await moved.start()
        line = await moved.logged("raft: the others send to the address that this node was added with")
        assert line.endswith(f"known={moved.raft_address} own=127.0.0.1:{port}")


@only_long("three brokers")
async def test_init_with_a_node_down_changes_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    async with Cluster(3, tmp_path) as cluster:
        first, _, third = cluster.brokers
        third.kill()
        await third.ended()
        with pytest.raises(Unavailable, match=third.raft_address):
            await cluster.init()
        assert (await first.status()).cluster_id == ""
        await third.start()
        assert not (await cluster.init()).already_initialized
        await cluster.put("/x", b"1")


async def test_a_partial_init_is_completed_by_running_it_again(tmp_path: Path) -> None:
    async with Cluster(3, tmp_path) as cluster:
        first, second, third = cluster.brokers
        # What an interrupted init leaves behind: one node bound, two pristine.
        from sava.metadata.identity import cluster_id_of
        from sava.metadata.peer import Bootstrap
        from sava.raft.types import Membership, NodeId
        from sava.security.cluster_secret import FILE, ClusterSecret
        from tests.support.peers import dialer

        members = tuple(sorted([(NodeId(await b.node_id()), b.raft_address) for b in cluster.brokers]))
        founders = tuple(node for node, _ in members)
        bootstrap = Bootstrap(cluster_id_of(founders), Membership(voters=founders, addresses=members))
        own = ClusterSecret(first.data_dir / FILE)
        own.create()
        asker = dialer(await first.node_id(), "", secret=own)
        await asker.bind(second.raft_address, bootstrap, timeout=PATIENCE_S)
        assert (await first.status()).cluster_id == ""
        assert not (await cluster.init()).already_initialized
        await third.put("/x", b"1")
        assert await second.get("/x") == b"1"


async def test_a_new_node_catches_up_by_snapshot_and_becomes_a_voter(tmp_path: Path) -> None:
    async with Cluster(1, tmp_path, snapshot_threshold=50) as cluster:
        await cluster.init()
        (first,) = cluster.brokers
        revision = 0
        for number in range(120):
            revision = await first.put(f"/history/{number}", b"x" * 100)
        await change(first, "Snapshot", pb.SnapshotRequest())
        newcomer = await cluster.join()
        added = await change(first, "AddNode", pb.AddNodeRequest(addr=newcomer.raft_address))
        assert not added.already_member
        await newcomer.caught_up(revision)
        assert await newcomer.get("/history/119", local=True) == b"x" * 100
        assert (await change(first, "AddNode", pb.AddNodeRequest(addr=newcomer.raft_address))).already_member
        assert list((await first.status()).learners) == [added.node_id]

        await change(first, "PromoteNode", pb.PromoteNodeRequest(addr=newcomer.raft_address))
        status = await newcomer.status()
        assert added.node_id in status.voters
        assert not status.learners
        assert (
            await change(first, "PromoteNode", pb.PromoteNodeRequest(node_id=added.node_id))
        ).already_voter
        await newcomer.put("/from-newcomer", b"1")


async def retire(cluster: Cluster, *brokers: BrokerProcess) -> None:
    """Let them have no topics any more: they have none, and these tests are about nodes."""
    for broker in brokers:
        await cluster.put(records.mode_key(await broker.node_id()), b'{"mode":"drained"}')


async def test_remove_a_follower_then_the_leader_itself(trio: Cluster) -> None:
    leader = await trio.leader()
    follower = next(broker for broker in trio.brokers if broker is not leader)
    third = next(broker for broker in trio.brokers if broker not in (leader, follower))
    await retire(trio, leader, follower)
    await change(third, "RemoveNode", pb.RemoveNodeRequest(addr=follower.raft_address))
    assert len((await leader.status()).voters) == 2
    with pytest.raises(InvalidRequest, match="not a member"):
        await change(third, "RemoveNode", pb.RemoveNodeRequest(addr=follower.raft_address))
    await follower.stop()

    await change(third, "RemoveNode", pb.RemoveNodeRequest(addr=leader.raft_address))
    assert list((await third.status()).voters) == [await third.node_id()]
    await third.put("/alone", b"1")
    with pytest.raises(MembershipRefused):
        await change(third, "RemoveNode", pb.RemoveNodeRequest(node_id=await third.node_id(), force=True))


@only_long("three brokers")
async def test_remove_is_refused_when_the_rest_would_be_no_majority(trio: Cluster) -> None:
    leader = await trio.leader()
    dead, alive = (broker for broker in trio.brokers if broker is not leader)
    await retire(trio, dead, alive)
    dead.kill()
    await dead.ended()
    # Removing a living voter would leave {leader, dead}: not even one more failure could be survived, and
    # with the dead one no majority answers.
    with pytest.raises(MembershipRefused):
        await change(leader, "RemoveNode", pb.RemoveNodeRequest(addr=alive.raft_address))
    await change(leader, "RemoveNode", pb.RemoveNodeRequest(addr=dead.raft_address))
    await alive.put("/x", b"1")


@only_long("three brokers")
async def test_leadership_can_be_handed_over(trio: Cluster) -> None:
    follower = await trio.follower()
    target = await follower.node_id()
    reply = await change(trio.brokers[0], "TransferLeader", pb.TransferLeaderRequest(node_id=target))
    assert reply.leader_id == target
    assert await trio.leader() is follower
    await trio.put("/x", b"1")


async def test_graceful_stop_hands_over_and_exits_cleanly(trio: Cluster) -> None:
    leader = await trio.leader()
    await trio.put("/x", b"1")
    assert await leader.stop() == 0
    assert any("leadership handed over" in line for line in leader.lines)
    survivor = trio.running[0]
    # No election timeout has to pass: somebody leads already.
    await survivor.put("/x", b"2", timeout=PATIENCE_S)
    await leader.start()
    assert await leader.get("/x") == b"2"


async def test_standalone_founds_itself_and_keeps_everything(tmp_path: Path) -> None:
    async with Cluster(1, tmp_path) as cluster:
        (broker,) = cluster.brokers
        await broker.stop()
        arguments = broker._arguments
        broker._arguments = ["--standalone", *arguments[2:]]
        await broker.start()
        await broker.logged("standalone cluster founded")
        await broker.put("/x", b"1")
        assert await broker.stop() == 0
        await broker.start()
        assert await broker.get("/x") == b"1"


async def test_force_new_cluster_after_a_lost_majority(trio: Cluster) -> None:
    revision = await trio.put("/kept", b"1")
    survivor, *lost = trio.brokers
    await survivor.caught_up(revision)
    for broker in trio.brokers:
        broker.kill()
        await broker.ended()
    data_dir = str(survivor.data_dir)

    await lost[0].start()
    code, _, err = await sava("cluster", "force-new-cluster", "--data-dir", data_dir, "--yes", check=False)
    assert code == 1
    assert "still answers" in err
    lost[0].kill()
    await lost[0].ended()

    code, out, err = await sava("cluster", "force-new-cluster", "--data-dir", data_dir, check=False)
    assert code == 1
    assert "are given up" in out
    assert "--yes" in err
    await sava("cluster", "force-new-cluster", "--data-dir", data_dir, "--yes")
    await survivor.start()
    assert await survivor.get("/kept") == b"1"
    assert await survivor.put("/new", b"2") > 1_000_000

    # An old member that comes back belongs to another cluster and is not heard.
    await lost[0].start()
    with pytest.raises(IdentityConflict):
        await change(survivor, "AddNode", pb.AddNodeRequest(addr=lost[0].raft_address))
    assert list((await survivor.status()).voters) == [await survivor.node_id()]


async def test_the_command_line_tells_the_same_story(tmp_path: Path) -> None:
    async with Cluster(3, tmp_path) as cluster:
        admin = cluster.brokers[0].admin
        nodes = ",".join(cluster.addresses)
        code, _, err = await sava("meta", "get", "/a", admin="127.0.0.1:1", check=False)
        assert code == 1
        assert err.count("\n") == 1
        assert "127.0.0.1:1" in err
        _, out, _ = await sava("cluster", "init", "--nodes", nodes, admin=admin)
        assert "Cluster initialized" in out
        _, out, _ = await sava("cluster", "init", "--nodes", nodes, admin=admin)
        assert "AlreadyInitialized" in out
        await sava("meta", "put", "/a/b", "value", "--if-absent", admin=admin)
        code, _, err = await sava("meta", "put", "/a/b", "other", "--if-absent", admin=admin, check=False)
        assert code == 1
        assert "/a/b" in err
        _, out, _ = await sava("meta", "get", "/a/b", admin=cluster.brokers[2].admin)
        assert out == "value\n"
        _, out, _ = await sava("cluster", "status", "-o", "json", admin=admin)
        status = json.loads(out)
        assert isinstance(status["leader_id"], str)
        assert status["leader_id"] in status["voters"]
        assert isinstance(status["current_term"], int)
        _, out, _ = await sava("meta", "delete", "/a/", "--prefix", admin=admin)
        assert out.startswith("deleted 1")
        code, _, err = await sava("meta", "get", "/a/b", admin=admin, check=False)
        assert code == 1
        assert "does not exist" in err
