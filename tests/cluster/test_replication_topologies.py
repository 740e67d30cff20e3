"""Clusters that replicate to each other in various shapes, with producers at all of them at once: at each, in
the end, every message is once, and those of one origin are in their order.

Three clusters of one broker each, and links as runners have them, but for Spark; each shape is a namespace.
``SAVA_LONG=1`` publishes for longer, and lets more happen meanwhile. Seeds are printed.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest

from sava.client import connection
from sava.client.blocking import Client
from sava.client.connection import ClientStream
from sava.client.liveness import WatchedCall
from sava.client.loop_thread import LoopThread
from sava.proto import replica_pb2, topics_admin_pb2
from sava.proto import replication_pb2 as pb
from tests.cluster.sites import NamedBrokers
from tests.support.brokers import Standalone
from tests.support.copying import Load, differences, payload
from tests.support.long import IS_LONG
from tests.support.replication import LinkProcess, RunningLink, Side
from tests.support.waiting import PATIENCE_S, until, wait_until

T = TypeVar("T")
Targets = Mapping[str, Sequence[str]]
"""By cluster: where it sends."""

pytestmark = pytest.mark.timeout(900)
LOAD_S = 30.0 if IS_LONG else 0.7
KILLS = 6 if IS_LONG else 1
TROUBLES = 20 if IS_LONG else 4
MOVES_AND_KILLS = 40 if IS_LONG else 5
QUIET_S = 240.0 if IS_LONG else 60.0
NAMES = ("asia", "eu", "us")
MEGABYTE = 1 << 20


def new_seed() -> int:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    return seed


class World:
    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._stack = stack
        self._loop = LoopThread("clusters")
        stack.callback(self._loop.close)
        self.sides = {name: Side(self._broker(name, directory / name)) for name in NAMES}
        self._links: dict[tuple[str, str], RunningLink] = {}
        self.do(self._begin())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)

    def _broker(self, name: str, directory: Path) -> Standalone:
        directory.mkdir()
        broker = Standalone(directory, SAVA__CLUSTER_NAME=name, SAVA__STORAGE__UPLOAD_INTERVAL_SECONDS="1")
        return self._stack.enter_context(broker)

    async def _begin(self) -> None:
        await asyncio.gather(*(side.ready() for side in self.sides.values()))
        for name, side in self.sides.items():
            for other in self.sides.keys() - {name}:
                await side.add(other, self.sides[other].service)

    def create(self, namespace: str, topics: Mapping[str, int], *, at: Sequence[str] = NAMES) -> list[str]:
        """The same everywhere. The names of all partitions."""

        async def create(side: Side) -> None:
            await side.namespace(namespace)
            for topic, partitions in topics.items():
                await side.create(f"/{namespace}/{topic}", partitions)

        for name in at:
            self.do(create(self.sides[name]))
        return [
            f"/{namespace}/{topic}" + (f"-part-{number}" if partitions else "")
            for topic, partitions in topics.items()
            for number in range(max(1, partitions))
        ]

    def link(self, namespace: str, targets: Targets, *, forward: bool) -> None:
        for name, others in targets.items():
            policy = pb.ReplicationPolicy(remotes=others, forward=forward)
            request = pb.SetReplicationRequest(scope=namespace, policy=policy, skip_checks=True)
            assert self.do(self.sides[name].replication("SetReplication", request)).is_set
            for other in others:
                if (name, other) not in self._links:
                    link = self._links[name, other] = RunningLink(self.sides[name], other)
                    self._stack.callback(link.stop)

    def loads(self, clusters: Iterable[str], names: Sequence[str], seed: int) -> list[Load]:
        return [
            Load(cluster, self.sides[cluster].broker.url, names, seed + index)
            for index, cluster in enumerate(clusters)
        ]

    # -- afterwards ----------------------------------------------------------------------------

    async def _ends(self, names: Sequence[str], clusters: Sequence[str]) -> dict[tuple[str, str], int]:
        async def end(cluster: str, name: str) -> int:
            request = topics_admin_pb2.DescribeTopicRequest(name=name)
            found = await self.sides[cluster].call("topics", "DescribeTopic", request)
            return int(found.next_offset)

        return {(cluster, name): await end(cluster, name) for cluster in clusters for name in names}

    async def _positions(self, cluster: str) -> dict[tuple[str, str], int]:
        """By remote and partition, as reported."""
        found: dict[tuple[str, str], int] = {}
        for topic in await self.sides[cluster].status(""):
            for each in topic.partitions:
                part = f"-part-{each.partition}" if topic.partition_count else ""
                found[topic.remote, f"{topic.topic}{part}"] = each.position
        return found

    def until_quiet(self, names: Sequence[str], targets: Targets) -> None:
        """Until every link is where its source ends, and none of these ends has moved meanwhile: then nothing
        is under way any more, and nothing more can come."""

        async def is_quiet() -> bool:
            before = await self._ends(names, list(targets))
            for cluster, others in targets.items():
                positions = await self._positions(cluster)
                for name in names:
                    if any(positions.get((other, name)) != before[cluster, name] for other in others):
                        return False
            return before == await self._ends(names, list(targets))

        self.do(until(is_quiet, "every link is at the end", timeout=QUIET_S))

    def check(self, names: Sequence[str], loads: Sequence[Load], at: Sequence[str]) -> None:
        wrong: list[str] = []
        for cluster in at:
            for name in names:
                published = {load.cluster: load.published[name] for load in loads}
                wrong += differences(cluster, self.sides[cluster].read(name), published)
        print({load.cluster: load.published for load in loads})
        assert not wrong, "\n".join(wrong)
        assert all(count for load in loads for count in load.published.values())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path_factory.mktemp("clusters"), stack)


# -- shapes ------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[Targets, bool]] = {
    "two-ways": ({"eu": ["us"], "us": ["eu"]}, False),
    "all-to-all": ({"asia": ["eu", "us"], "eu": ["asia", "us"], "us": ["asia", "eu"]}, False),
    "ring": ({"asia": ["eu"], "eu": ["us"], "us": ["asia"]}, True),
    "star": ({"asia": ["eu"], "eu": ["asia", "us"], "us": ["eu"]}, True),
    "mesh": ({"asia": ["eu", "us"], "eu": ["asia", "us"], "us": ["asia", "eu"]}, True),
}
"""Where each sends, and whether it forwards. In a mesh each message comes to each on two ways."""


@pytest.mark.parametrize("shape", SHAPES if IS_LONG else ["ring", "mesh"])
def test_everything_is_everywhere_once_and_in_order(world: World, shape: str) -> None:
    targets, forward = SHAPES[shape]
    names = world.create(shape, {"orders": 2, "prices": 0}, at=list(targets))
    world.link(shape, targets, forward=forward)
    seed = new_seed()
    loads = world.loads(targets, names, seed)
    time.sleep(LOAD_S)
    for load in loads:
        load.wait_begun()
        load.stop()
    world.until_quiet(names, targets)
    world.check(names, loads, list(targets))


def test_both_sides_publish_while_brokers_are_killed(world: World) -> None:
    targets = {"eu": ["us"], "us": ["eu"]}
    names = world.create("killed", {"orders": 2, "prices": 0}, at=list(targets))
    world.link("killed", targets, forward=False)
    seed = new_seed()
    chance = random.Random(seed)
    loads = world.loads(targets, names, seed)
    for _ in range(KILLS):
        time.sleep(chance.uniform(0.3, LOAD_S))
        broker = world.sides[chance.choice(list(targets))].broker
        broker.kill()
        time.sleep(chance.uniform(0, 0.5))
        broker.start()
        sent = [sum(load.published.values()) for load in loads]
        wait_until(
            lambda sent=sent: all(  # type: ignore[misc]
                sum(load.published.values()) > before for load, before in zip(loads, sent, strict=True)
            ),
            "producers go on",
            timeout=QUIET_S,
        )
    for load in loads:
        load.stop()
    world.until_quiet(names, targets)
    world.check(names, loads, list(targets))


# -- what several paths must not do ------------------------------------------------------------


def test_a_message_that_may_not_go_through_a_relay_comes_on_the_direct_way(world: World) -> None:
    """eu sends to us and asia, us forwards to asia. A message for asia alone is not in us; those behind it
    come to asia through us first. They are no proof that it came."""
    (name,) = world.create("relayed", {"orders": 0})
    world.link("relayed", {"us": ["asia"]}, forward=True)
    world.link("relayed", {"eu": ["us"]}, forward=True)
    with (
        Client(world.sides["eu"].broker.url, timeout=PATIENCE_S) as client,
        client.producer(name) as producer,
    ):
        attributes = [{}, {"sava-replicate": "asia"}, {}]
        producer.send_many([payload("eu", number) for number in range(3)], attributes=attributes)

    def numbers() -> list[str]:
        return [each.split(" ")[1] for each in world.sides["asia"].payloads(name)]

    wait_until(lambda: numbers() == ["0", "2"], "what may go through us has come that way")
    world.link("relayed", {"eu": ["us", "asia"]}, forward=True)
    world.until_quiet([name], {"eu": ["us", "asia"], "us": ["asia"]})
    assert sorted(numbers()) == ["0", "1", "2"]


# -- a row of appends, one of which fails alone ------------------------------------------------


class Troubled(ClientStream):
    """What becomes of the ranges on their way to the target: some are lost, alone; some come twice, or
    change places. The stream lives on, and those behind them arrive."""

    troubles: ClassVar[dict[str, int]] = {}
    chance: ClassVar = random.Random()
    left: ClassVar = 0
    _guard = threading.Lock()

    def __init__(self, call: Any, target: str, waiting: WatchedCall, accepted: Callable[[], None]) -> None:
        super().__init__(call, target, waiting, accepted)
        self._held: Any = None

    async def write(self, request: Any) -> None:
        is_range = isinstance(request, replica_pb2.AppendRequest) and request.HasField("range")
        trouble = self._trouble() if is_range else ""
        if trouble == "swapped" and self._held is None:
            self._held = request
            return
        if trouble != "lost":
            await super().write(request)
        if trouble == "repeated":
            await super().write(request)
        if self._held is not None:
            held, self._held = self._held, None
            await super().write(held)

    @classmethod
    def _trouble(cls) -> str:
        with cls._guard:
            if not cls.left or cls.chance.random() < 0.4:
                return ""
            cls.left -= 1
            trouble = cls.chance.choice(("lost", "repeated", "swapped"))
            cls.troubles[trouble] = cls.troubles.get(trouble, 0) + 1
            return trouble


def test_one_append_of_several_that_fails_alone_loses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E3, E4 and E5 are under way, E3 fails, E4 and E5 arrive, and E3 is sent again: whoever takes E5 for the
    proof that everything before it came leaves E3 out as a duplicate."""
    targets = {"eu": ["us"], "us": []}
    (name,) = world.create("pipelined", {"orders": 0}, at=list(targets))
    with Client(world.sides["eu"].broker.url, timeout=60) as client, client.producer(name) as producer:
        producer.send_many([payload("eu", number, MEGABYTE // 8) for number in range(8 * TROUBLES * 4)])
    Troubled.chance, Troubled.left, Troubled.troubles = random.Random(new_seed()), TROUBLES, {}
    monkeypatch.setattr(connection, "ClientStream", Troubled)
    world.link("pipelined", targets, forward=False)
    world.until_quiet([name], targets)
    print(Troubled.troubles)
    assert sum(Troubled.troubles.values()) == TROUBLES
    wrong = differences("us", world.sides["us"].read(name), {"eu": 8 * TROUBLES * 4})
    assert not wrong, "\n".join(wrong)


# -- topics that move, and drivers that are killed ---------------------------------------------


async def test_both_sides_publish_while_topics_move_and_drivers_are_killed(tmp_path: Path) -> None:
    seed = new_seed()
    chance = random.Random(seed)
    topic, names = "/default/orders", ["/default/orders-part-0", "/default/orders-part-1"]
    async with AsyncExitStack() as stack:
        sites = [NamedBrokers(name, tmp_path / name) for name in ("eu", "us")]
        await asyncio.gather(*(stack.enter_async_context(site) for site in sites))
        drivers: list[LinkProcess] = []
        for site, other in (sites, sites[::-1]):
            await site.create(topic, partitions=2)
            client = site.brokers[0].client
            remote = pb.Remote(name=other.name, service=other.service)
            await client.call(client.replication.AddRemote, remote, timeout=PATIENCE_S)
            policy = pb.ReplicationPolicy(remotes=[other.name])
            request = pb.SetReplicationRequest(scope="default", policy=policy, skip_checks=True)
            await client.call(client.replication.SetReplication, request, timeout=PATIENCE_S)
            log = tmp_path / f"link of {site.name}"
            driver = LinkProcess(log, site.brokers[0].admin, site.service, other.name)
            stack.callback(driver.kill)
            drivers.append(driver)
        loads = [
            Load(site.name, [broker.client_url for broker in site.brokers], names, seed + index)
            for index, site in enumerate(sites)
        ]
        moved = killed = 0
        for _ in range(MOVES_AND_KILLS):
            await asyncio.sleep(chance.uniform(0, 0.6))
            if chance.random() < 0.6 or not moved:
                moved += await chance.choice(sites).move(chance.choice(names))
            else:
                driver = chance.choice(drivers)
                await asyncio.to_thread(driver.kill)
                driver.start()
                killed += 1
        for load in loads:
            await asyncio.to_thread(load.stop)
        for name in names:
            expected = {load.cluster: load.published[name] for load in loads}
            for site in sites:
                await until(
                    lambda site=site, name=name, expected=expected: has(site, name, sum(expected.values())),  # type: ignore[misc]
                    f"{site.name} has {expected} of {name}",
                    timeout=QUIET_S,
                )
        print(f"{moved} moves, {killed} drivers killed, published {[load.published for load in loads]}")
        assert moved
        for driver in drivers:  # they end well, and what they had under way is settled
            await asyncio.to_thread(driver.stop)
        wrong: list[str] = []
        for name in names:
            expected = {load.cluster: load.published[name] for load in loads}
            for site in sites:
                wrong += differences(site.name, await asyncio.to_thread(read, site, name), expected)
        assert not wrong, "\n".join(wrong)


async def has(site: NamedBrokers, name: str, count: int) -> bool:
    found = await site.describe(name)
    return found.state == "open" and found.next_offset >= count


def read(site: NamedBrokers, name: str) -> list[Any]:
    urls = [broker.client_url for broker in site.brokers]
    with Client(urls, timeout=60) as client, client.reader(name, end="latest") as reader:
        return list(reader)
