"""Positions: how far a query has come, in the form that Spark keeps in its checkpoint.

    {"/default/orders": {"0": 1200, "1": 998}}

Topics are named as users know them and partitions by their number, ``"0"`` for a plain topic: a checkpoint
says the same as the options do. Spark compares positions as text, hence sorted keys: equal positions must be
equal texts, or an idle query runs empty batches for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

Positions = dict[str, dict[str, int]]
"""As Spark stores them: offsets that come next, so that ends are exclusive."""


class Part(NamedTuple):
    """A plain topic, or one partition of a partitioned topic."""

    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic} partition {self.number}"


def part_name(part: Part, *, partitioned: bool) -> str:
    """What brokers call it."""
    return f"{part.topic}-part-{part.number}" if partitioned else part.topic


def to_positions(offsets: Mapping[Part, int]) -> Positions:
    positions: Positions = {}
    for part in sorted(offsets):
        positions.setdefault(part.topic, {})[str(part.number)] = offsets[part]
    # By text, as a reader who sorts the JSON would have them.
    return {topic: dict(sorted(numbers.items())) for topic, numbers in positions.items()}


def to_offsets(positions: Mapping[str, Mapping[str, int]]) -> dict[Part, int]:
    """Raises ValueError for what ``to_positions`` would not make."""
    offsets: dict[Part, int] = {}
    for topic, numbers in positions.items():
        if not isinstance(numbers, Mapping):
            raise ValueError(f"{topic} has {numbers!r} where offsets by partition are expected")
        for number, offset in numbers.items():
            if not number.isdecimal() or type(offset) is not int:
                raise ValueError(
                    f"{topic} has {number!r}: {offset!r} where a partition's number and an offset belong"
                )
            offsets[Part(topic, int(number))] = offset
    return offsets
