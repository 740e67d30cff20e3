"""Replication as a runner does it, on real Spark, between two clusters of one broker each: east sends, west
receives. What there is to decide is tested without Spark (``tests/cluster/test_replication_matrix.py``)."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sava.client.errors import ClientError
from sava.client.loop_thread import LoopThread
from sava.proto import replication_pb2 as pb
from tests.spark.runner_process import Pipelines, RunnerProcess
from tests.support.brokers import Standalone
from tests.support.long import only_long
from tests.support.replication import Side

T = TypeVar("T")

LINK = "replicate-west"
LIVES = 6
TOPICS = 20


class Clusters:
    def __init__(self, east: Standalone, west: Standalone) -> None:
        self.east, self.west = Side(east), Side(west)
        self._loop = LoopThread("clusters")
        self.do(self._begin())

    def close(self) -> None:
        self._loop.close()

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)

    async def _begin(self) -> None:
        await asyncio.gather(self.east.ready(), self.west.ready())
        await self.east.add("west", self.west.service)

    def status(self) -> list[pb.LinkTopic]:
        return self.do(self.east.status(""))

    def copied(self, name: str) -> list[str]:
        try:
            return self.west.payloads(name)
        except ClientError:
            return []  # there is no such topic yet


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Clusters]:
    def side(name: str) -> Standalone:
        (tmp_path / name).mkdir()
        return Standalone(
            tmp_path / name, SAVA__CLUSTER_NAME=name, SAVA__STORAGE__UPLOAD_INTERVAL_SECONDS="1"
        )

    with side("east") as east, side("west") as west:
        found = Clusters(east, west)
        yield found
        found.close()


@pytest.fixture
def runners() -> Iterator[list[RunnerProcess]]:
    started: list[RunnerProcess] = []
    yield started
    for each in started:
        each.sweep()


@pytest.fixture
def pipelines(clusters: Clusters) -> Iterator[Pipelines]:
    found = Pipelines(clusters.east.broker.admin)
    yield found
    found.close()


def numbers(name: str, start: int, end: int) -> list[str]:
    return [f"{name} {number}" for number in range(start, end)]


def test_a_killed_runners_policy_is_carried_out_by_the_next_one(
    clusters: Clusters, pipelines: Pipelines, tmp_path: Path, runners: list[RunnerProcess]
) -> None:
    east = clusters.east
    names = ["/default/orders-part-0", "/default/orders-part-1", "/default/prices"]
    clusters.do(east.create("/default/orders", 2))
    clusters.do(east.create("/default/prices"))
    for name in names:
        east.publish(name, numbers(name, 0, 500))
    clusters.do(east.command("replication", "set", "default", "--remote", "west"))
    assert {each.state for topic in clusters.status() for each in topic.partitions} == {"waiting_runner"}

    def are_copied(count: int) -> bool:
        return all(len(clusters.copied(name)) >= count for name in names)

    first = RunnerProcess(tmp_path, east.broker.admin, "first")
    runners.append(first)
    first.reached(lambda: are_copied(500), "all is copied")
    first.kill()
    for name in names:
        east.publish(name, numbers(name, 500, 900))

    second = RunnerProcess(tmp_path, east.broker.admin, "second")
    runners.append(second)
    second.reached(lambda: are_copied(900), "the next one goes on")
    first.wait_gone()
    for name in names:
        assert clusters.copied(name) == numbers(name, 0, 900)

    def is_reported() -> bool:
        partitions = [each for topic in clusters.status() for each in topic.partitions]
        return all((each.position, each.backlog) == (900, 0) for each in partitions)

    second.reached(is_reported, "and says so")
    assert [topic.disconnected_count for topic in clusters.status()] == [0, 0]
    second.reached(lambda: pipelines.status(LINK).lag_messages == 0, "the pipeline says so, too")
    link = pipelines.status(LINK)
    assert (link.state, link.last_error) == ("running", "")

    assert second.stop() == 0, second.said
    second.wait_gone()
    assert pipelines.status(LINK).state == "waiting"
    assert pipelines.runners == []


@only_long("runners are killed for minutes")
@pytest.mark.timeout(1200)
def test_runners_that_are_killed_again_and_again_lose_and_repeat_nothing(
    clusters: Clusters, tmp_path: Path, runners: list[RunnerProcess]
) -> None:
    """Two runners that want the same link; now and then one of them is killed, or told to stop, and followed
    by a new one, while messages come to many topics all the time."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    east = clusters.east
    names = [f"/default/killed-{number}" for number in range(TOPICS)]
    for name in names:
        clusters.do(east.create(name))
    clusters.do(east.replicate("default"))
    published = 0
    is_over = threading.Event()

    def publish() -> None:
        nonlocal published
        while not is_over.is_set():
            for name in names:
                east.publish(name, numbers(name, published, published + 50))
            published += 50

    publishing = threading.Thread(target=publish)
    publishing.start()
    try:
        for life in range(LIVES):
            while len([each for each in runners if each.is_running]) < 2:
                runners.append(RunnerProcess(tmp_path, east.broker.admin, f"life-{life}-{len(runners)}"))
            target = len(clusters.copied(names[0])) + 100
            alive = [each for each in runners if each.is_running]
            alive[0].reached(lambda target=target: len(clusters.copied(names[0])) >= target, "it goes on")  # type: ignore[misc]
            time.sleep(chance.uniform(0, 2))
            victim = chance.choice(alive)
            if chance.random() < 0.7:
                victim.kill()
            else:
                # One that has just been started does not know the signal yet.
                assert victim.stop() in (0, -signal.SIGTERM), victim.said
    finally:
        is_over.set()
        publishing.join()
    last = RunnerProcess(tmp_path, east.broker.admin, "last")
    runners.append(last)
    last.reached(lambda: all(len(clusters.copied(name)) >= published for name in names), "all is copied")
    for name in names:
        assert clusters.copied(name) == numbers(name, 0, published)
