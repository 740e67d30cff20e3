"""A Spark application whose options hold a secret: it prints whatever Spark shows of itself.

    python -m tests.spark.secrets_program SERVICE SOURCE TARGET DIRECTORY

The secret is the content of DIRECTORY/secret, so that it is in no command line either.
"""

from __future__ import annotations

import json
import logging
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

PAGES = ("jobs", "stages", "storage", "environment", "executors", "SQL", "StreamingQuery")
LISTED = ("environment", "sql?details=true&planDescription=true", "jobs", "stages", "allexecutors")


LOG: Final = """
rootLogger.level = info
rootLogger.appenderRef.stderr.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %p %c: %m%n%ex
logger.spark.name = org.apache.spark
logger.spark.level = info
logger.sql.name = org.apache.spark.sql
logger.sql.level = debug
"""


def session(directory: Path) -> SparkSession:
    log4j = directory / "log4j2.properties"
    log4j.write_text(LOG)
    settings = {
        "spark.ui.enabled": "true",
        "spark.ui.port": "0",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": directory.as_uri(),
        "spark.eventLog.compress": "false",
        "spark.eventLog.rolling.enabled": "false",
        "spark.driver.memory": "512m",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={log4j.as_uri()}",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
    }
    builder = SparkSession.builder.master("local[2]").appName("secrets")
    for name, value in settings.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def show_plans(rows: DataFrame) -> None:
    for mode in ("simple", "extended", "codegen", "cost", "formatted"):
        rows.explain(mode=mode)
    print(repr(rows))


def pages(spark: SparkSession) -> Iterator[str]:
    address = spark.sparkContext.uiWebUrl
    assert address is not None
    there = f"{address}/api/v1/applications/{spark.sparkContext.applicationId}"
    for url in (*(f"{address}/{page}/" for page in PAGES), *(f"{there}/{each}" for each in LISTED)):
        with urllib.request.urlopen(url, timeout=30) as response:
            yield f"{url}\n{response.read().decode()}"
    with urllib.request.urlopen(f"{there}/sql?length=100", timeout=30) as response:
        for execution in json.load(response):
            with urllib.request.urlopen(f"{address}/SQL/execution/?id={execution['id']}", timeout=30) as page:
                yield page.read().decode()


def failures(spark: SparkSession, options: dict[str, str], secret: str) -> Iterator[str]:
    """Of options that are wrong, also in the name under which the secret was given."""
    for wrong in (
        {"tokn": secret},
        {"tokenn": secret},
        {"auth_token": secret},
        {"token": secret, "tokenFile": "/x"},
        {"token": secret, "service": "127.0.0.1:9", "timeout": "1"},
        {"token": secret, "topic": "nothing"},
        {"token": secret, "path": "/x"},
    ):
        try:
            spark.read.format("sava").options(**{**options, **wrong}).load().count()
        except PySparkException as error:
            yield str(error)
        else:
            raise AssertionError(f"{wrong.keys()} was accepted")


def main(service: str, source: str, target: str, directory: Path) -> None:
    logging.basicConfig(level=logging.DEBUG, stream=sys.stdout)
    logging.getLogger("py4j").setLevel(logging.INFO)  # it logs each call with its arguments
    secret = (directory / "secret").read_text().strip()
    spark = session(directory)
    options = {"service": service, "topic": source, "startingOffsets": "earliest"}
    for given in ({"token": secret}, {"tokenFile": str(directory / "secret")}):
        rows = spark.read.format("sava").options(**options, **given).load()
        show_plans(rows.where("offset >= 0").select("key", "payload"))
        assert rows.count() == 100
        rows.createOrReplaceTempView("orders")
        spark.sql("SELECT count(*) FROM orders").collect()
        query = (
            spark.readStream.format("sava")
            .options(**options, **given)
            .load()
            .select("key", "payload")
            .writeStream.format("sava")
            .options(service=service, topic=target, **given)
            .option("checkpointLocation", str(directory / f"checkpoint-{len(given)}-{next(iter(given))}"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        print(json.dumps([dict(each) for each in query.recentProgress], default=str))
        print(json.dumps(query.status), query.name)
        query.explain(extended=True)
        rows.select("key", "payload").write.format("sava").options(
            service=service, topic=target, **given
        ).mode("append").save()
    print(*failures(spark, options, secret), sep="\n")
    print(*pages(spark), sep="\n")
    spark.stop()
    print("all was shown")


if __name__ == "__main__":
    _, service, source, target, directory = sys.argv
    main(service, source, target, Path(directory))
