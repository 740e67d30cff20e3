"""JSON Schema documents: dialects, references that stay inside, patterns that come to an end."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from sava.schemas.definition import Validator, fingerprint, read_schema
from sava.schemas.errors import PayloadInvalid, SchemaInvalid, SchemaTooLarge
from sava.schemas.types import MAX_DEFINITION_BYTES, SchemaType


def read(schema: Any) -> object:
    return read_schema(SchemaType.JSON_SCHEMA, json.dumps(schema).encode())


def validator(schema: Any) -> Validator:
    return Validator(read_schema(SchemaType.JSON_SCHEMA, json.dumps(schema).encode()))


def is_valid(schema: Any, value: Any) -> bool:
    try:
        validator(schema).validate(json.dumps(value).encode())
    except PayloadInvalid:
        return False
    return True


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b'{"type": NaN}', "not JSON"),
        (b'{"type": "string", "type": "number"}', "twice"),
        (b"[" * 10_000, "levels deep"),
        (b"[]", "an object, true or false"),
        (b'{"type": "strnig"}', "strnig"),
        (b'{"required": "name"}', "required"),
        (b'{"$schema": "http://example.com/mine"}', "unknown dialect"),
        (b'{"$schema": "http://json-schema.org/draft-03/schema#"}', "unknown dialect"),
        (b'{"$ref": "http://example.com/schema"}', "nothing is fetched"),
        (b'{"$ref": "other.json#/a"}', "nothing is fetched"),
        (b'{"$ref": "file:///etc/passwd"}', "nothing is fetched"),
        (b'{"$ref": "#/$defs/missing"}', "leads nowhere"),
        (b'{"$ref": "#/title", "title": "x"}', "no schema"),
        (b'{"items": {"$dynamicRef": "http://example.com/"}}', "nothing is fetched"),
        (b'{"$defs": {"a": {"$id": "http://example.com/a"}}}', "embedded resource"),
        (b'{"pattern": "("}', "regular expression|is not a 'regex'"),
        (b'{"properties": {"a": {"pattern": "(?=a)b"}}}', "without look-around"),
        (b'{"patternProperties": {"^(x)\\\\1$": true}}', "references back"),
        (b'{"$ref": "#/hidden/a", "hidden": {"a": {"pattern": "(?<!a)b"}}}', "without look-around"),
    ],
)
def test_what_is_no_usable_schema_is_refused_with_a_reason(definition: bytes, reason: str) -> None:
    with pytest.raises(SchemaInvalid, match=reason):
        read_schema(SchemaType.JSON_SCHEMA, definition)


def test_a_definition_has_a_largest_size() -> None:
    with pytest.raises(SchemaTooLarge):
        read_schema(SchemaType.JSON_SCHEMA, b" " * (MAX_DEFINITION_BYTES + 1))


def test_the_order_of_keys_does_not_change_the_fingerprint() -> None:
    one = read_schema(SchemaType.JSON_SCHEMA, b'{"type": "object", "title": "T"}')
    other = read_schema(SchemaType.JSON_SCHEMA, b'{ "title":"T","type":"object" }')
    assert fingerprint(one) == fingerprint(other)


@pytest.mark.parametrize(
    "dialect",
    [
        "http://json-schema.org/draft-04/schema#",
        "http://json-schema.org/draft-06/schema#",
        "http://json-schema.org/draft-07/schema",
        "https://json-schema.org/draft/2019-09/schema",
        "https://json-schema.org/draft/2020-12/schema",
    ],
)
def test_the_dialect_is_the_one_that_the_schema_names(dialect: str) -> None:
    schema = {
        "$schema": dialect,
        "definitions": {"id": {"type": "integer"}},
        "items": {"$ref": "#/definitions/id"},
    }
    assert is_valid(schema, [1, 2])
    assert not is_valid(schema, [1, "2"])


def test_the_default_dialect_is_2020_12() -> None:
    assert is_valid({"prefixItems": [{"type": "string"}]}, ["a", 1])
    assert not is_valid({"prefixItems": [{"type": "string"}]}, [1])


def test_references_lead_to_pointers_anchors_and_the_document_itself() -> None:
    schema = {
        "$defs": {"a/b": {"type": "integer"}, "c": {"$anchor": "here", "type": "string"}},
        "properties": {
            "pointer": {"$ref": "#/$defs/a~1b"},
            "anchor": {"$ref": "#here"},
            "self": {"$ref": "#"},
            "$ref": {"type": "boolean"},
        },
    }
    assert is_valid(schema, {"pointer": 1, "anchor": "x", "self": {"pointer": 2}, "$ref": True})
    assert not is_valid(schema, {"self": {"pointer": "2"}})


# -- hostile schemas and payloads ----------------------------------------------------------------------------


def test_a_schema_that_doubles_at_every_level_is_given_up_on() -> None:
    definitions: dict[str, Any] = {"d40": {"type": "string"}}
    for level in range(40):
        branch = {"$ref": f"#/$defs/d{level + 1}"}
        definitions[f"d{level}"] = {"anyOf": [branch, branch]}
    started = time.thread_time()
    with pytest.raises(PayloadInvalid, match="too many steps"):
        validator({"$defs": definitions, "$ref": "#/$defs/d0"}).validate(b"1")
    assert time.thread_time() - started < 30


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}])
def test_a_schema_that_asks_itself_for_ever_is_given_up_on(schema: Any) -> None:
    with pytest.raises(PayloadInvalid, match=r"too deeply|too many steps"):
        validator(schema).validate(b"1")


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"{",
        b"\xff",
        b"NaN",
        b"nul",
        b'"\xed\xa0\x80"',
        b"[" * 1_000_000,
        b"[" * 65 + b"]" * 65,
        b'{"a":' * 100_000,
        b"1" * 100_000,
        b"[1] x",
    ],
)
def test_hostile_payloads_are_invalid(payload: bytes) -> None:
    with pytest.raises(PayloadInvalid):
        validator({"type": ["object", "array"], "multipleOf": 2}).validate(payload)


def test_brackets_in_strings_are_not_nesting() -> None:
    value = {"text": '[{"\\"[[[' * 100, "list": [[index] for index in range(100)]}
    validator(True).validate(json.dumps(value).encode())


def test_an_array_of_many_unlike_items_is_unique_in_no_time() -> None:
    items = [{"a": index} for index in range(50_000)]
    started = time.thread_time()
    validator({"uniqueItems": True}).validate(json.dumps(items).encode())
    assert time.thread_time() - started < 5
    assert not is_valid({"uniqueItems": True}, [*items[:10], {"a": 5}])
    assert not is_valid({"uniqueItems": True}, [1, 1.0])
    assert is_valid({"uniqueItems": True}, [1, True, "1", [1], {"1": 1}])


def test_a_reason_says_where_and_is_short() -> None:
    schema = {"properties": {"a": {"items": {"type": "string"}}}}
    with pytest.raises(PayloadInvalid) as caught:
        validator(schema).validate(json.dumps({"a": ["x", {"y": "z" * 10_000}]}).encode())
    assert caught.value.reason.startswith("$.a[1]: ")
    assert len(caught.value.reason) < 400
