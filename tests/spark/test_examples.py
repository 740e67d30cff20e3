"""The programs of examples/spark, against a real broker. They share the session of this process; that each
also runs by itself is what ``test_shipping`` shows for one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from examples.spark import backfill, history, join, windows, wordcount
from sava.client.blocking import Client
from tests.spark.sink_topics import create, read
from tests.spark.source_topics import fill, new_topic
from tests.support.brokers import Standalone
from tests.support.long import only_long

pytestmark = [only_long("five programs")]
"""Seconds by themselves; and a test that is stopped in the middle of a call leaves a session of no use."""


def send(broker: Standalone, topic: str, *messages: tuple[str, str]) -> None:
    """(key, text)"""
    with Client(broker.url, timeout=60) as client, client.producer(topic) as producer:
        producer.send_many([text.encode() for _, text in messages], keys=[key for key, _ in messages])


def last_of_each(broker: Standalone, topic: str) -> dict[str | None, str]:
    return {message.key: message.payload.decode() for message in read(broker, topic)}


def test_word_count_goes_on_where_it_was(spark: SparkSession, broker: Standalone, tmp_path: Path) -> None:
    source, target = new_topic(), new_topic()
    arguments = ["--service", broker.url, "--source", source, "--target", target, "--tasks", "2", "--once"]
    arguments += ["--writer", target.rpartition("/")[2], "--checkpoint", str(tmp_path / "checkpoint")]
    send(broker, source, ("", "To be, or not to be"), ("", "that is the question"))
    wordcount.main(arguments)
    assert last_of_each(broker, target)["be"] == "2"
    send(broker, source, ("", "Be!"))
    wordcount.main(arguments)
    counts = last_of_each(broker, target)
    assert (counts["be"], counts["to"], counts["question"]) == ("3", "2", "1")
    assert len(read(broker, target)) == len(counts) + 1, "only what has changed is published again"


def test_a_window_comes_out_once_when_it_is_complete(
    spark: SparkSession, broker: Standalone, tmp_path: Path
) -> None:
    source, target = new_topic(), new_topic()
    arguments = ["--service", broker.url, "--source", source, "--target", target, "--tasks", "2", "--once"]
    arguments += ["--checkpoint", str(tmp_path / "checkpoint")]

    def visits(*seconds: int) -> None:
        times = [f"2030-01-01T12:{second // 60:02}:{second % 60:02}Z" for second in seconds]
        send(broker, source, *(("", json.dumps({"page": "/tea", "at": time})) for time in times))

    create(broker, target)
    visits(3, 10, 59, 60)
    send(broker, source, ("", "not a visit"))
    windows.main(arguments)
    assert read(broker, target) == [], "a visit of the first minute may still come"
    visits(50, 200)
    windows.main(arguments)
    visits(20, 210)
    windows.main(arguments)
    counted = [json.loads(message.payload) for message in read(broker, target)]
    assert sorted((each["minute"][11:16], each["count"]) for each in counted) == [("12:00", 4), ("12:01", 1)]


def test_a_stream_joined_with_a_table(spark: SparkSession, broker: Standalone, tmp_path: Path) -> None:
    source, table, target = new_topic(), new_topic(), new_topic()
    send(broker, table, ("tea", "2.5"), ("coffee", "3.0"), ("tea", "2.75"))
    send(broker, source, ("anna", "tea"), ("ben", "coffee"), ("carl", "water"))
    join.main(
        [
            *("--service", broker.url, "--source", source, "--table", table, "--target", target),
            *("--checkpoint", str(tmp_path / "checkpoint"), "--once"),
        ]
    )
    assert {key: json.loads(text) for key, text in last_of_each(broker, target).items()} == {
        "anna": {"item": "tea", "price": 2.75},
        "ben": {"item": "coffee", "price": 3.0},
        "carl": {"item": "water"},
    }


def test_sql_over_history(
    spark: SparkSession, broker: Standalone, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = new_topic()
    fill(broker, topic, range(300), partitions=3)
    history.main(["--service", broker.url, "--topic", topic])
    shown = capsys.readouterr().out
    assert shown.count("\n|20") == 3, "a row for each partition"
    query = "select count(*) as n, count(distinct partition) as parts from messages where offset >= 50"
    history.main(
        ["--service", broker.url, "--topic", topic, "--columns", "partition int, offset bigint", query]
    )
    assert "|3    |" in capsys.readouterr().out


def test_backfill(spark: SparkSession, broker: Standalone, tmp_path: Path) -> None:
    topic = new_topic()
    arguments = ["--service", broker.url, "--topic", topic, "--at-once", "400", "--once"]
    arguments += ["--files", str(tmp_path / "files"), "--checkpoint", str(tmp_path / "checkpoint")]
    fill(broker, topic, range(1000), partitions=2)
    backfill.main(arguments)
    fill(broker, topic, range(1000, 1100), partitions=2)
    backfill.main(arguments)
    rows = spark.read.parquet(str(tmp_path / "files")).select("partition", "offset", "payload").collect()
    assert sorted(int(row.payload) for row in rows) == list(range(1100))
    assert len({(row.partition, row.offset) for row in rows}) == 1100
