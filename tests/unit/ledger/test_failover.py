"""Journals of brokers that are gone are recovered, and their topics end where they ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sava.cluster import records as cluster_records
from sava.cluster.records import LedgerUnknown, NotController, NothingToAbandon, Registration
from sava.cluster.view import ClusterView
from sava.ledger import failover as failover_module
from sava.ledger import recoverer as recoverer_module
from sava.ledger.failover import Failover, LossReport, UncleanRecovery
from sava.ledger.protocol import (
    LedgerId,
    LedgerState,
    Message,
    Range,
    Read,
    StorageId,
    WriteBack,
)
from sava.ledger.protocol import record as steps
from sava.ledger.recoverer import Recoverer
from sava.ledger.registry import LedgerAccess, LedgerRecords, LiveBrokers, PeerUnreachable, record_key
from sava.ledger.tail_recovery import TailRecovery
from sava.metadata.commands import Put, TxnResult
from sava.metadata.errors import OutcomeUnknown
from sava.records import RecordBatch
from sava.storage.catalog import Catalog
from sava.storage.journal_index import BATCH
from sava.storage.objectstore import ObjectStore
from sava.storage.types import TopicKey, TopicState
from sava.supervisor import Supervisor
from sava.topics import specs
from tests.support.memory_store import MemoryStore
from tests.support.waiting import PATIENCE_S, until
from tests.unit.cluster.fake_brokers import stay
from tests.unit.ledger.disks import Disks, Writing

ORDERS = TopicKey("default", "orders", 7)
OWNER, HERE, THERE = (StorageId(each) for each in ("disk-of-1", "disk-of-2", "disk-of-3"))


class Leading:
    def __init__(self) -> None:
        self.current = 1

    def term(self) -> int:
        return self.current


class Story:
    """Broker 1 wrote ten messages; brokers 2 (this one) and 3 have copies."""

    def __init__(self, path: Path) -> None:
        self.store = MemoryStore()
        self.records = LedgerRecords(self.store)
        self.view = ClusterView(self.store)
        self.live_brokers = LiveBrokers(self.view, self.records)
        self.disks = Disks()
        self.leading = Leading()
        self.members = {1, 2, 3}
        self.writing = Writing(path)
        self.journal = LedgerId(1, 0)
        self.positions: list[int] = []
        access = LedgerAccess(self.records, self.live_brokers, self.disks, HERE)
        self.failover = Failover(
            self.view,
            self.store,
            access,
            TailRecovery(self.records, self.disks, self.store, ObjectStore.open("memory://"), own=HERE),
            self.leading,
            is_member=lambda broker: broker in self.members,
            may_degrade=False,
            broker=2,
        )
        self.losses = UncleanRecovery(self.failover, self.store, access, self.leading)

    async def register(self, broker: int, storage: str) -> int:
        lease = await self.store.grant_lease(600_000)
        addresses: dict[str, Any] = dict.fromkeys(("client", "admin", "raft", "http"), f"host-{broker}:1")
        record = Registration(broker=broker, incarnation=lease, store_id="s", storage_id=storage, **addresses)
        put = Put(cluster_records.registration_key(broker), specs.encode(record), lease=lease)
        await self.store.txn((), (put,))
        return lease

    async def begin(self) -> None:
        lease = await self.register(1, OWNER)
        self.journal = LedgerId(1, lease)
        await self.register(2, HERE)
        await self.register(3, THERE)
        record = steps.opened(0, (OWNER, HERE, THERE), qw=3, qa=2, by="owner")
        await self.records.open(self.journal, record)
        catalog = Catalog(self.store, ORDERS)
        await catalog.claim(epoch=1, storage_id=OWNER, has_tail=False)
        await catalog.mark_dirty(epoch=1)
        for offset in range(10):
            batch = RecordBatch.encode([b"%d" % offset], publish_time=1)
            placed = batch.assigned(topic_id=ORDERS.topic_id, epoch=1, base_offset=offset)
            self.positions += self.writing.append(BATCH, placed.buffers)
        for storage in (OWNER, HERE, THERE):
            self.disks.put(storage, self.journal, self.writing.bytes())
        self.view.start(Supervisor())
        self.records.start(Supervisor())
        self.failover.start(Supervisor(), stay)

    async def lose_owner(self) -> None:
        self.disks.lose(OWNER)
        await self.store.revoke_lease(self.journal.incarnation)

    async def state(self) -> TopicState:
        state = await Catalog(self.store, ORDERS).load()
        assert state is not None
        return state

    async def phase(self) -> LedgerState | None:
        found = await self.records.get(self.journal)
        return found.record.state if found is not None else None

    async def until_removed(self) -> None:
        await until(lambda: self.journal not in self.records.known())


@pytest.fixture
async def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Story]:
    """All waits are a tenth of a broker's: those between two tries, and that for a holder that does
    nothing."""
    monkeypatch.setattr(failover_module, "PASS_S", 0.2)
    monkeypatch.setattr(failover_module, "HELP_S", 0.5)
    monkeypatch.setattr(recoverer_module, "RETRY_S", 0.05)
    story = Story(tmp_path)
    await story.begin()
    try:
        yield story
    finally:
        await story.failover.close()
        await story.records.close()
        await story.view.close()


async def test_the_topics_of_a_broker_that_is_gone_end_where_they_ended(story: Story) -> None:
    await story.lose_owner()
    await story.until_removed()
    state = await story.state()
    assert (state.sealed, state.end) == (True, 10)
    figures = story.failover.figures
    assert (figures.recoveries, figures.recovered_topics, figures.recovered_messages) == (1, 1, 10)


async def test_a_recovery_that_fails_of_a_bug_is_not_begun_again_at_once(
    story: Story, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """recovery    dies of an error that nobody foresaw
    failover    is woken by its end, finds that it does not run, and begins it: a thousand times a second
    """
    attempts = 0

    async def run(self: Recoverer) -> None:
        nonlocal attempts
        attempts += 1
        await asyncio.sleep(0)
        raise KeyError("fragment")

    monkeypatch.setattr(Recoverer, "run", run)
    await story.lose_owner()
    await until(lambda: story.failover.trouble(story.journal, StorageId(OWNER)))
    await asyncio.sleep(0.1)
    assert attempts < 3
    assert "KeyError" in caplog.text


async def test_the_ledger_of_a_broker_that_is_there_is_left_alone(story: Story) -> None:
    await story.register(4, "disk-of-4")  # something happens
    await asyncio.sleep(0.1)
    assert await story.phase() is LedgerState.OPEN
    assert story.disks.asked == []


async def test_only_the_leader_recovers(story: Story) -> None:
    story.leading.current = 0
    await story.lose_owner()
    await until(lambda: 1 not in story.view.brokers)
    assert await story.phase() is LedgerState.OPEN
    assert story.disks.asked == []
    story.leading.current = story.store.term
    await story.until_removed()


async def test_a_broker_that_came_back_keeps_what_its_disk_has(story: Story) -> None:
    """Its former journal is closed, because nobody continues it; its bytes are served where they are."""
    await story.register(1, OWNER)
    await until(lambda: story.records.known()[story.journal].record.state is LedgerState.CLOSED)
    await asyncio.sleep(0.1)
    assert story.journal in story.records.known()
    assert not (await story.state()).sealed


async def test_a_broker_back_with_another_disk_gets_its_topics_from_mirrors(story: Story) -> None:
    story.disks.lose(OWNER)
    await story.register(1, "another-disk-of-1")
    await story.until_removed()
    assert (await story.state()).end == 10


async def closed_on(story: Story, *holders: StorageId) -> None:
    """The owner is gone, and its journal closed, on these disks in this order."""
    story.disks.lose(OWNER)
    found = story.records.known()[story.journal]
    claimed = steps.claimed(found.record, "c")
    closed = steps.closed(claimed, Range(0, story.writing.log.end), holders)
    revision = await story.records.change(story.journal, claimed, revision=found.revision)
    await story.records.change(story.journal, closed, revision=revision)
    await story.store.revoke_lease(story.journal.incarnation)
    await until(lambda: 1 not in story.view.brokers)


async def test_a_topic_of_another_holder_s_share_waits_for_that_holder(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two holders share the topics, and the only one (id 7) is in the second share, which is the other's.
    When that broker is gone too, its share is this one's at once."""
    monkeypatch.setattr(failover_module, "HELP_S", 5.0)
    await closed_on(story, HERE, THERE)
    await asyncio.sleep(0.1)
    assert not (await story.state()).sealed
    lease = next(each.incarnation for broker, each in story.view.brokers.items() if broker == 3)
    began = asyncio.get_running_loop().time()
    await story.store.revoke_lease(lease)  # its disk still answers; the broker is not registered
    await story.until_removed()
    assert asyncio.get_running_loop().time() - began < failover_module.HELP_S / 2
    assert (await story.state()).end == 10


async def test_a_holder_that_is_done_helps_one_that_is_not(story: Story) -> None:
    """The other holder is registered and does nothing: it is stopped, or does not reach the object store.
    Without help its topics would wait as long as its registration lasts, which may be for days."""
    await closed_on(story, HERE, THERE)
    await story.until_removed()
    state = await story.state()
    assert (state.sealed, state.end) == (True, 10)


async def told(story: Story) -> LossReport:
    """What would be lost, when everybody who is there was heard."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(NothingToAbandon):
                found = await story.losses.report(story.journal)
                if found.answers_needed == 1 and not found.loss.missing:
                    return found
            await asyncio.sleep(0.02)


async def test_what_would_be_lost_is_told_and_given_up_only_if_it_is_the_same(story: Story) -> None:
    story.disks.lose(THERE)
    story.disks.copies[HERE, story.journal].data = bytearray(story.writing.bytes(0, story.positions[6]))
    await story.lose_owner()
    await until(lambda: story.failover.recovery(story.journal) is not None)

    found = await told(story)
    assert found.loss.unknown_from == story.positions[6]
    assert set(found.loss.silent) == {OWNER, THERE}
    (topic,) = found.topics
    assert (topic.topic, topic.stored, topic.kept, topic.found) == ("/default/orders", 0, 6, 0)
    other = type(found.loss)(found.loss.missing, story.positions[3], found.loss.silent)
    assert not await story.losses.accept(story.journal, other)
    assert await story.losses.accept(story.journal, found.loss)
    story.disks.known.add(StorageId("disk-of-4"))
    await story.register(4, "disk-of-4")
    await until(lambda: story.failover.figures.recoveries or story.failover.waiting)
    story.disks.known.add(THERE)  # a second disk, to hold what is left
    await story.until_removed()
    assert (await story.state()).end == 6


async def test_what_no_topic_needs_is_not_waited_for(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker was drained and taken away, and with it the only copy of its journal's first part. The topic
    has been sealed; as long as it was not, or the broker was a member, the recovery waited."""
    monkeypatch.setattr(failover_module, "LOOK_S", 0.1)
    story.disks.lose(THERE)
    story.disks.copies[HERE, story.journal].data = bytearray(story.writing.bytes(0, story.positions[6]))
    await story.lose_owner()
    await until(lambda: story.failover.waiting)
    story.members.remove(1)
    await asyncio.sleep(0.3)
    assert story.failover.waiting
    story.members.add(1)
    await Catalog(story.store, ORDERS).seal(epoch=1, end=0, producers=(), origins=())
    await asyncio.sleep(0.3)
    assert story.failover.waiting
    story.members.remove(1)
    await story.until_removed()


@pytest.mark.parametrize("may_degrade", [True, False])
async def test_all_that_is_missing_is_a_second_copy(story: Story, may_degrade: bool) -> None:
    """The owner's disk is gone, and one of the two mirrors cannot take what only the other has. With fewer
    copies allowed, the journal is closed; else it waits, an operator is told that nothing would be lost, and
    may go on."""
    story.failover._may_degrade = may_degrade
    story.disks.copies[THERE, story.journal].data = bytearray(story.writing.bytes(0, story.positions[6]))

    async def nobody_takes(storage: StorageId, message: Message) -> None:
        if isinstance(message, WriteBack):
            raise PeerUnreachable(f"disk {storage} is full")

    story.disks.before = nobody_takes
    await story.lose_owner()
    if not may_degrade:
        await until(lambda: story.failover.waiting)
        found = await story.losses.report(story.journal)
        assert (found.loss.missing, found.loss.unknown_from, found.answers_needed) == ((), None, 1)
        assert [(each.kept, each.found) for each in found.topics] == [(10, 0)]
        assert await story.losses.accept(story.journal, found.loss)
    await story.until_removed()
    assert (await story.state()).end == 10


async def test_a_loss_that_is_accepted_in_every_pass_is_soon_closed(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer copies are allowed, and passes come more often than a recovery tries again. Each pass woke the
    recovery, and it never tried."""
    monkeypatch.setattr(recoverer_module, "RETRY_S", 5 * failover_module.PASS_S)
    story.failover._may_degrade = True
    story.disks.copies[THERE, story.journal].data = bytearray(story.writing.bytes(0, story.positions[6]))

    async def nobody_takes(storage: StorageId, message: Message) -> None:
        if isinstance(message, WriteBack):
            raise PeerUnreachable(f"disk {storage} is full")

    story.disks.before = nobody_takes
    await story.lose_owner()
    await story.until_removed()
    assert (await story.state()).end == 10


async def test_a_part_that_is_lost_after_closing_is_told_and_given_up_as_well(story: Story) -> None:
    """The owner is gone; its journal is closed, on two disks. One of them burns down and the other rots
    before the topics were salvaged: the messages before the damage are kept, those behind it were found."""
    damage = Range(story.positions[6], story.positions[7])

    async def nobody_reads(storage: StorageId, message: Message) -> None:
        if isinstance(message, Read):
            raise PeerUnreachable(f"disk {storage} is busy")

    story.disks.before = nobody_reads
    await story.lose_owner()
    await until(lambda: story.records.known()[story.journal].record.state is LedgerState.CLOSED)
    with pytest.raises(NothingToAbandon, match="all of it can be read"):
        await story.losses.report(story.journal)
    story.disks.lose(THERE)
    story.disks.copies[HERE, story.journal].bad = (damage,)
    story.disks.before = None

    found = await story.losses.report(story.journal)
    assert (found.loss.missing, set(found.loss.silent)) == ((damage,), {OWNER, THERE})
    assert [(each.stored, each.kept, each.found) for each in found.topics] == [(0, 6, 10)]
    other = type(found.loss)((), None, found.loss.silent)
    assert not await story.losses.accept(story.journal, other)
    # The record is written and the answer lost: asked again, the operator would hear that it is another loss.
    txn = story.store.txn
    lost: list[bool] = []

    async def losing(compare: Any, then: Any, *args: Any, **options: Any) -> TxnResult:
        result = await txn(compare, then, *args, **options)
        if not lost and then[0].key == record_key(story.journal):
            lost.append(True)
            raise OutcomeUnknown("the answer was lost")
        return result

    story.store.txn = losing  # type: ignore[method-assign]
    assert await story.losses.accept(story.journal, found.loss)
    assert lost
    await story.until_removed()
    assert (await story.state()).end == 6


async def test_nothing_is_given_up_where_nobody_is_waited_for(story: Story) -> None:
    with pytest.raises(NothingToAbandon, match="its broker is there"):
        await story.losses.report(story.journal)
    with pytest.raises(LedgerUnknown):
        await story.losses.report(LedgerId(9, 9))
    story.leading.current = 0
    with pytest.raises(NotController):
        await story.losses.report(story.journal)
