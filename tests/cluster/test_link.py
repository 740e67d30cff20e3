"""The link of a Spark process while its topics move, and with brokers that do not have them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sava.pipeline.cluster import ClusterAccess, ClusterClient
from sava.records import RecordBatch
from tests.cluster.test_brokers import at_rest
from tests.support.brokers import Brokers
from tests.support.waiting import PATIENCE_S

TOPIC = "/default/orders"
ROWS = 1000


def batch(number: int) -> RecordBatch:
    payloads = [b"%08d" % row + bytes(500) for row in range(number * ROWS, (number + 1) * ROWS)]
    return RecordBatch.encode(payloads, publish_time=1)


@asynccontextmanager
async def linked(cluster: Brokers, *, through: int | None = None) -> AsyncIterator[ClusterClient]:
    brokers = cluster.brokers if through is None else [cluster.brokers[through]]
    service = ",".join(broker.client_url for broker in brokers)
    link = await asyncio.to_thread(ClusterClient.of, ClusterAccess(service))
    try:
        yield link
    finally:
        await asyncio.to_thread(link.close)


async def test_reading_waiting_and_publishing_follow_a_topic(tmp_path: Path) -> None:
    """A topic of 40 batches of half a megabyte goes from one broker to the other while it is read, while
    somebody waits for more, and while more is published."""
    count = 40
    async with Brokers(2, tmp_path) as cluster, linked(cluster) as link:
        await cluster.create(TOPIC)
        published = await asyncio.to_thread(link.publish, TOPIC, map(batch, range(count)))
        assert published == count * ROWS

        reading = link.read(TOPIC, 0, count * ROWS)
        found = [await asyncio.to_thread(next, reading)]
        (move,) = await cluster.unload(TOPIC)
        assert not move.error
        found += await asyncio.to_thread(list, reading)
        rows = [int(payload[:8]) for each in found for payload in each.payloads()]
        assert rows == list(range(count * ROWS)), "nothing lost, nothing twice"

        end = count * ROWS
        await asyncio.to_thread(link.wait_beyond, {TOPIC: end}, timeout_s=0.1)
        waiting = asyncio.create_task(asyncio.to_thread(link.wait_beyond, {TOPIC: end}, timeout_s=PATIENCE_S))
        (move,) = await cluster.unload(TOPIC)
        assert not move.error
        await asyncio.to_thread(link.publish, TOPIC, iter([batch(count)]))
        began = time.monotonic()
        assert (await waiting)[TOPIC].end == end + ROWS
        assert time.monotonic() - began < PATIENCE_S / 2, "it did not wait for its time to be over"

        publishing = asyncio.create_task(
            asyncio.to_thread(link.publish, TOPIC, map(batch, range(count + 1, 3 * count)))
        )
        (move,) = await cluster.unload(TOPIC)
        assert not move.error
        await publishing
        found = await asyncio.to_thread(list, link.read(TOPIC, end, 3 * end))
        rows = [int(payload[:8]) for each in found for payload in each.payloads()]
        assert rows == list(range(end, 3 * end))


async def test_a_link_to_a_broker_that_has_none_of_the_topics(tmp_path: Path) -> None:
    """Another broker answers for the owner, and the owner is found when the known broker is gone."""
    async with Brokers(3, tmp_path) as cluster:
        await cluster.create(TOPIC, partitions=6)
        async with linked(cluster, through=0) as link:
            names = (await asyncio.to_thread(link.partitions, TOPIC)).names
            assert len(names) == 6
            for number, name in enumerate(names):
                assert await asyncio.to_thread(link.publish, name, iter([batch(number)])) == ROWS
                await asyncio.to_thread(link.advance, name, "query", ROWS)
            known = await asyncio.to_thread(link.wait_beyond, dict.fromkeys(names, 0), timeout_s=PATIENCE_S)
            assert {name: extent.end for name, extent in known.items()} == dict.fromkeys(names, ROWS)
            described = await cluster.describe(names[0])
            assert [each.backlog for each in described.subscriptions] == [0]

            for name in names:
                await at_rest(cluster, name)
            cluster.brokers[0].kill()
            await cluster.brokers[0].ended()
            listed = await asyncio.to_thread(link.topics)
            assert [each.topic for each in listed] == [TOPIC]
            # Its topics go to the others; until then they are missing, and nothing else is the worse for it.
            ends = dict.fromkeys(names, ROWS)
            async with asyncio.timeout(60):
                while len(known := await asyncio.to_thread(link.wait_beyond, ends, timeout_s=0.2)) < 6:
                    assert all(extent.end == ROWS for extent in known.values())
            waiting = asyncio.create_task(asyncio.to_thread(link.wait_beyond, ends, timeout_s=PATIENCE_S))
            await asyncio.to_thread(link.publish, names[0], iter([batch(0)]))
            assert (await waiting)[names[0]].end == 2 * ROWS
