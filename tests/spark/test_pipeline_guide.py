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

from tests.spark.sink_topics import read
from tests.spark.source_topics import fill
from tests.support.brokers import Standalone
from tests.support.long import only_long
from tests.support.pages import README, ROOT, all_blocks, blocks

PAGE = "pipeline.md"


def run(commands: str, directory: Path, broker: Standalone) -> str:
    """In a directory that has what a clone has, and against another broker than the page's."""
    for name in ("README.md", "examples"):
        if not (directory / name).exists():
            (directory / name).symlink_to(ROOT / name)
    script = commands.replace("127.0.0.1:6650", broker.address).replace("/var/tmp/", f"{directory}/")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=directory,
        env={**os.environ, "PATH": path, "SAVA_ADMIN": broker.admin, "SAVA_SERVICE": broker.url},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@only_long("all the code of a long page")
@pytest.mark.timeout(1200)
def test_the_code_of_the_guide_works(
    spark: SparkSession,
    broker: Standalone,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [block for block in all_blocks(PAGE) if block.language]
    assert {block.language for block in found} == {"python", "sh"}
    assert len(found) >= 11
    fill(broker, "/default/orders", range(100))
    names: dict[str, object] = {"spark": spark}
    said = ""
    for number, block in enumerate(found):
        if block.language == "sh":
            said += run(block.text, tmp_path, broker)
            continue
        source = block.text.replace('format("sava")', f'format("sava").option("service", "{broker.url}")')
        exec(compile(source, f"{PAGE}, block {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.count("10 messages\n") == 2
    assert re.search(r"\| +2\| +tea\|", printed)
    assert re.search(r"\|NULL\|NULL\|", printed), "what cannot be decoded is null"
    copied = read(broker, "/default/orders-copy")
    assert [message.payload for message in copied] == [b"%d" % number for number in range(100)]
    assert copied[0].attributes == {"from": "/default/orders"}
    assert [message.payload for message in read(broker, "/default/order-counts")] == [b"100"]
    assert {message.key for message in read(broker, "/default/tastes")} == {"anna", "ben"}
    assert len(re.findall(r"^ +\d+ .* \d+$", said, re.MULTILINE)) >= 10, "words and their counts"


def test_the_spark_of_the_readme_works(spark: SparkSession, broker: Standalone) -> None:
    [block] = [block for block in blocks(README, "python") if "spark." in block]
    fill(broker, "/default/orders", range(3))
    names: dict[str, Any] = {"spark": spark}
    exec(block.replace('format("sava")', f'format("sava").option("service", "{broker.url}")'), names)
    assert names["orders"].isStreaming
    assert "payload" in names["orders"].columns
