"""Columns of a message as a query sees them, and conditions on them that the source applies itself.

Spark does not tell a Python source which columns a query uses. A user who wants few says so by
``.schema(…)``; then only those are read. The batches must have exactly the types that Spark derives from the
schema.

Spark trusts the source with filters: it does not check an accepted condition again. The source accepts
comparisons of columns that are never null with values of their own type, and turns them into bounds. Topic,
partition and offset narrow the plan; publish time leaves out segments, row groups and rows.
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
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from sava.client.messages import microseconds
from sava.pipeline.errors import SourceRefused
from sava.pipeline.options import TopicPartition
from sava.records import STORED_COLUMNS

VALUE: Final = "value"
"""The payload, decoded by the topic's schema."""

COLUMNS: Final = StructType(
    [
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
        StructField("publish_time", TimestampType()),
        StructField("key", StringType()),
        StructField("payload", BinaryType()),
        StructField("attributes", MapType(StringType(), StringType())),
        StructField("producer", StringType()),
        StructField("schema_id", LongType()),
        StructField("schema_version", IntegerType()),
        StructField("origin_cluster", StringType()),
        StructField("origin_offset", LongType()),
    ]
)

DECODED_FROM: Final = ("payload", "schema_id", "schema_version")


def check_schema(schema: StructType, *, decode: bool) -> None:
    """Raises SourceRefused unless it is a choice of the columns, in any order, with their types."""
    types: dict[str, DataType] = {field.name: field.dataType for field in COLUMNS}
    for field in schema:
        if field.name == VALUE and decode:
            continue
        if field.name not in types:
            hint = "; value needs the option decode=true" if field.name == VALUE else ""
            raise SourceRefused(f'format("sava") has no column {field.name}: {", ".join(types)}{hint}')
        if field.dataType != types[field.name]:
            raise SourceRefused(
                f'format("sava"): column {field.name} is {types[field.name].simpleString()}, '
                f"and {field.dataType.simpleString()} was asked for"
            )


class Choice:
    """The columns of one query. Pickled as the schema alone."""

    def __init__(self, schema: StructType) -> None:
        self.spark = schema
        self.names: tuple[str, ...] = tuple(schema.fieldNames())
        wanted = {*self.names, *(DECODED_FROM if VALUE in self.names else ())}
        self.stored: tuple[str, ...] = tuple(name for name in STORED_COLUMNS if name in wanted)
        """The columns to read; topic, partition and offset are known without."""
        self.arrow: Any = to_arrow_schema(schema, timezone="UTC")

    def __reduce__(self) -> tuple[Any, tuple[StructType]]:
        return Choice, (self.spark,)


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
    """The conditions of one query that the source applies."""

    topics: frozenset[str] | None = None
    """None accepts all."""
    partition: Bounds = Bounds()
    offset: Bounds = Bounds()
    publish_time: Bounds = Bounds()

    def accept(self, part: TopicPartition) -> bool:
        return (self.topics is None or part.topic in self.topics) and part.number in self.partition

    @property
    def times(self) -> Bounds | None:
        """The bounds of the publish time, or None without a condition on it."""
        return self.publish_time if self.publish_time != Bounds() else None

    def push(self, filters: Iterable[Filter]) -> tuple[Conditions, list[Filter]]:
        """These conditions narrowed by the filters, and the filters that the source cannot apply."""
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
    """None if the value has another type than the column: only Spark knows how to compare them."""
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
    """The rows that were published within the bounds."""
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
