"""Replication by real runners on real Spark, of which anything is killed at any time: runners, Java,
executors, Python's workers, the source's broker, the target's. Afterwards, when it is quiet, every message is
at the target once and in its order: by its payload, and in the eyes of ``sava replication verify``.

It goes on for SAVA_CHAOS_S seconds (180). Seeds, and what was killed how often, are printed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from sava.client.loop_thread import LoopThread
from sava.errors import SavaError
from sava.proto import topics_admin_pb2
from tests.cluster.test_replication_retention import Quick
from tests.spark.processes import has_started, running
from tests.spark.runner_process import RunnerProcess
from tests.spark.standalone_spark import REPOSITORY, SparkCluster
from tests.support.brokers import Standalone
from tests.support.copying import Load, differences, payload
from tests.support.long import only_long
from tests.support.replication import Side
from tests.support.waiting import wait_until

T = TypeVar("T")

CHAOS_S = float(os.environ.get("SAVA_CHAOS_S", "180"))
pytestmark = [only_long("Spark, and minutes of it"), pytest.mark.timeout(1200 + 3 * CHAOS_S)]
QUIET_S = 400.0
RUNNERS = 2
AMID = 0.2
"""Of all messages, so many are to be copied while things are killed: more is left to those that have just
been started."""
ORDERS, PRICES = "/default/orders", "/default/prices"
NAMES = [f"{ORDERS}-part-0", f"{ORDERS}-part-1", f"{ORDERS}-part-2", PRICES]
ON_CLUSTER = {
    "spark.driver.host": "127.0.0.1",
    "spark.cores.max": "1",
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.executorEnv.PYTHONPATH": str(REPOSITORY),
}


class World:
    """East sends to west."""

    def __init__(
        self,
        directory: Path,
        stack: ExitStack,
        cluster: SparkCluster | None = None,
        *,
        forgets: bool = False,
    ) -> None:
        """``forgets``: east keeps a megabyte of each topic, and what its links have not copied."""
        self._directory = directory
        self._stack = stack
        self._cluster = cluster
        self._loop = LoopThread("clusters")
        stack.callback(self._loop.close)
        east = Quick(directory / "east") if forgets else named(directory / "east")
        self.east = Side(stack.enter_context(east))
        self.west = Side(stack.enter_context(named(directory / "west")))
        self.runners: list[RunnerProcess] = []
        self.kills: Counter[str] = Counter()
        self._copied = 0
        self.do(self._begin())

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)

    async def _begin(self) -> None:
        await self.east.ready()
        await self.west.ready()
        await self.east.add("west", self.west.service)
        await self.east.create(ORDERS, 3)
        await self.east.create(PRICES)
        await self.east.replicate("default")

    # -- runners -------------------------------------------------------------------------------

    def start_runner(self) -> RunnerProcess:
        options: list[str] = []
        if self._cluster is not None:
            options += ["--master", self._cluster.master]
            for name, value in ON_CLUSTER.items():
                options += ["--conf", f"{name}={value}"]
        name = f"runner-{len(self.runners)}"
        runner = RunnerProcess(self._directory, self.east.broker.admin, name, *options)
        self._stack.callback(runner.sweep)
        self.runners.append(runner)
        return runner

    @property
    def alive(self) -> list[RunnerProcess]:
        return [runner for runner in self.runners if runner.is_running]

    def keep_runners(self) -> None:
        while len(self.alive) < RUNNERS:
            self.start_runner()

    # -- killing -------------------------------------------------------------------------------

    def kill_runner(self, chance: random.Random) -> bool:
        if not self._is_at_work():
            return False
        chance.choice(self.alive).kill()
        return True

    def kill_java(self, chance: random.Random) -> bool:
        """That of a runner, which ends with it."""
        return self._is_at_work() and self._kill_one(chance, "org.apache.spark.deploy.SparkSubmit")

    def _is_at_work(self) -> bool:
        """Whether something was copied since it was last asked: by whoever asks before he kills what takes
        long to start, runners and executors. Killed whenever it is there, it would be starting all the time,
        and what is to be shown is that it dies in the midst of its work."""
        copied = sum(self.ends(self.west).values())
        is_further = copied > self._copied
        self._copied = max(self._copied, copied)
        return is_further

    def kill_executor(self, chance: random.Random) -> bool:
        return self._is_at_work() and self._kill_one(chance, "CoarseGrainedExecutorBackend")

    def kill_worker(self, chance: random.Random) -> bool:
        """A Python process in which tasks run, or the one that makes them."""
        return self._kill_one(chance, "pyspark.daemon")

    def kill_source(self, chance: random.Random) -> bool:
        return self._bounce(self.east.broker, chance)

    def kill_target(self, chance: random.Random) -> bool:
        return self._bounce(self.west.broker, chance)

    def _kill_one(self, chance: random.Random, program: str) -> bool:
        found = [pid for pid in running(program) if self._is_ours(pid)]
        if found:
            with suppress(ProcessLookupError):
                os.kill(chance.choice(found), signal.SIGKILL)
                return True
        return False

    def _is_ours(self, pid: int) -> bool:
        """Whether a runner of this test, or a worker of its Spark, has started it."""
        if self._cluster is not None and self._cluster.runs(pid):
            return True
        return has_started({runner.pid for runner in self.alive}, pid)

    @staticmethod
    def _bounce(broker: Standalone, chance: random.Random) -> bool:
        broker.kill()
        time.sleep(chance.uniform(0, 3))
        broker.start()
        return True

    def trouble(self, chance: random.Random) -> None:
        """Something is killed."""
        kinds: list[Callable[[random.Random], bool]] = [self.kill_source, self.kill_target]
        kinds += [self.kill_worker, self.kill_worker]
        kinds += [self.kill_executor, self.kill_executor] if self._cluster is not None else [self.kill_java]
        kinds += [self.kill_runner]
        kind = chance.choice(kinds)
        if kind(chance):
            self.kills[kind.__name__.removeprefix("kill_")] += 1

    # -- what has come -------------------------------------------------------------------------

    async def _ends(self, side: Side) -> dict[str, int]:
        async def end(name: str) -> int:
            request = topics_admin_pb2.DescribeTopicRequest(name=name)
            return int((await side.call("topics", "DescribeTopic", request)).next_offset)

        return {name: await end(name) for name in NAMES}

    def ends(self, side: Side) -> dict[str, int]:
        """Empty: it cannot be told at the moment."""
        try:
            return self.do(self._ends(side))
        except SavaError:
            return {}

    def copied(self) -> int:
        """Messages at the target, as soon as that can be told."""
        found: dict[str, int] = {}

        def is_told() -> bool:
            found.update(self.ends(self.west))
            return bool(found)

        self.reached(is_told, "the target tells what it has")
        return sum(found.values())

    def positions(self) -> dict[str, int]:
        """As they were reported."""
        try:
            status = self.do(self.east.status(""))
        except SavaError:
            return {}
        return {
            f"{topic.topic}-part-{each.partition}" if topic.partition_count else topic.topic: each.position
            for topic in status
            for each in topic.partitions
        }

    def reached(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for the condition while a runner runs."""

        def said() -> list[str]:
            return [runner.said for runner in self.alive]

        def is_there() -> bool:
            assert self.alive, f"no runner runs: {self.runners[-1].said}"
            return condition()

        wait_until(is_there, lambda: f"{what}: {said()}", timeout=QUIET_S, poll_s=0.2)

    def until_copied(self, count: int) -> None:
        """So many messages, of each topic."""
        self.reached(lambda: self.positions() == dict.fromkeys(NAMES, count), f"{count} are copied of each")

    def check(self, published: dict[str, int]) -> None:
        """Each message is at both once and in order."""
        wrong = [
            line
            for where, side in (("east", self.east), ("west", self.west))
            for name, count in published.items()
            for line in differences(where, side.read(name), {"east": count})
        ]
        assert not wrong, "\n".join(wrong)

    def verify(self, published: dict[str, int]) -> None:
        """The same by Spark, and with all the rest of a message."""
        compared = 0
        for topic in (ORDERS, PRICES):
            work = self.east.command("replication", "verify", topic, "--remote", "west", "-o", "json")
            verdicts = json.loads(self.do(work)[0])
            compared += sum(verdict["compared"] for verdict in verdicts)
        assert compared == sum(published.values())


def named(directory: Path) -> Standalone:
    directory.mkdir()
    return Standalone(
        directory, SAVA__CLUSTER_NAME=directory.name, SAVA__STORAGE__UPLOAD_INTERVAL_SECONDS="1"
    )


def publish(world: World, names: Sequence[str], start: int, end: int) -> None:
    for name in names:
        world.east.publish(name, [payload("east", number).decode() for number in range(start, end)])


@pytest.mark.parametrize("master", ["local", "cluster"])
def test_whatever_is_killed_each_message_is_copied_once_and_in_order(tmp_path: Path, master: str) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    with ExitStack() as stack:
        cluster = None
        if master == "cluster":
            (tmp_path / "spark").mkdir()
            cluster = stack.enter_context(SparkCluster(tmp_path / "spark", workers=RUNNERS))
        world = World(tmp_path, stack, cluster)
        load = Load("east", world.east.broker.url, NAMES, seed, pause_s=0.3)
        world.keep_runners()
        world.reached(lambda: any(world.positions().values()), "something is copied")
        before = world.copied()
        over = time.monotonic() + CHAOS_S
        while time.monotonic() < over:
            world.keep_runners()
            time.sleep(chance.uniform(0, 6))
            world.trouble(chance)
        world.keep_runners()
        amid = world.copied() - before
        load.stop()
        published = sum(load.published.values())
        world.reached(lambda: world.positions() == world.ends(world.east) != {}, "all is copied")
        print(f"killed: {dict(world.kills)}; {len(world.runners)} runners had a part in it")
        print(f"{published} messages, {amid} of them copied between the first and the last kill")
        assert all(load.published.values())
        assert amid >= AMID * published, "what is killed must be at work"
        world.check(load.published)
        world.verify(load.published)


def test_a_remote_that_is_down_beyond_retention_gets_everything(
    tmp_path: Path,
) -> None:
    """A twin that is not replicated shows what retention would have taken."""
    twin, megabyte = "/shop/orders", random.Random(1).randbytes(1 << 19).hex()
    with ExitStack() as stack:
        world = World(tmp_path, stack, forgets=True)
        world.do(world.east.namespace("shop"))
        world.do(world.east.create(twin))
        publish(world, NAMES, 0, 10)
        world.start_runner()
        world.until_copied(10)
        world.west.broker.kill()

        def described(name: str) -> topics_admin_pb2.TopicDescription:
            request = topics_admin_pb2.DescribeTopicRequest(name=name)
            found: topics_admin_pb2.TopicDescription = world.do(
                world.east.call("topics", "DescribeTopic", request)
            )
            return found

        def start(name: str) -> int:
            return described(name).start_offset

        def is_stored(name: str) -> bool:
            found = described(name)
            return found.stored_offset >= found.next_offset

        for number in range(10, 18):  # each in a segment of its own, which retention takes whole
            for name in (*NAMES, twin):
                world.east.publish(name, [f"east {number} {megabyte}"])
            world.reached(lambda: all(map(is_stored, (*NAMES, twin))), "it is in segments")

        def states() -> set[str]:
            return {each.state for topic in world.do(world.east.status("")) for each in topic.partitions}

        world.reached(lambda: start(twin) > 0, "retention has taken what nobody waits for")
        world.reached(lambda: states() == {"unreachable"}, "the runner says what is the matter")
        assert all(start(name) <= 10 for name in NAMES)
        assert world.alive
        world.west.broker.start()
        world.until_copied(18)
        for name in NAMES:
            assert differences("west", world.west.read(name), {"east": 18}) == []
        world.reached(lambda: all(start(name) > 10 for name in NAMES), "now retention may take it")


def test_a_runner_with_old_state_repeats_nothing(tmp_path: Path) -> None:
    """What is next to a runner was copied away and is put back later: where replication is, is known by the
    target alone."""
    with ExitStack() as stack:
        world = World(tmp_path, stack)
        checkpoints, old = tmp_path / "checkpoints", tmp_path / "old"
        publish(world, NAMES, 0, 300)
        first = world.start_runner()
        world.until_copied(300)
        checkpoints.mkdir(exist_ok=True)
        shutil.copytree(checkpoints, old)
        publish(world, NAMES, 300, 700)
        world.until_copied(700)
        assert first.stop() == 0, first.said
        shutil.rmtree(checkpoints)
        shutil.copytree(old, checkpoints)
        world.start_runner()
        publish(world, NAMES, 700, 800)
        world.until_copied(800)
        world.check(dict.fromkeys(NAMES, 800))
        world.verify(dict.fromkeys(NAMES, 800))
