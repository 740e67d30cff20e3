"""Metrics of the disks' side of a broker: the journal that it writes, the copies that it keeps for others,
and what it does about those of brokers that are gone; and how much space there is where it writes.

A file system that hangs (NFS whose server is gone) answers no question about itself, and the caller waits for
as long as it hangs. So ``Disks`` asks on a thread, waits for an answer only ``LOOK_S``, and does not ask
again before the question that is under way was answered: one thread for each directory waits, however often
the metrics are scraped. What is not known is left out, and not reported as a disk without space.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import unquote, urlsplit

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sava.config import Config
from sava.ledger.failover import Failover
from sava.ledger.live_brokers import LiveBrokers
from sava.ledger.protocol import StorageId
from sava.ledger.writer import LedgerWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSources:
    """What is read when scraped."""

    own: Callable[[], LedgerWriter | None]
    fences: Callable[[], int]
    """How often this broker's disk was fenced, for its own journals."""
    degraded_s: Callable[[], float]
    """Over all lives of the journal in this process."""
    copies: Callable[[], int]
    failover: Failover
    live_brokers: LiveBrokers


class JournalCollector(Collector):
    def __init__(self, parts: JournalSources) -> None:
        self._parts = parts

    def collect(self) -> Iterable[Metric]:
        yield from self._of_own()
        yield _gauge("sava_journal_copies", "Journals of other brokers on this disk.", self._parts.copies())
        yield CounterMetricFamily(
            "sava_journal_fences", "Fences that ended journals of this broker.", value=self._parts.fences()
        )
        yield CounterMetricFamily(
            "sava_journal_degraded_seconds",
            "Time in which fewer copies sufficed than configured.",
            value=self._parts.degraded_s(),
        )
        yield from self._of_failover()

    def _of_own(self) -> Iterable[Metric]:
        own = self._parts.own()
        positions = GaugeMetricFamily(
            "sava_journal_position",
            "Of the journal that this broker writes: in segments, committed, durable on its own disk, end.",
            labels=("position",),
        )
        lags = GaugeMetricFamily(
            "sava_journal_mirror_lag_bytes", "How far a mirror is behind.", labels=("broker", "storage")
        )
        if own is not None:
            owner = own.owner
            for name, position in (
                ("stored", owner.floor),
                ("committed", owner.commit),
                ("durable", owner.own_durable),
                ("end", owner.end),
            ):
                positions.add_metric((name,), position)
            for storage, lag in own.lags.items():
                lags.add_metric((self._broker_of(storage), storage), lag)
        yield from (positions, lags)
        yield _gauge("sava_journal_open", "1 while this broker has a journal to write to.", own is not None)
        yield _gauge(
            "sava_journal_degraded",
            "1 while fewer copies suffice than configured.",
            own is not None and own.is_degraded,
        )
        yield _gauge(
            "sava_journal_refusing",
            "1 while too few mirrors are connected to acknowledge anything.",
            own is not None and own.is_short,
        )

    def _broker_of(self, storage: StorageId) -> str:
        neighbour = self._parts.live_brokers.find(storage)
        return str(neighbour.broker) if neighbour is not None else ""

    def _of_failover(self) -> Iterable[Metric]:
        failover = self._parts.failover
        figures = failover.figures
        for name, text, value in (
            ("sava_journal_claims", "Recoveries of other journals begun by this broker.", figures.claims),
            ("sava_journal_recoveries", "Recoveries that ended with a closed journal.", figures.recoveries),
            (
                "sava_journal_recovery_seconds",
                "Time until recovered journals were closed.",
                figures.recovery_seconds,
            ),
            (
                "sava_journal_tail_recoveries",
                "Disks whose tails this broker has recovered.",
                figures.tail_recoveries,
            ),
            (
                "sava_journal_tail_recovery_seconds",
                "Time that tail recoveries took.",
                figures.tail_recovery_seconds,
            ),
            ("sava_journal_recovered_topics", "Topics whose tail was recovered.", figures.recovered_topics),
            ("sava_journal_recovered_messages", "Messages of recovered tails.", figures.recovered_messages),
            (
                "sava_journal_recovered_bytes",
                "Bytes of messages of recovered tails.",
                figures.recovered_bytes,
            ),
        ):
            yield CounterMetricFamily(name, text, value=value)
        yield _gauge(
            "sava_journal_recoveries_waiting",
            "Recoveries that wait for disks which do not answer.",
            failover.waiting,
        )


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=float(value))


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
            with suppress(RuntimeError):  # the loop is closed: no page waits for the answer
                loop.call_soon_threadsafe(answer.set_result, room)

        # A daemon, and not one of a pool: a process can end without it, and no other work waits behind it.
        threading.Thread(target=ask, name=f"sava-disk-{use}", daemon=True).start()

    def _answered(self, use: str, answer: asyncio.Future[DiskRoom]) -> DiskRoom:
        if answer.done():
            return answer.result()
        return DiskRoom(use, self._places[use], 0, 0, f"no answer within {LOOK_S:g} s")

    def collect(self) -> Iterable[Metric]:
        """As it was at the last look."""
        size = GaugeMetricFamily(
            "sava_disk_size_bytes", "Size of the file system that a directory is on.", labels=("use",)
        )
        free = GaugeMetricFamily("sava_disk_free_bytes", "Free space for the broker's use.", labels=("use",))
        for room in self._seen:
            if not room.error:
                size.add_metric((room.use,), room.size)
                free.add_metric((room.use,), room.free)
        yield size
        yield free


def _room(use: str, path: Path) -> DiskRoom:
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return DiskRoom(use, path, 0, 0, error.strerror or str(error))
    return DiskRoom(use, path, usage.total, usage.free, "")
