"""Lines of the log: every one says whose it is, and those about a topic say under which epoch."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from sava import logs

SOURCES = Path(logs.__file__).parent
INSIDE = ("broker", "cluster", "metadata", "server", "services", "storage")
"""What runs in a broker's process."""


@pytest.fixture(autouse=True)
def _context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs.context, "broker", "77")
    monkeypatch.setattr(logs.context, "epoch_of", {"/default/orders": 5}.get)


def record(text: str, *values: object, error: Exception | None = None) -> logging.LogRecord:
    trace = (type(error), error, error.__traceback__) if error is not None else None
    made = logging.LogRecord("sava.part", logging.WARNING, __file__, 1, text, values, trace)
    made.created, made.msecs = 1.5, 500.0
    return made


def test_a_line_for_people() -> None:
    line = logs.LineFormatter().format(
        record("agent: done job=%s topic=%s ms=%.0f", "x", "/default/orders", 7.2)
    )
    assert line == (
        "1970-01-01T00:00:01.500Z WARNING broker=77 sava.part "
        "agent: done job=x topic=/default/orders ms=7 epoch=5"
    )


def test_an_epoch_that_is_said_is_not_said_twice() -> None:
    line = logs.LineFormatter().format(record("topics: dropped topic=%s epoch=%d", "/default/orders", 3))
    assert line.endswith("topic=/default/orders epoch=3")


def test_a_topic_that_nobody_knows_has_no_epoch() -> None:
    assert logs.LineFormatter().format(record("x topic=%s", "/default/none")).endswith("topic=/default/none")


def test_an_event_is_one_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        failure = error
    for formatter in (logs.LineFormatter(), logs.JsonFormatter()):
        line = formatter.format(record("it failed", error=failure))
        assert "\n" not in line
        assert "Traceback" in line


def test_an_object_for_tools() -> None:
    text = "move: over topic=%s to=%d took=%.1fs of 100%% error=%s: %s, name=%s"
    values = ("/default/orders", 1 << 60, 1.5, "Timeout", "too late", "a")
    event = json.loads(logs.JsonFormatter().format(record(text, *values)))
    assert event == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "WARNING",
        "logger": "sava.part",
        "broker": "77",
        "message": text % values,
        "topic": "/default/orders",
        "epoch": 5,
        "to": str(1 << 60),
        "took": 1.5,
        "error": "Timeout: too late",
        "name": "a",
    }


def test_a_value_does_not_take_the_place_of_what_every_event_has() -> None:
    event = json.loads(logs.JsonFormatter().format(record("drain: begun broker=%d", 5)))
    assert (event["broker"], event["broker_"]) == ("77", 5)


@pytest.mark.parametrize(("form", "start"), [("text", "2"), ("json", "{")])
def test_the_form_is_chosen(
    form: Literal["text", "json"], start: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    try:
        logs.set_up(form=form, level="warning")
        logging.getLogger("sava.x").info("not told")
        logging.getLogger("sava.x").warning("told")
        err = capsys.readouterr().err
    finally:
        root.handlers[:], level = before
        root.setLevel(level)
    assert err.startswith(start)
    assert "not told" not in err
    assert err.count("\n") == 1


def logged() -> Iterator[tuple[str, str]]:
    """Where, and the text of each call of a logger inside a broker."""
    for folder in INSIDE:
        for path in (SOURCES / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id in ("log", "_log")
                    and node.args
                    and isinstance(node.args[0], ast.Constant)
                ):
                    yield f"{path.relative_to(SOURCES)}:{node.lineno}", str(node.args[0].value)


def test_lines_about_a_topic_name_it_so_that_tools_find_it() -> None:
    found = dict(logged())
    assert len(found) > 50
    hidden = {
        place: text
        for place, text in found.items()
        if re.search(r"\btopic %s|\btopic=(?!%s)|\btopic id %d", text) and "topic_id=" not in text
    }
    assert hidden == {}, "write topic=%s (or topic_id=%d)"


def test_nothing_is_looked_for_where_there_is_nothing() -> None:
    assert logs.fields(record("plain")) == {}
    assert logs.fields(record("one %s topic=%s", "missing")) == {}


def at(
    seconds: float, level: int = logging.WARNING, text: str = "uploader: failed topic=%s"
) -> logging.LogRecord:
    made = logging.LogRecord("sava.part", level, __file__, 1, text, (f"/default/{seconds:g}",), None)
    made.created = seconds
    return made


def written(*records: logging.LogRecord, ends: bool = False) -> list[str]:
    handler, said = logs.RestrainedHandler(), io.StringIO()
    handler.setStream(said)
    for each in records:
        handler.handle(each)
    if ends:
        handler.close()
    return said.getvalue().splitlines()


def test_one_cause_with_a_thousand_effects_does_not_fill_the_log() -> None:
    """An object store was down: each of a thousand topics said so, again with each attempt."""
    lines = written(*(at(number / 100) for number in range(1000)), at(61, text="something else topic=%s"))
    assert lines[:20] == [f"uploader: failed topic=/default/{number / 100:g}" for number in range(20)]
    assert lines[20:] == [
        'logs: there were more lines like this one lines=980 seconds=10 last="uploader: failed '
        'topic=/default/9.99"',
        "something else topic=/default/61",
    ]


def test_every_minute_has_its_own() -> None:
    lines = written(*(at(minute * 60.0 + number / 10) for minute in range(3) for number in range(30)))
    assert len(lines) == 3 * 20 + 2
    assert sum("lines=10" in line for line in lines) == 2


def test_what_is_no_warning_is_written_always() -> None:
    assert len(written(*(at(number / 100, logging.INFO) for number in range(1000)))) == 1000


def test_a_clock_that_is_set_back_does_not_silence_anything() -> None:
    lines = written(
        *(at(1000 + number / 100) for number in range(30)), *(at(number / 100) for number in range(5))
    )
    assert len(lines) == 20 + 1 + 5


def test_what_was_left_out_is_said_at_the_end_too() -> None:
    lines = written(*(at(number / 100) for number in range(25)), ends=True)
    assert len(lines) == 21
    assert "lines=5 " in lines[-1]


def test_a_library_that_never_says_the_same_twice_takes_no_memory() -> None:
    restraint = logs.Restraint()
    assert all(restraint.lets(at(1, text=f"task {number} topic=%s")) for number in range(2000))
    assert len(restraint._since) == logs.TEXTS
