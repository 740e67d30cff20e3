"""Segments: ranges of a topic as Parquet objects, written once and read in parts.

Writing: encode in a worker thread, put if absent under a name that no other writer uses, read the object
back, describe it. Only then may the catalog name it, and only then may the journal forget the messages: an
object store that answered 'done' and kept something else is found out while the messages are still elsewhere.

Reading: the footer by one ranged read (its size is in the descriptor), kept in a bounded cache; then only the
row groups that hold the wanted offsets, each in one range. The first is fetched alone, so that a reader who
wants one message waits for and pays for little; for one that comes back for more, windows of up to
``WINDOW_BYTES`` are fetched and decoded, two side by side, while it works on the last. These windows are what
a reader holds in memory.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Executor
from itertools import islice
from typing import Any, Final

import google_crc32c
import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from sava.records import STORED_COLUMNS, RecordBatch
from sava.storage import segment_file
from sava.storage.errors import ObjectTruncated, SegmentCorrupt
from sava.storage.keys import ObjectName, check_topic, object_key
from sava.storage.objectstore import ObjectStore
from sava.storage.segment_file import Footer, RowGroup
from sava.storage.types import Segment, TopicKey
from sava.tasks import cancelled

WINDOW_BYTES: Final = 4 << 20
"""Of messages before compression, fetched and decoded together."""
WINDOWS_AHEAD: Final = 3
"""The one that the caller works on, and two that are fetched and decoded meanwhile."""
CHUNK_BYTES: Final = 4 << 20
"""Read at a time when a whole object is checked."""
SMALL_BYTES: Final = 64 << 10
"""An object up to this size is checked with one request and on the event loop: some ten microseconds."""
FOOTER_COST: Final = 16
"""What a parsed footer takes in memory, in multiples of its bytes in the object (measured: 7 for large
segments, 16 for small ones)."""


async def write_segment(
    store: ObjectStore,
    topic: TopicKey,
    *,
    epoch: int,
    batches: Sequence[RecordBatch],
    created_ms: int | None = None,
    threads: Executor | None = None,
) -> Segment:
    """Turn contiguous assigned batches into one Parquet object (encoding off the event loop), put it if
    absent, read it back (size and checksum) and describe it. Nothing refers to it yet: see
    ``Catalog.register``. Retention counts its age from ``created_ms``; None: from now, by the later of the
    broker's clock and the store's (``expiry_clock``).

    Raises ObjectStoreUnavailable, SegmentCorrupt (the store has not kept what it was given), DataGap. The
    first two may leave an orphan; trying again writes another object."""
    check_topic(topic)
    loop = asyncio.get_running_loop()
    encoded = await loop.run_in_executor(threads, segment_file.encode, topic, epoch, batches)
    del batches
    name = ObjectName(topic, encoded.start, encoded.end, epoch, secrets.token_hex(8))
    segment = Segment(
        topic_id=topic.topic_id,
        start=encoded.start,
        end=encoded.end,
        epoch=epoch,
        key=object_key(name),
        size=encoded.size,
        crc32c=encoded.crc32c,
        footer_size=encoded.footer_size,
        footer_crc32c=encoded.footer_crc32c,
        min_publish_time=encoded.min_publish_time,
        max_publish_time=encoded.max_publish_time,
        created_ms=time.time_ns() // 1_000_000 if created_ms is None else created_ms,
        raw_bytes=encoded.raw_bytes,
    )
    await store.put_new(segment.key, encoded.chunks)
    stored_ms = await _check_bytes(store, segment)
    if created_ms is None and stored_ms > segment.created_ms:
        return msgspec.structs.replace(segment, created_ms=stored_ms)
    return segment


async def _check_bytes(store: ObjectStore, segment: Segment) -> int:
    """Read the object, a chunk at a time, and compare size and checksum; when it was stored, by the store's
    clock. A small one takes one request: of a thousand small segments the requests are most of the work."""
    if segment.size <= SMALL_BYTES:
        data, info = await store.get_with_info(segment.key)
        if len(data) != segment.size:
            raise SegmentCorrupt(f"{segment.key} has {len(data)} bytes instead of {segment.size}")
        if google_crc32c.value(data) != segment.crc32c:
            raise SegmentCorrupt(f"{segment.key}: the checksum does not match")
        return info.modified_ms
    info = await store.head(segment.key)
    size = info.size
    if size != segment.size:
        raise SegmentCorrupt(f"{segment.key} has {size} bytes instead of {segment.size}")
    crc = 0
    for start in range(0, size, CHUNK_BYTES):
        chunk = await _fetch(store, segment, start, min(start + CHUNK_BYTES, size))
        crc = await asyncio.to_thread(google_crc32c.extend, crc, chunk)
    if crc != segment.crc32c:
        raise SegmentCorrupt(f"{segment.key}: the checksum does not match")
    return info.modified_ms


async def _fetch(store: ObjectStore, segment: Segment, start: int, end: int) -> bytes:
    try:
        return await store.get_range(segment.key, start, end)
    except ObjectTruncated as error:
        raise SegmentCorrupt(f"{segment.key} has {error.size} bytes instead of {segment.size}") from error


class SegmentReader:
    """Reads ranges of segments; keeps a bounded cache of footers. Only the needed row groups are fetched.

    Owned by one event loop; any number of reads may run at once. ``ObjectMissing`` means that the object
    was deleted since its descriptor was read (or lost: read the catalog again to know)."""

    def __init__(self, store: ObjectStore, *, footer_cache_bytes: int = 16 << 20) -> None:
        self._store = store
        self._footers: OrderedDict[str, tuple[Footer, int]] = OrderedDict()
        self._footer_bytes = 0
        self._footer_cache_bytes = footer_cache_bytes

    async def read(self, segment: Segment, start: int, end: int) -> AsyncGenerator[RecordBatch, None]:
        """Batches that cover exactly ``max(start, segment.start) .. min(end, segment.end)``, in order, each
        about ``BATCH_BYTES``. Raises SegmentCorrupt, ObjectStoreUnavailable, ObjectMissing."""
        start, end = max(start, segment.start), min(end, segment.end)
        if start >= end:
            return
        footer = await self._footer(segment)
        windows = _windows(footer.covering(start, end))
        ahead: deque[asyncio.Task[list[RecordBatch]]] = deque()

        def fetch(count: int) -> None:
            for window in islice(windows, count - len(ahead)):
                reading = self._read_window(segment, footer, window, start, end)
                ahead.append(asyncio.create_task(reading))

        try:
            fetch(1)
            while ahead:
                for batch in await ahead[0]:
                    yield batch
                    fetch(WINDOWS_AHEAD)
                ahead.popleft()
                fetch(WINDOWS_AHEAD)
        finally:
            await cancelled(*ahead)

    async def offset_at(self, segment: Segment, publish_time: int) -> int | None:
        """The first offset in the segment whose publish time is >= ``publish_time`` (µs), or None. Reads one
        row group."""
        if segment.max_publish_time < publish_time:
            return None
        footer = await self._footer(segment)
        group = next((each for each in footer.row_groups if each.max_publish_time >= publish_time), None)
        if group is None:
            raise SegmentCorrupt(f"{segment.key}: no message is as late as its descriptor says")
        data = await _fetch(self._store, segment, group.first_byte, group.end_byte)
        return await asyncio.to_thread(_find_time, segment, footer, group, data, publish_time)

    async def verify(self, segment: Segment) -> None:
        """Read all of it: checksum, contiguous offsets, counts, times. Raises SegmentCorrupt naming what
        differs."""
        await _check_bytes(self._store, segment)
        footer = await self._footer(segment)
        times: list[tuple[int, int]] = []
        for group in footer.row_groups:
            data = await _fetch(self._store, segment, group.first_byte, group.end_byte)
            times.append(await asyncio.to_thread(_verify_group, segment, footer, group, data))
        found = min(earliest for earliest, _ in times), max(latest for _, latest in times)
        if found != (segment.min_publish_time, segment.max_publish_time):
            raise SegmentCorrupt(f"{segment.key}: publish times {found} differ from its descriptor's")

    async def _read_window(
        self, segment: Segment, footer: Footer, window: Sequence[RowGroup], start: int, end: int
    ) -> list[RecordBatch]:
        first, last = window[0].first_byte, window[-1].end_byte
        data = await _fetch(self._store, segment, first, last)
        return await asyncio.to_thread(_decode, segment, footer, window, data, start, end)

    async def _footer(self, segment: Segment) -> Footer:
        held = self._footers.get(segment.key)
        if held is not None:
            self._footers.move_to_end(segment.key)
            return held[0]
        if not 0 < segment.footer_size <= segment.size:
            raise SegmentCorrupt(f"{segment.key}: a footer of {segment.footer_size} bytes in {segment.size}")
        data = await _fetch(self._store, segment, segment.size - segment.footer_size, segment.size)
        footer = await asyncio.to_thread(segment_file.parse_footer, segment, data)
        if segment.key not in self._footers:
            self._footers[segment.key] = footer, len(data) * FOOTER_COST
            self._footer_bytes += len(data) * FOOTER_COST
        while self._footer_bytes > self._footer_cache_bytes:
            self._footer_bytes -= self._footers.popitem(last=False)[1][1]
        return footer


def _windows(groups: Sequence[RowGroup]) -> Iterator[Sequence[RowGroup]]:
    """Row groups that are fetched together: as many as were before, within WINDOW_BYTES."""
    position = 0
    while position < len(groups):
        end, raw_bytes = position, 0
        while end < min(position + max(position, 1), len(groups)):
            raw_bytes += groups[end].raw_bytes
            if end > position and raw_bytes > WINDOW_BYTES:
                break
            end += 1
        yield groups[position:end]
        position = end


# -- in a worker thread ------------------------------------------------------------------


def _decode(
    segment: Segment, footer: Footer, window: Sequence[RowGroup], data: bytes, start: int, end: int
) -> list[RecordBatch]:
    file = segment_file.open_part(segment, footer, window[0].first_byte, data)
    return [
        batch for group in window for batch in segment_file.read_batches(segment, file, group, start, end)
    ]


def _find_time(segment: Segment, footer: Footer, group: RowGroup, data: bytes, publish_time: int) -> int:
    file = segment_file.open_part(segment, footer, group.first_byte, data)
    times = segment_file.read_columns(segment, file, group, ["publish_time"]).column(0)
    late = pc.greater_equal(times.cast(pa.int64()), publish_time)
    index: int = pc.index(late, True).as_py()
    if index < 0:
        raise SegmentCorrupt(
            f"{segment.key}: row group {group.number} has earlier times than its statistics say"
        )
    return group.start + index


def _verify_group(segment: Segment, footer: Footer, group: RowGroup, data: bytes) -> tuple[int, int]:
    """Earliest and latest publish time."""
    file = segment_file.open_part(segment, footer, group.first_byte, data)
    offsets = segment_file.read_columns(segment, file, group, ["offset"]).column(0)
    if not offsets.equals(pa.arange(group.start, group.end)):
        raise SegmentCorrupt(
            f"{segment.key}: the offsets of row group {group.number} are not {group.start}..{group.end}"
        )
    unused = [name for name in STORED_COLUMNS if name not in group.columns]
    rows = segment_file.read_columns(segment, file, group, unused)
    if not all(map(_says_nothing, rows.columns)):
        raise SegmentCorrupt(f"{segment.key}: row group {group.number} has values that its statistics deny")
    segment_file.check_constants(segment, file, group)
    headers = [
        each.header for each in segment_file.read_batches(segment, file, group, group.start, group.end)
    ]
    return (
        min(header.min_publish_time for header in headers),
        max(header.max_publish_time for header in headers),
    )


def _says_nothing(array: Any) -> bool:
    """Nulls only, or empty maps: both are a message without attributes."""
    if array.null_count == len(array):
        return True
    return pa.types.is_map(array.type) and bool(array.offsets[0] == array.offsets[-1])
