"""QueryJob: a Spark query as a pipeline job, with its lag.

One thread prepares the query, starts it, looks at it twice a second and sees its end; another asks brokers
for the ends of the topics. Each publishes its knowledge as one value, so the runner's loop waits for neither
Spark nor a broker.

**After the current batch.** Spark itself knows only "now" and interrupts the current batch. So a job that is
to stop gently is watched until a batch has ended, or none is active, and stopped then. If the next batch has
begun by then it is interrupted in its first moments, and the next runner of the pipeline does it again.

**Lag.** Brokers report the ends of topics, the query its position. The lag in time follows from when an end
was first seen beyond the position, without reading messages. Messages from before the first look count from
then.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Final

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from sava.errors import SavaError
from sava.pipeline.calls import PartitionExtent
from sava.pipeline.cluster import ClusterAccess, ClusterClient
from sava.pipeline.launch import brief
from sava.pipeline.options import TopicChoice, TopicPartition, to_offsets
from sava.pipeline.runner.allowing import NotAllowed
from sava.pipeline.runner.control import UNKNOWN_LAG
from sava.pipeline.runner.kinds import JobProgress, PipelineJob
from sava.pipeline.source.query import QueryTopics

log = logging.getLogger(__name__)

MAX_SAMPLES: Final = 512


class Lag:
    """The lag of one query, for one thread. The clock is a parameter."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, Mapping[TopicPartition, PartitionExtent]]] = deque()
        self._first: Mapping[TopicPartition, PartitionExtent] | None = None

    def note(self, extents: Mapping[TopicPartition, PartitionExtent], now: float) -> None:
        if self._first is None:
            self._first = extents
        if self._samples and self._samples[-1][1] == extents:
            return
        self._samples.append((now, extents))
        if len(self._samples) > MAX_SAMPLES:
            # Drop every other sample: a query that lags far needs no better resolution.
            self._samples = deque(
                sample
                for index, sample in enumerate(self._samples)
                if index % 2 == 0 or index == len(self._samples) - 1
            )

    def behind(self, position: Mapping[TopicPartition, int] | None, now: float) -> tuple[int, float]:
        """The lag in messages and in seconds at ``position``, which is None while unknown."""
        if position is None or not self._samples:
            return UNKNOWN_LAG, UNKNOWN_LAG
        while len(self._samples) > 1 and not _beyond(self._samples[0][1], position):
            self._samples.popleft()
        messages = _beyond(self._samples[-1][1], position)
        return messages, now - self._samples[0][0] if messages else 0.0

    @property
    def has_grown(self) -> bool:
        """Whether there are more messages than at the first look."""
        if self._first is None or not self._samples:
            return False
        return bool(_beyond(self._samples[-1][1], {part: extent.end for part, extent in self._first.items()}))


def _beyond(extents: Mapping[TopicPartition, PartitionExtent], position: Mapping[TopicPartition, int]) -> int:
    return sum(max(0, extent.end - position.get(part, extent.start)) for part, extent in extents.items())


LOOK_S: Final = 0.5
STOPPING_LOOK_S: Final = 0.1
RATE_S: Final = 10.0

Prepare = Callable[[SparkSession], DataStreamWriter]
"""Builds the query without starting it. It may wait for brokers."""


class QueryJob(PipelineJob):
    """A streaming query in its own thread."""

    def __init__(
        self, name: str, spark: SparkSession, prepare: Prepare, *, access: ClusterAccess, topics: TopicChoice
    ) -> None:
        self._name = name
        self._spark = spark
        self._prepare = prepare
        self._ends = TopicEnds(name, access, topics)
        self._query: StreamingQuery | None = None
        self._progress = JobProgress()
        self._end: str | None = None
        self._refusal = ""
        self._stop_wanted = threading.Event()
        self._stop_now = threading.Event()
        self._is_begun = False
        self._guard = threading.Lock()
        self._seen = BatchesSeen()
        threading.Thread(target=self._run, name=f"pipeline {name}", daemon=True).start()

    @property
    def progress(self) -> JobProgress:
        return self._progress

    @property
    def end(self) -> str | None:
        return self._end

    @property
    def refusal(self) -> str:
        return self._refusal

    def stop(self, *, now: bool) -> None:
        with self._guard:
            self._stop_wanted.set()
            if now:
                self._stop_now.set()
            query = self._query
            if not self._is_begun:
                # A preparation may still wait for brokers; it sees the stop request before the start.
                self._end = ""
        if now and query is not None:
            threading.Thread(
                target=self._interrupt, args=(query,), name=f"stopping {self._name}", daemon=True
            ).start()

    def _interrupt(self, query: StreamingQuery) -> None:
        try:
            query.stop()
        except Exception:
            # If it has ended, the other thread sees it; if not, the runner sees a job that does not stop.
            log.exception("pipelines: stopping failed name=%s", self._name)

    # -- its own thread ------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
            end = ""
        except NotAllowed as error:
            end = self._refusal = str(error)
        except SavaError as error:
            end = str(error)
        except Exception as error:
            end = brief(error)
            if not self._stop_wanted.is_set():
                log.exception("pipelines: the query has failed name=%s", self._name)
        finally:
            self._ends.closed.set()
        self._progress = self._progress._replace(rate=0.0)
        self._end = "" if self._stop_wanted.is_set() else end

    def _work(self) -> None:
        session = self._spark.newSession()
        # Spark finds Python data sources by the thread's active session, which only the first thread has.
        SparkSession._get_j_spark_session_class(session._jvm).setActiveSession(session._jsparkSession)
        # Queries of one application get equal shares of its cores.
        session.sparkContext.setLocalProperty("spark.scheduler.pool", self._name)
        writer = self._prepare(session)
        with self._guard:
            if self._stop_wanted.is_set():
                return
            self._is_begun = True
        query = writer.start()
        with self._guard:
            self._query = query
            stop_now = self._stop_now.is_set()
        if stop_now:
            query.stop()
        self._ends.start()
        batch_at_stop: int | None = None
        while not query.awaitTermination(
            STOPPING_LOOK_S if self._stop_wanted.is_set() else LOOK_S  # type: ignore[arg-type]
        ):
            self._look(query)
            if self._stop_wanted.is_set():
                if batch_at_stop is None:
                    batch_at_stop = self._seen.batch
                if self._seen.batch != batch_at_stop or not _is_at_work(query):
                    query.stop()
        self._look(query)

    def _look(self, query: StreamingQuery) -> None:
        now = time.monotonic()
        last = query.lastProgress
        seen = self._seen
        if last is not None and last["batchId"] > seen.batch + 1:
            for each in query.recentProgress:
                seen.note(each, now)
        elif last is not None:
            seen.note(last, now)
        messages, seconds = self._ends.behind(seen.position)
        has_backlog = messages > 0
        if seen.position is None:
            has_backlog = self._ends.has_grown or bool(query.status["isDataAvailable"])
        self._progress = JobProgress(
            is_running=not query.status["message"].startswith("Initializing"),
            has_worked=seen.batch >= 0,  # Spark reports ended batches, and sometimes an idle trigger
            rows=seen.rows,
            rate=seen.rate(now),
            batch=max(seen.batch, 0),
            lag_messages=messages,
            lag_seconds=seconds,
            has_backlog=has_backlog,
            pulse=self._pulse(query) if has_backlog else None,
        )

    def _pulse(self, query: StreamingQuery) -> Hashable:
        """The finished tasks of its last Spark job, which show progress within a long batch."""
        tracker = self._spark.sparkContext.statusTracker()
        jobs = tracker.getJobIdsForGroup(str(query.runId))
        if not jobs:
            return None
        info = tracker.getJobInfo(max(jobs))
        stages = info.stageIds if info is not None else []
        done = [tracker.getStageInfo(stage) for stage in stages]
        return max(jobs), tuple(stage.numCompletedTasks for stage in done if stage is not None)


class BatchesSeen:
    """The batches that Spark has reported of one run. One thread owns it."""

    def __init__(self) -> None:
        self.batch = -1
        self.rows = 0
        self.position: Mapping[TopicPartition, int] | None = None
        self._recent: deque[tuple[float, int]] = deque()

    def note(self, progress: Mapping[str, Any], now: float) -> None:
        """Note a report, in the order of batches; a repeated report changes nothing."""
        batch = progress["batchId"]
        if batch <= self.batch:
            return
        self.batch = batch
        rows = progress["numInputRows"]
        self.rows += rows
        self._recent.append((now, rows))
        for source in progress["sources"]:
            position = _position(source["endOffset"])
            if position is not None:
                self.position = position

    def rate(self, now: float) -> float:
        while self._recent and self._recent[0][0] < now - RATE_S:
            self._recent.popleft()
        return sum(rows for _, rows in self._recent) / RATE_S


class TopicEnds:
    """The ends of a query's topics, asked every second in a thread of its own: a silent broker blocks
    nothing."""

    EVERY_S: Final = 1.0

    def __init__(self, name: str, access: ClusterAccess, topics: TopicChoice) -> None:
        self._name = name
        self._access = access
        self._choice = topics
        self._lag = Lag()
        self._guard = threading.Lock()
        self.closed = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"lag of {self._name}", daemon=True).start()

    def behind(self, position: Mapping[TopicPartition, int] | None) -> tuple[int, float]:
        with self._guard:
            return self._lag.behind(position, time.monotonic())

    @property
    def has_grown(self) -> bool:
        with self._guard:
            return self._lag.has_grown

    def _run(self) -> None:
        topics: QueryTopics | None = None
        reason = ""
        while not self.closed.wait(self.EVERY_S):
            try:
                cluster = ClusterClient.of(self._access)
                if topics is None:
                    chosen = QueryTopics(cluster, self._choice)
                    chosen.look_up()
                    topics = chosen
                topics.refreshing.poke()
                names = topics.names
                found = cluster.extents(list(names.values()))
            except SavaError as error:
                if str(error) != reason:
                    reason = str(error)
                    log.info("pipelines: unknown lag name=%s error=%s", self._name, reason)
                continue
            reason = ""
            self._note({part: found[name] for part, name in names.items()})

    def _note(self, extents: Mapping[TopicPartition, PartitionExtent]) -> None:
        with self._guard:
            self._lag.note(extents, time.monotonic())


def _is_at_work(query: StreamingQuery) -> bool:
    status = query.status
    return bool(status["isTriggerActive"] and status["isDataAvailable"])


def _position(text: str | Mapping[str, Any] | None) -> Mapping[TopicPartition, int] | None:
    """None for the position of another source than topics."""
    try:
        return to_offsets(json.loads(text) if isinstance(text, str) else text or {}) or None
    except (ValueError, AttributeError):
        return None
