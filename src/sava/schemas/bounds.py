"""Bounds on definitions and payloads that clients send: the depth of JSON, the time of a regular expression,
and the work of comparing two recursive schemas.

**JSON.** Text in, values out, or ValueError; the interpreter never crashes. The limit of depth is what
makes every recursive function behind it safe: Avro and JSON Schema are defined by recursion, and their
libraries recurse as deep as a document is nested.

**Regular expressions.** Python's engine backtracks: ``(a+)+$`` on thirty letters takes minutes, and holds
the interpreter's lock while it does, so that one request would stop a broker. ``Pattern`` runs Google's RE2
instead, whose time is at most proportional to the size of the compiled pattern times the length of the text,
and which lets go of the lock meanwhile. What RE2 does not have is refused with the schema: look-around and
references back to a group, which need another kind of engine. Its ``\\d``, ``\\w`` and ``$`` mean what JSON
Schema (ECMA 262) says they mean, where Python's differ. A text is only tried if it is within ``most_bytes``.

**Comparisons.** ``Fixpoint`` compares recursive structures: a pair that is met again while it is being
compared is taken to fit. That is right if the assumption holds in the end. A comparison with alternatives
(one of several branches must fit) can continue after an assumption turned out wrong, and would keep what
it concluded from it. So ``Fixpoint`` remembers every refutation and repeats the comparison with that
knowledge until nothing new is refuted. A refutation was made under hopeful assumptions, so it is always
right, and what is left fits.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any, Final

import msgspec
import re2

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
_PATTERN_MEMORY: Final = 256 << 10
"""Of one compiled pattern with what it remembers of texts; a pattern that does not fit is refused."""
CACHED_PATTERNS: Final = 256
MAX_WORK: Final = 100_000_000
"""Instructions of a pattern times bytes of a text: at worst about a second, mostly a few milliseconds."""
_MAX_TEXT: Final = 1 << 20
_UNICODE_ESCAPE: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|.)", re.DOTALL)

re2_options: Final = re2.Options()
re2_options.max_mem = _PATTERN_MEMORY
re2_options.never_capture = True
re2_options.log_errors = False


class Pattern:
    """A regular expression from a client. Safe to use from several threads."""

    def __init__(self, text: str, *, max_chars: int = MAX_PATTERN_CHARS) -> None:
        """Raises SchemaInvalid."""
        if len(text) > max_chars:
            raise SchemaInvalid(f"a pattern of {len(text)} characters; the limit is {max_chars}")
        try:
            self._compiled = re2.compile(_UNICODE_ESCAPE.sub(_as_re2, text).encode(), re2_options)
        except (re2.error, UnicodeEncodeError) as error:
            reason = error.args[0] if error.args else ""
            if isinstance(reason, bytes):
                reason = reason.decode(errors="replace")
            raise SchemaInvalid(
                f"{text[:80]!a} is not a regular expression that can be used here: {reason}. Patterns are "
                "RE2's, without look-around and references back to a group"
            ) from None
        self._size = int(self._compiled.programsize)
        self.most_bytes = min(_MAX_TEXT, MAX_WORK // max(1, self._size))
        """Of a text that is tried."""

    def work(self, text: str) -> int:
        """What trying the text costs at most, of ``MAX_WORK``."""
        return self._size * len(text)

    def is_found_in(self, text: str) -> bool:
        """Whether it matches anywhere in the text; False for a text that is too long to be tried."""
        data = text.encode(errors="replace")
        return len(data) <= self.most_bytes and self._compiled.search(data) is not None

    def matches(self, text: str) -> bool:
        """Whether it matches the text as a whole."""
        data = text.encode(errors="replace")
        return len(data) <= self.most_bytes and self._compiled.fullmatch(data) is not None


@lru_cache(maxsize=CACHED_PATTERNS)
def compiled(pattern: str) -> Pattern:
    """Raises SchemaInvalid."""
    return Pattern(pattern)


def _as_re2(escape: re.Match[str]) -> str:
    r"""RE2 writes ``\x{00e9}`` for ``\u00e9``."""
    return f"\\x{{{escape[1]}}}" if escape[1] else escape[0]


MAX_STEPS: Final = 200_000
MAX_LEVELS: Final = 100
"""This is below the interpreter's limit of recursion, with the few frames that a level takes."""
MAX_PROBLEMS: Final = 50
MAX_COMPARING_S: Final = 5.0
"""Of processor time. A step looks at as much as the schemas have in one place, so steps alone do not bound
it."""


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
        self._until = time.thread_time() + MAX_COMPARING_S

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
        self.check_time()

    def check_time(self) -> None:
        """For work within a step whose amount a client decides."""
        if time.thread_time() > self._until:
            raise TooComplex
