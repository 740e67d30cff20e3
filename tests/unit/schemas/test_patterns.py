"""Regular expressions of clients: whatever they are and whatever they are tried on, an event loop in the same
process goes on turning.

The corpus is of patterns that are known to take exponential or high polynomial time in engines that
backtrack, each with a text that makes them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import string
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sava.schemas import definition, json_containment
from sava.schemas.bounds import MAX_WORK, Pattern
from sava.schemas.definition import JsonSchema, Validator, read_schema
from sava.schemas.errors import PayloadInvalid, SchemaInvalid
from sava.schemas.json_schema import Document, NotEasy
from sava.schemas.types import CompatibilityMode, SchemaType
from sava.topics.dispatch.members import InvalidFilter, KeyFilter

HOSTILE = [
    ("^a*a*a*a*b$", "a" * 1500),
    ("^(a+)+$", "a" * 40 + "!"),
    ("^(a|aa)+$", "a" * 60 + "!"),
    ("^(a|a?)+$", "a" * 60 + "!"),
    ("(x+x+)+y", "x" * 5000),
    (
        "^([a-zA-Z0-9])(([\\-.]|[_]+)?([a-zA-Z0-9]+))*(@){1}[a-z0-9]+[.]{1}(([a-z]{2,3})|([a-z]{2,3}[.]{1}[a-z]{2,3}))$",
        "a" * 100 + "!",
    ),
    ("^(([a-z])+.)+[A-Z]([a-z])+$", "a" * 60),
    ("^(.*?,){25}P", "1," * 200),
    (".*.*.*=.*", "x" * 20_000),
    ("^(\\w+\\s?)*$", "word " * 40 + "!"),
    ("((a{0,20}){0,20})b", "a" * 5000),
    ("^\\s+|\\s+$", " " * 50_000 + "x"),
    ("a?" * 40 + "a" * 40, "a" * 40),
]
SLOWEST_S = 5.0
"""For a loaded machine; what backtracks takes years for most of the corpus."""


@pytest.mark.parametrize(("pattern", "text"), HOSTILE)
def test_a_hostile_pattern_takes_no_time(pattern: str, text: str) -> None:
    started = time.thread_time()
    schema = {"pattern": pattern, "patternProperties": {pattern: {"type": "integer"}}}
    _judge(schema, text)
    _judge(schema, {text: 1})
    _judge({**schema, "additionalProperties": False}, {text: 1})
    _judge({**schema, "unevaluatedProperties": False}, {text: 1})
    assert time.thread_time() - started < SLOWEST_S


@pytest.mark.parametrize(("pattern", "name"), HOSTILE)
def test_comparing_schemas_tries_hostile_patterns_on_names_in_no_time(pattern: str, name: str) -> None:
    started = time.thread_time()
    older = Document({"patternProperties": {pattern: {"type": "integer"}}})
    newer = Document({"properties": {name: {"type": "integer"}}})
    json_containment.find_problems(newer, older)
    json_containment.find_problems(older, newer)
    assert time.thread_time() - started < SLOWEST_S


def test_comparing_with_all_versions_comes_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(definition, "MAX_COMPARING_ALL_S", 0.05)
    schema = _schema({"properties": {"a": {"type": "integer"}}})
    endless = zip(itertools.count(1), itertools.repeat(schema), strict=False)
    problems = definition.find_problems(schema, endless, CompatibilityMode.FULL_TRANSITIVE)
    assert "too long" in problems[-1]


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(
            ["a", "(a", ")", "|", "*", "+", "?", "{2,9}", "(?:", ".*", "[^b]", "\\w", "^", "$", "b"]
        ),
        min_size=1,
        max_size=30,
    ),
    text=st.text(alphabet="ab!", min_size=1, max_size=8).map(lambda piece: piece * 500),
)
def test_no_pattern_holds_up_a_thread_for_long(parts: list[str], text: str) -> None:
    try:
        pattern = Pattern("".join(parts))
    except SchemaInvalid:
        return
    started = time.thread_time()
    pattern.is_found_in(text)
    assert time.thread_time() - started < SLOWEST_S


async def test_other_tasks_are_served_while_a_pattern_runs_at_its_limit() -> None:
    pattern = Pattern("(?:a|b)*a" + "(?:a|b)" * 120 + "c")
    text = ("ab" * (pattern.most_bytes // 2))[: pattern.most_bytes]
    lag = await _lag_while(lambda: asyncio.to_thread(pattern.is_found_in, text))
    assert lag < 0.5


async def test_payloads_that_take_long_are_not_checked_on_the_event_loop() -> None:
    patterns = {f"(?:a|b)*a(?:a|b){{{size}}}c": {"type": "integer"} for size in range(100, 130)}
    validator = Validator(_schema({"patternProperties": patterns}))
    payload = json.dumps({"ab" * 400 + str(index): 1 for index in range(30)}).encode()
    started = time.thread_time()
    with pytest.raises(NotEasy):
        validator.validate_easy([payload])
    assert time.thread_time() - started < 0.5


def test_what_is_easy_gets_the_same_verdict_on_the_event_loop() -> None:
    validator = Validator(_schema({"pattern": "^a+$"}))
    good, bad = b'"aaa"', b'"b"'
    assert validator.validate_easy([good]) is None
    assert validator.validate_easy([good, bad]) == validator.validate_many([good, bad])
    with pytest.raises(NotEasy):
        validator.validate_easy([b'"' + b"a" * 100_000 + b'"'])


def test_the_work_of_all_patterns_on_a_payload_is_bounded() -> None:
    patterns = {f"(?:a|b)*a(?:a|b){{{size}}}c": True for size in range(100, 150)}
    validator = Validator(_schema({"patternProperties": patterns}))
    payload = json.dumps({"ab" * 2000 + str(index): 1 for index in range(300)}).encode()
    started = time.thread_time()
    with pytest.raises(PayloadInvalid, match="too many steps"):
        validator.validate(payload)
    assert time.thread_time() - started < 10


@pytest.mark.parametrize(
    ("pattern", "fits", "fits_not"),
    [
        ("^[a-z]+$", "abc", "abc1"),
        ("[0-9]", "a1", "a"),
        (r"^-?\d+(\.\d+)?$", "-12.5", "12."),
        (r"^[^@]+@[^@]+\.[a-z]+$", "me@example.com", "me@example"),
        (r"^\u00e9+$", "éé", "e"),
        (r"^\p{Lu}", "Émile", "émile"),
        (r"^\\u0041$", "\\u0041", "A"),
        (r"^a$", "a", "a\n"),
    ],
)
def test_patterns_mean_what_json_schema_says(pattern: str, fits: str, fits_not: str) -> None:
    assert Pattern(pattern).is_found_in(fits)
    assert not Pattern(pattern).is_found_in(fits_not)


@pytest.mark.parametrize(
    "pattern",
    [r"(a)\1", "(?=a)b", "(?!a)b", "(?<=a)b", "(", "a" * 1001, r"\pL{900}{900}", "\ud800", "a{2000}"],
)
def test_patterns_that_cannot_be_bounded_are_refused(pattern: str) -> None:
    with pytest.raises(SchemaInvalid):
        Pattern(pattern)


def test_a_text_that_is_too_long_for_its_pattern_is_invalid() -> None:
    pattern = r"^([a-z]{2,20}@){2,20}$|x.{700}"
    longest = Pattern(pattern).most_bytes
    assert longest * Pattern(pattern).work("x") <= MAX_WORK
    schema = {"pattern": pattern, "patternProperties": {pattern: {"type": "integer"}}}
    assert _judge(schema, "ab@cd@") is None
    assert "too long" in (_judge(schema, "a" * (longest + 1)) or "")
    assert "too long" in (_judge(schema, {"a" * (longest + 1): 1}) or "")


def test_no_longer_text_is_tried_on_a_pattern() -> None:
    pattern = Pattern("a.{700}")
    assert pattern.is_found_in("a" * pattern.most_bytes)
    assert not pattern.is_found_in("a" * (pattern.most_bytes + 1))
    assert not Pattern("a*").matches("a" * ((1 << 20) + 1))


def test_an_enum_of_unlike_objects_is_checked_in_no_time() -> None:
    values = [{"a": index} for index in range(20_000)]
    started = time.thread_time()
    Document({"$schema": "http://json-schema.org/draft-04/schema#", "enum": values})
    assert time.thread_time() - started < SLOWEST_S


def test_unevaluated_properties_are_those_that_nothing_is_about() -> None:
    schema = {
        "allOf": [{"properties": {"a": True}}, {"$ref": "#/$defs/more"}],
        "$defs": {"more": {"patternProperties": {"^x": {"type": "integer"}}}},
        "if": {"properties": {"a": {"const": 1}}, "required": ["a"]},
        "then": {"properties": {"one": True}},
        "else": {"properties": {"other": True}},
        "dependentSchemas": {"b": {"properties": {"b": True}}},
        "unevaluatedProperties": {"type": "null"},
    }
    assert _judge(schema, {"a": 1, "x1": 5, "one": 0, "b": 2, "rest": None}) is None
    assert _judge(schema, {"a": 2, "other": 0}) is None
    assert "'one'" in (_judge(schema, {"a": 2, "one": 0}) or "")
    assert "'rest'" in (_judge(schema, {"rest": 1}) or "")


@pytest.mark.parametrize(
    ("glob", "key", "is_accepted"),
    [
        ("a*", "a\nb", True), ("?", "é", True), ("?", "", False), ("[a]", "[a]", True), ("[a]", "a", False),
        ("a.b", "axb", False), ("*a*a*b", "a" * 900, False), ("*", "x" * 1025, False), ("\\d", "\\d", True),
        ("A", "a", False), ("é*", "été", True), ("", "", True),
    ],
)  # fmt: skip
def test_key_filters_are_globs(glob: str, key: str, is_accepted: bool) -> None:
    assert KeyFilter([glob]).accepts(key) is is_accepted


@given(
    glob=st.text(alphabet="ab*?" + string.punctuation, max_size=20),
    key=st.text(alphabet="ab*?.", max_size=10),
)
def test_a_glob_accepts_what_a_plain_reading_of_it_accepts(glob: str, key: str) -> None:
    assert KeyFilter([glob]).accepts(key) is _accepts(glob, key)


@pytest.mark.parametrize("globs", [["a"] * 65, ["a" * 1025], ["a" * 600, "b" * 600]])
def test_key_filters_are_bounded(globs: list[str]) -> None:
    with pytest.raises(InvalidFilter):
        KeyFilter(globs)


def _accepts(glob: str, key: str) -> bool:
    reached = {0}
    for char in glob:
        if char == "*":
            reached = {end for start in reached for end in range(start, len(key) + 1)}
        else:
            reached = {at + 1 for at in reached if at < len(key) and char in ("?", key[at])}
    return len(key) in reached


def _schema(document: dict[str, Any]) -> JsonSchema:
    schema = read_schema(SchemaType.JSON_SCHEMA, json.dumps(document).encode())
    assert isinstance(schema, JsonSchema)
    return schema


def _judge(document: dict[str, Any], value: Any) -> str | None:
    """Why the value is invalid, None if it is not."""
    try:
        Validator(_schema(document)).validate(json.dumps(value).encode())
    except PayloadInvalid as error:
        return error.reason
    return None


async def _lag_while(start: Callable[[], Any]) -> float:
    """The longest that the event loop was held up meanwhile."""
    work = asyncio.ensure_future(start())
    longest, last = 0.0, time.perf_counter()
    while not work.done():
        await asyncio.sleep(0.002)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    await work
    return longest
