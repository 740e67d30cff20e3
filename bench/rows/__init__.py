"""One module per family of rows. Each has ``async def run(plan) -> list[Row]`` and starts and stops what it
measures. A section may have several: one that fails does not take the figures of the others with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from bench.plan import Plan
from bench.report import Row
from bench.rows import (
    broker,
    cluster,
    context,
    election,
    failover,
    journal,
    puts,
    reads,
    replication,
    rolling,
    scale,
    secured,
    spark,
    storage,
    watch,
)

Measure = Callable[[Plan], Awaitable[list[Row]]]

SECTIONS: dict[str, tuple[Measure, ...]] = {
    "context": (context.run,),
    "puts": (puts.run,),
    "reads": (reads.run,),
    "watch": (watch.run,),
    "election": (election.run,),
    "scale": (scale.run,),
    "storage": (storage.run,),
    "broker": broker.PARTS,
    "secured": (secured.run,),
    "cluster": cluster.PARTS,
    "journal": journal.PARTS,
    "failover": failover.PARTS,
    "rolling": (rolling.run,),
    "spark": (spark.run,),
    "replication": (replication.run,),
}
