"""Position: where a subscription or a reader begins."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final


class End(Enum):
    """One of the two ends of a topic."""

    EARLIEST = "earliest"
    """The first message that is kept."""
    LATEST = "latest"
    """What comes from now on."""


@dataclass(frozen=True, slots=True)
class AtOffset:
    offset: int


@dataclass(frozen=True, slots=True)
class AtTime:
    publish_time: int
    """µs: the first message that was not published before."""


Position = End | AtOffset | AtTime

EARLIEST: Final = End.EARLIEST
LATEST: Final = End.LATEST
