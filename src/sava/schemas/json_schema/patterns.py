"""How long may a text be that a regular expression is tried on?

Python's engine backtracks: ``(a+)+$`` on thirty letters takes minutes, and holds the process while it does. A
schema with such a pattern would stop a broker with one message. So the ways in which a pattern can match are
estimated from its parsed form as ``factor * length ** degree``:

* every repetition of open length adds one to the degree, and so does a search that is not anchored;
* an optional part or an alternative multiplies the factor;
* a repetition of something that itself varies (nested repetition, alternatives inside of it) and a reference
  back to a group have no such bound, and the pattern is refused.

From this follows the longest text that is tried; longer ones are invalid by definition. The estimate does not
know that two neighbouring repetitions may exclude each other, so it errs on the safe side.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import lru_cache
from re import _constants as codes  # type: ignore[attr-defined]  # the parsed form has no public module
from re import _parser as parser  # type: ignore[attr-defined]  # as above
from typing import Any, Final, NamedTuple

from sava.schemas.errors import SchemaInvalid

MAX_PATTERN_CHARS: Final = 1000
_MAX_WAYS: Final = 2e7
"""About a second of matching, at worst."""
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
    """How many characters a text may have to be tried against the pattern; raises SchemaInvalid."""
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
