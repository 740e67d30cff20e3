"""Status: how far every topic is at every remote, and what keeps it from going on.

What nobody reports is not taken for well. A partition whose link nobody has, or of which no runner was heard
for a while, counts as disconnected, with the rate 0 and a backlog that goes on growing: its end is asked from
the broker that has it (``look``), not from the runner that is gone. Until that was asked, a backlog of 0 that
was reported is one that is not known; and so is the age of what no report had a time for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from sava.cluster.pipeline_records import Pipeline, PipelineState
from sava.cluster.pipelines import Pipelines
from sava.replication import records
from sava.replication.links import Extent, Extents, Links, LinkTopic, pipeline_name
from sava.replication.matrix import CONNECTED, LinkState
from sava.replication.records import LATEST, PartitionReport, ReportRecord
from sava.replication.reports import Reports
from sava.topics.names import TopicName

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
    """Messages; UNKNOWN, or at most so many if it was never copied and starts at a time."""
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
            return LinkState.PAUSED, f"pipeline {name} is paused; `sava pipelines resume {name}` goes on"
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
                backlog = UNKNOWN  # nobody looks for what may have come since then
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
    """Nobody copies it, whatever was said last."""
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
