"""MemoryStore beyond the shared patterns: its clock, its waiting, its end."""

from __future__ import annotations

import asyncio

import pytest

from sava.metadata.commands import Put
from sava.metadata.errors import InvalidRequest, LeaseNotFound, NoSpace, Unavailable
from sava.metadata.machine.state_machine import Limits
from sava.metadata.store import MetadataStore
from tests.support.memory_store import MemoryStore
from tests.support.waiting import PATIENCE_S


def test_it_is_a_metadata_store() -> None:
    store: MetadataStore = MemoryStore(clock=lambda: 0)
    assert store.local.revision == 0


async def test_with_an_injected_clock_only_advance_lets_time_pass() -> None:
    store = MemoryStore(clock=lambda: 0)
    first = await store.grant_lease(1_000)
    second = await store.grant_lease(3_000)
    await store.txn([], [Put("/1", b"", first), Put("/2", b"", second)])
    store.advance(999)
    assert [kv.key for kv in store.local.range("/").kvs] == ["/1", "/2"]
    store.advance(1)
    assert [kv.key for kv in store.local.range("/").kvs] == ["/2"]
    store.advance(10_000)
    assert store.local.range("/").kvs == ()
    assert store.local.revision == 3


async def test_with_the_real_clock_leases_expire_by_themselves() -> None:
    async with MemoryStore() as store:
        watch = store.watch("/r")
        lease = await store.grant_lease(2000)
        await store.put("/r", b"", lease=lease)
        await anext(watch)
        await asyncio.sleep(0.3)
        await store.keep_alive(lease)
        async with asyncio.timeout(PATIENCE_S):
            gone = await anext(watch)
        assert gone.events[0].kv is None
        with pytest.raises(LeaseNotFound):
            await store.keep_alive(lease)


async def test_keep_alive_from_another_lease_does_not_help() -> None:
    store = MemoryStore(clock=lambda: 0)
    dies, lives = await store.grant_lease(1_000), await store.grant_lease(1_000)
    store.advance(900)
    await store.keep_alive(lives)
    store.advance(900)
    assert [lease.lease for lease in store.machine.leases] == [lives]
    with pytest.raises(LeaseNotFound):
        await store.put("/a", b"", lease=dies)


async def test_a_minimum_revision_is_waited_for() -> None:
    store = MemoryStore(clock=lambda: 0)
    waiting = asyncio.ensure_future(store.get("/a", min_revision=2))
    await asyncio.sleep(0)
    await store.put("/a", b"1")
    await asyncio.sleep(0)
    assert not waiting.done()
    await store.put("/a", b"2")
    found = await waiting
    assert found is not None
    assert found.value == b"2"


async def test_waiting_for_a_revision_is_bounded() -> None:
    store = MemoryStore(clock=lambda: 0)
    with pytest.raises(Unavailable):
        await store.range("/", min_revision=5, timeout=0.01)
    for _ in range(5):
        await store.put("/a", b"")
    assert (await store.range("/", min_revision=5)).revision == 5


async def test_refusals_are_typed_errors() -> None:
    store = MemoryStore(clock=lambda: 0, limits=Limits(max_total_bytes=10))
    with pytest.raises(NoSpace):
        await store.put("/a", b"x" * 10)
    with pytest.raises(InvalidRequest):
        await store.allocate_id("/a", count=0)
    with pytest.raises(InvalidRequest):
        await store.range("a")


async def test_closing_ends_watches() -> None:
    async with MemoryStore() as store:
        watch = store.watch("/")
        await store.grant_lease(500)
    assert [batch async for batch in watch] == []
