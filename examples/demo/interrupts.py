"""Interrupts: whatever asks the demo to end ends it as Ctrl-C does, with everything stopped.

The first signal is raised as KeyboardInterrupt where the demo is at that moment, but not between the start of
a process and the note that it runs: nobody would stop that one. The demo is ending then, and those who ask
again have nothing to add: stopping is bounded by itself, and if it were interrupted, processes would be left.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """One for the process; belongs to its main thread, where Python handles signals."""

    def __init__(self) -> None:
        self._is_held = False
        self._is_wanted = False
        self._is_over = False

    def listen(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._come)

    def ignore(self) -> None:
        """From here on."""
        self._is_over = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """What comes meanwhile is raised at the end."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._is_wanted:
            self._raise()

    def _come(self, number: int, frame: FrameType | None) -> None:
        self._is_wanted = True
        if not self._is_held:
            self._raise()

    def _raise(self) -> None:
        if not self._is_over:
            self._is_over = True
            raise KeyboardInterrupt
