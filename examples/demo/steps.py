"""Steps: run one after the other, and what came of each is shown in a line.

A step returns what it measured. One that does not hold raises StepFailed: its line says what was expected and
what was found, and the steps that build on it are not run. Nothing may break that no step has broken, either:
``faults`` is asked after each.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import duckdb
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from sava.errors import SavaError

PLAIN_WIDTH = 120
"""Of what goes to a file or a pipe."""
MARKS = ("✔", "✘", "–")
PLAIN_MARKS = ("+", "!", "-")
"""It holds; it does not; it was not tried."""
FAILURES = (SavaError, duckdb.Error, subprocess.SubprocessError, OSError, LookupError, TypeError, ValueError)
"""What a step can meet besides StepFailed, such as an answer that is not what it should be."""


class StepFailed(Exception):
    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}; found {found}")


def require(holds: bool, expected: str, found: object) -> None:
    if not holds:
        raise StepFailed(expected, str(found))


@dataclass(frozen=True)
class Measured:
    line: str
    """All of it."""
    figure: str
    """The most important, in a few words."""


@dataclass(frozen=True)
class Step:
    title: str
    run: Callable[[], Measured]
    is_needed: bool = True
    """Later steps build on it."""


class Show:
    def __init__(self, logs: Path, faults: Callable[[], str]) -> None:
        """``faults``: what has broken and should not have; empty if nothing has."""
        console = Console(highlight=False, markup=False, emoji=False)
        self._is_live = console.is_terminal and not console.is_dumb_terminal
        if not console.is_terminal:
            console = Console(highlight=False, markup=False, emoji=False, width=PLAIN_WIDTH)
        self.console = console
        self._marks = MARKS if console.encoding.startswith("utf") else PLAIN_MARKS
        self._logs = logs
        self._faults = faults
        self._status: Status | None = None
        self._title = ""
        self._said = ""
        self._results: list[tuple[Text, str, str, str]] = []

    def say(self, progress: str) -> None:
        """What the step that runs is doing now."""
        if self._status is not None:
            self._status.update(Text(f"{self._title}: {progress}"))
        elif progress != self._said:
            self.console.print(f"    {progress}", style="dim")
        self._said = progress

    def run(self, steps: Iterable[Step]) -> bool:
        """Whether all of them hold."""
        holds_mark, fails_mark, skipped_mark = self._marks
        all_hold, is_over = True, False
        for number, step in enumerate(steps, 1):
            self._title = f"{number}. {step.title}"
            if is_over:
                self._results.append((Text(skipped_mark, "dim"), self._title, "not run", ""))
                continue
            began = time.monotonic()
            holds, result = self._run(step)
            seconds = f"{time.monotonic() - began:.1f} s"
            all_hold = all_hold and holds
            is_over = not holds and step.is_needed
            mark = Text(holds_mark, "green") if holds else Text(fails_mark, "bold red")
            # One line in a file; on a terminal as many as it takes, broken between words.
            self.console.print(
                *(mark, Text(self._title, "bold"), f"({seconds}):", result.line),
                soft_wrap=not self.console.is_terminal,
            )
            self._results.append((mark, self._title, result.figure, seconds))
        return all_hold

    def _run(self, step: Step) -> tuple[bool, Measured]:
        try:
            if self._is_live:
                with self.console.status(Text(self._title)) as self._status:
                    measured = step.run()
            else:
                self.console.print(f"  {self._title} …")
                measured = step.run()
        except StepFailed as failure:
            return False, self._failed(str(failure))
        except FAILURES as error:
            return False, self._failed(f"{type(error).__name__}: {error}")
        finally:
            self._status = None
        if self._faults():
            return False, self._failed(f"it held, but something else did not: {measured.line}")
        return True, measured

    def _failed(self, why: str) -> Measured:
        faults = f"; {faults}" if (faults := self._faults()) else ""
        return Measured(f"FAILED: {why}{faults}. Logs: {self._logs}", "FAILED")

    def summary(self, seconds: float) -> None:
        """Short enough for one screen: all figures are in the lines above."""
        table = Table("", "what was shown", "measured", "time", box=SIMPLE_HEAD, pad_edge=False)
        for row in self._results:
            table.add_row(*row)
        self.console.print(table)
        self.console.print(f"{seconds:.0f} s in all")
