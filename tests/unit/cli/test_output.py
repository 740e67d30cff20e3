"""What is printed is what was to be printed: names, values and errors are other people's text."""

from __future__ import annotations

import json
import sys

import pytest

from sava.cli import output, storage
from sava.cli.output import ProgressLine

TEXTS = (
    "ValueError: cannot open [/tmp/x]",
    "[fd00::1]:6650",
    "Identifier: copy [id = 7f, runId = 9c]",
    "[bold]loud[/bold]",
    "function nomod:boom: No module named 'nomod'",
    ":smile:",
    r"\[escaped] \\[twice]",
    "http://10.0.0.1:6650 2026-11-16 'quoted' 12 None True",
)
every_text = pytest.mark.parametrize("text", TEXTS)


@pytest.fixture(params=["pipe", "terminal"])
def terminal(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Printed to a pipe, and to a terminal, where rich would like to add colours."""
    if request.param == "terminal":
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setattr(output, "_console", output.plain_console(width=10_000))
        monkeypatch.setattr(output, "_errors", output.plain_console(stderr=True))


@every_text
@pytest.mark.usefixtures("terminal")
def test_lines_are_printed_as_they_are(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    output.print_line(text)
    output.print_progress(text)
    output.print_error(text)
    assert capsys.readouterr() == (f"{text}\n", f"{text}\nsava: {text}\n")


@every_text
@pytest.mark.usefixtures("terminal")
def test_json_is_printed_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = {text: [text]}
    output.print_json(value)
    output.print_json_line(value)
    whole, line = json.dumps(value, indent=2), json.dumps(value)
    assert capsys.readouterr().out == f"{whole}\n{line}\n"


@every_text
@pytest.mark.usefixtures("terminal")
def test_cells_of_tables_are_printed_as_they_are(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    output.print_table(("NAME", "ERROR", "STATE"), [("copy", text, "failing")])
    _, row = capsys.readouterr().out.splitlines()
    assert row.split("copy ", 1)[1].split(" failing")[0].strip() == text


@every_text
@pytest.mark.usefixtures("terminal")
def test_progress_is_printed_as_it_is(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sava.cli.output.QUIET_S", 0.0)
    with ProgressLine() as progress:
        progress.show(text)
    assert text in capsys.readouterr().err


@every_text
@pytest.mark.usefixtures("terminal")
def test_faults_beside_a_bar_are_printed_as_they_are(
    text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with storage._progress(1) as (_, say):
        say(text)
    assert text in "".join(capsys.readouterr())
