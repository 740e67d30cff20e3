"""Shrink: find a smaller world that still breaks the same rule.

Greedy and simple: switch fault classes off one by one, then halve operations, clients and time, keeping every
step after which the same rule is still violated. Removing a class changes no other component's random
numbers, so most steps keep the schedule close to the original."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.sim.knobs import FAULTS, Knobs
from tests.sim.result import RunResult
from tests.sim.run import run_seed


def shrink(knobs: Knobs, failure: RunResult, say: Callable[[str], None]) -> tuple[Knobs, RunResult]:
    best, result = knobs, failure
    progress = True
    while progress:
        progress = False
        for what, candidate in list(_smaller(best)):
            tried = run_seed(knobs.seed, knobs=candidate)
            if tried.failed and tried.rule == failure.rule:
                best, result, progress = candidate, tried, True
                say(f"  smaller: {what} ({tried.events} events)")
                break
    return best, result


def _smaller(knobs: Knobs) -> Iterator[tuple[str, Knobs]]:
    for fault in FAULTS:
        if fault in knobs.faults:
            yield f"without {fault}", knobs.without(fault)
    for field, least in (
        ("operations", 4),
        ("chaos_ms", 1000),
        ("watchers", 0),
        ("clients", 1),
        ("nodes", 1),
    ):
        value = getattr(knobs, field)
        for less in {value // 2, value * 3 // 4, value - 1}:
            if least <= less < value:
                yield f"{field} {value} -> {less}", replace(knobs, **{field: less})
    if knobs.quiet_ms:
        yield "no quiet tail", replace(knobs, quiet_ms=0)
