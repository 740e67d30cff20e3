"""Steps: run one after the other, and what came of each is shown in a line.

A step returns what it measured. One that does not hold raises StepFailed: its line says what was expected and
what was found, and the steps that build on it are not run.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import duckdb
from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from sava.errors import SavaError

PLAIN_WIDTH = 120
"""Of what goes to a file or a pipe."""
FAILURES = (SavaError, duckdb.Error, subprocess.SubprocessError, OSError, LookupError, TypeError, ValueError)
"""What a step can meet besides StepFailed, such as an answer that is not what it should be."""


class StepFailed(Exception):
    def __init__(self, expected: str, found: str) -> None:
        super().__init__(f"expected {expected}; found {found}")


def require(holds: bool, expected: str, found: object) -> None:
    if not holds:
        raise StepFailed(expected, str(found))


@dataclass(frozen=True)
class Step:
    title: str
    run: Callable[[], str]
    is_needed: bool = True
    """Later steps build on it."""


class Show:
    def __init__(self, logs: Path) -> None:
        console = Console(highlight=False, markup=False)
        if not console.is_terminal:
            console = Console(highlight=False, markup=False, width=PLAIN_WIDTH)
        self.console = console
        self._logs = logs
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
        all_hold, is_over = True, False
        for number, step in enumerate(steps, 1):
            self._title = f"{number}. {step.title}"
            if is_over:
                self._results.append((Text("–", "dim"), self._title, "not run", ""))
                continue
            began = time.monotonic()
            holds, result = self._run(step)
            seconds = f"{time.monotonic() - began:.1f} s"
            all_hold = all_hold and holds
            is_over = not holds and step.is_needed
            mark = Text("✔", "green") if holds else Text("✘", "bold red")
            self.console.print(mark, Text(self._title, "bold"), f"({seconds}):", result, soft_wrap=True)
            self._results.append((mark, self._title, result, seconds))
        return all_hold

    def _run(self, step: Step) -> tuple[bool, str]:
        try:
            if not self.console.is_terminal:
                self.console.print(f"  {self._title} …")
                return True, step.run()
            with self.console.status(Text(self._title)) as self._status:
                return True, step.run()
        except StepFailed as failure:
            return False, f"FAILED: {failure}. Logs: {self._logs}"
        except FAILURES as error:
            return False, f"FAILED: {type(error).__name__}: {error}. Logs: {self._logs}"
        finally:
            self._status = None

    def summary(self, seconds: float) -> None:
        table = Table("", "step", "what was measured", "time", title="What was shown", show_lines=True)
        for row in self._results:
            table.add_row(*row)
        self.console.print(table)
        self.console.print(f"{seconds:.0f} s in all")
