"""JSON Schema, rule by rule: when every value of the writer is a value of the reader."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sava.schemas.errors import PayloadInvalid
from sava.schemas.json_containment import find_problems
from sava.schemas.json_schema import Document, Evaluator

STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}


def problems(reader: Any, writer: Any) -> list[str]:
    return find_problems(Document(reader), Document(writer))


def obj(properties: dict[str, Any] | None = None, *required: str, **more: Any) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", **more}
    if properties is not None:
        schema["properties"] = properties
    if required:
        schema["required"] = list(required)
    return schema


def array(items: Any = True, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


SHAPES = {
    "circle": obj({"kind": {"const": "circle"}, "r": NUMBER}, "kind", "r"),
    "square": obj({"kind": {"const": "square"}, "a": NUMBER}, "kind", "a"),
    "point": obj({"kind": {"const": "point"}}, "kind"),
}

CONTAINED = {
    "anything": (True, STRING),
    "an empty schema": ({}, obj({"a": STRING})),
    "nothing": (STRING, False),
    "the same": (obj({"a": STRING}, "a"), obj({"a": STRING}, "a")),
    "integer in number": (NUMBER, INTEGER),
    "type in list": ({"type": ["string", "null"]}, STRING),
    "list in wider list": ({"type": ["string", "null", "integer"]}, {"type": ["integer", "string"]}),
    "bounds are relaxed": ({"minimum": 1, "maximum": 10}, {"type": "integer", "minimum": 2, "maximum": 9}),
    "exclusive at the bound": ({"minimum": 1}, {"exclusiveMinimum": 1, "type": "number"}),
    "multiple of a multiple": ({"multipleOf": 0.5}, {"type": "number", "multipleOf": 1.5}),
    "integers are multiples of 1": ({"multipleOf": 1}, INTEGER),
    "number bounds do not concern strings": ({"minimum": 5}, STRING),
    "length is relaxed": (
        {"minLength": 1, "maxLength": 9},
        {"type": "string", "minLength": 2, "maxLength": 9},
    ),
    "the same pattern": ({"pattern": "^a"}, {"type": "string", "pattern": "^a", "maxLength": 3}),
    "enum grows": ({"enum": ["a", "b", 3]}, {"enum": ["a", 3]}),
    "const in enum": ({"enum": ["a", "b"]}, {"const": "a"}),
    "const in type": (STRING, {"const": "a"}),
    "enum values that fit": ({"type": "string", "maxLength": 2}, {"enum": ["a", "bb"]}),
    "enum values that the writer excludes": (STRING, {"type": "string", "enum": ["a", 1]}),
    "optional property added": (obj({"a": STRING, "b": STRING}, "a"), obj({"a": STRING}, "a")),
    "optional property removed": (obj({"a": STRING}, "a"), obj({"a": STRING, "b": STRING}, "a")),
    "required becomes optional": (obj({"a": STRING}), obj({"a": STRING}, "a")),
    "property is widened": (obj({"a": NUMBER}), obj({"a": INTEGER})),
    "closed stays closed": (
        obj({"a": STRING, "b": STRING}, additionalProperties=False),
        obj({"a": STRING}, additionalProperties=False),
    ),
    "closed is opened": (obj({"a": STRING}), obj({"a": STRING}, additionalProperties=False)),
    "additional type is widened": (obj(additionalProperties=NUMBER), obj(additionalProperties=INTEGER)),
    "new property fits the additional type": (
        obj({"a": NUMBER}, additionalProperties=NUMBER),
        obj(additionalProperties=INTEGER),
    ),
    "pattern properties are widened": (
        obj(patternProperties={"^x": NUMBER}),
        obj(patternProperties={"^x": INTEGER}),
    ),
    "a pattern that no named property has": (
        obj({"a": STRING}, patternProperties={"^x": INTEGER}),
        obj({"a": STRING}, additionalProperties=False),
    ),
    "required count as properties": (obj(None, minProperties=1), obj({"a": STRING}, "a")),
    "items are widened": (array(NUMBER), array(INTEGER)),
    "fewer items": (array(maxItems=5, minItems=1), array(maxItems=4, minItems=2)),
    "one item is unique": (array(uniqueItems=True), array(maxItems=1)),
    "prefix is widened": (
        {"prefixItems": [NUMBER], "items": True},
        {"type": "array", "prefixItems": [INTEGER, STRING], "items": False},
    ),
    "items of old drafts": (
        {"$schema": "http://json-schema.org/draft-07/schema#", "items": [NUMBER], "additionalItems": STRING},
        {"type": "array", "prefixItems": [INTEGER], "items": STRING},
    ),
    "exclusive bounds of draft 4": (
        {"minimum": 1},
        {
            "$schema": "http://json-schema.org/draft-04/schema#",
            "type": "number",
            "minimum": 1,
            "exclusiveMinimum": True,
        },
    ),
    "description and title": (
        {"title": "a", **STRING},
        {"title": "b", "description": "c", "default": "x", **STRING},
    ),
    "reference is inlined": (
        obj({"a": STRING}),
        {"$defs": {"s": STRING}, **obj({"a": {"$ref": "#/$defs/s"}})},
    ),
    "allOf of the reader": ({"allOf": [NUMBER, {"minimum": 0}]}, {"type": "integer", "minimum": 3}),
    "allOf of the writer": (
        obj({"a": STRING, "b": STRING}, "a", "b"),
        {"allOf": [obj({"a": STRING}, "a"), obj({"b": STRING}, "b")]},
    ),
    "allOf of both, one part relaxed": (
        {"allOf": [obj({"a": STRING}, "a"), obj({"b": NUMBER})]},
        {"allOf": [obj({"a": STRING}, "a"), obj({"b": INTEGER})]},
    ),
    "anyOf grows": ({"anyOf": [STRING, INTEGER, {"type": "null"}]}, {"anyOf": [STRING, INTEGER]}),
    "anyOf narrows for the writer": (NUMBER, {"anyOf": [INTEGER, NUMBER]}),
    "oneOf of different types grows": (
        {"oneOf": [STRING, INTEGER, {"type": "null"}]},
        {"oneOf": [INTEGER, STRING]},
    ),
    "oneOf told apart by a constant grows": (
        {"oneOf": [SHAPES["circle"], SHAPES["square"], SHAPES["point"]]},
        {"oneOf": [SHAPES["circle"], SHAPES["square"]]},
    ),
    "what is not compared is the same": (
        obj({"a": NUMBER}, **{"if": {"required": ["a"]}, "then": {"minProperties": 2}}),
        obj({"a": INTEGER}, **{"if": {"required": ["a"]}, "then": {"minProperties": 2}}),
    ),
    "not is the same": ({"not": STRING}, {"not": STRING, "type": "integer"}),
    "format is dropped": (STRING, {"type": "string", "format": "email"}),
}

NOT_CONTAINED = {
    "nothing is allowed": (False, STRING, "no value"),
    "type changed": (STRING, INTEGER, "writer may write integer"),
    "number is not integer": (INTEGER, NUMBER, "fraction"),
    "any type": (STRING, {}, "any type"),
    "type removed from list": (STRING, {"type": ["string", "null"]}, "null"),
    "minimum raised": ({"minimum": 2}, {"type": "integer", "minimum": 1}, "minimum"),
    "maximum added": ({"maximum": 2}, INTEGER, "maximum"),
    "bound becomes exclusive": ({"exclusiveMaximum": 2}, {"type": "integer", "maximum": 2}, "maximum"),
    "multipleOf changed": ({"multipleOf": 2}, {"type": "integer", "multipleOf": 3}, "multipleOf"),
    "minLength added": ({"minLength": 1}, STRING, "minLength"),
    "maxLength lowered": ({"maxLength": 1}, {"type": "string", "maxLength": 2}, "maxLength"),
    "pattern changed": ({"pattern": "^a"}, {"type": "string", "pattern": "^ab"}, "pattern"),
    "enum shrinks": ({"enum": ["a"]}, {"enum": ["a", "b"]}, "'b'"),
    "enum added": ({"enum": ["a"]}, STRING, "listed values"),
    "true is not 1": ({"enum": [1]}, {"enum": [True]}, "True"),
    "const changed": ({"const": 1}, {"const": 2}, "2"),
    "property becomes required": (
        obj({"a": STRING}, "a"),
        obj({"a": STRING}),
        r"\$\.a: required by the reader",
    ),
    "required property added": (obj({"a": STRING, "b": STRING}, "b"), obj({"a": STRING}), r"\$\.b"),
    "required property removed": (obj({"a": STRING}), obj({"a": STRING, "b": STRING}, "b"), "not declared"),
    "property type changed": (obj({"a": INTEGER}), obj({"a": STRING}), r"\$\.a: "),
    "nested property": (obj({"a": obj({"b": INTEGER})}), obj({"a": obj({"b": STRING})}), r"\$\.a\.b: "),
    "property removed from a closed object": (
        obj({}, additionalProperties=False),
        obj({"a": STRING}, additionalProperties=False),
        r"\$\.a",
    ),
    "object is closed": (obj({}, additionalProperties=False), obj({}), "additional"),
    "additional type added": (obj(additionalProperties=STRING), obj(), "additional"),
    "additional type changed": (
        obj(additionalProperties=STRING),
        obj(additionalProperties=INTEGER),
        r"\$\.\*",
    ),
    "property added where the writer is open in words": (
        obj({"a": STRING}),
        obj({}, additionalProperties=True),
        r"\$\.a",
    ),
    "pattern property added": (obj(patternProperties={"^x": STRING}), obj(), "such properties"),
    "pattern property narrowed": (
        obj(patternProperties={"^x": INTEGER}),
        obj(patternProperties={"^x": NUMBER}),
        r"\^x",
    ),
    "pattern property against closed": (
        obj(additionalProperties=False),
        obj(patternProperties={"^x": STRING}, additionalProperties=False),
        r"\^x",
    ),
    "minProperties": (obj(None, minProperties=2), obj({"a": STRING}, "a"), "minProperties"),
    "items changed": (array(INTEGER), array(STRING), r"\$\[\]"),
    "items added": (array(INTEGER), array(), r"\$\[\]"),
    "maxItems added": (array(maxItems=1), array(), "maxItems"),
    "uniqueItems added": (array(uniqueItems=True), array(), "unique"),
    "prefix narrowed": ({"prefixItems": [INTEGER]}, {"type": "array", "prefixItems": [NUMBER]}, r"\$\[0\]"),
    "allOf part added": ({"allOf": [NUMBER, {"minimum": 0}]}, NUMBER, "minimum"),
    "anyOf shrinks": ({"anyOf": [STRING]}, {"anyOf": [STRING, INTEGER]}, "anyOf"),
    "anyOf for a plain type": ({"anyOf": [STRING, INTEGER]}, {"type": "null"}, "anyOf"),
    "oneOf branches that overlap": (
        {"oneOf": [INTEGER, {"minimum": 5}]},
        {"type": "integer", "maximum": 3},
        "oneOf",
    ),
    "not is added": ({"not": STRING}, INTEGER, "not has changed"),
    "if is changed": (
        {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["c"]}},
        "if, then",
    ),
    "contains is added": (array(contains=STRING), array(), "contains"),
    "format is added": ({"type": "string", "format": "date"}, STRING, "format"),
    "dependentRequired changed": (
        obj(dependentRequired={"a": ["b"]}),
        obj(dependentRequired={"a": ["c"]}),
        "dependentRequired",
    ),
    "propertyNames changed": (obj(propertyNames={"maxLength": 3}), obj(), "propertyNames"),
    "unevaluatedProperties in a changed schema": (
        obj({"a": STRING, "b": STRING}, unevaluatedProperties=False),
        obj({"a": STRING}, unevaluatedProperties=False),
        "unevaluatedProperties",
    ),
    "an unknown keyword is added": ({"x-unit": "m", **NUMBER}, NUMBER, "unknown meaning"),
    "an unknown keyword is dropped": (NUMBER, {"x-unit": "m", **NUMBER}, "unknown meaning"),
    "an unknown keyword is changed": (
        {"x-unit": "m", **NUMBER},
        {"x-unit": "ft", **NUMBER},
        "unknown meaning",
    ),
    "a definition that is referred to changed": (
        {"$defs": {"s": INTEGER}, **obj({"a": {"$ref": "#/$defs/s"}})},
        {"$defs": {"s": STRING}, **obj({"a": {"$ref": "#/$defs/s"}})},
        r"\$\.a",
    ),
}


@pytest.mark.parametrize(("reader", "writer"), CONTAINED.values(), ids=CONTAINED.keys())
def test_these_are_contained(reader: Any, writer: Any) -> None:
    assert problems(reader, writer) == []


@pytest.mark.parametrize(("reader", "writer", "where"), NOT_CONTAINED.values(), ids=NOT_CONTAINED.keys())
def test_these_are_not_contained(reader: Any, writer: Any, where: str) -> None:
    found = problems(reader, writer)
    assert found
    assert any(re.search(where, each) for each in found), found


def tree(value: Any) -> dict[str, Any]:
    node = obj({"value": value, "children": array({"$ref": "#/$defs/node"})}, "value")
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}


def test_recursive_schemas_are_compared_once_around() -> None:
    assert problems(tree(NUMBER), tree(INTEGER)) == []
    assert problems(tree(INTEGER), tree(NUMBER)) != []


def test_in_old_dialects_a_reference_stands_alone() -> None:
    draft = {"$schema": "http://json-schema.org/draft-07/schema#", "definitions": {"s": STRING}}
    reader = {**draft, "properties": {"a": {"$ref": "#/definitions/s", "maxLength": 1}}}
    assert problems(reader, {**draft, **obj({"a": STRING})}) == []
    new_draft = {"$defs": {"s": STRING}, "properties": {"a": {"$ref": "#/$defs/s", "maxLength": 1}}}
    assert problems(new_draft, obj({"a": STRING})) != []


def test_a_schema_that_refers_to_itself_only_is_given_up_on_as_a_problem() -> None:
    assert problems(STRING, {"$ref": "#"}) != []
    assert problems({"$ref": "#"}, {"allOf": [{"$ref": "#"}], "title": "x"}) != []


def test_alternatives_without_end_are_given_up_on_as_a_problem() -> None:
    choice = {"anyOf": [STRING, INTEGER, {"type": "null"}, {"type": "boolean"}]}
    assert any("too large" in each for each in problems(STRING, {"allOf": [choice] * 20, "title": "x"}))


# -- a reader that is said to fit accepts what the writer accepts --------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from([0.5, 1.5]) | st.text("ab", max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
LEAVES = st.sampled_from(
    [
        True,
        STRING,
        INTEGER,
        NUMBER,
        {"type": "null"},
        {"type": ["string", "integer"]},
        {"type": "integer", "minimum": 0},
        {"type": "number", "exclusiveMaximum": 2},
        {"type": "string", "maxLength": 2},
        {"enum": [1, "a", None]},
        {"const": "a"},
        {"multipleOf": 2},
        {"not": STRING},
    ]
)


def _schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.sampled_from("abc")
    return st.one_of(
        st.builds(
            lambda properties, required, additional: {
                "type": "object",
                "properties": properties,
                "required": sorted(required),
                "additionalProperties": additional,
            },
            st.dictionaries(names, inner, max_size=2),
            st.sets(names, max_size=2),
            st.just(False) | inner,
        ),
        st.builds(
            lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)
        ),
        st.builds(lambda first, rest: {"prefixItems": [first], "items": rest}, inner, inner),
        st.builds(
            lambda branches, key: {key: branches},
            st.lists(inner, min_size=1, max_size=3),
            st.sampled_from(["anyOf", "oneOf", "allOf"]),
        ),
    )


SCHEMAS = st.recursive(LEAVES, _schemas, max_leaves=5)


@given(schemas=st.lists(SCHEMAS, min_size=1, max_size=6), values=st.lists(VALUES, min_size=1, max_size=10))
@settings(max_examples=150)
def test_no_value_of_the_writer_is_refused_by_a_reader_that_fits(
    schemas: list[Any], values: list[Any]
) -> None:
    """The objects here say what happens to undeclared properties, so there is nothing to be lenient about.

    A schema takes longer to make up and to read than to compare, so each is compared with several."""
    documents = [Document(schema) for schema in schemas]
    for schema, writer in zip(schemas, documents, strict=True):
        same = Document(json.loads(json.dumps(schema)))
        assert not find_problems(same, writer), "every schema contains itself"
        accepted = [value for value in values if _accepts(writer, value)]
        for reader in documents:
            if reader is not writer and not find_problems(reader, writer):
                for value in accepted:
                    assert _accepts(reader, value), json.dumps(value)


def _accepts(document: Document, value: Any) -> bool:
    try:
        Evaluator(document).check(value)
    except PayloadInvalid:
        return False
    return True
