"""Batch reads of ``format("sava")``: all columns, all options, history and tail in one."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sql

from sava.client.blocking import Client
from tests.spark.conftest import s3_environment
from tests.spark.source_topics import extent, fill, link_to, new_topic, payload, read, stored
from tests.support.brokers import Standalone
from tests.support.certificates import make_certificates
from tests.support.long import only_long
from tests.support.objects import S3Server
from tests.support.waiting import wait_until

WHEN = datetime(2030, 1, 31, 12, tzinfo=UTC)


def offsets_of(rows: DataFrame) -> list[tuple[int, int]]:
    return sorted((row[0], row[1]) for row in rows.select("partition", "offset").collect())


def test_a_message_has_all_its_columns(spark: SparkSession, broker: Standalone) -> None:
    topic = new_topic()
    with Client(broker.url, timeout=60) as client, client.producer(topic, name="web") as producer:
        producer.send(b"one", key="k", attributes={"a": "1", "b": ""}, publish_time=WHEN)
        producer.send(b"\x00\xff")
    for _ in range(2):
        # From the owner, and again from a segment.
        rows = read(spark, broker, topic=topic)
        assert rows.columns == [
            *("topic", "partition", "offset", "publish_time", "key", "payload", "attributes", "producer"),
            *("schema_id", "schema_version", "origin_cluster", "origin_offset"),
        ]
        first, second = rows.orderBy("offset").collect()
        assert first.asDict() == {
            "topic": topic,
            "partition": 0,
            "offset": 0,
            "publish_time": WHEN.astimezone().replace(tzinfo=None),
            "key": "k",
            "payload": bytearray(b"one"),
            "attributes": {"a": "1", "b": ""},
            "producer": "web",
            "schema_id": None,
            "schema_version": None,
            "origin_cluster": None,
            "origin_offset": None,
        }
        assert (second.offset, second.key, bytes(second.payload)) == (1, None, b"\x00\xff")
        stored(broker, topic)


def test_history_and_tail_are_one_range_without_a_gap(spark: SparkSession, slow_broker: Standalone) -> None:
    """20 MB: a segment of 16 and a tail; and with pruned columns, which are read another way."""
    topic, count, size = new_topic(), 20_000, 1000
    fill(slow_broker, topic, range(count), size=size)
    wait_until(lambda: extent(slow_broker, topic).stored > 0, "a segment")
    assert 0 < extent(slow_broker, topic).stored < count
    rows = read(spark, slow_broker, topic=topic)
    wrong = rows.where(sql.col("payload").cast("string").cast("bigint") != sql.col("offset"))
    assert wrong.count() == 0
    assert offsets_of(rows) == [(0, offset) for offset in range(count)]
    assert offsets_of(read(spark, slow_broker, "offset bigint, partition int", topic=topic)) == [
        (0, offset) for offset in range(count)
    ]
    few = (
        read(spark, slow_broker, "payload binary", topic=topic).select(sql.sum(sql.length("payload"))).first()
    )
    assert few is not None
    assert few[0] == count * size
    middle = extent(slow_broker, topic).stored
    around = {
        "startingOffsets": json.dumps({topic: {"0": middle - 10}}),
        "endingOffsets": json.dumps({topic: {"0": middle + 10}}),
    }
    assert offsets_of(read(spark, slow_broker, topic=topic, **around)) == [
        (0, offset) for offset in range(middle - 10, middle + 10)
    ]


@pytest.fixture(scope="module")
def numbers(broker: Standalone) -> str:
    """A topic with two partitions and 2,000 numbers, published a second apart from WHEN on by number."""
    topic = new_topic()
    with Client(broker.url, timeout=60) as client, client.producer(topic, partitions=2) as producer:
        for number in range(0, 2000, 100):
            producer.send_many(
                [payload(each) for each in range(number, number + 100)],
                keys=[str(each) for each in range(number, number + 100)],
                publish_time=WHEN + timedelta(seconds=number),
            )
    return topic


def values(rows: DataFrame) -> list[int]:
    return sorted(int(bytes(row[0])) for row in rows.select("payload").collect())


def test_all_partitions(spark: SparkSession, broker: Standalone, numbers: str) -> None:
    rows = read(spark, broker, topic=numbers)
    assert values(rows) == list(range(2000))
    assert {row[0] for row in rows.select("partition").distinct().collect()} == {0, 1}
    first = {row[0]: row[1] for row in rows.groupBy("partition").agg(sql.min("offset")).collect()}
    assert first == {0: 0, 1: 0}


def test_columns_in_any_order(spark: SparkSession, broker: Standalone, numbers: str) -> None:
    rows = read(spark, broker, "key string, offset bigint, topic string", topic=numbers)
    assert rows.columns == ["key", "offset", "topic"]
    assert sorted(int(row[0]) for row in rows.collect()) == list(range(2000))
    assert {row[0] for row in rows.select("topic").collect()} == {numbers}


def test_positions_by_offset(spark: SparkSession, broker: Standalone, numbers: str) -> None:
    ends = link_to(broker).extents([f"{numbers}-part-{number}" for number in (0, 1)])
    end = ends[f"{numbers}-part-1"].end
    rows = read(
        spark,
        broker,
        topic=numbers,
        startingOffsets=json.dumps({numbers: {"0": 10, "1": -2}}),
        endingOffsets=json.dumps({numbers: {"0": 15, "1": -1}}),
    )
    assert offsets_of(rows) == [(0, n) for n in range(10, 15)] + [(1, n) for n in range(end)]
    assert read(spark, broker, topic=numbers, startingOffsets="latest").count() == 0


def test_positions_by_time(spark: SparkSession, broker: Standalone, numbers: str) -> None:
    start, end = WHEN + timedelta(seconds=500), WHEN + timedelta(seconds=700)
    by_time = {
        "startingTimestamp": start.isoformat(),
        "endingTimestamp": str(int(end.timestamp() * 1000)),
        "startingOffsets": "latest",
    }
    assert values(read(spark, broker, topic=numbers, **by_time)) == list(range(500, 700))


@only_long("more of the same")
def test_several_topics_and_patterns(spark: SparkSession, broker: Standalone) -> None:
    topics = [f"{new_topic()}-by-name" for _ in range(3)]
    for number, topic in enumerate(topics):
        fill(broker, topic, [number])
    assert values(read(spark, broker, topics=f"{topics[0]}, {topics[2]}")) == [0, 2]
    assert values(read(spark, broker, topicPattern="/default/.*-by-name")) == [0, 1, 2]
    assert values(read(spark, broker, topicPattern="/default/by-name")) == []


def test_min_partitions(spark: SparkSession, broker: Standalone, numbers: str) -> None:
    few = read(spark, broker, topic=numbers)
    many = read(spark, broker, topic=numbers, minPartitions="7")
    assert few.rdd.getNumPartitions() == 1
    assert many.rdd.getNumPartitions() == 7
    assert values(many) == list(range(2000))


@pytest.mark.parametrize(
    "condition",
    [
        "offset >= 100 and offset < 120",
        "offset = 7 and partition = 1",
        "offset > 5 and offset < 3",
        "publish_time > timestamp'2030-01-31 12:05:00Z' and publish_time <= timestamp'2030-01-31 12:15:00Z'",
        "publish_time = timestamp'2030-01-31 12:10:00Z' and partition < 1",
        "topic = 'other'",
        "partition in (0, 5) and key like '1%'",
        "offset <> 3 and offset < 6",
        "offset < 3 or partition = 0",
    ],
)
@only_long("more of the same")
def test_conditions_that_the_source_applies(
    spark: SparkSession, broker: Standalone, numbers: str, condition: str
) -> None:
    expected = offsets_of(read(spark, broker, topic=numbers).where(condition))
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        rows = read(spark, broker, topic=numbers, filterPushdown="true").where(condition)
        assert offsets_of(rows) == expected
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_a_condition_reads_no_more_than_it_needs(
    spark: SparkSession, broker: Standalone, numbers: str
) -> None:
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        rows = read(spark, broker, topic=numbers, filterPushdown="true", minPartitions="7")
        assert rows.where("offset = 5").rdd.getNumPartitions() == 2
    finally:
        spark.conf.unset("spark.sql.python.filterPushdown.enabled")


def test_sql_over_a_topic(spark: SparkSession, broker: Standalone, numbers: str) -> None:
    options = f"service '{broker.url}', topic '{numbers}'"
    spark.sql(f"create or replace temporary view numbers using sava options ({options})")
    found = spark.sql("select sum(cast(cast(payload as string) as bigint)) from numbers").first()
    assert found is not None
    assert found[0] == sum(range(2000))
    with pytest.raises(PySparkException, match="use CREATE TEMPORARY VIEW"):
        spark.sql(f"create table numbers_table using sava options ({options})")


def test_values_by_the_topics_schema(spark: SparkSession, broker: Standalone, tmp_path: Path) -> None:
    """What does not fit has no value, and stays a row. Another type than the schema's is refused."""
    topic, subject = new_topic(), "readings"
    definition = {"type": "object", "properties": {"celsius": {"type": "number"}}, "required": ["celsius"]}
    (tmp_path / "schema.json").write_text(json.dumps(definition))
    register(broker, subject, tmp_path / "schema.json")
    with Client(broker.url, timeout=60) as client, client.producer(topic, schema=subject) as producer:
        producer.send(b'{"celsius": 21.5}')
        producer.send(b'{"celsius": -3}')
    fill(broker, topic, [7])
    rows = read(spark, broker, topic=topic, decode="true")
    assert rows.columns[-1] == "value"
    found = rows.orderBy("offset").select("value.celsius", "payload").collect()
    assert [row[0] for row in found] == [21.5, -3.0, None]
    assert bytes(found[2][1]) == b"7"
    pruned = read(spark, broker, "value struct<celsius: double>", topic=topic, decode="true")
    assert sorted(row[0].celsius for row in pruned.collect() if row[0]) == [-3.0, 21.5]
    with pytest.raises(PySparkException, match="value is struct<celsius:double> by schema readings"):
        read(spark, broker, "value string", topic=topic, decode="true").count()
    plain = new_topic()
    fill(broker, plain, [1])
    with pytest.raises(PySparkException, match=f"topic {plain} follows no registered schema"):
        read(spark, broker, topic=plain, decode="true")


def register(broker: Standalone, subject: str, definition: Path) -> None:
    command = ["schemas", "register", subject, "--type", "json_schema", "--file", str(definition)]
    subprocess.run(
        [sys.executable, "-m", "sava.cli", *command, "--admin", broker.admin],
        check=True,
        capture_output=True,
        timeout=60,
    )


@only_long("servers of its own")
def test_history_in_s3(spark: SparkSession, s3_place: S3Server, tmp_path: Path) -> None:
    """Read by Spark's processes themselves, with what their environment says of the store."""
    topic = new_topic()
    remote = Standalone(tmp_path, SAVA__STORAGE__UPLOAD_INTERVAL_SECONDS="1", **s3_environment(s3_place))
    remote.add_arguments("--storage-url", f"{s3_place.url}/history")
    s3_place.start()
    try:
        with remote:
            fill(remote, topic, range(20_000), size=100)
            stored(remote, topic)
            assert values(read(spark, remote, "payload binary", topic=topic)) == list(range(20_000))
            assert read(spark, remote, "offset bigint", topic=topic).count() == 20_000
            assert link_to(remote).segments(topic, 0).store_url.startswith("s3://")
    finally:
        s3_place.kill()


@only_long("servers of its own")
def test_tls(spark: SparkSession, tmp_path: Path) -> None:
    auth = make_certificates(tmp_path / "certificates")
    assert auth.tls is not None
    with Standalone(tmp_path, auth) as secure:
        options = {
            "topicPattern": "/default/.*",
            "service": secure.url,
            "tlsCa": str(auth.tls.ca_file),
            "tlsCert": str(auth.tls.cert_file),
            "tlsKey": str(auth.tls.key_file),
        }
        assert spark.read.format("sava").options(**options).load().count() == 0


# -- mistakes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "schema", "expected"),
    [
        ({}, "", "option topic is '': exactly one of topic, topics and topicPattern is needed"),
        (
            {"topic": "orders"},
            "",
            "option topic is 'orders': written /namespace/topic, such as /default/orders",
        ),
        ({"topic": "/d/o", "startOffsets": "1"}, "", "no such option; did you mean startingOffsets?"),
        ({"topic": "/d/o", "failOnDataLoss": "no"}, "", "option failOnDataLoss is 'no': true or false"),
        ({"topic": "/d/o", "subscription": "s"}, "offset bigint", "it is for streams only"),
        ({"topic": "/default/nowhere"}, "", "there is no topic /default/nowhere"),
        ({"topic": "/d/o"}, "offset int", "column offset is bigint, and int was asked for"),
        ({"topic": "/d/o"}, "colour string", "has no column colour: topic, partition, offset"),
        ({"topic": "/d/o"}, "value string", "value needs the option decode=true"),
    ],
)
def test_a_mistake_is_told_in_one_line(
    spark: SparkSession, broker: Standalone, options: dict[str, Any], schema: str, expected: str
) -> None:
    with pytest.raises(PySparkException) as caught:
        read(spark, broker, schema, **options).count()
    # Python's last line: the error's name and its text.
    assert any(line.startswith("sava.") and expected in line for line in str(caught.value).splitlines())


@only_long("more of the same")
def test_offsets_that_do_not_exist(spark: SparkSession, broker: Standalone, numbers: str) -> None:
    for name in ("startingOffsets", "endingOffsets"):
        with pytest.raises(PySparkException, match=f"option {name} is .*: {numbers} partition 1 is missing"):
            read(spark, broker, topic=numbers, **{name: json.dumps({numbers: {"0": 1}})}).count()
        beyond = json.dumps({numbers: {"0": 1, "1": 10_000}})
        with pytest.raises(PySparkException, match=f"{numbers} partition 1 ends at "):
            read(spark, broker, topic=numbers, **{name: beyond}).count()


@only_long("more of the same")
def test_a_cluster_that_is_not_there(spark: SparkSession) -> None:
    reader = spark.read.format("sava").options(service="127.0.0.1:9", topic="/default/x", timeout="1")
    with pytest.raises(PySparkException, match=r"127\.0\.0\.1:9"):
        reader.load().count()
