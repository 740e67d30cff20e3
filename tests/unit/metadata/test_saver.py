"""Saving in the background: little by little, and whole or not at all."""

from __future__ import annotations

import asyncio
from random import Random

from sava.metadata.commands import Proposal, Put, Txn
from sava.metadata.machine.state_machine import StateMachine
from sava.metadata.snapshots import FLUSH_BYTES, BackgroundSaver, SnapshotStore
from sava.raft.types import Membership, NodeId, SnapshotMeta
from sava.wal.errors import DiskFull
from tests.sim.disk import SimDisk

PIECES = 8
BASE = SnapshotMeta(7, 1, Membership(voters=(NodeId(1),)), 0, b"")


def filled_machine() -> StateMachine:
    machine = StateMachine()
    for number in range(PIECES * FLUSH_BYTES // (16 << 10)):
        machine.apply(Proposal(Txn(then=(Put(f"/k/{number:05}", bytes(16 << 10)),))), 1)
    return machine


async def saved(store: SnapshotStore, machine: StateMachine) -> SnapshotMeta | BaseException:
    saver = BackgroundSaver(store, lambda _seconds, _size: None)
    outcome: asyncio.Future[SnapshotMeta | BaseException] = asyncio.get_running_loop().create_future()
    saver.save(BASE, machine.freeze(), outcome.set_result)
    try:
        return await outcome
    finally:
        await saver.close()


async def test_a_large_image_reaches_the_disk_piece_by_piece() -> None:
    """Synced at once, it would hold up the log's own syncs, which wait for the same filesystem."""
    disk = SimDisk(Random(1))
    store, machine = SnapshotStore(disk), filled_machine()
    before = disk.counts["sync"]
    meta = await saved(store, machine)
    assert isinstance(meta, SnapshotMeta)
    assert disk.counts["sync"] - before > PIECES // 2
    assert StateMachine.restore(store.load(meta)).revision == machine.revision


async def test_a_full_disk_is_told_and_leaves_nothing() -> None:
    disk = SimDisk(Random(1))
    store = SnapshotStore(disk)
    disk.set_capacity(2 * FLUSH_BYTES)
    assert isinstance(await saved(store, filled_machine()), DiskFull)
    assert disk.list() == []
