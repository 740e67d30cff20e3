"""Owners that rest, wake, come and go in any order, with transactions that are lost or come late, and whose
journals end a life with messages in flight."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from sava.errors import CallerError, RetryableError
from sava.metadata.errors import OutcomeUnknown
from sava.storage.broker_storage import BrokerStorage, StorageOptions
from sava.storage.journal import Journal
from sava.storage.topic_log import LogStatus, TopicLog
from sava.storage.uploader import UploadOptions
from tests.support.storage import TOPIC, Cluster, batch, contents
from tests.unit.storage.commitments import Ended, Mirrors
from tests.unit.storage.faults import UNAVAILABLE, UNKNOWN, FaultyMetadata, lose_answer, refuse

OPTIONS = StorageOptions(upload=UploadOptions(segment_age_s=3600, clean_after_s=3600))
BROKERS = "abc"


class World:
    def __init__(self, path: Path, dice: Random) -> None:
        self.dice = dice
        self.metadata = FaultyMetadata()
        self.cluster = Cluster(path, metadata=self.metadata)
        self.brokers: dict[str, BrokerStorage] = {}
        self.logs: list[TopicLog] = []
        """The last one is the owner's; the others may believe that they are."""
        self.epoch = 0
        self.sent = 0
        self.acknowledged: dict[int, str] = {}
        self.given_twice: list[int] = []
        self.late: list[Callable[[], Awaitable[Any]]] = []
        self.taken_over = 0
        self.lives = 0
        """That have ended."""
        self.lost_epoch = 0
        """When the last one did."""
        self.void: dict[Journal, list[tuple[int, int]]] = defaultdict(list)
        """What does not count of each journal."""
        self.mirrors: dict[Journal, Mirrors] = {}

    async def start(self) -> None:
        for name in BROKERS:
            broker = await self.cluster.start(name, OPTIONS)
            await broker.journal.begin_generation(self._begin_life(broker.journal))
            self.brokers[name] = broker

    def _begin_life(self, journal: Journal) -> Mirrors:
        self.mirrors[journal] = mirrors = Mirrors()
        mirrors.position = 1 << 62
        return mirrors

    async def round(self) -> None:
        """The owner goes to rest, with whatever trouble, and then everything happens in any order."""
        log = await self._owner()
        await self._publish(log)
        await log._parts.uploader.flush(log._backlog, log.next_offset)
        if self.dice.random() < 0.7:
            self._plan_trouble()
        log._marker._due()
        for _ in range(self.dice.randrange(20)):
            await asyncio.sleep(0)
        steps = [self._publish_to_all, self._arrive, self._take_over, self._open_again, self._publish_to_last]
        if self.dice.random() < 0.3:
            steps.append(self._lose_life)
        for step in self.dice.sample(steps, 4):
            with suppress(RetryableError, CallerError, OutcomeUnknown):
                await step()

    async def _owner(self) -> TopicLog:
        """As it is, or opened by whoever has the tail, when the metadata store is well again."""
        self.metadata._planned.clear()
        state = await self.cluster.catalog().load()
        if self.logs and state is not None:
            last = self.logs[-1]
            if last.status is LogStatus.OPEN and last.epoch == state.epoch:
                return last
        names = [
            name
            for name, broker in self.brokers.items()
            if state is None or state.is_settled or state.storage_id == broker.identity.storage_id
        ]
        self.epoch += 1
        self.logs.append(await self.brokers[self.dice.choice(names)].open_topic(TOPIC, epoch=self.epoch))
        return self.logs[-1]

    def _plan_trouble(self) -> None:
        async def delay(call: Callable[[], Awaitable[Any]]) -> Any:
            self.late.append(call)
            raise UNKNOWN

        trouble = self.dice.choice([lose_answer(UNKNOWN), refuse(UNKNOWN), refuse(UNAVAILABLE), delay, delay])

        async def meet(call: Callable[[], Awaitable[Any]]) -> Any:
            if self.dice.random() < 0.7:
                self.metadata.plan("get", refuse(UNAVAILABLE))
            return await trouble(call)

        self.metadata.plan("txn", meet)

    async def _publish_to_all(self) -> None:
        await asyncio.gather(*map(self._publish, self.logs[-4:]), return_exceptions=True)

    async def _publish_to_last(self) -> None:
        await self._publish(self.logs[-1])

    async def _publish(self, log: TopicLog) -> None:
        self.sent += 1
        payload = f"{self.sent}"
        offset = await log.append(batch(payload))
        if offset in self.acknowledged:
            self.given_twice.append(offset)
        self.acknowledged[offset] = payload

    async def _arrive(self) -> None:
        for call in self.late:
            await call()
        self.late.clear()

    async def _take_over(self) -> None:
        self.epoch += 1
        log = await self.brokers[self.dice.choice(BROKERS)].open_topic(TOPIC, epoch=self.epoch)
        self.taken_over += log._journal is not self.logs[-1]._journal
        self.logs.append(log)

    async def _open_again(self) -> None:
        """A broker that does not know whether it was opened, under the same epoch. Not in another life of its
        journal."""
        last = self.logs[-1]
        if last.epoch <= self.lost_epoch:
            return
        for broker in self.brokers.values():
            if broker.journal is last._journal:
                self.logs.append(await broker.open_topic(TOPIC, epoch=last.epoch))

    async def _lose_life(self) -> None:
        """The registration is lost while a message is in flight; the topics that are open may be about to
        rest. Whoever closes the journal finds that the message counts, or that it does not."""
        log = self.logs[-1]
        journal = log._journal
        start = self.mirrors[journal].position = await journal.queue.drained()
        with suppress(RetryableError, CallerError):
            self.sent += 1
            in_flight = await log.begin(batch(f"{self.sent}"))
            in_flight.add_done_callback(lambda future: future.exception())
        if self.dice.random() < 0.7:
            await journal.queue.drained()
        journal.end_generation(Ended())
        for each in self.logs:
            if each._journal is journal and self.dice.random() < 0.7:
                each._marker._due()
        for _ in range(self.dice.randrange(20)):
            await asyncio.sleep(0)
        for each in self.logs:
            if each._journal is journal:
                await each.close()
        end = await journal.queue.drained()
        if self.dice.random() < 0.5:
            self.void[journal].append((start, end))
        await journal.replay(self.void[journal])
        await journal.begin_generation(self._begin_life(journal))
        self.lives += 1
        self.lost_epoch = self.epoch

    async def check(self) -> None:
        log = await self._owner()
        found = dict(enumerate(await contents(log)))
        assert found.items() >= self.acknowledged.items()
        for broker in self.brokers.values():
            await broker.close()


@pytest.mark.parametrize("first", range(0, 12, 4))
async def test_what_was_acknowledged_is_there_once_whoever_has_the_topic(tmp_path: Path, first: int) -> None:
    taken_over = lives = 0
    for seed in range(first, first + 4):
        print(f"seed {seed}")
        world = World(tmp_path / str(seed), Random(seed))
        await world.start()
        for _ in range(60):
            await world.round()
        await world.check()
        assert not world.given_twice
        assert not world.cluster.failures
        taken_over += world.taken_over
        lives += world.lives
    assert min(taken_over, lives) > 1
