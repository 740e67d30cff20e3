"""The registry of a broker's metrics, the figures of Raft, and the page that Prometheus scrapes. Gauges are
read from the node when scraped, so nothing is counted twice or kept in step.

The page is written in slices. A thousand topics with two subscriptions each make a page of two megabytes, and
the event loop that writes it is the one that sends heartbeats, renews the lease and delivers. Written at
once, it would stand still for a quarter of a second per thousand topics: for longer than an election takes,
once there are some thousand. So collectors yield large families in parts, and no part keeps the loop for
longer than a slice.

The parts of a family are put together again, for the format wants all of its lines in a row. When a counter
or histogram began (``_created``) is left out: only OpenMetrics asks for it, and here it would be a series
more for each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from sava.api.danube.metrics import DanubeCollector
from sava.api.metrics.cluster import (
    ClusterSources,
    PipelinesCollector,
    ReplicationCollector,
    observe_cluster,
)
from sava.api.metrics.storage import Disks, JournalCollector, JournalSources
from sava.api.metrics.topics import TopicsCollector
from sava.cluster.pipelines import Pipelines
from sava.metadata.node import RaftNode
from sava.replication.control import Control
from sava.storage.broker_storage import BrokerStorage
from sava.supervisor import Supervisor
from sava.topics.served import ServedTopics

_LATENCIES = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
_SIZES = tuple(float(1 << bits) for bits in range(8, 27, 2))


class BrokerMetrics:
    """Implements ``metadata.node.Observer``. One per process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._disks: Disks | None = None
        self._proposals = Histogram(
            "sava_raft_proposal_seconds",
            "From a request to its committed and applied result.",
            buckets=_LATENCIES,
            registry=self.registry,
        )
        self._syncs = Histogram(
            "sava_raft_wal_sync_seconds",
            "From handing a batch to the log's writer until it is durable.",
            buckets=_LATENCIES,
            registry=self.registry,
        )
        self._snapshots = Histogram(
            "sava_raft_snapshot_seconds",
            "Taking one snapshot, in the background.",
            buckets=(0.01, 0.1, 1.0, 10.0, 60.0),
            registry=self.registry,
        )

        self._journal_syncs = Histogram(
            "sava_journal_sync_seconds",
            "Writing one group of batches to the journal and making it durable.",
            buckets=_LATENCIES,
            registry=self.registry,
        )
        self._journal_groups = Histogram(
            "sava_journal_sync_bytes",
            "Bytes that one sync of the journal made durable.",
            buckets=_SIZES,
            registry=self.registry,
        )

    def proposal(self, seconds: float) -> None:
        self._proposals.observe(seconds)

    def sync(self, seconds: float) -> None:
        self._syncs.observe(seconds)

    def snapshot(self, seconds: float, size: int) -> None:
        self._snapshots.observe(seconds)

    def journal_sync(self, seconds: float, size: int) -> None:
        """On the thread that writes the journal."""
        self._journal_syncs.observe(seconds)
        self._journal_groups.observe(size)

    def observe(self, node: RaftNode) -> None:
        self.registry.register(_NodeCollector(node))

    def observe_tasks(self, supervisor: Supervisor) -> None:
        self.registry.register(_TasksCollector(supervisor))

    def observe_disks(self, disks: Disks) -> None:
        self.registry.register(disks)
        self._disks = disks

    def observe_topics(self, topics: ServedTopics, storage: BrokerStorage) -> None:
        self.registry.register(TopicsCollector(topics, storage))

    def observe_cluster(self, parts: ClusterSources) -> None:
        observe_cluster(self.registry, parts)

    def observe_danube(self, collector: DanubeCollector) -> None:
        """The same figures under the names that Danube's tools ask for."""
        self.registry.register(collector)

    def observe_journals(self, parts: JournalSources) -> None:
        self.registry.register(JournalCollector(parts))

    def observe_pipelines(self, pipelines: Pipelines, is_leading: Callable[[], bool]) -> None:
        self.registry.register(PipelinesCollector(pipelines, is_leading))

    def observe_replication(self, control: Control) -> None:
        self.registry.register(ReplicationCollector(control))

    async def page(self) -> bytes:
        if self._disks is not None:
            await self._disks.look()
        return await written(self.registry)


class _TasksCollector(Collector):
    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._started = time.time()

    def collect(self) -> Iterable[Metric]:
        failures = CounterMetricFamily(
            "sava_task_failures",
            "Restarts of tasks that died of a bug; the log names it.",
            labels=("task",),
        )
        for task, count in sorted(self._supervisor.failures.items()):
            failures.add_metric((task,), count)
        yield failures
        yield _gauge(
            "sava_broker_start_time_seconds",
            "Start of this process, in seconds since 1970.",
            self._started,
        )


class _NodeCollector(Collector):
    def __init__(self, node: RaftNode) -> None:
        self._node = node

    def collect(self) -> Iterable[Metric]:
        status = self._node.status
        yield _gauge("sava_raft_initialized", "1 when this node belongs to a cluster.", bool(status.cluster))
        if status.core is not None:
            core = status.core
            yield _gauge("sava_raft_is_leader", "1 when this node leads.", core.leader == status.node)
            yield _gauge("sava_raft_has_leader", "1 when this node knows a leader.", bool(core.leader))
            yield _gauge("sava_raft_term", "Current term.", core.term)
            yield _gauge("sava_raft_commit_index", "Highest index known committed.", core.commit)
            yield _gauge("sava_raft_applied_index", "Highest index applied.", core.applied)
            yield _gauge(
                "sava_raft_commit_lag", "Entries in the log and not committed.", core.last_index - core.commit
            )
            yield _gauge(
                "sava_raft_apply_lag", "Entries committed and not applied.", core.commit - core.applied
            )
            yield _gauge("sava_raft_voters", "Voting members.", len(core.membership.voters))
        yield _gauge("sava_raft_snapshot_index", "Index of the latest snapshot.", status.snapshot_index)
        yield _gauge("sava_meta_revision", "Revision of the metadata store.", status.revision)
        yield _gauge("sava_meta_keys", "Keys in the metadata store.", status.keys)
        yield _gauge("sava_meta_bytes", "Bytes of keys and values.", status.total_bytes)
        yield _gauge("sava_meta_limit_bytes", "Bytes that there may be.", status.limit_bytes)
        yield _gauge("sava_meta_watchers", "Open watches on this node.", self._node.replica.hub.watchers)
        yield self._dropped(status.dropped)

    def _dropped(self, received: dict[str, int]) -> Metric:
        family = CounterMetricFamily(
            "sava_raft_dropped_messages",
            "Messages not sent or not let in, by reason.",
            labels=("direction", "reason"),
        )
        for reason, count in sorted(received.items()):
            family.add_metric(("in", reason), count)
        for reason, count in sorted(self._node.transport.dropped().items()):
            family.add_metric(("out", reason), count)
        if self._node.send_errors:
            family.add_metric(("out", "error"), self._node.send_errors)
        return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


# -- the page --------------------------------------------------------------------------------------


TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
SLICE_S: Final = 0.005
"""Of an event loop that owes a heartbeat every 100 ms."""
_LINES: Final = 200
"""Between two looks at the clock; well below a slice."""
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


async def written(registry: Collector) -> bytes:
    slices = _Slices()
    families: dict[str, Metric] = {}
    for part in registry.collect():
        family = families.setdefault(part.name, part)
        if family is not part:
            family.samples += part.samples
        await slices.breathe()
    page: list[bytes] = []
    for family in families.values():
        lines: list[str] = []
        for count, line in enumerate(_lines(family)):
            lines.append(line)
            if not count % _LINES:
                await slices.breathe()
        page.append("".join(lines).encode())
    return b"".join(page)


class _Slices:
    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def breathe(self) -> None:
        """Let others go first, if they have waited for a slice."""
        if time.perf_counter() - self._began > SLICE_S:
            await asyncio.sleep(0)
            self._began = time.perf_counter()


def _lines(family: Metric) -> Iterator[str]:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    yield f"# HELP {name} {text}\n# TYPE {name} {family.type}\n"
    created = f"{family.name}_created"
    for sample in family.samples:
        if sample.name != created:
            yield _line(sample)


def _line(sample: Sample) -> str:
    """Labels in order of their names, as the library writes them: people compare lines as text."""
    labels = ",".join(
        f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(sample.labels.items())
    )
    return f"{sample.name}{f'{{{labels}}}' if labels else ''} {float(sample.value)!r}\n"
