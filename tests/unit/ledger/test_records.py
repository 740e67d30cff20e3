"""Journals' records in the metadata store."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sava.ledger.protocol import LedgerId, StorageId
from sava.ledger.protocol import record as steps
from sava.ledger.registry import (
    LedgerRecordChanged,
    LedgerRecords,
    ledger_of_key,
    record_key,
)
from sava.metadata.commands import Compare, KeyValue, Relation, Target
from sava.metadata.errors import Unavailable
from sava.metadata.records import RecordCorrupt
from sava.supervisor import Supervisor
from tests.support.memory_store import MemoryStore
from tests.support.waiting import PATIENCE_S

A, B = StorageId("a"), StorageId("b")
JOURNAL = LedgerId(1, 7)
RECORD = steps.opened(0, (A, B), qw=2, qa=2, by="owner")


async def test_a_record_is_stored_changed_and_removed_by_compare_and_swap() -> None:
    records = LedgerRecords(MemoryStore())
    revision = await records.open(JOURNAL, RECORD)
    assert await records.get(JOURNAL) == (RECORD, revision)
    claimed = steps.claimed(RECORD, "me")
    later = await records.change(JOURNAL, claimed, revision=revision)
    assert await records.get(JOURNAL) == (claimed, later)
    await records.remove(JOURNAL, revision=later)
    assert await records.get(JOURNAL) is None


async def test_a_claim_is_seen_by_a_node_that_is_behind() -> None:
    """Its copy shows the ledger as open, and a recoverer has claimed it: the majority decides. What its copy
    shows already needs no majority."""
    store = MemoryStore()
    records = LedgerRecords(store)
    revision = await records.open(JOURNAL, RECORD)
    old = store.local.get(record_key(JOURNAL))
    assert not await records.is_claimed(JOURNAL, 1, A)
    await records.change(JOURNAL, steps.claimed(RECORD, "me"), revision=revision)
    new = store.local.get(record_key(JOURNAL))

    def seeing(copy: KeyValue | None, get: Any) -> LedgerRecords:
        return LedgerRecords(cast(Any, SimpleNamespace(local=SimpleNamespace(get=lambda _: copy), get=get)))

    behind = seeing(old, store.get)
    assert await behind.is_claimed(JOURNAL, 1, A)
    for epoch, origin in ((2, A), (0, A), (-1, A), (1 << 40, A), (1, B)):
        assert not await behind.is_claimed(JOURNAL, epoch, origin), (epoch, origin)

    async def cut_off(_: str) -> None:
        raise Unavailable("no majority")

    assert await seeing(new, cut_off).is_claimed(JOURNAL, 1, A), "its copy is proof enough"
    with pytest.raises(Unavailable):
        await seeing(new, cut_off).is_claimed(JOURNAL, 2, A)
    with pytest.raises(Unavailable):
        await seeing(old, cut_off).is_claimed(JOURNAL, 1, A)


async def test_whoever_comes_second_is_told_what_is_there() -> None:
    records = LedgerRecords(MemoryStore())
    revision = await records.open(JOURNAL, RECORD)
    with pytest.raises(LedgerRecordChanged) as used:
        await records.open(JOURNAL, RECORD)
    assert used.value.found == (RECORD, revision)
    later = await records.change(JOURNAL, steps.claimed(RECORD, "first"), revision=revision)
    with pytest.raises(LedgerRecordChanged) as changed:
        await records.change(JOURNAL, steps.claimed(RECORD, "second"), revision=revision)
    assert changed.value.found == (steps.claimed(RECORD, "first"), later)
    with pytest.raises(LedgerRecordChanged):
        await records.remove(JOURNAL, revision=revision)
    await records.remove(JOURNAL, revision=later)
    with pytest.raises(LedgerRecordChanged) as gone:
        await records.change(JOURNAL, RECORD, revision=later)
    assert gone.value.found is None


async def test_a_claim_is_refused_while_the_owner_is_registered() -> None:
    store = MemoryStore()
    records = LedgerRecords(store)
    lease = await store.grant_lease(60_000)
    await store.put("/cluster/register/1", b"", lease=lease)
    revision = await records.open(LedgerId(1, lease), RECORD)
    is_gone = Compare("/cluster/register/1", Target.LEASE, Relation.NOT_EQUAL, lease)
    claimed = steps.claimed(RECORD, "me")
    with pytest.raises(LedgerRecordChanged):
        await records.change(LedgerId(1, lease), claimed, revision=revision, conditions=(is_gone,))
    await store.revoke_lease(lease)
    await records.change(LedgerId(1, lease), claimed, revision=revision, conditions=(is_gone,))


async def test_the_journals_of_a_broker_come_in_the_order_of_their_lives() -> None:
    records = LedgerRecords(MemoryStore())
    for broker, incarnation in ((1, 9), (1, 10), (2, 3), (11, 1), (1, 101)):
        await records.open(LedgerId(broker, incarnation), RECORD)
    assert list(await records.of(1)) == [LedgerId(1, 9), LedgerId(1, 10), LedgerId(1, 101)]
    everybody = [*await records.of(1), LedgerId(2, 3), LedgerId(11, 1)]
    assert list(await records.all()) == list(records.known()) == everybody


async def test_listeners_hear_of_what_they_asked_for() -> None:
    records = LedgerRecords(MemoryStore())
    one, any_, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    records.listen(JOURNAL, one.set)
    records.listen(None, any_.set)
    records.listen(None, ended.set)()
    records.start(Supervisor())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await any_.wait()  # of the beginning
            one.clear()
            any_.clear()
            await records.open(LedgerId(1, 8), RECORD)
            await any_.wait()
            assert not one.is_set()
            await records.open(JOURNAL, RECORD)
            await one.wait()
        assert not ended.is_set()
    finally:
        await records.close()


async def test_a_record_that_cannot_be_read_is_not_taken_for_none() -> None:
    store = MemoryStore()
    records = LedgerRecords(store)
    await store.put(record_key(JOURNAL), b"{")
    for reading in (records.get(JOURNAL), records.of(1), records.all()):
        with pytest.raises(RecordCorrupt, match="/ledgers/1/7"):
            await reading
    with pytest.raises(RecordCorrupt):
        records.known()


@pytest.mark.parametrize("key", ["/ledgers/", "/ledgers/1", "/ledgers/1/x", "/ledgers/1/2/3", "/x/1/2"])
def test_other_keys_are_no_records(key: str) -> None:
    assert ledger_of_key(key) is None
