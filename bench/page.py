"""Page: the one table of figures in ``docs/benchmarks.md``.

A run rarely measures everything, so the table is kept by section: a run replaces the rows of the sections
that it has measured and leaves the others as they are. Each section names the run that it is from, and below
the table every run that is still in it is told once: date, Sava's commit, command, machine, versions, and
which peers were absent. What is around the two markers is prose, and is never touched.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from bench.report import HEAD, Report

PAGE: Final = Path(__file__).parents[1] / "docs" / "benchmarks.md"
BEGIN: Final = "<!-- figures begin: written by `make bench` -->"
END: Final = "<!-- figures end -->"
SECTION: Final = re.compile(r"\| \*\*(?P<name>[a-z]+)\*\* · run (?P<run>\d+) \|[ |]*")
RUN: Final = re.compile(r"(?P<number>\d+)\. (?P<told>.+)")


class PageError(Exception):
    """The page does not have the form that this module writes; the message says where."""


@dataclass(frozen=True, slots=True)
class Section:
    rows: Sequence[str]
    """As they stand in the table."""
    run: str
    """What is told of the run that they are from."""


@dataclass(slots=True)
class Figures:
    sections: dict[str, Section] = field(default_factory=dict)

    def take(self, report: Report, order: Sequence[str]) -> list[str]:
        """Replace what was measured; the sections that keep former rows because they broke off without
        any."""
        kept = []
        told = tell(report)
        broken = {fault.section for fault in report.faults}
        for name in report.sections:
            rows = [row.line() for row in report.rows if row.section == name]
            if not rows and name in broken:
                kept.append(name)
                continue
            rows += [
                f"| broke off: {_cell(fault.reason)} | | | | | |"
                for fault in report.faults
                if fault.section == name
            ]
            self.sections[name] = Section(rows, told)
        known = [name for name in order if name in self.sections]
        gone = [name for name in self.sections if name not in order]
        self.sections = {name: self.sections[name] for name in (*known, *gone)}
        return kept

    def __str__(self) -> str:
        runs = list(dict.fromkeys(section.run for section in self.sections.values()))
        lines = [*HEAD]
        for name, section in self.sections.items():
            lines.append(f"| **{name}** · run {runs.index(section.run) + 1} | | | | | |")
            lines += section.rows
        lines.append("")
        lines += [f"{number}. {told}" for number, told in enumerate(runs, 1)]
        return "\n".join(lines)

    @classmethod
    def read(cls, text: str) -> Figures:
        """The opposite of ``str``."""
        lines = [line for line in text.splitlines() if line]
        if not lines:
            return cls()
        if tuple(lines[:2]) != HEAD:
            raise PageError(f"{BEGIN} is not followed by the table's head, {HEAD[0]}")
        runs = {int(found["number"]): found["told"] for found in _matches(RUN, lines)}
        rows: dict[str, list[str]] = {}
        of: dict[str, str] = {}
        name = ""
        for line in lines[2:]:
            if found := SECTION.fullmatch(line):
                name = found["name"]
                rows[name] = []
                if (number := int(found["run"])) not in runs:
                    raise PageError(f"nothing is told of run {number}, which section {name} is from")
                of[name] = runs[number]
            elif line.startswith("|"):
                if not name:
                    raise PageError(f"a row stands before the first section: {line}")
                rows[name].append(line)
            elif not RUN.fullmatch(line):
                raise PageError(f"neither a row nor a run: {line}")
        return cls({name: Section(rows[name], of[name]) for name in rows})


def tell(report: Report) -> str:
    """One line of a run."""
    absent = [name for name, version in report.versions.items() if version is None]
    there = ", ".join(f"{name} {version}" for name, version in report.versions.items() if version)
    parts = [
        f"{report.started[:10]}, commit {report.commit}, `{report.command}`, {report.effort}",
        f"{report.machine}, {report.disk}",
        f"{there}; gRPC servers loaded by {report.client}",
    ]
    if absent:
        parts.append(f"absent, so that nothing stands beside: {', '.join(absent)}")
    return ". ".join(parts) + "."


def updated(page: str, report: Report, order: Sequence[str]) -> tuple[str, list[str]]:
    """The page with what ``report`` has measured, and the sections that keep their former rows."""
    before, begin, rest = page.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise PageError(f"the page must have {BEGIN} and {END} once each, in this order")
    figures = Figures.read(inside)
    kept = figures.take(report, order)
    return f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}", kept


def write(report: Report, order: Iterable[str], path: Path = PAGE) -> list[str]:
    page, kept = updated(path.read_text(encoding="utf-8"), report, list(order))
    path.write_text(page, encoding="utf-8")
    return kept


def _cell(text: str) -> str:
    """On one line, without what would end a cell."""
    return " ".join(text.split()).replace("|", "/")


def _matches(pattern: re.Pattern[str], lines: Iterable[str]) -> list[Mapping[str, str]]:
    return [found.groupdict() for line in lines if (found := pattern.fullmatch(line))]
