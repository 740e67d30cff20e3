"""The detectors in a simulated network: the dead are found in time, and the living are left alone."""

from __future__ import annotations

import pytest

from tests.support.long import IS_LONG
from tests.suspicion_sim.scenarios import SCENARIOS, lossy_hours, run_seed

SEEDS = 240 if IS_LONG else 10


@pytest.mark.parametrize("number", range(len(SCENARIOS)), ids=lambda number: SCENARIOS[number].__name__)
def test_every_scenario_holds_for_many_seeds(number: int) -> None:
    for seed in range(number, number + SEEDS * len(SCENARIOS), len(SCENARIOS)):
        name, broken = run_seed(seed)
        assert not broken, f"seed {seed} {name}: {broken}"


def test_a_bad_network_leads_to_no_more_than_one_false_eviction_a_day() -> None:
    """200 ms delay and 2 % loss: half an hour here, ten days with ``--days 10``."""
    evictions, _ = lossy_hours(1, 12 if IS_LONG else 0.5)
    assert evictions == 0
