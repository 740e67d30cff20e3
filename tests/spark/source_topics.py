"""Topics as tests of the source see them: filled by the client, read by Spark."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from sava.client.blocking import Client
from sava.pipeline.cluster import ClusterAccess, ClusterClient, PartitionExtent
from tests.support.brokers import Standalone
from tests.support.waiting import PATIENCE_S, wait_until

_numbers = itertools.count()


def new_topic() -> str:
    return f"/default/source-{next(_numbers)}"


def payload(number: int, size: int = 0) -> bytes:
    return b"%0*d" % (size, number)


def fill(
    broker: Standalone, topic: str, numbers: Iterable[int], *, partitions: int | None = None, size: int = 0
) -> None:
    """One message for each number. In a partitioned topic the number is the key, too."""
    with Client(broker.url, timeout=60) as client, client.producer(topic, partitions=partitions) as producer:
        for part in _chunks(numbers, 5000):
            keys = [str(number) for number in part] if partitions else None
            producer.send_many([payload(number, size) for number in part], keys=keys)
        producer.flush()


def _chunks(numbers: Iterable[int], size: int) -> Iterable[list[int]]:
    rest = iter(numbers)
    while part := list(itertools.islice(rest, size)):
        yield part


def link_to(broker: Standalone) -> ClusterClient:
    return ClusterClient.of(ClusterAccess(broker.url))


def extent(broker: Standalone, name: str) -> PartitionExtent:
    return link_to(broker).extents([name])[name]


def stored(broker: Standalone, name: str) -> None:
    """Until everything is in segments."""

    def is_stored() -> bool:
        known = extent(broker, name)
        return known.stored == known.end

    wait_until(is_stored, f"{name} is in segments")


def read(spark: SparkSession, broker: Standalone, schema: str = "", **options: Any) -> DataFrame:
    reader = spark.read.format("sava").options(service=broker.url, **options)
    return (reader.schema(schema) if schema else reader).load()


def follow(spark: SparkSession, broker: Standalone, schema: str = "", **options: Any) -> DataFrame:
    reader = spark.readStream.format("sava").options(service=broker.url, **options)
    return (reader.schema(schema) if schema else reader).load()


class Seen:
    """What a stream has brought: rows of (topic, partition, offset, payload), batch by batch."""

    def __init__(self) -> None:
        self._batches: dict[int, list[tuple[str, int, int, bytes]]] = {}
        """By number: one that is repeated takes the place of its former self, as in any sink that Spark calls
        exactly once."""

    @property
    def batches(self) -> list[list[tuple[str, int, int, bytes]]]:
        return [rows for _, rows in sorted(self._batches.items())]

    @property
    def rows(self) -> list[tuple[str, int, int, bytes]]:
        return [row for batch in self.batches for row in batch]

    @property
    def numbers(self) -> list[int]:
        return sorted(int(row[3]) for row in self.rows)

    def start(self, stream: DataFrame, checkpoint: Any, **trigger: Any) -> StreamingQuery:
        def note(batch: DataFrame, number: int) -> None:
            rows = batch.select("topic", "partition", "offset", "payload").collect()
            self._batches[number] = [(row[0], row[1], row[2], bytes(row[3])) for row in rows]

        writer = stream.writeStream.foreachBatch(note).option("checkpointLocation", str(checkpoint))
        if trigger:
            writer = writer.trigger(**trigger)
        return writer.start()

    def wait_idle(self, query: StreamingQuery) -> None:
        """Until the query knows where it begins, and has read everything."""
        wait_until(lambda: "Waiting for data" in query.status["message"], "the query waits")

    def wait(self, query: StreamingQuery, count: int, *, timeout: float = PATIENCE_S) -> None:
        """Until there are so many rows, or the query has failed."""

        def is_there() -> bool:
            if (error := query.exception()) is not None:
                raise error
            return len(self.rows) >= count

        wait_until(is_there, f"{count} rows of {len(self.rows)}", timeout=timeout)
