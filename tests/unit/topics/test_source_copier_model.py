"""Any interleaving of those who copy, with repeated sends, full disks, deaths and moves, brings each message
that any of them has, and brings it once.

Five copy: two of them the same source at once, two clusters that have copies of some of the same messages
between their own, and one that sends what it likes. No path has everything: each begins somewhere, and some
messages are not for this or that cluster in the midst. Each keeps ranges under way and learns of their
fate when it looks. The model knows what the sources hold, and nothing of how the topic keeps it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sava.errors import SavaError
from sava.storage import origin_marks
from sava.storage.broker_storage import BrokerStorage
from sava.storage.source_positions import OriginForgotten
from sava.storage.topic_log import TopicLog
from sava.topics.source_copier import Copied, SourceCopier
from tests.sim.disk import SimDisk
from tests.support.copying import Origins, of_origin
from tests.support.storage import EAGER, LAZY, TOPIC, Cluster, batch, contents
from tests.unit.topics.copies import copier_into, kill

LENGTH = 60
BATCH = 4000
"""Bytes of a payload: a few fill a disk that is almost full."""

steps = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 3), st.integers(1, 12)),
    st.tuples(st.just("wild"), st.integers(0, LENGTH - 1), st.integers(1, 20)),
    st.tuples(st.just("look"), st.integers(0, 3), st.just(0)),
    st.tuples(
        st.sampled_from(["full", "room", "kill", "restart", "move", "publish"]), st.just(0), st.just(0)
    ),
)


class Copier:
    """Goes on from what it was told, without waiting for its ranges."""

    def __init__(self, world: World, origins: Origins, start: int) -> None:
        self._world = world
        self._origins = origins
        self._start = min(start, len(origins.held) - 1)
        self.is_refused = False
        """For good."""
        self._copier: SourceCopier | None = None
        self._position = 0
        self._is_known = False
        self._under_way: list[asyncio.Future[Copied]] = []

    async def send(self, count: int) -> None:
        try:
            await self._send(count)
        except SavaError as error:  # whatever it was, the topic says where it is
            self._copier = None
            self.is_refused = isinstance(error, OriginForgotten)

    async def _send(self, count: int) -> None:
        if self._copier is None:
            self._copier = await self._world.copier(self._origins)
            self._is_known, self._position, _ = await self._copier.progress()
            if not self._is_known:
                self._position = self._start
        end = min(self._position + count, len(self._origins.held))
        if self._position < end:
            begin = not self._is_known
            source_range = self._origins.source_range(
                self._position, end, begin=begin, batches=2, size=self._world.size
            )
            self._under_way.append(await self._copier.begin(source_range))
            self._position, self._is_known = end, True

    async def look(self) -> None:
        outcomes = await asyncio.gather(*self._under_way, return_exceptions=True)
        self._under_way.clear()
        if any(isinstance(outcome, BaseException) for outcome in outcomes):
            self._copier = None

    async def finish(self) -> None:
        for _ in range(200):
            await self.look()
            await self.send(LENGTH)
            await self.look()
            if self.is_refused or (self._copier is not None and self._position == len(self._origins.held)):
                return
            await asyncio.sleep(0.001)
        raise AssertionError("the copy does not come to its end")

    async def passed(self) -> list[str]:
        """What is to be in the topic because of it."""
        copier = await self._world.copier(self._origins)
        is_known, position, _ = await copier.progress()
        held = self._origins.held[self._start : position] if is_known else []
        return [copy.payload.decode() for copy in held if copy is not None]


class World:
    """One topic, on one of two disks."""

    def __init__(self, directory: Path, rng: Random, starts: tuple[int, int, int]) -> None:
        self.size = 0
        self.eu = eu = Origins("eu").publish(LENGTH, skip=range(0, LENGTH, 5))
        self.asia = Origins("asia").relay(eu, 0, 20, skip=(7,)).publish(10, skip=(21,))
        self.asia.relay(eu, 20, 50, skip=(*range(22, 40, 2), 43)).relay(eu, 43, 44)
        self.africa = Origins("africa").relay(eu, 10, 30, skip=(11, 12)).publish(3)
        self.africa.relay(self.asia, 15, 30).relay(eu, 30, 60, skip=range(31, 60, 4))
        self.cluster = Cluster(directory)
        self.disks = [SimDisk(rng, path=name) for name in "ab"]
        self.at = self.epoch = 0
        self.storage: BrokerStorage | None = None
        self.log: TopicLog | None = None
        sources = zip((self.eu, self.asia, self.africa), starts, strict=True)
        self.copiers = [Copier(self, origins, start) for origins, start in sources]
        self.copiers.append(Copier(self, self.eu, starts[0]))
        self.published = 0

    async def open(self) -> None:
        self.epoch += 1
        options = EAGER if self.epoch % 2 else LAZY
        self.storage = await self.cluster.start("ab"[self.at], options, disk=self.disks[self.at])
        self.log = await self.storage.open_topic(TOPIC, epoch=self.epoch)

    async def copier(self, origins: Origins) -> SourceCopier:
        assert self.log is not None
        return await copier_into(self.log, origins.source, self.cluster.metadata)

    async def send(self, copier: int, count: int) -> None:
        await self.copiers[copier].send(count)

    async def look(self, copier: int, _: int) -> None:
        await self.copiers[copier].look()

    async def wild(self, start: int, count: int) -> None:
        copier = await self.copier(self.eu)
        with suppress(SavaError):
            await copier.begin(self.eu.source_range(start, min(start + count, LENGTH)))

    async def full(self, *_: int) -> None:
        self.size = BATCH
        self.disks[self.at].set_capacity(self.disks[self.at].used + BATCH)

    async def room(self, *_: int) -> None:
        self.size = 0
        self.disks[self.at].set_capacity(None)

    async def kill(self, *_: int) -> None:
        assert self.storage is not None
        self.disks[self.at] = await kill(self.storage, self.disks[self.at])
        await self.room()
        await self.open()

    async def restart(self, *_: int) -> None:
        await self.room()
        assert self.storage is not None
        await self.storage.close()
        await self.open()

    async def move(self, *_: int) -> None:
        await self.room()
        assert self.storage is not None
        assert self.log is not None
        await self.log.seal()
        await self.storage.close()
        self.at = 1 - self.at
        await self.open()

    async def publish(self, *_: int) -> None:
        """Somebody of this cluster."""
        assert self.log is not None
        try:
            await self.log.append(batch(f"us/1/{self.published}"))
            self.published += 1
        except SavaError:
            pass

    async def check(self) -> None:
        """Whatever a source position has passed is here; nothing is twice."""
        assert self.log is not None
        passed = [await copier.passed() for copier in self.copiers]
        found = Counter(payload.strip() for payload in await contents(self.log))
        assert set(found.values()) <= {1}
        assert {payload for each in passed for payload in each} <= found.keys()
        assert len(of_origin(list(found), Origins("us", 1).source)) == self.published


async def run(
    directory: Path, script: list[tuple[str, int, int]], seed: int, starts: tuple[int, int, int]
) -> World:
    world = World(directory, Random(seed), starts)
    await world.open()
    try:
        for name, first, second in script:
            await getattr(world, name)(first, second)
        await world.check()
        await world.room()
        for copier in world.copiers:
            await copier.finish()
        await world.check()
    finally:
        assert world.storage is not None
        await world.storage.close()
    assert not [failure for failure in world.cluster.failures if "was killed" not in str(failure)]
    return world


scripts = st.lists(steps, min_size=5, max_size=40)
begins = st.tuples(*[st.sampled_from((0, 0, 15, 40))] * 3)


@settings(max_examples=60)
@given(script=scripts, seed=st.integers(0, 1 << 16), starts=begins)
def test_each_message_that_any_path_brings_is_there_once(
    script: list[tuple[str, int, int]], seed: int, starts: tuple[int, int, int]
) -> None:
    with TemporaryDirectory() as directory:
        world = asyncio.run(run(Path(directory), script, seed, starts))
    assert not any(copier.is_refused for copier in world.copiers)


@settings(max_examples=60)
@given(script=scripts, seed=st.integers(0, 1 << 16), starts=begins)
def test_a_source_with_too_many_holes_is_refused_without_loss_or_copies(
    script: list[tuple[str, int, int]], seed: int, starts: tuple[int, int, int]
) -> None:
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(origin_marks, "MAX_RANGES", 6)
        asyncio.run(run(Path(directory), script, seed, starts))
