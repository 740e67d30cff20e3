"""What a run has shown: gaps without acks for each kind of fault, totals, findings; as text and as JSON."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import msgspec

from tests.torture.history import Acked, Fault
from tests.torture.oracles import Checked, Finding, History

AFTER_S = 5.0
"""Gaps that begin this long after the recovery are still the fault's."""


class Gaps(msgspec.Struct, frozen=True):
    """Seconds without an ack, of each topic in each fault of a kind."""

    kind: str
    faults: int
    p50: float
    longest: float
    topic: str
    """With the longest."""
    recovery_p50: float
    """From the end of the fault until the cluster was whole."""
    recovery_longest: float


def gaps(faults: Sequence[Fault], acked: dict[str, list[Acked]]) -> list[Gaps]:
    times = {topic: sorted(ack.at for ack in acks) for topic, acks in acked.items()}
    by_kind: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        by_kind[fault.kind].append(fault)
    found: list[Gaps] = []
    for kind, same in sorted(by_kind.items()):
        waits: list[tuple[float, str]] = []
        for fault in same:
            end = max(fault.ended, fault.recovered) + AFTER_S
            waits += [(longest_gap(each, fault.began, end), topic) for topic, each in times.items()]
        longest, topic = max(waits, default=(0.0, ""))
        recoveries = [fault.recovered - fault.ended for fault in same if fault.recovered] or [float("inf")]
        found.append(
            Gaps(
                kind,
                len(same),
                round(median(wait for wait, _ in waits), 2) if waits else 0.0,
                round(longest, 2),
                topic,
                round(median(recoveries), 1),
                round(max(recoveries), 1),
            )
        )
    return found


def longest_gap(times: Sequence[float], began: float, ended: float) -> float:
    """The longest time without an ack that lies, at least in part, between the two."""
    first, last = bisect_left(times, began), bisect_right(times, ended)
    inside = [began if first == 0 else times[first - 1], *times[first:last]]
    inside.append(ended if last == len(times) else min(times[last], ended))
    return max((later - earlier for earlier, later in pairwise(inside)), default=0.0)


class Report(msgspec.Struct):
    seed: int
    seconds: float
    commit: str
    missing: list[str]
    around: list[str]
    """What the machine gave: network, disks, TLS."""
    acked: int
    unsent: int
    unknown: int
    received: int
    metadata_calls: int
    metadata_unknown: int
    watched: int
    faults: int
    faults_by_kind: dict[str, int]
    power_losses: int
    operations: dict[str, int]
    operations_failed: dict[str, int]
    router: dict[str, int]
    gaps: list[Gaps]
    checked: list[Checked]
    findings: list[Finding]
    directory: str

    def lines(self) -> list[str]:
        rows = [
            f"{'fault':<32} {'n':>3} {'gap p50':>8} {'gap max':>8}  {'recovery p50':>12} {'max':>6}  topic"
        ]
        rows += [
            f"{each.kind:<32} {each.faults:>3} {each.p50:>7.2f}s {each.longest:>7.2f}s  "
            f"{each.recovery_p50:>11.1f}s {each.recovery_longest:>5.1f}s  {each.topic}"
            for each in self.gaps
        ]
        rows += ["", *(f"{name:<18} {value}" for name, value in self._totals())]
        rows += [f"without            {each}" for each in self.missing]
        rows += ["", *(f"oracle             {each}" for each in self.checked), ""]
        rows += [f"FINDING            {each}" for each in self.findings]
        verdict = "nothing found" if not self.findings else f"{len(self.findings)} findings"
        rows.append(f"verdict            {verdict} (seed {self.seed}, files in {self.directory})")
        return rows

    def _doubles(self) -> int:
        return sum(each.faults for each in self.gaps if " + " in each.kind)

    def _totals(self) -> list[tuple[str, Any]]:
        done = ", ".join(f"{kind} {count}" for kind, count in sorted(self.operations.items()))
        failed = ", ".join(f"{kind} {count}" for kind, count in sorted(self.operations_failed.items()))
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.faults_by_kind.items()))
        return [
            ("seconds", round(self.seconds)),
            ("surroundings", "; ".join(self.around)),
            ("acknowledged", f"{self.acked} ({self.unsent} failed, {self.unknown} of unknown outcome)"),
            ("received", self.received),
            ("metadata calls", f"{self.metadata_calls} ({self.metadata_unknown} of unknown outcome)"),
            ("watched changes", self.watched),
            ("rounds", f"{self.faults}, {self._doubles()} of them with two faults at a time"),
            ("faults", f"{kinds}; power lost {self.power_losses} times"),
            ("operator", f"done: {done}; failed: {failed or 'none'}"),
            ("router", ", ".join(f"{kind} {count}" for kind, count in self.router.items()) or "none"),
        ]


def totals(history: History) -> dict[str, int]:
    unsent = [each for some in history.unsent.values() for each in some if each.error != "under way"]
    return {
        "acked": sum(map(len, history.acked.values())),
        "unsent": sum(not each.is_unknown for each in unsent),
        "unknown": sum(each.is_unknown for each in unsent),
        "received": sum(map(len, history.received.values())),
        "metadata_calls": len(history.calls),
        "metadata_unknown": sum(call.outcome == "unknown" for call in history.calls),
        "watched": sum(map(len, history.watches.values())),
    }
