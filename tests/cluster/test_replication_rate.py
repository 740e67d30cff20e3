"""The rate of a remote: what all topics together may send there."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from sava.proto import replication_pb2 as pb
from tests.support.brokers import Standalone
from tests.support.replication import RunningLink, Side
from tests.support.waiting import until

TOPICS = [f"/default/orders-{number}" for number in range(4)]
RATE, EACH = 200, 150


async def test_all_topics_of_a_link_share_its_rate(tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("east", "west")}
    for place in places.values():
        place.mkdir()
    with (
        Standalone(places["east"], SAVA__CLUSTER_NAME="east") as sender,
        Standalone(places["west"], SAVA__CLUSTER_NAME="west") as receiver,
    ):
        east, west = Side(sender), Side(receiver)
        await east.ready()
        await west.ready()
        for topic in TOPICS:
            await east.create(topic)
            await asyncio.to_thread(east.publish, topic, [str(number) for number in range(EACH)])
        await east.replication("AddRemote", pb.Remote(name="west", service=west.service, max_rate=RATE))
        await east.replicate("default")

        async def copied() -> list[int]:
            found = await east.replication("GetReplicationStatus", pb.GetReplicationStatusRequest())
            return [topic.partitions[0].messages for topic in found.topics]

        async def is_done() -> bool:
            return await copied() == [EACH] * len(TOPICS)

        link = RunningLink(east)
        try:
            began = time.monotonic()
            await until(is_done, "all is copied")
            took = time.monotonic() - began
        finally:
            link.stop()
        total = EACH * len(TOPICS)
        assert took >= (total - RATE) / RATE, "but for what may go at once, no faster than its rate"
        for topic in TOPICS:
            payloads = await asyncio.to_thread(west.payloads, topic)
            assert payloads == [str(number) for number in range(EACH)]
