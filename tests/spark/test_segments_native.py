"""Segments as Spark's own Parquet reader sees them."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession
from pyspark.sql import functions as sql

from tests.support.history import COLUMNS, expected, normal, write_history


async def test_spark_finds_all_rows_and_types(spark: SparkSession, tmp_path: Path) -> None:
    await write_history(tmp_path)
    found = spark.read.option("recursiveFileLookup", "true").parquet(str(tmp_path / "topics"))
    assert tuple(found.columns) == COLUMNS
    assert dict(found.dtypes) == {
        **dict.fromkeys(("topic", "key", "producer", "origin_cluster"), "string"),
        **dict.fromkeys(("offset", "schema_id", "origin_offset"), "bigint"),
        **dict.fromkeys(("partition", "schema_version"), "int"),
        "publish_time": "timestamp",
        "payload": "binary",
        "attributes": "map<string,string>",
    }
    rows = found.withColumn("publish_time", sql.unix_micros("publish_time")).collect()
    assert normal(rows) == expected()
