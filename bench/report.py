"""Report: rows of figures, whether each met its target, and the two ways to print them."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

Unit = Literal["per second", "seconds", "bytes"]


@dataclass(frozen=True, slots=True)
class Quantity:
    """One figure with its unit; ``detail`` is what a reader should see next to it (the p99, the range)."""

    value: float
    unit: Unit
    detail: str = ""

    def __str__(self) -> str:
        match self.unit:
            case "per second":
                text = f"{self.value:,.0f}/s"
            case "seconds":
                text = duration(self.value)
            case "bytes":
                text = f"{self.value / 1e6:,.0f} MB"
        return f"{text} ({self.detail})" if self.detail else text


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


@dataclass(frozen=True, slots=True)
class Target:
    """What Sava promised: a bound on its own figure, or on the ratio of its figure to etcd's."""

    text: str
    at_least: float | None = None
    at_most: float | None = None
    of_etcd: bool = True

    def is_met(self, sava: Quantity | None, etcd: Quantity | None) -> bool | None:
        """None: it cannot be told, because one of the two was not measured."""
        if sava is None or (self.of_etcd and (etcd is None or not etcd.value)):
            return None
        figure = sava.value / etcd.value if self.of_etcd and etcd is not None else sava.value
        return (self.at_least is None or figure >= self.at_least) and (
            self.at_most is None or figure <= self.at_most
        )


@dataclass(frozen=True, slots=True)
class Row:
    section: str
    name: str
    sava: Quantity | None
    etcd: Quantity | None = None
    target: Target | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return self.sava.value / self.etcd.value if self.sava and self.etcd and self.etcd.value else None

    @property
    def met(self) -> bool | None:
        return self.target.is_met(self.sava, self.etcd) if self.target else None


@dataclass(slots=True)
class Report:
    """All rows of one run, and on what they were measured."""

    quick: bool
    client: str
    etcd_version: str
    rows: list[Row] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """Sections that broke off, with the reason: a missing row is not a met target."""
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    machine: str = field(default_factory=lambda: machine())

    def as_json(self) -> str:
        rows = [{**asdict(row), "ratio": row.ratio, "met": row.met} for row in self.rows]
        return json.dumps({**asdict(self), "rows": rows}, indent=2)

    def print(self, console: Console) -> None:
        table = Table(box=box.SIMPLE_HEAD, title=f"{self.machine} · {self.started}", title_justify="left")
        for heading in ("", "Sava", "etcd", "ratio", "target", ""):
            table.add_column(heading, justify="right" if heading == "ratio" else "left", overflow="fold")
        section = ""
        for row in self.rows:
            if section and row.section != section:
                table.add_section()
            section = row.section
            name = f"{row.name}\n[dim]{row.note}[/]" if row.note else row.name
            table.add_row(name, *_cells(row), _verdict(row))
        console.print(table)
        console.print(f"etcd: {self.etcd_version}; load on gRPC servers by {self.client}.")
        judged = [row for row in self.rows if row.target]
        met = sum(row.met is True for row in judged)
        console.print(
            f"{met} of {len(judged)} targets met." + (" Quick run: rough figures." if self.quick else "")
        )
        for fault in self.faults:
            console.print(f"[red]broke off[/] {fault}", highlight=False)

    def as_markdown(self) -> str:
        """The table in the form that ``docs/benchmarks.md`` holds."""
        lines = ["| row | Sava | etcd | ratio | target | |", "|---|---|---|---|---|---|"]
        lines += [f"| {' | '.join((row.name, *_cells(row), _plain_verdict(row)))} |" for row in self.rows]
        return "\n".join(lines) + "\n"


def _cells(row: Row) -> Sequence[str]:
    return (
        str(row.sava) if row.sava else "–",
        str(row.etcd) if row.etcd else "–",
        f"{row.ratio:,.2f}×" if row.ratio is not None else "",
        row.target.text if row.target else "",
    )


def _plain_verdict(row: Row) -> str:
    if row.target is None:
        return ""
    return {True: "met", False: "MISSED", None: "not compared"}[row.met]


def _verdict(row: Row) -> str:
    colour = {True: "green", False: "bold red", None: "yellow"}[row.met]
    return f"[{colour}]{text}[/]" if (text := _plain_verdict(row)) else ""


def machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {system}"


def write(report: Report, path: Path) -> None:
    """By suffix: ``.md`` as a table, anything else as JSON."""
    path.write_text(
        report.as_markdown() if path.suffix == ".md" else report.as_json() + "\n", encoding="utf-8"
    )
