"""The Spark session of a program of Sava's own: the driver is this process, and Java a child of it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from sava.errors import HostError, Outcome
from sava.pipeline.launch import find_java, spark_home
from sava.pipeline.spark_errors import brief

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


ENDING_S: Final = 2.0


class JavaGone(HostError):
    """Java was killed, or ran out of memory."""

    outcome = Outcome.UNKNOWN


class SparkRefused(HostError):
    """Java runs, and there is no Spark as it was asked for."""


def open_session(
    name: str, master: str, *, conf: Mapping[str, str] | None = None, python_path: Sequence[Path] = ()
) -> SparkSession:
    """``conf`` wins over what is set here. ``python_path``: where Python's workers look for modules, too.
    Raises JavaMissing, SparkMissing, JavaGone, SparkRefused."""
    _prepare(master, python_path)
    from pyspark.sql import SparkSession

    logging.getLogger("py4j").setLevel(logging.WARNING)
    logging.getLogger().addFilter(_is_not_of_py4j)
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
    try:
        session: SparkSession = builder.getOrCreate()
        session.sparkContext.setLogLevel("ERROR")
    except Exception as error:
        # Whatever was being asked of Java when it ended, or refused: a dozen of types.
        raise _not_started(master, error) from error
    return session


def _is_not_of_py4j(record: logging.LogRecord) -> bool:
    """Py4J tells the root logger, with a trace, of each call that fails; its caller is told, too."""
    return Path(record.pathname).parent.name != "py4j"


def java_of_spark() -> subprocess.Popen[bytes] | None:
    """None: it has not come up, or is not a child of this process."""
    from pyspark import SparkContext

    return getattr(SparkContext._gateway, "proc", None)


def _not_started(master: str, error: Exception) -> JavaGone | SparkRefused:
    java = java_of_spark()
    code = None
    if java is not None:
        # Its connections end before it does.
        with suppress(subprocess.TimeoutExpired):
            code = java.wait(ENDING_S)
    if java is None or code is not None:
        how = "" if code is None else f" with code {code}"
        return JavaGone(
            f"Spark's Java has ended{how} while it was being started: it was killed, there was not enough "
            "memory for it, or it has not taken --master or --conf, which it has said on stderr then; start "
            "it again"
        )
    reason = brief(error)  # Java knows it
    java.kill()
    return SparkRefused(f"Spark does not start with master {master}: {reason}; look at --master and --conf")


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
