"""A broker that is asked to stop: its topics are with others before it goes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from bench.rows.rolling import roll
from bench.trio import Trio
from sava.topics import specs
from sava.topics.names import TopicName
from sava.topics.specs import Ownership
from tests.cluster.mirrored import MirroredBrokers
from tests.cluster.workload import Workload
from tests.support.brokers import Brokers
from tests.support.waiting import PATIENCE_S

NAMES = [f"/default/orders-{number}" for number in range(6)]
LEFT = "broker: topics handed over left=0"


async def _reason(cluster: Brokers, name: str) -> str:
    """Why the topic is with its owner."""
    value = await cluster.running[0].get(specs.ownership_key(TopicName.parse(name)))
    assert value is not None
    return msgspec.json.decode(value, type=Ownership).reason


async def test_topics_are_handed_over_before_a_broker_stops(tmp_path: Path) -> None:
    """Nothing is uploaded by itself, so messages of topics that were not handed over would have to come from
    mirrors, and the record would say that the topic failed over."""
    async with MirroredBrokers(3, tmp_path) as cluster:
        await cluster.mirrored()
        for name in NAMES:
            await cluster.create(name)
        stopped = await cluster.owner(NAMES[0])
        async with cluster.sava_client() as client, Workload(client, NAMES[0]) as load:
            await load.progressed(100)
            assert await stopped.stop() == 0
            assert any(LEFT in line for line in stopped.lines)
            await load.progressed(100)
            for name in NAMES:
                assert (await cluster.served(name)).broker_id != await cluster.id_of(stopped)
            assert await _reason(cluster, NAMES[0]) == "drain"
            await load.finish()


async def test_a_stopping_leader_hands_over_and_its_topics_are_moved(tmp_path: Path) -> None:
    async with MirroredBrokers(3, tmp_path) as cluster:
        await cluster.mirrored()
        for name in NAMES:
            await cluster.create(name)
        leader = await cluster.leader()
        owned = [name for name in NAMES if (await cluster.owner(name)).number == leader.number]
        assert owned
        async with cluster.sava_client() as client, Workload(client, owned[0]) as load:
            await load.progressed(100)
            assert await leader.stop() == 0
            assert any("raft: leadership handed over" in line for line in leader.lines)
            assert any(LEFT in line for line in leader.lines)
            assert await _reason(cluster, owned[0]) == "drain"
            await load.finish()


async def test_the_last_active_broker_stops_at_once(tmp_path: Path) -> None:
    """There is no broker that may have its topics: the others are drained."""
    async with Brokers(3, tmp_path, cluster={"leave_timeout_seconds": int(PATIENCE_S)}) as cluster:
        await cluster.create(NAMES[0])
        last = await cluster.owner(NAMES[0])
        for other in [broker for broker in cluster.brokers if broker is not last]:
            await cluster.command("brokers", "drain", str(await cluster.id_of(other)))
        began = time.monotonic()
        assert await last.stop() == 0
        assert time.monotonic() - began < PATIENCE_S / 2


async def test_all_brokers_can_be_stopped_together(tmp_path: Path) -> None:
    """None waits for another one that leaves as well; and everything is there afterwards."""
    async with Brokers(3, tmp_path, cluster={"leave_timeout_seconds": int(PATIENCE_S)}) as cluster:
        await cluster.create(NAMES[0])
        async with cluster.sava_client() as client, client.producer(NAMES[0]) as producer:
            await producer.send_many([b"%d" % number for number in range(100)])
        began = time.monotonic()
        assert await asyncio.gather(*(broker.stop() for broker in cluster.brokers)) == [0, 0, 0]
        assert time.monotonic() - began < PATIENCE_S / 2
        await asyncio.gather(*(broker.start() for broker in cluster.brokers))
        async with cluster.sava_client() as client, client.reader(NAMES[0], end="latest") as reader:
            assert [int(message.payload) async for message in reader] == list(range(100))


async def test_a_rolling_restart_loses_nothing_and_holds_no_message_for_long(tmp_path: Path) -> None:
    """What ``python -m bench.rolling`` measures, with a third of the load and a bound for a busy machine."""
    async with Trio(tmp_path) as trio:
        rolled = await roll(trio, topics=3, per_second=300)
    assert (rolled.lost, rolled.doubled, rolled.failed) == (0, 0, [])
    assert rolled.slowest < 3.0, rolled.longest
