"""Load reports: every now and then this broker tells the leader how busy it is.

A report is worth something for a while and nothing after that, so one that could not be delivered is not
repeated: the next one follows. A new leader knows nothing, and is told as soon as it is known.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from sava.api.brokers_admin import load_report
from sava.cluster.loads import Loads
from sava.errors import SavaError
from sava.peers.forwarding import Forwarder
from sava.proto import brokers_pb2 as pb
from sava.storage.source_positions import is_replication_slot
from sava.supervisor import Supervisor
from sava.tasks import cancelled
from sava.topics.names import TopicName
from sava.topics.subscription import Subscription
from sava.topics.topic import Topic
from sava.topics.topics import ServedTopics

log = logging.getLogger(__name__)

REPORT: Final = "/sava.admin.Brokers/ReportLoad"
TIMEOUT_S: Final = 5.0
LOOK_S: Final = 1.0
"""How often it is looked whether somebody else leads."""
STATM: Final = Path("/proc/self/statm")


class LoadReports:
    """Owned by the event loop."""

    def __init__(
        self,
        topics: ServedTopics,
        loads: Loads,
        forwarder: Forwarder,
        leader: Callable[[], int],
        *,
        interval_s: float,
    ) -> None:
        self._loads = loads
        self._forwarder = forwarder
        self._leader = leader
        self._broker = topics.broker
        self._interval_s = interval_s
        self._measure = Measure(topics)
        self._trouble = ""
        self._task: asyncio.Task[None] | None = None

    def start(self, supervisor: Supervisor) -> None:
        self._task = supervisor.repeated(self._run, name="load reports")

    async def close(self) -> None:
        await cancelled(self._task)

    async def _run(self) -> None:
        reported_to, reported_at = 0, float("-inf")
        while True:
            leader, now = self._leader(), time.monotonic()
            if leader and (leader != reported_to or now - reported_at >= self._interval_s):
                if await self._report(leader):
                    reported_to = leader
                reported_at = now
            await asyncio.sleep(min(LOOK_S, self._interval_s))

    async def _report(self, leader: int) -> bool:
        report = self._measure.report()
        if leader == self._broker:
            self._loads.record(load_report(report))
            return True
        try:
            await self._forwarder.ask(
                "admin", REPORT, report, pb.ReportLoadResponse, broker=leader, timeout=TIMEOUT_S
            )
        except (SavaError, TimeoutError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.info("load: not reported leader=%d error=%s: %s", leader, type(error).__name__, error)
            return False
        self._trouble = ""
        return True


class _Counted(NamedTuple):
    topic_id: int
    """A topic that was deleted and created again has the name and the first epoch of the former one."""
    epoch: int
    messages: int
    bytes: int


class Measure:
    """What this broker does, since it was last asked."""

    def __init__(self, topics: ServedTopics) -> None:
        self._topics = topics
        self._at = time.monotonic()
        self._cpu_s = time.process_time()
        self._counted: dict[TopicName, _Counted] = {}
        self._trouble = ""

    def report(self) -> pb.LoadReport:
        at, cpu_s = time.monotonic(), time.process_time()
        elapsed = max(at - self._at, 1e-3)
        cores = len(os.sched_getaffinity(0))
        report = pb.LoadReport(
            broker_id=self._topics.broker,
            cpu_percent=min(100 * (cpu_s - self._cpu_s) / elapsed / cores, 100.0),
            memory_percent=_memory_percent(),
        )
        counted: dict[TopicName, _Counted] = {}
        for name, topic in self._topics.loaded.items():
            try:
                now = _Counted(topic.topic_id, topic.epoch, *topic.published)
                report.topics.append(_topic_load(name, topic, self._before(name, now), now, elapsed))
            except Exception as error:  # noqa: BLE001
                # One topic with a bad value would keep the load of all the others from the leader.
                self._leave_out(name, error)
            else:
                counted[name] = now
        self._at, self._cpu_s, self._counted = at, cpu_s, counted
        return report

    def _before(self, name: TopicName, now: _Counted) -> _Counted:
        before = self._counted.get(name)
        if before is not None and (before.topic_id, before.epoch) == (now.topic_id, now.epoch):
            return before
        return _Counted(now.topic_id, now.epoch, 0, 0)  # taken up since: what it counts is since then too

    def _leave_out(self, name: TopicName, error: Exception) -> None:
        if str(error) != self._trouble:
            self._trouble = str(error)
            log.error("load: not measured topic=%s", name, exc_info=error)


def _topic_load(
    name: TopicName, topic: Topic, before: _Counted, now: _Counted, elapsed: float
) -> pb.TopicLoad:
    subscriptions = topic.subscriptions.values()
    return pb.TopicLoad(
        topic=str(name),
        messages_per_second=max(now.messages - before.messages, 0) / elapsed,
        megabytes_per_second=max(now.bytes - before.bytes, 0) / elapsed / 1e6,
        producers=sum(1 for _ in topic.producers),
        consumers=sum(len(each.consumers) for each in subscriptions),
        # Links have no consumers that somebody would have to send it to.
        backlog=sum(
            each.backlog
            for each in subscriptions
            if isinstance(each, Subscription) and not is_replication_slot(each.name)
        ),
    )


def _memory_percent() -> float:
    """Of the machine's, by this process; 0 where the system does not say."""
    try:
        resident = int(STATM.read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return 0.0
    return 100 * resident / os.sysconf("SC_PHYS_PAGES")
