"""The Spark session of a program of Sava's own: the driver is this process, and Java a child of it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sava.pipeline.launch import find_java, spark_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def open_session(
    name: str, master: str, *, conf: Mapping[str, str] | None = None, python_path: Sequence[Path] = ()
) -> SparkSession:
    """``conf`` wins over what is set here. ``python_path``: where Python's workers look for modules, too.
    Raises JavaMissing, SparkMissing."""
    _prepare(master, python_path)
    from pyspark.sql import SparkSession

    logging.getLogger("py4j").setLevel(logging.WARNING)
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.scheduler.mode": "FAIR",
        **(conf or {}),
    }
    builder = SparkSession.builder.master(master).appName(name)
    for key, value in settings.items():
        builder = builder.config(key, value)
    session: SparkSession = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    return session


def _prepare(master: str, python_path: Sequence[Path]) -> None:
    """What Java and Python's workers find in their environment."""
    environment = os.environ
    environment["SPARK_HOME"] = str(spark_home())
    environment["JAVA_HOME"] = str(find_java(environment).home)
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    environment.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    if master.startswith("local"):
        environment.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    paths = [str(path.absolute()) for path in python_path]
    sys.path[:0] = paths
    environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
