"""What can go wrong with a durable log, by whose fault it is. Each names the place and the way out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from sava.errors import CallerError, HostError, Outcome, RetryableError


class FileMissing(HostError):
    """A file of the log is not there that must be: it was deleted or lost. The node rejoins as a new one, or
    the file is restored from a copy."""


class FileExists(HostError):
    """A file of the log exists already: another process writes to the directory, or a file was put into it by
    hand."""


class DirectoryLocked(HostError):
    """Another process holds the directory."""


class DiskFull(RetryableError):
    """No space left. Nothing of the refused write remains in the log; it continues once there is room."""


class DiskFailed(HostError):
    """A write or sync failed. What is on disk is unknown, so the process must stop (a second fsync may
    lie)."""

    outcome = Outcome.UNKNOWN


class LogCorrupt(HostError):
    """A record that was acknowledged as durable cannot be read back, so the log refuses to open; the node
    rejoins as a new one, or the file is restored from a copy.

    Cutting the record off would silently undo a promise."""

    def __init__(self, path: str, file: str, position: int, detail: str) -> None:
        super().__init__(
            f"{path}/{file}: {detail} at position {position}. It had been acknowledged as durable and is not "
            "cut off: restore the file from a copy, or move the directory away and join as a new node"
        )
        self.path = path
        self.file = file
        self.position = position


class ForeignLog(HostError):
    """The directory holds another owner's log (owner or storage id differs)."""

    def __init__(self, path: str, *, found: str, expected: str) -> None:
        super().__init__(
            f"{path} holds the log of {found}, but {expected} was started on it. Start it with its own data "
            f"directory, or move {path} away if its contents are no longer needed"
        )
        self.path = path
        self.found = found
        self.expected = expected


class UnsupportedFormat(HostError):
    """The directory was written by a version of Sava that this one cannot read."""

    def __init__(self, path: str, file: str, detail: str) -> None:
        super().__init__(
            f"{path}/{file}: {detail}; run the version of Sava that wrote it or a newer one, "
            "or move the file away"
        )
        self.path = path
        self.file = file


class LogClosed(RetryableError):
    """The log was closed; nothing was appended."""


class LogBusy(RetryableError):
    """Too many bytes wait for the disk; nothing was queued."""


class RecordTooLarge(CallerError):
    """The record exceeds ``max_record_bytes``; nothing was appended."""


class PositionOutside(CallerError):
    """No record is held at the position: it was trimmed away, or lies at or beyond the end."""


log = logging.getLogger(__name__)

QUIET_S: Final = 10.0
"""The disk has room again after this time without a refusal."""


class Fullness:
    """What the log of a broker says of a full disk. Each refused caller gets an error; an operator reads one
    line when it begins and one when it is over.

    On a nearly full disk small writes pass while large ones are refused, so one that passes is not the end:

        refused  refused  passed  refused  passed ───── 10 s ───── passed
        full                                                       room again

    The fullness of one disk; owned by the component that gets the results of its writes.
    """

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
