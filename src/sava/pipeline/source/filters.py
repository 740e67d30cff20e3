"""Filters: conditions of a query that the source applies itself, so that what they exclude is never read.

Spark trusts the source: a condition that was accepted is not checked again. Accepted are comparisons of
columns that are never null with values of their own type. They become bounds; topic, partition and offset
narrow what is planned, publish time leaves out segments and row groups, and rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from sava.client.position import microseconds
from sava.pipeline.positions import Part

_LEAST: Final = -(1 << 63)
_BEYOND: Final = 1 << 63

_NUMBERS: Final = ("partition", "offset", "publish_time")
_NEVER_NULL: Final = ("topic", "payload", *_NUMBERS)


@dataclass(frozen=True, slots=True)
class Bounds:
    """``start <= value < end``."""

    start: int = _LEAST
    end: int = _BEYOND

    def within(self, start: int, end: int) -> Bounds:
        return Bounds(max(self.start, start), min(self.end, end))

    def __contains__(self, value: int) -> bool:
        return self.start <= value < self.end


@dataclass(frozen=True, slots=True)
class Conditions:
    topics: frozenset[str] | None = None
    """None: all."""
    partition: Bounds = Bounds()
    offset: Bounds = Bounds()
    publish_time: Bounds = Bounds()

    def accept(self, part: Part) -> bool:
        return (self.topics is None or part.topic in self.topics) and part.number in self.partition

    @property
    def times(self) -> Bounds | None:
        """Of publish, if they matter."""
        return self.publish_time if self.publish_time != Bounds() else None

    def push(self, filters: Iterable[Filter]) -> tuple[Conditions, list[Filter]]:
        """These conditions and those of the filters that can be applied; and the filters that cannot."""
        conditions, left = self, []
        for each in filters:
            narrower = conditions._and(each)
            if narrower is None:
                left.append(each)
            else:
                conditions = narrower
        return conditions, left

    def _and(self, condition: Filter) -> Conditions | None:
        attribute: tuple[str, ...] = getattr(condition, "attribute", ())
        if len(attribute) != 1:
            return None
        name = attribute[0]
        if isinstance(condition, IsNotNull):
            return self if name in _NEVER_NULL else None
        value = getattr(condition, "value", None)
        if name == "topic":
            return self._and_topic(condition, value)
        bounds = _bounds(condition, _number(name, value)) if name in _NUMBERS else None
        if bounds is None:
            return None
        held: Bounds = getattr(self, name)
        changed: dict[str, Any] = {name: held.within(bounds.start, bounds.end)}
        return replace(self, **changed)

    def _and_topic(self, condition: Filter, value: Any) -> Conditions | None:
        match condition:
            case EqualTo() | EqualNullSafe() if type(value) is str:
                wanted = frozenset((value,))
            case In() if all(type(each) is str for each in value):
                wanted = frozenset(value)
            case _:
                return None
        return replace(self, topics=wanted if self.topics is None else self.topics & wanted)


def _number(name: str, value: Any) -> int | None:
    """None for what is of another type than the column: how Spark would compare them is Spark's to know."""
    if name != "publish_time":
        return value if type(value) is int else None
    return microseconds(value) if isinstance(value, datetime) and value.tzinfo is not None else None


def _bounds(condition: Filter, value: int | None) -> Bounds | None:
    if value is None:
        return None
    match condition:
        case EqualTo() | EqualNullSafe():
            return Bounds(value, value + 1)
        case GreaterThan():
            return Bounds(start=value + 1)
        case GreaterThanOrEqual():
            return Bounds(start=value)
        case LessThan():
            return Bounds(end=value)
        case LessThanOrEqual():
            return Bounds(end=value + 1)
    return None


def in_time(batches: Iterator[Any], times: Bounds) -> Iterator[Any]:
    """The rows that were published within these bounds."""
    for batch in batches:
        published = batch.column("publish_time").cast(pa.int64())
        mask = None
        if times.start > _LEAST:
            mask = pc.greater_equal(published, times.start)
        if times.end < _BEYOND:
            before = pc.less(published, times.end)
            mask = before if mask is None else pc.and_(mask, before)
        rows = batch if mask is None else batch.filter(mask)
        if rows.num_rows:
            yield rows
