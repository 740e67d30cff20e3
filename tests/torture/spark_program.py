"""A Spark driver whose streaming query writes numbers to a topic, exactly once, while brokers and the object
store fail under it. A query that has failed begins again at its checkpoint, as a runner would have it.

python -m tests.torture.spark_program DIRECTORY TOPIC SERVICES [CA CERT KEY]

It runs until it reads a line from its standard input. What Spark has committed by then was acknowledged: it
must be in the topic, each number once and in order; so may be what follows it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from tests.torture.history import Acked, Recorder, Unsent

NAME: Final = "spark"
ROWS_PER_S: Final = 20
BEYOND: Final = 120 * ROWS_PER_S
"""Numbers that may be in the topic though Spark has not committed them: those of the last batch."""


def start(spark: SparkSession, directory: Path, options: dict[str, str]) -> StreamingQuery:
    rows = spark.readStream.format("rate").options(rowsPerSecond=ROWS_PER_S, numPartitions=1).load()
    return (
        rows.selectExpr(f"concat('{NAME} ', cast(value as string)) as payload")
        .writeStream.format("sava")
        .options(**options, checkpointLocation=str(directory / "spark" / "checkpoint"))
        .trigger(processingTime="1 second")
        .start()
    )


def committed(directory: Path) -> int:
    """Rows of all batches that Spark has committed: the source's offset is in seconds."""
    commits = {int(path.name) for path in (directory / "spark/checkpoint/commits").glob("[0-9]*")}
    if not commits:
        return 0
    offsets = directory / "spark/checkpoint/offsets" / str(max(commits))
    return int(offsets.read_text().splitlines()[-1]) * ROWS_PER_S


def main() -> None:
    place, topic, services, *files = sys.argv[1:]
    directory = Path(place)
    options = {"topic": topic, "service": services, "timeout": "20"}
    options |= dict(zip(("tlsCa", "tlsCert", "tlsKey"), files, strict=False))
    # The JVM starts Python by name, and would take another one than this.
    os.environ |= {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    spark = (
        SparkSession.builder.master("local[1]")
        .config("spark.driver.memory", "512m")
        .config("spark.ui.enabled", "false")
        .config("spark.local.dir", str(directory / "spark" / "local"))
        .config("spark.sql.warehouse.dir", str(directory / "spark" / "warehouse"))
        .getOrCreate()
    )
    is_over = threading.Event()

    def wait_for_order() -> None:
        sys.stdin.readline()
        is_over.set()

    threading.Thread(target=wait_for_order, daemon=True).start()
    query = start(spark, directory, options)
    restarts = 0
    while not is_over.wait(0.5):
        if not query.isActive:
            print(f"the query has ended: {query.exception()}", flush=True)
            restarts += 1
            query = start(spark, directory, options)
    try:
        query.stop()
    except PySparkException as error:
        print(f"the query did not stop: {error}", flush=True)
    count = committed(directory)
    recorder = Recorder(directory / "spark.jsonl")
    for number in range(count):
        recorder.add(Acked(time.monotonic(), topic, NAME, number, -1))
    for number in range(count, count + BEYOND):
        recorder.add(Unsent(time.monotonic(), topic, NAME, number, True, "under way"))
    recorder.close()
    print(f"{count} rows committed, {restarts} restarts", flush=True)
    os._exit(0 if count else 1)


if __name__ == "__main__":
    main()
