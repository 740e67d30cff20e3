"""What a run has found, ready to be shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from sava.load.histogram import Histogram
from sava.load.tally import Count


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

    @property
    def rate(self) -> float:
        return self.count / self.seconds if self.seconds > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        megabytes = self.size / self.seconds / 1e6 if self.seconds > 0 else 0.0
        return {
            "count": self.count,
            "bytes": self.size,
            "seconds": round(self.seconds, 3),
            "per_second": round(self.rate, 1),
            "megabytes_per_second": round(megabytes, 3),
            "failed": self.failed,
            "latency_ms": self.latency,
            "errors": self.errors,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one run."""

    load: str
    """produce, consume, latency or metadata."""
    run: str
    parameters: dict[str, Any]
    flows: dict[str, Flow]
    """By what was done: published, consumed, …"""
    count: Count | None = None

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

    def complaint(self) -> str:
        """Why this was not as it should be; empty if it was."""
        parts = [
            f"{flow.failed} of {flow.count + flow.failed} not {name} ({', '.join(flow.errors)})"
            for name, flow in self.flows.items()
            if flow.failed
        ]
        if self.count is not None and not self.count.is_clean:
            names = ("lost", "duplicates", "reordered", "late")
            parts.append(", ".join(f"{getattr(self.count, each)} {each}" for each in names))
        return "; ".join(parts)


def _flattened(tree: dict[str, Any], path: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in tree.items():
        if name == "errors":
            found.append((f"{path}errors", "; ".join(f"{text}: {count}" for text, count in value.items())))
        elif isinstance(value, dict):
            found += _flattened(value, f"{path}{name}.")
        else:
            found.append((f"{path}{name}", value))
    return found


class Meter:
    """A flow while it runs. Owned by one event loop."""

    MAX_ERRORS = 20
    """Kinds of failures that are told apart."""

    def __init__(self) -> None:
        self.count = 0
        self.size = 0
        self.failed = 0
        self.seconds = 0.0
        """That it took; set by whoever does it, also when it is broken off."""
        self.latency = Histogram()
        self._errors: dict[str, int] = {}

    def add(self, count: int, size: int) -> None:
        self.count += count
        self.size += size

    def fail(self, count: int, error: Exception) -> None:
        self.failed += count
        name = type(error).__name__
        if name not in self._errors and len(self._errors) >= self.MAX_ERRORS:
            name = "others"
        self._errors[name] = self._errors.get(name, 0) + count

    def flow(self) -> Flow:
        return Flow(
            count=self.count,
            size=self.size,
            seconds=self.seconds,
            failed=self.failed,
            latency=self.latency.summary() if self.latency.count else {},
            errors=dict(self._errors),
        )
