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

UNITS: Final = {
    "per_second": "a second",
    "seconds": "seconds",
    "bytes": "bytes",
    "messages": "messages",
    "ratio": "ratio",
    "imbalance": "ratio",
    "backlog": "messages",
    "journal_position": "bytes",
    "index": "position",
    "revision": "position",
    "term": "number",
    "throughput_out": "bytes a second",
    "rate_out": "messages a second",
}
"""By how a name ends. What has none of these endings counts things, and its name says which."""


class Described(NamedTuple):
    name: str
    """As Prometheus has it."""
    kind: str
    unit: str
    labels: tuple[str, ...]
    help: str


INTRODUCTION: Final = """
What a broker tells on its HTTP port at `/metrics`. A histogram has `_bucket`, `_sum` and `_count` behind its
name. Only the broker that leads reports some of them, so that sums over brokers count each thing once.
Danube's names for some of them (`danube_*`) are in [Migration from Danube](../danube.md#figures).
deploy/grafana/sava.json shows them, and deploy/prometheus/alerts.yaml watches over them.
"""


def render() -> str:
    described = asyncio.run(metrics())
    groups: dict[str, list[Described]] = {}
    for each in described:
        groups.setdefault(each.name.split("_")[1], []).append(each)
    sections = [
        f"## {group}\n\n"
        + table(
            ("name", "kind", "unit", "labels", "meaning"),
            [
                (
                    *(f"`{each.name}`", each.kind, each.unit),
                    *(", ".join(f"`{label}`" for label in each.labels), each.help),
                )
                for each in members
            ],
        )
        for group, members in sorted(groups.items())
    ]
    return page("Metrics", INTRODUCTION, *sections)


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
            yield Described(name, family.type, unit_of(family), tuple(labels), family.documentation)


def unit_of(family: Any) -> str:
    for ending, unit in UNITS.items():
        if family.name.endswith(f"_{ending}"):
            return unit
    return "0 or 1" if family.documentation.startswith("1 ") else "count"
