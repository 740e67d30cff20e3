"""Rows of the table of failures (``docs/design/journal.md``) that happen in a moment which real processes
cannot be made to meet."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sava.ledger.protocol import LedgerState
from sava.ledger.protocol.record import LedgerFenced
from sava.ledger.tail_recovery import TailRecovery
from sava.storage.catalog import Catalog
from sava.storage.objectstore import ObjectStore
from sava.storage.types import TopicKey
from tests.support.storage import Cluster
from tests.support.waiting import PATIENCE_S, until
from tests.unit.ledger.hosts import Host, Hosts, batch

TOPIC = TopicKey("default", "orders", 1)


def durable_end(mirror: Host, owner: Host) -> int:
    copy = mirror.mirrored.copies.logs.get(owner.id)
    return copy.member.durable_end if copy is not None else 0


async def test_an_append_that_was_delayed_until_after_the_fence_is_refused(tmp_path: Path) -> None:
    """Schedule: the owner sends a message to both mirrors; it is on its way for long. Somebody takes the
    owner for dead, and closes the journal with what the mirrors have. Then the message arrives. Taken by one
    of them it would be acknowledged, and it is not in the journal."""
    async with Hosts(3, tmp_path) as hosts:
        await hosts.begin()
        owner, mirrors = hosts[0], (hosts[1], hosts[2])
        await owner.append(0)
        for mirror in mirrors:
            mirror.gate.delay()
        late = owner.append(1)
        await until(lambda: all(mirror.gate.held for mirror in mirrors), "it is on its way to both")
        owner.gate.cut()
        record = await hosts.recover(owner.id, through=hosts[1])
        ends = [durable_end(mirror, owner) for mirror in mirrors]
        assert record.end == max(ends)
        for mirror in mirrors:
            mirror.gate.arrive()
        with pytest.raises(LedgerFenced):
            await asyncio.wait_for(late, PATIENCE_S)
        assert [durable_end(mirror, owner) for mirror in mirrors] == ends
        owner.gate.heal()


async def test_a_message_that_mirrors_have_and_nobody_was_told_of_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule: a message is on all disks, so it is committed; the owner's machine is gone before the
    producer gets its receipt. The message is in the topic when it goes on elsewhere, and when its producer
    sends it again there, it gets the offset that it has."""
    objects = ObjectStore.open("memory://")
    async with Hosts(3, tmp_path) as hosts:
        await hosts.begin()
        owner = hosts[0]
        catalog = Catalog(hosts.store, TOPIC)
        await catalog.claim(epoch=1, storage_id=owner.storage, has_tail=True)
        await catalog.mark_dirty(epoch=1)
        await owner.append(0)
        monkeypatch.setattr(owner.journal.queue, "_finish", lambda record, outcome: None)
        unanswered = owner.append(1)
        owned, end = owner.mirrored.owned, await owner.journal.queue.drained()
        assert owned is not None
        await until(lambda: owned.owner.commit >= end, "it is committed")
        assert not unanswered.done()
        await owner.close()
        hosts.hosts.remove(owner)
        await hosts.recover(owner.id, through=hosts[1])
        tail_recovery = TailRecovery(
            hosts.records, hosts[1].mirrored.peers, hosts.store, objects, own=hosts[1].storage
        )
        assert (await tail_recovery.run(owner.broker, owner.storage)).messages == 2
        async with Cluster(tmp_path / "next", metadata=hosts.store, store=objects).broker() as broker:
            log = await broker.open_topic(TOPIC, epoch=2)
            assert log.next_offset == 2
            assert await log.append(batch(1)) == 1
            assert await log.append(batch(2)) == 2


async def test_a_broker_removed_while_it_holds_copies_leaves_no_gap(tmp_path: Path) -> None:
    """Of three brokers one leaves for good: the journal goes on with two disks, both of which must have
    everything, as in any cluster of two. A fragment that names the one that left needs it no more than any
    other of its disks."""
    async with Hosts(3, tmp_path) as hosts:
        await hosts.begin()
        owner, left, removed = hosts.hosts
        for offset in range(20):
            await owner.append(offset)
        hosts.size = 2
        await removed.close()
        hosts.hosts.remove(removed)
        owned = owner.mirrored.owned
        assert owned is not None
        await until(lambda: removed.storage not in owned.owner.record.last.members, "it is left out")
        record = await hosts.record(owner)
        assert record.last.members == (owner.storage, left.storage)
        assert (record.last.qa, record.qw, record.qa, record.is_degraded) == (2, 2, 2, False)
        for offset in range(20, 40):
            await owner.append(offset)
        assert len((await hosts.record(owner)).fragments) == 2
        before, end = owner.id, await owner.journal.queue.drained()
        await owner.stop()
        await owner.open()
        closed = await hosts.recover(before, through=left)
        assert (closed.state, closed.lost) == (LedgerState.CLOSED, ())
        assert closed.end >= end
        await owner.begin()
        assert owner.journal.holdings.index(1).ranges == [(0, 40)]
