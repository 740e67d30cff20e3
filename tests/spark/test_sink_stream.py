"""Streaming writes of ``format("sava")``: every row once, over restarts, in every way to write."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from sava.pipeline.launch import brief
from tests.spark.sink_driver import start_query
from tests.spark.sink_topics import create, new_topic, read
from tests.support.brokers import Standalone, sava
from tests.support.long import only_long

TIMEOUT_S = 180


def put_files(directory: Path, files: int, *, first: int = 0, rows: int = 50) -> Counter[bytes]:
    """Files of rows; what is to be in the topic in the end, each row once."""
    directory.mkdir(exist_ok=True)
    expected: Counter[bytes] = Counter()
    for file in range(first, first + files):
        payloads = [f"{file}-{row}" for row in range(rows)]
        lines = [json.dumps({"payload": payload, "key": payload[-1]}) for payload in payloads]
        (directory / f"{file:04}.json").write_text("\n".join(lines))
        expected.update(payload.encode() for payload in payloads)
    return expected


def plan_of(broker: Standalone, directory: Path, topic: str, **options: str) -> dict[str, Any]:
    return {
        "input": str(directory / "input"),
        "checkpoint": str(directory / "checkpoint"),
        "options": {"service": broker.url, "topic": topic, **options},
    }


def run(spark: SparkSession, plan: dict[str, Any]) -> StreamingQuery:
    """Until all that is there is written."""
    query = start_query(spark, plan)
    try:
        assert query.awaitTermination(TIMEOUT_S)
    finally:
        query.stop()
    return query


def written(broker: Standalone, topic: str, partitions: int = 0) -> Counter[bytes]:
    names = [f"{topic}-part-{number}" for number in range(partitions)] or [topic]
    return Counter(message.payload for name in names for message in read(broker, name))


def known_writers(broker: Standalone) -> dict[str, dict[str, Any]]:
    _, out, _ = asyncio.run(sava("writers", "list", "-o", "json", admin=broker.admin))
    return {writer["writer"]: writer for writer in json.loads(out)}


@pytest.mark.parametrize("delivery", ["exactlyOnce", "atLeastOnce"])
def test_batches_of_a_stream_over_a_restart(
    spark: SparkSession, broker: Standalone, tmp_path: Path, delivery: str
) -> None:
    topic = new_topic()
    create(broker, topic, partitions=2)
    expected = put_files(tmp_path / "input", 2)
    plan = plan_of(broker, tmp_path, topic, delivery=delivery)
    assert len(run(spark, plan).recentProgress) >= 2
    assert written(broker, topic, 2) == expected
    expected += put_files(tmp_path / "input", 1, first=2)
    run(spark, plan)
    assert written(broker, topic, 2) == expected


def test_a_batch_that_spark_repeats_is_published_once(
    spark: SparkSession, broker: Standalone, tmp_path: Path
) -> None:
    """Published, and the driver dies before it has noted that: as if it had never noted it."""
    topic = new_topic()
    expected = put_files(tmp_path / "input", 2)
    plan = plan_of(broker, tmp_path, topic)
    run(spark, plan)
    noted = tmp_path / "checkpoint" / "commits"
    for path in (noted / "1", noted / ".1.crc"):
        path.unlink()
    query = run(spark, plan)
    assert written(broker, topic) == expected
    known = known_writers(broker)[query.id]
    assert (known["query"], known["run"], known["batch"]) == (query.id, query.runId, 1)


@only_long("more of the same")
def test_a_writer_with_a_new_checkpoint_is_refused_with_the_way_out(
    spark: SparkSession, broker: Standalone, tmp_path: Path
) -> None:
    """Its batches begin at 0 again. They are others, and dropping them as known ones would lose them."""
    topic = new_topic()
    expected = put_files(tmp_path / "input", 2)
    plan = plan_of(broker, tmp_path, topic, writerId=f"writer-of{topic.replace('/', '-')}")
    run(spark, plan)
    plan["checkpoint"] = str(tmp_path / "another")
    with pytest.raises(StreamingQueryException) as refused:
        run(spark, plan)
    writer = plan["options"]["writerId"]
    assert f"batch 0 of writer {writer} is not published" in brief(refused.value)
    assert f"`sava writers forget {writer}`" in brief(refused.value)
    assert written(broker, topic) == expected
    asyncio.run(sava("writers", "forget", writer, admin=broker.admin))
    run(spark, plan)
    assert written(broker, topic) == expected + expected


@only_long("more of the same")
def test_foreach_batch_with_a_named_writer(spark: SparkSession, broker: Standalone, tmp_path: Path) -> None:
    """Two topics in one batch, each with a writer of its own, each written twice, and published once."""
    topics = [new_topic(), new_topic()]
    expected = put_files(tmp_path / "input", 2)

    def write(rows: DataFrame, batch: int) -> None:
        for topic in topics * 2:
            writing = rows.write.format("sava").options(service=broker.url, topic=topic)
            named = writing.options(writerId=f"writer-of{topic.replace('/', '-')}", batchId=str(batch))
            named.mode("append").save()

    rows = spark.readStream.schema("payload string, key string").option("maxFilesPerTrigger", 1)
    query = (
        rows.json(str(tmp_path / "input"))
        .writeStream.foreachBatch(write)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(TIMEOUT_S)
    known = known_writers(broker)
    for topic in topics:
        assert written(broker, topic) == expected
        writer = known[f"writer-of{topic.replace('/', '-')}"]
        assert (writer["query"], writer["run"]) == (query.id, query.runId), "fenced as the query is"


@only_long("more of the same")
def test_complete_output_is_refused(spark: SparkSession, broker: Standalone, tmp_path: Path) -> None:
    put_files(tmp_path / "input", 1)
    rows = spark.readStream.schema("payload string, key string").json(str(tmp_path / "input"))
    counted = rows.groupBy("key").count().selectExpr("key", "cast(count as string) as payload")
    writing = counted.writeStream.format("sava").outputMode("complete")
    query = (
        writing.options(
            service=broker.url, topic=new_topic(), checkpointLocation=str(tmp_path / "checkpoint")
        )
        .trigger(availableNow=True)
        .start()
    )
    with pytest.raises(StreamingQueryException, match="output mode complete: topics are only appended to"):
        query.awaitTermination(TIMEOUT_S)
