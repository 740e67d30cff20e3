"""What the exactly-once sink survives, shown by what is in the topics afterwards: every row, once.

One driver in a process of its own runs a query for each kind of trouble, each caught in its trap
(``tests.spark.sink_driver``). Then the driver is killed, and its queries go on in another one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark.sink_topics import create, new_topic
from tests.spark.test_sink_stream import plan_of, put_files, run, written
from tests.support.brokers import Standalone
from tests.support.long import only_long
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
READY_S = 300.0
FILES = 3


def reached(condition: Callable[[], bool], what: str, driver: Driver) -> None:
    """Wait for the condition while the driver runs."""

    def is_there() -> bool:
        assert driver.is_running, f"the driver has ended:\n{driver.log.read_text()[-4000:]}"
        return condition()

    def story() -> str:
        return f"{what}\n{driver.log.read_text()[-4000:]}"

    wait_until(is_there, story, timeout=READY_S, poll_s=0.05)


class Driver:
    """``tests.spark.sink_driver`` with what it has started: a JVM, and the Python workers of that."""

    def __init__(self, directory: Path, plans: list[dict[str, Any]]) -> None:
        conf = {
            "spark.ui.enabled": "false",
            "spark.driver.memory": "512m",
            "spark.sql.shuffle.partitions": "2",
            "spark.driver.host": "127.0.0.1",
            "spark.local.dir": str(directory / "local"),
            "spark.sql.warehouse.dir": str(directory / "warehouse"),
        }
        self.log = directory / "driver.log"
        written = directory / "plan.json"
        written.write_text(json.dumps({"queries": plans, "conf": conf}))
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.sink_driver", str(written)],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
                    "PYSPARK_PYTHON": sys.executable,
                    "SPARK_LOCAL_IP": "127.0.0.1",
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """kill -9, the JVM too. Its Python workers end when it is gone."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@only_long("six drivers")
def test_every_row_is_there_once_whoever_dies(
    spark: SparkSession, broker: Standalone, tmp_path: Path
) -> None:
    plans: dict[str, dict[str, Any]] = {}
    expected = {}
    for trap in ("before", "during", "after", "write", "fenced"):
        place = tmp_path / trap
        place.mkdir()
        topic = new_topic()
        create(broker, topic, partitions=2)
        expected[trap] = put_files(place / "input", FILES)
        plans[trap] = {
            **plan_of(broker, place, topic),
            "place": str(place),
            "trap": trap,
        }

    def topic_of(trap: str) -> str:
        return str(plans[trap]["options"]["topic"])

    driver = Driver(tmp_path, list(plans.values()))
    try:
        for trap in plans:
            reached(lambda trap=trap: (tmp_path / trap / "reached").exists(), f"{trap} is reached", driver)  # type: ignore[misc]
        reached((tmp_path / "after" / "answered").exists, "the commit is answered", driver)

        # A second driver on a checkpoint that the first still uses: the first is refused from then on.
        run(spark, plans["fenced"])
        assert written(broker, topic_of("fenced"), 2) == expected["fenced"]
        (tmp_path / "fenced" / "release").touch()
        reached((tmp_path / "fenced" / "outcome").exists, "the first driver is fenced", driver)
        said = (tmp_path / "fenced" / "outcome").read_text()
        assert "batch 1 of writer" in said
        assert "is not published" in said

        # Workers that die in a task are none of the query's business.
        reached((tmp_path / "write" / "outcome").exists, "the query whose workers died is done", driver)
        assert (tmp_path / "write" / "outcome").read_text() == "done"
        assert written(broker, topic_of("write"), 2) == expected["write"]
    finally:
        driver.kill()

    for trap in ("before", "during", "after"):
        assert not (tmp_path / trap / "outcome").exists()
        run(spark, plans[trap])
    found = {trap: written(broker, topic_of(trap), 2) for trap in plans}
    assert found == expected


@only_long("takes minutes")
@pytest.mark.timeout(900)
def test_drivers_and_brokers_that_die_at_any_moment(spark: SparkSession, tmp_path: Path) -> None:
    """Each time the driver is killed some time after it has come further; every other time the broker too."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    topic, partitions = new_topic(), 3
    expected = put_files(tmp_path / "input", 60)
    with Standalone(tmp_path) as broker:
        create(broker, topic, partitions=partitions)
        plan = {**plan_of(broker, tmp_path, topic), "place": str(tmp_path), "trap": "none"}

        def committed() -> int:
            return len(list((tmp_path / "checkpoint" / "commits").glob("[0-9]*")))

        for round_number in range(8):
            before = committed()
            driver = Driver(tmp_path, [plan])
            try:
                reached(lambda before=before: committed() > before, "a batch is written", driver)  # type: ignore[misc]
                time.sleep(chance.uniform(0, 1.5))
                if round_number % 2:
                    broker.kill()
                    broker.start()
                    time.sleep(chance.uniform(0, 1.5))
            finally:
                driver.kill()
            assert not (tmp_path / "outcome").exists(), "all was written before the last one died"
        run(spark, plan)
        assert written(broker, topic, partitions) == expected
