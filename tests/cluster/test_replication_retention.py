"""A remote that is down for longer than retention lasts: what it does not have yet is kept for it, up to a
limit if there is one."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from sava.proto import topics_admin_pb2 as pb
from sava.storage.source_positions import replication_slot
from tests.support.brokers import PLAIN, Standalone
from tests.support.long import only_long
from tests.support.replication import RunningLink, Side
from tests.support.waiting import until

TOPIC, OTHER = "/default/orders", "/shop/orders"
SIZE = 50_000
"""Of a message, by chance and so as it is stored; twenty of them are kept."""
MEGABYTE = 1 << 20
CURSOR = replication_slot("west")


class Quick(Standalone):
    """Uploads every second, and looks all the time for what it may delete: of each topic all but a
    megabyte."""

    module = "tests.spark.quick_retention"

    def __init__(self, directory: Path, **environment: str) -> None:
        directory.mkdir()
        super().__init__(
            directory,
            PLAIN,
            SAVA__CLUSTER_NAME="east",
            SAVA__STORAGE__UPLOAD_INTERVAL_SECONDS="1",
            SAVA__POLICIES__RETENTION_SIZE_MB="1",
            **environment,
        )


@asynccontextmanager
async def clusters(tmp_path: Path, **east: str) -> AsyncIterator[tuple[Side, Side]]:
    """East with a link to west, whose topic has a twin that is not replicated."""
    (tmp_path / "west").mkdir()
    with (
        Quick(tmp_path / "east", **east) as sender,
        Standalone(tmp_path / "west", SAVA__CLUSTER_NAME="west") as receiver,
    ):
        here, there = Side(sender), Side(receiver)
        await here.ready()
        await there.ready()
        await here.namespace("shop")
        await here.create(TOPIC)
        await here.create(OTHER)
        await here.add("west", there.service)
        await here.replicate("default")
        yield here, there


async def described(side: Side, topic: str = TOPIC) -> pb.TopicDescription:
    found: pb.TopicDescription = await side.call(
        "topics", "DescribeTopic", pb.DescribeTopicRequest(name=topic)
    )
    return found


async def cursors(side: Side) -> dict[str, int]:
    """Of links, in the listing of the topic's subscriptions."""
    return {
        each.subscription: each.cursor
        for each in (await described(side)).subscriptions
        if each.type == "link"
    }


async def publish(side: Side, first: int, count: int) -> None:
    """To both topics, so much that the first of it is more than is kept."""
    for start in range(first, first + count, 5):
        payloads = [f"{number:06} {os.urandom(SIZE).hex()}" for number in range(start, start + 5)]
        await asyncio.to_thread(side.publish, TOPIC, payloads)
        await asyncio.to_thread(side.publish, OTHER, payloads)
        await until_stored(side, start + 5)


async def until_stored(side: Side, end: int) -> None:
    async def is_stored() -> bool:
        return all([(await described(side, topic)).stored_offset >= end for topic in (TOPIC, OTHER)])

    await until(is_stored, f"{end} messages are in segments")


async def until_forgotten(side: Side, topic: str, first: int) -> None:
    async def is_forgotten() -> bool:
        return (await described(side, topic)).start_offset >= first

    await until(is_forgotten, f"retention has removed what is before {first} of {topic}")


def numbers(side: Side) -> list[int]:
    return [int(payload[:6]) for payload in side.payloads(TOPIC)]


@only_long("retention, and a remote that is down for longer")
async def test_a_remote_that_is_down_for_longer_than_retention_gets_everything(tmp_path: Path) -> None:
    async with clusters(tmp_path) as (east, west):
        assert await cursors(east) == {CURSOR: 0}, "there before anything is copied"
        for command in ("delete --yes", "seek --latest", "create"):
            name, *more = command.split()
            _, err = await east.command("subscriptions", name, TOPIC, CURSOR, *more, code=1)
            assert "are for the links of replication" in err
        listed, _ = await east.command("subscriptions", "list", TOPIC)
        assert f"{CURSOR} link" in " ".join(listed.split())
        west.broker.kill()
        await publish(east, 0, 40)
        await until_forgotten(east, OTHER, 10)
        assert (await described(east)).start_offset == 0
        west.broker.start()
        link = RunningLink(east)
        try:

            async def is_copied() -> bool:
                return (await described(west)).next_offset == 40

            await until(is_copied, "west has all", timeout=60)
            assert numbers(west) == list(range(40))
            await until_forgotten(east, TOPIC, 10)
            assert (await cursors(east))[CURSOR] == 40
            west.broker.kill()
            await publish(east, 40, 40)
            await until_forgotten(east, OTHER, 50)
            assert (await described(east)).start_offset <= 40
            await east.clear("default")
            assert not await cursors(east)
            await until_forgotten(east, TOPIC, 50)
            west.broker.start()
            await west.ready()
        finally:
            link.stop()


@only_long("the backlog must outgrow a limit")
async def test_beyond_the_limit_messages_go_and_the_link_says_which(tmp_path: Path) -> None:
    limit = 2 * MEGABYTE / 1e9
    async with clusters(tmp_path, SAVA__REPLICATION__MAX_BACKLOG_GB=str(limit)) as (east, west):
        link = RunningLink(east)
        try:
            await publish(east, 0, 5)

            async def is_copied() -> bool:
                return (await described(west)).next_offset == 5

            await until(is_copied, "west has the first ones")
            west.broker.kill()
            await publish(east, 5, 50)
            await until_forgotten(east, TOPIC, 10)
            west.broker.start()

            async def is_lost() -> bool:
                (topic,) = await east.status(TOPIC)
                return topic.partitions[0].state == "data_loss"

            await until(is_lost, "the link says that messages are lost", timeout=90)
            (topic,) = await east.status(TOPIC)
            print(topic.partitions[0].reason)
            assert "5" in topic.partitions[0].reason
            assert topic.disconnected_count == 1
            assert numbers(west) == list(range(5)), "nothing is copied across the gap"

            assert "sava replication recreate" in topic.partitions[0].reason
            await east.recreate(TOPIC)

            async def goes_on() -> bool:
                (topic,) = await east.status(TOPIC)
                return topic.disconnected_count == 0 and numbers(west)[-1] == 54

            await until(goes_on, "the link goes on with what is left", timeout=60)
            first, *rest = numbers(west)[5:]
            assert (first >= 10, rest) == (True, list(range(first + 1, 55)))
        finally:
            link.stop(now=True)
        assert "messages are gone that were not copied" in east.broker.log.read_text()
