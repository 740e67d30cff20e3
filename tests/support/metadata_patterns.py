"""The six things that Danube used etcd for, as stories that any ``MetadataStore`` must tell.

Written against the protocol only. A test module imports everything from here and provides a fixture
``harness``; ``MemoryStore`` and the Raft store run the very same functions (a store for tests with
other semantics would test itself).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import pytest

from sava.metadata.commands import Compare, Delete, DeleteResult, Get, KeyValue, Put, Relation, Target
from sava.metadata.errors import Deposed, InvalidRequest, LeaseNotFound
from sava.metadata.store import MetadataStore, RangeResult
from sava.metadata.watch import Watch, WatchBatch
from tests.support.waiting import PATIENCE_S


class Harness(Protocol):
    """What the stories need to know about the store under test."""

    @property
    def stores(self) -> Sequence[MetadataStore]:
        """The store as seen from each node; stories use the first and the last, which may be the same."""
        ...

    @property
    def ttl_ms(self) -> int:
        """A lease time that this harness can wait for."""
        ...

    @property
    def term(self) -> int:
        """Of the leader."""
        ...

    async def pass_time(self, ms: int) -> None:
        """Let ``ms`` pass for leases (a real store simply waits)."""
        ...


def absent(key: str) -> Compare:
    return Compare(key, Target.VERSION, Relation.EQUAL, 0)


def unchanged(kv: KeyValue) -> Compare:
    return Compare(kv.key, Target.MOD_REVISION, Relation.EQUAL, kv.mod_revision)


async def next_batch(watch: Watch) -> WatchBatch:
    async with asyncio.timeout(PATIENCE_S):
        return await anext(watch)


async def eventually(harness: Harness, holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await holds():
            await harness.pass_time(harness.ttl_ms // 4)
            await asyncio.sleep(0)


# -- P1: broker registration and liveness ----------------------------------------------------------------


async def test_p1_a_broker_registers_lives_by_keep_alive_and_its_death_is_seen(harness: Harness) -> None:
    store, other = harness.stores[0], harness.stores[-1]
    key = "/cluster/register/1"
    watch = other.watch("/cluster/register/")
    lease = await store.grant_lease(harness.ttl_ms)
    assert (await store.txn([absent(key)], [Put(key, b"incarnation 1", lease)])).succeeded
    assert (await next_batch(watch)).events[0].kv == await other.get(key)
    for _ in range(6):
        await harness.pass_time(harness.ttl_ms // 2)
        assert await other.keep_alive(lease) == harness.ttl_ms
    assert await other.get(key) is not None

    async def is_gone() -> bool:
        return await store.get(key) is None

    await eventually(harness, is_gone)
    death = (await next_batch(watch)).events[0]
    assert (death.key, death.kv) == (key, None)
    assert death.prev is not None
    assert death.prev.value == b"incarnation 1"
    watch.close()


async def test_p1_a_broker_that_slept_through_its_lease_must_register_anew(harness: Harness) -> None:
    """Danger: a paused broker simply puts its key again and goes on as the owner of its topics."""
    store = harness.stores[0]
    key = "/cluster/register/1"
    lease = await store.grant_lease(harness.ttl_ms)
    await store.put(key, b"incarnation 1", lease=lease)

    async def is_gone() -> bool:
        return await store.get(key) is None

    await eventually(harness, is_gone)
    with pytest.raises(LeaseNotFound) as gone:
        await harness.stores[-1].keep_alive(lease)
    assert gone.value.lease == lease
    with pytest.raises(LeaseNotFound):
        await store.put(key, b"incarnation 1", lease=lease)
    assert await store.get(key) is None
    fresh = await store.grant_lease(harness.ttl_ms)
    assert fresh != lease
    assert (await store.txn([absent(key)], [Put(key, b"incarnation 2", fresh)])).succeeded


async def test_p1_a_clean_goodbye_removes_the_registration_at_once(harness: Harness) -> None:
    store = harness.stores[0]
    lease = await store.grant_lease(harness.ttl_ms)
    await store.txn([], [Put("/cluster/register/2", b"", lease), Put("/cluster/load/2", b"", lease)])
    await store.put("/cluster/state/2", b"active")
    await store.revoke_lease(lease)
    assert [kv.key for kv in (await harness.stores[-1].range("/cluster/")).kvs] == ["/cluster/state/2"]
    with pytest.raises(LeaseNotFound):
        await store.revoke_lease(lease)


# -- P2: leader election is gone; what it protected is fenced --------------------------------------------


async def test_p2_what_only_the_leader_may_do_carries_its_term(harness: Harness) -> None:
    store = harness.stores[0]
    with pytest.raises(Deposed):
        await store.txn([], [Put("/topics/d/t/ownership", b"broker 9")], fence_term=harness.term + 1_000_000)
    assert await store.get("/topics/d/t/ownership") is None
    await store.txn([], [Put("/topics/d/t/ownership", b"broker 1")], fence_term=harness.term)
    assert await store.get("/topics/d/t/ownership") is not None


async def test_p2_a_claim_by_lease_has_one_holder_and_passes_on(harness: Harness) -> None:
    """For work that is not the Raft leader's (pipelines): create if absent, with a lease."""
    key = "/pipelines/p/claim"

    async def claim(store: MetadataStore, name: bytes) -> bool:
        lease = await store.grant_lease(harness.ttl_ms)
        return (await store.txn([absent(key)], [Put(key, name, lease)])).succeeded

    stores = [harness.stores[i % len(harness.stores)] for i in range(5)]
    won = await asyncio.gather(*(claim(store, b"%d" % i) for i, store in enumerate(stores)))
    assert sum(won) == 1
    holder = await harness.stores[-1].get(key)
    assert holder is not None
    assert holder.value == b"%d" % won.index(True)

    async def passes_on() -> bool:
        return await claim(harness.stores[-1], b"next")

    await eventually(harness, passes_on)


# -- P3: metadata of topics, namespaces, schemas ---------------------------------------------------------


async def test_p3_create_read_update_delete(harness: Harness) -> None:
    store, other = harness.stores[0], harness.stores[-1]
    created = await store.put("/namespaces/shop/policy", b"1")
    updated = await other.put("/namespaces/shop/policy", b"2")
    assert updated.revision == created.revision + 1
    assert await store.get("/namespaces/shop/policy") == KeyValue(
        "/namespaces/shop/policy", b"2", created.revision, updated.revision, 2
    )
    deleted = await store.delete("/namespaces/shop/policy")
    assert isinstance(deleted.results[0], DeleteResult)
    assert [kv.value for kv in deleted.results[0].prev] == [b"2"]
    assert await other.get("/namespaces/shop/policy") is None
    assert (await other.delete("/namespaces/shop/policy")).revision == deleted.revision


async def test_p3_a_local_read_with_the_revision_of_a_write_sees_it(harness: Harness) -> None:
    """S70: written through one node, read at another."""
    written = await harness.stores[0].put("/a", b"1")
    other = harness.stores[-1]
    seen = await other.get("/a", linearizable=False, min_revision=written.revision)
    assert seen is not None
    assert other.local.get("/a") == seen
    assert other.local.revision >= written.revision
    assert other.local.range("/").kvs == (seen,)


async def test_p3_creating_a_topic_is_one_transaction(harness: Harness) -> None:
    """Of two that create the same topic one wins, and no reader sees half of it."""
    store = harness.stores[0]
    keys = ["/topics/d/t/ownership", "/topics/d/t/schema", "/topics/d/t/spec"]

    async def create(name: bytes) -> bool:
        result = await store.txn([absent(keys[2])], [Put(key, name) for key in keys], [Get(keys[2])])
        return result.succeeded

    won = await asyncio.gather(*(create(b"%d" % i) for i in range(4)))
    assert sum(won) == 1
    listed = await harness.stores[-1].range("/topics/d/t/")
    assert [(kv.key, kv.value) for kv in listed.kvs] == [(key, b"%d" % won.index(True)) for key in keys]
    assert len({kv.mod_revision for kv in listed.kvs}) == 1


async def test_p3_ranges_page_and_prefixes_end_at_segments(harness: Harness) -> None:
    store = harness.stores[0]
    await store.txn(
        [], [Put(f"/topics/d/{i:02}/spec", b"") for i in range(25)] + [Put("/topics/dd/x/spec", b"")]
    )
    found: list[str] = []
    more = True
    while more:
        page = await store.range("/topics/d/", limit=10, start_after=found[-1] if found else "")
        found += [kv.key for kv in page.kvs]
        more = page.more
    assert found == [f"/topics/d/{i:02}/spec" for i in range(25)]
    deleted = await store.delete_prefix("/topics/d/")
    assert isinstance(deleted.results[0], DeleteResult)
    assert len(deleted.results[0].prev) == 25
    assert [kv.key for kv in (await store.range("/")).kvs] == ["/topics/dd/x/spec"]


async def test_p3_what_breaks_a_rule_is_refused_by_type(harness: Harness) -> None:
    store = harness.stores[-1]
    for key in ("a", "/a/", "/a//b", "/a\0", "/" + "x" * 5_000):
        with pytest.raises(InvalidRequest):
            await store.put(key, b"")
    with pytest.raises(InvalidRequest):
        await store.put("/a", b"x" * (2 << 20))
    with pytest.raises(InvalidRequest):
        await store.delete_prefix("/a")
    with pytest.raises(InvalidRequest):
        await store.grant_lease(1)
    assert (await store.range("/")).kvs == ()


async def test_p3_many_topics_are_created_and_deleted_quickly(harness: Harness) -> None:
    """100+ topics, rapid create/delete cycles."""
    store = harness.stores[0]
    for _ in range(2):
        await asyncio.gather(*(store.put(f"/topics/d/{i:03}/spec", b"x") for i in range(120)))
        assert len((await store.range("/topics/d/")).kvs) == 120
        await store.delete_prefix("/topics/d/")
        assert (await store.range("/topics/d/")).kvs == ()


# -- P4: watches -----------------------------------------------------------------------------------------


async def test_p4_every_node_sees_every_change_in_order_and_whole(harness: Harness) -> None:
    """Two watchers of one prefix are two; neither misses anything between reading and watching (I22)."""
    store = harness.stores[0]
    start = (await store.range("/topics/")).revision
    watches = [node.watch("/topics/", from_revision=start + 1) for node in harness.stores for _ in range(2)]
    await store.put("/topics/a", b"1")
    await store.put("/elsewhere", b"")
    await store.txn([], [Put("/topics/b", b"1"), Delete("/topics/a"), Put("/topics/c", b"1")])
    for watch in watches:
        first, second = await next_batch(watch), await next_batch(watch)
        assert [event.key for event in first.events] == ["/topics/a"]
        assert [(event.key, event.kv is None) for event in second.events] == [
            ("/topics/a", True),
            ("/topics/b", False),
            ("/topics/c", False),
        ]
        assert {event.revision for event in second.events} == {second.revision}
        assert second.revision == first.revision + 2
        watch.close()


async def test_p4_reading_then_watching_from_there_misses_nothing(harness: Harness) -> None:
    """What is written between the two is delivered."""
    store = harness.stores[0]
    await store.put("/topics/a", b"1")
    read = await harness.stores[-1].range("/topics/")
    await store.put("/topics/b", b"1")
    watch = harness.stores[-1].watch("/topics/", from_revision=read.revision + 1)
    assert [event.key for event in (await next_batch(watch)).events] == ["/topics/b"]
    watch.close()


class Copy:
    """Of the keys under a prefix: read once, then followed."""

    def __init__(self, found: RangeResult, watch: Watch) -> None:
        self.kvs = {kv.key: kv for kv in found.kvs}
        self._watch = watch

    @classmethod
    async def of(cls, store: MetadataStore, prefix: str) -> Copy:
        found = await store.range(prefix)
        return cls(found, store.watch(prefix, from_revision=found.revision + 1))

    async def follow(self, last: RangeResult) -> None:
        """Until it is what was read last."""
        while self.kvs != {kv.key: kv for kv in last.kvs}:
            for event in (await next_batch(self._watch)).events:
                if event.kv is None:
                    del self.kvs[event.key]
                else:
                    self.kvs[event.key] = event.kv


async def test_p4_a_copy_of_a_prefix_follows_concurrent_writers(harness: Harness) -> None:
    store = harness.stores[0]
    await store.put("/topics/old", b"0")
    copy = await Copy.of(harness.stores[-1], "/topics/")
    assert list(copy.kvs) == ["/topics/old"]

    async def write(writer: int) -> None:
        for i in range(10):
            await store.put(f"/topics/{i % 4}", b"%d %d" % (writer, i))
            if i % 3 == 0:
                await store.delete(f"/topics/{(i + writer) % 4}")

    await asyncio.gather(*(write(writer) for writer in range(3)))
    await copy.follow(await store.range("/topics/"))


# -- P5: load reports and coordination -------------------------------------------------------------------


async def test_p5_load_reports_are_level_triggered_the_last_one_counts(harness: Harness) -> None:
    store = harness.stores[0]
    copy = await Copy.of(harness.stores[-1], "/cluster/load/")
    for round_ in range(5):
        for broker in range(4):
            await store.put(f"/cluster/load/{broker}", b"%d" % round_)
    await store.delete("/cluster/load/3")
    await copy.follow(await store.range("/cluster/load/"))
    assert {key: kv.value for key, kv in copy.kvs.items()} == {f"/cluster/load/{i}": b"4" for i in range(3)}


# -- P6: storage metadata --------------------------------------------------------------------------------


async def test_p6_segments_are_registered_as_one_contiguous_chain(harness: Harness) -> None:
    """Several registrars with the same next segment: one wins each time; no gap, no overlap."""
    state_key = "/storage/topics/d/t/state"
    await harness.stores[0].put(state_key, b"0")

    async def register(store: MetadataStore, name: int) -> None:
        done = 0
        while done < 5:
            state = await store.get(state_key)
            assert state is not None
            start = int(state.value)
            end = start + 1 + name
            descriptor = Put(f"/storage/topics/d/t/objects/{start:06}", b"%d" % end)
            done += (await store.txn([unchanged(state)], [descriptor, Put(state_key, b"%d" % end)])).succeeded

    stores = [harness.stores[i % len(harness.stores)] for i in range(3)]
    await asyncio.gather(*(register(store, i) for i, store in enumerate(stores)))
    objects = (await harness.stores[-1].range("/storage/topics/d/t/objects/")).kvs
    assert len(objects) == 15
    expected = 0
    for kv in objects:
        assert kv.key.endswith(f"/{expected:06}")
        assert kv.version == 1
        expected = int(kv.value)


async def test_p6_schema_ids_are_unique_and_grow_under_a_race(harness: Harness) -> None:
    """Schema id race: read-modify-write gives two schemas one id."""
    stores = [harness.stores[i % len(harness.stores)] for i in range(30)]
    ids = await asyncio.gather(*(store.allocate_id("/schemas/next_id") for store in stores))
    assert sorted(ids) == list(range(1, 31))
    first = await harness.stores[-1].allocate_id("/schemas/next_id", count=10)
    assert (first, await harness.stores[0].allocate_id("/schemas/next_id")) == (31, 41)
