"""Comparing recursive structures: a pair that is met again while it is being compared is taken to fit.

That is right if the assumption holds in the end. A comparison with alternatives (one of several branches must
fit) can go on after an assumption turned out wrong, and would keep what it concluded from it. So whatever
was refuted is remembered, and the comparison is repeated with that knowledge until nothing new is refuted:
a refutation was made under hopeful assumptions, so it is always right, and what is left fits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

MAX_STEPS: Final = 200_000
MAX_LEVELS: Final = 100
"""Below the interpreter's limit of recursion, with the few frames that a level takes."""
MAX_PROBLEMS: Final = 50


class TooComplex(Exception):
    """Only used between ``Fixpoint`` and what runs in it: becomes a problem, since 'unknown' is not
    'fits'."""


class Fixpoint:
    def __init__(self) -> None:
        self._refuted: dict[Hashable, list[str]] = {}
        self._assumed: set[Hashable] = set()
        self._steps = 0
        self._level = 0

    def solve(self, compare: Callable[[], list[str]]) -> list[str]:
        """Problems in words; none if the structures fit."""
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
