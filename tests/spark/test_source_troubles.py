"""Streams of ``format("sava")`` while topics move, brokers die, and messages are deleted under them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from sava.client import Client
from sava.pipeline.cluster import ClusterAccess, ClusterClient, PartitionExtent
from tests.spark.source_topics import Seen
from tests.support.brokers import Brokers
from tests.support.long import only_long
from tests.support.waiting import until

pytestmark = only_long("brokers of its own")

MESSAGES = 200_000
MOVES = 6
TIMEOUT_S = 300.0

TOPIC = "/default/orders"


async def publish(client: Client, topic: str, start: int, end: int) -> None:
    async with client.producer(topic, timeout=60) as producer:
        for first in range(start, end, 500):
            numbers = range(first, min(first + 500, end))
            await producer.send_many([b"%d" % n for n in numbers], keys=[str(n) for n in numbers])


def follow(spark: SparkSession, cluster: Brokers, **options: Any) -> Any:
    service = ",".join(broker.client_url for broker in cluster.brokers)
    chosen = {"service": service, "topic": TOPIC, "startingOffsets": "earliest", **options}
    return spark.readStream.format("sava").options(**chosen).load()


async def test_each_offset_once_while_topics_move_and_a_broker_restarts(
    spark: SparkSession, tmp_path: Path
) -> None:
    """A publisher, a query, and an operator at the same time. The long form also kills a broker that owns a
    partition, and starts it again."""
    async with Brokers(2, tmp_path) as cluster, cluster.sava_client(timeout=60) as client:
        await cluster.create(TOPIC, partitions=2)
        seen = Seen()
        stream = await asyncio.to_thread(follow, spark, cluster)
        query = await asyncio.to_thread(seen.start, stream, tmp_path / "checkpoint")
        try:
            publishing = asyncio.create_task(publish(client, TOPIC, 0, MESSAGES))
            for move in range(MOVES):
                done = MESSAGES * (move + 1) // (MOVES + 2)
                await asyncio.to_thread(seen.wait, query, done, timeout=TIMEOUT_S)
                name = f"{TOPIC}-part-{move % 2}"
                (target,) = await cluster.others(name)
                await cluster.unload(name, to=target)
                if move == MOVES // 2:
                    victim = await cluster.owner(name)
                    victim.kill()
                    await victim.ended()
                    await victim.start()
                    await cluster.registered()
            await publishing
            await asyncio.to_thread(seen.wait, query, MESSAGES, timeout=TIMEOUT_S)
        finally:
            await asyncio.to_thread(query.stop)
    check(seen, MESSAGES)


def check(seen: Seen, count: int) -> None:
    assert seen.numbers == list(range(count))
    for number in (0, 1):
        offsets = sorted(row[2] for row in seen.rows if row[1] == number)
        assert offsets == list(range(len(offsets)))


async def test_a_broker_that_is_down_for_a_while_delays_only_its_partitions(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Its partition is awake, so that nobody else serves it before its journal is recovered; the query goes
    on with the other one."""
    async with (
        Brokers(3, tmp_path, upload_interval_s=3600) as cluster,
        cluster.sava_client(timeout=60) as client,
    ):
        await cluster.create(TOPIC, partitions=2)
        owners = [await cluster.owner(f"{TOPIC}-part-{number}") for number in (0, 1)]
        if owners[0] is owners[1]:
            target = (await cluster.others(f"{TOPIC}-part-1"))[0]
            await cluster.unload(f"{TOPIC}-part-1", to=target)
            owners[1] = target
        await publish(client, TOPIC, 0, 1000)
        seen = Seen()
        stream = await asyncio.to_thread(follow, spark, cluster)
        query = await asyncio.to_thread(seen.start, stream, tmp_path / "checkpoint")
        try:
            await asyncio.to_thread(seen.wait, query, 1000)
            owners[1].kill()
            await owners[1].ended()
            async with (
                Client([owners[0].client_url], timeout=60) as other,
                other.producer(f"{TOPIC}-part-0", timeout=60) as producer,
            ):
                await producer.send(b"1000")
            await asyncio.to_thread(seen.wait, query, 1001)
            await owners[1].start()
            await publish(client, TOPIC, 1001, 1500)
            await asyncio.to_thread(seen.wait, query, 1500)
        finally:
            await asyncio.to_thread(query.stop)
    check(seen, 1500)


# -- retention ---------------------------------------------------------------------------


@pytest.fixture
async def forgetful(tmp_path: Path) -> AsyncIterator[Brokers]:
    """A topic that keeps about a megabyte, of which a query with a checkpoint has read the first ten messages
    and others have been deleted since."""
    async with Brokers(1, tmp_path) as cluster:
        (broker,) = cluster.brokers
        await broker.stop()
        broker.run_as("tests.spark.quick_retention")
        await broker.start()
        await cluster.registered()
        await cluster.create(TOPIC)
        yield cluster


async def overtake(cluster: Brokers) -> PartitionExtent:
    """Publish until messages that were not read are gone; what is left."""
    await cluster.command("topics", "set-policy", TOPIC, "--retention-size-mb", "1")
    async with cluster.sava_client(timeout=60) as client, client.producer(TOPIC, timeout=60) as producer:
        for _ in range(4):
            await producer.send_many([b"%d " % n + os.urandom(1500) for n in range(500)])
            await until(lambda: is_stored(cluster), "all is in segments")
    await until(lambda: has_settled(cluster), "nothing more can be deleted")
    return await extent(cluster)


async def extent(cluster: Brokers) -> PartitionExtent:
    link = ClusterClient.of(ClusterAccess(cluster.brokers[0].client_url))
    return (await asyncio.to_thread(link.extents, [TOPIC]))[TOPIC]


async def is_stored(cluster: Brokers) -> bool:
    known = await extent(cluster)
    return known.stored == known.end


async def has_settled(cluster: Brokers) -> bool:
    """A segment goes if those behind it are a megabyte."""
    link = ClusterClient.of(ClusterAccess(cluster.brokers[0].client_url))
    segments = (await asyncio.to_thread(link.segments, TOPIC, 0)).segments
    return segments[0].start_offset > 10 and sum(segment.size for segment in segments[1:]) < 1 << 20


async def run_to_end(spark: SparkSession, cluster: Brokers, checkpoint: Path, **options: str) -> list[int]:
    """The offsets that a query brings which ends with what is there."""
    offsets: list[int] = []

    def note(batch: Any, number: int) -> None:
        offsets.extend(row[0] for row in batch.select("offset").collect())

    def run() -> None:
        writer = follow(spark, cluster, **options).writeStream.foreachBatch(note)
        query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(60)
        finally:
            query.stop()

    await asyncio.to_thread(run)
    return sorted(offsets)


async def test_retention_that_overtakes_a_query(
    spark: SparkSession, forgetful: Brokers, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    async with forgetful.sava_client(timeout=60) as client:
        await publish(client, TOPIC, 0, 10)
    assert await run_to_end(spark, forgetful, checkpoint) == list(range(10))
    kept = await overtake(forgetful)
    with pytest.raises(StreamingQueryException) as caught:
        await run_to_end(spark, forgetful, checkpoint)
    told = f"topic {TOPIC}, partition 0: offsets 10 to {kept.start} cannot be read any more"
    assert any(told in line and "failOnDataLoss" in line for line in str(caught.value).splitlines())
    left = await run_to_end(spark, forgetful, checkpoint, failOnDataLoss="false")
    assert left == list(range(kept.start, kept.end))
    assert await run_to_end(spark, forgetful, checkpoint) == []


async def test_retention_and_a_batch_read_by_offsets(spark: SparkSession, forgetful: Brokers) -> None:
    kept = await overtake(forgetful)
    service = forgetful.brokers[0].client_url

    def count(**options: str) -> int:
        return spark.read.format("sava").options(service=service, topic=TOPIC, **options).load().count()

    by_number = {"startingOffsets": json.dumps({TOPIC: {"0": 3}})}
    assert await asyncio.to_thread(count) == kept.end - kept.start
    with pytest.raises(Exception, match=f"offsets 3 to {kept.start} cannot be read any more"):
        await asyncio.to_thread(count, **by_number)
    assert await asyncio.to_thread(count, failOnDataLoss="false", **by_number) == kept.end - kept.start


async def test_retention_waits_for_a_query_that_reports_its_progress(
    spark: SparkSession, forgetful: Brokers, tmp_path: Path
) -> None:
    """A subscription keeps what it has not acked, and a query with one has acked what it has read."""
    checkpoint = tmp_path / "checkpoint"
    async with forgetful.sava_client(timeout=60) as client:
        await publish(client, TOPIC, 0, 10)
    options = {"subscription": "spark"}
    assert await run_to_end(spark, forgetful, checkpoint, **options) == list(range(10))
    await forgetful.command("topics", "set-policy", TOPIC, "--retention-size-mb", "1")
    async with forgetful.sava_client(timeout=60) as client, client.producer(TOPIC, timeout=60) as producer:
        for _ in range(3):
            await producer.send_many([b"%d " % n + os.urandom(1500) for n in range(500)])
            await until(lambda: is_stored(forgetful), "all is in segments")
    assert await run_to_end(spark, forgetful, checkpoint, **options) == list(range(10, 1510))
