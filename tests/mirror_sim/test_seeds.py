"""The default set of seeds inside ``make test``; a run can be repeated."""

from __future__ import annotations

import pytest

from tests.mirror_sim.__main__ import report
from tests.mirror_sim.knobs import draw
from tests.mirror_sim.run import run_seed
from tests.support.long import IS_LONG

SEEDS = 100 if IS_LONG else 60
GROUP = 20
ONCE_FAILED = {
    8602: "the last copy of a part of a closed ledger was lost before it was read, for good (liveness)",
    51940: "records that a full disk had refused were back after a power cut, in the place of others (J7)",
}


def must_hold(seed: int) -> None:
    result = run_seed(seed)
    if result.failed:
        pytest.fail(report(draw(seed), result), pytrace=False)


@pytest.mark.parametrize("first", range(1, SEEDS + 1, GROUP))
def test_seeds(first: int) -> None:
    for seed in range(first, first + GROUP):
        must_hold(seed)


@pytest.mark.parametrize("seed", ONCE_FAILED)
def test_what_once_failed(seed: int) -> None:
    must_hold(seed)


@pytest.mark.parametrize("seed", [3, 11])
def test_the_same_seed_gives_the_same_run(seed: int) -> None:
    first, second = run_seed(seed), run_seed(seed)
    assert (first.hash, first.events, first.failure) == (second.hash, second.events, second.failure)
