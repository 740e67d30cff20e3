"""KeyOrder: how far each key has come, where the order of a key is what is promised.

Of each producer and partition: a topic that grows spreads its keys anew, and what a key has in its old
partition and in its new one is in no order to each other.

One number for each key is kept. If those are too many, the oldest are forgotten: what comes then is compared
with what comes from then on.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

import numpy as np
from numpy.typing import NDArray

MAX_CELLS: Final = 1 << 23
"""64 MiB."""


class KeyOrder:
    """Owned by one event loop."""

    def __init__(self, max_cells: int = MAX_CELLS) -> None:
        self._max_cells = max_cells
        self._cells = 0
        self._ends: dict[Hashable, NDArray[np.int64]] = {}
        """By place and key: the end of what came in order."""

    def is_behind(self, place: Hashable, keys: int, sequences: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of them come behind a later one of the same key."""
        ends = self._ends.get(place)
        if ends is None:
            ends = self._begin(place, keys)
        chosen = sequences % keys
        is_behind = sequences < ends[chosen]
        if not is_behind.any() and bool((sequences[1:] > sequences[:-1]).all()):
            ends[chosen] = sequences + 1  # of several of one key the last stays, which is the highest
            return is_behind
        for row, (key, sequence) in enumerate(zip(chosen.tolist(), sequences.tolist(), strict=True)):
            is_behind[row] = sequence < ends[key]
            ends[key] = max(int(ends[key]), sequence + 1)
        return is_behind

    def _begin(self, place: Hashable, keys: int) -> NDArray[np.int64]:
        self._cells += keys
        while self._cells > self._max_cells and self._ends:
            self._cells -= len(self._ends.pop(next(iter(self._ends))))
        ends = self._ends[place] = np.zeros(keys, np.int64)
        return ends
