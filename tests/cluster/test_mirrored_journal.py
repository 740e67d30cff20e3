"""Journals of real brokers on each other's disks: what producers notice of mirrors that do not keep up.

That nothing is lost when brokers die is the subject of ``test_failover``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sava.errors import SavaError
from sava.proto import admin_pb2 as admin
from sava.proto import ledgers_pb2 as pb
from tests.cluster.mirrored import MirroredBrokers
from tests.cluster.workload import Workload
from tests.support.brokers import BrokerProcess
from tests.support.waiting import PATIENCE_S, until

TOPIC = "/default/mirrored"


async def _journal_is_on(cluster: MirroredBrokers, owner: BrokerProcess, copies: int) -> None:
    async def is_so() -> bool:
        found = await cluster.journal_of(owner)
        return found.state == "open" and len(found.fragments[-1].storage_ids) == copies

    await until(is_so, f"the journal is on {copies} disks")


async def _last_fragment(cluster: MirroredBrokers, owner: BrokerProcess) -> pb.LedgerFragment:
    """Asked of the owner itself: one of the others stands still."""
    return (await cluster.journal_of(owner, through=owner)).fragments[-1]


async def test_a_mirror_that_stands_still_holds_nobody_up_and_is_taken_again(tmp_path: Path) -> None:
    """Not dead, and for a while not even gone: its connections stay, and its registration outlives the pause.
    The other mirror is enough for acknowledgements all the time."""
    settings = {
        "journal": {"mirror_timeout_seconds": 1},
        "cluster": {"registration_ttl_ms": 30_000, "suspicion": "off"},
    }
    async with MirroredBrokers(3, tmp_path, **settings) as cluster:
        await cluster.mirrored()
        await cluster.create(TOPIC)
        owner = await cluster.by_id((await cluster.served(TOPIC)).broker_id)
        leader = await cluster.leader()
        mirrors = [broker for broker in cluster.brokers if broker is not owner]
        still = next(broker for broker in mirrors if broker is not leader)
        async with (
            cluster.sava_client([owner]) as client,
            client.producer(TOPIC) as producer,
            client.reader(TOPIC, start=0) as reader,
        ):
            sent = 0
            for _ in range(20):
                await producer.send(b"%d" % sent)
                sent += 1
            still.pause()
            try:
                async with asyncio.timeout(PATIENCE_S):
                    while len((await _last_fragment(cluster, owner)).storage_ids) == 3:
                        await producer.send(b"%d" % sent)
                        sent += 1
                for _ in range(20):
                    await producer.send(b"%d" % sent)
                    sent += 1
                assert (await _last_fragment(cluster, owner)).ack_quorum == 2
            finally:
                still.resume()
            await _journal_is_on(cluster, owner, 3)
            await producer.send(b"%d" % sent)
            found = []
            async with asyncio.timeout(PATIENCE_S):
                async for message in reader:
                    found.append(int(message.payload))
                    if len(found) > sent:
                        break
            assert found == list(range(sent + 1))


async def test_a_broker_is_removed_while_it_holds_copies_and_then_the_owner_dies(tmp_path: Path) -> None:
    """The copies that left with it are not needed: another disk has taken its place."""
    async with MirroredBrokers(4, tmp_path) as cluster:
        await cluster.all_running()
        await cluster.create(TOPIC)
        owner = await cluster.by_id((await cluster.served(TOPIC)).broker_id)
        leader = await cluster.leader()
        removed = next(each for each in await cluster.mirrors_of(owner) if each is not leader)
        async with cluster.sava_client() as client, Workload(client, TOPIC) as load:
            await load.progressed(30)
            lost = await cluster.disk_of(removed)
            request = admin.RemoveNodeRequest(addr=removed.raft_address, force=True)
            await leader.client.call(leader.client.cluster.RemoveNode, request, timeout=PATIENCE_S)
            removed.kill()
            await removed.ended()
            await cluster.mirrored(without=lost)
            await load.progressed(30)
            owner.kill()
            await owner.ended()
            await cluster.until_served(TOPIC, but_not=owner)
            await load.progressed(30)
            await load.finish()


async def test_a_single_broker_is_replaced_by_another(tmp_path: Path) -> None:
    """For a while there are two, and two copies. The one that stays needs no second one any more, and nothing
    is left of the journals of the one that has gone."""
    async with MirroredBrokers(1, tmp_path) as cluster:
        await cluster.create(TOPIC)
        old = cluster.brokers[0]
        async with cluster.sava_client() as client, client.producer(TOPIC) as producer:
            assert [await producer.send(b"%d" % number) for number in range(50)] == list(range(50))
        new = await cluster.replace(old)
        async with cluster.sava_client([new]) as client:
            async with client.producer(TOPIC) as producer:
                assert await producer.send(b"50") == 50
            async with client.reader(TOPIC, start=0, end="latest") as reader:
                assert [int(message.payload) async for message in reader] == list(range(51))

        async def is_alone() -> bool:
            found = [
                (each.broker_id, each.state, each.write_quorum, len(each.fragments[-1].storage_ids))
                for each in await cluster.journals()
            ]
            return found == [(await cluster.id_of(new), "open", 1, 1)]

        await until(is_alone, "the one journal is that of the new broker, on its disk")


@pytest.mark.parametrize("degraded", ["refuse", "allow"])
async def test_when_fewer_disks_are_there_than_were_asked_for(tmp_path: Path, degraded: str) -> None:
    """All three are to have a message before it is acknowledged, and one of them is killed."""
    journal = {"write_quorum": 3, "ack_quorum": 3, "degraded": degraded, "mirror_timeout_seconds": 1}
    async with MirroredBrokers(3, tmp_path, journal=journal) as cluster:
        await cluster.mirrored()
        await cluster.create(TOPIC)
        owner = await cluster.by_id((await cluster.served(TOPIC)).broker_id)
        leader = await cluster.leader()
        killed = next(broker for broker in cluster.brokers if broker not in (owner, leader))
        # A producer that closes waits for what it has sent as long as this.
        patience_s = PATIENCE_S if degraded == "allow" else 10.0
        async with (
            cluster.sava_client([owner], timeout=5.0) as client,
            client.producer(TOPIC, timeout=patience_s) as producer,
        ):
            await producer.send(b"on three disks")
            assert producer.degraded == 0
            killed.kill()
            await killed.ended()
            if degraded == "allow":
                async with asyncio.timeout(PATIENCE_S):
                    await producer.send(b"on two")
                found = await cluster.journal_of(owner)
                assert found.degraded
                assert producer.degraded == 1
                assert found.fragments[-1].ack_quorum == 2
            else:
                with pytest.raises((SavaError, TimeoutError)):
                    async with asyncio.timeout(20):
                        await producer.send(b"on two")
                assert not (await cluster.journal_of(owner)).degraded
                assert (await cluster.journal_of(owner)).fragments[-1].ack_quorum == 3
                _, told, _ = await cluster.command("doctor", "--watch", "0.1", check=False)
                assert "it refuses messages" in told
        await killed.start()
        await _journal_is_on(cluster, owner, 3)
        async with cluster.sava_client([owner]) as client, client.producer(TOPIC) as producer:
            async with asyncio.timeout(60):
                await producer.send(b"on three again")
            assert producer.degraded == 0
        assert not (await cluster.journal_of(owner)).degraded


@pytest.mark.parametrize("degraded", ["refuse", "allow"])
async def test_an_owner_dies_when_every_disk_was_to_have_a_copy(tmp_path: Path, degraded: str) -> None:
    """Its journal cannot be written back to three disks, for two are left, and nothing is missing on them.
    With fewer copies allowed it goes on by itself, else when an operator says so; then it can be read."""
    journal = {"write_quorum": 3, "ack_quorum": 3, "degraded": degraded, "mirror_timeout_seconds": 1}
    async with MirroredBrokers(3, tmp_path, journal=journal) as cluster:
        await cluster.mirrored()
        await cluster.create(TOPIC)
        owner = await cluster.by_id((await cluster.served(TOPIC)).broker_id)
        async with cluster.sava_client() as client, client.producer(TOPIC) as producer:
            for number in range(20):
                await producer.send(b"%d" % number)
        dead = await cluster.journal_of(owner)
        name = f"{dead.broker_id}/{dead.incarnation}"
        owner.kill()
        await owner.ended()

        async def is_waiting() -> bool:
            """Whoever is asked: a broker that does not lead used to know of no more than a recovery."""
            told = [each for broker in cluster.running for each in await cluster.journals(through=broker)]
            status = [each.status for each in told if each.broker_id == dead.broker_id]
            return len(status) == 2 and all("waits for 1 more disk" in each for each in status)

        if degraded == "refuse":
            await until(is_waiting, "the recovery says that it waits")
            _, told, _ = await cluster.command("ledgers", "recover", name)
            assert "nothing; until its messages are in segments" in told
            assert await is_waiting(), "that was only a question"
            await cluster.command("ledgers", "recover", name, "--yes")
        await cluster.until_served(TOPIC, but_not=owner)
        async with (
            cluster.sava_client(cluster.running) as client,
            client.reader(TOPIC, start=0, end="latest") as reader,
        ):
            assert [int(message.payload) async for message in reader] == list(range(20))


async def test_the_owner_loses_its_own_disk_alone(tmp_path: Path) -> None:
    """Schedule: the owner of a topic is killed and returns with an empty journal; its mirrors have
    everything. Its topic is served with every acknowledged message and takes the next one; the broker mirrors
    again."""
    async with MirroredBrokers(3, tmp_path) as cluster:
        await cluster.mirrored()
        await cluster.create(TOPIC)
        owner = await cluster.by_id((await cluster.served(TOPIC)).broker_id)
        async with cluster.sava_client() as client, client.producer(TOPIC) as producer:
            assert [await producer.send(b"%d" % number) for number in range(20)] == list(range(20))
        lost = await cluster.disk_of(owner)
        owner.kill()
        await owner.ended()
        await cluster.lose_disk(owner)
        await owner.start()
        await cluster.served(TOPIC)
        async with cluster.sava_client() as client, client.producer(TOPIC) as producer:
            async with asyncio.timeout(PATIENCE_S):
                assert await producer.send(b"after") == 20
        assert (await cluster.describe(TOPIC)).start_offset == 0
        await cluster.mirrored(without=lost)
