"""The nouns: a journal, the disks that hold it, and which of them answer for which part.

A *position* is a byte of the owner's log (``wal``), and the same byte has the same position on every disk.
Every position that is said to anybody is the border of a record: streams are cut between records, so a copy
that ends somewhere ends with a whole one. Ends are exclusive.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

import msgspec

StorageId = NewType("StorageId", str)
"""A disk, for its life: drawn when the directory is created. A disk that was lost and replaced has another
one, so that it cannot say "nothing here" in the name of the one that held something."""


class JournalId(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One life of a broker's journal. Nobody, its owner included, ever continues a journal of an earlier
    life: a stream that only one process has written cannot have forked."""

    broker: int
    incarnation: int
    """Greater for each life; the first record in the metadata store under a number has it."""

    def __str__(self) -> str:
        return f"{self.broker}/{self.incarnation}"


class Fragment(msgspec.Struct, frozen=True, array_like=True):
    """From ``start`` on (up to the next fragment) these disks hold the journal, and what is durable on ``qa``
    of them is committed. The first of them is the owner's."""

    start: int
    members: tuple[StorageId, ...]
    qa: int


class Range(NamedTuple):
    start: int
    end: int


def without(whole: Range, parts: list[Range]) -> list[Range]:
    """What is left of ``whole`` when the parts are taken out of it."""
    left: list[Range] = []
    at = whole.start
    for part in sorted(parts):
        if part.start > at:
            left.append(Range(at, min(part.start, whole.end)))
        at = max(at, part.end)
        if at >= whole.end:
            return left
    if at < whole.end:
        left.append(Range(at, whole.end))
    return left
