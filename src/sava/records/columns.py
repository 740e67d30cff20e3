"""Columns: what a batch's body is made of.

The body is a row of columns in a fixed order, each in Arrow's own buffer layout and in one of four encodings
that the header's ``layout`` names (two bits per column). Columns whose values are all absent take no bytes,
those whose values are all the same take the bytes of one row. Lengths of buffers are not stored: they follow
from the number of rows and from the last entry of the offsets, so they cannot contradict it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum, IntEnum
from functools import lru_cache
from typing import Any, Final, NamedTuple

import pyarrow as pa

from sava.errors import shown
from sava.records.header import MAX_COUNT

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("sava.records maps little-endian columns into memory and needs a little-endian machine")


class Encoding(IntEnum):
    """How a column's values are laid out."""

    ABSENT = 0
    """Every value is null; no buffer."""
    CONSTANT = 1
    """Every value is the same and not null; the buffers of one row."""
    DENSE = 2
    """No value is null; the buffers of all rows."""
    NULLABLE = 3
    """A validity bitmap, then the buffers of all rows. Null rows are empty, or zero."""


class ColumnShape(Enum):
    """Which buffers a row set has."""

    FIXED = "values"
    BINARY = "offsets, data"
    MAP = "entry offsets, key offsets, key data, value offsets, value data"


class ColumnSpec(NamedTuple):
    name: str
    type: Any
    shape: ColumnShape
    width: int = 0
    encodings: Sequence[Encoding] = tuple(Encoding)

    @property
    def is_required(self) -> bool:
        return Encoding.ABSENT not in self.encodings


TEXT: Final = pa.utf8()
ATTRIBUTES: Final = pa.map_(TEXT, TEXT)
_ENTRY: Final = pa.struct([ATTRIBUTES.key_field, ATTRIBUTES.item_field])
TIME: Final = pa.timestamp("us", tz="UTC")

COLUMNS: Final = (
    ColumnSpec("payload", pa.binary(), ColumnShape.BINARY, encodings=(Encoding.DENSE,)),
    ColumnSpec("publish_time", TIME, ColumnShape.FIXED, 8, encodings=(Encoding.CONSTANT, Encoding.DENSE)),
    ColumnSpec("key", TEXT, ColumnShape.BINARY),
    ColumnSpec("attributes", ATTRIBUTES, ColumnShape.MAP),
    ColumnSpec("schema_id", pa.int64(), ColumnShape.FIXED, 8),
    ColumnSpec("schema_version", pa.int32(), ColumnShape.FIXED, 4),
    ColumnSpec("origin_cluster", TEXT, ColumnShape.BINARY),
    ColumnSpec("origin_offset", pa.int64(), ColumnShape.FIXED, 8),
    ColumnSpec("producer", TEXT, ColumnShape.BINARY),
)
"""The order is part of the format: column i has the bits 2i and 2i + 1 of the layout, and the body follows
it."""

(
    PAYLOAD,
    PUBLISH_TIME,
    KEY,
    ATTRIBUTE_MAP,
    SCHEMA_ID,
    SCHEMA_VERSION,
    ORIGIN_CLUSTER,
    ORIGIN_OFFSET,
    PRODUCER,
) = range(len(COLUMNS))

STORED_COLUMNS: Final = tuple(spec.name for spec in COLUMNS)
DERIVED_COLUMNS: Final = ("offset", "producer_id", "sequence")
"""Known from the header: written out as columns only for those who ask."""

_ENCODINGS: Final = tuple(Encoding)
_FIELDS: Final = {spec.name: pa.field(spec.name, spec.type, not spec.is_required) for spec in COLUMNS} | {
    name: pa.field(name, pa.int64(), nullable=False) for name in DERIVED_COLUMNS
}

_ZEROS: Final = pa.py_buffer(bytes(8 * (MAX_COUNT + 1)))
"""Stands for the buffers of any column of nulls, so that one costs the same however long it is. The pages of
a large zeroed allocation exist only when touched."""
_NO_TEXT: Final = pa.nulls(0, TEXT)


class Column(NamedTuple):
    """A decoded column. ``array`` is None when absent and has one row when constant."""

    spec: ColumnSpec
    encoding: Encoding
    array: Any

    def slice(self, start: int, end: int) -> Column:
        if self.encoding <= Encoding.CONSTANT:
            return self
        return self._replace(array=self.array.slice(start, end - start))

    def take(self, rows: Any) -> Column:
        if self.encoding <= Encoding.CONSTANT:
            return self
        return self._replace(array=self.array.take(rows))

    def to_arrow(self, count: int) -> Any:
        """The column with all its rows. Only a constant one has to be written out, by one Arrow kernel."""
        if self.encoding is Encoding.ABSENT:
            return nulls(self.spec, count)
        if self.encoding is Encoding.CONSTANT:
            return self.array.take(pa.Array.from_buffers(pa.int32(), count, [None, _ZEROS]))
        return self.array


def join(parts: Sequence[Column], counts: Sequence[int]) -> Column:
    """The columns of several row sets, of ``counts`` rows each, as one. What none has, or all have alike,
    stays that cheap."""
    first = parts[0]
    if all(part.encoding is Encoding.ABSENT for part in parts):
        return first
    if all(part.encoding is Encoding.CONSTANT and part.array.equals(first.array) for part in parts):
        return first
    rows = [part.to_arrow(count) for part, count in zip(parts, counts, strict=True)]
    return first._replace(encoding=Encoding.NULLABLE, array=pa.concat_arrays(rows))


def nulls(spec: ColumnSpec, count: int) -> Any:
    if spec.shape is ColumnShape.MAP:
        return map_array(count, _ZEROS, _ZEROS, _NO_TEXT, _NO_TEXT)
    buffers = 2 if spec.shape is ColumnShape.FIXED else 3
    return pa.Array.from_buffers(spec.type, count, [_ZEROS] * buffers, count)


def map_array(rows: int, validity: Any, offsets: Any, keys: Any, values: Any) -> Any:
    pairs = pa.Array.from_buffers(_ENTRY, len(keys), [None], children=[keys, values])
    return pa.Array.from_buffers(ATTRIBUTES, rows, [validity, offsets], children=[pairs])


def validity_bits(array: Any) -> int:
    """The validity bitmap of an array that has one, as a number: bit i is row i, and there are no others."""
    start: int = array.offset
    rows = len(array)
    bitmap: memoryview = memoryview(array.buffers()[0])[start >> 3 : start + rows + 7 >> 3]
    bits = int.from_bytes(bitmap, "little") >> (start & 7)
    return bits & (1 << rows) - 1


@lru_cache(maxsize=1024)
def empty_columns(layout: int) -> tuple[Column, ...]:
    """Every column with its encoding, none of them read yet."""
    return tuple(
        Column(spec, _ENCODINGS[layout >> 2 * index & 3], None) for index, spec in enumerate(COLUMNS)
    )


@lru_cache(maxsize=64)
def schema_of(names: tuple[str, ...]) -> Any:
    """The Arrow schema of a choice of columns."""
    unknown = [name for name in names if name not in _FIELDS]
    if unknown:
        raise KeyError(f"a record batch has no column {shown(unknown[0])}")
    return pa.schema([_FIELDS[name] for name in names])
