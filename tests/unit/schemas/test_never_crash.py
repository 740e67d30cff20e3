"""Whatever comes in, the answer is a value or a typed error: definitions, comparisons, payloads at random."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sava.schemas.definition import Schema, Validator, compare, read_schema
from sava.schemas.errors import PayloadInvalid, SchemaError
from sava.schemas.types import SchemaType

NAMES = st.sampled_from(["A", "B", "n.C"])
WORDS = st.sampled_from(
    [
        "type", "name", "fields", "items", "values", "symbols", "size", "default", "aliases", "namespace",
        "logicalType", "precision", "scale", "record", "enum", "fixed", "array", "map", "int", "string",
        "null", "properties", "required", "$ref", "#", "#/$defs/A", "$defs", "anyOf", "oneOf", "allOf", "not",
        "if", "const", "minimum", "maxLength", "pattern", "patternProperties", "additionalProperties",
        "prefixItems", "object", "number", "A", "B", "^a*$", "decimal", "uniqueItems", "contains", "format",
    ]
)  # fmt: skip
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.floats(allow_nan=False)
    | WORDS
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=3), inner, max_size=5)
    ),
    max_leaves=20,
)
MANY = settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def avro_types(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(lambda items: {"type": "array", "items": items}, inner),
        st.builds(lambda values: {"type": "map", "values": values}, inner),
        st.lists(inner, min_size=1, max_size=3),
        st.builds(
            lambda name, fields: {
                "type": "record",
                "name": name,
                "fields": [{"name": f"f{index}", "type": each} for index, each in enumerate(fields)],
            },
            NAMES,
            st.lists(inner, max_size=3),
        ),
        st.builds(
            lambda name, count: {"type": "enum", "name": name, "symbols": ["X", "Y", "Z"][:count]},
            NAMES,
            st.integers(1, 3),
        ),
    )


AVRO = st.recursive(
    st.sampled_from(["null", "int", "long", "string", "bytes", "boolean", "A", "B"]), avro_types, max_leaves=8
)


def read(kind: SchemaType, schema: Any) -> Schema | None:
    try:
        return read_schema(kind, json.dumps(schema).encode())
    except SchemaError:
        return None


def try_payloads(schema: Schema, payloads: list[bytes]) -> None:
    validator = Validator(schema)
    for payload in payloads:
        with suppress(PayloadInvalid):
            validator.validate(payload)


@pytest.mark.parametrize("kind", [SchemaType.AVRO, SchemaType.JSON_SCHEMA])
@given(one=JSON, other=JSON, payloads=st.lists(st.binary(max_size=30), max_size=3))
@MANY
def test_any_json(kind: SchemaType, one: Any, other: Any, payloads: list[bytes]) -> None:
    schemas = [schema for schema in (read(kind, one), read(kind, other)) if schema is not None]
    for old in schemas:
        try_payloads(old, payloads)
        for new in schemas:
            assert isinstance(compare(old, new, new_reads_old=True), list)


@given(definition=st.binary(max_size=200))
@MANY
def test_any_bytes(definition: bytes) -> None:
    for kind in (SchemaType.AVRO, SchemaType.JSON_SCHEMA, SchemaType.STRING):
        with suppress(SchemaError):
            read_schema(kind, definition)


@given(one=AVRO, other=AVRO, payloads=st.lists(st.binary(max_size=40), max_size=5))
@MANY
def test_avro_schemas(one: Any, other: Any, payloads: list[bytes]) -> None:
    old, new = read(SchemaType.AVRO, one), read(SchemaType.AVRO, other)
    if old is not None:
        try_payloads(old, payloads)
        assert compare(old, old, new_reads_old=True) == []
        if new is not None:
            assert compare(old, new, new_reads_old=True) == compare(new, old, new_reads_old=False)


@given(payloads=st.lists(st.binary(max_size=60), min_size=1, max_size=20))
@MANY
def test_protobuf_payloads(payloads: list[bytes]) -> None:
    source = b"""syntax = "proto3"; message M {
        string s = 1; int32 n = 2; repeated M kids = 3; map<string, M> named = 4;
        oneof x { bytes b = 5; double d = 6; }
    }"""
    try_payloads(read_schema(SchemaType.PROTOBUF, source), payloads)


@given(payload=JSON)
@MANY
def test_json_payloads(payload: Any) -> None:
    schema = read(
        SchemaType.JSON_SCHEMA,
        {
            "type": ["object", "array"],
            "properties": {"type": {"multipleOf": 0.1}, "items": {"$ref": "#"}},
            "patternProperties": {"^a": {"uniqueItems": True}},
            "additionalProperties": {"anyOf": [{"$ref": "#"}, {"type": "string", "pattern": "^[a-z]+$"}]},
            "items": {"oneOf": [{"type": "integer"}, {"minimum": 2}, {"$ref": "#"}]},
        },
    )
    assert schema is not None
    try_payloads(schema, [json.dumps(payload).encode()])
