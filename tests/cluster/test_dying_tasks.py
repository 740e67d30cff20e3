"""A broker one of whose tasks dies of a bug does not keep its place."""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

from sava import config
from sava.metadata.store import ClusterOperations
from sava.server import EXIT_FAILED, Broker, raft_address
from tests.cluster.mortal_child import VARIABLE, strike
from tests.support.brokers import FAST, BrokerProcess, Brokers, storage_in
from tests.support.network import free_ports
from tests.support.waiting import PATIENCE_S, until

ESSENTIAL = ("cluster view", "ledger records", "registration", "agent", "cursors", "uploader")
REPEATED = (
    *("controller", "rebalancing", "failover", "replication", "load reports"),
    *("maintenance", "retention", "merging", "sweeping"),
)


class MortalBrokers(Brokers):
    def __init__(self, size: int, directory: Path, *, task: str) -> None:
        # Much longer than any wait of a test: whoever takes over has been told to, and has not waited for it.
        super().__init__(size, directory, cluster={"registration_ttl_ms": 600_000, "suspicion": "off"})
        self._task = task

    async def prepare(self) -> BrokerProcess:
        broker = await super().prepare()
        broker.run_as("tests.cluster.mortal_child", **{VARIABLE: self._task})
        return broker


async def test_a_leader_whose_agent_has_died_ends_and_others_go_on_at_once(tmp_path: Path) -> None:
    """agent     dies: topics that are given to this broker are not taken up, nor handed over
    broker    was ready all the same, and kept its lease, its topics and leadership, for ever
    """
    async with MortalBrokers(3, tmp_path, task="agent") as cluster:
        await cluster.create("/default/orders")
        victim = await cluster.leader()
        if await cluster.owner("/default/orders") is not victim:
            (move,) = await cluster.unload("/default/orders", to=victim)
            assert not move.error
        async with (
            cluster.sava_client() as client,
            client.producer("/default/orders", name="shop") as producer,
        ):
            assert await producer.send(b"before") == 0
            os.kill(victim.pid, signal.SIGUSR1)
            assert await victim.ended() == EXIT_FAILED
            assert await asyncio.wait_for(producer.send(b"after"), PATIENCE_S) == 1
        log = "\n".join(victim.lines)
        assert "an essential task died task=agent" in log
        assert "in run" in log, "the traceback"
        assert "broker: stopping reason=the task 'agent' died: Bug: injected" in log
        assert "leadership handed over" in log
        assert await cluster.owner("/default/orders") is not victim
        await victim.start()
        await victim.logged("this broker is registered")


async def test_a_leader_whose_controller_dies_begins_it_again_and_stays(tmp_path: Path) -> None:
    async with MortalBrokers(2, tmp_path, task="controller") as cluster:
        leader = await cluster.leader()
        os.kill(leader.pid, signal.SIGUSR1)
        await leader.logged("a task died and is begun again task=controller pause_s=1")
        await cluster.create("/default/orders")
        await cluster.owner("/default/orders")
        assert (await leader.http("/readyz"))[0] == 200
        _, page = await leader.http("/metrics")
        assert 'sava_task_failures_total{task="controller"} 1.0\n' in page
        assert await leader.stop() == 0


async def test_every_task_of_a_broker_is_one_or_the_other(tmp_path: Path) -> None:
    names = ("client", "admin", "raft", "prometheus")
    ports = dict(zip(names, free_ports(4), strict=True))
    overlay = {
        "broker": {"host": "127.0.0.1", "ports": ports},
        "meta_store": {**FAST, "data_dir": str(tmp_path)},
        "storage": storage_in(tmp_path),
    }
    settings = config.load(None, {}, overlay)
    broker = Broker(settings)
    await broker.start()
    try:
        await ClusterOperations(broker.node).init([raft_address(settings)])
        await broker.topics.ready()
        parts, supervisor = broker.parts, broker.supervisor

        async def is_ready() -> bool:
            return parts.readiness()[0]

        await until(is_ready, "the broker is ready")

        async def has_died(task: str) -> bool:
            return supervisor.failures[task] == 1

        for name in REPEATED:
            strike(name)
            await until(partial(has_died, name), f"{name} has died")
        assert parts.readiness() == (True, "ready")
        for name in ESSENTIAL:
            strike(name)
            await until(partial(has_died, name), f"{name} has died")
        assert parts.readiness() == (
            False,
            f"this broker ends: the task '{ESSENTIAL[0]}' died: Bug: injected",
        )
    finally:
        await broker.close()
