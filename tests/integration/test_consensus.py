"""What a cluster of real processes must do when parts of it fail."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sava.errors import SavaError
from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.proto import admin_pb2 as pb
from tests.support.brokers import Cluster
from tests.support.waiting import PATIENCE_S, OwnTime


async def test_a_follower_that_dies_is_not_missed_and_catches_up(trio: Cluster) -> None:
    follower = await trio.follower()
    follower.kill()
    await follower.ended()
    revision = 0
    for number in range(50):
        revision = await trio.put(f"/while-away/{number}", b"x")
    await follower.start()
    await follower.caught_up(revision)
    assert await follower.get("/while-away/49", local=True) == b"x"


async def test_leader_failure_with_default_timeouts_a_write_within_three_seconds(tmp_path: Path) -> None:
    async with Cluster(3, tmp_path, heartbeat_interval_ms=100, election_timeout_ms=1000) as cluster:
        await cluster.init()
        for number in range(30):
            await cluster.put(f"/before/{number}", b"kept")
        leader = await cluster.leader()
        leader.kill()
        survivors = [broker for broker in cluster.brokers if broker is not leader]
        survivor = survivors[0]
        own = OwnTime(*(broker.pid for broker in survivors))
        await survivor.put("/after", b"1")
        took = own.seconds
        assert took < 3.0, f"the first write took {took:.2f} s"
        for number in range(30):
            assert await survivor.get(f"/before/{number}") == b"kept"


async def test_full_restart_keeps_everything(trio: Cluster) -> None:
    for number in range(40):
        await trio.put(f"/kept/{number}", str(number).encode())
    for broker in trio.brokers:
        broker.kill()
    await asyncio.gather(*(broker.ended() for broker in trio.brokers))
    await asyncio.gather(*(broker.start() for broker in trio.brokers))
    for broker in trio.brokers:
        for number in range(40):
            assert await broker.get(f"/kept/{number}") == str(number).encode()


async def test_partition_three_and_two(tmp_path: Path) -> None:
    async with Cluster(5, tmp_path, links=True) as cluster:
        await cluster.init()
        await cluster.put("/before", b"1")
        leader = await cluster.leader()
        # The old leader is on the small side: it must find out by itself that it leads no more.
        small = [leader, next(broker for broker in cluster.brokers if broker is not leader)]
        large = [broker for broker in cluster.brokers if broker not in small]
        assert cluster.links is not None
        cluster.links.partition([b.number for b in small], [b.number for b in large])

        await large[0].put("/majority", b"yes", timeout=PATIENCE_S)
        with pytest.raises((Unavailable, OutcomeUnknown)):
            await small[0].put("/minority", b"no", timeout=2.0)
        with pytest.raises((Unavailable, OutcomeUnknown)):
            await small[1].get("/majority", timeout=2.0)
        assert await small[1].get("/before", local=True) == b"1"

        cluster.links.heal()
        for broker in small:
            assert await broker.get("/majority", timeout=PATIENCE_S) == b"yes"
        assert len({(await broker.status()).leader_id for broker in cluster.brokers}) == 1


async def test_a_paused_leader_does_not_answer_reads_when_it_wakes_up(tmp_path: Path) -> None:
    async with Cluster(3, tmp_path) as cluster:
        await cluster.init()
        await cluster.put("/x", b"old")
        leader = await cluster.leader()
        leader.pause()
        others = [broker for broker in cluster.brokers if broker is not leader]
        await others[0].put("/x", b"new")
        leader.resume()
        assert await leader.get("/x") == b"new"


async def test_lost_quorum_is_a_clear_error_within_the_deadline(trio: Cluster) -> None:
    survivor, *others = trio.brokers
    for broker in others:
        broker.kill()
        await broker.ended()
    own = OwnTime(survivor.pid)
    with pytest.raises(SavaError) as refused:
        await survivor.put("/x", b"1", timeout=2.0)
    assert own.seconds < 3.0
    assert isinstance(refused.value, (Unavailable, OutcomeUnknown))
    with pytest.raises(Unavailable):
        await survivor.get("/x", timeout=1.0)


async def test_a_watch_goes_on_after_the_broker_restarted(trio: Cluster) -> None:
    leader = await trio.leader()
    revision = await leader.put("/x", b"1")
    await leader.stop()
    await leader.start()
    await leader.caught_up(revision)
    stream = leader.client.watch(pb.WatchRequest(prefix="/x", from_revision=revision + 1))
    await anext(stream)
    await leader.put("/x", b"2")
    assert [event.kv.value for event in (await anext(stream)).events] == [b"2"]
    await stream.aclose()
