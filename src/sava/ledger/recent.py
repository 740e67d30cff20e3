"""RecentBytes: the newest bytes of the own log, on their way from its writer to the mirrors.

The log's writer hands over what it has written before it syncs (``wal.log``: the tap). The event loop takes
it from here and sends it, so that mirrors write and sync while the own disk does. What a mirror needs and is
not here any more is read back from the log's files: memory is bounded, whatever mirrors do.

Filled by the writer's thread, read by the event loop; ``_lock`` guards the runs and is held for moments only.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

from sava.wal import Buffers
from sava.wal.format import FRAME_BYTES

RUN_BYTES: Final = 256 << 10
"""Small records are sent together up to this size."""
MAX_RUNS: Final = 4096
"""So many groups of the log, however small, may wait here."""


class _Run:
    """Whole records that follow each other."""

    __slots__ = ("parts", "size", "start")

    def __init__(self, start: int) -> None:
        self.start = start
        self.size = 0
        self.parts: list[bytes | memoryview] = []

    @property
    def end(self) -> int:
        return self.start + self.size

    def joined(self) -> bytes:
        """Once for all mirrors."""
        if len(self.parts) > 1 or type(self.parts[0]) is not bytes:
            self.parts = [b"".join(self.parts)]
        only = self.parts[0]
        assert type(only) is bytes
        return only


class RecentBytes:
    def __init__(self, max_bytes: int, grown: Callable[[], object]) -> None:
        """``grown`` is called on the writer's thread when there is something to send."""
        self._max_bytes = max_bytes
        self._grown = grown
        self._lock = threading.Lock()
        # Guarded by _lock:
        self._runs: list[_Run] = []
        self._starts: list[int] = []
        self._held = 0
        self._end = 0

    @property
    def end(self) -> int:
        """Of what was written."""
        return self._end

    def begin(self, position: int) -> None:
        """The tap is at this position: what comes is handed over, what lies before it never was."""
        with self._lock:
            self._end = max(self._end, position)

    def clear(self) -> None:
        """The tap was taken away: what comes after the next one does not continue this."""
        with self._lock:
            self._runs, self._starts, self._held = [], [], 0

    def tap(self, position: int, records: Sequence[tuple[int, Buffers]]) -> None:
        """(On the writer's thread.)"""
        runs: list[_Run] = []
        at = position
        for size, parts in records:
            if not runs or runs[-1].size + size > RUN_BYTES:
                runs.append(_Run(at))
            runs[-1].parts += parts
            runs[-1].size += size
            at += size
        with self._lock:
            self._runs += runs
            self._starts += [run.start for run in runs]
            self._held += at - position
            self._end = at
            while len(self._runs) > 1 and (self._held > self._max_bytes or len(self._runs) > MAX_RUNS):
                self._held -= self._runs.pop(0).size
                del self._starts[0]
        if at - position > FRAME_BYTES:
            # Else it is a mark, which the log leaves when it is idle; it goes with what comes next.
            self._grown()

    def take(self, position: int) -> bytes | None:
        """Whole records from ``position``, a border, on; None when they are not here."""
        with self._lock:
            index = bisect_right(self._starts, position) - 1
            if index < 0 or self._runs[index].end <= position:
                return None
            run = self._runs[index]
            data = run.joined()
            if position > run.start:
                data = data[position - run.start :]
            following = self._small_behind(index, len(data))
        return b"".join([data, *following]) if following else data

    def _small_behind(self, index: int, size: int) -> list[bytes]:
        """(The lock is held.) What may go along with a run of this size."""
        found: list[bytes] = []
        for run in islice(self._runs, index + 1, None):
            size += run.size
            if size > RUN_BYTES:
                break
            found.append(run.joined())
        return found
