"""Spark through PySpark: ``python -m bench.workers.spark SERVICE MASTER FOLDER``.

What is read goes to ``noop``, Spark's sink that takes every row and does nothing with it. The bare source is
the least that a streaming source in Python can be; whatever Sava's takes more than it is Sava's own.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlparse

import pyarrow as pa
import uvloop
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from bench.spark_cluster import surroundings
from bench.workers import SIZE, serve
from sava.pipeline.cluster import ClusterAccess, ClusterClient

TINY: Final = 20
"""Rows of a tiny batch."""
WARM_BATCHES: Final = 5
QUERY_TIMEOUT_S: Final = 90.0
STORED_TIMEOUT_S: Final = 90.0

_numbers = itertools.count()


@dataclass
class BareRange(InputPartition):
    start: int
    end: int


class BareStream(DataSourceStreamReader):
    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"0": 0}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(TINY)

    def latestOffset(self, start: Any, limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        return {"0": start["0"] + TINY}

    def partitions(self, start: Any, end: Any) -> list[InputPartition]:
        return [BareRange(start["0"], end["0"])]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, BareRange)
        offsets = range(partition.start, partition.end)
        yield pa.RecordBatch.from_arrays(
            [pa.array(offsets, pa.int64()), pa.array([bytes(SIZE)] * len(offsets), pa.binary())],
            names=["offset", "payload"],
        )


class BareSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "bare"

    def schema(self) -> str:
        return "offset bigint, payload binary"

    def streamReader(self, schema: StructType) -> BareStream:  # noqa: N802
        return BareStream()


class Jobs:
    def __init__(self, service: str, master: str, folder: Path) -> None:
        self._service = service
        self._folder = folder
        self._spark = (
            SparkSession.builder.master(master)
            .appName("sava bench")
            .config("spark.driver.memory", "2g")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.executor.memory", "1g")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.local.dir", str(folder / "spark"))
            .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
            .getOrCreate()
        )
        self._spark.sparkContext.setLogLevel("ERROR")
        self._spark.dataSource.register(BareSource)

    def close(self) -> None:
        """Before this process ends, and Java with it: the folder is removed then."""
        self._spark.stop()

    async def stored(self, topic: str) -> dict[str, Any]:
        """The files that hold the topic, once all of it is in them."""
        link = ClusterClient.of(ClusterAccess(self._service))
        deadline = time.monotonic() + STORED_TIMEOUT_S
        while (extent := link.extents([topic])[topic]).stored < extent.end:
            assert time.monotonic() < deadline, f"{extent.end - extent.stored} messages are not in segments"
            await asyncio.sleep(0.2)
        found = link.segments(topic, 0)
        root = urlparse(found.store_url).path
        return {"files": [f"{root}/{segment.key}" for segment in found.segments]}

    # -- batches ----------------------------------------------------------------------------

    async def read(self, topic: str, rows: int, columns: str = "") -> dict[str, Any]:
        return _timed(rows, lambda: _drain(self._topic(topic, columns)))

    async def native(self, files: list[str], rows: int, column: str = "") -> dict[str, Any]:
        """Spark's own reader on the same files."""
        found = self._spark.read.parquet(*files)
        return _timed(rows, lambda: _drain(found.select(column) if column else found))

    async def churn(self, topic: str, rows: int) -> dict[str, Any]:
        """Work for the processor: each payload is hashed many times."""
        hashed = "payload"
        for _ in range(8):
            hashed = f"sha2({hashed}, 512)"
        found = self._topic(topic, "payload binary", minPartitions="8")
        return _timed(rows, lambda: found.selectExpr(f"max({hashed})").collect())

    async def write(self, topic: str, rows: int, delivery: str) -> dict[str, Any]:
        made = self._spark.range(0, rows, 1, 2).selectExpr(f"lpad(string(id), {SIZE}, '0') as payload")
        writer = made.write.format("sava").options(service=self._service, topic=topic, delivery=delivery)
        return _timed(rows, lambda: writer.mode("append").save())

    def _topic(self, topic: str, columns: str, **options: str) -> DataFrame:
        reader = self._spark.read.format("sava").options(service=self._service, topic=topic, **options)
        return (reader.schema(columns) if columns else reader).load()

    # -- streams ----------------------------------------------------------------------------

    async def stream(self, topic: str, rows: int) -> dict[str, Any]:
        """All of it in two triggers. The time is that of the triggers, without that of starting a query."""
        options = {"topic": topic, "service": self._service, "maxMessagesPerTrigger": str(rows // 2)}
        source = self._spark.readStream.format("sava").options(startingOffsets="earliest", **options)
        query = self._start(source.load(), availableNow=True)
        query.awaitTermination(QUERY_TIMEOUT_S)
        done = [each for each in query.recentProgress if each["numInputRows"]]
        count = sum(each["numInputRows"] for each in done)
        assert count == rows, f"{count} rows instead of {rows}"
        return {"count": count, "seconds": sum(map(_seconds, done))}

    async def tiny(self, batches: int, topic: str = "") -> dict[str, Any]:
        """One tiny batch after the other, from the topic or from the bare source."""
        if topic:
            options = {"topic": topic, "service": self._service, "maxMessagesPerTrigger": str(TINY)}
            reader = self._spark.readStream.format("sava").options(startingOffsets="earliest", **options)
            reader = reader.schema("offset bigint, payload binary")
        else:
            reader = self._spark.readStream.format("bare")
        query = self._start(reader.load(), processingTime="0 seconds")
        deadline = time.monotonic() + QUERY_TIMEOUT_S
        while len(query.recentProgress) < batches + WARM_BATCHES:
            assert time.monotonic() < deadline and query.isActive, f"too slow: {query.status}"  # noqa: PT018
            await asyncio.sleep(0.1)
        query.stop()
        done = [each for each in query.recentProgress if each["numInputRows"]][WARM_BATCHES:]
        latencies = [_seconds(each) for each in done]
        return {"count": len(done), "seconds": sum(latencies), "latencies": latencies}

    def _start(self, frame: DataFrame, **trigger: Any) -> Any:
        checkpoint = self._folder / f"checkpoint-{next(_numbers)}"
        return (
            frame.writeStream.format("noop")
            .option("checkpointLocation", str(checkpoint))
            .trigger(**trigger)
            .start()
        )


def _drain(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _timed(rows: int, work: Any) -> dict[str, Any]:
    began = time.perf_counter()
    work()
    return {"count": rows, "seconds": time.perf_counter() - began}


def _seconds(progress: Any) -> float:
    return float(progress["durationMs"]["triggerExecution"]) / 1000


def main() -> None:
    os.environ |= surroundings()
    jobs = Jobs(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    try:
        uvloop.run(serve(jobs))
    finally:
        jobs.close()


if __name__ == "__main__":
    main()
