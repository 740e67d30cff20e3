"""Milestones: who waits for a number that only grows (an applied index, a revision)."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Milestones(Generic[T]):
    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []
        self._items: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._items)

    def add(self, number: int, ticket: int, item: T) -> None:
        """``ticket`` names it for ``cancel``."""
        heapq.heappush(self._heap, (number, ticket))
        self._items[ticket] = item

    def cancel(self, ticket: int) -> None:
        if self._items.pop(ticket, None) is not None and len(self._heap) > 2 * len(self._items) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._items]
            heapq.heapify(self._heap)

    def reached(self, number: int) -> list[T]:
        """What waited for ``number`` or less, in order."""
        heap, ready = self._heap, []
        while heap and heap[0][0] <= number:
            item = self._items.pop(heapq.heappop(heap)[1], None)
            if item is not None:
                ready.append(item)
        return ready


Callback = Callable[[], None]
