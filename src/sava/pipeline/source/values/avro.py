"""Avro to Spark types, and Avro binary to values of them.

Data can only be read with the schema that it was written with; that of another version is resolved to the
reader's, by the rules of the specification. A payload is checked before it is decoded
(``sava.schemas.avro_payload``): the decoder trusts what it is given, as deep as that goes.
"""

from __future__ import annotations

import datetime
import io
from typing import Any, Final

import fastavro
import msgspec
from fastavro.types import Schema as FastavroSchema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from sava.pipeline.source.values import Convert, Read, Reading, of_fields, of_items, of_values
from sava.schemas.avro import Array, AvroRecord, Enum, Fixed, Map, Node, Primitive, Union
from sava.schemas.definition import AvroSchema, Validator, read_schema
from sava.schemas.types import SchemaType

_PRIMITIVES: Final[dict[str, DataType]] = {
    "null": StringType(),
    "boolean": BooleanType(),
    "int": IntegerType(),
    "long": LongType(),
    "float": FloatType(),
    "double": DoubleType(),
    "bytes": BinaryType(),
    "string": StringType(),
}
_LOGICAL: Final[dict[tuple[str, str], DataType]] = {
    ("int", "date"): DateType(),
    ("long", "timestamp-millis"): TimestampType(),
    ("long", "timestamp-micros"): TimestampType(),
    ("long", "local-timestamp-millis"): TimestampNTZType(),
    ("long", "local-timestamp-micros"): TimestampNTZType(),
}
_MAX_DECIMAL: Final = 38
"""The digits that a Spark decimal can have."""

Typed = tuple[DataType, Convert | None]


def reading(schema: AvroSchema) -> Reading:
    data_type, convert = _AvroTypes().typed(schema.root)

    def read_other(definition: bytes) -> Read:
        writer = read_schema(SchemaType.AVRO, definition)
        assert isinstance(writer, AvroSchema)
        return _reader(writer, schema, convert)

    return Reading(data_type, _reader(schema, None, convert), read_other)


def _reader(writer: AvroSchema, reader: AvroSchema | None, convert: Convert | None) -> Read:
    check = Validator(writer).validate
    written: FastavroSchema = fastavro.parse_schema(writer.plain)
    wanted: FastavroSchema | None = None if reader is None else fastavro.parse_schema(reader.plain)

    def read_avro(payload: bytes) -> Any:
        check(payload)
        value = fastavro.schemaless_reader(io.BytesIO(payload), written, wanted)
        return value if convert is None else convert(value)

    return read_avro


class _AvroTypes:
    def __init__(self) -> None:
        self._within: set[int] = set()
        """The enclosing records: a recursive record would be an infinite type."""

    def typed(self, node: Node) -> Typed:
        match node:
            case Primitive(name, logical):
                return _primitive(name, logical)
            case Fixed(logical=logical):
                return _primitive("bytes", logical)
            case Enum():
                return StringType(), None
            case Array(items):
                data_type, convert = self.typed(items)
                return ArrayType(data_type), of_items(convert)
            case Map(values):
                data_type, convert = self.typed(values)
                return MapType(StringType(), data_type), of_values(convert)
            case Union(branches):
                return self._union(branches)
            case AvroRecord():
                return self._record(node)

    def _union(self, branches: tuple[Node, ...]) -> Typed:
        """A union with null is the other branch, which is nullable anyway; of two numbers it is the wider."""
        some = [
            branch for branch in branches if not (isinstance(branch, Primitive) and branch.name == "null")
        ]
        if len(some) == 1:
            return self.typed(some[0])
        plain = {each.name for each in some if isinstance(each, Primitive) and not each.logical}
        if len(plain) == len(some) and plain == {"int", "long"}:
            return LongType(), None
        if len(plain) == len(some) and plain == {"float", "double"}:
            return DoubleType(), None
        return StringType(), _as_json

    def _record(self, record: AvroRecord) -> Typed:
        if id(record) in self._within or not record.fields:
            return StringType(), _as_json
        self._within.add(id(record))
        typed = {each.name: self.typed(each.type) for each in record.fields}
        self._within.discard(id(record))
        fields = [StructField(name, data_type) for name, (data_type, _) in typed.items()]
        return StructType(fields), of_fields({name: convert for name, (_, convert) in typed.items()})


def _primitive(name: str, logical: dict[str, Any]) -> Typed:
    """An unknown logical type is read as its plain type, as the specification demands."""
    kind = logical.get("logicalType", "")
    if (name, kind) in _LOGICAL:
        return _LOGICAL[name, kind], None
    match name, kind:
        case "bytes", "decimal":
            if logical["precision"] > _MAX_DECIMAL:
                return StringType(), _as_text
            return DecimalType(logical["precision"], logical["scale"]), None
        case "string", "uuid":
            return StringType(), _as_text
        case "int", "time-millis":
            return IntegerType(), _milliseconds
        case "long", "time-micros":
            return LongType(), _microseconds
        case _:
            return _PRIMITIVES[name], None


def _as_json(value: Any) -> str | None:
    """JSON text: bytes as base64, times as ISO 8601, decimals and UUIDs as text."""
    return None if value is None else msgspec.json.encode(value).decode()


def _as_text(value: Any) -> str | None:
    return None if value is None else str(value)


def _microseconds(value: Any) -> Any:
    if not isinstance(value, datetime.time):
        return value
    return ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond


def _milliseconds(value: Any) -> Any:
    return _microseconds(value) // 1000 if isinstance(value, datetime.time) else value
