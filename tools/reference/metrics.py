"""docs/reference/metrics.md, from a broker: one is started, and everything is there that it would tell
Prometheus. So a new part's metrics are on the page as soon as brokers have them."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from sava.config import check
from sava.metadata.store import ClusterOperations
from sava.server.assembly import raft_address
from sava.server.broker import Broker
from tools.reference.pages import page, table

START_S: Final = 60.0
POLL_S: Final = 0.02


class Described(NamedTuple):
    name: str
    """As Prometheus has it."""
    kind: str
    labels: tuple[str, ...]
    help: str


INTRODUCTION: Final = """
Every broker serves these on its HTTP port at `/metrics`. A name ends with its unit; a metric without one
counts what its name says. Names with `_total` are counters; a histogram has `_bucket`, `_sum` and `_count`
behind its name; all others are gauges. The leader alone reports what concerns the whole cluster, so that sums
over brokers count each thing once. [Danube's names](../danube.md#figures) (`danube_*`) are served too;
[Diagnosis](../diagnosis.md#what-does-it-say-of-itself) has dashboard and alerts.
"""


def render() -> str:
    groups: dict[str, list[Described]] = {}
    for each in asyncio.run(metrics()):
        groups.setdefault(each.name.split("_")[1], []).append(each)
    return page("Metrics", INTRODUCTION, *(section(*group) for group in sorted(groups.items())))


def section(group: str, members: list[Described]) -> str:
    """Labels that all members have stand above the table."""
    common = [label for label in members[0].labels if all(label in each.labels for each in members)]
    rows = [
        (
            f"`{each.name}`",
            each.kind if each.kind == "histogram" else "",
            ", ".join(f"`{label}`" for label in each.labels if label not in common),
            each.help,
        )
        for each in members
    ]
    head = f"## {group}"
    if common:
        head += f"\n\nLabels of all: {', '.join(f'`{label}`' for label in common)}."
    return f"{head}\n\n" + table(("", "", "labels", ""), rows)


async def metrics() -> list[Described]:
    """All that a broker which leads has, by name."""
    with tempfile.TemporaryDirectory() as directory:
        async with leading_broker(Path(directory)) as broker:
            return sorted(_collected(broker.metrics.registry))


@asynccontextmanager
async def leading_broker(directory: Path) -> Any:
    client, admin, raft, http = _free_ports(4)
    config = check(
        {
            "broker": {
                "host": "127.0.0.1",
                "ports": {"client": client, "admin": admin, "raft": raft, "prometheus": http},
            },
            "metrics": {"danube_names": False},  # docs/danube.md has those
            "meta_store": {"data_dir": str(directory / "meta")},
            "storage": {"journal_dir": str(directory / "journal"), "url": (directory / "segments").as_uri()},
        },
        source="of the reference",
    )
    broker = Broker(config)
    await broker.start()
    try:
        await ClusterOperations(broker.node).init((raft_address(config),))
        async with asyncio.timeout(START_S):
            while not broker.parts.controller.is_leading:  # noqa: ASYNC110 (there is no event for it)
                await asyncio.sleep(POLL_S)
        yield broker
    finally:
        await broker.close()


def _free_ports(count: int) -> list[int]:
    """Held all at once, so that they differ."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def _collected(registry: Any) -> Iterator[Described]:
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            labels = getattr(family, "_labelnames", None) or getattr(collector, "_labelnames", None) or ()
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield Described(name, family.type, tuple(labels), family.documentation)
