"""Watching: everything once, in order, in whole revisions; or an explicit gap."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from sava.metadata.commands import Delete, Event, Put
from sava.metadata.errors import Compacted, InvalidRequest
from sava.metadata.watch import HubLimits, Watch, WatchBatch, Watcher, WatchHub
from tests.unit.metadata.steps import Steps


class WatchedMachine(Steps):
    """A state machine whose events go to a hub."""

    def __init__(self, **limits: int) -> None:
        super().__init__()
        self.hub = WatchHub(limits=HubLimits(**limits))

    def write(self, *keys: str) -> int:
        result = self.txn(*(Put(key, b"v") for key in keys))
        self.hub.publish(self.events[-1])
        return result.revision


def drain(watcher: Watcher) -> list[WatchBatch]:
    batches = []
    while (batch := watcher.take()) is not None:
        batches.append(batch)
    return batches


def seen(watcher: Watcher) -> list[tuple[int, list[str]]]:
    return [(batch.revision, [event.key for event in batch.events]) for batch in drain(watcher)]


def test_s69_two_watchers_of_one_prefix_both_get_everything() -> None:
    """Danger: a registry by prefix, where the second watcher replaces the first, whose stream ends in
    silence."""
    node = WatchedMachine()
    one, two = node.hub.watch("/a/"), node.hub.watch("/a/")
    node.write("/a/1")
    node.write("/a/2")
    assert seen(one) == seen(two) == [(1, ["/a/1"]), (2, ["/a/2"])]
    one.close()
    node.write("/a/3")
    assert seen(two) == [(3, ["/a/3"])]
    assert (seen(one), one.closed, node.hub.watchers) == ([], True, 1)


def test_s69_a_slow_watcher_gets_a_gap_and_the_others_notice_nothing() -> None:
    """Danger: one queue for all; a burst makes everyone lag, and the error is only a line in a log."""
    node = WatchedMachine(queue_batches=3)
    slow, fast = node.hub.watch("/a/"), node.hub.watch("/a/")
    for i in range(4):
        node.write(f"/a/{i}")
        assert len(drain(fast)) == 1
    for _ in range(2):
        with pytest.raises(Compacted) as gap:
            slow.take()
        assert gap.value.floor == 5
    assert (node.hub.watchers, node.hub.gaps) == (1, 1)
    node.write("/a/x")
    assert seen(fast) == [(5, ["/a/x"])]


def test_the_queue_is_bounded_by_bytes_and_one_large_batch_still_passes() -> None:
    node = WatchedMachine(queue_bytes=500)
    watcher = node.hub.watch("/")
    node.write(*(f"/k{i}" for i in range(20)))
    assert len(drain(watcher)) == 1
    node.write("/a")
    node.write("/b")
    node.write("/c")
    with pytest.raises(Compacted):
        watcher.take()


def test_a_watch_ends_at_the_segment_and_a_whole_key_is_one_key() -> None:
    """Danger: watching the keys of broker 1 shows those of broker 12."""
    node = WatchedMachine()
    prefix, key, root = node.hub.watch("/b/1/"), node.hub.watch("/b/1"), node.hub.watch("/")
    node.write("/b/1", "/b/1/x", "/b/12", "/b/12/x")
    assert seen(prefix) == [(1, ["/b/1/x"])]
    assert seen(key) == [(1, ["/b/1"])]
    assert seen(root) == [(1, ["/b/1", "/b/1/x", "/b/12", "/b/12/x"])]


@pytest.mark.parametrize("prefix", ["", "a/", "/a//", "/\0/"])
def test_an_impossible_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidRequest):
        WatchHub().watch(prefix)


def test_events_of_one_transaction_are_never_split() -> None:
    """Danger: a watcher acts between the two halves of a move."""
    node = WatchedMachine(queue_batches=1)
    watcher = node.hub.watch("/t/")
    node.write(*(f"/t/{i:03}" for i in range(200)))
    (batch,) = drain(watcher)
    assert [event.key for event in batch.events] == sorted(f"/t/{i:03}" for i in range(200))


def test_a_watch_begins_in_the_past_where_a_range_was_read() -> None:
    """Danger: what is written between reading and watching is lost."""
    node = WatchedMachine()
    node.write("/a/1")
    read_at = node.machine.revision
    node.write("/a/2")
    node.write("/b/1")
    node.write("/a/3")
    watcher = node.hub.watch("/a/", read_at + 1)
    node.write("/a/4")
    assert seen(watcher) == [(2, ["/a/2"]), (4, ["/a/3"]), (5, ["/a/4"])]


def test_from_now_shows_nothing_of_the_past() -> None:
    node = WatchedMachine()
    node.write("/a")
    watcher = node.hub.watch("/")
    assert watcher.from_revision == 2
    node.write("/b")
    assert seen(watcher) == [(2, ["/b"])]


def test_a_revision_of_the_future_waits_for_it() -> None:
    node = WatchedMachine()
    watcher = node.hub.watch("/", 3)
    for key in "abcd":
        node.write(f"/{key}")
    assert seen(watcher) == [(3, ["/c"]), (4, ["/d"])]


def test_below_the_floor_the_watch_is_refused_at_once() -> None:
    node = WatchedMachine(history_revisions=3)
    for i in range(5):
        node.write(f"/{i}")
    assert node.hub.floor == 3
    with pytest.raises(Compacted) as gap:
        node.hub.watch("/", 2)
    assert gap.value.floor == 3
    assert seen(node.hub.watch("/", 3)) == [(3, ["/2"]), (4, ["/3"]), (5, ["/4"])]


def test_the_history_is_bounded_by_bytes() -> None:
    node = WatchedMachine(history_bytes=1_000)
    for i in range(10):
        node.write(f"/{i}")
    assert node.hub.floor > 5
    node.write(*(f"/many/{i}" for i in range(100)))
    assert node.hub.floor == node.hub.revision + 1 == 12


def test_replaying_a_long_history_does_not_overflow_the_queue() -> None:
    node = WatchedMachine(queue_batches=2)
    for i in range(50):
        node.write(f"/{i}")
    watcher = node.hub.watch("/", 1)
    node.write("/x")
    assert [revision for revision, _ in seen(watcher)] == list(range(1, 52))


def test_s68_after_a_snapshot_install_a_watcher_is_contiguous_or_told() -> None:
    """Story: a follower was away and gets a snapshot at revision 9. Its watchers saw everything to 2; 3..9
    never passed here."""
    node = WatchedMachine()
    behind, future = node.hub.watch("/a/"), node.hub.watch("/a/", 10)
    node.write("/a/1")
    node.write("/a/2")
    node.hub.reset(9)
    with pytest.raises(Compacted) as gap:
        behind.take()
    assert gap.value.floor == 10
    with pytest.raises(Compacted):
        node.hub.watch("/a/", 9)
    node.hub.publish((Event(10, "/a/x", None, None),))
    assert seen(future) == [(10, ["/a/x"])]


def test_s68_a_snapshot_at_the_revision_already_published_loses_nothing() -> None:
    node = WatchedMachine()
    watcher = node.hub.watch("/a/")
    node.write("/a/1")
    node.hub.reset(1)
    node.write("/a/2")
    assert seen(watcher) == [(1, ["/a/1"]), (2, ["/a/2"])]
    with pytest.raises(Compacted):
        node.hub.watch("/a/", 1)


def test_s68_a_store_that_went_back_ends_every_watch() -> None:
    node = WatchedMachine()
    node.write("/a")
    node.write("/b")
    future = node.hub.watch("/", 10)
    node.hub.reset(1)
    with pytest.raises(Compacted):
        future.take()


def test_revisions_must_grow() -> None:
    node = WatchedMachine()
    node.write("/a")
    with pytest.raises(ValueError, match="published after"):
        node.hub.publish((Event(1, "/a", None, None),))
    node.hub.publish(())


def test_a_watcher_may_close_itself_while_it_is_told() -> None:
    node = WatchedMachine()
    watchers = [node.hub.watch("/a/") for _ in range(3)]
    watchers[0].on_ready = watchers[1].close
    node.write("/a/1")
    assert seen(watchers[2]) == [(1, ["/a/1"])]
    assert node.hub.watchers == 2
    watchers[0].close()
    watchers[0].close()


@pytest.mark.parametrize("seed", range(10))
def test_i22_random_watchers_see_growing_revisions_or_a_gap_error(seed: int) -> None:
    rng = Random(seed)
    node = WatchedMachine(queue_batches=6, history_revisions=25)
    prefixes = ("/", "/a/", "/a/b/", "/a/b", "/c/")
    expected: dict[int, list[WatchBatch]] = {}
    got: dict[int, list[WatchBatch]] = {}
    live: list[Watcher] = []
    everything: list[tuple[Event, ...]] = []
    for _ in range(600):
        if rng.random() < 0.05:
            start = max(node.hub.floor, node.machine.revision - rng.randrange(-5, 20))
            live.append(node.hub.watch(rng.choice(prefixes), start))
        keys = rng.sample(("/a/1", "/a/b", "/a/b/1", "/a/b/2", "/c/1", "/d"), rng.randrange(1, 4))
        before = len(node.events)
        node.txn(*(rng.choice((Put(key, b"x"), Delete(key))) for key in keys))
        everything += node.events[before:]
        for events in node.events[before:]:
            node.hub.publish(events)
        for watcher in [watcher for watcher in live if rng.random() < 0.3]:
            try:
                got.setdefault(watcher.id, []).extend(drain(watcher))
            except Compacted:
                live.remove(watcher)
    for watcher in live:
        got.setdefault(watcher.id, []).extend(drain(watcher))
        expected[watcher.id] = [
            WatchBatch(events[0].revision, matching)
            for events in everything
            if events[0].revision >= watcher.from_revision
            and (matching := tuple(event for event in events if _covers(watcher.prefix, event.key)))
        ]
        assert got[watcher.id] == expected[watcher.id], f"seed {seed}"
    assert live


def _covers(prefix: str, key: str) -> bool:
    return key.startswith(prefix) if prefix.endswith("/") else key == prefix


async def test_the_asyncio_face_waits_and_ends() -> None:
    node = WatchedMachine()
    watch = Watch(node.hub.watch("/a/"))
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    node.write("/b")
    node.write("/a/1")
    assert (await waiting).revision == 2
    node.write("/a/2")
    watch.close()
    assert [batch async for batch in watch] == []


async def test_closing_wakes_whoever_waits() -> None:
    node = WatchedMachine()
    watch = Watch(node.hub.watch("/a/"))
    waiting = asyncio.ensure_future(anext(watch, None))
    await asyncio.sleep(0)
    node.hub.close()
    assert await waiting is None
    assert node.hub.watchers == 0


async def test_a_gap_reaches_the_one_who_waits() -> None:
    node = WatchedMachine()
    watch = Watch(node.hub.watch("/a/"))
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    node.hub.reset(5)
    with pytest.raises(Compacted):
        await waiting


async def test_a_cancelled_wait_loses_nothing() -> None:
    node = WatchedMachine()
    watch = Watch(node.hub.watch("/a/"))
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.sleep(0)
    node.write("/a/1")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (await anext(watch)).revision == 1
