"""Three brokers under load, and everything that may happen to one of them, again and again: SIGKILL, SIGSTOP,
its disk lost, all of its data lost, its network cut in part or whole; now and then all of them are killed at
once.

Zero acknowledged messages are lost, no offset has two payloads, each producer's messages are there once and
in order: ``workload`` compares all of it in the end. ``make chaos`` does it until at least thirty processes
were killed; ``make test`` does a little of it. The seed is printed; it gives the same troubles, though not
the same timing.

A disk is lost only when the others have what it holds: what was acknowledged is on as many disks as was asked
for, and losing all of these at once is not survived, nor is it claimed to be.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sava.errors import SavaError
from tests.cluster.mirrored import MirroredBrokers
from tests.cluster.workload import Workload
from tests.support.brokers import BrokerProcess
from tests.support.long import IS_LONG
from tests.support.network import KINDS, LEDGERS, RAFT

TOPICS = [f"/default/chaos-{number}" for number in range(3)]
KILLS = 30 if IS_LONG else 3
LONGEST_TROUBLE_S = 300.0
LIMIT_S = 3000.0


class Chaos:
    """One broker is in trouble at a time, or all."""

    def __init__(self, cluster: MirroredBrokers, chance: random.Random) -> None:
        self._cluster = cluster
        self._chance = chance
        self.kills = 0
        self.lost_disks = 0
        self.troubles = 0

    async def run(self, kills: int) -> None:
        troubles: list[tuple[int, Callable[[BrokerProcess], Awaitable[None]]]] = [
            (5, self._kill),
            (2, self._pause),
            (2, self._lose_disk),
            (2, self._lose_everything),
            (3, self._cut),
            (1, self._kill_all),
        ]
        weights = [weight for weight, _ in troubles]
        while self.kills < kills:
            ((_, trouble),) = self._chance.choices(troubles, weights)
            broker = self._chance.choice(self._cluster.brokers)
            began = time.monotonic()
            async with asyncio.timeout(LONGEST_TROUBLE_S):
                await trouble(broker)
                await self._cluster.all_running()
            self.troubles += 1
            took = time.monotonic() - began
            print(f"{time.strftime('%H:%M:%S')} {trouble.__name__} broker {broker.number}: {took:.1f} s")

    async def _kill(self, broker: BrokerProcess) -> None:
        await self._die(broker)
        await self._for_a_while()
        await broker.start()

    async def _kill_all(self, _: BrokerProcess) -> None:
        for broker in self._cluster.brokers:
            broker.kill()
            self.kills += 1
        for broker in self._cluster.brokers:
            await broker.ended()
        for broker in self._cluster.brokers:
            await broker.start()

    async def _pause(self, broker: BrokerProcess) -> None:
        broker.pause()
        try:
            await self._for_a_while()
        finally:
            broker.resume()

    async def _lose_disk(self, broker: BrokerProcess) -> None:
        """Of messages; the metadata store is on another one."""
        if await self._die_and_lose(broker):
            await self._cluster.lose_disk(broker)
        await self._for_a_while()
        await broker.start()

    async def _lose_everything(self, broker: BrokerProcess) -> None:
        """An operator removes what is gone, and adds the empty broker at the same address."""
        if await self._die_and_lose(broker):
            await self._cluster.begin_anew(broker)
        else:
            await broker.start()

    async def _die_and_lose(self, broker: BrokerProcess) -> bool:
        may_lose = False
        with contextlib.suppress(SavaError):
            may_lose = await self._may_lose(broker)
        await self._die(broker)
        self.lost_disks += may_lose
        return may_lose

    async def _cut(self, broker: BrokerProcess) -> None:
        links = self._cluster.links
        assert links is not None
        kinds = self._chance.choice(((RAFT,), (LEDGERS,), KINDS))
        links.isolate(
            broker.number, [each.number for each in self._cluster.brokers if each is not broker], kinds
        )
        try:
            await self._for_a_while()
        finally:
            links.heal()

    async def _die(self, broker: BrokerProcess) -> None:
        broker.kill()
        self.kills += 1
        await broker.ended()

    async def _for_a_while(self) -> None:
        """Shorter than a registration lasts, or longer."""
        await asyncio.sleep(self._chance.choice((0.1, 1.0, 4.0)))

    async def _may_lose(self, broker: BrokerProcess) -> bool:
        """Whether every part of every journal is on another disk, too, wherever it was acknowledged. (A part
        is named by the record until its owner has put later messages into segments.)"""
        lost = await self._cluster.id_of(broker)
        for journal in await self._cluster.journals():
            there = {member.storage_id: member.broker_id for member in journal.members}
            for fragment in journal.fragments:
                gone = [each for each in fragment.storage_ids if there.get(each, 0) in (0, lost)]
                if len(gone) >= fragment.ack_quorum:
                    return False
        return True


@pytest.mark.timeout(LIMIT_S)
async def test_nothing_acknowledged_is_lost_whatever_happens(tmp_path: Path) -> None:
    seed = int(os.environ.get("SAVA_SEED", "0")) or random.randrange(1 << 32)
    print(f"seed {seed}")
    async with MirroredBrokers(3, tmp_path, links=True, upload_interval_s=2) as cluster:
        await cluster.mirrored()
        for topic in TOPICS:
            await cluster.create(topic)
        async with cluster.sava_client() as client, contextlib.AsyncExitStack() as stack:
            loads = [
                await stack.enter_async_context(Workload(client, topic, interval_s=0.02)) for topic in TOPICS
            ]
            await asyncio.gather(*(load.progressed(5) for load in loads))
            chaos = Chaos(cluster, random.Random(seed))
            await chaos.run(KILLS)
            for topic in TOPICS:
                await cluster.until_served(topic, timeout=60)
            await asyncio.gather(*(load.progressed(5) for load in loads))
            try:
                await asyncio.gather(*(load.finish() for load in loads))
            except AssertionError:
                for topic in TOPICS:
                    print(await cluster.describe(topic))
                for journal in await cluster.journals():
                    print(journal)
                raise
            acked = sum(len(load.acked) for load in loads)
            print(
                f"{chaos.troubles} troubles, {chaos.kills} kills, {chaos.lost_disks} disks lost, "
                f"{acked} messages acknowledged"
            )
