"""One module per family of rows. Each has ``async def run(plan) -> list[Row]`` and starts and stops what it
measures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from bench.plan import Plan
from bench.report import Row
from bench.rows import context, failover, puts, reads, scale, watch

SECTIONS: dict[str, Callable[[Plan], Awaitable[list[Row]]]] = {
    "context": context.run,
    "puts": puts.run,
    "reads": reads.run,
    "watch": watch.run,
    "failover": failover.run,
    "scale": scale.run,
}
