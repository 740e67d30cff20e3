"""Moves while the object store takes no writes: publishers do not notice, and the caller learns why nothing
moves. The store is a real S3 server, which is killed, or stopped so that it accepts connections and answers
nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from sava.errors import SavaError
from sava.proto import brokers_pb2 as pb
from tests.cluster.workload import Workload
from tests.support.brokers import BrokerProcess, Brokers
from tests.support.objects import S3Server
from tests.support.waiting import PATIENCE_S, until

TOPIC = "/default/orders"
HELD_S = 4.0
"""A move holds publishers for 2 s at most; then the old owner takes the topic up again. On a machine that
does other things that takes its time, and far less than the 30 s that an upload may take."""


class BrokersOnS3(Brokers):
    """They upload once a minute, so that a topic in use always has messages that are in no segment."""

    def __init__(self, size: int, directory: Path, server: S3Server, **settings: Any) -> None:
        super().__init__(size, directory, upload_interval_s=60, **settings)
        self._store_url = f"{server.url}/messages"
        self._aws = {f"AWS_{name.upper()}": value for name, value in server.options.items()}

    async def prepare(self) -> BrokerProcess:
        broker = await super().prepare()
        broker.run_as("sava.cli", **self._aws)
        return broker


@pytest.fixture
def server(tmp_path: Path) -> Iterator[S3Server]:
    directory = tmp_path / "s3"
    directory.mkdir()
    server = S3Server(directory)
    server.start()
    yield server
    server.kill()


@pytest.fixture
async def cluster(tmp_path: Path, server: S3Server) -> AsyncIterator[BrokersOnS3]:
    movable = {"rebalancing": {"min_topic_age_seconds": 0}}
    async with BrokersOnS3(3, tmp_path, server, load_manager=movable) as cluster:
        yield cluster


async def _drained(cluster: Brokers, broker: BrokerProcess) -> AsyncIterator[pb.DrainProgress]:
    client = (await cluster.leader()).client
    request = pb.DrainBrokerRequest(broker_id=await cluster.id_of(broker), timeout_seconds=300)
    async for progress in client.stream(client.brokers.DrainBroker, request, timeout=300):
        yield progress


async def _refusal(cluster: Brokers) -> str:
    """Why the topic does not move."""
    try:
        return " ".join(move.error for move in await cluster.unload(TOPIC, repeats=1))
    except SavaError as error:
        return str(error)


async def test_a_drain_waits_for_a_store_that_is_gone_and_says_so(
    cluster: BrokersOnS3, server: S3Server
) -> None:
    """The owner has messages that are in no segment ─▶ the store is killed ─▶ drain: the leader asks the
    owner, which cannot upload; publishers publish on. The store is back ─▶ the drain goes through by
    itself."""
    await cluster.create(TOPIC)
    owner = await cluster.owner(TOPIC)
    async with cluster.sava_client() as client, Workload(client, TOPIC) as load:
        await load.progressed(100)
        server.kill()
        async with asyncio.timeout(PATIENCE_S):
            async for progress in _drained(cluster, owner):
                if progress.waiting:
                    break
        assert "object store" in progress.waiting
        assert not progress.failed
        await load.progressed(400)
        assert load.longest_wait_s < HELD_S
        assert (await cluster.owner(TOPIC)).number == owner.number
        server.start()
        async with asyncio.timeout(PATIENCE_S):
            *_, progress = [each async for each in _drained(cluster, owner)]
        assert (progress.succeeded, progress.failed, progress.status) == (1, 0, "drained")
        assert (await cluster.owner(TOPIC)).number != owner.number
        await load.finish()
        assert load.longest_wait_s < HELD_S


async def test_a_move_during_a_stall_of_the_store_does_not_hold_publishers(
    cluster: BrokersOnS3, server: S3Server
) -> None:
    """The store accepts connections and answers nothing ─▶ an operator moves the topic: refused, with the
    reason, while publishers publish on; repeated when the store answers again, the topic moves."""
    await cluster.create(TOPIC)
    owner = await cluster.owner(TOPIC)
    async with cluster.sava_client() as client, Workload(client, TOPIC) as load:
        await load.progressed(100)
        server.pause()
        try:
            said = await _refusal(cluster)
            await load.progressed(100)
        finally:
            server.resume()
        assert load.longest_wait_s < HELD_S
        assert "object store" in said
        described = await cluster.describe(TOPIC)
        assert described.broker_id == await cluster.id_of(owner)

        async def has_moved() -> bool:
            return not await _refusal(cluster)

        await until(has_moved, "the store answers again, and the topic moves")
        await load.finish()
        assert load.longest_wait_s < HELD_S


async def test_a_round_of_rebalancing_says_that_the_store_takes_no_writes(
    cluster: BrokersOnS3, server: S3Server
) -> None:
    """All topics are with one broker, and the store is killed ─▶ a round moves nothing and says why; it is
    not counted as one, so the next one, with the store back, moves topics at once."""
    others = cluster.brokers[1:]
    for other in others:
        await cluster.command("brokers", "drain", str(await cluster.id_of(other)))
    names = [f"{TOPIC}-{number}" for number in range(6)]
    async with cluster.sava_client() as client:
        for name in names:
            async with client.producer(name) as producer:
                await producer.send(b"first 0")
        for other in others:
            await cluster.command("brokers", "activate", str(await cluster.id_of(other)))
        async with Workload(client, names[0]) as load:
            await load.progressed(20)
            server.kill()
            code, out, err = await cluster.command("brokers", "rebalance", "--max-moves", "4", check=False)
            assert code != 0
            assert "object store" in out + err
            await load.progressed(100)
            assert load.longest_wait_s < HELD_S
            balance = await cluster.command("brokers", "balance", "-o", "json")
            assert '"moves_last_hour": 0' in balance[1] or "moves_last_hour" not in balance[1]
            server.start()
            await cluster.command("brokers", "rebalance", "--max-moves", "4")
            assert {(await cluster.owner(name)).number for name in names} == {1, 2, 3}
            await load.finish()
