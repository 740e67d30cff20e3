"""Fullness: what the log of a broker says of a full disk. Each refused caller gets an error; an operator
reads one line when it begins and one when it is over.

On a nearly full disk small writes pass while large ones are refused, so one that passes is not the end:

    refused  refused  passed  refused  passed ───── 10 s ───── passed
    full                                                       room again
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from sava.wal.errors import DiskFull

log = logging.getLogger(__name__)

QUIET_S: Final = 10.0
"""The disk has room again after this time without a refusal."""


class Fullness:
    """The fullness of one disk; owned by the component that gets the results of its writes."""

    def __init__(self, part: str, trouble: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``part`` is the part of the broker, ``trouble`` what a full disk means for it."""
        self._part = part
        self._trouble = trouble
        self._clock = clock
        self._began: float | None = None
        self._refused = 0.0

    @property
    def is_full(self) -> bool:
        """Whether the disk is full and ``passed`` has not found room again yet."""
        return self._began is not None

    def refused(self, error: DiskFull) -> None:
        self._refused = self._clock()
        if self._began is None:
            self._began = self._refused
            first = error.__cause__ if isinstance(error.__cause__, DiskFull) else error
            log.warning(
                "%s: the disk is full, %s until there is room error=%s", self._part, self._trouble, first
            )

    def passed(self) -> None:
        """A write succeeded."""
        if self._began is not None and (now := self._clock()) - self._refused >= QUIET_S:
            log.info("%s: the disk has room again seconds=%.0f", self._part, now - self._began)
            self._began = None
