"""Row groups: the rows of batches of any size, gathered or cut into pieces of about the same size.

Batches come in all sizes. A batch of a million messages is cut by the bytes of its rows; batches of a
thousand are joined. A batch of one or two costs far more as Arrow (ten arrays for one row) than as messages,
so runs of them are read as messages and encoded together: the one place in storage where work is done per
message, because there a message is a batch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from sava.records import RecordBatch, schema_of

ROW_GROUP_BYTES: Final = 1 << 20
"""Before compression, every value written out."""
ROW_GROUP_ROWS: Final = 16_384

TINY: Final = 4
"""Batches of fewer messages than this are cheaper to read as messages."""

_ROW_OVERHEAD: Final = 32
"""Bytes counted for the numbers of a row."""

_COLUMNS: Final = (
    "offset",
    "publish_time",
    "key",
    "payload",
    "attributes",
    "producer",
    "schema_id",
    "schema_version",
    "origin_cluster",
    "origin_offset",
)
"""Those of a segment, in its order."""

SCHEMA: Final = schema_of(_COLUMNS)


def row_groups(batches: Sequence[RecordBatch]) -> Iterator[Any]:
    """Tables that each make one row group of the file. Of all batches, only one group's worth is held as
    rows."""
    group: list[Any] = []
    group_rows = group_bytes = 0
    for rows in chain.from_iterable(map(cut, _rows(batches))):
        size = rows.nbytes
        if group and (group_bytes + size > ROW_GROUP_BYTES or group_rows + len(rows) > ROW_GROUP_ROWS):
            yield _table(group)
            group, group_rows, group_bytes = [], 0, 0
        group.append(rows)
        group_rows, group_bytes = group_rows + len(rows), group_bytes + size
    yield _table(group)


def _table(group: list[Any]) -> Any:
    """The writer goes chunk by chunk, so that many small ones would cost it dearly."""
    return pa.Table.from_batches(group).combine_chunks()


def _rows(batches: Sequence[RecordBatch]) -> Iterator[Any]:
    for is_tiny, run in groupby(batches, lambda batch: len(batch) < TINY):
        if is_tiny:
            yield from map(_merged, _gathered(run))
        else:
            for batch in run:
                yield batch.to_arrow(_COLUMNS)


def _gathered(batches: Iterable[RecordBatch]) -> Iterator[list[RecordBatch]]:
    """Tiny batches in lists that are not worth cutting."""
    gathered: list[RecordBatch] = []
    size = 0
    for batch in batches:
        if gathered and (
            size + batch.header.length > ROW_GROUP_BYTES or len(gathered) * TINY >= ROW_GROUP_ROWS
        ):
            yield gathered
            gathered, size = [], 0
        gathered.append(batch)
        size += batch.header.length
    yield gathered


def _merged(batches: list[RecordBatch]) -> Any:
    """The rows of adjacent batches."""
    first = batches[0].header
    merged = RecordBatch.from_messages(list(chain.from_iterable(batches))).assigned(
        topic_id=first.topic_id, epoch=first.epoch, base_offset=first.base_offset
    )
    return merged.to_arrow(_COLUMNS)


def cut(rows: Any) -> Iterator[Any]:
    """Rows of a large batch in pieces that fit into a row group; a message that alone is larger is a piece of
    its own."""
    if len(rows) <= ROW_GROUP_ROWS and rows.nbytes <= ROW_GROUP_BYTES:
        yield rows
        return
    ends = memoryview(_running_bytes(rows).buffers()[1]).cast("q")
    first, before = 0, 0
    while first < len(rows):
        fitting = bisect_right(ends, before + ROW_GROUP_BYTES, first, len(rows))
        end = max(first + 1, min(fitting, first + ROW_GROUP_ROWS))
        yield rows.slice(first, end - first)
        first, before = end, ends[end - 1]


def _running_bytes(rows: Any) -> Any:
    """For each row the bytes of all rows up to and with it, as they will be once every value is written
    out."""
    sizes = pa.repeat(pa.scalar(_ROW_OVERHEAD, pa.int64()), len(rows))
    for name in ("payload", "key", "origin_cluster", "producer"):
        sizes = pc.add(sizes, pc.fill_null(pc.binary_length(rows.column(name)), 0).cast(pa.int64()))
    running = pc.cumulative_sum(sizes)
    attributes = rows.column("attributes")
    entries = pc.add(pc.binary_length(attributes.keys), pc.binary_length(attributes.items)).cast(pa.int64())
    running_entries = pa.concat_arrays([pa.array([0], pa.int64()), pc.cumulative_sum(entries)])
    ends = pc.take(running_entries, attributes.offsets)
    return pc.add(running, pc.subtract(ends.slice(1), ends[0]))
