"""Encoder: columns from wherever they come, put together behind a header.

**Buffers.** Values become Arrow arrays (one C++ pass per column) and arrays become buffers, so that messages
from Python and rows from Spark take the same way and the same content has the same bytes. Nothing that Arrow
leaves undefined gets into them: values under nulls are empty or zero, spare bits are zero, offsets begin
with 0.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, Final, NamedTuple

import google_crc32c
import pyarrow as pa
import pyarrow.compute as pc

from sava.errors import shown
from sava.records.columns import (
    COLUMNS,
    ORIGIN_CLUSTER,
    ORIGIN_OFFSET,
    PUBLISH_TIME,
    STORED_COLUMNS,
    TEXT,
    Column,
    ColumnShape,
    ColumnSpec,
    Encoding,
    map_array,
    validity_bits,
)
from sava.records.decoder import null_rows_are_empty, publish_time_range
from sava.records.errors import BatchTooLarge, InvalidMessage
from sava.records.header import (
    HEADER_BYTES,
    INT64_END,
    MAX_BATCH_BYTES,
    UNASSIGNED,
    Compression,
    Header,
    check_sizes,
)
from sava.records.message import Origin

_PADDING: Final = tuple(bytes(n) for n in range(8))

Encoded = tuple[Encoding, Sequence[Any]]
"""A column ready to be written: its encoding and its buffers (bytes or pa.Buffer), not yet padded."""

ABSENT: Final[Encoded] = (Encoding.ABSENT, ())


class BatchPlace(NamedTuple):
    """The broker's part of a header."""

    topic_id: int = 0
    epoch: int = 0
    base_offset: int = UNASSIGNED


class EncodedBody(NamedTuple):
    """Everything about a batch that its messages decide."""

    rows: int
    columns: Sequence[Encoded]
    times: tuple[int, int]


def encode_values(
    payloads: Sequence[bytes],
    *,
    publish_time: int | Sequence[int],
    keys: Sequence[str | None] | None,
    attributes: Sequence[Mapping[str, str]] | None,
    schema_id: int | Sequence[int | None] | None,
    schema_version: int | Sequence[int | None] | None,
    origins: Sequence[Origin | None] | None,
    producer: str | Sequence[str | None] | None,
) -> EncodedBody:
    """A body from one sequence per column. A single value stands for one that every message has."""
    count = _checked(len(payloads))
    clusters, offsets = (None, None) if origins is None else _origin_arrays(origins, count)
    if isinstance(publish_time, int):
        publish_times, times = publish_time, (publish_time, publish_time)
    else:
        publish_times = to_array(COLUMNS[PUBLISH_TIME], publish_time, count)
        times = publish_time_range(publish_times)
    given = (publish_times, keys, attributes, schema_id, schema_version, clusters, offsets, producer)
    others = [_encode_given(spec, values, count) for spec, values in zip(COLUMNS[1:], given, strict=True)]
    return EncodedBody(count, [encode_payloads(payloads), *others], times)


def encode_arrow(rows: Any, *, publish_time: int | None) -> EncodedBody:
    """A body from a pa.RecordBatch; ``publish_time`` is that of all messages when the rows have none."""
    names = rows.schema.names
    unknown = [name for name in names if name not in STORED_COLUMNS or names.count(name) > 1]
    if unknown:
        raise InvalidMessage(f"the column {shown(unknown[0])} is unknown or given twice")
    if "payload" not in names:
        raise InvalidMessage("the messages have no payload")
    count = _checked(rows.num_rows)
    arrays = [_conform(spec, rows.column(spec.name)) if spec.name in names else None for spec in COLUMNS]
    _check_origin(arrays[ORIGIN_CLUSTER], arrays[ORIGIN_OFFSET])
    columns = [
        ABSENT if array is None else encode_array(spec, array)
        for spec, array in zip(COLUMNS, arrays, strict=True)
    ]
    if arrays[PUBLISH_TIME] is not None:
        return EncodedBody(count, columns, publish_time_range(arrays[PUBLISH_TIME]))
    if publish_time is None:
        raise InvalidMessage("the messages have no publish_time")
    columns[PUBLISH_TIME] = constant_integer(COLUMNS[PUBLISH_TIME], publish_time)
    return EncodedBody(count, columns, (publish_time, publish_time))


def encode_columns(columns: Sequence[Column], count: int) -> EncodedBody:
    """A body from decoded columns, or from parts of them."""
    _checked(count)
    encoded = [
        ABSENT if column.array is None else encode_array(column.spec, column.array) for column in columns
    ]
    return EncodedBody(count, encoded, publish_time_range(columns[PUBLISH_TIME].array))


def assemble(
    body: EncodedBody, *, producer_id: int, base_sequence: int, codec: Compression, place: BatchPlace
) -> tuple[Header, bytes]:
    """The batch's bytes, copied once from where the columns' buffers are."""
    count = body.rows
    if not (0 <= producer_id < INT64_END and 0 <= base_sequence <= INT64_END - count):
        raise InvalidMessage(f"producer {producer_id} with sequence {base_sequence} is out of range")
    parts, body_size, layout = _parts(body)
    check_sizes(count, HEADER_BYTES, body_size)
    length = HEADER_BYTES + body_size
    if codec is not Compression.NONE:
        parts = [pa.Codec(codec.name.lower()).compress(b"".join(parts), asbytes=True)]
        length = HEADER_BYTES + len(parts[0])
        check_sizes(count, length, body_size)
    header = Header(
        length, 0, *place, count, body_size, codec, layout, producer_id, base_sequence, *body.times
    )
    sealed = header.sealed()
    crc = google_crc32c.value(sealed)
    for part in parts:
        crc = google_crc32c.extend(crc, part)
    header = header.replace(crc=crc)
    return header, b"".join((header.prefix(), sealed, *parts))


def _parts(body: EncodedBody) -> tuple[list[Any], int, int]:
    """All buffers with the padding between them, their size, and the layout that tells what they are."""
    parts: list[Any] = []
    total = layout = 0
    for index, (encoding, buffers) in enumerate(body.columns):
        layout |= encoding << 2 * index
        start = total
        for buffer in buffers:
            size = len(buffer)
            parts.append(buffer)
            if size & 7:
                parts.append(_PADDING[-size & 7])
            total += size + 7 & ~7
        if encoding is Encoding.CONSTANT and (total - start) * body.rows > MAX_BATCH_BYTES:
            raise BatchTooLarge(
                f"the constant {COLUMNS[index].name}", (total - start) * body.rows, MAX_BATCH_BYTES
            )
    return parts, total, layout


def _checked(count: int) -> int:
    if not count:
        raise InvalidMessage("a batch holds at least one message")
    check_sizes(count, HEADER_BYTES, 0)
    return count


def _encode_given(spec: ColumnSpec, values: Any, count: int) -> Encoded:
    if values is None:
        return ABSENT
    if isinstance(values, int):
        return constant_integer(spec, values)
    if isinstance(values, str) and spec.shape is ColumnShape.BINARY:
        return constant_text(spec, values)
    return encode_array(spec, values if isinstance(values, pa.Array) else to_array(spec, values, count))


def _origin_arrays(origins: Sequence[Origin | None], count: int) -> tuple[Any, Any]:
    clusters = to_array(COLUMNS[ORIGIN_CLUSTER], [origin and origin.cluster for origin in origins], count)
    offsets = to_array(COLUMNS[ORIGIN_OFFSET], [origin and origin.offset for origin in origins], count)
    _check_origin(clusters, offsets)
    return clusters, offsets


def _conform(spec: ColumnSpec, array: Any) -> Any:
    """An array from outside in the type that the format has, known to be valid."""
    try:
        if array.type != spec.type:
            array = array.cast(spec.type)
        array.validate(full=True)
    except pa.ArrowException as error:
        raise InvalidMessage(f"the column {spec.name} of type {array.type}: {error}") from None
    return array


def _check_origin(clusters: Any, offsets: Any) -> None:
    """Raise unless every message has both parts of an origin or neither. A column not given is None."""
    if clusters is not None and offsets is not None:
        together = clusters.is_null().equals(offsets.is_null())
    else:
        together = all(array is None or array.null_count == len(array) for array in (clusters, offsets))
    if not together:
        raise InvalidMessage("an origin has a cluster and an offset, or is not given")


# -- the buffers of a column -----------------------------------------------------------------------


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
        raise InvalidMessage(f"{spec.name}: {shown(value)} is no integer of {spec.width} bytes") from None


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
