"""The registry of a broker's metrics, and the figures of its process: Raft, tasks, the journal that it
writes, the copies that it keeps for others, what it does about those of brokers that are gone, and how much
space there is where it writes. Gauges are read when scraped, so nothing is counted twice or kept in step.

A file system that hangs (NFS whose server is gone) answers no question about itself, and the caller waits for
as long as it hangs. So ``Disks`` asks on a thread, waits for an answer only ``LOOK_S``, and does not ask
again before the question that is under way was answered: one thread for each directory waits, however often
the metrics are scraped. What is not known is left out, and not reported as a disk without space.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sava.api.metrics import counter, counters, gauge, gauges
from sava.config import Config
from sava.ledger.failover import Failover
from sava.ledger.protocol import StorageId
from sava.ledger.registry import LiveBrokers
from sava.ledger.writer import LedgerWriter
from sava.metadata.node import Observer, RaftNode
from sava.security.audit import Audit
from sava.security.quotas import Quotas
from sava.supervisor import Supervisor

_LATENCIES: Final = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
_SIZES = tuple(float(1 << bits) for bits in range(8, 27, 2))


class BrokerMetrics:
    """The registry, and what is measured as it happens. One per process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        proposals = self._histogram(
            "sava_raft_proposal_seconds", "From a request to its committed and applied result."
        )
        syncs = self._histogram(
            "sava_raft_wal_sync_seconds",
            "Writing one group of records to the metadata log and making it durable.",
        )
        snapshots = self._histogram(
            "sava_raft_snapshot_seconds",
            "Taking one snapshot, in the background.",
            buckets=(0.01, 0.1, 1.0, 10.0, 60.0),
        )
        self.node = Observer(
            proposal=proposals.observe,
            sync=lambda seconds, _size: syncs.observe(seconds),
            snapshot=lambda seconds, _size: snapshots.observe(seconds),
        )
        """What the metadata node measures."""
        self._journal_syncs = self._histogram(
            "sava_journal_sync_seconds",
            "Writing one group of batches to the journal and making it durable.",
        )
        self._journal_groups = self._histogram(
            "sava_journal_sync_bytes", "Bytes that one sync of the journal made durable.", buckets=_SIZES
        )

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = _LATENCIES) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def journal_sync(self, seconds: float, size: int) -> None:
        """On the thread that writes the journal."""
        self._journal_syncs.observe(seconds)
        self._journal_groups.observe(size)

    def add(self, *collectors: Collector) -> None:
        for collector in collectors:
            self.registry.register(collector)


class TasksCollector(Collector):
    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._started = time.time()

    def collect(self) -> Iterable[Metric]:
        yield counters(
            "sava_task_failures",
            "Restarts of tasks that died of a bug; the log names it.",
            "task",
            sorted(self._supervisor.failures.items()),
        )
        yield gauge(
            "sava_broker_start_time_seconds",
            "Start of this process, in seconds since 1970.",
            self._started,
        )


class SecurityCollector(Collector):
    """Refusals, and what is left of quotas. Principals have labels of their own only if they have a quota of
    their own: callers cannot make up as many as they like."""

    def __init__(self, audit: Audit, quotas: Quotas) -> None:
        self._audit = audit
        self._quotas = quotas

    def collect(self) -> Iterable[Metric]:
        yield counter(
            "sava_audit_denied", "Calls that were refused for want of a permission.", self._audit.denials
        )
        yield counter(
            "sava_audit_dropped", "Events that the topic /system/audit does not have.", self._audit.dropped
        )
        labels = ("principal", "quota")
        quotas = self._quotas
        yield counters(
            "sava_quota_refused", "Calls that a quota refused.", labels, sorted(quotas.refused.items())
        )
        yield counters(
            "sava_quota_waited_seconds",
            "Time for which messages waited, since a quota limits their rate.",
            labels,
            sorted(quotas.waited_s.items()),
        )
        usages = quotas.usages()
        yield gauges(
            "sava_quota_streams",
            "Open streams of a principal with a quota of its own.",
            "principal",
            [(each.principal, each.streams) for each in usages],
        )
        yield gauges(
            "sava_quota_connections",
            "Connections with open streams of a principal with a quota of its own.",
            "principal",
            [(each.principal, len(each.connections)) for each in usages],
        )


class NodeCollector(Collector):
    def __init__(self, node: RaftNode) -> None:
        self._node = node

    def collect(self) -> Iterable[Metric]:
        status = self._node.status
        yield gauge("sava_raft_initialized", "1 when this node belongs to a cluster.", bool(status.cluster))
        if status.core is not None:
            core = status.core
            yield gauge("sava_raft_is_leader", "1 when this node leads.", core.leader == status.node)
            yield gauge("sava_raft_has_leader", "1 when this node knows a leader.", bool(core.leader))
            yield gauge("sava_raft_term", "Current term.", core.term)
            yield gauge("sava_raft_commit_index", "Highest index known committed.", core.commit)
            yield gauge("sava_raft_applied_index", "Highest index applied.", core.applied)
            yield gauge(
                "sava_raft_commit_lag", "Entries in the log and not committed.", core.last_index - core.commit
            )
            yield gauge(
                "sava_raft_apply_lag", "Entries committed and not applied.", core.commit - core.applied
            )
            yield gauge("sava_raft_voters", "Voting members.", len(core.membership.voters))
        yield gauge("sava_raft_snapshot_index", "Index of the latest snapshot.", status.snapshot_index)
        yield gauge("sava_meta_revision", "Revision of the metadata store.", status.revision)
        yield gauge("sava_meta_keys", "Keys in the metadata store.", status.keys)
        yield gauge("sava_meta_bytes", "Bytes of keys and values.", status.total_bytes)
        yield gauge("sava_meta_limit_bytes", "Bytes that there may be.", status.limit_bytes)
        yield gauge("sava_meta_watchers", "Open watches on this node.", self._node.replica.hub.watchers)
        yield self._dropped(status.dropped)

    def _dropped(self, received: dict[str, int]) -> Metric:
        dropped = [(("in", reason), count) for reason, count in sorted(received.items())]
        sent = self._node.transport.dropped()
        dropped += [(("out", reason), count) for reason, count in sorted(sent.items())]
        if self._node.send_errors:
            dropped.append((("out", "error"), self._node.send_errors))
        text = "Messages not sent or not let in, by reason."
        return counters("sava_raft_dropped_messages", text, ("direction", "reason"), dropped)


# -- ledgers ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSources:
    """What is read when scraped."""

    own: Callable[[], LedgerWriter | None]
    fences: Callable[[], int]
    """How often this broker's disk was fenced, for its own ledgers."""
    degraded_s: Callable[[], float]
    """Over all ledgers of this process."""
    copies: Callable[[], int]
    failover: Failover
    live_brokers: LiveBrokers


class JournalCollector(Collector):
    def __init__(self, parts: JournalSources) -> None:
        self._parts = parts

    def collect(self) -> Iterable[Metric]:
        parts = self._parts
        yield from self._of_own(parts.own())
        yield gauge(
            "sava_ledger_copies", "Mirrors on this disk: copies of other brokers' ledgers.", parts.copies()
        )
        yield counter("sava_ledger_fences", "Fences that ended ledgers of this broker.", parts.fences())
        yield counter(
            "sava_ledger_degraded_seconds",
            "Time in which fewer copies were enough than were asked for.",
            parts.degraded_s(),
        )
        for name, text in _RECOVERY:
            yield counter(f"sava_ledger_{name}", text, getattr(parts.failover.figures, name))
        yield gauge(
            "sava_ledger_recoveries_waiting",
            "Recoveries that wait for disks which do not answer.",
            parts.failover.waiting,
        )

    def _of_own(self, own: LedgerWriter | None) -> Iterable[Metric]:
        positions: list[tuple[str, float]] = []
        lags: list[tuple[tuple[str, str], float]] = []
        if own is not None:
            at = own.owner
            positions += (("stored", at.floor), ("committed", at.commit))
            positions += (("durable", at.own_durable), ("end", at.end))
            lags += (((self._broker_of(storage), storage), lag) for storage, lag in own.lags.items())
        yield gauges(
            "sava_journal_position",
            "Of the journal that this broker writes: in segments, committed, durable on its own disk, end.",
            "position",
            positions,
        )
        yield gauges(
            "sava_ledger_mirror_lag_bytes", "How far a mirror is behind.", ("broker", "storage"), lags
        )
        yield gauge("sava_journal_open", "1 while this broker has a journal to write to.", own is not None)
        yield gauge(
            "sava_ledger_degraded",
            "1 while fewer copies are enough than were asked for.",
            own is not None and own.is_degraded,
        )
        yield gauge(
            "sava_ledger_refusing",
            "1 while too few mirrors are connected to acknowledge anything.",
            own is not None and own.is_short,
        )

    def _broker_of(self, storage: StorageId) -> str:
        live = self._parts.live_brokers.find(storage)
        return str(live.broker) if live is not None else ""


_RECOVERY: Final = (
    ("claims", "Recoveries of others' ledgers begun by this broker."),
    ("recoveries", "Ledgers of others that it has closed."),
    ("recovery_seconds", "Time until they were closed."),
    ("tail_recoveries", "Disks whose tails this broker has recovered."),
    ("tail_recovery_seconds", "Time that tail recoveries took."),
    ("recovered_topics", "Topics whose tail was recovered."),
    ("recovered_messages", "Messages of recovered tails."),
    ("recovered_bytes", "Bytes of messages of recovered tails."),
)


# -- disks -----------------------------------------------------------------------------------------


LOOK_S: Final = 1.0
"""A disk that works answers within a millisecond."""


class DiskRoom(NamedTuple):
    """Of the file system that a directory is on."""

    use: str
    path: Path
    size: int
    free: int
    """What an ordinary user may still write."""
    error: str
    """Why the rest is not known."""


class Disks(Collector):
    """Of the metadata store, the journal, and the segments if they are files. Owned by the event loop."""

    def __init__(self, config: Config) -> None:
        self._places = {"metadata": config.meta_store.data_dir, "journal": config.storage.journal_dir}
        url = urlsplit(config.storage.url)
        if url.scheme == "file":
            self._places["segments"] = Path(unquote(url.path))
        self._asking: dict[str, tuple[asyncio.Future[DiskRoom], float]] = {}
        """What was not answered yet, and until when that is waited for."""
        self._seen: list[DiskRoom] = []

    async def look(self) -> list[DiskRoom]:
        for use in self._places.keys() - self._asking.keys():
            self._ask(use)
        asking, now = dict(self._asking), asyncio.get_running_loop().time()
        waits = {answer: until - now for answer, until in asking.values() if until > now}
        if waits:
            await asyncio.wait(waits, timeout=max(waits.values()))
        self._seen = [self._answered(use, asking[use][0]) for use in self._places]
        return self._seen

    def _ask(self, use: str) -> None:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[DiskRoom] = loop.create_future()
        answer.add_done_callback(lambda _: self._asking.pop(use, None))
        self._asking[use] = answer, loop.time() + LOOK_S

        def ask() -> None:
            room = _room(use, self._places[use])
            with suppress(RuntimeError):  # the loop is closed: no caller waits any more
                loop.call_soon_threadsafe(answer.set_result, room)

        # A daemon, and not one of a pool: a process can end without it, and no other work waits behind it.
        threading.Thread(target=ask, name=f"sava-disk-{use}", daemon=True).start()

    def _answered(self, use: str, answer: asyncio.Future[DiskRoom]) -> DiskRoom:
        if answer.done():
            return answer.result()
        return DiskRoom(use, self._places[use], 0, 0, f"no answer within {LOOK_S:g} s")

    def collect(self) -> Iterable[Metric]:
        """As it was at the last look."""
        known = [room for room in self._seen if not room.error]
        yield gauges(
            "sava_disk_size_bytes",
            "Size of the file system that a directory is on.",
            "use",
            [(room.use, room.size) for room in known],
        )
        yield gauges(
            "sava_disk_free_bytes",
            "What may still be written there.",
            "use",
            [(room.use, room.free) for room in known],
        )


def _room(use: str, path: Path) -> DiskRoom:
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return DiskRoom(use, path, 0, 0, error.strerror or str(error))
    return DiskRoom(use, path, usage.total, usage.free, "")
