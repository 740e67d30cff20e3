"""Topics that move, at the source and at the target, while they are copied."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import yaml

from sava.errors import SavaError
from sava.pipeline.cluster import ClusterAccess
from tests.support.brokers import Brokers
from tests.support.copying import Several, Site, numbered, payloads
from tests.support.long import IS_LONG
from tests.support.waiting import until

TOPIC = "/default/copied"
MOVES = 30 if IS_LONG else 4


class Named(Brokers):
    """Two brokers, of a cluster with a name."""

    def __init__(self, name: str, directory: Path) -> None:
        directory.mkdir()
        super().__init__(2, directory)
        settings = yaml.safe_load(self._config.read_text())
        self._config.write_text(yaml.safe_dump({**settings, "cluster_name": name}))
        self.name = name

    def site(self) -> Site:
        return Site(self.name, ClusterAccess(",".join(broker.client_url for broker in self.brokers)))

    async def move(self, topic: str) -> None:
        moves = await self.unload(topic, to=(await self.others(topic))[0])
        print(self.name, [(move.to_broker_id, move.error) for move in moves])


@pytest.mark.parametrize("topics", [1, 8])
async def test_topics_move_while_they_are_copied(tmp_path: Path, topics: int) -> None:
    """One by itself, or many together."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    names = [f"{TOPIC}-{number}" for number in range(topics)]
    async with AsyncExitStack() as stack:
        clusters = [await stack.enter_async_context(Named(name, tmp_path / name)) for name in ("eu", "us")]
        eu, us = [await asyncio.to_thread(cluster.site) for cluster in clusters]
        for site in (eu, us):
            stack.callback(site.close)
        copying = Copying(await asyncio.to_thread(Several, eu, us, names), alone=topics == 1)
        for cluster in clusters:
            for name in names:
                await cluster.served(name)
        work = asyncio.create_task(asyncio.to_thread(copying.run))
        try:
            for _ in range(MOVES):
                await asyncio.sleep(chance.uniform(0, 0.3))
                try:
                    await chance.choice(clusters).move(chance.choice(names))
                except SavaError as error:
                    print("not moved:", error)

            async def are_many() -> bool:
                return work.done() or copying.published > 1000

            await until(are_many, "more than 1,000 messages")
        finally:
            copying.is_over = True
            await work
        print(f"{copying.published} messages, troubles {copying.troubles}")
        for name in names:
            found = await asyncio.to_thread(us.messages, name)
            assert payloads(found) == [f"m-{number}" for number in range(copying.published)]
        assert copying.published > 1000
        assert bool(copying.several.together) is (topics > 1)


class Copying:
    """Publishes and copies in turn, in a thread."""

    def __init__(self, several: Several, *, alone: bool) -> None:
        self.several = several
        self.is_over = False
        self.published = 0
        self.troubles: dict[str, int] = {}
        self._alone = alone

    def run(self) -> None:
        copiers = self.several.copiers
        while not self.is_over:
            more = numbered("m", self.published, self.published + 500)
            for copier in copiers:
                copier.source.publish(copier.topic, more)
            self.published += len(more)
            for outcome in [copiers[0].round(0.2)] if self._alone else self.several.round(0.2):
                assert not outcome.code or outcome.may_pass, outcome
                if outcome.code:
                    self.troubles[outcome.code] = self.troubles.get(outcome.code, 0) + 1
        if self._alone:
            copiers[0].finish()
        else:
            self.several.finish()
