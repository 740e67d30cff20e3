"""What a doctor says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Level(StrEnum):
    OK = "ok"
    NOTE = "note"
    """Worth knowing, and nothing to do."""
    WARNING = "warning"
    """Works, and will not for long, or not as it should."""
    ERROR = "error"
    """Something does not work."""

    @property
    def is_trouble(self) -> bool:
        return self in (Level.WARNING, Level.ERROR)


ORDER: Final = (Level.ERROR, Level.WARNING, Level.NOTE, Level.OK)
"""The worst first."""


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    check: str
    subject: str
    """What it is about: a broker, a topic, an address."""
    text: str
    remedy: str = ""
    """What to do; empty if there is nothing to do."""


def error(check: str, subject: str, text: str, remedy: str) -> Finding:
    return Finding(Level.ERROR, check, subject, text, remedy)


def warning(check: str, subject: str, text: str, remedy: str) -> Finding:
    return Finding(Level.WARNING, check, subject, text, remedy)


def note(check: str, subject: str, text: str, remedy: str = "") -> Finding:
    return Finding(Level.NOTE, check, subject, text, remedy)
