"""Is every value that one JSON schema allows also allowed by another?

Data written under ``writer`` can be read under ``reader`` exactly if so. The question has no complete
answer that is quick, so it is answered on the safe side: 'contained' is only said when it follows from the
structure; what is not understood must be unchanged.

The writer is expanded into alternatives (from ``anyOf``, ``oneOf``), each a list of simple schemas that
hold together (from ``$ref``, ``allOf``); see ``json_schema.expand``. The reader must hold each
alternative: all parts of its ``allOf``, one branch of its ``anyOf``, one branch of its ``oneOf`` that
excludes the others. A simple schema of the reader is compared keyword by keyword with what the alternative
as a whole promises. Keywords count only for the types that the writer can write: a bound of numbers means
nothing to a string.

Two rules are about evolution rather than sets:

* Where ``additionalProperties`` is not given, a writer is taken not to write properties that it does not
  declare. By the letter it may write anything, and then no property could ever be added.
* A property that the writer requires must be declared by a reader that declares any: to drop a required
  property, or to add one that old readers do not know, breaks a promise even if the value is valid.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, NamedTuple

from sava.schemas import json_schema
from sava.schemas.bounds import Fixpoint, TooComplex, compiled
from sava.schemas.errors import shortened
from sava.schemas.json_schema import Alternative, Document, Evaluator, Subschema


def find_problems(reader: Document, writer: Document) -> list[str]:
    """The reasons why a value of ``writer`` may not be a value of ``reader``; empty when all are."""
    comparison = Containment(reader, writer)
    return comparison.fixpoint.solve(lambda: comparison.contains(reader.root, (writer.root,), "$"))


class Containment:
    def __init__(self, reader: Document, writer: Document) -> None:
        self.fixpoint = Fixpoint()
        self.reader, self.writer = reader, writer
        self._reader_values, self._writer_values = Evaluator(reader), Evaluator(writer)
        self._expanded: dict[tuple[int, ...], list[Alternative]] = {}
        """Pairs are known by identity, so an alternative must be the same object whenever it is met."""

    def contains(self, reader: Subschema, written: tuple[Subschema, ...], path: str) -> list[str]:
        """``written``: schemas of the writer that hold together."""
        key = (id(reader), *map(id, written))
        return self.fixpoint.pair(key, lambda: self._contains(reader, written, path))

    def _contains(self, reader: Subschema, written: tuple[Subschema, ...], path: str) -> list[str]:
        if reader is True or reader == {}:
            return []
        if len(written) == 1 and json_schema.is_same(self.reader, reader, self.writer, written[0]):
            return []
        problems = []
        for alternative in self._alternatives(written):
            self.fixpoint.step()
            problems += self._holds_whole(reader, alternative, path)
        return problems

    def _alternatives(self, written: tuple[Subschema, ...]) -> list[Alternative]:
        key = tuple(map(id, written))
        if key not in self._expanded:
            self._expanded[key] = json_schema.expand(self.writer, written)
        return self._expanded[key]

    def _holds_whole(self, reader: Subschema, alternative: Alternative, path: str) -> list[str]:
        """Adds the rules that need the whole of the reader, not one part of its ``allOf``."""
        parts = json_schema.parts(self.reader, reader)
        problems = [
            f"{path}.{name}: required by the writer, and not declared by the reader"
            for name in json_schema.undeclared(parts, alternative)
        ]
        if json_schema.unknown_keywords(parts) != json_schema.unknown_keywords(alternative):
            problems.append(f"{path}: keywords of unknown meaning have changed")
        return problems + self._holds(reader, alternative, path)

    def _holds(self, reader: Subschema, alternative: Alternative, path: str) -> list[str]:
        if reader is True:
            return []
        if reader is False:
            return [f"{path}: the reader allows no value here"]
        values = json_schema.finite_values(alternative)
        if values is not None:
            return self._holds_values(reader, alternative, values, path)
        problems: list[str] = []
        if "$ref" in reader:
            target = self.reader.resolve(reader["$ref"])
            problems += self._holds_again(target, alternative, path)
            if self.reader.ref_stands_alone:
                return problems
        for part in reader.get("allOf", ()):
            problems += self._holds_again(part, alternative, path)
        if "anyOf" in reader and all(
            self._holds_again(branch, alternative, path) for branch in reader["anyOf"]
        ):
            problems.append(f"{path}: no branch of the reader's anyOf holds all of the writer's values")
        if "oneOf" in reader and not self._holds_one(reader["oneOf"], alternative, path):
            problems.append(f"{path}: no branch of the reader's oneOf holds all of the writer's values alone")
        return problems + _compare_keywords(self, reader, alternative, path)

    def _holds_again(self, reader: Subschema, alternative: Alternative, path: str) -> list[str]:
        """``_holds`` through the memory of pairs: a reference may lead back to where it came from."""
        key = (id(reader), "holds", id(alternative))
        return self.fixpoint.pair(key, lambda: self._holds(reader, alternative, path))

    def _holds_one(self, branches: list[Subschema], alternative: Alternative, path: str) -> bool:
        for index, branch in enumerate(branches):
            others = branches[:index] + branches[index + 1 :]
            if not self._holds_again(branch, alternative, path) and all(
                json_schema.is_disjoint(self.reader, branch, other) for other in others
            ):
                return True
        return False

    def _holds_values(
        self, reader: dict[str, Any], alternative: Alternative, values: list[Any], path: str
    ) -> list[str]:
        """Tries each value of a finite list."""
        problems = []
        for value in values:
            self.fixpoint.step()
            if all(self._writer_values.is_valid(part, value) for part in alternative) and not (
                self._reader_values.is_valid(reader, value)
            ):
                problems.append(f"{path}: the reader does not allow {shortened(repr(value), 60)}")
        return problems


def _compare_keywords(
    comparison: Containment, reader: dict[str, Any], alternative: Alternative, path: str
) -> list[str]:
    written = json_schema.common_types(alternative)
    problems = _compare_types(json_schema.types(reader), written, path)
    if "enum" in reader or "const" in reader:
        problems.append(f"{path}: the reader allows listed values only, the writer others too")
    if written & {"integer", "fraction"}:
        problems += _compare_numbers(reader, alternative, written, path)
    if "string" in written:
        problems += _compare_sizes(reader, alternative, "Length", path)
        problems += _compare_pattern(reader, alternative, path)
    if "array" in written:
        problems += _compare_sizes(reader, alternative, "Items", path)
        problems += _compare_unique(reader, alternative, path)
        problems += _compare_items(comparison, reader, alternative, path)
    if "object" in written:
        problems += _compare_sizes(reader, alternative, "Properties", path)
        problems += _compare_required(reader, alternative, path)
        problems += _compare_properties(comparison, reader, alternative, path)
    return problems + _compare_unchanging(comparison, reader, alternative, path)


def _compare_types(read: frozenset[str], written: frozenset[str], path: str) -> list[str]:
    missing = written - read
    if not missing:
        return []
    if missing == json_schema.ALL_TYPES - read:
        return [f"{path}: the reader allows {_names(read)} only, the writer any type"]
    return [f"{path}: the writer may write {_names(missing)}, the reader allows {_names(read)}"]


def _names(types: frozenset[str]) -> str:
    names = set(types)
    if {"integer", "fraction"} <= names:
        names = names - {"integer", "fraction"} | {"number"}
    return ", ".join(sorted(names)) or "nothing"


# -- numbers, strings and sizes ------------------------------------------------------------------------------


class _Bound(NamedTuple):
    """A limit as a number that is smaller for what allows less: lower limits are negated."""

    value: Fraction
    allows_itself: bool


def _upper(part: dict[str, Any]) -> _Bound | None:
    return _bound(part.get("maximum"), part.get("exclusiveMaximum"), 1)


def _lower(part: dict[str, Any]) -> _Bound | None:
    return _bound(part.get("minimum"), part.get("exclusiveMinimum"), -1)


def _bound(inclusive: Any, exclusive: Any, sign: int) -> _Bound | None:
    """In draft 4 the exclusive keyword is a boolean that speaks about the other."""
    if isinstance(exclusive, bool):
        return None if inclusive is None else _Bound(sign * _exact(inclusive), not exclusive)
    bounds = []
    if inclusive is not None:
        bounds.append(_Bound(sign * _exact(inclusive), True))
    if exclusive is not None:
        bounds.append(_Bound(sign * _exact(exclusive), False))
    return min(bounds, default=None)


def _exact(number: int | float) -> Fraction:
    return Fraction(repr(number)) if isinstance(number, float) else Fraction(number)


def _compare_numbers(
    reader: dict[str, Any], alternative: Alternative, written: frozenset[str], path: str
) -> list[str]:
    problems = []
    for name, limit in (("maximum", _upper), ("minimum", _lower)):
        wanted = limit(reader)
        promised = min((bound for part in alternative if (bound := limit(part)) is not None), default=None)
        if wanted is not None and (promised is None or promised > wanted):
            problems.append(f"{path}: the reader's {name} is not kept by the writer")
    step = reader.get("multipleOf")
    if step is not None:
        steps = [_exact(part["multipleOf"]) for part in alternative if "multipleOf" in part]
        if "fraction" not in written:
            steps.append(Fraction(1))
        if not any((promised % _exact(step)) == 0 for promised in steps):
            problems.append(f"{path}: the reader's multipleOf {step} is not kept by the writer")
    return problems


def _compare_sizes(reader: dict[str, Any], alternative: Alternative, noun: str, path: str) -> list[str]:
    problems = []
    least = max((part.get(f"min{noun}", 0) for part in alternative), default=0)
    if noun == "Properties":
        least = max(least, len(json_schema.required(alternative)))
    if reader.get(f"min{noun}", 0) > least:
        problems.append(
            f"{path}: the reader needs min{noun} {reader[f'min{noun}']}, the writer keeps {least}"
        )
    most = _least_maximum(alternative, f"max{noun}")
    if f"max{noun}" in reader and (most is None or most > reader[f"max{noun}"]):
        kept = "no limit" if most is None else str(most)
        problems.append(f"{path}: the reader needs max{noun} {reader[f'max{noun}']}, the writer keeps {kept}")
    return problems


def _least_maximum(alternative: Alternative, key: str) -> int | None:
    return min((part[key] for part in alternative if key in part), default=None)


def _compare_pattern(reader: dict[str, Any], alternative: Alternative, path: str) -> list[str]:
    pattern = reader.get("pattern")
    if pattern is None or any(part.get("pattern") == pattern for part in alternative):
        return []
    return [f"{path}: the reader's pattern {shortened(pattern, 60)!r} is not the writer's"]


# -- arrays --------------------------------------------------------------------------------------------------


def _compare_unique(reader: dict[str, Any], alternative: Alternative, path: str) -> list[str]:
    most = _least_maximum(alternative, "maxItems")
    if not reader.get("uniqueItems") or any(part.get("uniqueItems") for part in alternative):
        return []
    return [] if most is not None and most <= 1 else [f"{path}: the reader needs unique items"]


def _prefix(part: dict[str, Any]) -> list[Subschema]:
    items = part.get("items")
    found: list[Subschema] = items if isinstance(items, list) else part.get("prefixItems", [])
    return found


def _rest(part: dict[str, Any]) -> Subschema:
    """The schema of items after the prefix."""
    items = part.get("items", True)
    rest: Subschema = part.get("additionalItems", True) if isinstance(items, list) else items
    return rest


def _item(part: dict[str, Any], index: int) -> Subschema:
    prefix = _prefix(part)
    return prefix[index] if index < len(prefix) else _rest(part)


def _compare_items(
    comparison: Containment, reader: dict[str, Any], alternative: Alternative, path: str
) -> list[str]:
    most = _least_maximum(alternative, "maxItems")
    places = max(len(_prefix(part)) for part in (reader, *alternative))
    problems: list[str] = []
    for index in range(places):
        if most is not None and most <= index:
            return problems
        items = tuple(_item(part, index) for part in alternative)
        problems += comparison.contains(_item(reader, index), items, f"{path}[{index}]")
    if most is None or most > places:
        items = tuple(_rest(part) for part in alternative)
        problems += comparison.contains(_rest(reader), items, f"{path}[]")
    return problems


# -- objects -------------------------------------------------------------------------------------------------


def _compare_required(reader: dict[str, Any], alternative: Alternative, path: str) -> list[str]:
    missing = set(reader.get("required", ())) - json_schema.required(alternative)
    return [f"{path}.{name}: required by the reader, and not by the writer" for name in sorted(missing)]


def _said_of(comparison: Containment, part: dict[str, Any], name: str) -> list[Subschema]:
    """All that a schema says about a property; nothing if it neither names nor limits it."""
    found: list[Subschema] = []
    if name in part.get("properties", {}):
        found.append(part["properties"][name])
    for text, schema in part.get("patternProperties", {}).items():
        comparison.fixpoint.check_time()
        pattern = compiled(text)
        if len(name.encode(errors="replace")) > pattern.most_bytes:
            raise TooComplex
        if pattern.is_found_in(name):
            found.append(schema)
    if not found and "additionalProperties" in part:
        found.append(part["additionalProperties"])
    return found


def _compare_properties(
    comparison: Containment, reader: dict[str, Any], alternative: Alternative, path: str
) -> list[str]:
    problems = []
    names = {name for part in (reader, *alternative) for name in part.get("properties", ())}
    for name in sorted(names):
        written = tuple(schema for part in alternative for schema in _said_of(comparison, part, name))
        if not written:
            continue
        for schema in _said_of(comparison, reader, name):
            problems += comparison.contains(schema, written, f"{path}.{shortened(name, 60)}")
    return (
        problems
        + _compare_patterns(comparison, reader, alternative, path)
        + _compare_others(comparison, reader, alternative, path)
    )


def _compare_patterns(
    comparison: Containment, reader: dict[str, Any], alternative: Alternative, path: str
) -> list[str]:
    problems = []
    is_closed = any(part.get("additionalProperties") is False for part in alternative)
    has_patterns = any(part.get("patternProperties") for part in alternative)
    for pattern, schema in reader.get("patternProperties", {}).items():
        written = tuple(
            part["patternProperties"][pattern]
            for part in alternative
            if pattern in part.get("patternProperties", {})
        )
        where = f"{path}./{shortened(pattern, 60)}/"
        if written:
            problems += comparison.contains(schema, written, where)
        elif not is_closed or has_patterns:
            problems.append(f"{where}: the writer may write such properties with other values")
    return problems


def _compare_others(
    comparison: Containment, reader: dict[str, Any], alternative: Alternative, path: str
) -> list[str]:
    """Compares the properties that neither side names."""
    allowed = reader.get("additionalProperties", True)
    if allowed is True or allowed == {}:
        return []
    limits = tuple(part["additionalProperties"] for part in alternative if "additionalProperties" in part)
    if not limits:
        return [f"{path}: the reader limits additional properties, the writer does not"]
    problems = comparison.contains(allowed, limits, f"{path}.*")
    known = reader.get("patternProperties", {})
    for part in alternative:
        for pattern, schema in part.get("patternProperties", {}).items():
            if pattern not in known:
                problems += comparison.contains(allowed, (schema,), f"{path}./{shortened(pattern, 60)}/")
    return problems


# -- the rest ------------------------------------------------------------------------------------------------


def _compare_unchanging(
    comparison: Containment, reader: dict[str, Any], alternative: Alternative, path: str
) -> list[str]:
    problems = []
    for group in json_schema.UNCHANGING:
        wanted = {key: reader[key] for key in group if key in reader}
        if not wanted:
            continue
        promised = [{key: part[key] for key in group if key in part} for part in alternative]
        if json_schema.BY_SURROUNDINGS & wanted.keys() or not any(
            json_schema.is_same(comparison.reader, wanted, comparison.writer, each) for each in promised
        ):
            problems.append(f"{path}: {', '.join(wanted)} has changed, or stands in what has changed")
    return problems
