"""Bounds on definitions and payloads that clients send: the depth of JSON, the time of a regular expression,
and the work of comparing two recursive schemas.

**JSON.** Text in, values out, or ValueError; the interpreter never crashes. The limit of depth is what
makes every recursive function behind it safe: Avro and JSON Schema are defined by recursion, and their
libraries recurse as deep as a document is nested.

**Regular expressions.** Python's engine backtracks: ``(a+)+$`` on thirty letters takes minutes, and holds
the process while it does. A schema with such a pattern would stop a broker with one message.
``longest_text`` estimates the ways in which a pattern can match from its parsed form as ``factor * length
** degree``:

* every repetition of open length adds one to the degree, and so does a search that is not anchored;
* an optional part or an alternative multiplies the factor;
* a repetition of something that itself varies (nested repetition, alternatives inside of it) and a reference
  back to a group have no such bound, and the pattern is refused.

From this follows the longest text that is tried; longer ones are invalid by definition. The estimate does
not know that two neighbouring repetitions may exclude each other, so it errs on the safe side.

**Comparisons.** ``Fixpoint`` compares recursive structures: a pair that is met again while it is being
compared is taken to fit. That is right if the assumption holds in the end. A comparison with alternatives
(one of several branches must fit) can continue after an assumption turned out wrong, and would keep what
it concluded from it. So ``Fixpoint`` remembers every refutation and repeats the comparison with that
knowledge until nothing new is refuted. A refutation was made under hopeful assumptions, so it is always
right, and what is left fits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from re import _constants as codes  # type: ignore[attr-defined]  # the parsed form has no public module
from re import _parser as parser  # type: ignore[attr-defined]  # as above
from typing import Any, Final, NamedTuple

import msgspec

from sava.schemas.errors import SchemaInvalid

MAX_DEPTH: Final = 64
"""The most levels of arrays and objects within each other; documents for people have fewer than ten."""


def decode_definition(text: bytes) -> Any:
    """Decodes a schema: strict, and slower than a payload. A key that comes twice is refused, since two
    readers would take a different one of them."""
    _check_depth(text)
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def decode_payload(text: bytes) -> Any:
    """Decodes the payload of a message; raises ValueError."""
    _check_depth(text)
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None


def canonical(value: Any, *, sort_keys: bool = True) -> bytes:
    """The same bytes for the same value, whatever the spacing and (sorted) the order of keys were."""
    text = json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=False)
    return text.encode(errors="surrogatepass")


def comparable(value: Any) -> Any:
    """A hashable form, equal exactly for values that are equal in JSON: 1 and 1.0 are, 1 and true are not."""
    if isinstance(value, dict):
        return ("object", frozenset((key, comparable(item)) for key, item in value.items()))
    if isinstance(value, list):
        return ("array", tuple(comparable(item) for item in value))
    return ("boolean", value) if isinstance(value, bool) else value


def _check_depth(text: bytes) -> None:
    """Counting all opening brackets is quick and mostly enough; only a document with many of them is looked
    at bracket by bracket."""
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    in_string = escaped = False
    for byte in text:
        if in_string:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_string = False
        elif byte == 0x22:
            in_string = True
        elif byte in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
        elif byte in b"]}":
            depth -= 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


MAX_PATTERN_CHARS: Final = 1000
_MAX_WAYS: Final = 2e7
"""Matching takes about a second, at worst."""
_MAX_TEXT: Final = 1 << 20
_MAX_FACTOR: Final = 1e6


class _Cost(NamedTuple):
    degree: int = 0
    factor: float = 1.0

    def then(self, other: _Cost) -> _Cost:
        return _Cost(self.degree + other.degree, min(self.factor * other.factor, 1e300))

    @property
    def varies(self) -> bool:
        return self.degree > 0 or self.factor > 1


@lru_cache(maxsize=1024)
def longest_text(pattern: str) -> int:
    """The most characters of a text that is tried against the pattern; raises SchemaInvalid."""
    if len(pattern) > MAX_PATTERN_CHARS:
        raise SchemaInvalid(f"a pattern of {len(pattern)} characters; the limit is {MAX_PATTERN_CHARS}")
    try:
        re.compile(pattern)
        parsed = parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise SchemaInvalid(f"{pattern[:80]!a} is not a regular expression: {error}") from None
    cost = _cost(parsed, pattern)
    if not _is_anchored(parsed):
        cost = cost.then(_Cost(1))
    if cost.factor > _MAX_FACTOR:
        raise _too_many_ways(pattern)
    if cost.degree <= 1:
        return min(_MAX_TEXT, int(_MAX_WAYS / cost.factor))
    ways = _MAX_WAYS * math.factorial(min(cost.degree, 20)) / cost.factor
    return max(1, min(_MAX_TEXT, int(ways ** (1 / cost.degree))))


def _is_anchored(parsed: Any) -> bool:
    return (
        bool(len(parsed))
        and parsed[0][0] is codes.AT
        and parsed[0][1]
        in (
            codes.AT_BEGINNING,
            codes.AT_BEGINNING_STRING,
        )
    )


def _cost(parsed: Iterable[Any], pattern: str) -> _Cost:
    total = _Cost()
    for code, argument in parsed:
        total = total.then(_item_cost(code, argument, pattern))
    return total


def _item_cost(code: Any, argument: Any, pattern: str) -> _Cost:
    if code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
        low, high, body = argument
        return _repeat_cost(int(low), int(high), _cost(body, pattern), pattern)
    if code is codes.SUBPATTERN:
        return _cost(argument[3], pattern)
    if code is codes.ATOMIC_GROUP:
        return _cost(argument, pattern)
    if code in (codes.ASSERT, codes.ASSERT_NOT):
        return _cost(argument[1], pattern)
    if code is codes.BRANCH:
        costs = [_cost(branch, pattern) for branch in argument[1]]
        return _Cost(max(cost.degree for cost in costs), sum(cost.factor for cost in costs))
    if code in (codes.GROUPREF, codes.GROUPREF_IGNORE, codes.GROUPREF_EXISTS):
        raise _too_many_ways(pattern)
    return _Cost()


def _repeat_cost(low: int, high: int, body: _Cost, pattern: str) -> _Cost:
    if high <= 1:
        return body if low == high else _Cost(body.degree, body.factor * 2)
    if low == high:
        if body.varies and high > 20:
            raise _too_many_ways(pattern)
        return _Cost(body.degree * high, min(body.factor**high, 1e300))
    if body.varies:
        raise _too_many_ways(pattern)
    return _Cost(1)


def _too_many_ways(pattern: str) -> SchemaInvalid:
    return SchemaInvalid(
        f"the pattern {pattern[:80]!a} could take too long to match: it repeats something that can match in "
        "several ways, or has too many optional parts"
    )


MAX_STEPS: Final = 200_000
MAX_LEVELS: Final = 100
"""This is below the interpreter's limit of recursion, with the few frames that a level takes."""
MAX_PROBLEMS: Final = 50


class TooComplex(Exception):
    """A comparison exceeds its bounds. ``Fixpoint`` reports it as a problem, since 'unknown' is not
    'fits'."""


class Fixpoint:
    """A comparison of recursive structures with bounded steps and depth."""

    def __init__(self) -> None:
        self._refuted: dict[Hashable, list[str]] = {}
        self._assumed: set[Hashable] = set()
        self._steps = 0
        self._level = 0

    def solve(self, compare: Callable[[], list[str]]) -> list[str]:
        """The problems that the comparison finds; none if the structures fit."""
        while True:
            self._assumed.clear()
            known = len(self._refuted)
            try:
                problems = compare()
            except (TooComplex, RecursionError):
                return ["the schemas are too large or too deeply nested to be compared"]
            if problems or len(self._refuted) == known:
                return list(dict.fromkeys(problems))[:MAX_PROBLEMS]

    def pair(self, key: Hashable, compare: Callable[[], list[str]]) -> list[str]:
        if key in self._refuted:
            return self._refuted[key]
        if key in self._assumed:
            return []
        self.step()
        self._assumed.add(key)
        self._level += 1
        if self._level > MAX_LEVELS:
            self._level = 0
            raise TooComplex
        problems = compare()[:MAX_PROBLEMS]
        self._level -= 1
        if problems:
            self._refuted[key] = problems
        return problems

    def step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise TooComplex
