"""A JSON Schema document: its dialect, its subschemas, its shape, and the evaluation of values within a
budget.

References stay inside the document. Nothing is ever fetched: a schema that could make a broker open a
connection would be a way to make it open any connection. For the same reason of having one document,
``Document`` refuses embedded resources (``$id`` anywhere but at the top).

The shape of a schema is its alternatives and parts; ``json_containment`` compares two schemas by it, and
the pipeline derives columns from it.

``Evaluator`` runs ``jsonschema`` with a budget. A schema decides how much work a value is: references can
double at every level, and a few lines then stand for a billion checks. So every keyword that is evaluated
costs a step of a budget, and a value that uses it up is invalid. Keywords are replaced where the library's
way is not bounded: ``uniqueItems`` compares all pairs in the worst case, and whatever tries a pattern
(``pattern``, ``patternProperties`` and what looks at properties beyond those) runs Python's engine. A
document is checked by the metaschema of its dialect in the same way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any, Final
from urllib.parse import unquote

import jsonschema
import jsonschema_specifications
import referencing
import referencing.exceptions
from jsonschema import validators
from jsonschema.exceptions import ValidationError
from jsonschema.protocols import Validator

from sava.errors import shown
from sava.schemas.bounds import MAX_WORK, TooComplex, canonical, comparable, compiled
from sava.schemas.errors import PayloadInvalid, SchemaInvalid, shortened

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
"""In these dialects, keywords beside a ``$ref`` are ignored."""

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
    """A document that is checked when it is made: raises SchemaInvalid."""

    def __init__(self, root: Any) -> None:
        if not isinstance(root, dict | bool):
            raise SchemaInvalid("a JSON Schema is an object, true or false")
        self.root: Subschema = root
        self.dialect = _dialect(root)
        self.ref_stands_alone = any(name in self.dialect for name in _REF_STANDS_ALONE)
        self._anchors: dict[str, Subschema] = {}
        _check_by_metaschema(self.dialect, root)
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
            compiled(pattern)
        patterns = schema.get("patternProperties")
        for pattern in patterns if isinstance(patterns, dict) else ():
            compiled(pattern)

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


def _check_by_metaschema(dialect: str, root: Subschema) -> None:
    """Without the library's ``check_schema``, which compiles patterns with Python's engine and compares the
    values of an ``enum`` with each other, all pairs."""
    meta = _bounded_class(dialect)(DIALECTS[dialect].META_SCHEMA, registry=jsonschema_specifications.REGISTRY)
    try:
        error = _first_error(meta, root, Budget(MAX_DOCUMENT_STEPS))
    except PayloadInvalid as limit:
        raise SchemaInvalid(f"as a document it is beyond the limits: {limit.reason}") from None
    if error is not None:
        raise SchemaInvalid(f"{shortened(error.json_path)}: {shortened(error.message)}")


def _dialect(root: Subschema) -> str:
    if not isinstance(root, dict) or "$schema" not in root:
        return DEFAULT_DIALECT
    named = root["$schema"]
    dialect = named.rstrip("#") if isinstance(named, str) else ""
    if dialect not in DIALECTS:
        raise SchemaInvalid(f"unknown dialect {shortened(repr(named))}; known are {', '.join(DIALECTS)}")
    return dialect


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
    """What is said in place about a property; a reference is left out, which is the safe side."""
    found = (part.get("properties", {}).get(name) for part in alternative)
    return tuple(schema for schema in found if isinstance(schema, dict) and "$ref" not in schema)


def is_same(one: Document, left: Any, other: Document, right: Any) -> bool:
    """Whether the text is the same and all references in it lead to the same."""
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
    """Equality of plain values; Python takes True for 1."""
    return bool(left == right) and canonical(left) == canonical(right)


def _all_references(schema: Any) -> set[str]:
    found, pending = set[str](), [schema]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            found.update(references(each))
            pending.extend(children(each))
    return found


MAX_STEPS: Final = 50_000
"""The most keywords that are evaluated for one value, which take a second or two."""
MAX_DOCUMENT_STEPS: Final = 1_000_000
"""The same for a document and its metaschema, which has about thirty keywords for a subschema."""

Keyword = Callable[[Any, Any, Any, Any], Iterator[ValidationError] | None]


class NotEasy(Exception):
    """A value needs more work than an event loop may do at once. It may be valid or not."""


class _OverBudget(Exception):
    pass


class Budget:
    """What may be spent on evaluating one value, or several."""

    def __init__(self, steps: int = MAX_STEPS, work: int = MAX_WORK, *, is_easy: bool = False) -> None:
        self.steps = steps
        self.work = work
        """Of patterns."""
        self.is_easy = is_easy

    @classmethod
    def easy(cls) -> Budget:
        """Some milliseconds, and ten at worst. What exceeds it is NotEasy instead of invalid."""
        return cls(2_000, MAX_WORK // 100, is_easy=True)

    def spend_step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise _OverBudget

    def spend_work(self, work: int) -> None:
        self.work -= work
        if self.work < 0:
            raise _OverBudget


class _Current(threading.local):
    budget = Budget(0, 0)


_current = _Current()
"""The budget of the evaluation that a thread is in."""


class Evaluator:
    """Validates values against a document, or against one of its subschemas. Safe to use from several
    threads."""

    def __init__(self, document: Document) -> None:
        self._whole = _bounded_class(document.dialect)(document.root, registry=referencing.Registry())

    def check(self, value: Any, budget: Budget | None = None) -> None:
        """Raises PayloadInvalid, which says where and why; NotEasy with an easy budget."""
        error = _first_error(self._whole, value, budget or Budget())
        if error is not None:
            raise PayloadInvalid(f"{shortened(error.json_path)}: {error.message}")

    def is_valid(self, schema: Subschema, value: Any) -> bool:
        """Whether the value is valid; False also when the limits end the evaluation."""
        try:
            return _first_error(self._whole.evolve(schema=schema), value, Budget()) is None
        except PayloadInvalid:
            return False


def _first_error(validator: Validator, value: Any, budget: Budget) -> ValidationError | None:
    """Raises PayloadInvalid at the limits."""
    _current.budget = budget
    try:
        return next(iter(validator.iter_errors(value)), None)
    except _OverBudget:
        if budget.is_easy:
            raise NotEasy from None
        raise PayloadInvalid("checking it takes too many steps") from None
    except RecursionError:
        raise PayloadInvalid("it, or its schema, is nested too deeply") from None
    except (ArithmeticError, ValueError) as error:
        raise PayloadInvalid(f"a number in it cannot be checked: {error}") from None
    except referencing.exceptions.Unresolvable as error:
        raise PayloadInvalid(f"its schema has a reference that leads nowhere: {error}") from None


@lru_cache(maxsize=len(DIALECTS))
def _bounded_class(dialect: str) -> Callable[..., Validator]:
    base = DIALECTS[dialect]
    keywords = {name: _counted(keyword) for name, keyword in base.VALIDATORS.items()}
    for name, keyword in _REPLACED.items():
        if name in keywords:
            keywords[name] = _counted(keyword)
    extended: Callable[..., Validator] = validators.extend(base, keywords)  # type: ignore[no-untyped-call]  # the library has no types here
    return extended


def _counted(keyword: Any) -> Keyword:
    def evaluate(
        validator: Any, argument: Any, instance: Any, schema: Any
    ) -> Iterator[ValidationError] | None:
        _current.budget.spend_step()
        found: Iterator[ValidationError] | None = keyword(validator, argument, instance, schema)
        return found

    return evaluate


def _matches(pattern: str, text: str) -> bool:
    """False also for a text that is too long to be tried."""
    tried = compiled(pattern)
    if len(text) > tried.most_bytes:
        return False
    _current.budget.spend_work(tried.work(text))
    return tried.is_found_in(text)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if validator.is_type(instance, "string") and not _matches(pattern, instance):
        most = compiled(pattern).most_bytes
        if len(instance.encode(errors="replace")) > most:
            yield ValidationError(
                f"a text of more than {most} bytes is too long for the pattern {shown(pattern)}"
            )
        else:
            yield ValidationError(f"{shown(instance)} does not match {shown(pattern)}")


def _pattern_properties(
    validator: Any, patterns: dict[str, Any], instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, subschema in patterns.items():
        yield from _names_too_long(pattern, instance)
        for name, value in instance.items():
            if _matches(pattern, name):
                yield from validator.descend(value, subschema, path=name, schema_path=pattern)


def _names_too_long(pattern: str, instance: dict[str, Any]) -> Iterator[ValidationError]:
    """A name that is not tried may be one that the pattern is about."""
    most = compiled(pattern).most_bytes
    if any(len(name) * 4 > most and len(name.encode(errors="replace")) > most for name in instance):
        yield ValidationError(f"a property name of more than {most} bytes is too long for {shown(pattern)}")


def _additional_properties(
    validator: Any, wanted: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    declared, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for name in instance:
        if name in declared or any(_matches(pattern, name) for pattern in patterns):
            continue
        if wanted is False:
            yield ValidationError(f"the property {shown(name)} is not allowed: the schema does not name it")
        elif wanted is not True:
            yield from validator.descend(instance[name], wanted, path=name)


def _unevaluated_properties(
    validator: Any, wanted: Any, instance: Any, schema: Any
) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    evaluated = _evaluated(validator, instance, schema)
    for name, value in instance.items():
        if name not in evaluated and next(validator.descend(value, wanted, path=name), None) is not None:
            yield ValidationError(
                f"the property {shown(name)} is not allowed: no part of the schema is about it"
            )


def _evaluated(validator: Any, instance: dict[str, Any], schema: Any) -> set[str]:
    """The properties that a schema, and what it applies in place, is about."""
    _current.budget.spend_step()
    if isinstance(schema, bool):
        return set()
    found: set[str] = set()
    for keyword in _REFERENCES:
        if keyword in schema:
            resolved = _resolved(validator, keyword, schema[keyword])
            target = validator.evolve(schema=resolved.contents, _resolver=resolved.resolver)
            found |= _evaluated(target, instance, resolved.contents)
    found |= schema.get("properties", {}).keys() & instance.keys()
    for pattern in schema.get("patternProperties", ()):
        found |= {name for name in instance if _matches(pattern, name)}
    for keyword in ("additionalProperties", "unevaluatedProperties"):
        if keyword in schema:
            wanted = schema[keyword]
            found |= {name for name, value in instance.items() if _holds(validator, value, wanted)}
    inside = [each for name, each in schema.get("dependentSchemas", {}).items() if name in instance]
    inside += [each for keyword in ("allOf", "oneOf", "anyOf") for each in schema.get(keyword, ())]
    if "if" in schema:
        holds = _holds(validator, instance, schema["if"])
        inside += [schema["if"]] if holds else []
        chosen = "then" if holds else "else"
        inside += [schema[chosen]] if chosen in schema else []
    for each in inside:
        if _holds(validator, instance, each):
            found |= _evaluated(validator, instance, each)
    return found


def _holds(validator: Any, instance: Any, schema: Any) -> bool:
    return next(validator.descend(instance, schema), None) is None


def _resolved(validator: Any, keyword: str, reference: str) -> Any:
    if keyword == "$recursiveRef":
        return referencing.jsonschema.lookup_recursive_ref(validator._resolver)
    return validator._resolver.lookup(reference)


def _unique_items(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not wanted or not validator.is_type(instance, "array"):
        return
    if len({comparable(item) for item in instance}) != len(instance):
        yield ValidationError("an array has the same item twice")


_REPLACED: Final[dict[str, Keyword]] = {
    "additionalProperties": _additional_properties,
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "unevaluatedProperties": _unevaluated_properties,
    "uniqueItems": _unique_items,
}
