"""A token in the options of a query is nowhere to be seen, and a token file may change while a query runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sava.client.blocking import Client
from sava.pipeline.launch import SparkMissing, find_java
from tests.spark.conftest import REPOSITORY
from tests.spark.sink_topics import create
from tests.support.brokers import Standalone
from tests.support.waiting import PATIENCE_S

MARKER = "eyJtYXJrZXI.c2VjcmV0LW1hcmtlcg.0123456789"


def test_spark_shows_no_token_in_plans_logs_progress_and_its_pages(
    broker: Standalone, tmp_path: Path
) -> None:
    try:
        java = find_java(os.environ)
    except SparkMissing as error:
        pytest.skip(str(error))
    source, target = "/default/secret-in", "/default/secret-out"
    create(broker, source)
    create(broker, target)
    with Client(broker.url, timeout=PATIENCE_S) as client, client.producer(source) as producer:
        producer.send_many([f"m{number}".encode() for number in range(100)])
    (tmp_path / "secret").write_text(f"{MARKER}\n")
    (tmp_path / "secret").chmod(0o600)
    environment = {
        **os.environ,
        "JAVA_HOME": str(java),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYTHONPATH": str(REPOSITORY),
    }
    program = [sys.executable, "-m", "tests.spark.secrets_program", broker.url, source, target, str(tmp_path)]
    done = subprocess.run(
        program, env=environment, capture_output=True, text=True, timeout=400, check=False, cwd=tmp_path
    )

    assert "all was shown" in done.stdout, done.stderr[-6000:]
    assert "INFO org.apache.spark" in done.stderr, "Spark's own log is there to be looked through"
    assert "DEBUG org.apache.spark.sql" in done.stderr
    (events,) = [each for each in tmp_path.iterdir() if each.name.startswith(("local-", "eventlog"))]
    assert source in events.read_text()
    checkpoints = [each for each in tmp_path.glob("checkpoint-*/**/*") if each.is_file()]
    assert checkpoints
    shown = {
        "stdout": done.stdout,
        "stderr": done.stderr,
        **{str(each): each.read_bytes().decode(errors="replace") for each in (events, *checkpoints)},
    }
    for where, text in shown.items():
        for secret in (MARKER, MARKER[:12], MARKER[-12:]):
            place = text.find(secret)
            assert place < 0, f"{where}: … {text[max(0, place - 300) : place]} …"
