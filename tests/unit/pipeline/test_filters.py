"""Filters: what is accepted is applied exactly, everything else is left to Spark."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from sava.pipeline.options import TopicPartition
from sava.pipeline.source.columns import Bounds, Conditions, in_time


def push(*filters: Filter) -> tuple[Conditions, list[Filter]]:
    return Conditions().push(filters)


def test_offsets_become_bounds() -> None:
    conditions, left = push(
        IsNotNull(("offset",)), GreaterThan(("offset",), 9), LessThanOrEqual(("offset",), 20)
    )
    assert left == []
    assert conditions.offset == Bounds(10, 21)
    assert push(EqualTo(("offset",), 7))[0].offset == Bounds(7, 8)
    assert push(GreaterThanOrEqual(("offset",), 7), LessThan(("offset",), 3))[0].offset == Bounds(7, 3)


def test_partitions_and_topics_are_chosen() -> None:
    conditions, left = push(
        In(("topic",), ("/a/b", "/a/c")), EqualTo(("topic",), "/a/b"), LessThan(("partition",), 2)
    )
    assert left == []
    assert conditions.accept(TopicPartition("/a/b", 1))
    assert not conditions.accept(TopicPartition("/a/b", 2))
    assert not conditions.accept(TopicPartition("/a/c", 1))


@pytest.mark.parametrize(
    "refused",
    [
        EqualTo(("key",), "k"),
        IsNotNull(("key",)),
        EqualTo(("offset",), 1.5),
        EqualTo(("offset",), True),
        EqualTo(("offset",), None),
        EqualTo(("publish_time",), datetime(2030, 1, 1)),  # noqa: DTZ001 (Spark's timestamp without a zone)
        Not(EqualTo(("offset",), 3)),
        In(("offset",), (1, 2)),
        StringStartsWith(("topic",), "/a"),
        EqualTo(("value", "offset"), 3),
    ],
)
def test_everything_else_is_left(refused: Filter) -> None:
    conditions, left = push(GreaterThan(("offset",), 3), refused)
    assert left == [refused]
    assert left[0] is refused
    assert conditions == push(GreaterThan(("offset",), 3))[0]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        (GreaterThan, [3, 4]),
        (GreaterThanOrEqual, [2, 3, 4]),
        (LessThan, [0, 1]),
        (LessThanOrEqual, [0, 1, 2]),
        (EqualTo, [2]),
    ],
)
def test_times_are_compared_by_the_microsecond(condition: Any, expected: list[int]) -> None:
    times = [datetime(2030, 1, 1, 0, 0, 0, micros, UTC) for micros in range(5)]
    rows = pa.record_batch(
        {"offset": pa.arange(0, 5), "publish_time": pa.array(times, pa.timestamp("us", tz="UTC"))}
    )
    conditions, left = push(condition(("publish_time",), times[2]))
    assert left == []
    assert conditions.times is not None
    found = [
        value for batch in in_time(iter([rows]), conditions.times) for value in batch["offset"].to_pylist()
    ]
    assert found == expected


def test_without_a_time_nothing_is_compared() -> None:
    assert push(GreaterThan(("offset",), 3))[0].times is None
