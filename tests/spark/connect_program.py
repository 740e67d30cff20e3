"""A program on Spark Connect: no session of Spark in this process, only a client of one in another.

python -m tests.spark.connect_program SERVICE TOPIC TARGET CHECKPOINT
"""

from __future__ import annotations

import json
import sys

from pyspark.sql import DataFrame, SparkSession

SETTINGS = {
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.connect.grpc.binding.address": "127.0.0.1",
}


def main() -> None:
    service, topic, target, checkpoint = sys.argv[1:]
    builder = SparkSession.builder.remote("local[2]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    messages = spark.read.format("sava").options(service=service, topic=topic).load()
    result = {"kind": type(spark).__module__, "rows": messages.count()}
    stream = spark.readStream.format("sava").options(service=service, topic=topic, startingOffsets="earliest")
    query = (
        stream.load()
        .select("key", "payload")
        .writeStream.format("sava")
        .options(service=service, topic=target, checkpointLocation=f"{checkpoint}/sink")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()

    def publish(batch: DataFrame, number: int) -> None:
        batch.select("key", "payload").write.format("sava").mode("append").options(
            service=service, topic=f"{target}-2", writerId="connected", batchId=number
        ).save()

    query = (
        stream.load()
        .writeStream.foreachBatch(publish)
        .option("checkpointLocation", f"{checkpoint}/batches")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    print(json.dumps(result), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
