"""Brokers that come, go, die and come back, and what becomes of their topics."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sava import config
from sava.client import ClientError
from tests.cluster.workload import Workload
from tests.support.brokers import BrokerProcess, Brokers
from tests.support.waiting import PATIENCE_S, OwnTime, until

TOPIC = "/default/orders"
DETECTED_S = 12.0
"""What the documentation promises: from a broker's death until its uploaded topics serve elsewhere, with the
default settings."""
DEFAULTS: dict[str, Any] = {"cluster": {"registration_ttl_ms": config.ClusterSettings().registration_ttl_ms}}


async def publish(cluster: Brokers, topic: str, count: int) -> None:
    async with cluster.sava_client() as client, client.producer(topic) as producer:
        await producer.send_many([b"%d" % number for number in range(count)])


async def read(cluster: Brokers, topic: str) -> list[int]:
    async with cluster.sava_client(cluster.running) as client, client.reader(topic, end="latest") as reader:
        return [int(message.payload) async for message in reader]


async def at_rest(cluster: Brokers, topic: str) -> None:
    """Until everything is uploaded and the metadata store knows it."""

    async def rests() -> bool:
        value = await cluster.running[0].get(f"/storage/topics{topic}/state")
        return value is not None and bool(json.loads(value).get("is_clean"))

    await until(rests, f"{topic} is at rest")


async def moved_from(cluster: Brokers, broker: BrokerProcess, *, seen_by: BrokerProcess) -> None:
    gone = await cluster.id_of(broker)

    async def has_moved() -> bool:
        return (await cluster.describe(TOPIC, through=seen_by)).broker_id not in (0, gone)

    await until(has_moved, f"{TOPIC} is served by another", timeout=PATIENCE_S)


@pytest.mark.parametrize("victim", ["leader", "follower"])
async def test_the_topics_of_a_dead_broker_are_served_by_others(tmp_path: Path, victim: str) -> None:
    async with Brokers(3, tmp_path, **DEFAULTS) as cluster:
        leader = await cluster.leader()
        dying = leader if victim == "leader" else await cluster.follower()
        await cluster.create(TOPIC)
        await cluster.create("/default/fleeting", reliable=False)
        await publish(cluster, TOPIC, 100)
        for topic in (TOPIC, "/default/fleeting"):
            if await cluster.owner(topic) is not dying:
                await cluster.unload(topic, to=dying)
        await at_rest(cluster, TOPIC)
        gone = await cluster.id_of(dying)
        dying.kill()
        own = OwnTime(*(broker.pid for broker in cluster.running))
        for topic in (TOPIC, "/default/fleeting"):
            described = await cluster.served(topic, by_other_than=gone)
            assert described.broker_id != gone
        assert own.seconds < DETECTED_S
        assert await read(cluster, TOPIC) == list(range(100))
        await publish(cluster, TOPIC, 10)
        assert (await cluster.describe(TOPIC)).next_offset == 110
        await dying.start()
        await cluster.registered()
        assert (await cluster.describe(TOPIC, through=dying)).next_offset == 110, (
            "through the one that is back"
        )


async def test_what_only_the_dead_broker_knows_waits_for_it(tmp_path: Path) -> None:
    """Not uploaded when the broker died, and without mirrors: nobody gives out its offsets again."""
    async with Brokers(3, tmp_path, upload_interval_s=3600, journal={"write_quorum": 1}) as cluster:
        await cluster.create(TOPIC)
        await publish(cluster, TOPIC, 100)
        dying = await cluster.owner(TOPIC)
        dying.kill()

        async def is_orphan() -> bool:
            return (await cluster.list_topics())[TOPIC].state == "orphan"

        await until(is_orphan, "nobody serves it", timeout=PATIENCE_S)
        assert (await cluster.describe(TOPIC)).state == "orphan"
        await dying.start()
        await cluster.served(TOPIC)
        assert await read(cluster, TOPIC) == list(range(100))
        await publish(cluster, TOPIC, 1)
        assert (await cluster.describe(TOPIC)).next_offset == 101


async def test_a_paused_broker_gives_up_its_topics_and_knows_it(tmp_path: Path) -> None:
    """SIGSTOP for longer than its registration lasts: another serves its topics, and when it wakes up it
    acknowledges nothing that is not in the topic."""
    async with Brokers(3, tmp_path) as cluster:
        await cluster.create(TOPIC)
        paused = await cluster.owner(TOPIC)
        gone = await cluster.id_of(paused)
        async with cluster.sava_client() as client, Workload(client, TOPIC, interval_s=0.05) as load:
            await load.progressed(5)
        await at_rest(cluster, TOPIC)
        paused.pause()
        try:
            awake = next(broker for broker in cluster.brokers if broker is not paused)
            await moved_from(cluster, paused, seen_by=awake)
        finally:
            paused.resume()
        before = (await cluster.describe(TOPIC)).next_offset
        async with cluster.sava_client([paused]) as client, client.producer(TOPIC, linger_ms=0) as producer:
            assert [await producer.send(b"x") for _ in range(3)] == [before, before + 1, before + 2]
        assert (await cluster.describe(TOPIC, through=paused)).broker_id != gone
        await cluster.registered()


async def test_everything_is_there_after_all_brokers_were_stopped(tmp_path: Path) -> None:
    async with Brokers(3, tmp_path) as cluster:
        topics = [f"/default/topic-{number}" for number in range(6)]
        for topic in topics:
            await cluster.create(topic)
            await publish(cluster, topic, 10)
        for broker in cluster.brokers:
            broker.terminate()
        assert [await broker.ended() for broker in cluster.brokers] == [0, 0, 0]
        await asyncio.gather(*(broker.start() for broker in cluster.brokers))
        await cluster.registered()
        for topic in topics:
            await cluster.served(topic)
            assert await read(cluster, topic) == list(range(10))
            await publish(cluster, topic, 1)
            assert (await cluster.describe(topic)).next_offset == 11


async def test_a_new_broker_gets_topics_and_an_old_one_leaves(tmp_path: Path) -> None:
    """Scaling out and in: join, add, promote; drain, remove."""
    async with Brokers(3, tmp_path) as cluster:
        topics = [f"/default/topic-{number}" for number in range(12)]
        for topic in topics[:6]:
            await cluster.create(topic)
        fourth = await cluster.join()
        await cluster.command("cluster", "add-node", "--addr", fourth.raft_address)
        await cluster.command("cluster", "promote-node", "--addr", fourth.raft_address)
        await cluster.registered()
        for topic in topics[6:]:
            await cluster.create(topic)
        new = await cluster.id_of(fourth)
        owners = [topic.broker_id for topic in (await cluster.list_topics()).values()]
        assert owners.count(new) >= 3, "the one with the fewest topics is the first choice"
        leaving = cluster.brokers[1]
        gone = await cluster.id_of(leaving)
        code, _, said = await cluster.command(
            "cluster", "remove-node", "--addr", leaving.raft_address, check=False
        )
        assert code != 0
        assert "drain" in said
        _, out, _ = await cluster.command("brokers", "drain", str(gone), "-o", "json")
        assert json.loads(out)["status"] == "drained"
        assert gone not in [topic.broker_id for topic in (await cluster.list_topics()).values()]
        await cluster.command("cluster", "remove-node", "--addr", leaving.raft_address)
        await leaving.stop()
        for topic in topics:
            await publish(cluster, topic, 1)


async def test_the_minority_refuses_and_catches_up(tmp_path: Path) -> None:
    """A broker that is cut off from the others' metadata stops serving by itself."""
    async with Brokers(3, tmp_path, links=True) as cluster:
        assert cluster.links is not None
        await cluster.create(TOPIC)
        await publish(cluster, TOPIC, 10)
        await at_rest(cluster, TOPIC)
        alone = await cluster.owner(TOPIC)
        rest = [broker for broker in cluster.brokers if broker is not alone]
        cluster.links.partition([alone.number], [broker.number for broker in rest])
        await moved_from(cluster, alone, seen_by=rest[0])
        async with cluster.sava_client([alone], timeout=3) as client:
            with pytest.raises(ClientError):
                async with client.producer(TOPIC, timeout=3) as producer:
                    await producer.send(b"lost?")
        async with cluster.sava_client(rest) as client, client.producer(TOPIC) as producer:
            await producer.send(b"10")
        cluster.links.heal()
        await cluster.registered(timeout=PATIENCE_S)

        async def has_caught_up() -> bool:
            return (await cluster.describe(TOPIC, through=alone)).next_offset == 11

        await until(has_caught_up, "the broker that was alone knows the rest")
        assert await read(cluster, TOPIC) == list(range(11))
