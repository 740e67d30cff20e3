"""Planning: a range of offsets of each partition becomes pieces, and pieces become tasks.

    offsets     start ──────────────────────── stored ────────── end
    where       segment │ segment │ segment            tail
                executors read the object store         … the owner of the partition

A task of Spark costs some 60 ms whatever it does, and a core that has nothing to do costs more. So a tiny
batch is one task, whatever it is made of; a larger one has a task for each core; and no task reads more than
TASK_BYTES. Pieces are cut where that makes tasks equal. A task reads its pieces in their order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pyspark.sql.datasource import InputPartition

from sava.pipeline.positions import Part
from sava.storage.types import Segment

TASK_BYTES: Final = 64 << 20
"""Compressed, at most for one task."""
WORTH_A_TASK: Final = 1 << 20
"""With less, another task costs more than it saves."""
ROW_BYTES: Final = 16
"""A row is worth at least this, however well it is compressed."""


class Piece(NamedTuple):
    """Offsets ``start .. end`` of a partition, which are all in one place."""

    part: Part
    name: str
    """Of the partition, as brokers call it."""
    start: int
    end: int
    segment: Segment | None
    """None: the owner has them."""
    message_bytes: float
    """About."""

    @property
    def row_weight(self) -> float:
        return max(self.message_bytes, ROW_BYTES)

    @property
    def weight(self) -> float:
        return (self.end - self.start) * self.row_weight


@dataclass
class Share(InputPartition):
    """What one task reads."""

    pieces: tuple[Piece, ...]
    store_url: str


def shares(
    pieces: Sequence[Piece], store_url: str, *, min_partitions: int = 0, cores: int = 0
) -> list[Share]:
    """Tasks of about equal weight."""
    rows = sum(piece.end - piece.start for piece in pieces)
    if not rows:
        return []
    total = sum(piece.weight for piece in pieces)
    cores = cores or os.cpu_count() or 1
    count = max(min(cores, int(total / WORTH_A_TASK)), -int(-total // TASK_BYTES), min_partitions, 1)
    return [Share(tuple(share), store_url) for share in _dealt(pieces, total / min(count, rows)) if share]


def _dealt(pieces: Sequence[Piece], weight: float) -> Iterator[list[Piece]]:
    """In order, ``weight`` for each; what rounding to whole rows takes from one, the next one gets."""
    share: list[Piece] = []
    room = weight
    for each in pieces:
        piece = each
        row = piece.row_weight
        while piece.start < piece.end and piece.weight > room + row / 2:
            rows = max(round(room / row), 0 if share else 1)
            if rows > 0:
                share.append(piece._replace(end=piece.start + rows))
                piece = piece._replace(start=piece.start + rows)
            yield share
            share, room = [], room - max(rows, 0) * row + weight
        if piece.start < piece.end:
            share.append(piece)
            room -= piece.weight
    yield share
