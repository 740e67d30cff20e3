"""What a broker tells Prometheus about journals: the one that it writes, the copies that it keeps for others,
and what it does about those of brokers that are gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sava.ledger.failover import Failover
from sava.ledger.live_brokers import LiveBrokers
from sava.ledger.protocol import StorageId
from sava.ledger.writer import LedgerWriter


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalParts:
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
    def __init__(self, parts: JournalParts) -> None:
        self._parts = parts

    def collect(self) -> Iterable[Metric]:
        yield from self._of_own()
        yield _gauge("sava_journal_copies", "Journals of other brokers on this disk.", self._parts.copies())
        yield CounterMetricFamily(
            "sava_journal_fences", "Fences that ended journals of this broker.", value=self._parts.fences()
        )
        yield CounterMetricFamily(
            "sava_journal_degraded_seconds",
            "Time in which fewer copies were enough than were asked for.",
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
            "1 while fewer copies are enough than were asked for.",
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
            ("sava_journal_claims", "Recoveries of others' journals begun by this broker.", figures.claims),
            ("sava_journal_recoveries", "Journals of others that it has closed.", figures.recoveries),
            ("sava_journal_recovery_seconds", "Time until they were closed.", figures.recovery_seconds),
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
