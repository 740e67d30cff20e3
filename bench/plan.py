"""Plan: how long and how often everything is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

VALUE = bytes(range(200))
"""200 bytes, all different from their neighbours, so that nothing on the way could compress them to
nothing."""

IN_FLIGHT = 64

LIMIT_S = 1800.0
"""A part of a section is given up after this long, and the next one begins: what hangs must not take the
others' figures with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    folder: Path
    """On the disk to be measured; emptied afterwards."""
    with_etcd: bool
    quick: bool = False
    faults: Sequence[str] = ()
    """Of the section failover; none given: all."""
    systems: Sequence[str] = ()
    """That take part in it; none given: all that are installed."""
    rounds_given: int | None = None
    resume: Path | None = None
    """Where its rounds are kept, and former ones are found."""

    logs: Path | None = None
    """Where the brokers' logs of the slowest round of each of its faults are kept."""
    say: Callable[[str], None] = print
    """For a line that is no row."""

    def wants(self, fault: str, system: str) -> bool:
        return fault in (self.faults or (fault,)) and system in (self.systems or (system,))

    @property
    def fault_rounds(self) -> int:
        return self.rounds_given or (2 if self.quick else 20)

    @property
    def rounds(self) -> int:
        """How often each contestant runs."""
        return 1 if self.quick else 3

    @property
    def seconds(self) -> float:
        """Of each repetition."""
        return 0.3 if self.quick else 2.0

    @property
    def watched_puts(self) -> int:
        return 60 if self.quick else 500

    @property
    def kills(self) -> int:
        return 2 if self.quick else 20

    @property
    def keys(self) -> int:
        return 100_000

    @property
    def restarts(self) -> int:
        return 1 if self.quick else 3

    @property
    def snapshot_seconds(self) -> float:
        """How long puts run next to snapshots."""
        return 2.0 if self.quick else 15.0
