"""Being there: under a lease, and no longer than can be proved."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from sava.cluster import records
from sava.cluster.records import Registration
from sava.cluster.registration import Registrar
from sava.errors import SavaError
from sava.metadata.errors import NotInitialized, Unavailable
from sava.supervisor import Supervisor
from sava.topics import specs
from tests.support.waiting import PATIENCE_S, OwnTime, until
from tests.unit.cluster.fakes import FaultyStore, failing, never, registration

TTL_MS = 1500
KEY = records.registration_key(1)


@pytest.fixture
async def store() -> AsyncIterator[FaultyStore]:
    async with FaultyStore() as store:
        yield store


async def nothing() -> None:
    pass


def registrar(
    store: FaultyStore, on_lost: Callable[[], Awaitable[None]] = nothing, ttl_ms: int = TTL_MS
) -> Registrar:
    def describe(incarnation: int) -> Registration:
        return registration(1, incarnation)

    return Registrar(store, describe, broker=1, ttl_ms=ttl_ms, on_lost=on_lost)


async def registered(registrar: Registrar) -> int:
    """The incarnation of this life; waits for it."""
    began = asyncio.Event()
    registrar.listen(began.set)
    if registrar._task is None:
        registrar.start(Supervisor())
    async with asyncio.timeout(PATIENCE_S):
        await began.wait()
    return registrar.incarnation


def written(store: FaultyStore) -> Registration | None:
    kv = store.local.get(KEY)
    return None if kv is None else specs.decode(kv, Registration)


async def test_a_broker_is_there_under_its_lease_and_gone_at_its_end(store: FaultyStore) -> None:
    here = registrar(store)
    assert not here.is_registered
    incarnation = await registered(here)
    kv = store.local.get(KEY)
    assert kv is not None
    assert kv.lease == incarnation != 0
    assert written(store) == registration(1, incarnation)
    await here.close()
    assert store.local.get(KEY) is None
    assert not here.is_registered


async def test_it_is_renewed_for_longer_than_its_ttl(store: FaultyStore) -> None:
    lost: list[int] = []

    async def on_lost() -> None:
        lost.append(1)

    here = registrar(store, on_lost)
    incarnation = await registered(here)
    await asyncio.sleep(1.5 * TTL_MS / 1000)  # time itself is what must pass
    assert here.incarnation == incarnation
    assert store.calls["keep_alive"] >= 4
    assert not lost
    await here.close()


async def test_a_lease_that_is_gone_is_told_and_a_new_life_begins(store: FaultyStore) -> None:
    seen: list[bool] = []

    async def on_lost() -> None:
        seen.append(here.is_registered)

    here = registrar(store, on_lost)
    first = await registered(here)
    await store.revoke_lease(first)
    second = await registered(here)
    assert seen == [False]
    assert second not in (0, first)
    assert written(store) == registration(1, second)
    await here.close()


async def test_a_broker_that_was_evicted_drops_its_topics_as_soon_as_it_sees_it(store: FaultyStore) -> None:
    """The others take this broker for gone and end its lease, while it is there: its own copy of the metadata
    shows it, far ahead of its next renewal. From that moment on it does not count as registered."""
    lost = asyncio.Event()

    async def on_lost() -> None:
        lost.set()

    here = registrar(store, on_lost, ttl_ms=600_000)
    first = await registered(here)
    here.look()
    assert here.incarnation == first, "nothing has happened"
    await store.revoke_lease(first)
    here.look()
    assert not here.is_registered
    async with asyncio.timeout(PATIENCE_S):
        await lost.wait()
    await until(lambda: here.incarnation not in (0, first))
    await here.close()


async def test_a_registration_under_another_lease_is_not_this_life_s(store: FaultyStore) -> None:
    here = registrar(store, ttl_ms=600_000)
    await registered(here)
    other = await store.grant_lease(60_000)
    await store.put(KEY, b"{}", lease=other)
    here.look()
    assert not here.is_registered
    await here.close()


async def test_without_an_answer_it_fences_itself_within_a_ttl_of_what_was_sent(
    store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The calls hang, whatever bound they are given: that must not keep the broker from looking at the
    clock."""
    fenced: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    async def on_lost() -> None:
        assert not here.is_registered
        fenced.set_result(time.monotonic())

    here = registrar(store, on_lost)
    began, own = time.monotonic(), OwnTime()
    await registered(here)
    store.before["keep_alive"] = never
    async with asyncio.timeout(PATIENCE_S):
        took = await fenced - began
    assert took >= 0.9 * TTL_MS / 1000
    assert own.seconds <= TTL_MS / 1000 + 2.0
    await here.close()
    assert "not renewed error=TimeoutError: no answer within" in caplog.text


async def test_a_broker_that_does_not_see_the_metadata_any_more_leaves(store: FaultyStore) -> None:
    """Its own replica stands still, for its disk is full; the leader goes on renewing its lease. It would
    keep its topics for as long as that lasts, and could do nothing with them."""
    lost = asyncio.Event()

    async def on_lost() -> None:
        lost.set()

    here = registrar(store, on_lost)
    await registered(here)
    store.before["get"] = failing(Unavailable("it is committed, and this node has not applied it yet"), 1000)
    async with asyncio.timeout(PATIENCE_S):
        await lost.wait()
    assert store.calls["keep_alive"] > 0
    await until(lambda: store.local.get(KEY) is None)
    del store.before["get"]
    await until(lambda: here.is_registered)
    await here.close()


async def test_a_broker_that_leaves_for_falling_behind_ends_its_lease_itself(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: the leader renews the lease, this node's copy of the metadata stands still.

        renewed at the leader ── renewed ── renewed ── TTL without a look at the metadata: topics are dropped
                                               └──────────── the leader's lease ends a TTL after this one

    For the rest of that time no broker has the topics, unless this one revokes the lease when it has dropped
    them; not earlier, since others would take up what is still served here."""
    ended: list[str] = []
    revoke = store.revoke_lease

    async def revoke_lease(lease: int, *, timeout: float = 10.0) -> None:
        ended.append(f"revoked {lease}")
        await revoke(lease, timeout=timeout)

    async def on_lost() -> None:
        ended.append("dropped")

    monkeypatch.setattr(store, "revoke_lease", revoke_lease)
    here = registrar(store, on_lost)
    incarnation = await registered(here)
    store.before["get"] = failing(Unavailable("it is committed, and this node has not applied it yet"), 1000)
    await until(lambda: store.local.get(KEY) is None)
    assert ended == ["dropped", f"revoked {incarnation}"]
    await here.close()


async def test_one_lost_keep_alive_is_no_loss(store: FaultyStore) -> None:
    here = registrar(store, ttl_ms=2000)
    incarnation = await registered(here)
    store.before["keep_alive"] = failing(Unavailable("no leader"), 1)
    await until(lambda: store.calls["keep_alive"] >= 3)
    assert here.incarnation == incarnation
    await here.close()


async def test_an_answer_counts_from_when_the_question_was_sent(store: FaultyStore) -> None:
    """The answer that took 90 ms does not prove 90 ms more."""
    ttl_ms = 2000
    sent: list[float] = []
    deadlines: set[float] = set()

    async def slow() -> None:
        sent.append(time.monotonic())
        await asyncio.sleep(0.09)

    def has_proved_no_more() -> bool:
        deadlines.add(here._deadline)
        assert here._deadline <= sent[-1] + ttl_ms / 1000
        return len(deadlines) == 4

    store.before["keep_alive"] = slow
    here = registrar(store, ttl_ms=ttl_ms)
    await registered(here)
    await until(lambda: len(sent) > 0)
    await until(has_proved_no_more)
    await here.close()


async def test_a_process_that_stood_still_knows_it_before_it_acts(store: FaultyStore) -> None:
    """Stopped for longer than a TTL and continued: the first thing that runs must not believe in the
    registration, although the task that renews it had no turn yet."""
    lost = asyncio.Event()

    async def on_lost() -> None:
        lost.set()

    here = registrar(store, on_lost)
    first = await registered(here)
    time.sleep(TTL_MS / 1000 + 0.1)  # noqa: ASYNC251 (the whole process stands still)
    assert here.incarnation == 0
    await until(lambda: here.incarnation not in (0, first))
    assert lost.is_set()
    await here.close()


async def test_a_broker_back_within_a_ttl_is_never_seen_gone(
    store: FaultyStore,
) -> None:
    before = registrar(store)
    first = await registered(before)
    assert before._task is not None
    before._task.cancel()  # dies: nothing is revoked
    watch = store.watch(records.REGISTRATIONS)
    now = registrar(store)
    second = await registered(now)
    assert second != first
    assert (batch := await anext(watch.__aiter__())).events[0].kv is not None
    assert len(batch.events) == 1
    await until(lambda: store.machine.leases.by_id.get(first) is None)
    assert written(store) == registration(1, second)
    await now.close()
    assert (await anext(watch.__aiter__())).events[0].kv is None


@pytest.mark.parametrize("error", [Unavailable("no quorum"), NotInitialized("no cluster"), TimeoutError()])
async def test_it_waits_for_a_store_that_does_not_answer(store: FaultyStore, error: Exception) -> None:
    store.before["grant_lease"] = failing(error, 2)
    here = registrar(store)
    assert await registered(here)
    await here.close()


async def test_a_registration_whose_answer_was_lost_is_replaced(store: FaultyStore) -> None:
    store.lost["txn"] = 1
    here = registrar(store)
    incarnation = await registered(here)
    assert written(store) == registration(1, incarnation)
    await until(lambda: len(list(store.machine.leases)) == 1)
    await here.close()


async def test_topics_that_cannot_be_dropped_do_not_keep_the_broker_away(
    store: FaultyStore, caplog: pytest.LogCaptureFixture
) -> None:
    async def on_lost() -> None:
        raise SavaError("a disk is slow")

    here = registrar(store, on_lost)
    first = await registered(here)
    await store.revoke_lease(first)
    assert await registered(here) != first
    assert "not all topics could be dropped" in caplog.text
    await here.close()


async def test_it_leaves_also_when_the_lease_cannot_be_revoked(
    store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(lease: int, *, timeout: float = 10.0) -> None:
        raise Unavailable("no leader")

    here = registrar(store)
    await registered(here)
    monkeypatch.setattr(store, "revoke_lease", refuse)
    await here.close()
    assert not here.is_registered
    await until(lambda: store.local.get(KEY) is None)  # expires


async def test_a_registration_that_is_given_up_is_lost_and_the_next_is_new(
    store: FaultyStore,
) -> None:
    """As when the journal that was opened under its number was ended by somebody else."""
    lost: list[bool] = []

    async def on_lost() -> None:
        lost.append(here.is_registered)

    here = registrar(store, on_lost)
    first = await registered(here)
    here.renew("its journal was ended")
    await until(lambda: here.incarnation not in (0, first))
    assert lost == [False]
    assert here.incarnation > first
    assert written(store) == registration(1, here.incarnation)
    await here.close()


async def test_a_leaving_broker_says_so_under_this_lease_and_every_later_one(
    store: FaultyStore,
) -> None:
    """SIGTERM ─▶ leave ─▶ the lease is lost while topics are handed over ─▶ it registers anew: still as one
    that leaves, or it would get topics in its last second."""
    here = registrar(store)
    first = await registered(here)
    assert await here.leave()
    assert here.incarnation == first
    found = written(store)
    assert found is not None
    assert (found.incarnation, found.is_leaving) == (first, True)
    kv = store.local.get(KEY)
    assert kv is not None
    assert kv.lease == first
    await store.revoke_lease(first)
    second = await registered(here)
    found = written(store)
    assert found is not None
    assert (found.incarnation, found.is_leaving) == (second, True)
    await here.close()
    assert store.local.get(KEY) is None


async def test_a_leaving_broker_looks_up_whether_its_notice_was_stored(
    store: FaultyStore,
) -> None:
    """Schedule: the registration says that the broker leaves, and the answer is lost. A broker that takes
    itself for unheard stops at once, with all its topics, while the leader begins to move them."""
    here = registrar(store)
    await registered(here)
    store.lost["txn"] = 1
    assert await here.leave()
    await here.close()


async def test_a_broker_that_is_not_there_cannot_say_that_it_leaves(store: FaultyStore) -> None:
    here = registrar(store)
    assert not await here.leave()
    assert written(store) is None
