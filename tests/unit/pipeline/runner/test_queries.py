"""A Spark query as the runner sees it, with a Spark that does what it is told."""

from __future__ import annotations

import threading
import time
from typing import Any
from unittest import mock

import pytest

from sava.pipeline.cluster import ClusterAccess
from sava.pipeline.options import TopicChoice
from sava.pipeline.runner.queries import QueryJob
from tests.support.waiting import PATIENCE_S, wait_until

WAITING = {"message": "Waiting for data to arrive", "isTriggerActive": False, "isDataAvailable": False}


class FakeQuery:
    def __init__(self) -> None:
        self.lastProgress: dict[str, Any] | None = None
        self.recentProgress: list[dict[str, Any]] = []
        self.status: dict[str, Any] = WAITING
        self.runId = "run"
        self.stopped = threading.Event()
        self.failure: Exception | None = None

    def awaitTermination(self, timeout: float) -> bool:  # noqa: N802
        ended = self.stopped.wait(min(timeout, 0.02))
        if ended and self.failure is not None:
            raise self.failure
        return ended

    def stop(self) -> None:
        self.stopped.set()

    def fail(self, error: Exception) -> None:
        self.failure = error
        self.stopped.set()

    def finish(self, *batches: tuple[int, int]) -> None:
        """Batches, and how many rows each had."""
        done = [
            {"batchId": batch, "numInputRows": rows, "sources": [{"endOffset": '{"/default/a": {"0": 1}}'}]}
            for batch, rows in batches
        ]
        self.recentProgress += done
        self.lastProgress = done[-1]

    def begin(self) -> None:
        self.status = {"message": "Processing", "isTriggerActive": True, "isDataAvailable": True}


class FakeSpark:
    """Session, context, tracker and writer at once."""

    def __init__(self) -> None:
        self.query = FakeQuery()
        self.started = threading.Event()
        self.prepared = threading.Event()
        self.prepared.set()
        self.sparkContext = self
        self._jvm = self._jsparkSession = mock.MagicMock()

    def newSession(self) -> FakeSpark:  # noqa: N802
        return self

    def setLocalProperty(self, name: str, value: str) -> None:  # noqa: N802
        pass

    def statusTracker(self) -> FakeSpark:  # noqa: N802
        return self

    def getJobIdsForGroup(self, group: str) -> list[int]:  # noqa: N802
        return []

    def prepare(self, session: FakeSpark) -> FakeSpark:
        self.prepared.wait(PATIENCE_S)
        return self

    def start(self) -> FakeQuery:
        self.started.set()
        return self.query


@pytest.fixture
def spark() -> FakeSpark:
    return FakeSpark()


def _job(spark: FakeSpark) -> QueryJob:
    access = ClusterAccess("127.0.0.1:1", timeout_s=0.1)
    given: Any = spark
    return QueryJob("copy", given, given.prepare, access=access, topics=TopicChoice(("/default/a",)))


def test_progress_is_what_spark_tells(spark: FakeSpark) -> None:
    job = _job(spark)
    wait_until(lambda: job.progress.is_running)
    assert (job.progress.lag_messages, job.progress.has_worked) == (-1, False)
    spark.query.finish((0, 5))
    wait_until(lambda: job.progress.rows == 5)
    assert job.progress.has_worked
    spark.query.finish((1, 5), (2, 5), (3, 10))
    wait_until(lambda: job.progress.rows == 25)
    assert job.progress.batch == 3
    job.stop(now=True)
    wait_until(lambda: job.end == "")


def test_a_query_that_is_being_initialized_does_not_run_yet(spark: FakeSpark) -> None:
    spark.query.status = {**WAITING, "message": "Initializing sources"}
    job = _job(spark)
    assert spark.started.wait(PATIENCE_S)
    time.sleep(0.1)
    assert not job.progress.is_running
    spark.query.status = WAITING
    wait_until(lambda: job.progress.is_running)
    job.stop(now=True)


def test_a_query_that_waits_is_stopped_at_once(spark: FakeSpark) -> None:
    job = _job(spark)
    wait_until(spark.started.is_set)
    job.stop(now=False)
    wait_until(lambda: job.end == "")


def test_a_batch_that_is_under_way_ends_first(spark: FakeSpark) -> None:
    spark.query.begin()
    job = _job(spark)
    wait_until(lambda: job.progress.is_running)
    job.stop(now=False)
    assert not spark.query.stopped.wait(0.3)
    spark.query.finish((0, 5))  # and the next one is under way already
    wait_until(lambda: job.end == "")
    assert job.progress.rows == 5


def test_a_batch_that_is_not_waited_for_is_interrupted(spark: FakeSpark) -> None:
    spark.query.begin()
    job = _job(spark)
    wait_until(lambda: job.progress.is_running)
    job.stop(now=False)
    job.stop(now=True)
    wait_until(lambda: job.end == "")


def test_what_is_still_being_prepared_never_begins(spark: FakeSpark) -> None:
    """It waits for a broker, for a minute maybe. Stopped, it is over at once, and does not begin later."""
    spark.prepared.clear()
    job = _job(spark)
    job.stop(now=True)
    assert job.end == ""
    spark.prepared.set()
    assert not spark.started.wait(0.3)


def test_a_query_that_fails_says_why(spark: FakeSpark) -> None:
    job = _job(spark)
    wait_until(spark.started.is_set)
    spark.query.fail(RuntimeError("no such topic\nand a long trace"))
    wait_until(lambda: job.end == "RuntimeError: no such topic")


def test_a_query_with_data_and_no_progress_has_a_backlog(spark: FakeSpark) -> None:
    job = _job(spark)
    wait_until(lambda: job.progress.is_running)
    assert not job.progress.has_backlog
    spark.query.begin()
    wait_until(lambda: job.progress.has_backlog)
    job.stop(now=True)
    wait_until(lambda: job.end is not None)
