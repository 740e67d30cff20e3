"""WatchHub: spreads the events that applying returned to this node's watchers.

The hub is not replicated and not in the snapshot. It holds a ring of recent revisions, bounded by
number and bytes, so that a watcher can begin in the past: a range read at revision R followed by
``watch(prefix, from_revision=R + 1)`` misses nothing that was written in between. What has left the
ring is answered by ``Compacted``, as is a watcher whose queue overflows: it learns, once and by
type, that there is a gap. A silent gap is what made Danube's brokers miss assignments.

All events of one revision travel in one batch and are never split. Watchers are found through the
prefixes of an event's key, one lookup per '/', so the cost of an event does not depend on the number of
watchers that it does not concern; watchers have ids, so two on the same prefix are two.

Owned by one thread (the one that applies). ``Watch`` is the thin asyncio face.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from sava.metadata.commands import Event
from sava.metadata.errors import Compacted
from sava.metadata.machine.limits import DEFAULT_LIMITS, check_key_or_prefix

_EVENT_OVERHEAD = 200
"""Rough bytes of an event without its key and values; keeps a flood of tiny events inside the byte bounds."""


@dataclass(frozen=True, slots=True)
class HubLimits:
    history_revisions: int = 16_384
    history_bytes: int = 32 << 20
    queue_batches: int = 4_096
    queue_bytes: int = 8 << 20
    """Per watcher. What it replays from the history at its start is not counted: the history bounds that."""


DEFAULT_HUB_LIMITS = HubLimits()


@dataclass(frozen=True, slots=True)
class _Revision:
    revision: int
    events: tuple[Event, ...]
    size: int


@dataclass(frozen=True, slots=True)
class WatchBatch:
    """All events of one revision that match, sorted by key; never split."""

    revision: int
    events: tuple[Event, ...]


class Watcher:
    """One watcher: a bounded queue of batches, without asyncio. ``on_ready`` is called whenever ``take`` has
    something new to say."""

    __slots__ = (
        "_bytes",
        "_gap",
        "_hub",
        "_queue",
        "_replay",
        "closed",
        "from_revision",
        "id",
        "on_ready",
        "prefix",
    )

    def __init__(
        self, hub: WatchHub, id_: int, prefix: str, from_revision: int, replay: deque[WatchBatch]
    ) -> None:
        self.id = id_
        self.prefix = prefix
        self.from_revision = from_revision
        self.on_ready: Callable[[], None] | None = None
        self.closed = False
        self._hub = hub
        self._replay = replay
        self._queue: deque[tuple[WatchBatch, int]] = deque()
        self._bytes = 0
        self._gap: int | None = None

    def take(self) -> WatchBatch | None:
        """The next batch, or None when there is none (yet, or any more: see ``closed``). Raises Compacted
        after a gap; the watcher has then ended and says the same again."""
        if self._gap is not None:
            raise Compacted(self._gap)
        if self._replay:
            return self._replay.popleft()
        if not self._queue:
            return None
        batch, size = self._queue.popleft()
        self._bytes -= size
        return batch

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._replay.clear()
            self._queue.clear()
            self._hub.forget(self)
            self._wake()

    def offer(self, batch: WatchBatch, size: int, limits: HubLimits) -> bool:
        """Queue a batch; False when it does not fit. A single batch always fits into an empty queue, however
        large."""
        if self._queue and (
            len(self._queue) >= limits.queue_batches or self._bytes + size > limits.queue_bytes
        ):
            return False
        self._queue.append((batch, size))
        self._bytes += size
        self._wake()
        return True

    def end_at_gap(self, floor: int) -> None:
        """What is still queued is dropped: the reader must reload anyway, and the reload covers it."""
        self._gap = floor
        self._replay.clear()
        self._queue.clear()
        self._bytes = 0
        self._wake()

    def _wake(self) -> None:
        if self.on_ready is not None:
            self.on_ready()


class WatchHub:
    def __init__(self, revision: int = 0, limits: HubLimits = DEFAULT_HUB_LIMITS) -> None:
        self._limits = limits
        self._revision = revision
        self._floor = revision + 1
        self._history: deque[_Revision] = deque()
        self._history_bytes = 0
        self._next_id = 1
        self._by_prefix: dict[str, dict[int, Watcher]] = {}
        self._closed = False
        self.gaps = 0
        """Watchers that were ended by ``Compacted`` so far."""

    @property
    def revision(self) -> int:
        """Last revision published (or jumped to by ``reset``)."""
        return self._revision

    @property
    def floor(self) -> int:
        """The oldest revision from which a watch can begin."""
        return self._floor

    @property
    def watchers(self) -> int:
        return sum(map(len, self._by_prefix.values()))

    def publish(self, events: tuple[Event, ...]) -> None:
        """All events of one revision, sorted by key; revisions grow from call to call."""
        if not events:
            return
        revision = events[0].revision
        if revision <= self._revision:
            raise ValueError(f"revision {revision} published after {self._revision}")
        self._revision = revision
        self._remember(_Revision(revision, events, sum(map(_size, events))))
        if self._by_prefix:
            self._deliver(revision, events)

    def watch(self, prefix: str, from_revision: int = 0) -> Watcher:
        """``prefix`` ends in '/' or is a whole key; 0 = from now on; a revision of the future waits for it.
        Raises Compacted."""
        check_key_or_prefix(prefix, DEFAULT_LIMITS)
        start = from_revision or self._revision + 1
        if start < self._floor:
            raise Compacted(self._floor)
        watcher = Watcher(self, self._next_id, prefix, start, self._replay(prefix, start))
        self._next_id += 1
        self._by_prefix.setdefault(prefix, {})[watcher.id] = watcher
        if self._closed:
            watcher.close()
        return watcher

    def reset(self, revision: int) -> None:
        """A snapshot was installed: the events up to ``revision`` never passed here. A watcher that
        needed one of them gets Compacted; a watcher of the future, and everyone when nothing was skipped,
        continues."""
        skipped = revision != self._revision
        went_back = revision < self._revision
        self._revision = revision
        self._floor = revision + 1
        self._history.clear()
        self._history_bytes = 0
        if skipped:
            for watcher in self._watchers():
                if went_back or watcher.from_revision <= revision:
                    self._end_at_gap(watcher)

    def close(self) -> None:
        """Ends every watch, also those begun later: the node stops."""
        self._closed = True
        for watcher in self._watchers():
            watcher.close()

    def forget(self, watcher: Watcher) -> None:
        group = self._by_prefix.get(watcher.prefix)
        if group is not None and group.pop(watcher.id, None) is not None and not group:
            del self._by_prefix[watcher.prefix]

    def _watchers(self) -> list[Watcher]:
        return [watcher for group in self._by_prefix.values() for watcher in group.values()]

    def _deliver(self, revision: int, events: tuple[Event, ...]) -> None:
        """One batch per watched prefix, shared by its watchers."""
        found: dict[str, list[Event]] = {}
        for event in events:
            for prefix in _prefixes(event.key):
                if prefix in self._by_prefix:
                    found.setdefault(prefix, []).append(event)
        for prefix, matching in found.items():
            batch = WatchBatch(revision, tuple(matching))
            size = sum(map(_size, matching))
            for watcher in tuple(self._by_prefix.get(prefix, {}).values()):
                if revision >= watcher.from_revision and not watcher.offer(batch, size, self._limits):
                    self._end_at_gap(watcher)

    def _end_at_gap(self, watcher: Watcher) -> None:
        self.gaps += 1
        self.forget(watcher)
        watcher.end_at_gap(self._revision + 1)

    def _remember(self, entry: _Revision) -> None:
        history, limits = self._history, self._limits
        history.append(entry)
        self._history_bytes += entry.size
        while len(history) > limits.history_revisions or self._history_bytes > limits.history_bytes:
            oldest = history.popleft()
            self._history_bytes -= oldest.size
            self._floor = oldest.revision + 1
            if not history:
                break

    def _replay(self, prefix: str, start: int) -> deque[WatchBatch]:
        replay: deque[WatchBatch] = deque()
        for entry in reversed(self._history):
            if entry.revision < start:
                break
            matching = tuple(event for event in entry.events if _matches(event.key, prefix))
            if matching:
                replay.appendleft(WatchBatch(entry.revision, matching))
        return replay


class Watch:
    """A watcher to iterate over, for one consumer on the hub's own event loop.

    Batches have strictly growing revisions, without gaps. Raises ``Compacted`` when this watcher fell too far
    behind or the node installed a snapshot: read the range again and watch from its revision + 1."""

    __slots__ = ("_waiter", "_watcher")

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._waiter: asyncio.Future[None] | None = None
        watcher.on_ready = self._on_ready

    def __aiter__(self) -> AsyncIterator[WatchBatch]:
        return self

    async def __anext__(self) -> WatchBatch:
        while (batch := self._watcher.take()) is None:
            if self._watcher.closed:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return batch

    def close(self) -> None:
        """Ends the iteration, also one that is waiting."""
        self._watcher.close()

    def _on_ready(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _prefixes(key: str) -> list[str]:
    """Everything that a watcher of ``key`` can have asked for: '/', '/a/', '/a/b/', and the key itself."""
    prefixes = []
    end = key.find("/")
    while end >= 0:
        prefixes.append(key[: end + 1])
        end = key.find("/", end + 1)
    prefixes.append(key)
    return prefixes


def _matches(key: str, prefix: str) -> bool:
    return key.startswith(prefix) if prefix.endswith("/") else key == prefix


def _size(event: Event) -> int:
    size = _EVENT_OVERHEAD + len(event.key)
    if event.kv is not None:
        size += len(event.kv.value)
    if event.prev is not None:
        size += len(event.prev.value)
    return size
