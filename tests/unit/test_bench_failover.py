"""What the benchmark of failover makes of acknowledgements and of rounds that were measured before."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bench import timeline
from bench.rows.failover import FAULTS, Kept, ReadBack, Round, longest_gap, resumed, rows_of
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


def test_the_end_of_the_longest_gap() -> None:
    assert resumed([9.9, 10.1, 12.0, 12.5], 10.0) == 12.0
    assert resumed([9.9], 10.0) == 10.0


def line(at: float, text: str) -> str:
    """As a broker logs it ``at`` seconds of CLOCK_MONOTONIC."""
    moment = datetime.fromtimestamp(at + time.time() - time.monotonic(), UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{moment.microsecond // 1000:03}Z WARNING broker=3 sava.x {text}\n"


def test_the_stages_of_a_round_are_its_victims_and_after_its_fault() -> None:
    """Broker 7 is killed at 1000. An earlier doubt, another broker's eviction, and a topic that the victim
    did not own do not count; of two topics the later one ends the stage."""
    leader = (
        line(990.0, "raft: a member is doubted node=7 sign=silent")
        + line(1000.5, "raft: a member is doubted node=7 sign=refused")
        + line(1000.9, "raft: a member is doubted node=7 sign=refused")
        + line(1000.2, "cluster: evicted broker=8 incarnation=1")
        + line(1000.6, "cluster: evicted broker=7 incarnation=1")
        + line(1000.61, "failover: recovering the ledger of a broker that is gone ledger=7/1")
        + line(1000.7, "failover: closed ledger=7/1 end=10")
    )
    other = (
        line(1000.8, "failover: tails recovered broker=7 disk=a")
        + line(1001.0, "agent: done job=take_up topic=/default/a ms=3")
        + line(1001.2, "agent: done job=take_up topic=/default/b ms=3")
        + line(1001.4, "agent: done job=take_up topic=/default/c ms=3")
        + "a line of something else\n"
    )
    found = timeline.stages([leader, other], 1000.0, 1010.0, victims=[7], topics=["/default/a", "/default/b"])
    expected = {"suspected": 0.5, "evicted": 0.6, "recovered": 0.7, "salvaged": 0.8, "served": 1.2}
    assert found == pytest.approx(expected, abs=0.01)
    header, row = timeline.table([{**found, "acked": 1.3}])
    assert header.split() == ["round", *timeline.STAGES]
    assert row.split() == ["1", "0.50", "s", "0.60", "s", "0.70", "s", "0.80", "s", "1.20", "s", "1.30", "s"]


def test_the_logs_of_the_slowest_round_are_kept(tmp_path: Path) -> None:
    log = tmp_path / "broker-0.log"
    log.write_text("before\n")
    recorder = timeline.Recorder([log], tmp_path / "kept")
    for number, slowest in enumerate((1.0, 3.0, 2.0)):
        recorder.begin()
        with log.open("a") as file:
            file.write(f"round {number}\n")
        recorder.keep(f"number {number}", slowest)
    assert (tmp_path / "kept" / "broker-0.log").read_text() == "# number 1\nround 1\n"
