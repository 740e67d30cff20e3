"""One Spark for all tests of a process, and brokers for them.

Spark is a Java program that takes seconds to start, so tests share it; topics, checkpoints and queries are
a test's own. Its processes look for ``tests`` as well as ``sava``: what tests define travels by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from sava.pipeline.launch import SparkMissing, find_java
from tests.support.brokers import Standalone
from tests.support.objects import S3Server
from tests.support.waiting import PATIENCE_S

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def s3_place(tmp_path_factory: pytest.TempPathFactory) -> S3Server:
    """Not started. Spark's processes know from their beginning where it will be."""
    return S3Server(tmp_path_factory.mktemp("s3"))


def s3_environment(place: S3Server) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": place.options["endpoint"],
        "AWS_ACCESS_KEY_ID": place.options["access_key_id"],
        "AWS_SECRET_ACCESS_KEY": place.options["secret_access_key"],
        "AWS_REGION": place.options["region"],
    }


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory, s3_place: S3Server) -> Iterator[SparkSession]:
    try:
        java = find_java(os.environ)
    except SparkMissing as error:
        pytest.skip(str(error))
    directory = tmp_path_factory.mktemp("spark")
    environment = {
        "JAVA_HOME": str(java),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        **s3_environment(s3_place),
    }
    with warnings.catch_warnings(), mock.patch.dict(os.environ, environment):
        warnings.simplefilter("ignore")
        session = (
            SparkSession.builder.master("local[2]")
            .appName("sava tests")
            .config("spark.driver.memory", "1g")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.session.timeZone", "UTC")
            .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
            .config("spark.local.dir", str(directory / "local"))
            .config("spark.driver.extraJavaOptions", f"-Dderby.system.home={directory}")
            .getOrCreate()
        )
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
    _end_java()


def _end_java() -> None:
    """A session that is stopped leaves its Java to the end of the process, and whatever waits for that."""
    gateway = SparkContext._gateway
    assert gateway is not None
    SparkContext._gateway = SparkContext._jvm = None
    gateway.shutdown()
    java: subprocess.Popen[bytes] = gateway.proc
    assert java.stdin is not None
    java.stdin.close()  # Java ends when the other end of its input is closed
    java.wait(PATIENCE_S)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """Messages go to segments soon after they came."""
    directory = tmp_path_factory.mktemp("broker")
    with Standalone(directory, SAVA__STORAGE__UPLOAD_INTERVAL_SECONDS="1") as started:
        yield started


@pytest.fixture(scope="session")
def slow_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    """Only what fills a segment goes there: the rest stays with the broker."""
    directory = tmp_path_factory.mktemp("slow-broker")
    with Standalone(directory, SAVA__STORAGE__UPLOAD_INTERVAL_SECONDS="3600") as started:
        yield started
