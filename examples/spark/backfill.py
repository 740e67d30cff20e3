"""Backfill, then follow: all of a topic's history into Parquet files, then whatever comes.

    sava spark submit examples/spark/backfill.py --checkpoint /var/tmp/backfill --files /var/tmp/orders

First in batches as large as ``--at-once`` allows, as fast as the machines can, until what was there at the
start is done; then once every few seconds. Both have one checkpoint: each message is in the files once, also
when the program is stopped in the middle and started again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery


def copy(messages: DataFrame, options: argparse.Namespace, **trigger: Any) -> StreamingQuery:
    return (
        messages.writeStream.format("parquet")
        .options(path=options.files, checkpointLocation=options.checkpoint)
        .trigger(**trigger)
        .start()
    )


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    spark = SparkSession.builder.appName("backfill").getOrCreate()
    reader = spark.readStream.format("sava").options(
        topic=options.topic, startingOffsets="earliest", maxMessagesPerTrigger=options.at_once
    )
    if options.service:
        reader = reader.option("service", options.service)
    messages = reader.load()
    copy(messages, options, availableNow=True).awaitTermination()
    if not options.once:
        copy(messages, options, processingTime="10 seconds").awaitTermination()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Copy a topic into Parquet files.")
    parser.add_argument("--service", help="client address of a broker")
    parser.add_argument("--topic", default="/default/orders")
    parser.add_argument("--files", required=True, help="directory of the files")
    parser.add_argument("--at-once", type=int, default=1_000_000, help="messages of a batch, at most")
    parser.add_argument("--checkpoint", required=True, help="directory that all machines of the job see")
    parser.add_argument("--once", action="store_true", help="end when the history is copied")
    return parser


if __name__ == "__main__":
    main()
