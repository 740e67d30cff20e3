"""Join: a stream with a table. Orders in, orders with the price of what was ordered out.

    printf 'tea\\n' | sava produce /default/orders
    sava spark submit examples/spark/join.py --checkpoint /var/tmp/join

The table of prices is a topic too: its key is the item, its payload the price, and the last message of a key
is the one that counts. It is read when the program starts. An order of something without a price goes out
without.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql


def last_of_each_key(messages: DataFrame) -> DataFrame:
    """The table that a topic of changes stands for. A key is always in one partition, where offsets grow."""
    return messages.groupBy("key").agg(sql.max_by("payload", "offset").alias("payload"))


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    service = {"service": options.service} if options.service else {}
    spark = SparkSession.builder.appName("orders with prices").getOrCreate()
    changes = spark.read.format("sava").options(**service, topic=options.table).load()
    prices = (
        last_of_each_key(changes)
        .select(sql.col("key").alias("item"), sql.decode("payload", "UTF-8").cast("double").alias("price"))
        .cache()
    )
    orders = (
        spark.readStream.format("sava")
        .options(**service, topic=options.source, startingOffsets="earliest")
        .load()
        .select("key", sql.decode("payload", "UTF-8").alias("item"))
    )
    priced = orders.join(sql.broadcast(prices), "item", "left").select(
        "key", sql.to_json(sql.struct("item", "price")).alias("payload")
    )
    trigger = {"availableNow": True} if options.once else {"processingTime": "1 second"}
    query = (
        priced.writeStream.format("sava")
        .options(**service, topic=options.target, checkpointLocation=options.checkpoint)
        .trigger(**trigger)
        .start()
    )
    query.awaitTermination()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Add prices to orders.")
    parser.add_argument("--service", help="client address of a broker")
    parser.add_argument("--source", default="/default/orders", help="topic of orders")
    parser.add_argument("--table", default="/default/prices", help="topic of prices, the item as key")
    parser.add_argument("--target", default="/default/priced-orders", help="topic of orders with prices")
    parser.add_argument("--checkpoint", required=True, help="directory that all machines of the job see")
    parser.add_argument(
        "--once", action="store_true", help="end when all orders that are there now are priced"
    )
    return parser


if __name__ == "__main__":
    main()
