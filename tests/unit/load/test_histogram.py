from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from sava.load.figures import PERCENTILES, Histogram


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=200))
def test_percentiles_are_known_to_within_one_percent(values: list[int]) -> None:
    histogram = Histogram()
    histogram.record(values[0])
    histogram.record_since([10**18 - value * 1000 for value in values[1:]], 10**18)
    ordered = sorted(values)
    for percent in PERCENTILES:
        true = ordered[max(math.ceil(len(values) * percent / 100), 1) - 1]
        assert true <= histogram.percentile(percent) <= true * 1.01
    assert (histogram.least, histogram.most) == (ordered[0], ordered[-1])
    assert math.isclose(histogram.mean, sum(values) / len(values))


def test_it_takes_anything_and_stays_as_large_as_it_is() -> None:
    histogram = Histogram()
    size = len(histogram._counts)
    for value in (-5, 0, 1, 1 << 39, 1 << 70):
        histogram.record(value)
    assert len(histogram._counts) == size
    assert histogram.count == 5
    assert histogram.percentile(100) == histogram.most == (1 << 40) - 1


def test_nothing_recorded_is_nothing_to_tell() -> None:
    assert set(Histogram().summary().values()) == {0.0}
