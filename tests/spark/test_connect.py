"""``format("sava")`` in a session of Spark Connect, where the program and Spark are different processes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.sink_topics import read
from tests.spark.source_topics import fill, new_topic
from tests.spark.standalone_spark import REPOSITORY, surroundings
from tests.support.brokers import Standalone
from tests.support.long import only_long

NEEDED = ("grpc_status", "pandas", "zstandard")
pytestmark = [
    only_long("a Spark of its own"),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, NEEDED)), reason="pip install 'pyspark[connect]'"
    ),
]


def test_batch_stream_and_foreach_batch(broker: Standalone, tmp_path: Path) -> None:
    """One process cannot have both kinds of session, so that this one is in another."""
    topic, target = new_topic(), new_topic()
    fill(broker, topic, range(500), partitions=2)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.spark.connect_program"),
            *(broker.url, topic, target, str(tmp_path / "checkpoint")),
        ],
        cwd=tmp_path,
        env=surroundings(PYTHONPATH=os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result == {"kind": "pyspark.sql.connect.session", "rows": 500}
    for copied in (target, f"{target}-2"):
        assert sorted(int(message.payload) for message in read(broker, copied)) == list(range(500))
