"""Reports: what runners say of the topics that they copy, kept by the leader.

Every report counts at once, in the leader's memory. Not every one is written down, or a hundred idle topics
would keep the metadata store busy: what is new about a state is, and progress every few seconds. A new leader
begins with what was written down, and gives runners the usual time to be heard of again before it takes them
for gone.

What a report says of the topic at the remote is written down before the report is answered, since everything
depends on it: which topic it was, so that another one of the same name is recognised, that it was deleted, so
that it is not created again, and where the copy begins, which nothing else tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from sava.metadata.commands import Put
from sava.metadata.records import present, unchanged
from sava.metadata.store import MetadataStore
from sava.replication import records
from sava.replication.errors import LinkUnknown, ReplicationBusy
from sava.replication.links import LinkName, LinkTopic
from sava.replication.records import LinkRecord, PartitionReport, ReportRecord
from sava.topics import specs

STALE_MS: Final = 30_000
"""Of what nobody has reported for so long nobody knows that it goes on."""
REWRITE_MS: Final = 10_000
BATCH: Final = 100
ATTEMPTS: Final = 8
MAX_REASON: Final = 1_000
"""Characters of a reason that are kept."""


class TopicReport(NamedTuple):
    """What a runner says of one topic."""

    topic_ids: tuple[int, ...]
    """Of the topic here, as the runner knows it."""
    generation: int
    remote_topic_ids: tuple[int, ...]
    is_tombstone: bool
    begins: tuple[int, ...]
    partitions: tuple[PartitionReport, ...]


class Reports:
    """Owned by the event loop."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._latest: dict[LinkName, ReportRecord] = {}
        self._written: dict[LinkName, ReportRecord] = {}
        self.leading_since_ms = 0
        """Before that reports went to another leader."""

    def begin(self) -> None:
        """This node leads from now on."""
        self._latest.clear()
        self._written.clear()
        self.leading_since_ms = records.now_ms()

    def get(self, name: LinkName) -> ReportRecord | None:
        """The last one. Raises RecordCorrupt."""
        found = self._latest.get(name)
        kv = self._store.local.get(records.report_key(*name)) if found is None else None
        if kv is not None:
            found = self._latest[name] = self._written[name] = specs.decode(kv, ReportRecord)
        return found

    def forget(self, names: Iterable[LinkName]) -> None:
        """All but these."""
        kept = set(names)
        for known in (self._latest, self._written):
            for name in [name for name in known if name not in kept]:
                del known[name]

    def is_stale(self, report: ReportRecord, now_ms: int) -> bool:
        return now_ms - max(report.reported_ms, self.leading_since_ms) > STALE_MS

    # -- taking ------------------------------------------------------------------------------

    async def take(
        self, runner: str, told: Mapping[LinkName, TopicReport], topics: Mapping[LinkName, LinkTopic]
    ) -> None:
        """Of ``topics``, which are those that are wanted; what is said of others, or of topics that were
        created anew since the runner looked, is no news of these."""
        now = records.now_ms()
        changed: list[tuple[LinkName, ReportRecord]] = []
        for name, each in told.items():
            topic = topics.get(name)
            if topic is None or not _is_about(each, topic):
                continue
            await self._remember(name, each, topic)
            partitions = tuple(_stamped(_shortened(told), now) for told in each.partitions)
            report = ReportRecord(runner=runner, reported_ms=now, partitions=partitions)
            self.get(name)  # what was written down, if this node has not looked yet
            self._latest[name] = report
            if _is_news(self._written.get(name), report):
                changed.append((name, report))
        for start in range(0, len(changed), BATCH):
            await self._write(changed[start : start + BATCH])

    async def _write(self, changed: list[tuple[LinkName, ReportRecord]]) -> None:
        """If all of them are still wanted; otherwise the next report tries again, without those that are
        not."""
        conditions = [present(records.link_key(*name)) for name, _ in changed]
        puts = [Put(records.report_key(*name), specs.encode(report)) for name, report in changed]
        if (await self._store.txn(conditions, puts)).succeeded:
            self._written.update(changed)

    async def _remember(self, name: LinkName, told: TopicReport, topic: LinkTopic) -> None:
        def change(record: LinkRecord) -> LinkRecord:
            if told.generation != record.generation or record.topic_id != topic.record.topic_id:
                return record
            ids = told.remote_topic_ids or record.remote_topic_ids
            partitions = topic.wanted.spec.partitions
            has_all = len(ids) >= partitions and all(ids[:partitions])
            return msgspec.structs.replace(
                record,
                remote_topic_ids=ids,
                is_tombstone=record.is_tombstone or told.is_tombstone,
                begins=told.begins or record.begins,
                base_partitions=partitions if has_all and told.remote_topic_ids else record.base_partitions,
            )

        if change(topic.record) != topic.record:
            with suppress(LinkUnknown):  # the topic was deleted just now
                await _change(self._store, name, change)

    # -- asked for ---------------------------------------------------------------------------

    async def recreate(self, name: LinkName) -> None:
        """Forget what was known of the topic at the remote, and that it was deleted. Raises LinkUnknown."""

        def change(record: LinkRecord) -> LinkRecord:
            return msgspec.structs.replace(
                record, remote_topic_ids=(), is_tombstone=False, generation=record.generation + 1
            )

        await _change(self._store, name, change)


async def _change(store: MetadataStore, name: LinkName, change: Callable[[LinkRecord], LinkRecord]) -> None:
    """Raises LinkUnknown, ReplicationBusy."""
    key = records.link_key(*name)
    for _ in range(ATTEMPTS):
        kv = await store.get(key)
        if kv is None:
            raise LinkUnknown(name.topic, name.remote)
        put = Put(key, specs.encode(change(specs.decode(kv, LinkRecord))))
        if (await store.txn((unchanged(key, kv.mod_revision),), (put,))).succeeded:
            return
    raise ReplicationBusy(f"topic {name.topic} and remote {name.remote} changed under {ATTEMPTS} attempts")


def _is_about(told: TopicReport, topic: LinkTopic) -> bool:
    """It may know of fewer partitions than there are by now."""
    return told.topic_ids == topic.wanted.topic_ids[: len(told.topic_ids)]


def _is_news(written: ReportRecord | None, report: ReportRecord) -> bool:
    if written is None or _states(written) != _states(report):
        return True
    is_due = abs(report.reported_ms - written.reported_ms) >= REWRITE_MS
    return is_due and _progress(written) != _progress(report)


def _progress(report: ReportRecord) -> tuple[str, list[PartitionReport]]:
    return report.runner, [msgspec.structs.replace(each, end_ms=0) for each in report.partitions]


def _states(report: ReportRecord) -> list[tuple[object, ...]]:
    """What the next runner must know, whenever this one ends."""
    return [
        (each.partition, each.state, each.reason, each.was_seen, each.rewound_from)
        for each in report.partitions
    ]


def _stamped(report: PartitionReport, now_ms: int) -> PartitionReport:
    return msgspec.structs.replace(report, end_ms=report.end_ms or now_ms)


def _shortened(report: PartitionReport) -> PartitionReport:
    if len(report.reason) <= MAX_REASON:
        return report
    return msgspec.structs.replace(report, reason=f"{report.reason[: MAX_REASON - 1]}…")
