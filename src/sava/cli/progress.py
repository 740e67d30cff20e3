"""A line about how far a command is, on stderr: one that changes on a terminal, else a new one now and
then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Self

from rich.status import Status
from rich.text import Text

from sava.cli.output import plain_console

QUIET_S: Final = 1.0
"""What takes no longer is not worth a line about its progress."""
SHOW_INTERVAL_S: Final = 0.2
LOG_INTERVAL_S: Final = 5.0


class Progress:
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

    def tell(self, line: str) -> None:
        if not self.is_due:
            return
        if not self._console.is_terminal:
            self._console.print(line)
            self._next = time.monotonic() + LOG_INTERVAL_S
            return
        self._next = time.monotonic() + SHOW_INTERVAL_S
        text = Text(line)  # in a str a Status looks for markup, whatever its console is told
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(text)
