"""JSON Schema to Spark types, and JSON to values of them.

The schema is first reduced to a *shape*: what decides the type, without what only restricts it. ``msgspec``
then decodes straight into that shape, in C, and refuses what has another type. Restrictions like ``minimum``
or ``pattern`` are not checked here: that is the broker's part, by the policy of the topic, and costs many
times what decoding does.

A property that is required must be there in payloads of the reader's own version. One of another version may
lack it: it is null then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import GenericAlias
from typing import Annotated, Any, Final, NotRequired, Required, TypedDict

import msgspec
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
)

from sava.pipeline.source.values import Convert, Read, Reading, of_fields, of_items, of_values
from sava.schemas.bounds import TooComplex
from sava.schemas.definition import JsonSchema
from sava.schemas.json_schema import (
    ALL_TYPES,
    Alternative,
    Document,
    Subschema,
    common_types,
    expand,
    finite_values,
    required,
)

_typed_dict: Final[Any] = TypedDict
"""Untyped: these types are made at run time, which type checkers do not follow."""
_INT64: Final = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
_SCALARS: Final[dict[str, DataType]] = {
    "string": StringType(),
    "integer": LongType(),
    "number": DoubleType(),
    "boolean": BooleanType(),
}


# -- shapes --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextShape:
    """JSON text: data without one type."""


@dataclass(frozen=True, slots=True)
class ScalarShape:
    name: str
    nullable: bool


@dataclass(frozen=True, slots=True)
class ListShape:
    item: Shape
    nullable: bool


@dataclass(frozen=True, slots=True)
class MapShape:
    value: Shape
    nullable: bool


@dataclass(frozen=True, slots=True)
class RecordShape:
    fields: tuple[tuple[str, Shape], ...]
    required: frozenset[str] = field(compare=False)
    nullable: bool


Shape = TextShape | ScalarShape | ListShape | MapShape | RecordShape


def shape_of(document: Document) -> Shape:
    return _Shaping(document).shape((document.root,), frozenset()) or TextShape()


class _Shaping:
    def __init__(self, document: Document) -> None:
        self._document = document

    def shape(self, schemas: Iterable[Subschema], within: frozenset[frozenset[int]]) -> Shape | None:
        """The shape of schemas that all apply; None when they allow no value. ``within`` holds the enclosing
        schemas: a recursive schema would be an infinite type."""
        try:
            alternatives = expand(self._document, schemas)
        except TooComplex:
            return TextShape()
        kinds = [_types(alternative) for alternative in alternatives]
        nullable = any("null" in kind for kind in kinds)
        shapes = {
            self._simple(alternative, kind - {"null"}, nullable, within)
            for alternative, kind in zip(alternatives, kinds, strict=True)
            if kind - {"null"}
        }
        if not shapes:
            return TextShape() if nullable else None
        if shapes == {ScalarShape("integer", nullable), ScalarShape("number", nullable)}:
            return ScalarShape("number", nullable)
        return shapes.pop() if len(shapes) == 1 else TextShape()

    def _simple(
        self, parts: Alternative, kind: frozenset[str], nullable: bool, within: frozenset[frozenset[int]]
    ) -> Shape:
        here = frozenset(map(id, parts))
        if here and here in within:
            return TextShape()
        if kind == {"object"}:
            return self._object(parts, nullable, within | {here})
        if kind == {"array"}:
            return self._array(parts, nullable, within | {here})
        if kind <= {"integer", "fraction"}:
            return ScalarShape("integer" if kind == {"integer"} else "number", nullable)
        return ScalarShape(next(iter(kind)), nullable) if len(kind) == 1 else TextShape()

    def _object(self, parts: Alternative, nullable: bool, within: frozenset[frozenset[int]]) -> Shape:
        declared: dict[str, list[Subschema]] = {}
        for part in parts:
            for name, schema in part.get("properties", {}).items():
                declared.setdefault(name, []).append(schema)
        shapes = {name: self.shape(schemas, within) for name, schemas in declared.items()}
        if fields := tuple((name, shape) for name, shape in shapes.items() if shape is not None):
            return RecordShape(fields, frozenset(required(parts)), nullable)
        others = [part["additionalProperties"] for part in parts if "additionalProperties" in part]
        if not any(isinstance(each, dict) for each in others) or any(
            "patternProperties" in part for part in parts
        ):
            return TextShape()
        return MapShape(self.shape(others, within) or TextShape(), nullable)

    def _array(self, parts: Alternative, nullable: bool, within: frozenset[frozenset[int]]) -> Shape:
        items = [part["items"] for part in parts if "items" in part]
        if any(isinstance(each, list) for each in items) or any("prefixItems" in part for part in parts):
            return TextShape()
        return ListShape((self.shape(items, within) if items else None) or TextShape(), nullable)


def _types(alternative: Alternative) -> frozenset[str]:
    """The allowed types, also where only other keywords of the schema imply them."""
    named = common_types(alternative)
    if (values := finite_values(alternative)) is not None:
        return named & frozenset(map(_type_of, values))
    if named == ALL_TYPES:
        if any("properties" in part for part in alternative):
            return frozenset(("object",))
        if any("items" in part for part in alternative):
            return frozenset(("array",))
    return named


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "integer" if value == int(value) else "fraction"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


# -- what is made of a shape ---------------------------------------------------------------------------------


def _data_type(shape: Shape) -> DataType:
    match shape:
        case TextShape():
            return StringType()
        case ScalarShape(name):
            return _SCALARS[name]
        case ListShape(item):
            return ArrayType(_data_type(item))
        case MapShape(value):
            return MapType(StringType(), _data_type(value))
        case RecordShape(fields):
            return StructType([StructField(name, _data_type(each)) for name, each in fields])


@dataclass(frozen=True, slots=True)
class _Decoding:
    """Makes decoders of a shape. ``complete``: required properties must be present. ``whole_fractions``: 3.0
    is an integer, as in JSON Schema; used only after decoding has failed without it."""

    complete: bool
    whole_fractions: bool

    def reader(self, shape: Shape) -> Read:
        decode = msgspec.json.Decoder(self._annotation(shape)).decode
        convert = self._convert(shape)
        return decode if convert is None else lambda payload: convert(decode(payload))

    def _annotation(self, shape: Shape) -> Any:
        match shape:
            case TextShape():
                return msgspec.Raw
            case ScalarShape("integer"):
                found: Any = int | float if self.whole_fractions else _INT64
            case ScalarShape(name):
                found = {"string": str, "number": float, "boolean": bool}[name]
            case ListShape(item):
                found = GenericAlias(list, (self._annotation(item),))
            case MapShape(value):
                found = GenericAlias(dict, (str, self._annotation(value)))
            case RecordShape():
                found = self._record(shape)
        return found | None if shape.nullable else found

    def _record(self, shape: RecordShape) -> Any:
        """``msgspec`` takes a required ``Raw`` for a type of its own that nothing is of, so that a text is
        looked for afterwards; and it does not find a name beyond ASCII of which it has never seen the
        UTF-8."""
        needed = self._needed(shape)
        members: dict[str, Any] = {
            name: (Required if name in needed and each != TextShape() else NotRequired)[
                self._annotation(each)
            ]
            for name, each in shape.fields
        }
        members |= {name: Required[Any] for name in needed if name not in members}
        for name in members:
            msgspec.json.encode(name)
        return _typed_dict("Record", members)

    def _needed(self, shape: RecordShape) -> frozenset[str]:
        return shape.required if self.complete else frozenset()

    def _convert(self, shape: Shape) -> Convert | None:
        match shape:
            case TextShape():
                return _text
            case ScalarShape("integer"):
                return _whole if self.whole_fractions else None
            case ScalarShape():
                return None
            case ListShape(item):
                return of_items(self._convert(item))
            case MapShape(value):
                return of_values(self._convert(value))
            case RecordShape(fields):
                return of_fields({name: self._convert(each) for name, each in fields}, self._needed(shape))


def _text(raw: Any) -> str | None:
    text = bytes(raw).decode()
    return None if text == "null" else text


def _whole(value: Any) -> int | None:
    if value is None or isinstance(value, int):
        return value
    if not value.is_integer():
        raise ValueError(f"{value} is not an integer")
    return int(value)


def reading(schema: JsonSchema) -> Reading:
    shape = shape_of(schema.document)
    own, other = (_reader(shape, complete=complete) for complete in (True, False))
    return Reading(_data_type(shape), own, lambda definition: other)


def _reader(shape: Shape, *, complete: bool) -> Read:
    read, again = (_Decoding(complete, fractions).reader(shape) for fractions in (False, True))

    def read_json(payload: bytes) -> Any:
        try:
            return read(payload)
        except msgspec.ValidationError:
            return again(payload)

    return read_json
