"""Kinds: what a pipeline does. A runner knows some, by name, and takes pipelines of these only.

The runner's loop must never wait, so nothing here does: work is begun in a thread of its own, asked how far
it is, told to stop, and asked whether it has.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, Protocol

from sava.errors import CallerError
from sava.pipeline.runner.control import UNKNOWN_LAG


class SettingsInvalid(CallerError):
    """Settings that a kind cannot work with, in one line."""


class Progress(NamedTuple):
    is_running: bool = False
    """False: it is still being prepared."""
    has_worked: bool = False
    """Since the job began a batch has ended well, or there was nothing to do."""
    rows: int = 0
    """Since the job began."""
    rate: float = 0.0
    batch: int = 0
    lag_messages: int = UNKNOWN_LAG
    lag_seconds: float = UNKNOWN_LAG
    has_backlog: bool = False
    """There is something to do, as far as is known."""
    pulse: Hashable = None
    """Something else whenever anything was done."""


class Job(Protocol):
    """A pipeline at work. Everything returns at once."""

    @property
    def progress(self) -> Progress: ...

    @property
    def end(self) -> End | None:
        """None: it has not ended, and may still write."""
        ...

    def stop(self, *, now: bool) -> None:
        """After the current batch, or in the midst of it. May be asked again, in either way."""
        ...


class End(NamedTuple):
    error: str = ""
    """Empty: it was stopped."""


class Kind(Protocol):
    def start(self, name: str, settings: Mapping[str, Any]) -> Job:
        """``name`` is the pipeline's: what it writes exactly once, it writes in this name. Raises
        SettingsInvalid."""
        ...
