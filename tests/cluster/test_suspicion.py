"""Brokers that die, stand still, or are wrongly suspected, with leases that last ten minutes: what is served
again within such a test was taken over because the others agreed that its owner is gone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.cluster.mirrored import MirroredBrokers
from tests.cluster.workload import Workload
from tests.support.brokers import BrokerProcess
from tests.support.long import IS_LONG
from tests.support.waiting import until

BUSY_S = 30.0 if IS_LONG else 5.0
LEASE: dict[str, object] = {"registration_ttl_ms": 600_000}


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[MirroredBrokers]:
    async with MirroredBrokers(3, tmp_path, cluster=LEASE) as cluster:
        yield cluster


async def follower(cluster: MirroredBrokers) -> BrokerProcess:
    leader = await cluster.leader()
    return next(broker for broker in cluster.running if broker is not leader)


@pytest.mark.parametrize("role", ["follower", "leader"])
async def test_topics_of_a_killed_broker_are_served_long_before_its_lease_ends(
    cluster: MirroredBrokers, role: str
) -> None:
    """A broker is killed and its port refuses connections: the leader asks the third broker, and ends the
    lease. If it was the leader, another one leads without the election timeout, and suspects the former one
    by what it has seen as a follower."""
    victim = await cluster.leader() if role == "leader" else await follower(cluster)
    await cluster.create("/default/a")
    await cluster.place("/default/a", victim)
    async with cluster.sava_client() as client, Workload(client, "/default/a") as load:
        await load.progressed(30)
        victim.kill()
        await load.progressed(30)
        await load.finish()
    evicting = await cluster.logged(f"cluster: evicting broker={await cluster.id_of(victim)}")
    assert "sign=refused" in evicting


async def test_a_wrongly_suspected_owner_loses_its_topic_and_no_message(
    cluster: MirroredBrokers,
) -> None:
    """An owner stands still under load until its topic is another broker's, and continues: what it still had
    in hand is not acknowledged, it sees that its registration is gone, drops the topic, registers again."""
    victim = await follower(cluster)
    await cluster.create("/default/c")
    await cluster.place("/default/c", victim)
    owner = await cluster.id_of(victim)
    other = next(broker for broker in cluster.running if broker is not victim)
    async with cluster.sava_client() as client, Workload(client, "/default/c") as load:
        await load.progressed(30)
        os.kill(victim.pid, signal.SIGSTOP)
        try:
            assert "sign=silent" in await cluster.logged(f"cluster: evicting broker={owner}")

            async def is_taken_over() -> bool:
                described = await cluster.describe("/default/c", through=other)
                return described.broker_id not in (0, owner)

            await until(is_taken_over, "another broker has the topic")
        finally:
            os.kill(victim.pid, signal.SIGCONT)
        await victim.logged("the others took this broker for gone")
        await cluster.registered()
        await load.progressed(30)
        await load.finish()


@contextlib.contextmanager
def busy_core(broker: BrokerProcess) -> Iterator[None]:
    """All threads of the broker share one core with a loop that never waits; one loop runs on each other
    core."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in Path(f"/proc/{broker.pid}/task").iterdir():
        os.sched_setaffinity(int(thread.name), cores[:1])
    program = "import os, sys; os.sched_setaffinity(0, [int(sys.argv[1])])\nwhile True: pass"
    loops = [subprocess.Popen([sys.executable, "-c", program, str(core)]) for core in cores]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.parametrize("role", ["follower", "leader"])
async def test_a_broker_whose_core_is_busy_keeps_its_registration(
    cluster: MirroredBrokers, role: str
) -> None:
    """A broker has half of a core, and no other core is idle, for 30 s (5 s in the short form), while it
    serves a topic. It answers late, and may be doubted; the others must not end its lease."""
    victim = await cluster.leader() if role == "leader" else await follower(cluster)
    await cluster.create("/default/d")
    await cluster.place("/default/d", victim)
    async with cluster.sava_client() as client, Workload(client, "/default/d") as load:
        await load.progressed(30)
        with busy_core(victim):
            await asyncio.sleep(BUSY_S)
            await load.progressed(10)
        await load.finish()
    evictions = [line for broker in cluster.running for line in broker.lines if "cluster: evicted" in line]
    assert not evictions
