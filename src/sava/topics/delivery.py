"""Delivery: what a consumer gets, and the ranges of offsets it answers with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sava.records import Message, RecordBatch

Range = tuple[int, int]
"""Offsets from the first to, and without, the second."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A batch on its way to one consumer.

    ``ranges`` names the offsets of the batch's rows, in order. Of a contiguous stretch of the topic it has
    one element; a key-shared consumer gets the rows of its keys, which have others between them.
    """

    batch: RecordBatch
    ranges: tuple[Range, ...]
    attempt: int = 1
    """1 for the first delivery."""

    def __len__(self) -> int:
        return len(self.batch)

    def offsets(self) -> Iterator[int]:
        for start, end in self.ranges:
            yield from range(start, end)

    def messages(self) -> Iterator[tuple[int, Message]]:
        """Each message with its offset."""
        return zip(self.offsets(), self.batch, strict=True)
