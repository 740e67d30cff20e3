"""Lag: how far a query is behind its topics, in messages and in time.

Brokers say how far topics reach, the query how far it has come. How long it has been behind follows from when
the topics were first seen to reach beyond that: messages need not be read for it. What came before the first
look counts from the first look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Final, NamedTuple

from sava.pipeline.positions import Part
from sava.pipeline.runner.control import UNKNOWN_LAG
from sava.pipeline.tails import Extent

MAX_SAMPLES: Final = 512


class Behind(NamedTuple):
    messages: int = UNKNOWN_LAG
    seconds: float = UNKNOWN_LAG


class Lag:
    """Of one thread. The clock is a parameter."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Mapping[Part, Extent]]] = deque()
        self._first: Mapping[Part, Extent] | None = None

    def note(self, extents: Mapping[Part, Extent], now: float) -> None:
        if self._first is None:
            self._first = extents
        if self._samples and self._samples[-1][1] == extents:
            return
        self._samples.append((now, extents))
        if len(self._samples) > MAX_SAMPLES:
            # Every other one goes: a query that is far behind needs no better resolution.
            self._samples = deque(
                sample
                for index, sample in enumerate(self._samples)
                if index % 2 == 0 or index == len(self._samples) - 1
            )

    def behind(self, position: Mapping[Part, int] | None, now: float) -> Behind:
        """``position`` is None while it is not known."""
        if position is None or not self._samples:
            return Behind()
        while len(self._samples) > 1 and not _beyond(self._samples[0][1], position):
            self._samples.popleft()
        messages = _beyond(self._samples[-1][1], position)
        return Behind(messages, now - self._samples[0][0] if messages else 0.0)

    @property
    def has_grown(self) -> bool:
        """There is more than at the first look."""
        if self._first is None or not self._samples:
            return False
        return bool(_beyond(self._samples[-1][1], {part: extent.end for part, extent in self._first.items()}))


def _beyond(extents: Mapping[Part, Extent], position: Mapping[Part, int]) -> int:
    return sum(max(0, extent.end - position.get(part, extent.start)) for part, extent in extents.items())
