"""Report: rows of figures, whether each met its target, and the two ways to print them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

HEAD: Final = ("| | Sava | beside | ratio | target | |", "|---|---|---|---|---|---|")

Unit = Literal["per second", "seconds", "bytes", "bytes per second", "share"]


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
                text = _megabytes(self.value)
            case "bytes per second":
                text = f"{_megabytes(self.value)}/s"
            case "share":
                text = f"{self.value:.2%}"
        return f"{text} ({self.detail})" if self.detail else text


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.0f} MB" if size >= 1e7 else f"{size / 1e6:.2f} MB"


def duration(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


@dataclass(frozen=True, slots=True)
class Target:
    """What Sava promised: a bound on its own figure, or on the ratio of its figure to its peer's. An aim is
    where it wants to go; it is shown like a target and not counted as one."""

    text: str
    at_least: float | None = None
    at_most: float | None = None
    of_peer: bool = True
    is_aim: bool = False

    def __str__(self) -> str:
        return f"aim: {self.text}" if self.is_aim else self.text

    def is_met(self, sava: Quantity | None, peer: Quantity | None) -> bool | None:
        """None: it cannot be told, because one of the two was not measured."""
        if sava is None or (self.of_peer and (peer is None or not peer.value)):
            return None
        figure = sava.value / peer.value if self.of_peer and peer is not None else sava.value
        return (self.at_least is None or figure >= self.at_least) and (
            self.at_most is None or figure <= self.at_most
        )


@dataclass(frozen=True, slots=True)
class Row:
    """``peer`` is what Sava's figure is compared with, of whatever ``peer_name`` says."""

    section: str
    name: str
    sava: Quantity | None
    peer: Quantity | None = None
    target: Target | None = None
    note: str = ""
    peer_name: str = "etcd"

    @property
    def ratio(self) -> float | None:
        return self.sava.value / self.peer.value if self.sava and self.peer and self.peer.value else None

    @property
    def met(self) -> bool | None:
        return self.target.is_met(self.sava, self.peer) if self.target else None

    def line(self) -> str:
        """Of a table in Markdown, under ``HEAD``."""
        name = f"{self.name} ({self.note})" if self.note else self.name
        return f"| {' | '.join((name, *_cells(self), _plain_verdict(self)))} |"


@dataclass(frozen=True, slots=True)
class Fault:
    """A part of a section that broke off: a missing row is not a met target."""

    section: str
    reason: str


@dataclass(slots=True, kw_only=True)
class Report:
    """All rows of one run, and on what they were measured."""

    quick: bool
    rounds: int
    command: str
    sections: Sequence[str]
    """What was to be measured."""
    client: str
    versions: dict[str, str | None]
    """Of what Sava runs on and of each peer that may take part; None for what is not installed."""
    commit: str
    machine: str
    disk: str
    rows: list[Row] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    started: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def effort(self) -> str:
        return "one round: rough figures" if self.quick else f"{self.rounds} rounds"

    def as_json(self) -> str:
        rows = [{**asdict(row), "ratio": row.ratio, "met": row.met} for row in self.rows]
        return json.dumps({**asdict(self), "rows": rows}, indent=2)

    def print(self, console: Console) -> None:
        title = f"{self.machine}, {self.disk} · {self.started}"
        table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
        for heading in ("", "Sava", "beside", "ratio", "target", ""):
            table.add_column(heading, justify="right" if heading == "ratio" else "left", overflow="fold")
        section = ""
        for row in self.rows:
            if section and row.section != section:
                table.add_section()
            section = row.section
            name = f"{row.name}\n[dim]{escape(row.note)}[/]" if row.note else row.name
            table.add_row(name, *_cells(row), _verdict(row))
        console.print(table)
        versions = ", ".join(
            f"{name} {version or 'not installed'}" for name, version in self.versions.items()
        )
        console.print(f"Sava {self.commit}, {versions}; load on gRPC servers by {self.client}.")
        judged = [row for row in self.rows if row.target and not row.target.is_aim]
        met = sum(row.met is True for row in judged)
        console.print(
            f"{met} of {len(judged)} targets met." + (" Quick run: rough figures." if self.quick else "")
        )
        for fault in self.faults:
            # A reason is an error's text, which may look like markup.
            console.print(Text.assemble(("broke off", "red"), f" {fault.section}: {fault.reason}"))

    def as_markdown(self) -> str:
        lines = [*HEAD, *(row.line() for row in self.rows)]
        return "\n".join(lines) + "\n"


def _cells(row: Row) -> Sequence[str]:
    return (
        str(row.sava) if row.sava else "–",
        f"{row.peer_name} {row.peer}" if row.peer else "–",
        f"{row.ratio:,.2f}×" if row.ratio is not None else "",
        str(row.target) if row.target else "",
    )


def _plain_verdict(row: Row) -> str:
    if row.target is None:
        return ""
    if row.target.is_aim:
        return {True: "reached", False: "not reached", None: "not measured"}[row.met]
    return {True: "met", False: "MISSED", None: "not compared"}[row.met]


def _verdict(row: Row) -> str:
    missed = "yellow" if row.target and row.target.is_aim else "bold red"
    colour = {True: "green", False: missed, None: "yellow"}[row.met]
    return f"[{colour}]{text}[/]" if (text := _plain_verdict(row)) else ""


def write(report: Report, path: Path) -> None:
    """By suffix: ``.md`` as a table, anything else as JSON."""
    path.write_text(
        report.as_markdown() if path.suffix == ".md" else report.as_json() + "\n", encoding="utf-8"
    )
