"""BatchCache: the batches that became durable last, of all topics of a broker, within one bound of bytes.

Consumers that keep up read here and touch no disk. One bound for all topics, because a bound per topic is
either too small for the busy ones or, times ten thousand topics, too large for the machine. What goes first
is what came first, over all topics: a consumer that keeps up needs the newest, and one that does not reads
the journal or the segments, which hold it as well. Nothing is put in by reading, so a consumer that reads
history does not push out what the others need.

Batches of a topic come in the order of their offsets and leave in it, so each topic's part is one gapless
range at its end, and a lookup is a binary search.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final

from sava.records import Compression, RecordBatch
from sava.storage.errors import DataGap

_OBJECT_BYTES: Final = 512
"""What a batch costs besides its bytes: a cache full of single small messages must keep its bound, too."""


class BatchCache:
    """Owned by the event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._order: deque[RecentBatches] = deque()
        """Whose turn it is to lose its oldest batch: one entry for each batch, in order of arrival."""
        self._stale = 0
        """Entries of parts that were dropped. They hold no bytes, so nothing would ever push them out of a
        cache that is not full: of a broker whose topics come and go they are cleared away."""

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def recent(self) -> RecentBatches:
        """A topic's part of the cache."""
        return RecentBatches(self)

    def added(self, part: RecentBatches, size: int) -> None:
        self._order.append(part)
        self._held_bytes += size
        while self._held_bytes > self._max_bytes:
            oldest = self._order.popleft()
            self._stale -= oldest.is_dropped
            self._held_bytes -= oldest.drop_oldest()

    def dropped(self, batches: int, size: int) -> None:
        """A part has gone, and had so much."""
        self._held_bytes -= size
        self._stale += batches
        if 2 * self._stale > len(self._order):
            self._order = deque(part for part in self._order if not part.is_dropped)
            self._stale = 0


class RecentBatches:
    """One topic's newest batches. Owned by the event loop."""

    __slots__ = ("_bases", "_batches", "_cache", "_end", "_first", "_sizes", "is_dropped")

    def __init__(self, cache: BatchCache) -> None:
        self._cache = cache
        self._bases: list[int] = []
        self._batches: list[RecordBatch | None] = []
        self._sizes: list[int] = []
        self._first = 0
        """Index of the oldest batch still held. Those before it are cut off from time to time: removing the
        head of a list one by one would move all the others each time."""
        self._end = -1
        self.is_dropped = False

    def put(self, batch: RecordBatch) -> None:
        """The next batch of the topic."""
        header = batch.header
        base_offset = header.base_offset
        if self._bases and base_offset != self._end:
            raise DataGap(f"offset {base_offset} follows {self._end} in the cache")
        # A compressed batch keeps its columns once a reader has looked at them.
        columns = 0 if header.codec is Compression.NONE else header.body_size
        size = header.length + columns + _OBJECT_BYTES
        self._bases.append(base_offset)
        self._batches.append(batch)
        self._sizes.append(size)
        self._end = header.next_offset
        self._cache.added(self, size)

    def get(self, offset: int) -> RecordBatch | None:
        """The batch that holds the offset, or None."""
        if offset >= self._end:
            return None
        index = bisect_right(self._bases, offset, self._first) - 1
        return self._batches[index] if index >= self._first else None

    def drop_oldest(self) -> int:
        """Let go of the oldest batch; its size."""
        if self.is_dropped:
            return 0
        index = self._first
        self._batches[index] = None
        self._first += 1
        size = self._sizes[index]
        if self._first * 2 > len(self._bases):
            del self._bases[: self._first], self._batches[: self._first], self._sizes[: self._first]
            self._first = 0
        return size

    def drop(self) -> None:
        """The topic is closed."""
        if not self.is_dropped:
            self.is_dropped = True
            sizes = self._sizes[self._first :]
            self._cache.dropped(len(sizes), sum(sizes))
            self._bases, self._batches, self._sizes = [], [], []
            self._first, self._end = 0, -1
