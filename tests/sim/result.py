"""RunResult: what came of one simulated life, of whichever simulator."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from tests.sim.history import Violation
from tests.sim.schedule import Schedule


class Simulated(Protocol):
    """A world: what happens in it when, and what is counted on the way."""

    schedule: Schedule
    counts: Counter[str]

    def describe(self) -> str: ...


World = TypeVar("World", bound=Simulated)


@dataclass(slots=True)
class RunResult:
    seed: int
    failure: str = ""
    rule: str = ""
    hash: int = 0
    virtual_ms: int = 0
    events: int = 0
    cpu_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    recent: list[str] = field(default_factory=list)
    traceback: str = ""

    @property
    def failed(self) -> bool:
        return bool(self.failure)


def result_of(seed: int, world: World, simulate: Callable[[World], None], *, recent: int) -> RunResult:
    """Run it to its end. Whatever escapes the code under test is a finding."""
    started = time.process_time()
    result = RunResult(seed)
    try:
        simulate(world)
    except Violation as violation:
        result.failure, result.rule = str(violation), violation.rule
    except Exception as error:  # noqa: BLE001
        result.failure, result.rule = f"{type(error).__name__}: {error}", "exception"
        result.traceback = traceback.format_exc()
    if result.failed:
        result.recent = world.schedule.recent(recent)
        result.recent.append(world.describe())
    result.hash = world.schedule.hash
    result.virtual_ms = world.schedule.now_ms
    result.events = world.schedule.events
    result.counts = world.counts
    result.cpu_s = time.process_time() - started
    return result
