"""Functions of pipelines, as users write them."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)


def upper(rows: DataFrame) -> DataFrame:
    return rows.select("key", F.upper(F.col("payload").cast("string")).alias("payload"))


def nothing(rows: DataFrame) -> None:
    """As somebody writes it who forgets to return."""
