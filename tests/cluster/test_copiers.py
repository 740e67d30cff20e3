"""Two who copy the same source at once, and a third that brings the same messages by way of another cluster,
while the topic moves and its owner is killed: each message of each source is there once, and in order.

``SAVA_LONG=1`` goes on for minutes. The seed is printed.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path

import pytest

from sava.errors import SavaError
from tests.cluster.mirrored import MirroredBrokers
from tests.support.brokers import Brokers
from tests.support.copying import Origins, Sender, of_origin

IS_LONG = os.environ.get("SAVA_LONG", "") not in ("", "0")
ROUNDS = 12 if IS_LONG else 1
TOPIC = "/default/copied"


class World:
    """Sources that grow while they are copied."""

    def __init__(self, cluster: Brokers, chance: random.Random) -> None:
        self.cluster = cluster
        self.chance = chance
        self.eu, self.asia = Origins("eu"), Origins("asia")
        self.relayed = 0
        self.is_complete = False
        self.senders = [
            Sender(
                self.addresses,
                TOPIC,
                origins,
                random.Random(chance.random()),
                longest=50,
                is_complete=lambda: self.is_complete,
            )
            for origins in (self.eu, self.eu, self.asia)
        ]

    def addresses(self) -> list[str]:
        """Any broker: it passes on what is not its own."""
        return [broker.client_url.removeprefix("http://") for broker in self.cluster.brokers]

    async def grow(self) -> None:
        while not self.is_complete:
            self.publish()
            await asyncio.sleep(0.02)

    def publish(self) -> None:
        count, start = self.chance.randrange(1, 30), len(self.eu.held)
        self.eu.publish(count, skip=(start + self.chance.randrange(30),))
        if self.chance.random() < 0.5:  # the other cluster is a little behind
            self.asia.relay(self.eu, self.relayed, start)
            self.relayed = start
            self.asia.publish(self.chance.randrange(3))

    async def goes_on(self) -> None:
        """Until something new was copied."""
        async with asyncio.timeout(60):
            await asyncio.gather(*(sender.beyond(sender.position + 1) for sender in self.senders))

    async def move(self) -> None:
        """Perhaps refused, by a cluster that has just lost a broker."""
        target = self.chance.choice(await self.cluster.others(TOPIC))
        try:
            print(
                "move",
                [(move.to_broker_id, move.error) for move in await self.cluster.unload(TOPIC, to=target)],
            )
        except SavaError as error:
            print("not moved:", error)

    async def kill(self) -> None:
        owner = await self.cluster.owner(TOPIC)
        print("kill", owner.number)
        owner.kill()
        await owner.ended()
        await asyncio.sleep(self.chance.uniform(0, 0.5))
        await owner.start()
        await self.cluster.served(TOPIC)


@pytest.mark.timeout(900)
async def test_each_message_is_there_once_and_in_order(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    async with Brokers(3, tmp_path) as cluster:
        world = World(cluster, random.Random(seed))
        await cluster.create(TOPIC)
        await cluster.served(TOPIC)
        began = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.grow())
            for sender in world.senders:
                tasks.create_task(sender.run())
            for _ in range(ROUNDS):
                for trouble in (world.move, world.kill, world.move):
                    await world.goes_on()
                    await trouble()
            await world.goes_on()
            world.is_complete = True
        seconds = time.monotonic() - began
        for sender in world.senders:
            print(f"sent {sender.sent} refused {sender.refused} failed {sender.failed} at {sender.position}")
        found = await read_all(cluster)
        print(f"{len(found)} messages in {seconds:.1f} s")
        for origins in (world.eu, world.asia):
            assert of_origin(found, origins.source) == of_origin(origins.payloads, origins.source)
        assert sum(sender.refused for sender in world.senders), "they were in each other's way"


async def test_it_goes_on_once_where_the_owner_and_its_disk_are_gone(tmp_path: Path) -> None:
    """Nothing was uploaded: how far each source was copied, and which messages came by which way, is told by
    the copies of the journal on other disks, and by nothing else. Who copies was given receipts for it, and
    sends none of it again."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    async with MirroredBrokers(3, tmp_path) as cluster:
        await cluster.all_running()
        world = World(cluster, random.Random(seed))
        await cluster.create(TOPIC)
        await cluster.served(TOPIC)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(world.grow())
            for sender in world.senders:
                tasks.create_task(sender.run())
            for _ in range(ROUNDS):
                await world.goes_on()
                await world.goes_on()
                owner = await cluster.owner(TOPIC)
                owner.kill()
                await owner.ended()
                await cluster.lose_disk(owner)
                await cluster.until_served(TOPIC, but_not=owner)
                await world.goes_on()
                await cluster.until_gone(owner)
                await owner.start()
                await cluster.all_running()
            world.is_complete = True
        found = await read_all(cluster)
        for origins in (world.eu, world.asia):
            assert of_origin(found, origins.source) == of_origin(origins.payloads, origins.source)


async def read_all(cluster: Brokers) -> list[str]:
    async with (
        cluster.sava_client() as client,
        client.reader(TOPIC, start="earliest", end="latest") as reader,
    ):
        return [message.payload.decode() async for message in reader]
