"""History: SQL over everything that a topic has kept.

    sava spark submit examples/spark/history.py --topic /default/orders --since 2030-01-01T00:00:00Z
    sava spark submit examples/spark/history.py "select key, count(*) from messages group by key"

Spark reads what is in segments straight from the object store, in parallel, and only the rest from brokers. A
query that names its columns in ``--columns`` reads only those.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pyspark.sql import SparkSession

PER_HOUR = """
select date_trunc('hour', publish_time) as hour, partition, count(*) as messages, min(offset) as first
from messages group by all order by hour, partition"""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    spark = SparkSession.builder.appName("history").getOrCreate()
    reader = spark.read.format("sava").option("topic", options.topic)
    for name, value in (("service", options.service), ("startingTimestamp", options.since)):
        if value:
            reader = reader.option(name, value)
    if options.columns:
        reader = reader.schema(options.columns)
    reader.load().createOrReplaceTempView("messages")
    spark.sql(options.query).show(options.rows, truncate=False)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Ask a topic in SQL; it is the table `messages`.")
    parser.add_argument("query", nargs="?", default=PER_HOUR, help="in SQL (default: messages per hour)")
    parser.add_argument("--service", help="client address of a broker")
    parser.add_argument("--topic", default="/default/orders")
    parser.add_argument("--since", help="only what was published since, such as 2030-01-01T00:00:00Z")
    parser.add_argument("--columns", help='read only these, such as "key string, publish_time timestamp"')
    parser.add_argument("--rows", type=int, default=100, help="show so many rows of the result")
    return parser


if __name__ == "__main__":
    main()
