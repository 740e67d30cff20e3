"""Decoder: the column ``value``, by the registered schema of a topic.

The driver makes a decoder from the reader's version of the schema, usually the latest, which decides the type
of the column. The decoder travels to executors as text and is compiled there once per process.

A row says with which version it was written. Rows of another version are fitted to the reader's type: Avro by
its resolution rules (the other version is fetched when a row needs it), JSON and Protobuf by names and
numbers. A row without a schema counts as one of the reader's version. The value is null for a payload that
cannot be decoded or does not fit, and for rows of another subject. The payload stays in its own column.

docs/pipeline.md lists the types. Data without one type is JSON text: a union, ``oneOf``, and recursive types.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import BinaryType, DataType, DoubleType, StringType

from sava.client.errors import Refused
from sava.pipeline.cluster import ClusterAccess, ClusterClient
from sava.pipeline.source.values import (
    Read,
    Reading,
    arrow_type_of,
    assemble,
    avro,
    json,
    protobuf,
    refuse,
    values_of,
)
from sava.proto.streams_pb2 import SchemaResponse
from sava.schemas.codecs import NumberCodec
from sava.schemas.definition import AvroSchema, JsonSchema, PrimitiveSchema, ProtobufSchema, read_schema
from sava.schemas.types import SchemaType, parse_type

CACHED: Final = 64
GONE: Final = frozenset(("version_unknown", "subject_unknown"))
"""Error codes of the registry for a deleted version or subject."""
Fetch = Callable[[str, int], SchemaResponse]
"""Fetches (subject, version), 0 for the latest. It must be picklable."""


def fetch_schema(access: ClusterAccess, subject: str, version: int) -> SchemaResponse:
    """A schema of a cluster, by the client of the current process."""
    return ClusterClient.of(access).schema(subject, version)


@dataclass(frozen=True, slots=True)
class Decoder:
    """Decodes payloads with one version of a schema."""

    subject: str
    schema_id: int
    version: int
    kind: SchemaType
    definition: bytes
    fetch: Fetch

    @classmethod
    def of(cls, subject: str, fetch: Fetch, version: int = 0) -> Decoder:
        """Raises what ``fetch`` raises, and SchemaInvalid when the definition is not one of its type."""
        found = fetch(subject, version)
        kind = parse_type(found.type)
        schema = read_schema(kind, found.definition)
        # Descriptors instead of source text: executors need no compiler then, and do not wait for one.
        definition = schema.compiled or found.definition
        return cls(subject, found.schema_id, found.version, kind, definition, fetch)

    @property
    def data_type(self) -> DataType:
        return _reading(self.kind, self.definition).data_type

    @property
    def arrow_type(self) -> pa.DataType:
        return arrow_type_of(self.data_type)

    def decode(
        self, payloads: pa.Array, schema_ids: pa.Array | None = None, versions: pa.Array | None = None
    ) -> pa.Array:
        """One value for each payload; ``schema_ids`` and ``versions`` are columns of the same rows, if read.
        Raises only when the registry does not answer, which says nothing about a row."""
        readers = self._readers(schema_ids, versions)
        if readers is None and self.kind is SchemaType.BYTES:
            return payloads.cast(pa.binary())
        if readers is None and self.kind is SchemaType.STRING:
            try:
                return payloads.cast(pa.string())
            except pa.ArrowInvalid:
                pass  # one of them is not UTF-8: which one?
        own = _reading(self.kind, self.definition).read
        rows = zip(repeat(own) if readers is None else readers, payloads.to_pylist(), strict=False)
        return assemble(values_of(rows), self.arrow_type)

    def _readers(self, schema_ids: pa.Array | None, versions: pa.Array | None) -> list[Read] | None:
        """The function for each row; None if all rows have the reader's version, the usual case."""
        if _are_all(schema_ids, self.schema_id) and _are_all(versions, self.version):
            return None
        ids = repeat(None) if schema_ids is None else schema_ids.to_pylist()
        numbers = repeat(None) if versions is None else versions.to_pylist()
        known: dict[tuple[Any, Any], Read] = {}
        readers = []
        for row in zip(ids, numbers, strict=False):
            if row not in known:
                known[row] = self._reader(*row)
            readers.append(known[row])
        return readers

    def _reader(self, schema_id: int | None, version: int | None) -> Read:
        reading = _reading(self.kind, self.definition)
        if schema_id not in (None, 0, self.schema_id):
            return refuse
        if version in (None, 0, self.version):
            return reading.read
        return _read_other(self, version)


def _are_all(column: pa.Array | None, expected: int) -> bool:
    if column is None or column.null_count == len(column):
        return True
    bounds = pc.min_max(column)
    return bool(bounds["min"].as_py() == bounds["max"].as_py() == expected)


@lru_cache(maxsize=CACHED)
def _reading(kind: SchemaType, definition: bytes) -> Reading:
    """The compiled form of a definition, once per process."""
    match read_schema(kind, definition):
        case JsonSchema() as schema:
            return json.reading(schema)
        case AvroSchema() as schema:
            return avro.reading(schema)
        case ProtobufSchema() as schema:
            return protobuf.reading(schema)
        case PrimitiveSchema(SchemaType.STRING):
            return _primitive(StringType(), bytes.decode)
        case PrimitiveSchema(SchemaType.NUMBER):
            return _primitive(DoubleType(), lambda payload: float(_NUMBERS.decode(payload)))
        case PrimitiveSchema():
            return _primitive(BinaryType(), bytes)


_NUMBERS: Final = NumberCodec()


def _primitive(data_type: DataType, read: Read) -> Reading:
    return Reading(data_type, read, lambda definition: read)


@lru_cache(maxsize=CACHED)
def _read_other(decoder: Decoder, version: int) -> Read:
    """The function for another version. A version never changes, so a process fetches it once. Rows of a
    deleted version have no value unless they can be read without it."""
    reading = _reading(decoder.kind, decoder.definition)
    if decoder.kind is not SchemaType.AVRO:
        return reading.read_other(b"")
    try:
        found = decoder.fetch(decoder.subject, version)
    except Refused as error:
        if error.code not in GONE:
            raise
        return refuse
    return reading.read_other(found.definition)
