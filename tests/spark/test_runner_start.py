"""A runner whose Spark does not come up says why in a line, and ends."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sava.pipeline.launch import SparkMissing, find_java
from sava.pipeline.runner.process import LOST
from tests.spark.runner_process import RunnerProcess
from tests.support.long import IS_LONG, only_long

NOBODY = "127.0.0.1:9"
"""Where no broker is: a runner starts without."""
JAVA = "org.apache.spark.deploy.SparkSubmit"
MOMENTS_S = [0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 10.0] if IS_LONG else [0.0]


@pytest.fixture(autouse=True)
def java() -> None:
    try:
        find_java(os.environ)
    except SparkMissing as error:
        pytest.skip(str(error))


@pytest.fixture
def runners() -> Iterator[list[RunnerProcess]]:
    started: list[RunnerProcess] = []
    yield started
    for each in started:
        each.sweep()


@pytest.mark.parametrize("moment_s", MOMENTS_S)
def test_java_that_is_killed_while_it_starts(
    tmp_path: Path, runners: list[RunnerProcess], moment_s: float
) -> None:
    """In the midst of whatever is asked of it then; as systemd does it when memory is short."""
    runner = RunnerProcess(tmp_path, NOBODY, "runner")
    runners.append(runner)
    runner.reached(lambda: bool(runner.parts(JAVA)), "there is a Java")
    time.sleep(moment_s)
    for pid in runner.parts(JAVA):  # in its first moments also the script that starts it
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert runner.ended() == LOST, runner.said
    assert "Spark's Java has ended" in runner.said
    assert "start it again" in runner.said
    assert "Traceback" not in runner.said


@pytest.mark.parametrize("is_ready", [False, pytest.param(True, marks=only_long("Spark is started for it"))])
def test_a_signal_to_the_whole_job_is_no_loss_of_java(
    tmp_path: Path, runners: list[RunnerProcess], is_ready: bool
) -> None:
    """``kill %3`` ends the tour: the shell sends SIGTERM to the runner's group, Java ends at once, and the
    runner, which was to end too, called that a loss (exit code 70)."""
    runner = RunnerProcess(tmp_path, NOBODY, "runner")
    runners.append(runner)
    runner.reached(lambda: bool(runner.parts(JAVA)), "there is a Java")
    if is_ready:
        runner.reached(lambda: "this runner is ready" in runner.said, "it is ready")
    os.killpg(runner.pid, signal.SIGTERM)
    assert runner.ended() == 0, runner.said
    assert "CRITICAL" not in runner.said


@only_long("Spark is started for it")
def test_a_master_that_spark_refuses(tmp_path: Path, runners: list[RunnerProcess]) -> None:
    runner = RunnerProcess(tmp_path, NOBODY, "runner", "--master", "local[0]")
    runners.append(runner)
    assert runner.ended() == 1
    assert "Spark does not start with master local[0]: " in runner.said
    assert "check --master and --conf" in runner.said
    assert "Traceback" not in runner.said
    runner.wait_gone()
