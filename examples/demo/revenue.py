"""Revenue: one Spark query over all that a topic has kept.

    sava spark submit --service 127.0.0.1:6650 examples/demo/revenue.py /default/orders

Executors read history straight from the Parquet segments in the object store, and the rest from brokers.
Where one ends and the other begins is not seen.
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import SparkSession


def main(topic: str) -> None:
    spark = SparkSession.builder.appName("revenue").getOrCreate()
    orders = spark.read.format("sava").schema("offset bigint, payload binary").option("topic", topic).load()
    orders = orders.selectExpr("offset", "from_json(string(payload), 'order bigint, cents bigint') as sold")
    [found] = orders.selectExpr(
        "count(*) as orders", "count_if(sold.order <> offset) as misplaced", "sum(sold.cents) as cents"
    ).collect()
    print(json.dumps(found.asDict()))
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1])
