"""The leader ends the lease of a broker that is gone: that lease, in that term, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sava.cluster import records
from sava.cluster.registration import Evictor
from sava.metadata.errors import Deposed, LeaseNotFound, Unavailable
from sava.metadata.suspicion import Note, Sign
from sava.raft.types import NodeId
from sava.supervisor import Supervisor
from tests.support.waiting import until
from tests.unit.cluster.fakes import FaultyStore

KEY = records.registration_key(2)


@pytest.fixture
async def store() -> AsyncIterator[FaultyStore]:
    async with FaultyStore() as store:
        yield store


def confirmed(lease: int, term: int) -> Note:
    return Note("confirmed", NodeId(2), Sign.REFUSED, lease, term, 500, 1500)


async def registered(store: FaultyStore) -> int:
    lease = await store.grant_lease(60_000)
    await store.put(KEY, b"{}", lease=lease)
    return lease


async def evicted(store: FaultyStore, note: Note) -> Evictor:
    evictor = Evictor(store)
    await evictor._evict(note)
    return evictor


async def test_the_registration_of_a_confirmed_suspect_is_gone(store: FaultyStore) -> None:
    lease = await registered(store)
    evictor = Evictor(store)
    evictor.start(Supervisor())
    evictor.confirmed(confirmed(lease, 1))
    await until(lambda: store.local.get(KEY) is None)
    await evictor.close()
    assert evictor.evictions == {"refused": 1}


async def test_a_broker_that_registered_again_keeps_its_registration(store: FaultyStore) -> None:
    """2 dies, the leader doubts its lease, 2 is back under another one, then the write comes."""
    former = await registered(store)
    await store.revoke_lease(former)
    latter = await registered(store)
    evictor = await evicted(store, confirmed(former, 1))
    kv = store.local.get(KEY)
    assert kv is not None
    assert kv.lease == latter
    assert not evictor.evictions


async def test_a_deposed_leader_evicts_no_one(store: FaultyStore) -> None:
    """The memory store applies in term 1; the suspicion was confirmed in term 9."""
    lease = await registered(store)
    with pytest.raises(Deposed):
        await store.revoke_lease(lease, fence_term=9)
    evictor = await evicted(store, confirmed(lease, 9))
    assert store.local.get(KEY) is not None
    assert not evictor.evictions


@pytest.mark.parametrize("error", [Unavailable("no quorum"), TimeoutError(), LeaseNotFound(7)])
async def test_a_write_that_fails_is_left_to_the_next_suspicion(
    store: FaultyStore,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log tells of it all the same: the write may have been applied although its answer is an error."""
    lease = await registered(store)

    async def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(store, "revoke_lease", fail)
    evictor = await evicted(store, confirmed(lease, 1))
    assert not evictor.evictions
    assert store.local.get(KEY) is not None
    assert any("evicting" in each and "sign=refused" in each for each in caplog.messages)
