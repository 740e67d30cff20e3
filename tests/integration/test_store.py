"""Three brokers that nobody disturbs: consistency, races and watches. They share one cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from sava.metadata.errors import Compacted, InvalidRequest
from sava.proto import admin_pb2 as pb
from tests.support.brokers import Cluster
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trio(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    async with Cluster(3, tmp_path_factory.mktemp("store")) as cluster:
        await cluster.init()
        yield cluster


async def test_every_broker_sees_what_any_broker_wrote(trio: Cluster) -> None:
    for broker in trio.brokers:
        await broker.put(f"/from/{broker.number}", str(broker.number).encode())
    for broker in trio.brokers:
        for author in trio.brokers:
            assert await broker.get(f"/from/{author.number}") == str(author.number).encode()
    statuses = [await broker.status() for broker in trio.brokers]
    assert len({status.cluster_id for status in statuses}) == 1
    assert len({tuple(status.voters) for status in statuses}) == 1
    assert {status.leader_id for status in statuses} == {statuses[0].leader_id}


async def test_a_write_through_a_follower_is_visible_there_at_once(trio: Cluster) -> None:
    follower = await trio.follower()
    for number in range(20):
        await follower.put("/mine", str(number).encode())
        assert await follower.get("/mine", local=True) == str(number).encode()


async def test_ids_are_unique_and_grow_whoever_asks(trio: Cluster) -> None:
    async def allocate(number: int) -> int:
        client = trio.brokers[number % 3].client
        request = pb.AllocateIdRequest(key="/schemas/next_id")
        response = await client.call(client.meta.AllocateId, request)
        return int(response.first_id)

    ids = await asyncio.gather(*(allocate(number) for number in range(150)))
    assert len(set(ids)) == 150
    assert sorted(ids) == list(range(min(ids), min(ids) + 150))
    assert await allocate(0) > max(ids)


async def test_rapid_creation_and_deletion_from_all_brokers(trio: Cluster) -> None:
    async def live(number: int) -> None:
        broker = trio.brokers[number % 3]
        key = f"/topics/default/t{number}/spec"
        for turn in range(3):
            await broker.put(key, str(turn).encode())
            client = broker.client
            await client.call(client.meta.Delete, pb.DeleteRequest(key=key))
        await broker.put(key, b"last")

    await asyncio.gather(*(live(number) for number in range(120)))
    client = trio.brokers[0].client
    response = await client.call(client.meta.Range, pb.RangeRequest(prefix="/topics/"))
    assert [kv.value for kv in response.kvs] == [b"last"] * 120


async def test_concurrent_registration_one_winner_per_name(trio: Cluster) -> None:
    async def register(number: int) -> bool:
        client = trio.brokers[number % 3].client
        lease = (await client.call(client.meta.GrantLease, pb.GrantLeaseRequest(ttl_ms=30_000))).lease
        request = pb.PutRequest(
            key=f"/cluster/register/{number // 3}", value=str(number).encode(), lease=lease, if_absent=True
        )
        return bool((await client.call(client.meta.Put, request)).succeeded)

    won = await asyncio.gather(*(register(number) for number in range(60)))
    assert sum(won) == 20


async def test_a_watch_on_another_broker_sees_every_change_in_order(trio: Cluster) -> None:
    watcher, writer = await trio.follower(), await trio.leader()
    seen: list[tuple[str, bytes]] = []
    established = asyncio.Event()

    async def follow() -> None:
        async for response in watcher.client.watch(pb.WatchRequest(prefix="/w/")):
            established.set()
            seen.extend((event.key, event.kv.value) for event in response.events)
            if len(seen) == 50:
                return

    following = asyncio.create_task(follow())
    async with asyncio.timeout(PATIENCE_S):
        await established.wait()
        for number in range(50):
            await writer.put(f"/w/{number % 7}", str(number).encode())
            await writer.put(f"/other/{number}", b"not for this watcher")
        await following
    assert seen == [(f"/w/{number % 7}", str(number).encode()) for number in range(50)]


async def test_a_watcher_that_lags_is_told_and_resyncs_without_a_gap(trio: Cluster) -> None:
    """A slow consumer must recover by reading again. It stops reading while far more is written
    than the pipe, the queue and the history hold; the watch ends with ``Compacted``, and range plus watch
    closes the gap."""
    broker = await trio.leader()
    client = broker.client
    stream = client.watch(pb.WatchRequest(prefix="/lag/"))
    await anext(stream)
    value = b"v" * 200_000
    for number in range(260):
        await broker.put(f"/lag/{number % 10}", value)

    async def read_all() -> None:
        last = 0
        async for response in stream:
            assert response.revision > last
            last = response.revision

    with pytest.raises(Compacted) as gap:
        await asyncio.wait_for(read_all(), PATIENCE_S)
    assert gap.value.floor > 1

    copy = await client.call(client.meta.Range, pb.RangeRequest(prefix="/lag/"))
    assert len(copy.kvs) == 10
    resumed = client.watch(pb.WatchRequest(prefix="/lag/", from_revision=copy.revision + 1))
    await broker.put("/lag/new", b"1")
    async with asyncio.timeout(PATIENCE_S):
        assert (await anext(resumed)).revision == copy.revision
        (event,) = (await anext(resumed)).events
    assert (event.key, event.kv.value) == ("/lag/new", b"1")
    await resumed.aclose()


async def test_what_the_store_never_accepts_is_refused_and_harms_nothing(trio: Cluster) -> None:
    broker = await trio.follower()
    with pytest.raises(InvalidRequest):
        await broker.put("/" + "k" * 2000, b"1")
    with pytest.raises(InvalidRequest):
        await broker.put("/big", b"v" * (2 << 20))
    with pytest.raises(InvalidRequest):
        await broker.put("no-slash", b"1")
    client = broker.client
    with pytest.raises(InvalidRequest):
        await client.call(client.meta.Txn, pb.TxnRequest(then=[pb.Operation()]))
    assert await broker.put("/ok", b"v" * (1 << 19)) > 0
