"""The column ``value``: types by schema, values by payload, null for everything else."""

from __future__ import annotations

import datetime
import io
import json
import pickle
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sava.client.errors import Refused, Unavailable
from sava.pipeline.source.decoding import Decoder
from sava.proto.streams_pb2 import SchemaResponse
from sava.schemas.codecs import codec_for
from sava.schemas.types import SchemaType

SUBJECT_ID = 7
GONE = b"gone"


@dataclass(frozen=True)
class Versions:
    """A registry of one subject."""

    kind: str
    definitions: tuple[bytes, ...]
    asked: list[int] = field(default_factory=list, compare=False)

    def __call__(self, subject: str, version: int) -> SchemaResponse:
        self.asked.append(version)
        number = version or len(self.definitions)
        if self.definitions[number - 1] == GONE:
            raise Refused(f"subject {subject!r}: it has no version {version}", "version_unknown")
        return SchemaResponse(
            schema_id=SUBJECT_ID, version=number, type=self.kind, definition=self.definitions[number - 1]
        )


def decoder(kind: str, *definitions: Any) -> Decoder:
    texts = (each if isinstance(each, bytes) else json.dumps(each).encode() for each in definitions)
    return Decoder.of("subject", Versions(kind, tuple(texts)))


def decoded(by: Decoder, *payloads: bytes | None, versions: list[int | None] | None = None) -> list[Any]:
    numbers = None if versions is None else pa.array(versions, pa.int32())
    ids = None if versions is None else pa.array([SUBJECT_ID] * len(payloads), pa.int64())
    values = by.decode(pa.array(payloads, pa.binary()), ids, numbers)
    assert values.type == by.arrow_type
    assert len(values) == len(payloads)
    values.validate(full=True)
    return list(values.to_pylist())


def of_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def of_avro(schema: Any, value: Any) -> bytes:
    buffer = io.BytesIO()
    fastavro.schemaless_writer(buffer, fastavro.parse_schema(schema), value)
    return buffer.getvalue()


def record(*fields: tuple[str, Any], name: str = "R") -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": [{"name": key, "type": kind} for key, kind in fields]}


# -- plain types ---------------------------------------------------------------------------------


def test_bytes_strings_and_numbers() -> None:
    assert decoded(decoder("bytes", b""), b"\xff", b"", None) == [b"\xff", b"", None]
    text = decoder("string", b"")
    assert decoded(text, "é".encode(), b"", None) == ["é", "", None]
    assert decoded(text, b"good", b"\xff", b"too") == ["good", None, "too"]
    numbers = decoder("number", b"")
    assert numbers.data_type.simpleString() == "double"
    assert decoded(numbers, b"1", b"-2.5e3", b"abc", b"\x00\x00\x00\x01", b"1" * 310) == [
        1.0,
        -2500.0,
        None,
        None,
        None,
    ]


def test_no_rows() -> None:
    for kind, definition in (("string", b""), ("json_schema", {"type": "object", "properties": {"a": {}}})):
        assert decoded(decoder(kind, definition)) == []


# -- JSON ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, "string"),
        ({"type": ["integer", "null"]}, "bigint"),
        ({"type": ["integer", "number"]}, "double"),
        ({"type": ["string", "integer"]}, "string"),
        ({"enum": ["a", "b", None]}, "string"),
        ({"const": 3}, "bigint"),
        (True, "string"),
        ({"type": "object"}, "string"),
        ({"properties": {"a": {"type": "boolean"}}}, "struct<a:boolean>"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "map<string,double>"),
        ({"type": "array", "items": {"type": "string"}}, "array<string>"),
        ({"type": "array"}, "array<string>"),
        ({"type": "array", "prefixItems": [{"type": "string"}]}, "string"),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "string"),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "bigint"),
        (
            {
                "$defs": {"base": {"properties": {"id": {"type": "integer"}}}},
                "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"name": {"type": "string"}}}],
            },
            "struct<id:bigint,name:string>",
        ),
        (
            {"properties": {"v": {"type": "integer"}, "next": {"$ref": "#"}}, "type": "object"},
            "struct<v:bigint,next:string>",
        ),
        ({"properties": {"gone": False, "a": {"type": "string"}}}, "struct<a:string>"),
    ],
)
def test_types_of_json_schema(schema: Any, expected: str) -> None:
    assert decoder("json_schema", schema).data_type.simpleString() == expected


def test_json_that_does_not_fit_is_null_and_its_neighbours_are_not() -> None:
    by = decoder(
        "json_schema",
        {
            "type": "object",
            "properties": {
                "cups": {"type": "integer"},
                "milk": {"type": ["boolean", "null"]},
                "extra": {"oneOf": [{"type": "string"}, {"type": "object"}]},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["cups", "undeclared"],
        },
    )
    good = {"cups": 2, "milk": None, "extra": {"a": [1, 2]}, "tags": ["x"], "undeclared": 1, "other": 5}
    rows = decoded(
        by,
        of_json(good),
        b'{"cups": 3.0, "undeclared": 0}',
        b'{"cups": 3.5, "undeclared": 0}',
        b'{"cups": "3", "undeclared": 0}',
        b'{"cups": 9223372036854775808, "undeclared": 0}',
        b'{"cups": 1}',
        b'{"undeclared": 1}',
        b'{"cups": 1, "tags": [1], "undeclared": 1}',
        b"not JSON",
        b"",
        b"[" * 100_000,
        None,
        b'{"cups": 4, "extra": "t", "undeclared": 0}',
    )
    assert rows[0] == {"cups": 2, "milk": None, "extra": '{"a": [1, 2]}', "tags": ["x"]}
    assert rows[1]["cups"] == 3
    assert rows[2:-1] == [None] * 10
    assert rows[-1] == {"cups": 4, "milk": None, "extra": '"t"', "tags": None}


def test_a_required_property_of_any_type_must_be_there() -> None:
    by = decoder("json_schema", {"properties": {"any": {}, "n": {"type": "integer"}}, "required": ["any"]})
    assert decoded(by, b'{"any": [1], "n": 1}', b'{"n": 1}', b'{"any": null}') == [
        {"any": "[1]", "n": 1},
        None,
        {"any": None, "n": None},
    ]


def test_json_of_another_version_may_lack_what_is_required_now() -> None:
    old = {"type": "object", "properties": {"cups": {"type": "integer"}}}
    new = {
        "type": "object",
        "properties": {"cups": {"type": "integer"}, "size": {"type": "string"}},
        "required": ["size"],
    }
    payload = of_json({"cups": 1})
    assert decoded(decoder("json_schema", old, new), payload, payload, payload, versions=[1, 2, None]) == [
        {"cups": 1, "size": None},
        None,
        None,
    ]


@st.composite
def json_pairs(draw: Any, depth: int = 3) -> tuple[dict[str, Any], Any, Any]:
    """A schema, a value of it, and the value as the column has it."""
    compound = ["null", "object", "array", "map"] if depth else []
    kind = draw(st.sampled_from(["string", "integer", "number", "boolean", "any", *compound]))
    if kind == "null":
        schema, value, expected = draw(json_pairs(depth=depth - 1))
        return {"anyOf": [schema, {"type": "null"}]}, None, None
    if kind == "any":
        value = draw(st.one_of(st.integers(), st.text(), st.lists(st.booleans(), max_size=3)))
        return {}, value, json.dumps(value)
    if kind == "object":
        parts = draw(
            st.dictionaries(st.text(max_size=3), json_pairs(depth=depth - 1), min_size=1, max_size=4)
        )
        return (
            {"type": "object", "properties": {name: part[0] for name, part in parts.items()}},
            {name: part[1] for name, part in parts.items()},
            {name: part[2] for name, part in parts.items()},
        )
    if kind in ("array", "map"):
        schema, value, expected = draw(json_pairs(depth=depth - 1))
        if kind == "array":
            return {"type": "array", "items": schema}, [value] * 2, [expected] * 2
        return {"type": "object", "additionalProperties": schema}, {"k": value}, [("k", expected)]
    scalars: dict[str, Any] = {
        "string": st.text(),
        "integer": st.integers(-(1 << 63), (1 << 63) - 1),
        "number": st.floats(allow_nan=False, allow_infinity=False),
        "boolean": st.booleans(),
    }
    value = draw(scalars[kind])
    return {"type": kind}, value, value


@settings(max_examples=200)
@given(json_pairs())
def test_every_value_of_a_json_schema_comes_through(pair: tuple[Any, Any, Any]) -> None:
    schema, value, expected = pair
    by = decoder("json_schema", schema)
    assert decoded(by, of_json(value), b"\x00", of_json(value)) == [expected, None, expected]


# -- Avro ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ("int", "int"),
        ("null", "string"),
        ({"type": "long", "logicalType": "timestamp-millis"}, "timestamp"),
        ({"type": "long", "logicalType": "local-timestamp-micros"}, "timestamp_ntz"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}, "decimal(10,2)"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 40, "scale": 2}, "string"),
        ({"type": "fixed", "name": "F", "size": 16}, "binary"),
        ({"type": "enum", "name": "E", "symbols": ["A"]}, "string"),
        (["null", "float"], "float"),
        (["int", "null", "long"], "bigint"),
        (["float", "double"], "double"),
        (["int", "string"], "string"),
        ({"type": "map", "values": {"type": "array", "items": "bytes"}}, "map<string,array<binary>>"),
        (record(), "string"),
        (record(("v", "int"), ("next", ["null", "R"])), "struct<v:int,next:string>"),
        ({"type": "int", "logicalType": "fortnight"}, "int"),
    ],
)
def test_types_of_avro(schema: Any, expected: str) -> None:
    assert decoder("avro", schema).data_type.simpleString() == expected


def test_avro_values() -> None:
    schema = record(
        ("day", {"type": "int", "logicalType": "date"}),
        ("at", {"type": "long", "logicalType": "timestamp-millis"}),
        ("local", {"type": "long", "logicalType": "local-timestamp-micros"}),
        ("price", {"type": "bytes", "logicalType": "decimal", "precision": 6, "scale": 2}),
        ("id", {"type": "string", "logicalType": "uuid"}),
        ("time", {"type": "long", "logicalType": "time-micros"}),
        ("either", ["null", "string", "bytes"]),
        ("tree", ["null", record(("v", "int"), ("next", ["null", "T"]), name="T")]),
        ("sizes", {"type": "map", "values": "float"}),
    )
    at = datetime.datetime(2026, 11, 16, 4, 30, tzinfo=datetime.UTC)
    value = {
        "day": at.date(),
        "at": at,
        "local": at.replace(tzinfo=None),
        "price": Decimal("12.30"),
        "id": "9f1c1c1e-8c1e-4b7e-9d0a-000000000001",
        "time": datetime.time(1, 2, 3, 4),
        "either": b"\x00\x01",
        "tree": {"v": 1, "next": {"v": 2, "next": None}},
        "sizes": {"small": 0.5},
    }
    payload = of_avro(schema, value)
    expected = {
        **value,
        "time": 3_723_000_004,
        "either": '"AAE="',
        "tree": {"v": 1, "next": '{"v":2,"next":null}'},
        "sizes": [("small", 0.5)],
    }
    by = decoder("avro", schema)
    assert decoded(by, payload, payload[:-1], payload + b"\x00", b"") == [expected, None, None, None]


def test_an_avro_decimal_beyond_its_precision_is_null() -> None:
    kind = {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}
    by = decoder("avro", kind)
    wide = of_avro("bytes", (1234567).to_bytes(3, "big", signed=True))
    assert decoded(by, of_avro("bytes", b"\x05"), wide, of_avro("bytes", b"\x06")) == [
        Decimal("0.05"),
        None,
        Decimal("0.06"),
    ]


def test_avro_of_other_versions_is_resolved() -> None:
    first = record(("cups", "int"), ("note", "string"))
    second = record(("cups", "string"))
    third = record(("cups", "long"))
    third["fields"].append({"name": "size", "type": "string", "default": "tall"})
    by = decoder("avro", first, second, third)
    own, old = {"cups": 1 << 40, "size": "small"}, {"cups": 2, "note": "x"}
    rows = decoded(
        by,
        of_avro(third, own),
        of_avro(first, old),
        of_avro(second, {"cups": "three"}),
        of_avro(third, own),
        of_avro(first, old),
        versions=[3, 1, 2, None, 1],
    )
    assert rows == [own, {"cups": 2, "size": "tall"}, None, own, {"cups": 2, "size": "tall"}]
    assert isinstance(by.fetch, Versions)
    assert by.fetch.asked == [0, 1, 2], "a version is asked for once"


def test_milliseconds_of_one_version_are_microseconds_of_the_next() -> None:
    def at(unit: str) -> dict[str, Any]:
        return record(("at", {"type": "long", "logicalType": f"timestamp-{unit}"}))

    moment = datetime.datetime(2026, 11, 16, tzinfo=datetime.UTC)
    payload = of_avro(at("millis"), {"at": moment})
    assert decoded(decoder("avro", at("millis"), at("micros")), payload, versions=[1]) == [{"at": moment}]


def test_rows_of_a_version_that_is_gone_are_null() -> None:
    by = decoder("avro", GONE, "int")
    assert decoded(by, of_avro("int", 1), of_avro("int", 1), versions=[1, 2]) == [None, 1]


@pytest.mark.parametrize("error", [Unavailable("no broker"), Refused("not allowed", "permission_denied")])
def test_a_registry_that_cannot_be_asked_is_no_reason_for_null(error: Exception) -> None:
    by = decoder("avro", "int", "long")

    def fails(subject: str, version: int) -> SchemaResponse:
        raise error

    lost = Decoder(by.subject, by.schema_id, by.version, by.kind, by.definition, fails)
    with pytest.raises(type(error)):
        decoded(lost, of_avro("int", 1), versions=[1])


def test_rows_of_another_subject_are_null() -> None:
    by = decoder("string", b"")
    ids = pa.array([SUBJECT_ID, 8, None, 0], pa.int64())
    assert by.decode(pa.array([b"a", b"b", b"c", b"d"]), ids).to_pylist() == ["a", None, "c", "d"]


# -- Protobuf ------------------------------------------------------------------------------------

ORDER = b"""
syntax = "proto3";
package shop;
import "google/protobuf/timestamp.proto";
import "google/protobuf/duration.proto";
import "google/protobuf/wrappers.proto";
import "google/protobuf/struct.proto";
message Order {
  int32 cups = 1;
  uint64 serial = 2;
  optional string note = 3;
  Size size = 4;
  repeated Line lines = 5;
  map<string, Line> by_name = 6;
  google.protobuf.Timestamp at = 7;
  google.protobuf.Duration took = 8;
  google.protobuf.Int64Value tip = 9;
  google.protobuf.Struct more = 10;
  oneof payment { string card = 11; double cash = 12; }
  Order parent = 13;
  map<int32, bytes> blobs = 14;
  repeated Size sizes = 15;
}
message Line { string item = 1; float price = 2; }
enum Size { SMALL = 0; TALL = 1; }
"""


def test_protobuf_values() -> None:
    by = decoder("protobuf", ORDER)
    assert by.definition != ORDER, "executors need no compiler"
    line = "struct<item:string,price:float>"
    assert by.data_type.simpleString() == (
        f"struct<cups:int,serial:decimal(20,0),note:string,size:string,lines:array<{line}>,"
        f"by_name:map<string,{line}>,at:timestamp,took:interval day to second,tip:bigint,more:string,"
        "card:string,cash:double,parent:string,blobs:map<int,binary>,sizes:array<string>>"
    )
    payload = codec_for(SchemaType.PROTOBUF, by.definition).encode(
        {
            "cups": 2,
            "serial": str((1 << 64) - 1),
            "size": 7,
            "lines": [{"item": "tea", "price": 1.5}],
            "byName": {"tea": {"item": "tea"}},
            "at": "2026-11-16T04:30:00.000001Z",
            "took": "-1.5s",
            "tip": "3",
            "more": {"a": [1]},
            "card": "",
            "parent": {"cups": 1},
            "blobs": {"1": "AAE="},
            "sizes": ["TALL", "SMALL"],
        }
    )
    assert decoded(by, payload, b"\xff", b"", b"\x0a\x01x")[:2] == [
        {
            "cups": 2,
            "serial": Decimal((1 << 64) - 1),
            "note": None,
            "size": "7",
            "lines": [{"item": "tea", "price": 1.5}],
            "by_name": [("tea", {"item": "tea", "price": 0.0})],
            "at": datetime.datetime(2026, 11, 16, 4, 30, 0, 1, tzinfo=datetime.UTC),
            "took": datetime.timedelta(seconds=-1.5),
            "tip": 3,
            "more": '{"a": [1.0]}',
            "card": "",
            "cash": None,
            "parent": '{"cups": 1}',
            "blobs": [(1, b"\x00\x01")],
            "sizes": ["TALL", "SMALL"],
        },
        None,
    ]


# -- all of them ---------------------------------------------------------------------------------

EVERY = [
    ("string", b""),
    ("number", b""),
    ("json_schema", {"properties": {"a": {"type": "array"}, "b": {"type": "integer"}}}),
    ("avro", record(("v", "int"), ("next", ["null", "R"]), ("m", {"type": "map", "values": "bytes"}))),
    ("protobuf", ORDER),
]
OF_EVERY_KIND = pytest.mark.parametrize(("kind", "definition"), EVERY, ids=[kind for kind, _ in EVERY])


@OF_EVERY_KIND
def test_no_bytes_raise(kind: str, definition: Any) -> None:
    by = decoder(kind, definition)

    @settings(max_examples=100)
    @given(st.lists(st.binary(max_size=40), max_size=10))
    def decodes(payloads: list[bytes]) -> None:
        decoded(by, *payloads)

    decodes()


@OF_EVERY_KIND
def test_it_travels(kind: str, definition: Any) -> None:
    by = decoder(kind, definition)
    other = pickle.loads(pickle.dumps(by))
    assert (other.data_type, other.arrow_type) == (by.data_type, by.arrow_type)


def test_a_slice_of_rows_is_that_slice() -> None:
    rows = pa.array([b"1", b"x", b"3"], pa.binary()).slice(1)
    assert decoder("number", b"").decode(rows).to_pylist() == [None, 3.0]
