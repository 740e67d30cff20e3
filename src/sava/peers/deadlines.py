"""How long a call may take: what its caller allowed, a little less so that our own error arrives before
gRPC's, never for ever."""

from __future__ import annotations

from typing import Any

LEAST_S = 0.05


def remaining(context: Any, default: float) -> float:
    """A tenth is kept back, at least 0.1 s and at most 1 s: an answer that says why nothing was done is
    worth more than the last tenth of waiting for it."""
    left: float | None = context.time_remaining()
    if left is None:
        return default
    margin = min(max(left / 10, 0.1), 1.0)
    return max(min(left - margin, default), LEAST_S)
