"""PrefixCache: always brought up to date, whatever was missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sava.metadata.cache import PrefixCache
from sava.metadata.commands import Event, Put
from sava.metadata.errors import InvalidRequest
from sava.metadata.memory import MemoryStore
from sava.metadata.store import RangeResult
from sava.metadata.watch import HubLimits
from tests.patience import PATIENCE_S


class Interrupted(MemoryStore):
    """Somebody else writes right after each of our range reads, before we can do anything."""

    def __init__(self, **options: Any) -> None:
        super().__init__(clock=lambda: 0, **options)
        self.meanwhile: list[tuple[str, bytes | None]] = []

    async def range(self, prefix: str, **options: Any) -> RangeResult:
        result = await super().range(prefix, **options)
        if self.meanwhile:
            key, value = self.meanwhile.pop(0)
            await (self.delete(key) if value is None else self.put(key, value))
        return result


async def take(changes: AsyncIterator[tuple[Event, ...]]) -> list[tuple[str, bytes | None]]:
    async with asyncio.timeout(PATIENCE_S):
        return [
            (event.key, event.kv.value if event.kv is not None else None) for event in await anext(changes)
        ]


async def test_m24_what_is_written_between_reading_and_watching_is_seen() -> None:
    """Danger: a watch from 'now' that begins after the read loses it, for ever."""
    store = Interrupted()
    await store.put("/t/a", b"1")
    store.meanwhile = [("/t/b", b"1")]
    changes = PrefixCache(store, "/t/").changes()
    assert await take(changes) == [("/t/a", b"1")]
    assert await take(changes) == [("/t/b", b"1")]


async def test_after_a_gap_the_difference_is_made_up_with_deletions() -> None:
    """Danger: a reload shows what exists, never what is gone; a cache without synthesized deletions keeps
    dead topics for ever."""
    store = Interrupted(hub_limits=HubLimits(queue_batches=2, history_revisions=2))
    await store.txn([], [Put(f"/t/{name}", b"1") for name in "abc"])
    cache = PrefixCache(store, "/t/")
    changes = cache.changes()
    assert await take(changes) == [("/t/a", b"1"), ("/t/b", b"1"), ("/t/c", b"1")]
    await store.put("/t/b", b"2")
    assert await take(changes) == [("/t/b", b"2")]
    await store.delete("/t/a")
    for i in range(5):
        await store.put("/t/d", b"%d" % i)
    store.meanwhile = [("/t/c", None)]
    assert await take(changes) == [("/t/a", None), ("/t/d", b"4")]
    assert cache.resyncs == 1
    assert await take(changes) == [("/t/c", None)]
    assert sorted(cache.kvs) == ["/t/b", "/t/d"]


async def test_a_gap_before_the_watch_could_begin_is_a_reload_too() -> None:
    store = Interrupted(hub_limits=HubLimits(history_revisions=1, history_bytes=1))
    await store.put("/t/a", b"1")
    store.meanwhile = [("/t/b", b"1")]
    cache = PrefixCache(store, "/t/")
    changes = cache.changes()
    assert await take(changes) == [("/t/a", b"1")]
    assert await take(changes) == [("/t/b", b"1")]
    assert cache.resyncs == 1


async def test_pages_read_at_different_revisions_make_one_consistent_copy() -> None:
    """Danger: page 1 is older than page 2; a watch from page 2's revision misses what changed in page 1 in
    between."""
    store = Interrupted()
    await store.txn([], [Put(f"/t/{i}", b"1") for i in range(5)])
    store.meanwhile = [("/t/0", b"2"), ("/t/4", b"2"), ("/t/1", None)]
    cache = PrefixCache(store, "/t/", page=2)
    changes = cache.changes()
    assert [key for key, _ in await take(changes)] == [f"/t/{i}" for i in range(5)]
    assert await take(changes) == [("/t/0", b"2")]
    assert await take(changes) == [("/t/1", None)]
    assert {key: kv.value for key, kv in cache.kvs.items()} == {
        "/t/0": b"2",
        "/t/2": b"1",
        "/t/3": b"1",
        "/t/4": b"2",
    }


async def test_a_snapshot_install_is_a_gap() -> None:
    store = Interrupted()
    await store.put("/t/a", b"1")
    cache = PrefixCache(store, "/t/")
    changes = cache.changes()
    await take(changes)
    waiting = asyncio.ensure_future(take(changes))
    await asyncio.sleep(0)
    store.machine.bump_revision(10)
    store.hub.reset(store.machine.revision)
    await asyncio.sleep(0)
    await store.put("/t/b", b"1")
    assert await waiting == [("/t/b", b"1")]
    assert cache.resyncs == 1


async def test_the_copy_is_bounded() -> None:
    store = Interrupted()
    await store.txn([], [Put(f"/t/{i}", b"") for i in range(4)])
    with pytest.raises(InvalidRequest, match="more than the 3 keys"):
        await anext(PrefixCache(store, "/t/", max_keys=3, page=2).changes())
    changes = PrefixCache(store, "/t/", max_keys=4).changes()
    await take(changes)
    await store.put("/t/x", b"")
    with pytest.raises(InvalidRequest):
        await take(changes)
    assert store.hub.watchers == 0


async def test_started_again_it_begins_with_the_difference() -> None:
    store = Interrupted()
    await store.put("/t/a", b"1")
    cache = PrefixCache(store, "/t/")
    first = cache.changes()
    await take(first)
    await first.aclose()  # type: ignore[attr-defined]
    await store.put("/t/b", b"1")
    assert await take(cache.changes()) == [("/t/b", b"1")]


async def test_it_ends_when_the_store_closes() -> None:
    store = Interrupted()
    await store.put("/t/a", b"1")
    changes = PrefixCache(store, "/t/").changes()
    await take(changes)
    store.close()
    assert [events async for events in changes] == []
