"""A JSON Schema document: its dialect, its subschemas, and where its references lead.

References stay inside the document. Nothing is ever fetched: a schema that could make a broker open a
connection would be a way to make it open any connection. For the same reason of having one document, embedded
resources (``$id`` anywhere but at the top) are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import unquote

import jsonschema
from jsonschema.protocols import Validator

from sava.schemas.errors import SchemaInvalid, shortened
from sava.schemas.json_schema.patterns import longest_text

Subschema = dict[str, Any] | bool

DIALECTS: Final[dict[str, type[Validator]]] = {
    "http://json-schema.org/draft-04/schema": jsonschema.Draft4Validator,
    "http://json-schema.org/draft-06/schema": jsonschema.Draft6Validator,
    "http://json-schema.org/draft-07/schema": jsonschema.Draft7Validator,
    "https://json-schema.org/draft/2019-09/schema": jsonschema.Draft201909Validator,
    "https://json-schema.org/draft/2020-12/schema": jsonschema.Draft202012Validator,
}
DEFAULT_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_REF_STANDS_ALONE: Final = ("draft-04", "draft-06", "draft-07")
"""In these, whatever stands beside a ``$ref`` is ignored."""

_ONE: Final = (
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LIST: Final = ("allOf", "anyOf", "items", "oneOf", "prefixItems")
_MAP: Final = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
_REFERENCES: Final = ("$ref", "$dynamicRef", "$recursiveRef")
_ANCHORS: Final = ("$anchor", "$dynamicAnchor")
MAX_SUBSCHEMAS: Final = 10_000


class Document:
    """Checked when it is made: raises SchemaInvalid."""

    def __init__(self, root: Any) -> None:
        if not isinstance(root, dict | bool):
            raise SchemaInvalid("a JSON Schema is an object, true or false")
        self.root: Subschema = root
        self.dialect = _dialect(root)
        self.ref_stands_alone = any(name in self.dialect for name in _REF_STANDS_ALONE)
        self._anchors: dict[str, Subschema] = {}
        try:
            _check_by_metaschema(DIALECTS[self.dialect], root)
        except jsonschema.SchemaError as error:
            raise SchemaInvalid(f"{error.json_path}: {shortened(error.message)}") from None
        except RecursionError:
            raise SchemaInvalid("nested too deeply") from None
        schemas = list(self._walk(root))
        for schema in schemas:
            self._anchors.update((f"#{schema[key]}", schema) for key in _ANCHORS if key in schema)
        self._check_references(schemas)

    def resolve(self, reference: str) -> Subschema:
        """What a reference of this document means; raises SchemaInvalid."""
        if reference in ("", "#"):
            return self.root
        if reference in self._anchors:
            return self._anchors[reference]
        if not reference.startswith("#/"):
            raise SchemaInvalid(
                f"reference {shortened(reference)!r} does not lead into this document, and nothing is fetched"
            )
        target: Any = self.root
        for part in unquote(reference[2:]).split("/"):
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and part.isdecimal() and int(part) < len(target):
                target = target[int(part)]
            elif isinstance(target, dict) and part in target:
                target = target[part]
            else:
                raise SchemaInvalid(f"reference {shortened(reference)!r} leads nowhere")
        if not isinstance(target, dict | bool):
            raise SchemaInvalid(f"reference {shortened(reference)!r} leads to something that is no schema")
        return target

    def _check_references(self, schemas: list[dict[str, Any]]) -> None:
        """Every reference leads to a schema, also from a place that only a reference leads to."""
        seen = {id(schema) for schema in schemas}
        pending = list(schemas)
        while pending:
            schema = pending.pop()
            self._check_one(schema)
            for reference in references(schema):
                target = self.resolve(reference)
                if isinstance(target, dict) and id(target) not in seen:
                    more = [found for found in self._walk(target) if id(found) not in seen]
                    seen.update(id(found) for found in more)
                    pending += more

    def _check_one(self, schema: dict[str, Any]) -> None:
        if schema is not self.root and any(isinstance(schema.get(key), str) for key in ("$id", "id")):
            raise SchemaInvalid("an embedded resource ('$id' below the top) is not supported")
        if isinstance(pattern := schema.get("pattern"), str):
            longest_text(pattern)
        patterns = schema.get("patternProperties")
        for pattern in patterns if isinstance(patterns, dict) else ():
            longest_text(pattern)

    def _walk(self, start: Subschema) -> Iterator[dict[str, Any]]:
        pending, count = [start], 0
        while pending:
            schema = pending.pop()
            if isinstance(schema, dict):
                count += 1
                if count > MAX_SUBSCHEMAS:
                    raise SchemaInvalid(f"more than {MAX_SUBSCHEMAS} subschemas")
                yield schema
                pending.extend(children(schema))


def children(schema: dict[str, Any]) -> list[Subschema]:
    """The subschemas directly inside of one."""
    found: list[Any] = [schema[key] for key in _ONE if key in schema]
    for key in _LIST:
        if isinstance(value := schema.get(key), list):
            found += value
    for key in _MAP:
        if isinstance(value := schema.get(key), dict):
            found += value.values()
    return [each for each in found if isinstance(each, dict | bool)]


def references(schema: dict[str, Any]) -> list[str]:
    return [schema[key] for key in _REFERENCES if isinstance(schema.get(key), str)]


def _check_by_metaschema(dialect: Any, root: Subschema) -> None:
    """The library's types do not know that ``true`` is a schema."""
    dialect.check_schema(root)


def _dialect(root: Subschema) -> str:
    if not isinstance(root, dict) or "$schema" not in root:
        return DEFAULT_DIALECT
    named = root["$schema"]
    dialect = named.rstrip("#") if isinstance(named, str) else ""
    if dialect not in DIALECTS:
        raise SchemaInvalid(f"unknown dialect {shortened(repr(named))}; known are {', '.join(DIALECTS)}")
    return dialect
