"""What the modules of this section share."""

from __future__ import annotations

from itertools import count
from typing import Final

from bench.plan import Plan

SECTION: Final = "broker"

_numbers = count(1)


def fresh(name: str) -> str:
    """The name of a topic that nobody has used, so that no round stands on another's data."""
    return f"{name}-{next(_numbers)}"


def topic(name: str) -> str:
    return f"/default/{fresh(name)}"


def seconds(plan: Plan) -> float:
    """Of each repetition. Short ones would measure how a stream begins."""
    return max(plan.seconds, 1.0)
