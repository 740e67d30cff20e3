"""Merging: many small segments become few large ones, with the same messages at the same offsets.

A topic to which little is published gets a small segment every minute, and another at every move. Each has a
descriptor in the metadata store, which every broker holds in memory, and is an object that costs a request to
whoever reads. So neighbours are joined: eight of a kind become one, eight of these the next larger kind,
until a segment is large enough. How many a topic has depends on its bytes, not on how long they took to come.

**Nobody waits, and nothing is ever missing.** In this order, because each step relies on the one before:

    read the parts -> write_segment (verified) -> Catalog.replace -> delete the parts' objects

    crash before      what is there            afterwards
    replace           parts, orphan object     the same parts are taken again; ``orphans`` removes the object
    delete            merged, orphan objects   ``orphans`` removes them

The descriptors change in one transaction, so there is no revision at which an offset is in none of them or in
two. Objects of parts go at once, not after a while: whoever reads the topic's folder with a glob would count
their messages twice for as long. A reader of Sava's that comes to an object which has gone asks for the
descriptors again (``tiered``), Spark's tasks ask the owner.

**What the sweep must not see.** Between write and replace the new object is an orphan by every sign but its
age. A process that was frozen for hours in between, and that sweeps when it wakes up, would delete the object
and then name it; so a topic is never swept while it is merged (``TopicLog``), and a merge whose owner was
replaced meanwhile fails by its epoch.

**Which ones.** Neighbours of about one size: no part has more than half of what it becomes, so a byte is
written again only when its segment at least doubles. By size before compression, which is what a merge takes
in memory. Where messages are deleted by age, a segment goes with its youngest message, so that one must not
hold a much older one: ``max_span_ms`` (``math.inf``: any).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import Final

from sava.records import RecordBatch
from sava.storage.catalog import Catalog
from sava.storage.errors import SegmentConflict, TopicGone
from sava.storage.objectstore import ObjectStore
from sava.storage.segment import SegmentReader, write_segment
from sava.storage.types import Segment

FEW: Final = 8
"""So many of a kind are left as they are. More of them would mean more descriptors, fewer that messages are
written again more often."""
KINDS: Final = 4
"""Of a size: below 4 KiB, 32 KiB, 256 KiB and 2 MiB, where a merged segment has at most 16 MiB. What is
larger is left as it is: eight of them would not fit."""
MOST: Final = 64
"""Parts of one merge, whose descriptors go in one transaction."""


def worth_merging(
    segments: Sequence[Segment], *, max_bytes: int, max_span_ms: float
) -> Iterator[Sequence[Segment]]:
    """Runs of neighbours, of the smallest kind that has any. ``segments`` are all of a topic, in order."""
    for kind in reversed(range(1, KINDS + 1)):
        runs = [
            run
            for run in _runs(segments, max_bytes // FEW**kind, max_bytes, max_span_ms)
            if len(run) >= FEW and 2 * max(each.raw_bytes for each in run) <= _raw_bytes(run)
        ]
        if runs:
            yield from runs
            return


def _runs(
    segments: Sequence[Segment], below: int, max_bytes: int, max_span_ms: float
) -> Iterator[list[Segment]]:
    """Neighbours that are all smaller than ``below``, as many as make one segment."""
    run: list[Segment] = []
    for segment in segments:
        if not 0 < segment.raw_bytes < below:  # 0: not known
            yield run
            run = []
            continue
        longer = [*run, segment]
        if len(longer) > MOST or _raw_bytes(longer) > max_bytes or _span_ms(longer) > max_span_ms:
            yield run
            longer = [segment]
        run = longer
    yield run


def _raw_bytes(segments: Sequence[Segment]) -> int:
    return sum(segment.raw_bytes for segment in segments)


def _span_ms(segments: Sequence[Segment]) -> int:
    created = [segment.created_ms for segment in segments]
    return max(created) - min(created)


async def merge(
    parts: Sequence[Segment],
    catalog: Catalog,
    store: ObjectStore,
    reader: SegmentReader,
    *,
    epoch: int,
    threads: Executor | None = None,
) -> Segment:
    """Make one segment of neighbours, as the owner of ``epoch``. Needs memory for all their messages.

    Raises SegmentConflict (they are not what the topic has any more), ObjectMissing, Fenced, TopicGone, and
    what keeps the object store or the metadata store from being used. Whatever it raises, every message is in
    one segment; objects that nothing names may be left."""
    batches: list[RecordBatch] = []
    for part in parts:
        batches += [batch async for batch in reader.read(part, part.start, part.end)]
    writing = write_segment(
        store,
        catalog.topic,
        epoch=epoch,
        batches=batches,
        created_ms=max(part.created_ms for part in parts),
        threads=threads,
    )
    del batches  # once encoded, they are not held while the object is on its way
    merged = await writing
    try:
        await catalog.replace(parts, merged, epoch=epoch)
    except (SegmentConflict, TopicGone):
        # It will never be named, by whatever transaction is still on its way, and whoever lists the folder
        # would count its messages too. After any other error it may be named; if it is not, it is swept.
        await store.delete([merged.key])
        raise
    await store.delete([part.key for part in parts])
    return merged
