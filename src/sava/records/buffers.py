"""Buffers: from Python values or Arrow arrays to the buffers of one column.

Values become Arrow arrays (one C++ pass per column) and arrays become buffers, so that messages from Python
and rows from Spark take the same way and the same content has the same bytes. Nothing that Arrow leaves
undefined gets into them: values under nulls are empty or zero, spare bits are zero, offsets begin with 0.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from sava.records.columns import TEXT, ColumnShape, ColumnSpec, Encoding, map_array, validity_bits
from sava.records.decoder import null_rows_are_empty
from sava.records.errors import BatchTooLarge, InvalidMessage
from sava.records.header import MAX_BATCH_BYTES

Encoded = tuple[Encoding, Sequence[Any]]
"""A column ready to be written: its encoding and its buffers (bytes or pa.Buffer), not yet padded."""

ABSENT: Final[Encoded] = (Encoding.ABSENT, ())


def encode_payloads(payloads: Sequence[bytes]) -> Encoded:
    """The payload column by hand: ``pa.array`` is little faster, and takes text for bytes without a word."""
    try:
        offsets = list(accumulate(map(len, payloads), initial=0))
        if offsets[-1] > MAX_BATCH_BYTES:
            raise BatchTooLarge("the payload", offsets[-1], MAX_BATCH_BYTES)
        data = b"".join(payloads)
    except TypeError as error:
        raise InvalidMessage(f"payload: {error}") from None
    if len(data) != offsets[-1]:
        raise InvalidMessage("payload: a view of something else than bytes")
    return Encoding.DENSE, (struct.pack(f"<{len(offsets)}i", *offsets), data)


def to_array(spec: ColumnSpec, values: Sequence[Any], count: int) -> Any:
    """An Arrow array of Python values, one for each of ``count`` messages."""
    if len(values) != count:
        raise InvalidMessage(f"{len(values)} values of {spec.name} for {count} messages")
    try:
        if spec.shape is ColumnShape.MAP:
            return _attributes_array(values)
        array = pa.array(values, pa.int64() if pa.types.is_timestamp(spec.type) else spec.type)
    except (pa.ArrowException, OverflowError, TypeError, UnicodeError) as error:
        raise InvalidMessage(f"{spec.name}: {error}") from None
    if isinstance(array, pa.ChunkedArray):
        raise BatchTooLarge(f"the column {spec.name}", array.nbytes, MAX_BATCH_BYTES)
    return array


def encode_array(spec: ColumnSpec, array: Any) -> Encoded:
    """A column in the smallest encoding that its values allow."""
    nulls = array.null_count
    if nulls and spec.is_required:
        raise InvalidMessage(f"{nulls} messages have no {spec.name}")
    if nulls == len(array):
        return ABSENT
    if nulls:
        bitmap = validity_bits(array).to_bytes(len(array) + 7 >> 3, "little")
        return Encoding.NULLABLE, (bitmap, *_buffers(spec, array))
    if Encoding.CONSTANT in spec.encodings and _is_constant(array):
        return Encoding.CONSTANT, _buffers(spec, array.slice(0, 1))
    return Encoding.DENSE, _buffers(spec, array)


def constant_integer(spec: ColumnSpec, value: int) -> Encoded:
    try:
        return Encoding.CONSTANT, (value.to_bytes(spec.width, "little", signed=True),)
    except (OverflowError, AttributeError):
        raise InvalidMessage(f"{spec.name}: {value!r} is no integer of {spec.width} bytes") from None


def constant_text(spec: ColumnSpec, value: str) -> Encoded:
    try:
        data = value.encode()
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"{spec.name}: {error}") from None
    return Encoding.CONSTANT, (struct.pack("<2i", 0, len(data)), data)


def _attributes_array(values: Sequence[Mapping[str, str]]) -> Any:
    """No attributes become null: they cost nothing in Parquet, and all batches tell it the same way."""
    lengths = list(map(len, values))
    offsets = struct.pack(f"<{len(lengths) + 1}i", *accumulate(lengths, initial=0))
    keys = pa.array(list(chain.from_iterable(values)), TEXT)
    items = pa.array(list(chain.from_iterable(mapping.values() for mapping in values)), TEXT)
    if keys.null_count:
        raise InvalidMessage("an attribute has no name")  # Arrow would end the process
    validity = pa.array(map(bool, lengths), pa.bool_()).buffers()[1] if 0 in lengths else None
    return map_array(len(lengths), validity, pa.py_buffer(offsets), keys, items)


def _is_constant(array: Any) -> bool:
    """Whether every value equals the one before it (first and last are compared first: most columns fail
    there)."""
    last = len(array) - 1
    return bool(
        array.slice(0, 1).equals(array.slice(last, 1)) and array.slice(1).equals(array.slice(0, last))
    )


def _buffers(spec: ColumnSpec, array: Any) -> tuple[Any, ...]:
    if spec.shape is ColumnShape.MAP:
        return _map_buffers(array)
    if array.null_count:
        array = pc.fill_null(array, 0 if spec.shape is ColumnShape.FIXED else "")
    if spec.shape is ColumnShape.BINARY:
        return _binary_buffers(array)
    return (array.buffers()[1].slice(array.offset * spec.width, len(array) * spec.width),)


def _binary_buffers(array: Any) -> tuple[Any, Any]:
    if not len(array):
        return bytes(4), b""
    _, positions, data = array.buffers()
    positions, first, end = _rebase(positions.slice(4 * array.offset, 4 * (len(array) + 1)))
    return positions, data.slice(first, end - first) if end > first else b""


def _map_buffers(array: Any) -> tuple[Any, ...]:
    if array.null_count and not null_rows_are_empty(array):
        array = array.take(pa.arange(0, len(array)))
    positions, first, end = _rebase(array.buffers()[1].slice(4 * array.offset, 4 * (len(array) + 1)))
    keys, items = (child.slice(first, end - first) for child in (array.keys, array.items))
    if items.null_count:
        raise InvalidMessage("an attribute has no value")
    return positions, *_binary_buffers(keys), *_binary_buffers(items)


def _rebase(positions: Any) -> tuple[Any, int, int]:
    """Offsets moved so that they begin with 0, and what they began and ended with."""
    rows = len(positions) // 4
    view = memoryview(positions).cast("i")
    first, end = view[0], view[-1]
    if first:
        offsets = pa.Array.from_buffers(pa.int32(), rows, [None, positions])
        # A scalar of another type would widen the result.
        moved = pc.subtract(offsets, pa.scalar(first, pa.int32()))
        positions = moved.buffers()[1].slice(4 * moved.offset, 4 * rows)
    return positions, first, end
