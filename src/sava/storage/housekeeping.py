"""Housekeeping: what the owner of a topic does with its segments from time to time: drop what retention lets
go, merge small ones, and delete objects that nothing names.

None of it is ever urgent, and none of it changes what the topic's messages are, but for those that retention
lets go.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import islice
from typing import Final

from sava.storage import merging, orphans, retention
from sava.storage.catalog import Catalog
from sava.storage.errors import Fenced
from sava.storage.objectstore import ObjectStore
from sava.storage.retention import RetentionPolicy
from sava.storage.segment import SegmentReader
from sava.storage.tiered import KnownSegments
from sava.storage.types import Segment
from sava.tasks import cancelled

MERGES: Final = 16
"""Of one topic in its turn."""
LOOK: Final = 4096
"""How many of the newest segments are looked at; what is before was looked at when it was new."""
SPANS: Final = 8
"""A merged segment holds messages of an eighth of the time that retention keeps them: that is how much longer
they may be kept."""


class Housekeeping:
    """Of one topic on its owner. Owned by the event loop."""

    def __init__(
        self,
        catalog: Catalog,
        store: ObjectStore,
        reader: SegmentReader,
        segments: KnownSegments,
        *,
        epoch: int,
        segment_bytes: int,
        threads: Executor,
        fence: Callable[[Fenced], None],
    ) -> None:
        self._catalog = catalog
        self._store = store
        self._reader = reader
        self._segments = segments
        self._epoch = epoch
        self._segment_bytes = segment_bytes
        self._threads = threads
        self._fence = fence
        self._is_over = False
        self._merging: asyncio.Task[None] | None = None
        self._new = merging.FEW - 1
        """Segments since it was last looked whether there are many small ones. To begin with, as many as make
        it worthwhile with the next one: what earlier owners have left is not known."""
        self._writing = asyncio.Lock()
        """Objects that nothing names yet are being written: they must not be swept (see ``merging``)."""

    def registered(self) -> None:
        """There is one more segment."""
        self._new += 1

    def close(self) -> None:
        """The topic is closed: begin nothing more, and end what was begun. The lock below is no other
        opening's."""
        self._is_over = True
        if self._merging is not None:
            self._merging.cancel()

    async def enforce_retention(
        self, policy: RetentionPolicy, *, now_ms: int, keep_from: int | None
    ) -> list[Segment]:
        """Drop the segments that the policy lets go (see ``retention.enforce``); returns them."""
        try:
            return await retention.enforce(
                self._catalog, self._store, policy, epoch=self._epoch, now_ms=now_ms, keep_from=keep_from
            )
        except Fenced as error:
            self._fence(error)
            raise
        finally:
            self._segments.forget()  # also after a failure: the descriptors may be gone already

    async def merge_segments(self, policy: RetentionPolicy | None) -> int:
        """Make few of many small segments (see ``merging``); returns how many went into larger ones. Looks at
        nothing before there are enough new ones. Called again, it comes to the larger kinds."""
        if self._new < merging.FEW:
            return 0
        max_age_ms = policy.max_age_ms if policy is not None else None
        runs = merging.worth_merging(
            (await self._segments.all())[-LOOK:],
            max_bytes=self._segment_bytes,
            max_span_ms=math.inf if max_age_ms is None else max_age_ms / SPANS,
        )
        count = 0
        for run in islice(runs, MERGES):
            if self._is_over:
                return count
            self._merging = asyncio.create_task(self._merge(run), name="sava-merge")
            try:
                await asyncio.wait([self._merging])
            finally:
                await cancelled(self._merging)
            if not self._merging.cancelled():
                self._merging.result()
                count += len(run)
        if not count:
            self._new = 0
        return count

    async def _merge(self, run: Sequence[Segment]) -> None:
        async with self._writing:
            await self._merge_alone(run)

    async def _merge_alone(self, run: Sequence[Segment]) -> None:
        try:
            merged = await merging.merge(
                run, self._catalog, self._store, self._reader, epoch=self._epoch, threads=self._threads
            )
        except Fenced as error:
            self._fence(error)
            raise
        except BaseException:
            self._segments.forget()  # they may be others by now
            raise
        self._segments.merged(run, merged)

    async def sweep_orphans(self, *, now_ms: int) -> int:
        """Delete objects that nothing names and nothing can name any more; returns how many went."""
        async with self._writing:
            return len(await orphans.sweep(self._catalog, self._store, now_ms=now_ms))
