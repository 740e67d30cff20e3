"""A real standalone cluster of Spark: a master and workers, each a process of its own on loopback.

    with SparkCluster(tmp_path, workers=2) as cluster:
        submit(..., "--master", cluster.master)

Started by ``spark-class``, which becomes Java, so that the process that was started is the one that is
stopped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Self

from sava.pipeline.launch import find_java, spark_home
from tests.spark.processes import has_started
from tests.support.network import free_ports
from tests.support.waiting import PATIENCE_S

REPOSITORY = Path(__file__).parents[2]
START_TIMEOUT_S = 90.0
DAEMON = "org.apache.spark.deploy"


def surroundings(**more: str) -> dict[str, str]:
    """Of every Spark process of a test. What tests define is imported by its name, on executors as well."""
    return {
        **os.environ,
        "JAVA_HOME": str(find_java(os.environ)),
        "SPARK_HOME": str(spark_home()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": str(REPOSITORY),
        **more,
    }


class SparkCluster:
    def __init__(self, directory: Path, *, workers: int = 2) -> None:
        self.port, self._page, *ports = free_ports(2 + 2 * workers)
        self.master = f"spark://127.0.0.1:{self.port}"
        self._directory = directory
        self._worker_ports = list(zip(ports[::2], ports[1::2], strict=True))
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self._start("master", "master.Master", "--port", str(self.port), "--webui-port", str(self._page))
            for number, (port, page) in enumerate(self._worker_ports):
                self._start(
                    f"worker-{number}",
                    "worker.Worker",
                    *("--port", str(port), "--webui-port", str(page), "--cores", "1", "--memory", "1g"),
                    *("--work-dir", str(self._directory / f"work-{number}"), self.master),
                )
            self._until_complete()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def runs(self, pid: int) -> bool:
        """Whether the process is one of an executor of this cluster, and nobody else's."""
        workers = {process.pid for name, process in self._processes.items() if name != "master"}
        return has_started(workers, pid)

    def _start(self, name: str, kind: str, *arguments: str) -> None:
        command = [str(spark_home() / "bin" / "spark-class"), f"{DAEMON}.{kind}", "--host", "127.0.0.1"]
        settings = surroundings(
            SPARK_DAEMON_MEMORY="256m",
            # The master would take port 6066, whoever has it.
            SPARK_DAEMON_JAVA_OPTS="-Dspark.master.rest.enabled=false",
        )
        with (self._directory / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(
                [*command, *arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=settings
            )

    def _until_complete(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._alive_workers() < len(self._worker_ports):
            for name, process in self._processes.items():
                assert process.poll() is None, (self._directory / f"{name}.log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the workers have not come up"
            time.sleep(0.1)

    def _alive_workers(self) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._page}/json/", timeout=PATIENCE_S) as page:
                return int(json.load(page)["aliveworkers"])
        except (OSError, ValueError):  # as long as it starts, its front page is what it has for every path
            return 0

    def _stop(self) -> None:
        """Workers take their executors with them."""
        for process in reversed(self._processes.values()):
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
