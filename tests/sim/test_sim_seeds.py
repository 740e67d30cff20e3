"""The default set of seeds inside ``make test``, and every seed that ever failed (``corpus.txt``). Many more:
``make sim``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long import IS_LONG
from tests.sim.__main__ import report
from tests.sim.knobs import draw
from tests.sim.run import run_seed

SEEDS = 200 if IS_LONG else 40
GROUP = 10


def corpus() -> list[int]:
    lines = Path(__file__).with_name("corpus.txt").read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line.strip() and not line.startswith("#")]


def check(seed: int) -> None:
    result = run_seed(seed)
    if result.failed:
        pytest.fail(report(draw(seed), result), pytrace=False)


@pytest.mark.parametrize("first", range(1, SEEDS + 1, GROUP))
def test_seeds(first: int) -> None:
    for seed in range(first, first + GROUP):
        check(seed)


@pytest.mark.parametrize("seed", corpus())
def test_seeds_that_once_failed(seed: int) -> None:
    check(seed)
