"""The default set of seeds inside ``make test``, and every seed that ever failed (``corpus.txt``). Many more:
``make sim``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sava.raft import leading
from sava.raft.state import CoreState
from sava.raft.types import NodeId
from tests.sim.__main__ import report
from tests.sim.knobs import Knobs, draw
from tests.sim.run import run_seed
from tests.support.long import IS_LONG

SEEDS = 200 if IS_LONG else 40
GROUP = 10


def corpus() -> list[int]:
    lines = Path(__file__).with_name("corpus.txt").read_text().splitlines()
    return [int(line.split()[0]) for line in lines if line.strip() and not line.startswith("#")]


def check(seed: int, knobs: Knobs | None = None) -> None:
    result = run_seed(seed, knobs=knobs)
    if result.failed:
        pytest.fail(report(knobs or draw(seed), result), pytrace=False)


@pytest.mark.parametrize("first", range(1, SEEDS + 1, GROUP))
def test_seeds(first: int) -> None:
    for seed in range(first, first + GROUP):
        check(seed)


@pytest.mark.parametrize("seed", corpus())
def test_seeds_that_once_failed(seed: int) -> None:
    check(seed)


def test_leaders_whose_disks_take_nothing_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks are full and slow again and again, for longer than a leader of quick elections has patience; in
    other seeds that happens once in forty. Seed 44 once failed: a snapshot was on disk of which the node had
    not heard yet, and the end of the log that it replaced was taken for a broken promise (harness)."""
    resigned: list[NodeId] = []
    original = leading.next_leader

    def next_leader(state: CoreState) -> NodeId:
        chosen = original(state)
        resigned.extend([state.node] * bool(chosen))
        return chosen

    monkeypatch.setattr(leading, "next_leader", next_leader)
    faults = frozenset({"diskfull", "slowdisk", "crash", "partition", "loss", "delay"})
    for seed in range(40, 50):
        quick = replace(draw(seed), faults=faults, chaos_ms=30_000, tempo=2_000, tick_ms=50, election_ticks=5)
        check(seed, replace(quick, nodes=max(3, quick.nodes)))
    assert resigned
