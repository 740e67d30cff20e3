"""Protobuf to Spark types, and messages to values of them.

On the wire fields are numbers, so the reader's descriptors read payloads of every version that is compatible.
Records are tuples in the order of the fields: of all that Arrow takes, that is made and read most quickly.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import Message
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    DayTimeIntervalType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from sava.pipeline.source.values import Convert, Reading, of_items, of_values
from sava.schemas.definition import ProtobufSchema

_FD = FieldDescriptor
_INTEGER, _LONG, _UNSIGNED = IntegerType(), LongType(), DecimalType(20, 0)
_SCALARS: Final[dict[int, DataType]] = {
    _FD.TYPE_BOOL: BooleanType(),
    _FD.TYPE_STRING: StringType(),
    _FD.TYPE_BYTES: BinaryType(),
    _FD.TYPE_FLOAT: FloatType(),
    _FD.TYPE_DOUBLE: DoubleType(),
    **dict.fromkeys((_FD.TYPE_INT32, _FD.TYPE_SINT32, _FD.TYPE_SFIXED32), _INTEGER),
    **dict.fromkeys((_FD.TYPE_INT64, _FD.TYPE_SINT64, _FD.TYPE_SFIXED64), _LONG),
    **dict.fromkeys((_FD.TYPE_UINT32, _FD.TYPE_FIXED32), _LONG),
    **dict.fromkeys((_FD.TYPE_UINT64, _FD.TYPE_FIXED64), _UNSIGNED),
}
"""Spark has no unsigned numbers; the next wider type holds them."""
_ANY_JSON: Final = frozenset(f"google.protobuf.{name}" for name in ("Struct", "Value", "ListValue"))
_WRAPPERS: Final = frozenset(
    f"google.protobuf.{kind}Value"
    for kind in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)

Typed = tuple[DataType, Convert | None]


def reading(schema: ProtobufSchema) -> Reading:
    descriptors = schema.descriptors
    data_type, convert = _ProtobufTypes(descriptors.pool).message(descriptors.payload)

    def read_protobuf(payload: bytes) -> Any:
        return convert(descriptors.parse(payload))

    return Reading(data_type, read_protobuf, lambda definition: read_protobuf)


class _ProtobufTypes:
    def __init__(self, pool: DescriptorPool) -> None:
        self._pool = pool
        self._within: set[str] = set()
        """The enclosing messages: a recursive message would be an infinite type."""

    def message(self, message: Descriptor) -> tuple[DataType, Convert]:
        name = message.full_name
        if name == "google.protobuf.Timestamp":
            return TimestampType(), _microseconds
        if name == "google.protobuf.Duration":
            return DayTimeIntervalType(), _microseconds
        if name in _WRAPPERS:
            return _SCALARS[message.fields_by_name["value"].type], lambda wrapper: wrapper.value
        if name in self._within or name in _ANY_JSON or not message.fields:
            return StringType(), self._as_json
        self._within.add(name)
        typed = [(field, *self.field(field)) for field in message.fields]
        self._within.discard(name)
        return StructType([StructField(field.name, data_type) for field, data_type, _ in typed]), _record(
            [(field, convert) for field, _, convert in typed]
        )

    def field(self, field: FieldDescriptor) -> Typed:
        if not field.is_repeated:
            return self._single(field)
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            key_type, _ = self._single(entry.fields_by_name["key"])
            value_type, convert = self._single(entry.fields_by_name["value"])
            return MapType(key_type, value_type), of_values(convert) or dict
        data_type, convert = self._single(field)
        return ArrayType(data_type), of_items(convert) or list

    def _single(self, field: FieldDescriptor) -> Typed:
        if field.message_type is not None:
            return self.message(field.message_type)
        if field.enum_type is not None:
            return StringType(), _names(field.enum_type)
        return _SCALARS[field.type], None

    def _as_json(self, message: Message) -> str:
        return json_format.MessageToJson(
            message, indent=None, preserving_proto_field_name=True, descriptor_pool=self._pool
        )


def _record(fields: list[tuple[FieldDescriptor, Convert | None]]) -> Convert:
    """A field with presence that is not set is null; other fields have their default."""
    plan = [(field.name, field.has_presence, convert) for field, convert in fields]

    def convert_message(message: Message) -> tuple[Any, ...]:
        row: list[Any] = []
        for name, has_presence, convert in plan:
            if has_presence and not message.HasField(name):
                row.append(None)
            else:
                value = getattr(message, name)
                row.append(value if convert is None else convert(value))
        return tuple(row)

    return convert_message


def _names(enum: EnumDescriptor) -> Convert:
    """Enum names; a number that a later version added is its text."""
    names = {number: value.name for number, value in enum.values_by_number.items()}
    return lambda number: names.get(number) or str(number)


def _microseconds(time: Any) -> int:
    return int(time.seconds * 1_000_000 + time.nanos // 1000)
