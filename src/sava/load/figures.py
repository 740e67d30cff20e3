"""The figures of a run: durations in a histogram, flows while they run, and the outcome, ready to be shown.

``Histogram`` has buckets whose width grows with the duration, so that every duration is known to within one
percent, from a microsecond to days, in a bounded number of buckets. Within each power of two there are 128
buckets of equal width, as in HdrHistogram.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sava.load.tally import Count

_BITS: Final = 7
_WIDTH: Final = 1 << _BITS
_MANY: Final = 50
"""From this number on an array is faster."""
_LARGEST: Final = (1 << 40) - 1
"""Microseconds: twelve days. What takes longer counts as that."""

PERCENTILES: Final = (50.0, 90.0, 99.0, 99.9, 99.99)


class Histogram:
    """A histogram of microseconds. Owned by one event loop."""

    def __init__(self) -> None:
        self._counts = np.zeros(int(_indexes(np.array([_LARGEST]))[0]) + 1, np.int64)
        self.count = 0
        self._sum = 0
        self._least = _LARGEST
        self._most = 0

    def record(self, microseconds: int) -> None:
        value = min(max(microseconds, 0), _LARGEST)
        shift = max(value.bit_length() - _BITS - 1, 0)
        self._counts[shift * _WIDTH + (value >> shift)] += 1
        self._note(1, value, value, value)

    def record_since(self, times: Sequence[int], now: int) -> None:
        """What has passed since each of these times, all in nanoseconds."""
        if len(times) < _MANY:
            for time in times:
                self.record((now - time) // 1000)
            return
        values = np.clip((now - np.array(times, np.int64)) // 1000, 0, _LARGEST)
        np.add.at(self._counts, _indexes(values), 1)
        self._note(len(values), int(values.sum()), int(values.min()), int(values.max()))

    def _note(self, count: int, total: int, least: int, most: int) -> None:
        self.count += count
        self._sum += total
        self._least = min(self._least, least)
        self._most = max(self._most, most)

    @property
    def least(self) -> int:
        return self._least if self.count else 0

    @property
    def most(self) -> int:
        return self._most

    @property
    def mean(self) -> float:
        return self._sum / self.count if self.count else 0.0

    def percentile(self, percent: float) -> int:
        """The value that this percentage of all values does not exceed; nearest rank."""
        if not self.count:
            return 0
        rank = max(1, math.ceil(self.count * percent / 100))
        index = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(max(_highest(index), self._least), self._most)

    def summary(self) -> dict[str, float]:
        """In milliseconds, as people think of them."""
        named = {f"p{percent:g}": self.percentile(percent) for percent in PERCENTILES}
        values = {"min": self.least, "mean": self.mean, **named, "max": self.most}
        return {name: round(value / 1000, 3) for name, value in values.items()}


def _indexes(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Exact below 2 * _WIDTH; above, the exponent and the first bits behind the leading one."""
    bits = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    shifts = np.maximum(bits - _BITS - 1, 0)
    indexes: NDArray[np.int64] = shifts * _WIDTH + (values >> shifts)
    return indexes


def _highest(index: int) -> int:
    """The largest value in a bucket."""
    if index < 2 * _WIDTH:
        return index
    shift = index // _WIDTH - 1
    return ((index - shift * _WIDTH + 1) << shift) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Operations of one kind, over the time they took."""

    count: int
    size: int
    """Bytes of payload."""
    seconds: float
    failed: int = 0
    latency: dict[str, float] = field(default_factory=dict)
    """In milliseconds; empty if there is none to tell."""
    errors: dict[str, int] = field(default_factory=dict)
    """What failed, by the error."""
    causes: dict[str, str] = field(default_factory=dict)
    """What the first error of each kind said."""

    @property
    def rate(self) -> float | None:
        """None: all of it came at the same moment, or nothing did."""
        return self.count / self.seconds if self.seconds > 0 else None

    @property
    def bytes_per_second(self) -> float | None:
        return self.size / self.seconds if self.seconds > 0 else None

    def as_dict(self) -> dict[str, Any]:
        rate, size = self.rate, self.bytes_per_second
        return {
            "count": self.count,
            "bytes": self.size,
            "seconds": round(self.seconds, 3),
            "per_second": None if rate is None else round(rate, 1),
            "megabytes_per_second": None if size is None else round(size / 1e6, 3),
            "failed": self.failed,
            "latency_ms": self.latency,
            "errors": self.errors,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOutcome:
    """The outcome of one run."""

    load: str
    """produce, consume, latency or metadata."""
    run: str
    parameters: dict[str, Any]
    flows: dict[str, Flow]
    """By what was done: published, consumed, …"""
    count: Count | None = None
    trouble: str = ""
    """Why the run ended before all was read, if that was not asked for."""
    note: str = ""
    """What to know of the figures."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "load": self.load,
            "run": self.run,
            "parameters": self.parameters,
            **{name: flow.as_dict() for name, flow in self.flows.items()},
            **({} if self.count is None else {"messages": asdict(self.count)}),
        }

    def flat(self) -> dict[str, Any]:
        """One row, for a table of many runs."""
        return dict(_flattened(self.as_dict()))

    @property
    def is_empty(self) -> bool:
        """Nothing was done, and nothing failed."""
        return not any(flow.count or flow.failed for flow in self.flows.values())

    def complaint(self) -> str:
        """Why this was not as it should be; empty if it was."""
        parts = [
            f"{flow.failed} of {flow.count + flow.failed} not {name} ({_causes(flow)})"
            for name, flow in self.flows.items()
            if flow.failed
        ]
        if self.count is not None and not self.count.is_clean:
            names = ("lost", "duplicates", "reordered", "late")
            parts.append(", ".join(f"{getattr(self.count, each)} {each}" for each in names))
        return "; ".join([*parts, self.trouble] if self.trouble else parts)


def _causes(flow: Flow) -> str:
    return ", ".join(": ".join(filter(None, (name, flow.causes.get(name)))) for name in flow.errors)


def _flattened(tree: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        if name == "errors":
            found.append((f"{path}errors", "; ".join(f"{text}: {count}" for text, count in value.items())))
        elif name == "latency_ms" and not value:
            # The same columns whether or not there is something to tell: rows of many runs are collected.
            found += [(f"{path}{name}.{column}", None) for column in Histogram().summary()]
        elif isinstance(value, dict):
            found += _flattened(value, f"{path}{name}.")
        else:
            found.append((f"{path}{name}", value))
    return found


class Meter:
    """A flow while it runs. Owned by one event loop."""

    MAX_ERRORS = 20
    """Kinds of failures that are counted apart."""

    def __init__(self) -> None:
        self.count = 0
        self.size = 0
        self.failed = 0
        self.latency = Histogram()
        self._errors: dict[str, int] = {}
        self._causes: dict[str, str] = {}
        self._began: float | None = None
        self._seconds = 0.0

    def begin(self) -> None:
        """The time counts from here, or else from the first operation, to the last one: waiting for what does
        not come is not part of a rate."""
        self._began = time.perf_counter()

    def add(self, count: int, size: int) -> None:
        self.count += count
        self.size += size
        self._tick()

    def _tick(self) -> None:
        now = time.perf_counter()
        if self._began is None:
            self._began = now
        self._seconds = now - self._began

    def fail(self, count: int, error: Exception) -> None:
        self._tick()
        self.failed += count
        name = type(error).__name__
        if name not in self._errors and len(self._errors) >= self.MAX_ERRORS:
            name = "others"
        else:
            self._causes.setdefault(name, str(error))
        self._errors[name] = self._errors.get(name, 0) + count

    def flow(self) -> Flow:
        return Flow(
            count=self.count,
            size=self.size,
            seconds=self._seconds,
            failed=self.failed,
            latency=self.latency.summary() if self.latency.count else {},
            errors=dict(self._errors),
            causes=dict(self._causes),
        )
