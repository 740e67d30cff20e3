"""Avro's schema resolution, rule by rule: who can read what whom wrote."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sava.schemas import avro as model
from sava.schemas.avro import find_problems

PRIMITIVES = ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
PROMOTIONS = {
    ("int", "long"),
    ("int", "float"),
    ("int", "double"),
    ("long", "float"),
    ("long", "double"),
    ("float", "double"),
    ("string", "bytes"),
    ("bytes", "string"),
}


def record(*fields: dict[str, Any], name: str = "R", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def field(name: str, kind: Any = "int", **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


def enum(*symbols: str, name: str = "E", **more: Any) -> dict[str, Any]:
    return {"type": "enum", "name": name, "symbols": list(symbols), **more}


def fixed(size: int, name: str = "F", **more: Any) -> dict[str, Any]:
    return {"type": "fixed", "name": name, "size": size, **more}


def problems(reader: Any, writer: Any) -> list[str]:
    return find_problems(model.read(reader), model.read(writer))


@pytest.mark.parametrize("writer", PRIMITIVES)
@pytest.mark.parametrize("reader", PRIMITIVES)
def test_primitives_are_read_as_themselves_or_promoted(writer: str, reader: str) -> None:
    assert (not problems(reader, writer)) == (reader == writer or (writer, reader) in PROMOTIONS)


@pytest.mark.parametrize(
    ("reader", "writer"),
    [
        pytest.param(
            record(field("a"), field("b", default=0)), record(field("a")), id="new field with default"
        ),
        pytest.param(record(field("a")), record(field("a"), field("b")), id="field of the writer only"),
        pytest.param(record(field("b", aliases=["a"])), record(field("a")), id="field renamed with alias"),
        pytest.param(record(field("a", "long")), record(field("a", "int")), id="field promoted"),
        pytest.param(record(name="x.R"), record(name="y.R"), id="unqualified names match"),
        pytest.param(record(name="New", aliases=["Old"]), record(name="Old"), id="record renamed with alias"),
        pytest.param(
            record(name="New", namespace="n", aliases=["Old"]),
            record(name="n.Old"),
            id="alias in the namespace",
        ),
        pytest.param(["null", "long"], "int", id="into a union"),
        pytest.param("long", ["int", "long"], id="all branches fit"),
        pytest.param(["null", "string", "int"], ["null", "int"], id="union grows"),
        pytest.param(enum("A", "B"), enum("A"), id="enum grows"),
        pytest.param(enum("A", default="A"), enum("A", "B"), id="enum with default"),
        pytest.param(fixed(4), fixed(4), id="fixed"),
        pytest.param(fixed(4, "G", aliases=["F"]), fixed(4), id="fixed renamed with alias"),
        pytest.param(
            {"type": "array", "items": "long"}, {"type": "array", "items": "int"}, id="items promoted"
        ),
        pytest.param({"type": "map", "values": "bytes"}, {"type": "map", "values": "string"}, id="values"),
        pytest.param({"type": "int", "logicalType": "date"}, "int", id="logical type is added"),
    ],
)
def test_these_can_be_read(reader: Any, writer: Any) -> None:
    assert problems(reader, writer) == []


@pytest.mark.parametrize(
    ("reader", "writer", "where"),
    [
        pytest.param(
            record(field("a"), field("b")), record(field("a")), r"\$\.b", id="new field, no default"
        ),
        pytest.param(record(field("a", "int")), record(field("a", "long")), r"\$\.a", id="narrowed"),
        pytest.param(record(field("a", "string")), record(field("a", "int")), r"\$\.a", id="type changed"),
        pytest.param(record(name="New"), record(name="Old"), "without an alias", id="record renamed"),
        pytest.param(record(), "int", "cannot be read as R", id="record and primitive"),
        pytest.param("int", ["null", "int"], r"\$\(null\)", id="a branch does not fit"),
        pytest.param(["null", "string"], "int", "no branch", id="no branch"),
        pytest.param(enum("A"), enum("A", "B"), "no symbol B", id="symbol removed"),
        pytest.param(enum("A"), enum("A", name="X"), "without an alias", id="enum renamed"),
        pytest.param(fixed(4), fixed(8), "8 bytes", id="fixed size"),
        pytest.param(fixed(4), fixed(4, "X"), "without an alias", id="fixed renamed"),
        pytest.param(
            {"type": "array", "items": "int"}, {"type": "array", "items": "string"}, r"\$\[\]", id="items"
        ),
        pytest.param(
            {"type": "map", "values": "int"}, {"type": "array", "items": "int"}, "array", id="map, array"
        ),
        pytest.param(
            {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2},
            {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 1},
            "logical type",
            id="decimal scale",
        ),
        pytest.param(
            {"type": "long", "logicalType": "timestamp-micros"},
            {"type": "long", "logicalType": "timestamp-millis"},
            "logical type",
            id="unit of time",
        ),
    ],
)
def test_these_cannot_be_read(reader: Any, writer: Any, where: str) -> None:
    found = problems(reader, writer)
    assert len(found) == 1
    assert re.search(where, found[0])


def linked_list(kind: Any, *more: dict[str, Any]) -> dict[str, Any]:
    return record(field("value", kind), field("next", ["null", "Node"]), *more, name="Node")


def test_recursive_types_are_compared_once_around() -> None:
    assert problems(linked_list("long"), linked_list("int")) == []
    assert problems(linked_list("long", field("extra", default=1)), linked_list("int")) == []
    # The reader's union around itself tells only that the branch does not fit; the value says why.
    assert any("$.value" in each for each in problems(linked_list("int"), linked_list("long")))


def test_an_assumption_that_fails_later_is_not_kept() -> None:
    """While A is compared, B is found to fit on the assumption that A does. A then fails by its last field,
    which is forgiven, since the reader has another branch for it; but B must not be taken to fit any more."""

    def pair(kind: str) -> dict[str, Any]:
        b = record(field("a", "A"), name="B")
        return record(field("b", ["null", b]), field("value", kind), name="A")

    anything = record(name="Any", aliases=["A"])
    reader = record(field("x", [pair("int"), anything]), field("y", "B"), name="W")
    writer = record(field("x", pair("string")), field("y", "B"), name="W")
    assert problems(reader, writer)
    assert not problems(record(field("x", [pair("int"), anything]), name="W"), writer)


def test_vast_unions_are_given_up_on_as_a_problem() -> None:
    union = [record(field("a", ["null", "int"]), name=f"R{index}") for index in range(600)]
    other = [record(field("a", ["null", "int"]), name=f"S{index}") for index in range(600)]
    assert any("too large" in each for each in problems(union, other))


def test_a_long_chain_of_types_is_given_up_on_as_a_problem() -> None:
    """Both sides define the types where they are not compared, and then use the last one of the chain."""
    chain: list[Any] = [record(field("a"), name="T0")]
    chain += [record(field("a", f"T{index - 1}"), name=f"T{index}") for index in range(1, 300)]
    reader = record(field("read", ["null", *chain], default=None), field("last", "T299"))
    writer = record(field("written", ["null", *chain]), field("last", "T299"))
    assert any("too deeply" in each for each in problems(reader, writer))
