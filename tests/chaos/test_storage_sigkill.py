"""A broker's storage killed at random moments, and at each step of a hand-over: every acknowledged message is
there once, in order, at its offset."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import msgspec
import pytest

from sava.storage.broker_storage import BrokerStorage
from sava.storage.objectstore import ObjectStore
from sava.storage.topic_log import TopicLog
from sava.storage.types import TopicKey
from sava.supervisor import Supervisor
from sava.wal import LocalDisk
from tests.chaos.storage_child import OPTIONS, MetadataServer, Work, batch_of
from tests.support.long import IS_LONG
from tests.support.memory_store import MemoryStore
from tests.support.one_disk import OneDisk
from tests.support.processes import PIPE, start_child
from tests.support.processes import Child as Process
from tests.support.storage import contents, expected, numbered
from tests.support.waiting import PATIENCE_S, until

LIVES = 200 if IS_LONG else 20

TOPICS = [TopicKey("default", f"topic-{number}", 100 + number) for number in range(3)]
PRODUCERS = (1, 2)


class Child:
    """A process that waits for its work."""

    def __init__(self, process: Process) -> None:
        self._process = process

    @classmethod
    async def start(cls) -> Child:
        return cls(
            await start_child(
                sys.executable,
                "-m",
                "tests.chaos.storage_child",
                stdin=PIPE,
                stdout=PIPE,
                limit=1 << 24,
            )
        )

    def give(self, work: Work) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(work) + b"\n")

    async def next_report(self) -> bytes:
        assert self._process.stdout is not None
        line = await asyncio.wait_for(self._process.stdout.readline(), PATIENCE_S)
        assert line, "the child ended before it was told anything"
        return line

    def kill(self) -> None:
        assert self._process.returncode is None, "the child must be alive when it is killed"
        self._process.send_signal(signal.SIGKILL)

    async def reports(self) -> list[bytes]:
        """All whole lines up to its end."""
        assert self._process.stdout is not None
        output = await self._process.stdout.read()
        assert await self._process.wait() == -signal.SIGKILL
        return output.split(b"\n")[:-1]

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.communicate()


class World:
    """What outlives the children: metadata, objects, directories, and what was acknowledged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata = MemoryStore()
        self.server = MetadataServer(self.metadata, str(path / "socket"))
        self.epoch = 0

    def work(self, task: str, broker: str, **more: object) -> Work:
        self.epoch += 1
        return Work(
            task=task,
            directory=str(self.path / broker),
            objects=f"file://{self.path}/objects",
            metadata=str(self.path / "socket"),
            broker=broker,
            epoch=self.epoch,
            **more,  # type: ignore[arg-type]
        )

    @asynccontextmanager
    async def broker(self, name: str) -> AsyncIterator[BrokerStorage]:
        """A broker in this process, to look at what is there."""
        storage = await BrokerStorage.open(
            LocalDisk(self.path / name),
            broker=name,
            store=ObjectStore.open(f"file://{self.path}/objects"),
            metadata=self.metadata,
            options=OPTIONS,
            fail=lambda failure: None,
            supervisor=Supervisor(),
        )
        await storage.journal.begin_generation(OneDisk())
        try:
            yield storage
        finally:
            await storage.close()

    async def open_topic(self, storage: BrokerStorage, topic: TopicKey) -> TopicLog:
        self.epoch += 1
        return await storage.open_topic(topic, epoch=self.epoch)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    (tmp_path / "objects").mkdir()
    world = World(tmp_path)
    async with world.server:
        yield world


# -- at random moments --------------------------------------------------------------------------------


class Ledger:
    """What producers were told."""

    def __init__(self) -> None:
        self.offsets: dict[tuple[int, int, int], int] = {}
        """(topic, producer, sequence) → offset"""
        self.next: dict[str, int] = {f"{topic.topic_id}:{each}": 0 for topic in TOPICS for each in PRODUCERS}
        self._read_to: dict[int, int] = defaultdict(int)
        self._seen: dict[tuple[int, int], int] = defaultdict(int)

    def told(self, line: bytes) -> None:
        topic_id, producer, sequence, count, base = map(int, line.split())
        name = f"{topic_id}:{producer}"
        assert sequence == self.next[name], "acknowledged out of order"
        self.next[name] = sequence + count
        if base >= 0:
            for number in range(count):
                self.offsets[topic_id, producer, sequence + number] = base + number

    async def check(self, log: TopicLog) -> None:
        """Everything is there once and in order; what was looked at before is looked at in part only."""
        topic_id = log.topic.topic_id
        start = self._read_to[topic_id]
        offset = start
        async for batch in log.read(start):
            assert batch.base_offset == offset
            for payload in batch.payloads():
                self._check_message(topic_id, offset, payload)
                offset += 1
        assert offset == log.next_offset
        self._read_to[topic_id] = offset
        for producer in PRODUCERS:
            assert self._seen[topic_id, producer] >= self.next[f"{topic_id}:{producer}"], "lost"

    def _check_message(self, topic_id: int, offset: int, payload: bytes) -> None:
        found_topic, producer, sequence = (int(part) for part in payload.split(b":")[:3])
        assert found_topic == topic_id
        assert sequence == self._seen[topic_id, producer], "a gap or a repetition"
        self._seen[topic_id, producer] += 1
        told = self.offsets.pop((topic_id, producer, sequence), offset)
        assert told == offset, "not at the offset that was acknowledged"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("has_process", "lives", "longest_s"),
    [(False, LIVES, 0.6), (True, LIVES // 4, 5.0)],
    ids=["", "process"],
)
async def test_what_was_acknowledged_survives_sigkill(
    world: World, has_process: bool, lives: int, longest_s: float
) -> None:
    """``has_process``: what makes the segments is killed with it, and takes a while to start."""
    seed = time.time_ns()
    print(f"seed {seed}")
    rng, ledger, broker = Random(seed), Ledger(), "a"
    # Starting an interpreter takes longer than all the rest, so two are always in the making.
    children = deque([await Child.start(), await Child.start()])
    try:
        for life in range(lives):
            children.append(await Child.start())
            child = children[0]
            work = {"topics": TOPICS, "producers": ledger.next, "has_process": has_process}
            child.give(world.work("produce", broker, **work))
            ledger.told(await child.next_report())
            # The time of the kill is the point of this test, so here time itself is awaited.
            await asyncio.sleep(rng.uniform(0.0, longest_s))
            if life == lives - 1:  # one life at least gets as far as a segment, however busy the machine is
                await until(lambda: world.server.changes["register"], "a segment is registered")
            child.kill()
            for line in await child.reports():
                ledger.told(line)
            children.popleft()
            broker = await look(world, ledger, broker, is_move=life % 5 == 4)
    finally:
        for child in children:
            await child.end()
    await check_from_the_beginning(world, broker)
    assert min(ledger.next.values()) > lives
    assert world.server.changes["register"] > 0, f"of {world.server.changes}"


async def look(world: World, ledger: Ledger, broker: str, *, is_move: bool) -> str:
    """Check all topics after a kill; every few lives they move to the other broker."""
    async with world.broker(broker) as storage:
        for topic in TOPICS:
            log = await world.open_topic(storage, topic)
            await ledger.check(log)
            if is_move:
                await log.seal()
    return {"a": "b", "b": "a"}[broker] if is_move else broker


async def check_from_the_beginning(world: World, broker: str) -> None:
    ledger = Ledger()
    async with world.broker(broker) as storage:
        for topic in TOPICS:
            await ledger.check(await world.open_topic(storage, topic))


def test_a_producer_sends_the_same_batch_again() -> None:
    assert batch_of(TOPICS[0], 1, 5).to_bytes() == batch_of(TOPICS[0], 1, 5).to_bytes()


# -- at each step of a hand-over ------------------------------------------------------------------------

STEPS = [
    "before claim",
    "after claim",
    "append 0",
    "append 21",
    "before put",
    "during put",
    "after put",
    "before register",
    "after register",
    "before seal",
    "after seal",
]


@pytest.mark.parametrize("step", STEPS)
async def test_a_hand_over_killed_at_a_step(world: World, step: str) -> None:
    child = await Child.start()
    child.give(world.work("hand over", "a", topics=TOPICS[:1], kill_at=step))
    told = [int(line) for line in await child.reports()]
    assert told == list(range(len(told)))
    topic = TOPICS[0]
    async with world.broker("a") as storage:
        log = await world.open_topic(storage, topic)
        end = log.next_offset
        assert end >= len(told)
        assert await contents(log) == expected(0, end)
        await log.append(numbered(end, end + 3))
        await log.seal()
    async with world.broker("b") as storage:
        log = await world.open_topic(storage, topic)
        assert log.next_offset == end + 3
        await log.append(numbered(end + 3, end + 5))
        assert await contents(log, min(6, end)) == expected(min(6, end), end + 5)
    await check_orphans(world, topic)


# -- at each step of a merge ----------------------------------------------------------------------------

STEPS_OF_A_MERGE = [
    "before put",
    "during put",
    "after put",
    "before replace",
    "after replace",
    "during delete",
    "after delete",
]


@pytest.mark.parametrize("step", STEPS_OF_A_MERGE)
async def test_a_merge_killed_at_a_step(world: World, step: str) -> None:
    child = await Child.start()
    child.give(world.work("merge", "a", topics=TOPICS[:1], kill_at=step))
    assert len(await child.reports()) == 22
    async with world.broker("a") as storage:
        log = await world.open_topic(storage, TOPICS[0])
        is_merged = step in ("after replace", "during delete", "after delete")
        assert len(await log.segments()) == (1 if is_merged else 22)
        assert await contents(log) == expected(0, 22)
        await log.append(numbered(22, 23))
        await storage.uploader.flush(log._backlog, 23)
        assert await log.maintenance.merge_segments(None) == (0 if is_merged else 23)
        assert await contents(log) == expected(0, 23)
        await check_objects(world, log)


async def test_merges_killed_at_random_moments(world: World) -> None:
    rng = Random(seed := time.time_ns())
    print(f"seed {seed}")
    end = 0
    for _ in range(LIVES // 2):
        child = await Child.start()
        child.give(world.work("trickle", "a", topics=TOPICS[:1]))
        told = rng.randrange(1, 24)
        assert [int(await child.next_report()) for _ in range(told)] == list(range(end, end + told))
        await asyncio.sleep(rng.uniform(0.0, 0.03))  # the time of the kill is the point
        child.kill()
        told += len(await child.reports())
        async with world.broker("a") as storage:
            log = await world.open_topic(storage, TOPICS[0])
            assert log.next_offset >= end + told
            end = log.next_offset
            assert await contents(log) == expected(0, end)
            assert len(await log.segments()) < 60, "few, however many there were"
            await check_objects(world, log)
    assert world.server.changes["replace"] > 1, f"of {world.server.changes}"


async def check_objects(world: World, log: TopicLog) -> None:
    """After a sweep, the folder has what is registered and nothing else."""
    await log._parts.uploader.flush(log._backlog, log.next_offset)
    await log.maintenance.sweep_orphans(now_ms=1 << 50)
    store = ObjectStore.open(f"file://{world.path}/objects")
    registered = [segment.key for segment in await log.segments()]
    assert sorted([info.key async for info in store.list("topics")]) == registered


async def check_orphans(world: World, topic: TopicKey) -> None:
    """A kill leaves one object at most that nothing refers to."""
    async with world.broker("b") as storage:
        log = await world.open_topic(storage, topic)
        await log.seal()
        registered = {segment.key for segment in await log._catalog.segments()}
    store = ObjectStore.open(f"file://{world.path}/objects")
    objects = {info.key async for info in store.list("topics")}
    assert registered <= objects
    assert len(objects - registered) <= 1
