"""Brokers are killed, stopped, paused and drained at random while topics with traffic move about: what was
acknowledged stays, and in the end everything is served.

The seed is printed; it gives the same troubles, though not the same timing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from sava.errors import SavaError
from tests.cluster.trapped import TrappedBrokers
from tests.cluster.workload import Workload
from tests.support.brokers import BrokerProcess
from tests.support.long import only_long

RUN_S = 240.0
TOPICS = [f"/default/topic-{number}" for number in range(4)]
LONGEST_TROUBLE_S = 300.0


class Troubles:
    """One broker is in trouble at a time, so that there is always a quorum."""

    def __init__(self, cluster: TrappedBrokers, chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance

    async def run(self, seconds: float) -> None:
        troubles: list[Callable[[BrokerProcess], Awaitable[None]]] = [
            self._kill,
            self._kill_in_a_move,
            self._stop,
            self._pause,
            self._drain,
        ]
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            trouble = self._chance.choice(troubles)
            broker = self._chance.choice(self._cluster.brokers)
            print(f"{time.strftime('%H:%M:%S')} {trouble.__name__} broker {broker.number}")
            async with asyncio.timeout(LONGEST_TROUBLE_S):
                await trouble(broker)
                await self._cluster.all_running()

    async def _kill(self, broker: BrokerProcess) -> None:
        broker.kill()
        await broker.ended()
        await self._for_a_while()
        await broker.start()

    async def _kill_in_a_move(self, broker: BrokerProcess) -> None:
        async with self._moves(broker):
            await asyncio.sleep(self._chance.uniform(0, 0.05))
            await self._kill(broker)

    async def _stop(self, broker: BrokerProcess) -> None:
        async with self._moves(broker):
            assert await broker.stop() == 0
        await self._for_a_while()
        await broker.start()

    async def _pause(self, broker: BrokerProcess) -> None:
        async with self._moves(broker):
            broker.pause()
            try:
                await self._for_a_while()
            finally:
                broker.resume()

    async def _drain(self, broker: BrokerProcess) -> None:
        broker_id = str(await self._cluster.id_of(broker))
        await self._cluster.command("brokers", "drain", broker_id)
        await self._cluster.command("brokers", "activate", broker_id)

    async def _for_a_while(self) -> None:
        """Shorter than a registration lasts, or longer."""
        await asyncio.sleep(self._chance.choice((0.1, 1.0, 3.0)))

    @contextlib.asynccontextmanager
    async def _moves(self, but: BrokerProcess) -> AsyncIterator[None]:
        """Topics move meanwhile; what becomes of that is not known."""
        asked = next(broker for broker in self._cluster.brokers if broker is not but)
        moves = [
            asyncio.create_task(self._cluster.unload(topic, through=asked))
            for topic in TOPICS
            if self._chance.random() < 0.5
        ]
        try:
            yield
        finally:
            for move in moves:
                move.cancel()
            for outcome in await asyncio.gather(*moves, return_exceptions=True):
                assert not isinstance(outcome, Exception) or isinstance(outcome, SavaError | TimeoutError)


@only_long("for minutes")
@pytest.mark.timeout(RUN_S + 240)
async def test_nothing_acknowledged_is_lost_and_everything_is_served(tmp_path: Path) -> None:
    seed = int(os.environ.get("SAVA_SEED", "0")) or random.randrange(1 << 32)
    print(f"seed {seed}")
    async with TrappedBrokers(3, tmp_path) as cluster:
        for topic in TOPICS:
            await cluster.create(topic)
        async with cluster.sava_client() as client, contextlib.AsyncExitStack() as stack:
            loads = [
                await stack.enter_async_context(Workload(client, topic, interval_s=0.02)) for topic in TOPICS
            ]
            await asyncio.gather(*(load.progressed(5) for load in loads))
            await Troubles(cluster, random.Random(seed)).run(RUN_S)
            for topic in TOPICS:
                await cluster.served(topic)
            await asyncio.gather(*(load.progressed(5) for load in loads))
            try:
                await asyncio.gather(*(load.finish() for load in loads))
            except AssertionError:
                for topic in TOPICS:
                    print(await cluster.describe(topic))
                raise
