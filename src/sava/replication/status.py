"""Reports of runners, and the status of every topic at every remote.

**Reports.** Every report counts at once, in the leader's memory. Not every one is written down, or a hundred
idle topics would keep the metadata store busy: what is new about a state is, and progress every few seconds.
A new leader begins with what was written down, and gives runners the usual time to be heard of again before
it takes them for gone.

What a report says of the topic at the remote is written down before the report is answered, since everything
depends on it: which topic it was, so that another one of the same name is recognised, that it was deleted, so
that it is not created again, and where the copy begins, which nothing else tells.

**Status.** A partition without a report is not taken for well. If no runner has its link, or its runner was
not heard for a while, it counts as disconnected, with the rate 0 and a backlog that keeps growing: its end
is asked from the broker that has it (``look``), not from the runner that is gone. Until that was asked, a
backlog of 0 that was reported is one that is not known; and so is the age of what no report had a time
for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple

import msgspec

from sava.cluster.pipelines import Pipeline, Pipelines, PipelineState
from sava.metadata.commands import Put
from sava.metadata.records import RecordChange, RecordStore, Versioned, decode, encode, present
from sava.metadata.store import MetadataStore
from sava.replication import records
from sava.replication.links import Extent, Extents, LinkName, Links, LinkTopic, pipeline_name
from sava.replication.matrix import CONNECTED, LinkState
from sava.replication.records import (
    LATEST,
    LinkRecord,
    LinkUnknown,
    PartitionReport,
    ReportRecord,
)
from sava.topics.names import TopicName

STALE_MS: Final = 30_000
"""What was not reported for longer than this is not known to continue."""
REWRITE_MS: Final = 10_000
BATCH: Final = 100
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
        self._records = RecordStore(store)
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
            found = self._latest[name] = self._written[name] = decode(kv, ReportRecord)
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
        created again since the runner looked, is no news of these."""
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
        puts = [Put(records.report_key(*name), encode(report)) for name, report in changed]
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
                await self._change(name, lambda found: change(_known(name, found)))

    # -- asked for ---------------------------------------------------------------------------

    async def recreate(self, name: LinkName) -> None:
        """Forget what was known of the topic at the remote, and that it was deleted. Raises LinkUnknown."""
        generation = 0

        def change(found: Versioned[LinkRecord]) -> LinkRecord:
            nonlocal generation
            record = _known(name, found)
            if found.is_in_doubt and record.generation >= generation:
                return record  # what a runner has said of the new generation since is not to be forgotten
            generation = record.generation + 1
            return msgspec.structs.replace(
                record, remote_topic_ids=(), is_tombstone=False, generation=generation
            )

        await self._change(name, change)

    async def _change(self, name: LinkName, change: Callable[[Versioned[LinkRecord]], LinkRecord]) -> None:
        def decide(found: Versioned[LinkRecord]) -> RecordChange[LinkRecord] | None:
            changed = change(found)
            return RecordChange(changed) if changed != found.value else None

        what = f"the record of topic {name.topic} and remote {name.remote}"
        await self._records.update(records.link_key(*name), LinkRecord, decide, what=what)


def _known(name: LinkName, found: Versioned[LinkRecord]) -> LinkRecord:
    if found.value is None:
        raise LinkUnknown(name.topic, name.remote)
    return found.value


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


# -- status ------------------------------------------------------------------------------------

UNKNOWN: Final = -1
LOOK_S: Final = 5.0
"""How often the ends of partitions that are not copied are asked for, each."""
AT_A_TIME: Final = 200


class PartitionStatus(NamedTuple):
    report: PartitionReport
    """The last one, with the state as it is by now."""
    end: int
    """Of the source; at least what is known of it."""
    backlog: int
    """Messages; UNKNOWN, or an upper bound if it was never copied and starts at a time."""
    backlog_s: float
    """Age of the oldest message that is not copied; UNKNOWN. Of one that only the broker has seen, at
    most."""
    is_connected: bool
    reported_ms: int


class TopicStatus(NamedTuple):
    topic: LinkTopic
    partitions: list[PartitionStatus]

    @property
    def disconnected(self) -> int:
        return sum(not each.is_connected for each in self.partitions)

    @property
    def connected(self) -> int:
        return len(self.partitions) - self.disconnected


class Looked(NamedTuple):
    extent: Extent | None
    at: float
    found_ms: int
    """When the extent was that; 0: never."""


NEVER: Final = Looked(None, 0.0, 0)


class Statuses:
    """Owned by the event loop."""

    def __init__(self, links: Links, reports: Reports, pipelines: Pipelines, extents: Extents) -> None:
        self._links = links
        self._reports = reports
        self._pipelines = pipelines
        self._extents = extents
        self._looked: dict[TopicName, Looked] = {}

    def list(self) -> list[TopicStatus]:
        """By remote and topic. Raises RecordCorrupt."""
        now = records.now_ms()
        pipelines = {each.name: each for each in self._pipelines.known()}
        return [
            self._status(topic, pipelines.get(pipeline_name(topic.name.remote)), now)
            for topic in self._links.topics()
        ]

    def _status(self, topic: LinkTopic, pipeline: Pipeline | None, now: int) -> TopicStatus:
        report = self._reports.get(topic.name)
        stale = self._why_silent(topic, report, pipeline, now)
        told = {each.partition: each for each in report.partitions} if report is not None else {}
        partitions = []
        for number, name in enumerate(topic.members):
            last = told.get(number)
            silent = stale or (
                None
                if last is not None
                else (LinkState.STARTING, "its runner has not said anything of it yet")
            )
            partitions.append(self._partition(topic, number, name, last, report, silent, now))
        return TopicStatus(topic, partitions)

    def _why_silent(
        self, topic: LinkTopic, report: ReportRecord | None, pipeline: Pipeline | None, now: int
    ) -> tuple[LinkState, str] | None:
        """The state in place of the one that was reported; None: the report holds."""
        name = pipeline_name(topic.name.remote)
        if pipeline is not None and pipeline.record.is_paused:
            return LinkState.PAUSED, f"pipeline {name} is paused; `sava pipelines resume {name}` continues it"
        if not topic.is_ready:
            return LinkState.STARTING, "where to start is not known yet: not all its partitions are served"
        if pipeline is None or pipeline.claim is None:
            return LinkState.WAITING_RUNNER, f"no runner has pipeline {name}; start one: `sava pipelines run`"
        if pipeline.status.state is PipelineState.FAILING:
            failed = f"pipeline {name} has failed, and is begun again by itself: {pipeline.status.last_error}"
            return LinkState.FAILED, failed
        runner = pipeline.claim.runner
        if report is None or report.runner != runner:
            return (
                LinkState.STARTING,
                f"runner {runner} has pipeline {name}, and has not said anything of it yet",
            )
        if self._reports.is_stale(report, now):
            ago = (now - report.reported_ms) // 1000
            return (
                LinkState.WAITING_RUNNER,
                f"runner {runner} has pipeline {name}, and was last heard {ago} s ago; if it does not come "
                "back, start another: `sava pipelines run`",
            )
        return None

    def _partition(
        self,
        topic: LinkTopic,
        number: int,
        name: TopicName,
        last: PartitionReport | None,
        report: ReportRecord | None,
        silent: tuple[LinkState, str] | None,
        now: int,
    ) -> PartitionStatus:
        looked = self._looked.get(name, NEVER)
        extent = looked.extent
        end = max(last.end if last else UNKNOWN, extent.end if extent else UNKNOWN)
        position = last.position if last is not None else self._first(topic, number, extent)
        is_rewound = last is not None and last.rewound_from > 0
        backlog = UNKNOWN
        if position is not None and end >= position and not is_rewound:
            backlog = end - position
        since = topic.record.since_ms
        if last is not None and report is not None:
            since = last.end_ms or report.reported_ms
            if silent is not None and not backlog and looked.found_ms < since:
                backlog = UNKNOWN  # no runner looks for what may have come since then
        shown = last or PartitionReport(partition=number, state=LinkState.STARTING, position=position or 0)
        if silent is not None:
            shown = _silenced(shown, *silent)
        return PartitionStatus(
            report=shown,
            end=max(end, 0),
            backlog=backlog,
            backlog_s=_age(backlog, last, since, now),
            is_connected=shown.state in CONNECTED,
            reported_ms=report.reported_ms if last is not None and report is not None else 0,
        )

    def _first(self, topic: LinkTopic, number: int, extent: Extent | None) -> int | None:
        """Where copying would start; None: not known."""
        if topic.wanted.policy.start == LATEST:
            return topic.start_offsets[number] if topic.is_ready else None
        return extent.start if extent is not None else None

    # -- looking -----------------------------------------------------------------------------

    async def look(self) -> None:
        """Ask for the ends of partitions of which no runner tells, those first that were not looked at for
        the longest time."""
        statuses = self.list()
        names = {
            name: self._looked.get(name, NEVER).at
            for status in statuses
            for name, each in zip(status.topic.members, status.partitions, strict=True)
            if not each.is_connected
        }
        known = {name for status in statuses for name in status.topic.members}
        for gone in [name for name in self._looked if name not in known]:
            del self._looked[gone]
        now = time.monotonic()
        due = sorted((name for name, at in names.items() if now - at >= LOOK_S), key=names.__getitem__)
        await self._look_at(due[:AT_A_TIME])

    async def _look_at(self, names: Sequence[TopicName]) -> None:
        if not names:
            return
        extents = await self._extents(names)
        now, now_ms = time.monotonic(), records.now_ms()
        for name in names:
            found = extents.get(name)
            # What was seen before is still true: a log does not get shorter.
            before = self._looked.get(name, NEVER)
            self._looked[name] = Looked(found, now, now_ms) if found is not None else before._replace(at=now)


def _silenced(report: PartitionReport, state: LinkState, reason: str) -> PartitionReport:
    """No runner copies it, whatever was said last."""
    return msgspec.structs.replace(
        report, state=state, reason=reason, next_retry_ms=0, rate=0.0, bytes_rate=0.0
    )


def _age(backlog: int, last: PartitionReport | None, since_ms: int, now_ms: int) -> float:
    """``since_ms``: all that was there then had been copied, unless ``last`` says otherwise; or it came under
    its policy."""
    if last is not None and last.oldest_us:
        return max(0.0, now_ms / 1000 - last.oldest_us / 1_000_000)
    if backlog <= 0:
        return float(backlog)
    if last is not None and last.end > last.position:
        return UNKNOWN
    return max(0.0, (now_ms - since_ms) / 1000)
