"""The sink as Spark calls it, with a cluster that takes notes: what is staged, named, committed, removed."""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sava.client.errors import OutcomeUnknown, Refused, TopicUnknown, Unavailable
from sava.pipeline.cluster import ClusterClient, Objects, PartitionPublisher, TopicPartitions
from sava.pipeline.options import SinkOptions
from sava.pipeline.sink import BatchWriter, StreamWriter, WriteRefused
from sava.pipeline.sink import writers as module
from sava.pipeline.sink.routing import Batcher, TaskStage
from sava.pipeline.sink.writers import SparkTask, TaskOutput
from sava.proto import writers_pb2 as pb
from sava.records import RecordBatch

TOPIC = "/default/orders"


class Publisher(PartitionPublisher):
    def __init__(self, published: list[bytes]) -> None:
        self.published = published

    def put(self, batch: RecordBatch) -> None:
        self.published += batch.payloads()

    def settle(self) -> None: ...

    def close(self) -> None: ...


class FakeLink:
    """Takes notes of what the sink asks of a link."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.commits: list[pb.CommitRequest] = []
        self.published: dict[str, list[bytes]] = defaultdict(list)
        self.answer = pb.CommitResponse(decided_now=True)
        self.error: Exception | None = None
        self.reliable = True
        self.is_missing = False
        self.asked: list[str] = []

    def partitions(self, topic: str, *, create: bool = False) -> TopicPartitions:
        self.asked.append(topic)
        if self.is_missing and not create:
            raise TopicUnknown(f"there is no topic {topic}")
        return TopicPartitions(topic, self.reliable, True, (f"{topic}-part-0", f"{topic}-part-1"), "")

    def staging(self, writer: str) -> pb.StagingResponse:
        return pb.StagingResponse(store_url=self.directory.as_uri(), prefix=f"staging/{writer}", expires_s=60)

    def commit(self, request: pb.CommitRequest) -> pb.CommitResponse:
        self.commits.append(request)
        if self.error is not None:
            raise self.error
        return self.answer

    def publisher(self, name: str) -> Publisher:
        return Publisher(self.published[name])

    @property
    def staged(self) -> set[str]:
        root = self.directory
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeLink:
    made = FakeLink(tmp_path)
    monkeypatch.setattr(ClusterClient, "of", lambda access: made)
    return made


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says which task runs."""

    def be(task: SparkTask) -> None:
        monkeypatch.setattr(SparkTask, "current", lambda: task)

    return be


def options_of(*, stream: bool = True, **options: str) -> SinkOptions:
    return SinkOptions.parse({"topic": TOPIC, **options}, stream=stream)


def rows_of(*payloads: bytes) -> Any:
    return pa.RecordBatch.from_pydict({"payload": list(payloads), "key": [f"k{p!r}" for p in payloads]})


def task_of(partition: int, **others: Any) -> SparkTask:
    return SparkTask(
        **{"partition": partition, "attempt": 0, "query": "q", "run": "r1", "batch": 7, **others}
    )


def through_pickle(message: TaskOutput) -> TaskOutput:
    found = pickle.loads(pickle.dumps(message))
    assert isinstance(found, TaskOutput)
    return found


def test_a_streams_batch_is_one_commit_in_the_order_of_sparks_partitions(cluster: FakeLink, at: Any) -> None:
    messages: list[Any] = []
    for partition in (2, 0, 1):
        at(task_of(partition))
        writer = StreamWriter(options_of())
        messages.append(through_pickle(writer.write(iter([rows_of(b"%d" % partition)]))))
    StreamWriter(options_of()).commit(messages, 7)
    (request,) = cluster.commits
    assert (request.writer, request.query, request.run, request.batch) == ("q", "q", "r1", 7)
    assert [section.key.split("/")[-1].split("-")[1] for section in request.sections] == ["0", "1", "2"]
    assert {section.key for section in request.sections} == cluster.staged
    assert all(section.key.startswith("staging/q/") for section in request.sections)


def test_the_writer_can_be_named(cluster: FakeLink, at: Any) -> None:
    at(task_of(0))
    writer = StreamWriter(options_of(writerId="mine"))
    writer.commit([writer.write(iter([rows_of(b"x")]))], 7)
    assert (cluster.commits[0].writer, cluster.commits[0].query) == ("mine", "q")
    assert cluster.commits[0].sections[0].key.startswith("staging/mine/")


def test_empty_batches_ask_nothing_of_the_cluster(cluster: FakeLink, at: Any) -> None:
    at(task_of(0))
    for delivery in ("exactlyOnce", "atLeastOnce"):
        writer = StreamWriter(options_of(delivery=delivery))
        messages = [writer.write(iter([])), writer.write(iter([rows_of().slice(0)]))]
        writer.commit(messages, 7)
        writer.commit([], 8)
    assert not cluster.asked
    assert not cluster.commits
    assert not cluster.staged


def test_a_stream_that_spark_does_not_name_is_refused(cluster: FakeLink, at: Any) -> None:
    at(task_of(0, run=""))
    with pytest.raises(WriteRefused, match="which run of it"):
        StreamWriter(options_of()).write(iter([rows_of(b"x")]))


def test_at_least_once_publishes_from_the_task(cluster: FakeLink, at: Any) -> None:
    at(task_of(0))
    cluster.reliable = False
    writer = StreamWriter(options_of(delivery="atLeastOnce"))
    message = writer.write(iter([rows_of(b"a", b"b"), rows_of(b"c")]))
    assert sorted(payload for payloads in cluster.published.values() for payload in payloads) == [
        b"a",
        b"b",
        b"c",
    ]
    writer.commit([message], 7)
    writer.abort([message, None], 7)
    assert not cluster.commits
    assert not cluster.staged


def test_a_topic_that_is_missing_is_created(cluster: FakeLink, at: Any) -> None:
    at(task_of(0))
    cluster.is_missing = True
    assert StreamWriter(options_of()).write(iter([rows_of(b"x")])).sections


def test_a_topic_that_keeps_nothing_is_refused_for_exactly_once(cluster: FakeLink, at: Any) -> None:
    at(task_of(0))
    cluster.reliable = False
    with pytest.raises(WriteRefused, match=f"topic {TOPIC} keeps no messages.* delivery to atLeastOnce"):
        StreamWriter(options_of()).write(iter([rows_of(b"x")]))


# -- what is left in the store -----------------------------------------------------------------


def test_abort_removes_what_was_staged_when_a_task_is_missing(cluster: FakeLink, at: Any) -> None:
    at(task_of(0))
    writer = StreamWriter(options_of())
    message = writer.write(iter([rows_of(b"x")]))
    other = writer.write(iter([rows_of(b"of another attempt")]))
    writer.abort([message, None], 7)
    assert cluster.staged == set(other.keys), "only this attempt's"


def test_abort_after_a_commit_of_unknown_outcome_removes_nothing(cluster: FakeLink, at: Any) -> None:
    """commit  decided by the brokers, the answer is lost
    abort   Spark calls it with the messages of all tasks
    brokers read what was staged, to publish what was decided"""
    at(task_of(0))
    writer = StreamWriter(options_of())
    messages: list[Any] = [writer.write(iter([rows_of(b"x")]))]
    cluster.error = Unavailable("no answer")
    with pytest.raises(OutcomeUnknown, match=r"batch 7 of writer q: it is unknown whether .*: no answer"):
        writer.commit(messages, 7)
    writer.abort(messages, 7)
    assert cluster.staged == set(messages[0].keys)


def test_parts_of_a_batch_that_was_decided_before_are_removed(cluster: FakeLink, at: Any) -> None:
    at(task_of(0))
    writer = StreamWriter(options_of())
    cluster.answer = pb.CommitResponse(decided_now=False)
    writer.commit([writer.write(iter([rows_of(b"x")]))], 7)
    assert not cluster.staged


def test_a_task_that_fails_leaves_nothing_in_the_store(
    cluster: FakeLink, at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(task_of(0))
    monkeypatch.setattr(module, "TaskStage", partial(TaskStage, object_bytes=1))
    monkeypatch.setattr(module, "Batcher", partial(Batcher, batch_bytes=1))

    def failing() -> Iterator[Any]:
        for number in range(5):
            yield rows_of(b"%d" % number)
        assert cluster.staged
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        StreamWriter(options_of()).write(failing())
    assert not cluster.staged


def test_a_store_that_is_gone_does_not_hide_why_the_query_ended(
    cluster: FakeLink, at: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at(task_of(0))
    writer = StreamWriter(options_of())
    message = writer.write(iter([rows_of(b"x")]))

    def delete(self: Any, keys: Any) -> None:
        raise Unavailable("the store is gone")

    monkeypatch.setattr(Objects, "delete", delete)
    writer.abort([message, None], 7)


# -- refusals ----------------------------------------------------------------------------------


def test_a_refused_commit_names_writer_and_batch(cluster: FakeLink, at: Any) -> None:
    at(task_of(0))
    writer = StreamWriter(options_of())
    cluster.error = Refused("run r1 was followed by run r2", "writer_fenced")
    with pytest.raises(WriteRefused) as refused:
        writer.commit([writer.write(iter([rows_of(b"x")]))], 7)
    assert str(refused.value) == "batch 7 of writer q is not published: run r1 was followed by run r2"


# -- batch writes ------------------------------------------------------------------------------


def test_a_job_is_its_own_writer(cluster: FakeLink, at: Any) -> None:
    at(SparkTask(0, 0, "", "", 0))
    for _ in range(2):
        writer = pickle.loads(pickle.dumps(BatchWriter(options_of(stream=False))))
        writer.commit([writer.write(iter([rows_of(b"x")]))])
    first, second = cluster.commits
    assert first.writer != second.writer
    assert first.writer.startswith("spark-job-")
    assert (first.query, first.batch) == ("", 0)
    assert first.run


@pytest.mark.parametrize("query", ["", "q"])
def test_a_named_batch_keeps_its_number_in_every_job(cluster: FakeLink, at: Any, query: str) -> None:
    """Inside of foreachBatch the query and its run are known; outside a job is a run, and the
    writer is the query."""
    at(SparkTask(0, 0, query, "r1" if query else "", 0))
    for _ in range(2):
        writer = BatchWriter(options_of(stream=False, writerId="w", batchId="12"))
        writer.commit([writer.write(iter([rows_of(b"x")]))])
    first, second = cluster.commits
    assert (
        (first.writer, first.batch, first.query)
        == ("w", 12, query or "w")
        == (second.writer, second.batch, second.query)
    )
    assert (first.run == second.run == "r1") if query else (first.run != second.run)


def test_a_jobs_abort_follows_the_same_rule(cluster: FakeLink, at: Any) -> None:
    at(SparkTask(0, 0, "", "", 0))
    writer = BatchWriter(options_of(stream=False))
    message = writer.write(iter([rows_of(b"x")]))
    writer.abort([message])
    assert cluster.staged
    writer.abort([message, None])
    assert not cluster.staged
