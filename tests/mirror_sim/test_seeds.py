"""The default set of seeds inside ``make test``; a run can be repeated."""

from __future__ import annotations

import pytest

from tests.mirror_sim.__main__ import report
from tests.mirror_sim.knobs import draw
from tests.mirror_sim.run import run_seed

SEEDS = 100
GROUP = 20


@pytest.mark.parametrize("first", range(1, SEEDS + 1, GROUP))
def test_seeds(first: int) -> None:
    for seed in range(first, first + GROUP):
        result = run_seed(seed)
        if result.failed:
            pytest.fail(report(draw(seed), result), pytrace=False)


@pytest.mark.parametrize("seed", [3, 11])
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    first, second = run_seed(seed), run_seed(seed)
    assert (first.hash, first.events, first.failure) == (second.hash, second.events, second.failure)
