"""Word count: lines of text in, the number of times that each word has come out, kept up to date.

    sava produce /default/lines < README.md
    sava spark submit examples/spark/wordcount.py --checkpoint /var/tmp/wordcount --once
    sava consume /default/words --subscription me --start earliest

Each message of the output has the word as its key and the count as its payload; the last message of a word is
right. A stream that changes what it has said ("update") is written batch by batch: ``writerId`` and
``batchId`` make that exactly once too, however often the program is killed and started again.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql


def count_words(lines: DataFrame) -> DataFrame:
    text = sql.lower(sql.decode("payload", "UTF-8"))
    words = lines.select(sql.explode(sql.split(text, r"\W+")).alias("word")).where("word != ''")
    return words.groupBy("word").count()


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    service = {"service": options.service} if options.service else {}
    spark = SparkSession.builder.appName("word count").getOrCreate()
    spark.conf.set("spark.sql.shuffle.partitions", options.tasks)
    lines = (
        spark.readStream.format("sava")
        .options(**service, topic=options.source, startingOffsets="earliest")
        .load()
    )
    counts = count_words(lines).select(
        sql.col("word").alias("key"), sql.col("count").cast("string").alias("payload")
    )

    def publish(changed: DataFrame, batch: int) -> None:
        (
            changed.write.format("sava")
            .options(**service, topic=options.target, writerId=options.writer, batchId=batch)
            .mode("append")
            .save()
        )

    trigger = {"availableNow": True} if options.once else {"processingTime": "1 second"}
    query = (
        counts.writeStream.foreachBatch(publish)
        .option("checkpointLocation", options.checkpoint)
        .outputMode("update")
        .trigger(**trigger)
        .start()
    )
    query.awaitTermination()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Count the words of a topic.")
    parser.add_argument("--service", help="client address of a broker")
    parser.add_argument("--source", default="/default/lines", help="topic of lines")
    parser.add_argument("--target", default="/default/words", help="topic of counts")
    parser.add_argument("--writer", default="word-count", help="one for each checkpoint")
    parser.add_argument("--checkpoint", required=True, help="directory that all machines of the job see")
    parser.add_argument("--tasks", type=int, default=8, help="that count; the checkpoint remembers the first")
    parser.add_argument("--once", action="store_true", help="end when all that is there now is counted")
    return parser


if __name__ == "__main__":
    main()
