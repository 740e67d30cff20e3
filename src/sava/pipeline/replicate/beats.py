"""Beat: work that is done again and again, in a thread of its own, because it may have to wait for a broker
that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

LONGEST_S: Final = 60.0


class Beat:
    """``work`` says in how many seconds it wants to be done again. What it does not expect goes to
    ``failed``, and it is not done any more. ``ended`` is the last that the thread does."""

    def __init__(
        self,
        name: str,
        work: Callable[[], float],
        failed: Callable[[Exception], None],
        ended: Callable[[], None],
    ) -> None:
        self._work = work
        self._failed = failed
        self._ended = ended
        self._poked = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def poke(self) -> None:
        """Do it now, or at once again."""
        self._poked.set()

    def close(self) -> None:
        """What is being done ends by itself."""
        self._closed.set()
        self._poked.set()

    def _run(self) -> None:
        try:
            self._beat()
        finally:
            self._ended()

    def _beat(self) -> None:
        while not self._closed.is_set():
            self._poked.clear()
            try:
                delay = self._work()
            except Exception as error:  # noqa: BLE001 (whoever owns it decides what that means)
                if not self._closed.is_set():
                    self._failed(error)
                return
            self._poked.wait(min(delay, LONGEST_S))
