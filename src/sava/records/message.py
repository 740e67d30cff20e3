"""Message: one message as application code sees it.

Messages exist at the edges only. Between them (wire, journal, cache, dispatch) there are batches, and a batch
makes its messages when a caller asks for them: from checked columns to Python objects, a whole column in one
pass. (``pa.Array.to_pylist`` makes a scalar object per value and takes several times as long as slicing the
buffers here.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, pairwise, repeat
from typing import Any, NamedTuple

import msgspec

from sava.records.columns import (
    ATTRIBUTE_MAP,
    KEY,
    ORIGIN_CLUSTER,
    ORIGIN_OFFSET,
    PAYLOAD,
    PRODUCER,
    PUBLISH_TIME,
    SCHEMA_ID,
    SCHEMA_VERSION,
    Column,
    Encoding,
    validity_bits,
)


class Origin(NamedTuple):
    """Where a replicated message was first published: the cluster, and its offset in the topic there."""

    cluster: str
    offset: int


class Message(msgspec.Struct, frozen=True, gc=False):
    """A message to publish, or one that was read.

    ``publish_time`` is in microseconds since 1970-01-01 UTC. No attributes is the empty mapping.
    ``producer`` is a name for people to read and has no part in deduplication. ``offset`` and ``topic`` are
    None until a broker has assigned them; an encoder ignores them.

    ``gc=False``: a message cannot be part of a reference cycle, and a reader makes millions of them.
    """

    payload: bytes
    key: str | None = None
    attributes: Mapping[str, str] = msgspec.field(default_factory=dict)
    publish_time: int = 0
    schema_id: int | None = None
    schema_version: int | None = None
    origin: Origin | None = None
    producer: str | None = None
    offset: int | None = None
    topic: str | None = None


# -- from the columns of a batch -------------------------------------------------------------------


Columns = tuple[Column, ...]


def payloads_of(columns: Columns) -> list[bytes]:
    return _binary(columns[PAYLOAD].array)


def messages_of(
    columns: Columns, count: int, offsets: Iterable[int | None], topic: str | None
) -> Iterator[Message]:
    """Columns become lists now; each message is made when the iterator comes to it."""
    return map(
        Message,
        payloads_of(columns),
        _values(columns[KEY], _text),
        _attributes(columns[ATTRIBUTE_MAP], count),
        _values(columns[PUBLISH_TIME], _integers),
        _values(columns[SCHEMA_ID], _integers),
        _values(columns[SCHEMA_VERSION], _integers),
        _origins(columns),
        _values(columns[PRODUCER], _text),
        offsets,
        repeat(topic),
    )


def _values(column: Column, decode: Callable[[Any], list[Any]]) -> Iterable[Any]:
    """The values of a column; without an end when they are all the same."""
    if column.encoding is Encoding.ABSENT:
        return repeat(None)
    values = decode(column.array)
    if column.encoding is Encoding.CONSTANT:
        return repeat(values[0])
    if column.encoding is Encoding.NULLABLE:
        return [
            value if bit == "1" else None for value, bit in zip(values, _validity(column.array), strict=True)
        ]
    return values


def _attributes(column: Column, count: int) -> Iterable[dict[str, str]]:
    """A dict of its own for every message: a shared one would let a careless reader change the others'."""
    if column.encoding is Encoding.ABSENT:
        return [{} for _ in range(count)]
    dicts = _dicts(column.array)
    if column.encoding is Encoding.CONSTANT:
        return [dicts[0].copy() for _ in range(count)]
    return dicts


def _origins(columns: Columns) -> Iterable[Origin | None]:
    clusters, offsets = columns[ORIGIN_CLUSTER], columns[ORIGIN_OFFSET]
    if clusters.encoding is Encoding.ABSENT:
        return repeat(None)
    pairs = zip(_values(clusters, _text), _values(offsets, _integers), strict=False)
    if clusters.encoding is Encoding.NULLABLE:
        return (Origin(cluster, offset) if cluster is not None else None for cluster, offset in pairs)
    return map(Origin._make, pairs)


def _integers(array: Any) -> list[int]:
    values = memoryview(array.buffers()[1]).cast("q" if array.type.bit_width == 64 else "i")
    return values[array.offset : array.offset + len(array)].tolist()


def _binary(array: Any) -> list[bytes]:
    offsets, data = _parts(array)
    return [data[start:end] for start, end in pairwise(offsets)]


def _text(array: Any) -> list[str]:
    offsets, data = _parts(array)
    if data.isascii():
        text = data.decode("ascii")
        return [text[start:end] for start, end in pairwise(offsets)]
    return [data[start:end].decode() for start, end in pairwise(offsets)]


def _dicts(array: Any) -> list[dict[str, str]]:
    # The children of a sliced map are those of the whole, and so are its offsets into them.
    offsets = _integers(array.offsets)
    first, entries = offsets[0], offsets[-1] - offsets[0]
    pairs = zip(
        _text(array.keys.slice(first, entries)), _text(array.items.slice(first, entries)), strict=True
    )
    return [dict(islice(pairs, end - start)) for start, end in pairwise(offsets)]


def _parts(array: Any) -> tuple[list[int], bytes]:
    """Offsets that begin with 0, and the data they point into."""
    _, positions, data = array.buffers()
    offsets = memoryview(positions).cast("i")[array.offset : array.offset + len(array) + 1].tolist()
    first, end = offsets[0], offsets[-1]
    if first:
        offsets = [offset - first for offset in offsets]
    return offsets, memoryview(data)[first:end].tobytes()


def _validity(array: Any) -> str:
    """A character "1" or "0" for each row. Printing a number in base 2 is the fastest way that Python has."""
    return format(validity_bits(array), f"0{len(array)}b")[::-1]
