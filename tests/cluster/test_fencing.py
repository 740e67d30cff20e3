"""A producer that stood still while another one opened its name: the last *open* has the name, whatever
happened to the broker in between. The producers are processes, stopped by SIGSTOP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.cluster.mirrored import MirroredBrokers
from tests.support.brokers import Brokers
from tests.support.clients import ProducingChild
from tests.support.waiting import until

TOPIC = "/default/orders"
NAME = "till"


@asynccontextmanager
async def producers(cluster: Brokers) -> AsyncIterator[list[ProducingChild]]:
    """A, which has sent one message and stands still."""
    children: list[ProducingChild] = []
    try:
        first = await opened(cluster, children)
        assert await first.send("a") == "ok 0"
        first.stop()
        yield children
    finally:
        for child in children:
            await child.kill()


async def opened(cluster: Brokers, children: list[ProducingChild]) -> ProducingChild:
    urls = ",".join(broker.client_url for broker in cluster.brokers)
    child = await ProducingChild.start(urls, TOPIC, NAME)
    children.append(child)
    return child


async def is_refused(zombie: ProducingChild) -> None:
    """Its first message goes into a connection that is dead, which it does not know yet: nobody can say what
    became of that one."""
    zombie.proceed()
    assert await zombie.send("late") in ("OutcomeUnknown", "ProducerFenced")
    assert await zombie.send("later") == "ProducerFenced"


async def restart(cluster: Brokers) -> None:
    for broker in cluster.brokers:
        broker.kill()
        await broker.ended()
        await broker.start()
    await cluster.served(TOPIC)


async def contents(cluster: Brokers) -> list[bytes]:
    async with cluster.sava_client() as client, client.reader(TOPIC, end="latest") as reader:
        return [message.payload async for message in reader]


async def test_a_zombie_does_not_take_its_name_back_after_a_restart(tmp_path: Path) -> None:
    """A sends and is stopped; the broker is killed and restarted; B opens the name and sends; A continues. A
    is refused, B is not. Without a number of the open, A's message was answered with the offset of B's, whose
    sequence it had."""
    async with Brokers(1, tmp_path) as cluster:
        await cluster.create(TOPIC)
        async with producers(cluster) as children:
            await restart(cluster)
            second = await opened(cluster, children)
            assert await second.send("b") == "ok 1"
            await is_refused(children[0])
            assert await second.send("c") == "ok 2"
        assert await contents(cluster) == [b"a", b"b", b"c"]


async def test_an_open_without_a_message_fences_over_a_restart(tmp_path: Path) -> None:
    """B opens and sends nothing; the broker is killed and restarted while both stand still; A is the first to
    come back. It is refused, and B continues."""
    async with Brokers(1, tmp_path) as cluster:
        await cluster.create(TOPIC)
        async with producers(cluster) as children:
            second = await opened(cluster, children)
            second.stop()
            await restart(cluster)
            await is_refused(children[0])
            second.proceed()
            assert await second.send("b") == "ok 1"
        assert await contents(cluster) == [b"a", b"b"]


async def test_a_zombie_stays_out_after_its_successor_has_closed(tmp_path: Path) -> None:
    """B opens, sends and closes; the broker restarts; A continues. The last open was B's, so A is refused."""
    async with Brokers(1, tmp_path) as cluster:
        await cluster.create(TOPIC)
        async with producers(cluster) as children:
            second = await opened(cluster, children)
            assert await second.send("b") == "ok 1"
            await second.close()
            await restart(cluster)
            await is_refused(children[0])
        assert await contents(cluster) == [b"a", b"b"]


async def test_a_zombie_stays_out_over_moves_and_a_failover(tmp_path: Path) -> None:
    """A and B send and stand still, one after the other. The topic moves to another broker; C opens there,
    sends nothing and stands still. That broker is killed and stays away, so that a third one serves the
    topic. A and B come back first and are refused; C continues."""
    async with MirroredBrokers(3, tmp_path) as cluster:
        await cluster.mirrored()
        await cluster.create(TOPIC)
        async with producers(cluster) as children:
            second = await opened(cluster, children)
            assert await second.send("b") == "ok 1"
            second.stop()
            (move,) = await cluster.unload(TOPIC)
            assert not move.error
            third = await opened(cluster, children)
            third.stop()
            owner = await cluster.owner(TOPIC)
            gone = await cluster.id_of(owner)
            owner.kill()
            await owner.ended()

            async def is_recovered() -> bool:
                return (await cluster.describe(TOPIC)).broker_id not in (0, gone)

            await until(is_recovered, "another broker serves the topic", timeout=60)
            for zombie in (children[0], second):
                await is_refused(zombie)
            third.proceed()
            assert await third.send("c") == "ok 2"
        assert await contents(cluster) == [b"a", b"b", b"c"]
