"""A standalone cluster of Spark on loopback: a master, and workers of one core each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

from bench.processes import Child, free_ports
from sava.pipeline.launch import find_java, spark_home

START_TIMEOUT_S = 60.0


def surroundings() -> dict[str, str]:
    return {
        "JAVA_HOME": str(find_java(os.environ)),
        "SPARK_HOME": str(spark_home()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": "-Dspark.master.rest.enabled=false",
        "PYSPARK_PYTHON": sys.executable,
    }


@contextlib.asynccontextmanager
async def spark_cluster(folder: Path, workers: int) -> AsyncIterator[str]:
    """The address of its master, when all workers are there."""
    port, page, *ports = free_ports(2 + 2 * workers)
    master = f"spark://127.0.0.1:{port}"
    children = [_start(folder, "master.Master", port, page)]
    try:
        for number in range(workers):
            where = ("--cores", "1", "--memory", "1g", "--work-dir", str(folder / f"work-{port}-{number}"))
            own_port, own_page = ports[2 * number : 2 * number + 2]
            children.append(_start(folder, "worker.Worker", own_port, own_page, *where, master))
        async with asyncio.timeout(START_TIMEOUT_S):
            while await asyncio.to_thread(_alive, page) < workers:
                for child in children:
                    child.check()
                await asyncio.sleep(0.1)
        yield master
    finally:
        for child in reversed(children):
            await child.stop()


def _start(folder: Path, kind: str, port: int, page: int, *more: str) -> Child:
    command = [str(spark_home() / "bin" / "spark-class"), f"org.apache.spark.deploy.{kind}"]
    where = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", str(page)]
    return Child([*command, *where, *more], folder / f"spark-{port}.log", surroundings())


def _alive(page: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{page}/json/", timeout=5) as answer:
            return int(json.load(answer)["aliveworkers"])
    except OSError:
        return 0
