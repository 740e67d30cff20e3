"""OwnTime: how long something takes, whatever else the machine does.

A clock tells how long it took here and now, beside three other test processes and whatever else there is. The
kernel knows how long each thread was ready and had no core. Less that, it is the time that the thing takes by
itself, and that may be asserted:

    own = OwnTime(broker.pid)
    await broker.put("/x", b"1")
    assert own.seconds < 3.0

Where the kernel does not tell, it is the time of the clock.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path


class OwnTime:
    """Begins when it is made. Of this process and those named; threads that ended meanwhile do not count."""

    def __init__(self, *pids: int) -> None:
        self._pids = (os.getpid(), *pids)
        self._waited = self._ready()
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        took = time.monotonic() - self._began
        now = self._ready()
        return took - sum(waited - self._waited.get(thread, 0) for thread, waited in now.items()) / 1e9

    def _ready(self) -> dict[Path, int]:
        """Nanoseconds for which each thread has waited for a core."""
        found: dict[Path, int] = {}
        for pid in self._pids:
            with suppress(OSError):
                for thread in Path(f"/proc/{pid}/task").iterdir():
                    with suppress(OSError):  # it has ended
                        found[thread] = int((thread / "schedstat").read_text().split()[1])
        return found
