"""What has something to do and does nothing is begun again by its runner, which counts it, and goes on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sava.client.loop_thread import LoopThread
from sava.errors import SavaError
from tests.spark.runner_functions import HANGS_WHILE
from tests.spark.runner_process import Pipelines, RunnerProcess
from tests.support.brokers import Standalone
from tests.support.long import only_long
from tests.support.replication import Side

pytestmark = [
    only_long("a runner, and the time until something is taken for stuck"),
    pytest.mark.timeout(900),
]
STUCK_S = 20
"""More than Python's workers take to start."""
SOURCE, TARGET = "/default/stuck-in", "/default/stuck-out"
ORDERS = "/shop/orders"
LINK = "replicate-west"


class World:
    """East, with a runner that has a pipeline and a link to west."""

    def __init__(self, directory: Path, east: Standalone, west: Standalone) -> None:
        self.east, self.west = Side(east), Side(west)
        self._loop = LoopThread("clusters")
        self.pipelines = Pipelines(east.admin)
        self._loop.run(self._begin())
        self.runner = RunnerProcess(directory, east.admin, "runner", "--stuck-after", str(STUCK_S))

    async def _begin(self) -> None:
        await asyncio.gather(self.east.ready(), self.west.ready())
        for side in (self.east, self.west):
            await side.namespace("shop")
        for topic in (SOURCE, TARGET, ORDERS):
            await self.east.create(topic)
        await self.east.add("west", self.west.service)

    def close(self) -> None:
        self.runner.sweep()
        self.pipelines.close()
        self._loop.close()

    def replicate(self) -> None:
        self._loop.run(self.east.replicate("shop"))

    def payloads(self, side: Side, topic: str) -> list[str]:
        try:
            return side.payloads(topic)
        except SavaError:
            return []  # there is no such topic yet

    def shown(self, pipeline: str) -> dict[str, Any]:
        """By the command."""
        out, _ = self._loop.run(self.east.command("pipelines", "status", pipeline, "-o", "json"))
        (found,) = json.loads(out)
        assert isinstance(found, dict)
        return found

    def counted(self, pipeline: str) -> float:
        """By the broker's figures."""
        metrics = self._loop.run(self.east.metrics())
        (found,) = [
            value
            for name, value in metrics.items()
            if name.startswith("sava_pipeline_restarts_total{") and f'"{pipeline}"' in name
        ]
        return found

    def restarts(self, pipeline: str) -> int:
        """0, but on a machine that is so crowded that the first batch seems to be stuck."""
        return self.pipelines.status(pipeline).restarts

    def until_begun_again(self, pipeline: str, before: int) -> None:
        self.runner.reached(lambda: self.restarts(pipeline) > before, f"{pipeline} is begun again")
        assert re.search(f"stuck: .*behind, and nothing was done for .* name={pipeline}", self.runner.said)
        assert int(self.shown(pipeline)["restarts"]) > before
        assert self.counted(pipeline) > before


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    def side(name: str) -> Standalone:
        (tmp_path / name).mkdir()
        return Standalone(tmp_path / name, SAVA__CLUSTER_NAME=name)

    monkeypatch.setenv(HANGS_WHILE, str(tmp_path / "hangs"))
    with side("east") as east, side("west") as west:
        found = World(tmp_path, east, west)
        yield found
        found.close()


def test_a_query_whose_function_hangs_is_begun_again_and_goes_on(world: World, tmp_path: Path) -> None:
    hangs = tmp_path / "hangs"
    numbers = [f"m{number}" for number in range(150)]

    def written() -> Counter[str]:
        return Counter(world.payloads(world.east, TARGET))

    world.pipelines.apply(
        "shout",
        from_={"topic": SOURCE, "startingOffsets": "earliest"},
        function="tests.spark.runner_functions:hanging",
        to={"topic": TARGET},
    )
    world.east.publish(SOURCE, numbers[:50])
    world.runner.reached(lambda: len(written()) == 50, "it goes well at first")
    before = world.restarts("shout")
    hangs.touch()
    world.east.publish(SOURCE, numbers[50:100])
    world.until_begun_again("shout", before)
    assert len(written()) == 50, "nothing of what hangs is done"
    hangs.unlink()
    world.runner.reached(lambda: len(written()) == 100, "the same batch is done, once it can be")
    world.east.publish(SOURCE, numbers[100:])
    world.runner.reached(lambda: len(written()) == 150, "and the next")
    assert written() == Counter(number.upper() for number in numbers)
    world.runner.reached(lambda: world.pipelines.status("shout").lag_messages == 0, "nothing is left")
    assert (world.shown("shout")["state"], world.shown("shout")["last_error"]) == ("running", "")
    assert world.runner.stop() == 0, world.runner.said


def test_a_link_whose_worker_is_frozen_is_begun_again_and_goes_on(world: World) -> None:
    """Not one that dies, which is noticed at once: one that has the next round and says nothing."""
    numbers = [f"m{number}" for number in range(150)]

    def copied() -> list[str]:
        return world.payloads(world.west, ORDERS)

    world.east.publish(ORDERS, numbers[:50])
    world.replicate()
    world.runner.reached(lambda: len(copied()) == 50, "it goes well at first")
    daemon, *_ = sorted(world.runner.parts("pyspark.daemon"), key=_started_at)
    workers = [pid for pid in world.runner.parts("pyspark.daemon") if pid != daemon]
    assert workers, "tasks have run in some process"
    for pid in workers:
        os.kill(pid, signal.SIGSTOP)
    try:
        before = world.restarts(LINK)
        world.east.publish(ORDERS, numbers[50:100])
        world.until_begun_again(LINK, before)
        world.runner.reached(lambda: len(copied()) == 100, "another worker does it")
    finally:
        for pid in workers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    world.east.publish(ORDERS, numbers[100:])
    world.runner.reached(lambda: len(copied()) >= 150, "and the next")
    assert copied() == numbers
    world.runner.reached(lambda: world.pipelines.status(LINK).lag_messages == 0, "nothing is left")
    assert (world.shown(LINK)["state"], world.shown(LINK)["last_error"]) == ("running", "")
    assert world.runner.stop() == 0, world.runner.said


def _started_at(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
