"""What stands in a log and was cut off by a recovery stays cut off."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sava.ledger.protocol.record import LedgerFenced
from tests.support.waiting import PATIENCE_S, until
from tests.unit.ledger.hosts import Hosts


async def test_a_void_part_stays_void_after_the_journal_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Schedule: a frame is on the owner's disk and on no mirror; the journal is recovered without the owner,
    and ends before the frame. The owner comes back and gives the frame's offset out anew. Everything of the
    former journal is in segments by now, so its record goes. The owner is killed and starts again: its log
    still holds the frame that was cut off, before the one that took its offset."""
    monkeypatch.setattr("sava.ledger.host.FORGET_S", 0.05)
    async with Hosts(3, tmp_path) as hosts:
        await hosts.begin()
        owner = hosts[0]
        await owner.append(0)
        owner.cut_off()
        cut_off = owner.append(1)
        await owner.journal.queue.drained()
        before = owner.id
        record = await hosts.recover(before, through=hosts[1])
        assert record.end < await owner.journal.queue.drained()
        owner.back()
        with pytest.raises(LedgerFenced):
            await asyncio.wait_for(cut_off, PATIENCE_S)
        await owner.mirrored.lost()
        await owner.begin()
        await owner.append(1, epoch=2)
        owner.journal.release(1, 1)
        await until(lambda: before not in hosts.records.known(), "its record is gone")
        again = owner.id
        await owner.stop()
        await owner.open()
        owner.register()
        await hosts.recover(again, through=hosts[1])
        async with asyncio.timeout(PATIENCE_S):
            await owner.journal.queue.wait_for_generation()
        assert owner.journal.holdings.index(1).ranges == [(1, 2)]
