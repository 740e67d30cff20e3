"""Streams of ``format("sava")``: where they begin, how much a batch takes, what they find while they run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import SparkSession

from sava.pipeline.launch import brief
from tests.spark.source_topics import Seen, extent, fill, follow, new_topic, stored
from tests.support.brokers import Standalone
from tests.support.long import only_long
from tests.support.waiting import wait_until

EARLIEST = {"startingOffsets": "earliest"}
NOW = {"availableNow": True}


def run_to_end(
    spark: SparkSession, broker: Standalone, checkpoint: Path, **options: Any
) -> tuple[Seen, list[Any]]:
    """What is there, by a query that ends; and what Spark says of its batches."""
    seen = Seen()
    query = seen.start(follow(spark, broker, **options), checkpoint, **NOW)
    try:
        assert query.awaitTermination(60)
    finally:
        query.stop()
    return seen, [progress for progress in query.recentProgress if progress["numInputRows"]]


def test_a_stream_follows_its_topic(spark: SparkSession, broker: Standalone, tmp_path: Path) -> None:
    """From the end on, which is the default; and idle queries can be stopped at once."""
    topic = new_topic()
    fill(broker, topic, range(50))
    seen = Seen()
    query = seen.start(follow(spark, broker, topic=topic), tmp_path / "checkpoint")
    try:
        wait_until(
            lambda: (
                (tmp_path / "checkpoint" / "offsets" / "0").exists()
                or query.status["isDataAvailable"]
                or "Waiting" in query.status["message"]
            ),
            "the query has begun",
        )
        for number in range(50, 54):
            fill(broker, topic, [number])
            seen.wait(query, number - 49)
        assert seen.numbers == list(range(50, 54))
        assert [row[2] for row in seen.rows] == list(range(50, 54))
    finally:
        began = time.monotonic()
        query.stop()
    assert time.monotonic() - began < 5


@only_long("more of the same")
def test_history_then_tail(spark: SparkSession, broker: Standalone, tmp_path: Path) -> None:
    topic = new_topic()
    fill(broker, topic, range(3000), partitions=2)
    for number in (0, 1):
        stored(broker, f"{topic}-part-{number}")
    seen = Seen()
    query = seen.start(follow(spark, broker, topic=topic, **EARLIEST), tmp_path)
    try:
        seen.wait(query, 3000)
        fill(broker, topic, range(3000, 4000), partitions=2)
        seen.wait(query, 4000)
    finally:
        query.stop()
    assert seen.numbers == list(range(4000))
    by_partition = {number: [row[2] for row in seen.rows if row[1] == number] for number in (0, 1)}
    assert all(sorted(offsets) == list(range(len(offsets))) for offsets in by_partition.values())


@pytest.mark.parametrize("position", ["offsets", "time"])
@only_long("more of the same")
def test_where_it_begins(spark: SparkSession, broker: Standalone, tmp_path: Path, position: str) -> None:
    topic = new_topic()
    fill(broker, topic, range(5))
    time.sleep(0.01)
    between = time.time_ns() // 1_000_000
    time.sleep(0.01)
    fill(broker, topic, range(5, 10))
    begin = (
        {"startingTimestamp": str(between)}
        if position == "time"
        else {"startingOffsets": json.dumps({topic: {"0": 5}})}
    )
    seen, _ = run_to_end(spark, broker, tmp_path, topic=topic, **begin)
    assert seen.numbers == list(range(5, 10))


@only_long("more of the same")
def test_messages_per_trigger(spark: SparkSession, broker: Standalone, tmp_path: Path) -> None:
    topic = new_topic()
    fill(broker, topic, range(100), partitions=2)
    seen, progress = run_to_end(spark, broker, tmp_path, topic=topic, maxMessagesPerTrigger="30", **EARLIEST)
    assert [each["numInputRows"] for each in progress] == [30, 30, 30, 10]
    assert seen.numbers == list(range(100))
    first = json.loads(progress[0]["sources"][0]["endOffset"])[topic]
    sizes = {str(number): extent(broker, f"{topic}-part-{number}").end for number in (0, 1)}
    assert all(abs(first[number] - 30 * sizes[number] / 100) <= 1 for number in ("0", "1"))


@only_long("many batches")
def test_bytes_per_trigger(spark: SparkSession, broker: Standalone, tmp_path: Path) -> None:
    topic = new_topic()
    fill(broker, topic, range(100), size=10_000)
    _, progress = run_to_end(
        spark, broker, tmp_path / "bytes", topic=topic, maxBytesPerTrigger="300000", **EARLIEST
    )
    assert 4 <= len(progress) <= 6 or extent(broker, topic).stored > 0
    assert sum(each["numInputRows"] for each in progress) == 100
    _, progress = run_to_end(
        spark,
        broker,
        tmp_path / "both",
        topic=topic,
        maxBytesPerTrigger="300000",
        maxMessagesPerTrigger="60",
        **EARLIEST,
    )
    assert all(each["numInputRows"] <= 60 for each in progress)
    assert sum(each["numInputRows"] for each in progress) == 100


def test_what_is_available_and_no_more(spark: SparkSession, broker: Standalone, tmp_path: Path) -> None:
    """Run again on the same checkpoint, it brings what came since, once."""
    topic = new_topic()
    for end in (40, 70):
        fill(broker, topic, range(end - 40 if end == 40 else 40, end))
        seen, _ = run_to_end(spark, broker, tmp_path, topic=topic, **EARLIEST)
        assert seen.numbers == list(range(0 if end == 40 else 40, end))
    seen, progress = run_to_end(spark, broker, tmp_path, topic=topic, **EARLIEST)
    assert (seen.rows, progress) == ([], [])


def test_a_query_goes_on_at_its_checkpoint(spark: SparkSession, broker: Standalone, tmp_path: Path) -> None:
    topic = new_topic()
    seen = Seen()
    for end in (30, 60, 90):
        fill(broker, topic, range(end - 30, end), partitions=2)
        query = seen.start(
            follow(spark, broker, topic=topic, maxMessagesPerTrigger="13", **EARLIEST), tmp_path
        )
        try:
            seen.wait(query, end)
        finally:
            query.stop()
    assert seen.numbers == list(range(90))


@only_long("more of the same")
def test_a_batch_that_failed_is_repeated_as_it_was(
    spark: SparkSession, broker: Standalone, tmp_path: Path
) -> None:
    """Its range is in the checkpoint: what came since belongs to the next one."""
    topic = new_topic()
    fill(broker, topic, range(20))

    def fail(batch: Any, number: int) -> None:
        raise RuntimeError(f"refused {batch.count()}")

    stream = follow(spark, broker, topic=topic, **EARLIEST)
    query = stream.writeStream.foreachBatch(fail).option("checkpointLocation", str(tmp_path)).start()
    with pytest.raises(StreamingQueryException) as caught:
        query.awaitTermination(60)
    assert brief(caught.value) == "RuntimeError: refused 20"
    assert query.lastProgress is None, "Spark tells of no batch that has failed"
    fill(broker, topic, range(20, 50))
    seen, _ = run_to_end(spark, broker, tmp_path, topic=topic, **EARLIEST)
    assert [len(batch) for batch in seen.batches] == [20, 30]
    assert seen.numbers == list(range(50))


@only_long("more of the same")
def test_new_partitions_are_found(spark: SparkSession, broker: Standalone, tmp_path: Path) -> None:
    topic = new_topic()
    fill(broker, topic, range(20), partitions=1)
    seen = Seen()
    query = seen.start(follow(spark, broker, topic=topic, **EARLIEST), tmp_path)
    try:
        seen.wait(query, 20)
        fill(broker, topic, range(20, 60), partitions=3)
        seen.wait(query, 60)
    finally:
        query.stop()
    assert seen.numbers == list(range(60))
    assert {row[1] for row in seen.rows} == {0, 1, 2}


@only_long("waits for the next look at topics")
def test_new_topics_are_found(spark: SparkSession, broker: Standalone, tmp_path: Path) -> None:
    """Also when there was none at first."""
    kind = new_topic()
    seen = Seen()
    query = seen.start(follow(spark, broker, topicPattern=f"{kind}-.*"), tmp_path)
    try:
        seen.wait_idle(query)
        for number in range(2):
            fill(broker, f"{kind}-{number}", [number])
            seen.wait(query, number + 1)
    finally:
        query.stop()
    assert seen.numbers == [0, 1]


def backlog(broker: Standalone, topic: str, subscription: str) -> int:
    command = [
        sys.executable,
        "-m",
        "sava.cli",
        "subscriptions",
        "describe",
        topic,
        subscription,
        "-o",
        "json",
    ]
    answer = subprocess.run([*command, "--admin", broker.admin], capture_output=True, check=False, timeout=60)
    return int(json.loads(answer.stdout)["backlog"]) if answer.returncode == 0 else -1


def test_progress_is_seen_at_the_cluster(spark: SparkSession, broker: Standalone, tmp_path: Path) -> None:
    """Also that of the last batch, which Spark never commits to its source."""
    topic = new_topic()
    fill(broker, topic, range(25))
    seen = Seen()
    options = {"topic": topic, "subscription": "spark", **EARLIEST}
    query = seen.start(follow(spark, broker, maxMessagesPerTrigger="10", **options), tmp_path)
    try:
        seen.wait(query, 25)
        wait_until(lambda: backlog(broker, topic, "spark") == 0, "all is acked")
        latest = [progress["sources"][0]["latestOffset"] for progress in query.recentProgress]
        assert json.loads(latest[0]) == {topic: {"0": 25}}
    finally:
        query.stop()
    fill(broker, topic, range(25, 30))
    assert backlog(broker, topic, "spark") == 5
    run_to_end(spark, broker, tmp_path, **options)
    assert backlog(broker, topic, "spark") == 0


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"endingOffsets": "latest"}, "option endingOffsets is 'latest': it is for batch reads only"),
        (
            {"maxMessagesPerTrigger": "many"},
            "option maxMessagesPerTrigger is 'many': a whole number from 1 on",
        ),
        ({"maxMessagesPerTriger": "5"}, "did you mean maxMessagesPerTrigger?"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    spark: SparkSession, broker: Standalone, tmp_path: Path, options: dict[str, str], expected: str
) -> None:
    topic = new_topic()
    fill(broker, topic, [0])
    with pytest.raises(PySparkException) as caught:
        Seen().start(follow(spark, broker, topic=topic, **options), tmp_path).awaitTermination(60)
    assert any(line.startswith("sava.") and expected in line for line in str(caught.value).splitlines())


def test_a_missing_topic_is_what_its_runner_tells_of(
    spark: SparkSession, broker: Standalone, tmp_path: Path
) -> None:
    with pytest.raises(StreamingQueryException) as caught:
        Seen().start(follow(spark, broker, topic="/default/nowhere"), tmp_path).awaitTermination(60)
    assert brief(caught.value) == (
        "sava.pipeline.errors.SourceRefused: "
        "there is no topic /default/nowhere: create it, or name another one"
    )
