"""Is this value valid? Evaluation by ``jsonschema``, with a budget.

A schema decides how much work a value is: references can double at every level, and a few lines then stand
for a billion checks. So every keyword that is evaluated costs a step of a budget, and a value that uses it up
is invalid. Two keywords are replaced because the library's way is not bounded: ``uniqueItems`` compares all
pairs in the worst case, and patterns are only tried on texts that are short enough (``patterns``).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Final

import referencing
import referencing.exceptions
from jsonschema import validators
from jsonschema.exceptions import ValidationError
from jsonschema.protocols import Validator

from sava.schemas.bounded_json import comparable
from sava.schemas.errors import PayloadInvalid
from sava.schemas.json_schema.document import DIALECTS, Document, Subschema
from sava.schemas.json_schema.patterns import longest_text

MAX_STEPS: Final = 50_000
"""Keywords evaluated for one value: a second or two."""
_NAME_KEYWORDS: Final = ("patternProperties", "additionalProperties", "unevaluatedProperties")

Keyword = Callable[[Any, Any, Any, Any], Iterator[ValidationError] | None]


class _OverBudget(Exception):
    pass


class _Budget(threading.local):
    left = 0


_budget = _Budget()


class Evaluator:
    """Validates values against a document, or against one of its subschemas. Safe to use from several
    threads."""

    def __init__(self, document: Document) -> None:
        self._whole = _bounded_class(document.dialect)(document.root, registry=referencing.Registry())

    def check(self, value: Any) -> None:
        """Raises PayloadInvalid with where and why."""
        error = self._first_error(self._whole, value)
        if error is not None:
            raise PayloadInvalid(f"{error.json_path}: {error.message}")

    def is_valid(self, schema: Subschema, value: Any) -> bool:
        """False also when that could not be found out within the limits."""
        try:
            return self._first_error(self._whole.evolve(schema=schema), value) is None
        except PayloadInvalid:
            return False

    @staticmethod
    def _first_error(validator: Validator, value: Any) -> ValidationError | None:
        _budget.left = MAX_STEPS
        try:
            return next(iter(validator.iter_errors(value)), None)
        except _OverBudget:
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
    keywords["pattern"] = _counted(_pattern)
    keywords["uniqueItems"] = _counted(_unique_items)
    for name in _NAME_KEYWORDS:
        if name in keywords:
            keywords[name] = _with_short_names(keywords[name])
    extended: Callable[..., Validator] = validators.extend(base, keywords)  # type: ignore[no-untyped-call]  # the library has no types here
    return extended


def _counted(keyword: Any) -> Keyword:
    def evaluate(
        validator: Any, argument: Any, instance: Any, schema: Any
    ) -> Iterator[ValidationError] | None:
        _budget.left -= 1
        if _budget.left < 0:
            raise _OverBudget
        found: Iterator[ValidationError] | None = keyword(validator, argument, instance, schema)
        return found

    return evaluate


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "string"):
        return
    if len(instance) > longest_text(pattern):
        yield ValidationError(f"a text of {len(instance)} characters is too long for the pattern {pattern!r}")
    elif not re.search(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _with_short_names(keyword: Keyword) -> Keyword:
    """Names of properties are tried on patterns too."""

    def evaluate(validator: Any, argument: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        patterns = schema.get("patternProperties")
        if patterns and validator.is_type(instance, "object"):
            limit = min(map(longest_text, patterns))
            _budget.left -= len(patterns) * len(instance)
            for name in instance:
                if len(name) > limit:
                    yield ValidationError(f"a property name of {len(name)} characters is too long")
                    return
        yield from keyword(validator, argument, instance, schema) or ()

    return evaluate


def _unique_items(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if not wanted or not validator.is_type(instance, "array"):
        return
    if len({comparable(item) for item in instance}) != len(instance):
        yield ValidationError("an array has the same item twice")
