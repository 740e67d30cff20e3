"""Windows: visits of pages in, visits of each page per minute out, by the time of the visit.

    echo '{"page": "/tea", "at": "2030-01-01T12:00:03Z"}' | sava produce /default/visits
    sava spark submit examples/spark/windows.py --checkpoint /var/tmp/windows

Visits may come late and out of order. A minute is complete, and is published once, when a visit has come that
is more than ``--late`` younger than its end; what comes for it after that is dropped.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql


def count_visits(messages: DataFrame, late: str) -> DataFrame:
    visit = sql.from_json(sql.decode("payload", "UTF-8"), "page string, at timestamp")
    visits = messages.select(visit.alias("visit")).select("visit.*").where("page is not null")
    window = sql.window("at", "1 minute")
    return visits.withWatermark("at", late).groupBy(window, "page").count()


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    service = {"service": options.service} if options.service else {}
    spark = SparkSession.builder.appName("visits per minute").getOrCreate()
    spark.conf.set("spark.sql.shuffle.partitions", options.tasks)
    messages = (
        spark.readStream.format("sava")
        .options(**service, topic=options.source, startingOffsets="earliest")
        .load()
    )
    counts = count_visits(messages, options.late).select(
        sql.col("page").alias("key"),
        sql.to_json(sql.struct(sql.col("window.start").alias("minute"), "page", "count")).alias("payload"),
    )
    trigger = {"availableNow": True} if options.once else {"processingTime": "5 seconds"}
    query = (
        counts.writeStream.format("sava")
        .options(**service, topic=options.target, checkpointLocation=options.checkpoint)
        .trigger(**trigger)
        .start()
    )
    query.awaitTermination()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Count visits per page and minute.")
    parser.add_argument("--service", help="client address of a broker")
    parser.add_argument("--source", default="/default/visits", help="topic of visits, as JSON")
    parser.add_argument("--target", default="/default/visits-per-minute", help="topic of counts")
    parser.add_argument("--late", default="30 seconds", help="how late a visit may come")
    parser.add_argument("--checkpoint", required=True, help="directory that all machines of the job see")
    parser.add_argument("--tasks", type=int, default=8, help="that count; the checkpoint remembers the first")
    parser.add_argument("--once", action="store_true", help="end when all that is there now is counted")
    return parser


if __name__ == "__main__":
    main()
