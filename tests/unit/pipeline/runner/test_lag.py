"""How far a query is behind, from how far topics reach and how far it has come."""

from __future__ import annotations

from typing import Any

from sava.pipeline.calls import PartitionExtent
from sava.pipeline.options import TopicPartition
from sava.pipeline.runner.queries import MAX_SAMPLES, BatchesSeen, Lag

A, B = TopicPartition("/default/a", 0), TopicPartition("/default/b", 0)


def _reach(a: int, b: int = 0) -> dict[TopicPartition, PartitionExtent]:
    return {A: PartitionExtent(0, 0, a), B: PartitionExtent(0, 0, b)}


def test_nothing_known_is_not_nothing_to_do() -> None:
    lag = Lag()
    assert lag.behind({A: 0}, 1.0) == (-1, -1)
    lag.note(_reach(5), 1.0)
    assert lag.behind(None, 2.0) == (-1, -1)


def test_a_query_is_behind_since_the_topic_went_beyond_it() -> None:
    lag = Lag()
    lag.note(_reach(10), 1.0)
    assert lag.behind({A: 10, B: 0}, 5.0) == (0, 0.0)
    lag.note(_reach(12), 6.0)
    lag.note(_reach(15), 8.0)
    assert lag.behind({A: 10, B: 0}, 9.0) == (5, 3.0)
    assert lag.behind({A: 12, B: 0}, 9.5) == (3, 1.5), "what came at 6 is done"
    assert lag.behind({A: 15, B: 0}, 10.0) == (0, 0.0)


def test_a_partition_that_the_query_has_not_seen_counts_from_what_is_kept() -> None:
    lag = Lag()
    lag.note({A: PartitionExtent(0, 0, 4), B: PartitionExtent(100, 100, 103)}, 1.0)
    assert lag.behind({A: 4}, 3.0) == (3, 2.0)


def test_growth_since_the_first_look() -> None:
    lag = Lag()
    assert not lag.has_grown
    lag.note(_reach(4), 1.0)
    assert not lag.has_grown
    lag.note(_reach(5), 2.0)
    assert lag.has_grown


def test_what_is_remembered_is_bounded_and_keeps_the_oldest() -> None:
    lag = Lag()
    for second in range(20 * MAX_SAMPLES):
        lag.note(_reach(second + 1), float(second))
    assert len(lag._samples) <= MAX_SAMPLES
    assert lag.behind({A: 0, B: 0}, 20.0 * MAX_SAMPLES) == (20 * MAX_SAMPLES, 20.0 * MAX_SAMPLES)


# -- what Spark tells ------------------------------------------------------------------------------


def _progress(batch: int, rows: int, end: Any) -> dict[str, Any]:
    return {"batchId": batch, "numInputRows": rows, "sources": [{"endOffset": end}]}


def test_batches_are_counted_once() -> None:
    seen = BatchesSeen()
    seen.note(_progress(3, 10, '{"/default/a": {"0": 10}}'), 1.0)
    seen.note(_progress(3, 10, '{"/default/a": {"0": 10}}'), 1.5)
    seen.note(_progress(4, 20, '{"/default/a": {"0": 30}}'), 2.0)
    assert (seen.batch, seen.rows, seen.position) == (4, 30, {A: 30})
    assert seen.rate(2.0) == 3.0
    assert seen.rate(60.0) == 0.0


def test_a_position_of_something_else_is_none() -> None:
    seen = BatchesSeen()
    seen.note(_progress(0, 1, "17"), 1.0)
    seen.note(_progress(1, 1, None), 1.0)
    assert seen.position is None
