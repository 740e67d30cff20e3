"""Reading Avro schemas: what is one, what is not, and its canonical form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastavro.schema import to_parsing_canonical_form

from sava.schemas import avro as model
from sava.schemas.definition import fingerprint, read_schema
from sava.schemas.errors import SchemaInvalid
from sava.schemas.types import SchemaType

POINT = {
    "type": "record",
    "name": "Point",
    "namespace": "geo",
    "doc": "where",
    "fields": [{"name": "x", "type": {"type": "int"}}, {"name": "y", "type": ["null", "int"]}],
}


def read(schema: Any) -> model.Node:
    return model.read(schema)


def record(*fields: dict[str, Any], name: str = "R", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def print_of(schema: Any) -> str:
    return fingerprint(read_schema(SchemaType.AVRO, json.dumps(schema).encode()))


def test_a_named_type_can_be_used_by_its_name_and_within_itself() -> None:
    tree = read(
        record(
            {"name": "left", "type": ["null", "Tree"]},
            {"name": "right", "type": ["null", "io.sava.Tree"]},
            name="Tree",
            namespace="io.sava",
        )
    )
    assert isinstance(tree, model.AvroRecord)
    left, right = (each.type for each in tree.fields)
    assert isinstance(left, model.Union)
    assert isinstance(right, model.Union)
    assert left.branches[1] is tree is right.branches[1]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("strin", "not defined"),
        (7, "not an Avro schema"),
        ({}, "has no type"),
        ({"type": "array"}, "'items'"),
        ({"type": "map"}, "'values'"),
        ([], "no branch"),
        (["int", "int"], "twice"),
        (["null", ["int"]], "inside a union"),
        ({"type": "record", "name": "R"}, "'fields'"),
        ({"type": "record", "name": "R", "fields": {}}, "not a list"),
        ({"type": "record", "name": "9R", "fields": []}, "cannot be the name"),
        ({"type": "record", "name": "int", "fields": []}, "cannot be the name"),
        ({"type": "record", "name": 5, "fields": []}, "not a name"),
        (record({"name": "a b", "type": "int"}), "cannot be the name of a field"),
        (record({"name": "a", "type": "int"}, {"name": "a", "type": "int"}), "two fields"),
        (record({"name": "a"}), "'type'"),
        (record({"name": "a", "type": "int", "aliases": "b"}), "aliases"),
        (record({"name": "a", "type": "int", "default": "1"}), "not of its type"),
        (record({"name": "a", "type": "int", "default": 1 << 40}), "not of its type"),
        (record({"name": "a", "type": ["null", "int"], "default": "x"}), "not of its type"),
        ({"type": "enum", "name": "E", "symbols": ["A", "A"]}, "twice"),
        ({"type": "enum", "name": "E", "symbols": []}, "none"),
        ({"type": "enum", "name": "E", "symbols": ["A"], "default": "B"}, "default"),
        ({"type": "enum", "name": "E", "symbols": ["a-b"]}, "names"),
        ({"type": "fixed", "name": "F", "size": -1}, "size"),
        ({"type": "fixed", "name": "F", "size": True}, "size"),
        ([record(name="A"), record(name="A")], "defined twice"),
        ({"type": "bytes", "logicalType": "decimal"}, "precision"),
        ({"type": "bytes", "logicalType": "decimal", "precision": 2, "scale": 3}, "precision"),
        ({"type": "array", "items": "null"}, "no bytes"),
        ({"type": "array", "items": record()}, "no bytes"),
    ],
)
def test_what_is_no_schema_is_refused_with_a_reason(schema: Any, reason: str) -> None:
    with pytest.raises(SchemaInvalid, match=reason):
        read(schema)


def test_a_value_without_bytes_cannot_hold_a_vast_number_of_values() -> None:
    """Each type has two fields of the one before: forty lines, a billion values, no byte."""
    fields = [record({"name": "a", "type": "null"}, name="T0")]
    fields += [
        record(
            {"name": "a", "type": f"T{level - 1}"}, {"name": "b", "type": f"T{level - 1}"}, name=f"T{level}"
        )
        for level in range(1, 40)
    ]
    with pytest.raises(SchemaInvalid, match="vast number"):
        read(fields)


def test_defaults_of_every_type_are_understood() -> None:
    read(
        record(
            {"name": "a", "type": {"type": "double"}, "default": 1},
            {"name": "b", "type": "bytes", "default": "\u00ff"},
            {"name": "c", "type": {"type": "array", "items": "int"}, "default": [1, 2]},
            {"name": "d", "type": {"type": "map", "values": "string"}, "default": {"k": "v"}},
            {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["A"]}, "default": "A"},
            {"name": "f", "type": {"type": "fixed", "name": "F", "size": 2}, "default": "ab"},
            {"name": "g", "type": record({"name": "n", "type": "int"}, name="N"), "default": {"n": 1}},
            {"name": "h", "type": ["int", "null"], "default": None},
        )
    )


def test_canonical_form_is_the_specifications() -> None:
    assert json.dumps(model.canonical(read(POINT)), separators=(",", ":")) == to_parsing_canonical_form(POINT)


def test_spacing_docs_and_namespaces_do_not_change_the_fingerprint() -> None:
    same = {
        "name": "geo.Point",
        "type": "record",
        "fields": [{"name": "x", "type": "int"}, {"type": ["null", {"type": "int"}], "name": "y"}],
    }
    assert print_of(POINT) == print_of(same)
    assert print_of(POINT).startswith("sha256:")
    assert len(print_of(POINT)) == len("sha256:") + 64


@pytest.mark.parametrize(
    "change",
    [{"default": 0}, {"aliases": ["old"]}, {"type": {"type": "int", "logicalType": "date"}}],
)
def test_what_changes_how_data_is_read_changes_the_fingerprint(change: dict[str, Any]) -> None:
    plain = {"name": "x", "type": "int"}
    assert print_of(record(plain)) != print_of(record(plain | change))


def test_a_primitive_can_be_named_without_quotes() -> None:
    assert fingerprint(read_schema(SchemaType.AVRO, b"string")) == print_of("string")
