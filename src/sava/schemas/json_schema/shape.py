"""The shape of a schema: its alternatives and parts, and the questions that a comparison asks about them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any, Final

from sava.schemas.bounded_json import canonical, comparable
from sava.schemas.fixpoint import TooComplex
from sava.schemas.json_schema.document import Document, Subschema, children, references

Alternative = tuple[dict[str, Any], ...]
"""Simple schemas (without ``$ref``, ``allOf``, ``anyOf``, ``oneOf``) that hold together."""

MAX_ALTERNATIVES: Final = 256
_MAX_REFERENCES: Final = 64

COMBINING: Final = frozenset(("$ref", "allOf", "anyOf", "oneOf"))
ANNOTATIONS: Final = frozenset(
    (
        "$anchor",
        "$comment",
        "$defs",
        "$dynamicAnchor",
        "$id",
        "$recursiveAnchor",
        "$schema",
        "$vocabulary",
        "default",
        "definitions",
        "deprecated",
        "description",
        "examples",
        "id",
        "readOnly",
        "title",
        "writeOnly",
    )
)
"""They do not decide what is valid. (``default`` does not either: no validator fills it in.)"""
UNDERSTOOD: Final = frozenset(
    (
        "additionalItems",
        "additionalProperties",
        "const",
        "enum",
        "exclusiveMaximum",
        "exclusiveMinimum",
        "items",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "multipleOf",
        "pattern",
        "patternProperties",
        "prefixItems",
        "properties",
        "required",
        "type",
        "uniqueItems",
    )
)
UNCHANGING: Final = (
    ("not",),
    ("if", "then", "else"),
    ("contains", "minContains", "maxContains"),
    ("propertyNames",),
    ("dependentSchemas",),
    ("dependentRequired",),
    ("dependencies",),
    ("format",),
    ("unevaluatedProperties",),
    ("unevaluatedItems",),
    ("$dynamicRef",),
    ("$recursiveRef",),
)
"""Groups of keywords that are compared for equality only. Each means something by itself, so a reader that
has the same group as the writer asks for nothing new."""
BY_SURROUNDINGS: Final = frozenset(
    ("unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef")
)
"""These mean something only together with what is around them: equal is not enough, the whole schema must be
the same."""
_KNOWN: Final = COMBINING | ANNOTATIONS | UNDERSTOOD | {name for group in UNCHANGING for name in group}

ALL_TYPES: Final = frozenset(("null", "boolean", "object", "array", "integer", "fraction", "string"))
"""'number' is an integer or a fraction, so that types are a plain set."""


# -- taking schemas apart ------------------------------------------------------------------------------------


def expand(document: Document, schemas: Iterable[Subschema]) -> list[Alternative]:
    """All alternatives of schemas that hold together; none if no value is allowed."""
    combined: list[Alternative] = [()]
    for schema in schemas:
        combined = _both(combined, _expand(document, schema, 0))
    return combined


def _expand(document: Document, schema: Subschema, depth: int) -> list[Alternative]:
    if depth > _MAX_REFERENCES:
        raise TooComplex
    if isinstance(schema, bool):
        return [()] if schema else []
    found: list[Alternative] = [()]
    if "$ref" in schema:
        found = _expand(document, document.resolve(schema["$ref"]), depth + 1)
        if document.ref_stands_alone:
            return found
    if any(key not in COMBINING and key not in ANNOTATIONS for key in schema):
        found = _both(found, [(schema,)])
    for part in schema.get("allOf", ()):
        found = _both(found, _expand(document, part, depth + 1))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            branches = [each for branch in schema[key] for each in _expand(document, branch, depth + 1)]
            found = _both(found, branches)
    return found


def _both(left: list[Alternative], right: list[Alternative]) -> list[Alternative]:
    if len(left) * len(right) > MAX_ALTERNATIVES:
        raise TooComplex
    return [first + second for first, second in product(left, right)]


def parts(document: Document, schema: Subschema) -> list[dict[str, Any]]:
    """Every simple schema that a schema is made of, whether it must hold or only may."""
    found, pending, seen = [], [schema], set[int]()
    while pending:
        each = pending.pop()
        if isinstance(each, bool) or id(each) in seen:
            continue
        seen.add(id(each))
        if "$ref" in each:
            pending.append(document.resolve(each["$ref"]))
            if document.ref_stands_alone:
                continue
        found.append(each)
        for key in ("allOf", "anyOf", "oneOf"):
            pending.extend(each.get(key, ()))
    return found


# -- questions -----------------------------------------------------------------------------------------------


def undeclared(reader: Sequence[dict[str, Any]], alternative: Alternative) -> list[str]:
    """Names that the writer requires and a reader with declared properties does not declare. Not asked of a
    reader that says something about other names too: that decides."""
    if not any("properties" in part for part in reader) or any(
        "patternProperties" in part or part.get("additionalProperties", True) is not True for part in reader
    ):
        return []
    declared = {name for part in reader for name in part.get("properties", ())}
    return sorted(required(alternative) - declared)


def required(alternative: Alternative) -> set[str]:
    return {name for part in alternative for name in part.get("required", ())}


def unknown_keywords(schemas: Iterable[dict[str, Any]]) -> set[tuple[str, bytes]]:
    return {
        (key, canonical(value)) for schema in schemas for key, value in schema.items() if key not in _KNOWN
    }


def finite_values(alternative: Alternative) -> list[Any] | None:
    """The values that ``const`` or ``enum`` leaves, if there is one; other keywords may exclude some."""
    for part in alternative:
        if "const" in part:
            return [part["const"]]
    lists: list[list[Any]] = [part["enum"] for part in alternative if "enum" in part]
    return min(lists, key=len) if lists else None


def types(part: dict[str, Any]) -> frozenset[str]:
    named = part.get("type")
    if named is None:
        return ALL_TYPES
    listed = [named] if isinstance(named, str) else named
    return frozenset(each for name in listed for each in _type(name))


def _type(name: str) -> tuple[str, ...]:
    return ("integer", "fraction") if name == "number" else (name,)


def common_types(alternative: Alternative) -> frozenset[str]:
    common = ALL_TYPES
    for part in alternative:
        common &= types(part)
    return common


def is_disjoint(document: Document, one: Subschema, other: Subschema) -> bool:
    """Surely no value in both: their types differ, or a property that both require has other values."""
    return all(
        _are_disjoint(left, right)
        for left in expand(document, (one,))
        for right in expand(document, (other,))
    )


def _are_disjoint(left: Alternative, right: Alternative) -> bool:
    if not common_types(left) & common_types(right):
        return True
    values = finite_values(left), finite_values(right)
    if values[0] is not None and values[1] is not None:
        return not {comparable(value) for value in values[0]} & {comparable(value) for value in values[1]}
    if common_types(left) | common_types(right) != {"object"}:
        return False
    return any(
        _are_disjoint(_property(left, name), _property(right, name))
        for name in required(left) & required(right)
    )


def _property(alternative: Alternative, name: str) -> Alternative:
    """Only what is said in place; a reference there tells nothing, which is the safe side."""
    found = (part.get("properties", {}).get(name) for part in alternative)
    return tuple(schema for schema in found if isinstance(schema, dict) and "$ref" not in schema)


def is_same(one: Document, left: Any, other: Document, right: Any) -> bool:
    """The same text, and all references in it lead to the same."""
    pending, seen = [(left, right)], set[tuple[int, int]]()
    while pending:
        first, second = pending.pop()
        if (id(first), id(second)) in seen:
            continue
        seen.add((id(first), id(second)))
        if not _is_equal(first, second):
            return False
        pending += [(one.resolve(ref), other.resolve(ref)) for ref in _all_references(first)]
    return True


def _is_equal(left: Any, right: Any) -> bool:
    """Of plain values; Python takes True for 1."""
    return bool(left == right) and canonical(left) == canonical(right)


def _all_references(schema: Any) -> set[str]:
    found, pending = set[str](), [schema]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            found.update(references(each))
            pending.extend(children(each))
    return found
