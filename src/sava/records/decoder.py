"""Decoder: from the bytes of a body to columns that are safe to touch.

Arrow trusts the buffers it is given: an offset beyond its data reads foreign memory. So no array leaves this
module before its offsets are known to be ascending and within the data, its text to be UTF-8 and its bitmaps
to be long enough; all of that is checked by Arrow's own vectorised ``validate(full=True)``, and none of it
can be switched off. What Arrow cannot know (columns that belong together, limits, no byte left over) is
checked here.

**Decompression.** The size before compression is declared in the header and bounded there; here the bytes
must turn out to be exactly as many. That is not a formality: ``pyarrow.Codec.decompress`` allocates the
declared size and, for LZ4, does not look at how much of it was filled, so that a body declared too long would
show its reader what the allocator had there before. The stream reader counts what it gets. For ZSTD pyarrow
itself refuses a size that is not met.
"""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sava.records.columns import (
    ATTRIBUTE_MAP,
    ORIGIN_CLUSTER,
    ORIGIN_OFFSET,
    PUBLISH_TIME,
    TEXT,
    Column,
    ColumnShape,
    ColumnSpec,
    Encoding,
    empty_columns,
    map_array,
)
from sava.records.errors import BatchCorrupt, BatchTooLarge
from sava.records.header import MAX_BATCH_BYTES, Compression, Header

_INT32 = struct.Struct("<i")
_INT64 = struct.Struct("<q")


class _Cursor:
    """Hands out the buffers of a body one after the other, never past its end."""

    def __init__(self, body: Any) -> None:
        self._body = body
        self.at = 0

    def take(self, size: int) -> Any:
        end = self.at + (size + 7 & ~7)
        if end > self._body.size:
            raise BatchCorrupt(f"the body ends inside a buffer of {size} bytes")
        buffer = self._body.slice(self.at, size)
        self.at = end
        return buffer

    def take_offsets(self, rows: int) -> tuple[Any, int]:
        """An offsets buffer and how much it says there is behind it."""
        buffer = self.take(4 * (rows + 1))
        (first,) = _INT32.unpack_from(buffer, 0)
        (end,) = _INT32.unpack_from(buffer, 4 * rows)
        if first != 0 or end < 0:
            raise BatchCorrupt(f"offsets run from {first} to {end}")
        return buffer, end


def read_columns(body: Any, header: Header) -> tuple[Column, ...]:
    """The columns of an uncompressed body (a pa.Buffer at an address divisible by 8), as views into it."""
    cursor = _Cursor(body)
    columns = tuple([_read_column(cursor, column, header.count) for column in empty_columns(header.layout)])
    if cursor.at != body.size:
        raise BatchCorrupt(f"{body.size - cursor.at} bytes are left after the last column")
    _check_times(columns[PUBLISH_TIME], header)
    _check_attributes(columns[ATTRIBUTE_MAP])
    _check_origin(columns[ORIGIN_CLUSTER], columns[ORIGIN_OFFSET])
    return columns


def publish_time_range(array: Any) -> tuple[int, int]:
    """The earliest and the latest of a column of publish times without nulls."""
    if len(array) == 1:
        (only,) = _INT64.unpack_from(array.buffers()[1], 8 * array.offset)
        return only, only
    extremes = pc.min_max(array.view(pa.int64()))
    return extremes["min"].as_py(), extremes["max"].as_py()


def _read_column(cursor: _Cursor, column: Column, count: int) -> Column:
    spec, encoding, _ = column
    if encoding not in spec.encodings:
        raise BatchCorrupt(f"the column {spec.name} cannot be {encoding.name}")
    if encoding is Encoding.ABSENT:
        return column
    rows = 1 if encoding is Encoding.CONSTANT else count
    start = cursor.at
    validity = cursor.take(rows + 7 >> 3) if encoding is Encoding.NULLABLE else None
    try:
        array = _read_array(cursor, spec, rows, validity)
        array.validate(full=True)
    except pa.ArrowException as error:
        raise BatchCorrupt(f"the column {spec.name} is invalid: {error}") from None
    if encoding is Encoding.CONSTANT and (cursor.at - start) * count > MAX_BATCH_BYTES:
        # Else a few bytes would make Column.to_arrow allocate a million times as many.
        raise BatchTooLarge(f"the constant {spec.name}", (cursor.at - start) * count, MAX_BATCH_BYTES)
    return Column(spec, encoding, array)


def _read_array(cursor: _Cursor, spec: ColumnSpec, rows: int, validity: Any) -> Any:
    if spec.shape is ColumnShape.FIXED:
        return pa.Array.from_buffers(spec.type, rows, [validity, cursor.take(spec.width * rows)])
    if spec.shape is ColumnShape.BINARY:
        return _read_binary(cursor, spec.type, rows, validity)
    offsets, entries = cursor.take_offsets(rows)
    keys = _read_binary(cursor, TEXT, entries, None)
    values = _read_binary(cursor, TEXT, entries, None)
    return map_array(rows, validity, offsets, keys, values)


def _read_binary(cursor: _Cursor, data_type: Any, rows: int, validity: Any) -> Any:
    offsets, size = cursor.take_offsets(rows)
    return pa.Array.from_buffers(data_type, rows, [validity, offsets, cursor.take(size)])


def _check_times(column: Column, header: Header) -> None:
    if publish_time_range(column.array) != (header.min_publish_time, header.max_publish_time):
        raise BatchCorrupt("the header's publish times are not those of the messages")


def _check_attributes(column: Column) -> None:
    """Null rows must be empty: else the same message would have attributes for one reader and none for
    another."""
    if column.encoding is Encoding.NULLABLE and not null_rows_are_empty(column.array):
        raise BatchCorrupt("a message without attributes has entries")


def null_rows_are_empty(attributes: Any) -> bool:
    offsets = attributes.offsets
    lengths = pc.subtract(offsets.slice(1), offsets.slice(0, len(attributes)))
    return not pc.sum(lengths.filter(attributes.is_null())).as_py()


def _check_origin(cluster: Column, offset: Column) -> None:
    """An origin is a cluster and an offset: a message has both or neither."""
    kinds = [
        (column.encoding is Encoding.ABSENT, column.encoding is Encoding.NULLABLE)
        for column in (cluster, offset)
    ]
    if kinds[0] != kinds[1] or (
        cluster.encoding is Encoding.NULLABLE and not cluster.array.is_null().equals(offset.array.is_null())
    ):
        raise BatchCorrupt("origin cluster and origin offset are not given together")


def decompress(codec: Compression, body: Any, size: int) -> Any:
    """A pa.Buffer of exactly ``size`` bytes. Raises BatchCorrupt."""
    try:
        if codec is Compression.ZSTD:
            return pa.Codec("zstd").decompress(body, decompressed_size=size)
        with pa.CompressedInputStream(pa.BufferReader(body), "lz4") as stream:
            plain = stream.read_buffer(size)
            if len(plain) != size or stream.read(1):
                raise BatchCorrupt(f"the body does not decompress to the {size} bytes it declares")
            return plain
    except (OSError, pa.ArrowException) as error:
        raise BatchCorrupt(f"the body does not decompress: {error}") from None
