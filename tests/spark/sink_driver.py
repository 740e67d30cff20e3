"""A Spark driver in a process of its own, with traps in its sink: what dies, and when, is the test's choice.

    python -m tests.spark.sink_driver plan.json

The plan names streaming queries over a directory of JSON files. Each has a trap, which springs once:

    before   the commit has not been sent
    fenced   the same, in the second batch
    during   the commit is on its way
    after    the commit was answered; Spark does not know it yet
    write    Python workers die in the middle of a task: the first attempt before its rows are staged,
             the second after

A query in a trap leaves the file ``reached`` in its directory and waits for the file ``release``. What became
of each query is left in the file ``outcome``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from sava.pipeline import sink
from sava.pipeline.cluster import ClusterClient
from sava.pipeline.options import SinkOptions
from sava.pipeline.sink.writers import StreamWriter, TaskOutput
from sava.proto import writers_pb2 as pb

WAIT_S = 120.0


def sprung(place: Path) -> bool:
    """Whether the trap has caught somebody already; it has from now on."""
    try:
        (place / "reached").touch(exist_ok=False)
    except FileExistsError:
        return True
    return False


def wait_for_release(place: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not (place / "release").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody released {place}")
        time.sleep(0.02)


class TrappedWriter(StreamWriter):
    def __init__(self, options: SinkOptions, trap: str, place: str) -> None:
        super().__init__(options)
        self._trap = trap
        self._place = place

    def write(self, iterator: Iterator[Any]) -> TaskOutput:
        context = TaskContext.get()
        assert context is not None
        if self._trap == "write" and context.attemptNumber() == 0:
            next(iterator)
            os.kill(os.getpid(), signal.SIGKILL)
        written = super().write(iterator)
        if self._trap == "write" and context.attemptNumber() == 1:
            (Path(self._place) / "reached").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    def commit(self, messages: Any, batchId: int) -> None:  # noqa: N803 (Spark's name)
        traps = {
            "before": self._before,
            "fenced": self._before,
            "during": self._during,
            "after": self._after,
        }
        trap = traps.get(self._trap)
        if trap is None or (self._trap == "fenced" and not batchId) or sprung(Path(self._place)):
            super().commit(messages, batchId)
            return
        commit = ClusterClient.commit

        def trapped(link: ClusterClient, request: pb.CommitRequest) -> pb.CommitResponse:
            return trap(lambda: commit(link, request))

        with mock.patch.object(ClusterClient, "commit", trapped):
            super().commit(messages, batchId)

    def _before(self, commit: Callable[[], pb.CommitResponse]) -> pb.CommitResponse:
        wait_for_release(Path(self._place))
        return commit()

    def _during(self, commit: Callable[[], pb.CommitResponse]) -> pb.CommitResponse:
        threading.Thread(target=commit, daemon=True).start()
        wait_for_release(Path(self._place))
        raise TimeoutError

    def _after(self, commit: Callable[[], pb.CommitResponse]) -> pb.CommitResponse:
        answer = commit()
        (Path(self._place) / "answered").touch()
        wait_for_release(Path(self._place))
        return answer


class TrappedSava(DataSource):
    @classmethod
    def name(cls) -> str:
        return "trapped"

    def streamWriter(self, schema: StructType, overwrite: bool) -> TrappedWriter:  # noqa: N802 (Spark's name)
        options = dict(self.options)
        trap, place = options.pop("trap"), options.pop("place")
        sink.stream_writer(options, schema, overwrite)
        return TrappedWriter(SinkOptions.parse(options, stream=True), trap, place)


def follow(query: StreamingQuery, place: Path) -> None:
    try:
        query.awaitTermination()
        outcome = "done"
    except Exception as error:  # noqa: BLE001 (whatever it is, the test reads it)
        outcome = str(error)
    written = place / "outcome.part"
    written.write_text(outcome)
    written.rename(place / "outcome")


def start_query(
    spark: SparkSession, plan: dict[str, Any], *, to: str = "sava", **options: str
) -> StreamingQuery:
    """Rows of JSON files to a topic, a file in each batch, until all are written."""
    rows = (
        spark.readStream.schema("payload string, key string")
        .option("maxFilesPerTrigger", 1)
        .json(plan["input"])
    )
    writing = rows.writeStream.format(to).option("checkpointLocation", plan["checkpoint"])
    for name, value in {**plan["options"], **options}.items():
        writing = writing.option(name, value)
    return writing.trigger(availableNow=True).start()


def main(path: str) -> None:
    plans = json.loads(Path(path).read_text())
    builder = SparkSession.builder.master("local[2,3]").appName("sink driver")
    for name, value in plans["conf"].items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.dataSource.register(TrappedSava)
    threads = []
    for plan in plans["queries"]:
        query = start_query(spark, plan, to="trapped", trap=plan["trap"], place=plan["place"])
        threads.append(threading.Thread(target=follow, args=(query, Path(plan["place"]))))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
