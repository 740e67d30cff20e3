"""What docs/operations.md says of clusters that have lost their majority, or the last copies of a journal."""

from __future__ import annotations

import asyncio
import json
import re
import time
from pathlib import Path

import pytest

from sava.errors import SavaError
from tests.cluster.mirrored import MirroredBrokers
from tests.support.brokers import BrokerProcess, sava
from tests.support.waiting import PATIENCE_S, until

TOPICS = [f"/default/topic-{number}" for number in range(3)]
BOUND_S = 20.0
"""For a command against a broker without a majority: its own bound is 10 s, the rest is a busy machine."""


async def _refused(broker: BrokerProcess, *words: str) -> str:
    """The error of a command that lists nothing, within its bound."""
    async with asyncio.timeout(BOUND_S):
        code, out, err = await sava(*words, admin=broker.admin, check=False)
    assert code != 0, f"sava {' '.join(words)} answered without a majority: {out}"
    assert not out, "what no majority has confirmed is not shown as a list"
    return err


async def _readiness(broker: BrokerProcess) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", broker.http_port)
    try:
        writer.write(b"GET /readyz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return (await reader.read()).decode()
    finally:
        writer.close()


async def _nothing_is_sent(cluster: MirroredBrokers, broker: BrokerProcess) -> None:
    began = time.monotonic()
    with pytest.raises(SavaError):
        async with (
            cluster.sava_client([broker], timeout=3.0) as client,
            client.producer(TOPICS[0]) as producer,
        ):
            await producer.send(b"alone")
    assert time.monotonic() - began < BOUND_S


async def _payloads(cluster: MirroredBrokers, brokers: list[BrokerProcess], topic: str) -> list[bytes]:
    async with (
        asyncio.timeout(PATIENCE_S),
        cluster.sava_client(brokers) as client,
        client.reader(topic, start=0, end="latest") as reader,
    ):
        return [message.payload async for message in reader]


async def test_a_broker_that_is_alone_says_so_and_two_of_three_serve_everything(tmp_path: Path) -> None:
    """Schedule: three brokers with messages that are in no segment are killed. One is started alone: it has
    no majority for metadata. It refuses lists and messages with that reason and within a bound, marks what it
    shows as not confirmed, and is not ready. Then the second one starts: every topic has its message and
    takes another."""
    async with MirroredBrokers(3, tmp_path) as cluster:
        await cluster.mirrored()
        for topic in TOPICS:
            await cluster.create(topic)
            await cluster.served(topic)
            async with cluster.sava_client() as client, client.producer(topic) as producer:
                await producer.send(b"before")
        for broker in cluster.brokers:
            broker.kill()
        for broker in cluster.brokers:
            await broker.ended()
        alone, second, _ = cluster.brokers
        await alone.start()

        listed, created, _ = await asyncio.gather(
            _refused(alone, "topics", "list"),
            _refused(alone, "topics", "create", "/default/more"),
            _nothing_is_sent(cluster, alone),
        )
        assert "no majority" in listed
        assert "`sava cluster status`" in listed, "the way out"
        assert "metadata store" in created
        code, out, err = await sava("cluster", "status", admin=alone.admin)
        assert code == 0
        assert re.search(r"^leader_id +-$", out, re.MULTILINE)
        assert "not confirmed by a majority" in err
        answer = await _readiness(alone)
        assert answer.startswith("HTTP/1.1 503")
        assert "no leader known" in answer

        await second.start()
        for topic in TOPICS:
            await cluster.served(topic)
            async with cluster.sava_client([alone, second]) as client, client.producer(topic) as producer:
                async with asyncio.timeout(PATIENCE_S):
                    assert await producer.send(b"after") == 1
            assert await _payloads(cluster, [alone, second], topic) == [b"before", b"after"]


async def test_a_closed_journal_loses_its_last_copies_and_is_given_up(tmp_path: Path) -> None:
    """Schedule: the object store takes no writes. The owner dies, and its journal is closed on the two
    mirrors; what it holds cannot be stored yet. Then the disks of both mirrors are lost, and their brokers
    return with empty ones. The topic waits; ``ledgers list``, ``doctor`` and ``topics describe`` say for
    what; ``ledgers recover`` says what would be lost; with ``--yes`` the topic is served and takes
    messages."""
    topic = TOPICS[0]
    async with MirroredBrokers(3, tmp_path) as cluster:
        await cluster.mirrored()
        await cluster.create(topic)
        owner = await cluster.by_id((await cluster.served(topic)).broker_id)
        mirrors = [broker for broker in cluster.brokers if broker is not owner]
        async with cluster.sava_client() as client, client.producer(topic) as producer:
            await producer.send_many([b"%d" % number for number in range(20)])
        cluster.break_store()
        dead = await cluster.journal_of(owner)
        name = f"{dead.broker_id}/{dead.incarnation}"
        owner.kill()
        await owner.ended()

        async def is_closed() -> bool:
            return any(
                each.state == "closed" and each.incarnation == dead.incarnation
                for each in await cluster.journals()
            )

        await until(is_closed, "the journal is closed")
        for mirror in mirrors:
            mirror.kill()
            await mirror.ended()
        cluster.mend_store()
        for mirror in mirrors:
            await cluster.lose_disk(mirror)
            await mirror.start()
        await cluster.registered()

        for broker in mirrors:

            async def is_waiting(broker: BrokerProcess = broker) -> bool:
                _, out, _ = await sava("ledgers", "list", admin=broker.admin)
                return any(line.startswith(name) and "waits" in line for line in out.splitlines())

            await until(is_waiting, "ledgers list says that it waits, whichever broker is asked")
        _, out, _ = await cluster.command("doctor", "--watch", "0.1", "-o", "json", check=False)
        said = {(each["check"], each["subject"]): each for each in json.loads(out)["findings"]}
        for about in (("ledgers", f"ledger {name}"), ("orphaned tails", topic)):
            assert said[about]["level"] == "error", out
            assert f"`sava ledgers recover {name}`" in said[about]["remedy"]
        described = await cluster.describe(topic)
        assert described.state == "orphan"
        assert "`sava ledgers list`" in described.reason

        _, out, _ = await cluster.command("ledgers", "recover", name)
        assert "nothing was done" in out
        assert topic in out

        async def is_given_up() -> bool:
            code, out, _ = await cluster.command("ledgers", "recover", name, "--yes", check=False)
            return code == 0 and "given up" in out

        await until(is_given_up, "it is given up")
        await cluster.until_served(topic, but_not=owner)
        async with cluster.sava_client(mirrors) as client, client.producer(topic) as producer:
            async with asyncio.timeout(PATIENCE_S):
                assert await producer.send(b"after") == 0
        assert await _payloads(cluster, mirrors, topic) == [b"after"]
