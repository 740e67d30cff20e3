"""What commands print. JSON has the field names of the RPC messages; ids are strings there, because JSON's
numbers lose digits beyond 2**53 in many readers; other numbers are numbers."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sava.api.messages import as_dict as as_dict
from sava.api.messages import text_of as text_of

if TYPE_CHECKING:  # it brings what draws a line that changes, which most commands do without
    from rich.status import Status


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """``sava cluster status | head -1``: the reader has seen enough. What the command does it does to its
        end, and its exit code says how that went: rich would have it fail."""
        self.quiet = True
        leave_standard_output()


def leave_standard_output() -> None:
    """For nowhere. Python flushes it once more at exit, and would complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def plain_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """A console that prints what it is given. Names, values and errors are other people's text: rich would
    take ``[fd00::1]`` for a style and leave it out, stumble over ``[/tmp/x]``, and make a picture of
    ``:boom:``."""
    return _Console(stderr=stderr, width=width, markup=False, emoji=False, highlight=False, soft_wrap=True)


# Wider than any table: ids and names that are cut to the width of a terminal are of no use.
_console = plain_console(width=10_000)
_errors = plain_console(stderr=True)


class Format(StrEnum):
    JSON = "json"
    TABLE = "table"


Output = Annotated[Format, typer.Option("--output", "-o", help="json or table.")]


class RawFormat(StrEnum):
    """Of commands that print what applications have stored: its bytes alone, too."""

    JSON = "json"
    TABLE = "table"
    RAW = "raw"


def print_json(value: Any) -> None:
    _console.print(json.dumps(value, indent=2, ensure_ascii=False))


def print_json_line(value: Any) -> None:
    """One line per event, for streams."""
    _console.print(json.dumps(value, ensure_ascii=False))


def end_without_reader() -> None:
    """A command without an end calls this after each time it has printed."""
    if _console.quiet:
        raise SystemExit(0)


def print_line(text: str) -> None:
    _console.print(text)


def print_answer(answer: Message, output: Format, text: str) -> None:
    """Of a command that does something: what the broker has answered, or what that means in one line."""
    if output is Format.JSON:
        print_json(as_dict(answer))
    else:
        print_line(text)


def print_error(text: str) -> None:
    _errors.print(f"sava: {text}")


def print_unconfirmed(reason: str) -> None:
    """On stderr, above what a broker knows and no majority has confirmed."""
    _errors.print(f"not confirmed by a majority ({reason}): this is what the asked broker knew last")


def print_progress(text: str) -> None:
    """On stderr: what a command that takes its time has done so far."""
    _errors.print(text)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    _console.print(table)


def print_rows(items: Iterable[Any], /, *names: str, **columns: str | Callable[[Any], object]) -> None:
    """A table with a row for each item. A column is named after the field that it shows, or ``columns`` has
    its field, or a function of the item."""
    shown = {name: name for name in names} | columns
    print_table(
        [name.upper() for name in shown],
        [[_cell(item, column) for column in shown.values()] for item in items],
    )


def _cell(item: Any, column: str | Callable[[Any], object]) -> object:
    if callable(column):
        return column(item)
    value = getattr(item, column)
    return "-" if value in ("", None) or (value == 0 and column.endswith("_id")) else value


def print_fields(fields: Mapping[str, object]) -> None:
    """A line for each, the values below one another."""
    width = max(map(len, fields))
    for name, value in fields.items():
        print_line(f"{name:<{width}} {'-' if value in ('', None) else value}")


# -- progress ----------------------------------------------------------------------


QUIET_S: Final = 1.0
"""What takes no longer is not worth a line about its progress."""
SHOW_INTERVAL_S: Final = 0.2
LOG_INTERVAL_S: Final = 5.0


class ProgressLine:
    """A line about how far a command is, on stderr: one that changes on a terminal, else a new one now and
    then."""

    def __init__(self) -> None:
        self._console = plain_console(stderr=True)
        self._status: Status | None = None
        self._next = time.monotonic() + QUIET_S

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    @property
    def is_due(self) -> bool:
        """Whether the next line would be shown."""
        return time.monotonic() >= self._next

    def show(self, line: str) -> None:
        if not self.is_due:
            return
        if not self._console.is_terminal:
            self._console.print(line)
            self._next = time.monotonic() + LOG_INTERVAL_S
            return
        self._next = time.monotonic() + SHOW_INTERVAL_S
        text = Text(line)  # in a str a Status looks for markup, even if its console does not
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(text)
