"""A recovery with a metadata store and disks that answer, fail, or come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sava.ledger.protocol import (
    Check,
    Fence,
    LedgerId,
    LedgerRefused,
    LedgerState,
    Message,
    Phase,
    Range,
    RefusalReason,
    StorageId,
    WriteBack,
)
from sava.ledger.protocol import record as steps
from sava.ledger.recoverer import Recoverer
from sava.ledger.registry import LedgerRecordChanged, LedgerRecords
from sava.metadata.commands import Compare, Relation, Target
from sava.metadata.errors import Deposed
from tests.support.waiting import PATIENCE_S, until
from tests.unit.cluster.fakes import FaultyStore
from tests.unit.ledger.disks import Disks, Writing

JOURNAL = LedgerId(1, 7)
OWN, B, C = (StorageId(each) for each in ("disk-of-1", "b", "c"))


class Story:
    """A journal on three disks of which two acknowledge; 100 records."""

    def __init__(self, path: Path) -> None:
        self.store = FaultyStore()
        self.records = LedgerRecords(self.store)
        self.disks = Disks()
        writing = Writing(path)
        self.positions = [writing.append(1, [b"%d" % number])[0] for number in range(100)]
        self.data = writing.bytes()
        self.end = writing.log.end
        self.revision = 0

    async def open(self) -> None:
        record = steps.opened(0, (OWN, B, C), qw=3, qa=2, by="owner")
        self.revision = await self.records.open(JOURNAL, record)

    def cut(self, count: int) -> bytes:
        """The journal without its last records."""
        return self.data[: self.positions[-count]]

    def recoverer(self, name: str = "test", *conditions: Compare, term: int = 0) -> Recoverer:
        return Recoverer(JOURNAL, self.records, self.disks, name=name, conditions=conditions, term=term)


@pytest.fixture
async def story(tmp_path: Path) -> AsyncIterator[Story]:
    story = Story(tmp_path)
    await story.open()
    async with asyncio.timeout(PATIENCE_S):
        yield story


async def until_waiting(recoverer: Recoverer) -> None:
    await until(lambda: (loss := recoverer.loss()) is not None and bool(loss.silent))


async def test_the_longest_copy_counts_and_is_written_back_before_the_end(story: Story) -> None:
    story.disks.put(B, JOURNAL, story.cut(5))
    story.disks.put(C, JOURNAL, story.data)
    record = await story.recoverer().run()
    assert record is not None
    assert (record.state, record.end) == (LedgerState.CLOSED, story.end)
    assert set(record.holders) == {B, C}
    assert bytes(story.disks.copies[B, JOURNAL].data) == story.data
    found = await story.records.get(JOURNAL)
    assert found is not None
    assert found.record == record


async def test_a_closed_journal_is_left_alone(story: Story) -> None:
    story.disks.put(B, JOURNAL, story.data)
    story.disks.put(C, JOURNAL, story.data)
    first = await story.recoverer().run()
    story.disks.asked.clear()
    assert await story.recoverer().run() == first
    assert story.disks.asked == []


async def test_one_of_three_is_not_enough_and_the_second_may_come_later(story: Story) -> None:
    story.disks.put(B, JOURNAL, story.cut(5))
    recoverer = story.recoverer()
    running = asyncio.create_task(recoverer.run())
    await until_waiting(recoverer)
    assert recoverer.answers_needed == 1
    loss = recoverer.loss()
    assert loss is not None
    assert set(loss.silent) == {OWN, C}
    assert loss.unknown_from == len(story.cut(5))
    story.disks.put(C, JOURNAL, story.data)
    record = await running
    assert record is not None
    assert record.end == story.end
    assert record.lost == ()


async def test_an_operator_may_give_up_exactly_what_was_shown(story: Story) -> None:
    story.disks.put(B, JOURNAL, story.cut(5))
    recoverer = story.recoverer()
    running = asyncio.create_task(recoverer.run())
    await until_waiting(recoverer)
    await until(lambda: any(isinstance(message, Check) for _, message in story.disks.asked))
    loss = recoverer.loss()
    assert loss is not None
    assert not recoverer.accept_loss(type(loss)((Range(0, 8),), loss.unknown_from, loss.silent), why="test")
    assert recoverer.accept_loss(loss, why="test")
    # Two must hold it before it is closed, and only one disk is there.
    story.disks.known.add(C)
    record = await running
    assert record is not None
    assert record.end == len(story.cut(5))


async def test_a_disk_that_was_replaced_is_not_an_answer(story: Story) -> None:
    """The broker of C lost its disk: what it has now is another one, and C itself is silent."""
    story.disks.put(B, JOURNAL, story.data)
    story.disks.known.add(StorageId("c-new"))
    recoverer = story.recoverer()
    running = asyncio.create_task(recoverer.run())
    await until_waiting(recoverer)
    loss = recoverer.loss()
    assert loss is not None
    assert C in loss.silent
    running.cancel()


async def test_writes_of_unknown_outcome_are_repeated(story: Story) -> None:
    story.disks.put(B, JOURNAL, story.data)
    story.disks.put(C, JOURNAL, story.data)
    story.store.lost["txn"] = 2  # of the claim, and of its repetition or the closing
    record = await story.recoverer().run()
    assert record is not None
    assert record.epoch == 1


async def test_a_claim_whose_condition_does_not_hold_has_no_effect(story: Story) -> None:
    """The owner is registered under the journal's number after all: this node's view was behind."""
    lease = await story.store.grant_lease(60_000)
    await story.store.put("/cluster/register/1", b"", lease=lease)
    is_gone = Compare("/cluster/register/1", Target.LEASE, Relation.NOT_EQUAL, lease)
    recoverer = story.recoverer("test", is_gone)
    assert await recoverer.run() is None
    assert recoverer.phase is Phase.OVERTAKEN
    found = await story.records.get(JOURNAL)
    assert found is not None
    assert found.revision == story.revision
    assert story.disks.asked == []


async def test_a_later_coordinator_takes_over_and_the_earlier_one_ends(story: Story) -> None:
    """The first waits for a second disk; the second claims anew, finds all that was acknowledged, closes.
    The first one's fence is refused by then, and so is its write."""
    story.disks.put(B, JOURNAL, story.data)
    first = story.recoverer("first")
    running = asyncio.create_task(first.run())
    await until_waiting(first)
    story.disks.put(C, JOURNAL, story.data, fence=2)  # it has heard the second one only
    second = story.recoverer("second")
    record = await second.run()
    assert record is not None
    assert record.epoch == 2
    assert record.by.startswith("second")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    found = await story.records.get(JOURNAL)
    assert found is not None
    with pytest.raises(LedgerRecordChanged):
        await story.records.change(JOURNAL, record, revision=story.revision)


async def test_a_deposed_leader_stops(story: Story) -> None:
    async def depose() -> None:
        raise Deposed("another term")

    story.store.before["txn"] = depose
    with pytest.raises(Deposed):
        await story.recoverer(term=3).run()


async def test_a_question_under_way_is_not_asked_twice(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that takes longer than the pause between two attempts."""
    monkeypatch.setattr("sava.ledger.recoverer.RETRY_S", 0.02)
    for disk in (B, C):
        story.disks.put(disk, JOURNAL, story.data)
    answer = story.disks.ask
    checks = 0

    async def slow(storage: StorageId, message: Message, *, origin: StorageId, timeout: float) -> Message:
        nonlocal checks
        if isinstance(message, Check):
            checks += 1
            await asyncio.sleep(0.3)
        return await answer(storage, message, origin=origin, timeout=timeout)

    monkeypatch.setattr(story.disks, "ask", slow)
    assert await story.recoverer().run() is not None
    assert checks == 2
    assert sum(isinstance(message, Fence) for _, message in story.disks.asked if _ in (B, C)) == 2


async def test_a_disk_that_hangs_holds_up_nobody_who_comes_back(story: Story) -> None:
    """Schedule: b answers the fence and hangs in its check; then the owner's disk is back. It is asked while
    b is at work, and the journal is closed with what c and it have."""
    story.disks.put(B, JOURNAL, story.data)
    story.disks.put(C, JOURNAL, story.cut(5))
    is_hanging = asyncio.Event()

    async def hang(storage: StorageId, message: Message) -> None:
        if storage == B and isinstance(message, Check):
            is_hanging.set()
            await asyncio.get_running_loop().create_future()

    story.disks.before = hang
    recoverer = story.recoverer()
    running = asyncio.create_task(recoverer.run())
    await is_hanging.wait()
    await asyncio.sleep(0.1)
    assert recoverer.loss() is None, "what is being looked for is not lost"
    story.disks.put(OWN, JOURNAL, story.data)
    record = await running
    assert record is not None
    assert (record.end, record.lost) == (story.end, ())


async def test_a_disk_that_comes_to_the_cluster_takes_the_copy_that_is_missing(story: Story) -> None:
    """Schedule: the owner is gone, b has all of the journal and c's disk is full; d joins."""
    story.disks.put(B, JOURNAL, story.data)
    story.disks.put(C, JOURNAL, story.cut(5))
    answer = story.disks.ask

    async def full(storage: StorageId, message: Message, *, origin: StorageId, timeout: float) -> Message:
        if storage == C and isinstance(message, WriteBack):
            return LedgerRefused(JOURNAL, C, RefusalReason.FULL, message.epoch)
        return await answer(storage, message, origin=origin, timeout=timeout)

    story.disks.ask = full  # type: ignore[method-assign]
    spares: list[StorageId] = []
    recoverer = Recoverer(JOURNAL, story.records, story.disks, name="test", spares=lambda: spares)
    running = asyncio.create_task(recoverer.run())
    await until(lambda: recoverer.loss() is not None)
    loss = recoverer.loss()
    assert loss is not None
    assert (loss.missing, loss.unknown_from, set(loss.silent)) == ((), None, {OWN, C})
    assert (recoverer.phase, recoverer.answers_needed) == (Phase.WRITE_BACK, 1)
    story.disks.known.add(StorageId("d"))
    spares.append(StorageId("d"))
    record = await running
    assert record is not None
    assert set(record.holders) == {B, StorageId("d")}
