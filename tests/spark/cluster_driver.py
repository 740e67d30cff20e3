"""A Spark program for a cluster, with a trap in its source: the first task that has read something waits
there.

    sava spark submit --master … tests/spark/cluster_driver.py read TOPIC
    sava spark submit --master … tests/spark/cluster_driver.py copy TOPIC TARGET CHECKPOINT

The directory of the trap is in ``SAVA_TRAP``; without it there is none. Who is caught leaves the file
``reached`` there, with the process id of its executor, and waits for the file ``release``. The last line that
is printed is the result, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.sql import functions as sql
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from pyspark_sava import DefaultSource
from tests.spark.processes import parent_of

WAIT_S = 120.0


def trapped(batches: Iterator[Any]) -> Iterator[Any]:
    for number, batch in enumerate(batches):
        yield batch
        if number == 0 and (place := os.environ.get("SAVA_TRAP")):
            _wait_in(Path(place))


def _wait_in(place: Path) -> None:
    # A Python worker is a child of Python's daemon, and that one is a child of the executor.
    executor = parent_of(os.getppid())
    try:
        (place / "caught").touch(exist_ok=False)
    except FileExistsError:
        return
    (place / "draft").write_text(str(executor))
    (place / "draft").rename(place / "reached")
    deadline = time.monotonic() + WAIT_S
    while not (place / "release").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody released {place}")
        time.sleep(0.02)


class TrappedReader(DataSourceReader):
    def __init__(self, inner: DataSourceReader) -> None:
        self._inner = inner

    def partitions(self) -> Any:
        return self._inner.partitions()

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return trapped(self._inner.read(partition))


class TrappedStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def initialOffset(self) -> Any:  # noqa: N802
        return self._inner.initialOffset()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        limit: ReadLimit = self._inner.getDefaultReadLimit()
        return limit

    def latestOffset(self, start: Any, limit: ReadLimit) -> Any:  # noqa: N802
        return self._inner.latestOffset(start, limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._inner.prepareForTriggerAvailableNow()

    def partitions(self, start: Any, end: Any) -> Any:
        return self._inner.partitions(start, end)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return trapped(self._inner.read(partition))

    def commit(self, end: Any) -> None:
        self._inner.commit(end)


class TrappedSource(DefaultSource):
    @classmethod
    def name(cls) -> str:
        return "sava-trapped"

    def reader(self, schema: StructType) -> Any:
        return TrappedReader(super().reader(schema))

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802
        return TrappedStream(super().streamReader(schema))


def read(spark: SparkSession, topic: str) -> dict[str, Any]:
    """Every message by its place, and how many executors have worked on it."""
    executor = sql.udf(lambda offset: parent_of(os.getppid()), "int")
    rows = (
        spark.read.format("sava-trapped")
        .schema("partition int, offset bigint, payload binary")
        .options(topic=topic, minPartitions=8)
        .load()
        .withColumn("executor", executor("offset"))
    )
    found = rows.agg(
        sql.count("*").alias("rows"),
        sql.countDistinct("partition", "offset").alias("places"),
        sql.countDistinct("payload").alias("payloads"),
        sql.countDistinct("executor").alias("executors"),
    ).first()
    assert found is not None
    return found.asDict()


def copy(spark: SparkSession, topic: str, target: str, checkpoint: str) -> dict[str, Any]:
    query = (
        spark.readStream.format("sava-trapped")
        .options(topic=topic, startingOffsets="earliest", maxMessagesPerTrigger=3000)
        .load()
        .select("key", "payload")
        .writeStream.format("sava")
        .options(topic=target, checkpointLocation=checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return {"batches": len(query.recentProgress)}


def main() -> None:
    job, *arguments = sys.argv[1:]
    spark = SparkSession.builder.appName("cluster driver").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(TrappedSource)
    jobs: dict[str, Callable[..., object]] = {"read": read, "copy": copy}
    result = jobs[job](spark, *arguments)
    print(json.dumps(result), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
