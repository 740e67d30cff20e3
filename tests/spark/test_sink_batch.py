"""Batch writes of ``format("sava")``: columns, routing, topics, and writes that are repeated."""

from __future__ import annotations

import asyncio
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from sava.client.producer import partition_of
from sava.storage.objectstore import ObjectStore
from tests.spark.conftest import s3_environment
from tests.spark.sink_topics import create, new_topic, read
from tests.support.brokers import Standalone
from tests.support.long import only_long
from tests.support.objects import S3Server
from tests.support.waiting import wait_until

WHEN = datetime(2030, 1, 31, 12, tzinfo=UTC)


def write(rows: DataFrame, broker: Standalone, **options: str) -> None:
    rows.write.format("sava").options(service=broker.url, **options).mode("append").save()


def refusal(rows: DataFrame, broker: Standalone, mode: str = "append", **options: str) -> str:
    """What the user sees at the end of Spark's report."""
    with pytest.raises(PySparkException) as refused:
        rows.write.format("sava").options(service=broker.url, **options).mode(mode).save()
    return str(refused.value)


def test_all_columns_arrive(spark: SparkSession, broker: Standalone) -> None:
    topic = new_topic()
    rows = spark.createDataFrame(
        [
            (b"one", "k", {"a": "1", "b": "2"}, WHEN, "eu", 7, 3, 2),
            (b"", None, None, None, None, None, None, None),
        ],
        "payload binary, key string, attributes map<string,string>, publish_time timestamp,"
        " origin_cluster string, origin_offset bigint, schema_id bigint, schema_version int",
    ).coalesce(1)
    before = datetime.now(UTC)
    write(rows, broker, topic=topic)
    first, second = read(broker, topic)
    assert (first.payload, first.key, dict(first.attributes)) == (b"one", "k", {"a": "1", "b": "2"})
    assert first.publish_time == int(WHEN.timestamp()) * 1_000_000
    assert first.origin is not None
    assert (first.origin.cluster, first.origin.offset) == ("eu", 7)
    assert (first.schema_id, first.schema_version) == (3, 2)
    assert (second.payload, second.key, second.origin, second.schema_id) == (b"", None, None, None)
    assert second.publish_time >= before.timestamp() * 1_000_000


@pytest.mark.parametrize("delivery", ["exactlyOnce", "atLeastOnce"])
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_keys_go_where_the_client_sends_them(
    spark: SparkSession, broker: Standalone, delivery: str, compression: str
) -> None:
    topic = new_topic()
    create(broker, topic, partitions=4)
    rows = spark.range(5000).selectExpr("'k' || (id % 701) as key", "cast(id as string) as payload")
    write(rows, broker, topic=topic, delivery=delivery, compression=compression)
    found = [read(broker, f"{topic}-part-{number}") for number in range(4)]
    for number, messages in enumerate(found):
        assert messages
        assert {partition_of(message.key or "", 4) for message in messages} == {number}
        if delivery == "exactlyOnce":
            payloads = [int(message.payload) for message in messages]
            assert payloads == sorted(payloads), "rows keep the order of the data frame"
    assert sorted(int(message.payload) for messages in found for message in messages) == list(range(5000))


def test_rows_without_a_key_are_spread_and_the_column_partition_wins(
    spark: SparkSession, broker: Standalone
) -> None:
    topic = new_topic()
    create(broker, topic, partitions=3)
    rows = spark.range(12_000).selectExpr(
        "cast(id as string) as payload", "if(id % 4 = 0, 2, cast(null as int)) as partition"
    )
    write(rows.select("payload"), broker, topic=topic)
    sizes = [len(read(broker, f"{topic}-part-{number}")) for number in range(3)]
    assert sum(sizes) == 12_000
    assert min(sizes) >= 2000
    write(rows, broker, topic=topic)
    third = [int(message.payload) for message in read(broker, f"{topic}-part-2")][sizes[2] :]
    assert {number for number in range(12_000) if number % 4 == 0} <= set(third)


def test_the_topic_comes_from_the_column_unless_the_option_says_it(
    spark: SparkSession, broker: Standalone
) -> None:
    """Topics that do not exist are created."""
    topics = [new_topic() for _ in range(3)]
    rows = spark.createDataFrame(
        [(f"{topic}!", topic) for topic in topics[:2] * 2], "payload string, topic string"
    )
    write(rows, broker)
    for topic in topics[:2]:
        assert [message.payload for message in read(broker, topic)] == [f"{topic}!".encode()] * 2
    write(rows, broker, topic=topics[2])
    assert len(read(broker, topics[2])) == 4


def test_a_batch_that_is_named_is_published_once(spark: SparkSession, broker: Standalone) -> None:
    topic = new_topic()
    rows = spark.range(1000).selectExpr("cast(id as string) as payload")
    for batch in ("0", "0", "1", "1", "0"):
        write(rows, broker, topic=topic, writerId=f"writer-of{topic.replace('/', '-')}", batchId=batch)
    counted = Counter(message.payload for message in read(broker, topic))
    assert counted == {str(number).encode(): 2 for number in range(1000)}
    write(rows, broker, topic=topic)
    write(rows, broker, topic=topic)
    assert len(read(broker, topic)) == 4000, "without a name every job is a write of its own"


@only_long("more of the same")
def test_a_topic_that_keeps_nothing_is_written_at_least_once_only(
    spark: SparkSession, broker: Standalone
) -> None:
    topic = new_topic()
    create(broker, topic, reliable=False)
    rows = spark.range(10).selectExpr("cast(id as string) as payload")
    write(rows, broker, topic=topic, delivery="atLeastOnce")
    said = refusal(rows, broker, topic=topic)
    assert f"topic {topic} keeps no messages, so they cannot be published exactly once" in said


def test_nothing_is_written_of_nothing(spark: SparkSession, broker: Standalone) -> None:
    topic = new_topic()
    create(broker, topic)
    for delivery in ("exactlyOnce", "atLeastOnce"):
        write(
            spark.range(0).selectExpr("cast(id as string) as payload"), broker, topic=topic, delivery=delivery
        )
    assert read(broker, topic) == []


@only_long("more of the same")
def test_a_job_that_fails_publishes_nothing(spark: SparkSession, broker: Standalone) -> None:
    """One of its tasks has staged everything by then."""
    topic = new_topic()
    create(broker, topic)
    rows = spark.range(0, 2000, 1, 2).selectExpr(
        "if(id = 1999, raise_error('the last row'), cast(id as string)) as payload"
    )
    assert "the last row" in refusal(rows, broker, topic=topic)
    assert read(broker, topic) == []


@only_long("more of the same")
def test_rows_are_staged_in_s3_and_nothing_is_left_there(
    spark: SparkSession, s3_place: S3Server, tmp_path: Path
) -> None:
    """By Spark's processes themselves, with what their environment says of the store."""
    topic = new_topic()
    remote = Standalone(tmp_path, **s3_environment(s3_place))
    remote.add_arguments("--storage-url", f"{s3_place.url}/sink")
    s3_place.start()
    try:
        with remote:
            rows = spark.range(20_000).selectExpr("cast(id as string) as payload")
            write(rows, remote, topic=topic, compression="lz4")
            assert sorted(int(message.payload) for message in read(remote, topic)) == list(range(20_000))
            store = ObjectStore.open(f"{s3_place.url}/sink", options=s3_place.options)

            async def staged() -> list[str]:
                return [found.key async for found in store.list("staging")]

            wait_until(lambda: not asyncio.run(staged()), "what was staged is removed")
    finally:
        s3_place.kill()


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ("id as payload", {}, "column payload is bigint: binary or string is needed"),
        (
            "'x' as payload, 1 as colour",
            {},
            "column colour cannot be written; rows have payload and, if wanted, key,",
        ),
        (
            "'x' as payload, 4 as partition",
            {},
            "column partition: 4 for topic {topic}, which has 1 partition (0 to 0)",
        ),
        ("cast(null as string) as payload", {}, "{topic}: invalid message: 1 messages have no payload"),
        ("'x' as payload, unhex('ff') as key", {}, "column key: Invalid UTF8"),
        ("'x' as payload", {"delivery": "maybe"}, "option delivery is 'maybe': exactlyOnce or atLeastOnce"),
        ("'x' as payload", {"batchId": "1"}, "option batchId is '1': it needs the option writerId"),
    ],
)
def test_what_cannot_be_written_is_said_in_one_line(
    spark: SparkSession, broker: Standalone, columns: str, options: dict[str, str], said: str
) -> None:
    topic = new_topic()
    rows: Any = spark.range(1).selectExpr(*columns.split(", "))
    assert said.format(topic=topic) in refusal(rows, broker, topic=topic, **options)


def test_overwriting_is_refused(spark: SparkSession, broker: Standalone) -> None:
    rows = spark.range(1).selectExpr("'x' as payload")
    said = refusal(rows, broker, mode="overwrite", topic=new_topic())
    assert 'mode overwrite: topics are only appended to; use mode("append")' in said
