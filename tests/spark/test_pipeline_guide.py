"""docs/pipeline.md, run block by block, in order, in one session against a real broker."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.long import only_long
from tests.spark.sink_topics import read
from tests.spark.source_topics import fill
from tests.standalone import Standalone

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"


def run(commands: str, directory: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-euc", commands], cwd=directory, env={**os.environ, "PATH": path}, check=True, timeout=60
    )


@only_long("all the Python of a long page")
def test_the_python_of_the_guide_works(
    spark: SparkSession,
    broker: Standalone,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    blocks = re.findall(r"^```(python|sh)\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 9
    fill(broker, "/default/orders", range(100))
    monkeypatch.setenv("SAVA_ADMIN", broker.admin)
    names: dict[str, object] = {"spark": spark}
    for number, (language, block) in enumerate(blocks):
        if language == "sh":
            run(block, tmp_path)
            continue
        source = block.replace('format("sava")', f'format("sava").option("service", "{broker.url}")')
        exec(compile(source, f"{PAGE.name}, block {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.count("10 messages\n") == 2
    assert re.search(r"\| +2\| +tea\|", printed)
    assert re.search(r"\|NULL\|NULL\|", printed), "what cannot be decoded is null"
    copied = read(broker, "/default/orders-copy")
    assert [message.payload for message in copied] == [b"%d" % number for number in range(100)]
    assert copied[0].attributes == {"from": "/default/orders"}
    assert [message.payload for message in read(broker, "/default/order-counts")] == [b"100"]
    assert {message.key for message in read(broker, "/default/tastes")} == {"anna", "ben"}


def test_the_spark_of_the_readme_works(spark: SparkSession, broker: Standalone) -> None:
    page = (PAGE.parents[1] / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    [block] = [block for block in blocks if "spark." in block]
    fill(broker, "/default/orders", range(3))
    names: dict[str, Any] = {"spark": spark}
    exec(block.replace('format("sava")', f'format("sava").option("service", "{broker.url}")'), names)
    assert names["orders"].isStreaming
    assert "payload" in names["orders"].columns
