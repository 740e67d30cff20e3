"""Brokers that form their cluster by themselves, as processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sava.proto import admin_pb2 as pb
from tests.support.brokers import BrokerProcess, Cluster, sava
from tests.support.waiting import until


async def prepare(cluster: Cluster, count: int) -> None:
    """Brokers that are not started yet, with each other as seeds."""
    for _ in range(count):
        await cluster.prepare()
    for broker in cluster.brokers:
        configure(broker, cluster.addresses)


def configure(broker: BrokerProcess, seeds: list[str]) -> None:
    broker.run_as("sava.cli", SAVA__META_STORE__SEED_NODES=f"[{', '.join(map(repr, seeds))}]")


async def has_formed(cluster: Cluster, brokers: list[BrokerProcess]) -> list[pb.StatusResponse]:
    """Until they know a leader; each one's view."""

    async def is_formed() -> bool:
        statuses = [await broker.status() for broker in brokers]
        return all(status.leader_id for status in statuses)

    await until(is_formed, "the seeds have formed a cluster")
    return [await broker.status() for broker in brokers]


async def test_seeds_form_one_cluster_without_a_command(tmp_path: Path) -> None:
    """Two of three start, and wait; killed and started again they still wait; the third one completes them.
    A restart of all needs nothing. A fourth broker with the same file waits to be added, and is."""
    async with Cluster(0, tmp_path) as cluster:
        await prepare(cluster, 3)
        one, two, three = cluster.brokers
        await asyncio.gather(one.start(), two.start())
        await one.logged("the cluster of the seeds is not formed")
        assert not (await one.status()).voters, "two of three are not enough"
        one.kill()
        await one.ended()
        await one.start()
        await three.start()
        statuses = await has_formed(cluster, [one, two, three])
        assert len({tuple(status.voters) for status in statuses}) == 1
        assert len(statuses[0].voters) == 3
        await cluster.put("/a", b"1")
        for broker in (one, two, three):
            broker.kill()
            await broker.ended()
        await asyncio.gather(*(broker.start() for broker in (one, two, three)))
        assert await one.get("/a") == b"1"
        fourth = await cluster.prepare()
        configure(fourth, [broker.raft_address for broker in (one, two, three)])
        await fourth.start()
        line = await fourth.logged(f"add-node --addr {fourth.raft_address}")
        assert "belongs to a cluster" in line
        await sava("cluster", "add-node", "--addr", fourth.raft_address, admin=one.admin)
        await until(lambda: _sees(fourth, "/a", b"1"), "the added broker follows")


async def test_a_seed_that_lost_its_disk_forms_no_second_cluster(tmp_path: Path) -> None:
    async with Cluster(0, tmp_path) as cluster:
        await prepare(cluster, 3)
        one, two, three = cluster.brokers
        await asyncio.gather(*(broker.start() for broker in cluster.brokers))
        await has_formed(cluster, cluster.brokers)
        lost = await three.node_id()
        three.kill()
        await three.ended()
        await three.wipe()
        await three.start()
        await three.logged(f"add-node --addr {three.raft_address}")
        assert not (await three.status()).voters
        assert await cluster.leader(among=[one, two])
        await sava("cluster", "remove-node", "--node-id", str(lost), "--force", admin=one.admin)
        await sava("cluster", "add-node", "--addr", three.raft_address, admin=one.admin)
        await cluster.put("/b", b"2")
        await until(lambda: _sees(three, "/b", b"2"), "it is back, as another node")


async def test_seeds_with_different_lists_form_nothing_and_say_so(tmp_path: Path) -> None:
    async with Cluster(0, tmp_path) as cluster:
        await prepare(cluster, 2)
        one, two = cluster.brokers
        configure(two, [one.raft_address, two.raft_address, "x:1"])
        await asyncio.gather(one.start(), two.start())
        line = await one.logged("give all of them the same list")
        assert "x:1" in line
        code, _, error = await sava(
            "cluster", "init", "--nodes", one.raft_address, admin=one.admin, check=False
        )
        assert code != 0, "an operator's other list is refused, too"
        assert "use that list" in error


async def _sees(broker: BrokerProcess, key: str, value: bytes) -> bool:
    return await broker.get(key, local=True) == value
