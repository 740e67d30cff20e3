"""Sets and maps of offsets against plain sets and dicts."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sava.topics.origin_acks import OriginAcks
from sava.topics.ranges import (
    IntervalSet,
    Range,
    RangeMap,
    difference,
    runs,
)

RANGES = st.tuples(st.integers(0, 60), st.integers(0, 60))
STEPS = st.lists(st.tuples(st.sampled_from(["add", "remove", "pop"]), RANGES), max_size=40)


def offsets(ranges: Iterable[Range]) -> set[int]:
    return {offset for start, end in ranges for offset in range(start, end)}


def test_a_cursor_far_along_is_one_range_for_whoever_lists_them() -> None:
    """``list`` makes room for as many as ``len`` says. That was the number of offsets: a subscription that
    had acked three thousand million messages could not be told to other clusters for want of memory."""
    acked = IntervalSet([(0, 1 << 60), (1 << 61, 1 << 62)])
    assert list(acked) == [(0, 1 << 60), (1 << 61, 1 << 62)]
    assert OriginAcks.of(("eu", "7"), acked) == OriginAcks(("eu", "7"), 1 << 60, [(1 << 61, 1 << 62)])
    flights: RangeMap[str] = RangeMap()
    flights.set(0, 1 << 62, "all")
    assert list(flights) == [(0, 1 << 62, "all")]


@given(STEPS, RANGES)
def test_an_interval_set_is_a_set(steps: list[tuple[str, tuple[int, int]]], asked: tuple[int, int]) -> None:
    intervals, model = IntervalSet(), set[int]()
    for step, (start, end) in steps:
        source_range = set(range(start, end))
        if step == "add":
            assert intervals.add(start, end) == len(source_range - model)
            model |= source_range
        elif step == "remove":
            assert offsets(intervals.remove(start, end)) == source_range & model
            model -= source_range
        else:
            reached = start
            while reached in model:
                reached += 1
            assert intervals.pop_prefix(start) == reached
            model = {offset for offset in model if offset >= reached}
        assert offsets(intervals) == model
        assert intervals.count == len(model)
        assert bool(intervals) == bool(model)
        ordered = list(intervals)
        assert all(left[1] < right[0] for left, right in pairwise(ordered))
        assert intervals.fragments == len(ordered)
        if model:
            assert intervals.first == min(model)
    start, end = asked
    assert offsets(intervals.within(start, end)) == set(range(start, end)) & model
    assert offsets(intervals.gaps(start, end)) == set(range(start, end)) - model
    assert all((offset in intervals) == (offset in model) for offset in range(61))


@given(st.lists(st.tuples(st.integers(0, 3), RANGES), max_size=40), RANGES)
def test_a_range_map_is_a_dict(steps: list[tuple[int, tuple[int, int]]], asked: tuple[int, int]) -> None:
    ranges: RangeMap[int] = RangeMap()
    model: dict[int, int] = {}
    for value, (start, end) in steps:
        if value:
            ranges.set(start, end, value)
            model |= dict.fromkeys(range(start, end), value)
        else:
            removed = {o: v for first, last, v in ranges.remove(start, end) for o in range(first, last)}
            assert removed == {o: model.pop(o) for o in range(start, end) if o in model}
        assert {o: v for first, last, v in ranges for o in range(first, last)} == model
        assert ranges.count == len(model)
    start, end = asked
    found = {o: v for first, last, v in ranges.within(start, end) for o in range(first, last)}
    assert found == {o: model[o] for o in range(start, end) if o in model}
    assert [ranges.get(o) for o in range(61)] == [model.get(o) for o in range(61)]


@given(st.sets(st.integers(0, 50)))
def test_runs_are_the_shortest_way_to_say_it(chosen: set[int]) -> None:
    found = runs(sorted(chosen))
    assert found == tuple(IntervalSet((o, o + 1) for o in chosen))


@given(st.lists(RANGES, max_size=12), st.lists(RANGES, max_size=12))
def test_a_difference_is_that_of_sets(ranges: list[Range], others: list[Range]) -> None:
    found = list(difference(IntervalSet(ranges), IntervalSet(others)))
    assert offsets(found) == offsets(ranges) - offsets(others)
    assert all(start < end for start, end in found)
    assert all(end < start for (_, end), (start, _) in pairwise(found))
