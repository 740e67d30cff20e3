"""A journal through random trouble: whatever was acknowledged is where it was, and what was read stays."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest

from sava.errors import SavaError
from sava.ledger.writer import MirrorOptions
from sava.records import RecordBatch
from sava.wal.format import HEADER_BYTES
from tests.support.long import IS_LONG
from tests.support.waiting import PATIENCE_S
from tests.unit.ledger.hosts import Host, Hosts

ROUNDS = 4
IN_FLIGHT = 8


class Story:
    """What was acknowledged, and what was there at the beginning of each generation."""

    def __init__(self, owner: Host, rng: Random) -> None:
        self.owner = owner
        self.rng = rng
        self.history: dict[int, bytes] = {}
        self.released = 0
        """Offsets before it are in segments."""
        self.epoch = 0
        self.attempts = 0
        self.acked_end = HEADER_BYTES
        """Of the log: what was acknowledged, or found at a start, was synced."""

    async def check(self) -> None:
        """At the beginning of a generation."""
        journal = self.owner.journal
        journal.release(1, self.released)  # as whoever opens the topic does
        batches = await journal.read(1, self.released, 1 << 30)
        found = {batch.base_offset: _payload(batch) for batch in batches}
        assert sorted(found) == list(range(self.released, self.released + len(found)))
        for offset, payload in self.history.items():
            assert offset < self.released or found.get(offset) == payload, f"offset {offset}"
        self.history = found
        self.acked_end = await self.owner.journal.queue.drained()

    async def write(self, until: asyncio.Event) -> None:
        """As a topic does: in order, from the end of what is there; the first failure is the end."""
        self.epoch += 1
        offset = self.released + len(self.history)
        waiting: set[asyncio.Task[None]] = set()
        try:
            while not until.is_set() and not any(task.done() and task.exception() for task in waiting):
                waiting.add(asyncio.create_task(self._append(offset)))
                offset += 1
                await asyncio.sleep(0)
                if len(waiting) >= IN_FLIGHT:
                    _, waiting = await asyncio.wait(
                        waiting, return_when=asyncio.FIRST_COMPLETED, timeout=0.05
                    )
                    while len(waiting) >= IN_FLIGHT and not until.is_set():
                        _, waiting = await asyncio.wait(waiting, timeout=0.02)
        finally:
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _append(self, offset: int) -> None:
        self.attempts += 1
        payload = b"%d of attempt %d" % (offset, self.attempts) + b"x" * self.rng.randrange(3000)
        batch = RecordBatch.encode([payload], publish_time=1)
        placed = batch.assigned(topic_id=1, epoch=self.epoch, base_offset=offset)
        future: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self.owner.journal.append(placed, future.set_result)
        outcome = await future
        if outcome is not None:
            raise outcome
        assert offset not in self.history
        self.history[offset] = payload
        self.acked_end = self.owner.journal._end
        if self.rng.random() < 0.03:
            self._upload()

    def _upload(self) -> None:
        """A part of what was acknowledged is in segments now."""
        for _, end in self.owner.journal.holdings.index(1).ranges[:1]:
            self.released = self.rng.randint(self.released, end)
            self.owner.journal.release(1, self.released)


def _payload(batch: RecordBatch) -> bytes:
    (message,) = batch.messages()
    return bytes(message.payload)


def trouble(rng: Random, hosts: Hosts) -> None:
    mirror = rng.choice(hosts.hosts[1:])
    match rng.randrange(5):
        case 0:
            mirror.gate.drop()
        case 1:
            mirror.gate.cut()
        case 2:
            mirror.gate.is_silent = True
        case 3:
            mirror.gate.heal()
            mirror.gate.drop()
        case 4:
            if mirror.storage in hosts.town.there:
                hosts.town.go(mirror.storage)
            else:
                mirror.come()


def heal(hosts: Hosts) -> None:
    for host in hosts.hosts:
        host.gate.heal()
        host.gate.drop()
        host.come()


async def power_cut(story: Story, rng: Random) -> None:
    """Of the owner: what it had not synced may be lost."""
    owner = story.owner
    generations = owner.path / "generations.json"
    kept = generations.read_bytes()
    await owner.stop()
    generations.write_bytes(kept)
    if rng.random() < 0.7:
        _tear(owner.path, story.acked_end, rng)
    await owner.open()


def _tear(path: Path, acked_end: int, rng: Random) -> None:
    """Cut off a part of the last file behind what was acknowledged."""
    last = max(path.glob("log-*"))
    start, size = int(last.name[4:24]), last.stat().st_size
    keep = max(acked_end - start, HEADER_BYTES)
    if keep < size:
        with last.open("r+b") as file:
            file.truncate(rng.randrange(keep, size + 1))


@pytest.mark.parametrize("seed", range(200 if IS_LONG else 10))
async def test_what_was_acknowledged_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("sava.ledger.host.FORGET_S", 0.02)
    rng = Random(seed)
    async with Hosts(3, tmp_path, options=MirrorOptions(mirror_timeout_s=0.5)) as hosts:
        await hosts.begin()
        owner = hosts[0]
        story = Story(owner, rng)
        for _ in range(ROUNDS):
            await story.check()
            stop = asyncio.Event()
            writing = asyncio.create_task(story.write(stop))
            for _ in range(rng.randrange(5)):
                await asyncio.sleep(rng.choice([0.0, 0.01, 0.05, 0.2]))
                trouble(rng, hosts)
            await asyncio.sleep(0.05)
            stop.set()
            before = owner.id
            if rng.random() < 0.5:
                await owner.mirrored.lost()
                await asyncio.gather(writing, return_exceptions=True)
            else:
                ending = asyncio.gather(writing, return_exceptions=True)
                await power_cut(story, rng)
                await ending
            heal(hosts)
            owner.register()
            await hosts.recover(before, through=rng.choice(hosts.hosts))
            async with asyncio.timeout(PATIENCE_S):
                await owner.journal.queue.wait_for_generation()
        await story.check()
        assert story.history or story.released
        for error in [failure for host in hosts.hosts for failure in host.failures]:
            assert isinstance(error, SavaError)
