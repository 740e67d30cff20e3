"""Timeline: what the brokers' logs say of one round of the section ``failover``, in seconds after its fault.

========== ========================================================================================
stage      the line that ends it
========== ========================================================================================
suspected  the leader doubts the victim
evicted    the leader ends the victim's lease, or begins to recover its journal because the lease ran out
recovered  the victim's journal is closed
salvaged   the tails of its topics are in segments
served     the last of its topics is taken up elsewhere
acked      the last of its topics is acknowledged a message; told by the client, not by a log
========== ========================================================================================

With several victims a stage is that of the last one. Brokers write UTC with milliseconds, and all processes
of the machine share its clock.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Final

STAGES: Final = ("suspected", "evicted", "recovered", "salvaged", "served", "acked")
_LINES: Final = (
    ("suspected", re.compile(r"raft: a member is doubted node=(\d+) ")),
    ("evicted", re.compile(r"cluster: evicted broker=(\d+) ")),
    ("evicted", re.compile(r"failover: recovering the ledger of a broker that is gone ledger=(\d+)")),
    ("recovered", re.compile(r"failover: closed ledger=(\d+)")),
    ("salvaged", re.compile(r"failover: tails recovered broker=(\d+) ")),
    ("served", re.compile(r"agent: done job=take_up topic=(\S+) ")),
)
_FIRST: Final = frozenset({"suspected", "evicted"})
"""Stages whose first line counts: a doubt that is repeated is the same doubt."""
_TIME_LENGTH: Final = len("2026-01-01T00:00:00.000Z")


def stages(
    logs: Iterable[str], began: float, ended: float, *, victims: Collection[int], topics: Collection[str]
) -> dict[str, float]:
    """Seconds after ``began``, both times of CLOCK_MONOTONIC. A stage that no line tells is absent."""
    offset = time.time() - time.monotonic()
    whose = {*map(str, victims), *topics}
    found: dict[tuple[str, str], float] = {}
    for log in logs:
        for line in log.splitlines():
            told = _told(line)
            if told is None or told[1] not in whose:
                continue
            at = _time_of(line) - offset
            if began <= at <= ended:
                earlier = found.get(told)
                choose = min if told[0] in _FIRST else max
                found[told] = at if earlier is None else choose(at, earlier)
    result: dict[str, float] = {}
    for (stage, _), at in found.items():
        result[stage] = round(max(at - began, result.get(stage, 0.0)), 3)
    return result


def _told(line: str) -> tuple[str, str] | None:
    """The stage that a line ends, and the broker or topic of which it tells."""
    for stage, pattern in _LINES:
        if match := pattern.search(line):
            return stage, match[1]
    return None


def _time_of(line: str) -> float:
    return datetime.fromisoformat(line[:_TIME_LENGTH]).timestamp()


def table(rounds: Sequence[Mapping[str, float]]) -> list[str]:
    """One line for each round under a line of names, for a terminal."""
    lines = ["round  " + "  ".join(f"{name:>9}" for name in STAGES)]
    for number, each in enumerate(rounds, 1):
        cells = (f"{each[name]:7.2f} s" if name in each else "-" for name in STAGES)
        lines.append(f"{number:5}  " + "  ".join(f"{cell:>9}" for cell in cells))
    return lines


class Recorder:
    """The ends of the brokers' logs since a fault began; keeps those of the slowest round in ``folder``."""

    def __init__(self, logs: Sequence[Path], folder: Path | None) -> None:
        self._logs = logs
        self._folder = folder
        self._starts = [0] * len(logs)
        self._slowest = 0.0

    def begin(self) -> None:
        self._starts = [path.stat().st_size if path.exists() else 0 for path in self._logs]

    def read(self) -> list[str]:
        texts = []
        for path, start in zip(self._logs, self._starts, strict=True):
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(start)
                texts.append(file.read().decode("utf-8", errors="replace"))
        return texts

    def keep(self, title: str, slowest: float) -> None:
        """``slowest``: the longest gap of the round, by which rounds are compared."""
        if self._folder is None or slowest <= self._slowest:
            return
        self._slowest = slowest
        self._folder.mkdir(parents=True, exist_ok=True)
        for path, text in zip(self._logs, self.read(), strict=False):
            (self._folder / path.name).write_text(f"# {title}\n{text}", encoding="utf-8")
