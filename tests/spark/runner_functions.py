"""Functions of pipelines, as users write them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)


def upper(rows: DataFrame) -> DataFrame:
    return rows.select("key", F.upper(F.col("payload").cast("string")).alias("payload"))


def nothing(rows: DataFrame) -> None:
    """As somebody writes it who forgets to return."""


HANGS_WHILE = "SAVA_TEST_HANGS_WHILE"
"""Names a file."""


def hanging(rows: DataFrame) -> DataFrame:
    """As somebody writes it who waits for something without a limit: for as long as a file is there."""

    def waiting(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            while Path(os.environ[HANGS_WHILE]).exists():
                time.sleep(0.1)
            yield batch

    return upper(rows).mapInArrow(waiting, "key string, payload string")
