"""Writers: the sink as Spark calls it.

    planner    makes a writer: options and columns are checked without a call to the cluster
    executors  ``write``, once for each attempt of a task: routes, encodes, stages or publishes its rows
    driver     ``commit`` with the results of the tasks, or ``abort``

These are different processes. Each makes its own writer of a stream, so everything that the commit must know
comes with the tasks' messages: the query, its run, what was staged. Spark hands query and run to executors as
properties of the thread that runs the query. The query's id comes from the checkpoint and survives restarts;
the run's id is new with every start and tells two drivers on one checkpoint apart.

The check of columns happens in the planner, not at the first row. A column without a place in a message is
refused: ignored, it would be data that is lost silently.

**Exactly once.** Tasks stage; no reader sees the data. The commit names the staged parts to the brokers
together with writer, run and batch, and the brokers publish a batch of a writer once, however often it is
committed:

    driver dies before the commit    Spark repeats the batch after the restart; what was staged expires
    in it, or its answer is lost     the brokers finish the batch; the repeated one changes nothing
    after it                         the same
    a second driver on the           has another run; with its first commit the earlier run is refused
      same checkpoint                from then on

**Abort** removes what was staged only if a task is missing. Spark also calls it after a commit that failed,
and a commit that failed here may have been decided there: the brokers then need what was staged.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, NamedTuple

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from sava.client.errors import ClientError, OutcomeUnknown, Refused, TopicUnknown
from sava.errors import SavaError
from sava.pipeline.cluster import ClusterClient, Objects, TopicPartitions
from sava.pipeline.errors import WriteRefused
from sava.pipeline.options import SinkOptions
from sava.pipeline.sink.routing import (
    PUBLISH_WAITING_BYTES,
    WAITING_BYTES,
    Batcher,
    Emit,
    RowRouter,
    TaskPublisher,
    TaskStage,
)
from sava.proto import writers_pb2 as pb
from sava.records import Compression

log = logging.getLogger(__name__)

_TEXT: Final = (StringType, BinaryType)
_WHOLE: Final = (ByteType, ShortType, IntegerType)

_ACCEPTED: Final[dict[str, tuple[str, tuple[type[DataType], ...]]]] = {
    "payload": ("binary or string", _TEXT),
    "key": ("string, or binary that is UTF-8", _TEXT),
    "attributes": ("map<string,string>", (MapType,)),
    "topic": ("string", (StringType,)),
    "partition": ("int", _WHOLE),
    "publish_time": ("timestamp", (TimestampType,)),
    "origin_cluster": ("string", (StringType,)),
    "origin_offset": ("bigint", (*_WHOLE, LongType)),
    "schema_id": ("bigint", (*_WHOLE, LongType)),
    "schema_version": ("int", _WHOLE),
}


def check_columns(schema: StructType, topic: str) -> None:
    """Check the columns of the rows. ``topic`` is the option, or empty. Raises WriteRefused."""
    names = schema.fieldNames()
    for field in schema.fields:
        if field.name not in _ACCEPTED or names.count(field.name) > 1:
            raise WriteRefused(
                f'format("sava"): column {field.name} cannot be written; rows have payload and, if wanted,'
                f" {', '.join(name for name in _ACCEPTED if name != 'payload')}, each once"
            )
        wanted, types = _ACCEPTED[field.name]
        if not isinstance(field.dataType, types) or not _is_text_map(field.dataType):
            raise WriteRefused(
                f'format("sava"): column {field.name} is {field.dataType.simpleString()}: {wanted} is needed'
            )
    if "payload" not in names:
        raise WriteRefused('format("sava"): rows to be written need a column payload, binary or string')
    if not topic and "topic" not in names:
        raise WriteRefused(
            'format("sava"): nothing says where to: set the option topic, or add a column topic'
        )
    if ("origin_cluster" in names) != ("origin_offset" in names):
        raise WriteRefused(
            'format("sava"): origin_cluster and origin_offset go together; one of them is missing'
        )


def _is_text_map(kind: DataType) -> bool:
    """False for a map with other types than text; True for any other type."""
    return not isinstance(kind, MapType) or (
        isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
    )


_QUERY = "sql.streaming.queryId"
_RUN = "spark.jobGroup.id"
_BATCH = "streaming.sql.batchId"


class SparkTask(NamedTuple):
    """The task that runs, and the streaming query that it belongs to."""

    partition: int
    attempt: int
    query: str
    """Empty outside of a streaming query."""
    run: str
    """Empty outside of a streaming query."""
    batch: int
    """The batch of the streaming query; 0 outside of one."""

    @classmethod
    def current(cls) -> SparkTask:
        context = TaskContext.get()
        assert context is not None, "outside of a Spark task"
        query = context.getLocalProperty(_QUERY) or ""
        return cls(
            partition=context.partitionId(),
            attempt=context.attemptNumber(),
            query=query,
            run=(context.getLocalProperty(_RUN) or "") if query else "",
            batch=int(context.getLocalProperty(_BATCH) or 0) if query else 0,
        )


_CODECS: Final = {"none": Compression.NONE, "lz4": Compression.LZ4, "zstd": Compression.ZSTD}


@dataclass(frozen=True, slots=True)
class TaskOutput(WriterCommitMessage):
    """The result of a task for the commit."""

    partition: int
    query: str
    run: str
    store_url: str
    sections: tuple[pb.Section, ...]

    @property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(section.key for section in self.sections))


class _Sink:
    """The common part of both writers. It is pickled and holds only values."""

    _advice = "start the query again: it writes the batch again, and it is there once"
    """The way out when the outcome of a commit is unknown."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    # -- on executors ----------------------------------------------------------------------

    def _write(self, batches: Iterator[Any], task: SparkTask, writer: str) -> TaskOutput:
        filled = (rows for rows in batches if rows.num_rows)
        first = next(filled, None)
        if first is None:
            # No call to the cluster: an idle stream costs it nothing.
            return TaskOutput(task.partition, task.query, task.run, "", ())
        cluster = ClusterClient.of(self._options.access)
        router = RowRouter(
            lambda topic: self._parts(cluster, topic),
            topic=self._options.topic,
            first=task.partition + task.batch,
        )
        rows = chain((first,), filled)
        if not self._options.exactly_once:
            self._publish(router, rows, cluster)
            return TaskOutput(task.partition, task.query, task.run, "", ())
        where = cluster.staging(writer)
        stage = TaskStage(where, f"{task.batch}-{task.partition}-{task.attempt}")
        sections = self._stage(router, rows, where, stage)
        return TaskOutput(task.partition, task.query, task.run, where.store_url, sections)

    def _stage(
        self, router: RowRouter, rows: Iterable[Any], where: pb.StagingResponse, stage: TaskStage
    ) -> tuple[pb.Section, ...]:
        try:
            _feed(router, self._batcher(stage.add, WAITING_BYTES), rows)
            return tuple(stage.finish())
        except BaseException:
            _forget(where.store_url, stage.abandon())
            raise

    def _publish(self, router: RowRouter, rows: Iterable[Any], cluster: ClusterClient) -> None:
        with TaskPublisher(cluster.publisher) as publisher:
            _feed(router, self._batcher(publisher.add, PUBLISH_WAITING_BYTES), rows)
            publisher.finish()

    def _batcher(self, emit: Emit, waiting_bytes: int) -> Batcher:
        return Batcher(emit, codec=_CODECS[self._options.compression], waiting_bytes=waiting_bytes)

    def _parts(self, cluster: ClusterClient, topic: str) -> TopicPartitions:
        try:
            parts = cluster.partitions(topic)
        except TopicUnknown:
            parts = cluster.partitions(topic, create=True)
        if self._options.exactly_once and not parts.reliable:
            raise WriteRefused(
                f"topic {topic} keeps no messages, so they cannot be published exactly once:"
                " set the option delivery to atLeastOnce, or write to a reliable topic"
            )
        return parts

    # -- on the driver ---------------------------------------------------------------------

    def _commit(self, writer: str, run: str, query: str, batch: int, parts: Sequence[TaskOutput]) -> None:
        sections = [section for part in parts for section in part.sections]
        if not sections:
            return
        request = pb.CommitRequest(writer=writer, run=run, query=query, batch=batch, sections=sections)
        try:
            answer = ClusterClient.of(self._options.access).commit(request)
        except Refused as error:
            raise WriteRefused(f"batch {batch} of writer {writer} is not published: {error}") from None
        except ClientError as error:
            raise OutcomeUnknown(
                f"batch {batch} of writer {writer}: it is unknown whether it is published; {self._advice}:"
                f" {error}",
                error.code,
            ) from None
        if not answer.decided_now:
            # An earlier commit has published the batch. These parts are a second copy, or gone already.
            for part in parts:
                _forget(part.store_url, part.keys)

    def _abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        if None in messages:
            for part in _parts_of(messages):
                _forget(part.store_url, part.keys)


class BatchWriter(_Sink, DataSourceArrowWriter):
    """The writer of one job. The job is its own writer unless the options name a writer and a batch: then any
    number of jobs can write the same batch, and it is published once."""

    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options)
        self._job = f"spark-job-{uuid.uuid4()}"
        if options.writer_id:
            self._advice = "write the same batch again, and it is there once"
        else:
            self._advice = "`sava writers list` shows it if it is, or will be"

    @property
    def _writer(self) -> str:
        return self._options.writer_id or self._job

    def write(self, iterator: Iterator[Any]) -> TaskOutput:
        return self._write(iterator, SparkTask.current(), self._writer)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        parts = _parts_of(messages)
        if parts:
            # Inside of foreachBatch the query tells batches of different queries apart. Brokers soon forget a
            # writer without a query: right for a job that is its own writer, wrong for a named one.
            named = self._options.writer_id
            query = (parts[0].query or named) if named else ""
            self._commit(self._writer, parts[0].run or self._job, query, self._options.batch_id or 0, parts)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        self._abort(messages)


class StreamWriter(_Sink, DataSourceStreamArrowWriter):
    """The writer of a stream. Its id is the query's unless the options name a writer."""

    def write(self, iterator: Iterator[Any]) -> TaskOutput:
        task = SparkTask.current()
        if not (task.query and task.run):
            raise WriteRefused(
                "Spark does not say which streaming query this is a task of, and which run of it:"
                " its batches could be published twice"
            )
        return self._write(iterator, task, self._writer(task.query))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        parts = _parts_of(messages)
        if parts:
            query, run = parts[0].query, parts[0].run
            self._commit(self._writer(query), run, query, batchId, parts)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._abort(messages)

    def _writer(self, query: str) -> str:
        return self._options.writer_id or query


def _feed(router: RowRouter, batcher: Batcher, batches: Iterable[Any]) -> None:
    for rows in batches:
        for name, part in router.route(rows):
            batcher.add(name, part)
    batcher.flush()


def _parts_of(messages: Sequence[WriterCommitMessage | None]) -> list[TaskOutput]:
    """The results in the order of Spark's partitions, which is the order of sorted rows."""
    parts = [message for message in messages if isinstance(message, TaskOutput)]
    return sorted(parts, key=lambda part: part.partition)


def _forget(url: str, keys: Sequence[str]) -> None:
    """Delete staged objects that no commit names. They would expire anyway, so a failure is only logged."""
    if keys:
        try:
            Objects.of(url).delete(keys)
        except SavaError as error:
            log.info("sink: staged objects are left to expire: %s", error)
