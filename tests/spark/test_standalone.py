"""``format("sava")`` on a real standalone cluster: a master, two workers, executors that die."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark.sink_topics import create, read
from tests.spark.source_topics import fill, new_topic, stored
from tests.spark.standalone_spark import REPOSITORY, SparkCluster, surroundings
from tests.support.brokers import Standalone
from tests.support.long import only_long

pytestmark = [
    only_long("six Java processes"),
    pytest.mark.timeout(900),
]
DRIVER = Path(__file__).with_name("cluster_driver.py")
CAUGHT_S = 180.0
DONE_S = 480.0
MESSAGES = 20_000
SETTINGS = {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.ui.enabled": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.executorEnv.PYTHONPATH": str(REPOSITORY),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    with SparkCluster(tmp_path_factory.mktemp("cluster")) as started:
        yield started


class Submitted:
    """A program that runs on the cluster, and the trap that it may be in."""

    def __init__(self, cluster: SparkCluster, broker: Standalone, place: Path, *job: str, trap: bool) -> None:
        self._cluster = cluster
        self._place = place
        self._log = place / "driver.log"
        settings = {**SETTINGS, **({"spark.executorEnv.SAVA_TRAP": str(place)} if trap else {})}
        command = [sys.executable, "-m", "sava.cli", "spark", "submit", "--master", cluster.master]
        for name, value in settings.items():
            command += ["--conf", f"{name}={value}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, str(DRIVER), *job],
                stdout=subprocess.PIPE,
                stderr=log,
                env=surroundings(SAVA_SERVICE=broker.url),
            )

    def kill_the_caught(self) -> None:
        """SIGKILL for the executor that is in the trap, in the middle of ``read``."""
        reached = self._place / "reached"
        deadline = time.monotonic() + CAUGHT_S
        while not reached.exists():
            assert self._process.poll() is None, self._said()
            assert time.monotonic() < deadline, self._said()
            time.sleep(0.05)
        executor = int(reached.read_text())
        assert self._cluster.runs(executor)
        os.kill(executor, signal.SIGKILL)
        (self._place / "release").touch()

    def result(self) -> dict[str, Any]:
        try:
            output, _ = self._process.communicate(timeout=DONE_S)
        finally:
            self._process.kill()
        # Spark puts what a program says on stderr on its stdout.
        assert self._process.returncode == 0, output.decode()[-4000:] + self._said()
        result: dict[str, Any] = json.loads(output.splitlines()[-1])
        return result

    def _said(self) -> str:
        return self._log.read_text()[-4000:]


@pytest.fixture(scope="module")
def topic(broker: Standalone) -> str:
    """Part of it in segments, part of it with the broker."""
    name = new_topic()
    fill(broker, name, range(MESSAGES), partitions=2, size=100)
    for number in range(2):
        stored(broker, f"{name}-part-{number}")
    fill(broker, name, range(MESSAGES, MESSAGES + 1000), partitions=2, size=100)
    return name


def test_both_workers_read(cluster: SparkCluster, broker: Standalone, topic: str, tmp_path: Path) -> None:
    found = Submitted(cluster, broker, tmp_path, "read", topic, trap=False).result()
    total = MESSAGES + 1000
    assert found == {"rows": total, "places": total, "payloads": total, "executors": 2}


def test_an_executor_killed_in_read_changes_nothing(
    cluster: SparkCluster, broker: Standalone, topic: str, tmp_path: Path
) -> None:
    job = Submitted(cluster, broker, tmp_path, "read", topic, trap=True)
    job.kill_the_caught()
    found = job.result()
    total = MESSAGES + 1000
    assert (found["rows"], found["places"], found["payloads"]) == (total, total, total)


def test_a_stream_whose_executor_is_killed_in_read_is_copied_exactly_once(
    cluster: SparkCluster, broker: Standalone, topic: str, tmp_path: Path
) -> None:
    target = new_topic()
    create(broker, target, partitions=2)
    checkpoint = str(tmp_path / "checkpoint")
    job = Submitted(cluster, broker, tmp_path, "copy", topic, target, checkpoint, trap=True)
    job.kill_the_caught()
    assert job.result()["batches"] >= 7
    copied = messages_of(broker, target)
    assert len(copied) == MESSAGES + 1000
    assert Counter(copied) == Counter(messages_of(broker, topic))


def messages_of(broker: Standalone, topic: str) -> list[tuple[str | None, bytes]]:
    parts = [read(broker, f"{topic}-part-{number}") for number in range(2)]
    return [(message.key, message.payload) for part in parts for message in part]
