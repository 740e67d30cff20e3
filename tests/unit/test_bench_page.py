"""The table of docs/benchmarks.md: what a run writes, and what it must leave alone."""

from __future__ import annotations

import io
import re
import socket
from pathlib import Path

import pytest
from rich.console import Console

from bench import page, setting
from bench.__main__ import _command
from bench.page import BEGIN, END, PAGE, Figures, PageError, updated
from bench.report import Fault, Quantity, Report, Row, Target
from bench.rows import SECTIONS

ORDER = ["puts", "broker", "spark"]
EMPTY = f"# Benchmarks\n\nBefore.\n\n{BEGIN}\n{END}\n\nAfter.\n"


def report(
    *rows: Row, sections: tuple[str, ...], started: str = "2026-11-16T10:00:00+00:00", **other: object
) -> Report:
    given: dict[str, object] = {
        "quick": False,
        "rounds": 3,
        "command": "make bench",
        "client": "h2load",
        "versions": {"Python": "3.11.7", "etcd": "3.4.23", "NATS": None},
        "commit": "0123abc",
        "machine": "2 cores, 24 GiB of memory, Linux 6.18.1",
        "disk": "ext4 on a virtual disk",
    }
    return Report(rows=list(rows), sections=sections, started=started, **(given | other))  # type: ignore[arg-type]


def row(section: str, name: str, rate: float, peer: float | None = None) -> Row:
    beside = Quantity(peer, "per second") if peer else None
    return Row(
        section, name, Quantity(rate, "per second"), beside, Target("at least etcd's rate", at_least=1.0)
    )


def test_a_run_is_written_with_all_that_was_asked_of_it() -> None:
    text, kept = updated(EMPTY, report(row("puts", "put", 200, 100), sections=("puts",)), ORDER)
    assert kept == []
    assert (
        "| **puts** · run 1 | | | | | |\n| put | 200/s | etcd 100/s | 2.00× | at least etcd's rate | met |"
        in text
    )
    [run] = re.findall(r"^1\. .*$", text, re.MULTILINE)
    for told in (
        *("2026-11-16", "commit 0123abc", "`make bench`", "3 rounds", "2 cores, 24 GiB", "Linux 6.18.1"),
        *("ext4 on a virtual disk", "Python 3.11.7, etcd 3.4.23", "h2load", "nothing stands beside: NATS."),
    ):
        assert told in run
    assert text.startswith("# Benchmarks\n\nBefore.\n\n")
    assert text.endswith(f"{END}\n\nAfter.\n")


def test_an_aim_is_called_one() -> None:
    """What is not promised must not look like a promise that was not kept."""
    aim = Target("p50 at most 1 s", at_most=1.0, of_peer=False, is_aim=True)
    shown = Row("replication", "lag", Quantity(2.0, "seconds"), None, aim).line()
    assert shown.endswith("| aim: p50 at most 1 s | not reached |")
    for target, verdict in re.findall(r"^\|.*\| ([^|]*) \| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE):
        assert target.startswith("aim: ") == (verdict in ("reached", "not reached"))


def test_a_partial_run_leaves_the_other_sections_as_they_were() -> None:
    both = report(row("puts", "put", 200, 100), row("spark", "read", 7), sections=("puts", "spark"))
    first, _ = updated(EMPTY, both, ORDER)
    later = report(
        row("spark", "read", 9),
        sections=("spark",),
        started="2026-12-24T10:00:00+00:00",
        commit="4567def",
        command="python -m bench --only spark",
    )
    second, _ = updated(first, later, ORDER)
    figures = Figures.read(second.partition(BEGIN)[2].partition(END)[0])
    assert (
        figures.sections["puts"] == Figures.read(first.partition(BEGIN)[2].partition(END)[0]).sections["puts"]
    )
    assert figures.sections["puts"].run.startswith("2026-11-16, commit 0123abc")
    assert figures.sections["spark"].run.startswith(
        "2026-12-24, commit 4567def, `python -m bench --only spark`"
    )
    assert "| read | 9/s |" in second
    assert "| read | 7/s |" not in second


def test_sections_stand_in_the_order_of_the_benchmark() -> None:
    """Whenever they were measured."""
    text = EMPTY
    for name in ("spark", "puts", "broker"):
        text, _ = updated(text, report(row(name, "rate", 1), sections=(name,)), ORDER)
    assert re.findall(r"\*\*(\w+)\*\* · run (\d)", text) == [("puts", "1"), ("broker", "1"), ("spark", "1")]


def test_writing_the_same_twice_changes_nothing() -> None:
    run = report(row("puts", "put", 200, 100), sections=("puts",))
    once, _ = updated(EMPTY, run, ORDER)
    assert updated(once, run, ORDER)[0] == once


def test_a_section_without_a_figure_keeps_its_former_ones_and_is_named() -> None:
    first, _ = updated(EMPTY, report(row("puts", "put", 200, 100), sections=("puts",)), ORDER)
    broken = report(sections=("puts",), faults=[Fault("puts", "etcd ended with 1")], commit="4567def")
    second, kept = updated(first, broken, ORDER)
    assert kept == ["puts"]
    assert second == first


def test_a_section_of_which_a_part_broke_off_says_so_in_the_table() -> None:
    broken = report(
        row("broker", "publish", 5), sections=("broker",), faults=[Fault("broker", "it ended:\n a | b")]
    )
    text, kept = updated(EMPTY, broken, ORDER)
    assert kept == []
    assert "| publish | 5/s |" in text
    assert "| broke off: it ended: a / b | | | | | |" in text
    assert updated(text, broken, ORDER)[0] == text


def test_a_reason_is_printed_as_it_is() -> None:
    printed = io.StringIO()
    reason = "cannot open [/tmp/x] at [fd00::1]:6650 :boom:"
    report(sections=("puts",), faults=[Fault("puts", reason)]).print(Console(file=printed, width=160))
    assert f"broke off puts: {reason}\n" in printed.getvalue()


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        f"{END}\n{BEGIN}",
        f"{BEGIN}\n{END}\n{BEGIN}\n{END}",
        f"{BEGIN}\n| other | head |\n{END}",
        EMPTY.replace(
            END, "| | Sava | beside | ratio | target | |\n|---|---|---|---|---|---|\nprose\n" + END
        ),
        EMPTY.replace(
            END,
            "| | Sava | beside | ratio | target | |\n|---|---|---|---|---|---|\n| **puts** · run 4 | |\n"
            + END,
        ),
    ],
)
def test_a_page_of_another_form_is_refused_instead_of_overwritten(text: str) -> None:
    with pytest.raises(PageError):
        updated(text, report(row("puts", "put", 1), sections=("puts",)), ORDER)


def test_the_page_of_the_repository_can_be_written(tmp_path: Path) -> None:
    """Every section that stands there is one that the benchmark has, and comes out as it went in."""
    text = PAGE.read_text()
    figures = Figures.read(text.partition(BEGIN)[2].partition(END)[0])
    assert figures.sections
    assert set(figures.sections) <= set(SECTIONS)
    copy = tmp_path / "benchmarks.md"
    copy.write_text(text)
    assert page.write(report(sections=()), SECTIONS, copy) == []
    assert copy.read_text() == text


def test_the_page_says_what_each_section_measures() -> None:
    rows = re.findall(r"^\| (`[^|]+`) \| [^|]+ \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)
    assert set(SECTIONS) <= {name for row in rows for name in re.findall(r"`(\w+)`", row)}


@pytest.mark.parametrize(
    ("given", "command"),
    [
        (["--write"], "make bench"),
        ([], "make bench"),
        (["--only", "spark", "--write", "--dir", "/mnt/disk"], "python -m bench --only spark"),
        (["--quick", "--out", "run.json"], "python -m bench --quick"),
    ],
)
def test_the_command_is_told_as_somebody_would_type_it(given: list[str], command: str) -> None:
    assert _command(given) == command


def test_the_setting_is_known_and_names_nobody(tmp_path: Path) -> None:
    told = f"{setting.machine()}, {setting.disk(tmp_path)}, {setting.commit()}, {setting.versions()}"
    assert re.match(r"\d+ cores, \d+ GiB of memory, \w+ [\d.]+, ", told)
    assert socket.gethostname() not in told
    assert {"Python", "gRPC", "pyarrow", "Spark"} == setting.versions().keys()
