"""What the benchmark of failover makes of acknowledgements and of rounds that were measured before."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.rows.failover import FAULTS, Kept, ReadBack, Round, longest_gap, rows_of
from bench.systems import Sava

KILL = FAULTS[0]


@pytest.mark.parametrize(
    ("acks", "gap"),
    [
        ([9.9, 10.1, 10.2, 12.0], 1.8),
        ([9.5, 10.1, 10.2, 10.3, 11.9], 1.6),
        ([9.0, 10.5, 11.0, 11.9], 1.5),
        ([9.9], 2.1),
        ([9.9, 10.4], 1.6),
        ([], 2.0),
        ([10.5, 11.5], 1.0),
    ],
    ids=[
        "a stall in between",
        "a stall whose end is the last",
        "a stall that began before the fault and ended after it",
        "no acknowledgement after the fault",
        "a stall that has not ended",
        "no acknowledgement at all",
        "the first one ever after the fault",
    ],
)
def test_the_gap_of_a_topic(acks: list[float], gap: float) -> None:
    assert longest_gap(acks, 10.0, 12.0) == pytest.approx(gap)


def test_a_gap_that_ended_before_the_fault_does_not_count() -> None:
    assert longest_gap([5.0, 9.9, 10.0, 10.1], 10.0, 10.2) == pytest.approx(0.1)


def measured(**changes: object) -> Round:
    given = {
        "system": "Sava",
        "version": Sava.version(),
        "fault": KILL.name,
        "owned": [1.0, 1.2],
        "others": [0.1, 0.2, 0.1, 0.1],
        "back": 0.3,
    }
    return Round(**(given | changes))  # type: ignore[arg-type]


def test_rounds_of_a_file_count_for_the_version_that_they_were_measured_of(tmp_path: Path) -> None:
    path = tmp_path / "rounds.jsonl"
    first = Kept(path)
    first.add(measured())
    first.add(measured(version="another"))
    first.add(ReadBack("Sava", Sava.version(), KILL.name, acked=1000, lost=0, doubled=0, failed=2))
    again = Kept(path)
    assert again.rounds == first.rounds
    assert again.of("Sava", Sava.version(), KILL.name) == [measured()]
    assert again.checked("Sava", Sava.version(), KILL.name) == "0 of 1,000 acked lost"
    assert again.checked("Sava", "another", KILL.name) == "not read back"


def test_the_p50_is_over_the_victims_topics_and_the_slowest_over_all() -> None:
    """A topic that only lost a copy and stalls must not disappear behind the others."""
    kept = Kept()
    kept.add(measured(owned=[1.0, 1.2]))
    kept.add(measured(owned=[1.4, 1.1], others=[0.1, 3.5, 0.1, 0.1]))
    p50, slowest = rows_of(KILL, kept, {})
    assert p50.sava is not None
    assert slowest.sava is not None
    assert p50.sava.value == pytest.approx(1.15)
    assert p50.met is True
    assert slowest.sava.value == 3.5
    assert slowest.met is False


def test_a_topic_that_was_given_up_is_named() -> None:
    kept = Kept()
    kept.add(measured(owned=[60.0, 60.0], gave_up=True))
    assert "a topic was given up" in str(next(rows_of(KILL, kept, {})).sava)


def test_a_fault_that_could_not_be_measured_says_why() -> None:
    (row,) = rows_of(KILL, Kept(), {"Sava": "not measured: namespaces need root"})
    assert row.sava is None
    assert "need root" in row.line()
