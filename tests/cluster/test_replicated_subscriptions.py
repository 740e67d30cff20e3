"""A consumer group that goes from one cluster to the other and back, while both publish and topics move: no
message is skipped, and only those are delivered again that were not acked. Some messages are in one of the
clusters only; what was acked behind them at the other must not take them along. The same once more while
brokers, and whoever replicates, are killed.

``SAVA_LONG=1`` goes on for minutes. The seed is printed.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest

from sava.client import Client
from sava.pipeline.cluster import ClusterAccess
from sava.pipeline.replicate.background import AdminLinkControl
from sava.pipeline.replicate.job import LinkJob
from sava.proto import replication_pb2 as pb
from sava.proto import topics_admin_pb2
from sava.records import Message
from tests.cluster.sites import NamedBrokers
from tests.support.long import IS_LONG, only_long
from tests.support.replication import LinkProcess, ThreadEngine
from tests.support.waiting import PATIENCE_S, until

TOPIC, SUBSCRIPTION = "/default/orders", "group"
PARTITIONS = 2
TRIPS = 12 if IS_LONG else 3
KILLING_TRIPS = 10 if IS_LONG else 2
KILLS = 3 if IS_LONG else 2
"""In one trip."""
SETTLED_S = 90.0


class Driver(Protocol):
    """Whoever carries out a link."""

    def stop(self, *, now: bool) -> object: ...


class Site(NamedBrokers):
    async def ask(self, method: str, request: Any) -> Any:
        client = self.brokers[0].client
        return await client.call(getattr(client.replication, method), request, timeout=PATIENCE_S)

    async def replicate_to(self, other: Site) -> None:
        """All topics, and the position of the group."""
        await self.ask("AddRemote", pb.Remote(name=other.name, service=other.service))
        policy = pb.ReplicationPolicy(remotes=[other.name], subscriptions=[SUBSCRIPTION])
        request = pb.SetReplicationRequest(scope="default", policy=policy, skip_checks=True)
        assert (await self.ask("SetReplication", request)).is_set

    async def held(self) -> int | None:
        """Messages of all partitions; None while one of them is served by nobody."""
        parts = [await self.describe(f"{TOPIC}-part-{number}") for number in range(PARTITIONS)]
        is_served = all(part.state == "open" for part in parts)
        return sum(part.next_offset for part in parts) if is_served else None

    async def group(self) -> topics_admin_pb2.SubscriptionDescription:
        client = self.brokers[0].client
        request = topics_admin_pb2.DescribeSubscriptionRequest(topic=TOPIC, subscription=SUBSCRIPTION)
        found: topics_admin_pb2.SubscriptionDescription = await client.call(
            client.subscriptions.DescribeSubscription, request, timeout=30
        )
        return found


def in_threads(site: Site, other: Site) -> Driver:
    edges = (
        AdminLinkControl(site.brokers[0].admin),
        ThreadEngine(),
        ClusterAccess(site.service, timeout_s=5.0),
    )
    return LinkJob(f"replicate-{other.name}", other.name, "test", *edges)


class World:
    def __init__(self, east: Site, west: Site, seed: int) -> None:
        self.sites = (east, west)
        self.chance = random.Random(seed)
        self.published: set[bytes] = set()
        self.staying: dict[Site, set[bytes]] = {east: set(), west: set()}
        """Of these, those that are not copied, by where they are."""
        self.stored: set[bytes] = set()
        """Acked, and that is on record."""
        self.received: set[bytes] = set()
        self.repeated = 0

    # -- publishing ----------------------------------------------------------------------------

    async def publish(self, site: Site, rounds: int) -> None:
        async with site.sava_client() as client, client.producer(TOPIC) as producer:
            for _ in range(rounds):
                first, count = len(self.published), self.chance.randrange(1, 40)
                payloads = [f"{site.name} {number}".encode() for number in range(first, first + count)]
                stays = [self.chance.random() < 0.05 for _ in payloads]
                self.published.update(payloads)
                self.staying[site] |= {payload for payload, each in zip(payloads, stays, strict=True) if each}
                await producer.send_many(
                    payloads,
                    keys=[str(number % 7) for number in range(count)],
                    attributes=[{"sava-replicate": "none"} if each else {} for each in stays],
                )
                await asyncio.sleep(self.chance.uniform(0, 0.05))

    # -- consuming -----------------------------------------------------------------------------

    async def consume(self, site: Site, kind: Any, name: str, until_count: int) -> None:
        """Ack some at once, some later and out of order, some never; then die with what is in hand."""
        done = set(self.stored)
        """Whatever is acked by now must not come again."""
        client: Client = site.sava_client()
        consumer = client.consumer(TOPIC, subscription=SUBSCRIPTION, type=kind, name=name, start="earliest")
        await consumer.open()
        in_hand: list[Message] = []
        acked: set[bytes] = set()
        count = 0
        try:
            while count < until_count:
                batch = await consumer.receive_batch(self.chance.randrange(1, 60), timeout=0.5)
                messages = list(batch) if batch is not None else []
                count += len(messages) or until_count // 20 + 1
                payloads = {message.payload for message in messages}
                assert not payloads & done, f"acked at one cluster, and delivered by {site.name}"
                self.repeated += len(payloads & self.received)
                self.received |= payloads
                in_hand += messages
                if self.chance.random() < 0.3:  # all, in order
                    chosen, in_hand = in_hand, []
                else:
                    self.chance.shuffle(in_hand)
                    cut = self.chance.randrange(len(in_hand) + 1)
                    chosen, in_hand = in_hand[:cut], in_hand[cut:]
                await consumer.ack_many(chosen)
                acked |= {message.payload for message in chosen}
            await consumer.flush()
            self.stored |= acked
        finally:
            await consumer.close(timeout=0)
            await client.close()

    async def settled(self) -> None:
        """Until both have what they should have, and what is acked at one of them is acked at both."""
        east, west = self.sites
        for site, other in ((east, west), (west, east)):
            expected = self.published - self.staying[other]

            async def is_settled(site: Site = site, expected: set[bytes] = expected) -> bool:
                found = await site.group()
                counts = (await site.held(), found.backlog, len(found.consumers))
                return counts == (len(expected), len(expected - self.stored), 0)

            what = f"{site.name} has {len(expected)} messages, {len(expected - self.stored)} are not acked"
            await until(is_settled, what, timeout=SETTLED_S)

    async def move(self) -> None:
        await self.chance.choice(self.sites).move(f"{TOPIC}-part-{self.chance.randrange(PARTITIONS)}")

    async def trip(
        self, number: int, kind: Any, trouble: Callable[[], Awaitable[None]], *, rounds: int = 8
    ) -> None:
        """One life of the group, at one of the clusters, with trouble."""
        site = self.sites[number % 2]
        print(f"trip {number}: {kind} at {site.name}, {len(self.stored)} of {len(self.published)} acked")
        async with asyncio.TaskGroup() as tasks:
            for each in self.sites:
                tasks.create_task(self.publish(each, rounds))
            for name in ("a", "b"):
                wanted = self.chance.randrange(100, 400)
                tasks.create_task(self.consume(site, kind, name, wanted))
            await asyncio.sleep(self.chance.uniform(0, 0.5))
            await trouble()
        await self.settled()

    async def drain(self, site: Site, kind: Any) -> None:
        """Everything that is left."""
        done, acked = set(self.stored), set[bytes]()
        async with (
            site.sava_client() as client,
            client.consumer(TOPIC, subscription=SUBSCRIPTION, type=kind, name="last") as consumer,
        ):
            while (batch := await consumer.receive_batch(timeout=2.0)) is not None:
                payloads = {message.payload for message in batch}
                assert not payloads & done
                self.received |= payloads
                await consumer.ack(batch)
                acked |= payloads
            await consumer.flush()
        self.stored |= acked


@asynccontextmanager
async def linked(
    tmp_path: Path, start: Callable[[Site, Site], Driver]
) -> AsyncIterator[tuple[Site, Site, list[Driver]]]:
    """East and west, each copied to the other, and who does it."""
    async with Site("east", tmp_path / "east") as east, Site("west", tmp_path / "west") as west:
        drivers: list[Driver] = []
        try:
            await east.create(TOPIC, partitions=PARTITIONS)
            await east.replicate_to(west)
            drivers.append(start(east, west))

            async def is_there() -> bool:
                return TOPIC in await west.list_topics() and await west.held() == 0

            await until(is_there, "west has the topic")
            await west.replicate_to(east)
            drivers.append(start(west, east))
            yield east, west, drivers
        finally:
            for driver in drivers:
                driver.stop(now=True)


async def begin(world: World) -> Any:
    """The type of the group, which begins at east."""
    kind: Any = world.chance.choice(("shared", "failover", "key_shared"))
    async with world.sites[0].sava_client() as client:
        consumer = client.consumer(TOPIC, subscription=SUBSCRIPTION, type=kind, name="a", start="earliest")
        await consumer.open()
        await consumer.close()
    await world.publish(world.sites[0], 2)
    return kind


async def finish(world: World, kind: Any) -> None:
    for site in world.sites:
        await world.drain(site, kind)
        await world.settled()
    assert world.received == world.published, "nobody ever got some of them"
    print(f"{len(world.published)} messages, {world.repeated} delivered again, none that was acked")
    for site in world.sites:
        found = await site.group()
        assert (found.backlog, found.type) == (0, kind)


@pytest.mark.timeout(900)
async def test_a_group_fails_over_and_back_and_skips_nothing(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    async with linked(tmp_path, in_threads) as (east, west, _):
        world = World(east, west, seed)
        kind = await begin(world)
        for number in range(TRIPS):
            await world.trip(number, kind, world.move)
        await finish(world, kind)


class Killing:
    """Kills brokers, one or all of a cluster, and drivers; they are started again after a moment."""

    def __init__(self, world: World, drivers: list[LinkProcess]) -> None:
        self._world = world
        self._drivers = drivers
        self.killed: Counter[str] = Counter()

    async def __call__(self) -> None:
        chance = self._world.chance
        for _ in range(KILLS):
            await asyncio.sleep(chance.uniform(0, 0.5))
            if chance.random() < 0.4:
                driver = chance.choice(self._drivers)
                await asyncio.to_thread(driver.kill)
                driver.start()
                self.killed["drivers"] += 1
            else:
                await self._bounce(chance.choice(self._world.sites))

    async def _bounce(self, site: Site) -> None:
        chance = self._world.chance
        victims = site.brokers if chance.random() < 0.5 else [chance.choice(site.brokers)]
        for victim in victims:
            victim.kill()
        await asyncio.gather(*(victim.ended() for victim in victims))
        await asyncio.sleep(chance.uniform(0, 1))
        await asyncio.gather(*(victim.start() for victim in victims))
        await site.registered()
        self.killed["brokers"] += len(victims)


@only_long("brokers and drivers of two clusters are killed")
@pytest.mark.timeout(1800)
async def test_brokers_and_drivers_are_killed_and_a_group_skips_nothing(tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")

    def in_process(site: Site, other: Site) -> LinkProcess:
        log = tmp_path / f"link of {site.name}"
        return LinkProcess(log, site.brokers[0].admin, site.service, other.name)

    async with linked(tmp_path, in_process) as (east, west, drivers):
        world = World(east, west, seed)
        kind = await begin(world)
        killing = Killing(world, [each for each in drivers if isinstance(each, LinkProcess)])
        for number in range(KILLING_TRIPS):
            await world.trip(number, kind, killing, rounds=30)
        await finish(world, kind)
        print(f"killed: {dict(killing.killed)}")
