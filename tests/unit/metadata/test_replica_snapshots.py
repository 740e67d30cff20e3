"""Snapshots: taken, compacted under, sent in chunks, installed, with a power cut at every step (S54)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import google_crc32c
import msgspec
import pytest

from sava.metadata.commands import AllocateId
from sava.metadata.errors import Compacted
from sava.metadata.peer import Bootstrap, Changed, ChangeMembership, Committed, Envelope
from sava.metadata.replica.replica import ReplicaConfig
from sava.raft.messages import SnapshotChunk
from sava.raft.types import CoreConfig, Membership, MembershipChange, SnapshotMeta
from tests.sim.disk import CrashPolicy
from tests.unit.metadata.cluster import Machine, PowerCut, World, txn

SMALL = ReplicaConfig(
    core=CoreConfig(keep_entries=3, snapshot_chunk_bytes=500), tick_ms=100, snapshot_entries=1_000_000
)


def snapshot(world: World, machine: Machine) -> SnapshotMeta:
    outcome: list[SnapshotMeta | BaseException] = []
    machine.replica.take_snapshot(outcome.append)
    world.settle()
    (meta,) = outcome
    assert isinstance(meta, SnapshotMeta), meta
    return meta


def fill(world: World, machine: Machine, count: int = 20, start: int = 0) -> None:
    for number in range(start, start + count):
        reply = world.put(machine, f"/k/{number:04}", b"v" * 100)
        assert isinstance(reply, Committed)


def test_a_snapshot_shortens_the_log_and_survives_a_restart() -> None:
    world = World(SMALL)
    (node,) = world.found("a")
    fill(world, node)
    before = node.replica.machine.digest()
    meta = snapshot(world, node)
    assert node.status.snapshot_index == meta.index
    assert node.status.first_index == meta.index - 3 + 1
    node.restart()
    world.elect()
    assert node.replica.machine.digest() == before
    assert node.status.snapshot_index == meta.index
    fill(world, node, start=20)
    assert node.get("/k/0039") is not None


def test_snapshots_are_taken_by_entries_and_by_bytes() -> None:
    by_entries = World(replace(SMALL, snapshot_entries=10))
    (node,) = by_entries.found("a")
    fill(by_entries, node, 25)
    assert node.status.snapshot_index >= 20
    by_bytes = World(replace(SMALL, snapshot_bytes=2_000))
    (node,) = by_bytes.found("a")
    fill(by_bytes, node, 25)
    assert node.status.snapshot_index >= 15


def test_building_a_snapshot_blocks_nothing_and_loses_no_trigger() -> None:
    """S56, and openraft #1829: what came while a build was running counts when it ends."""
    world = World(replace(SMALL, snapshot_entries=10))
    (node,) = world.found("a")
    node.saver.is_held = True
    fill(world, node, 40)
    assert node.status.snapshot_index == 0
    node.saver.is_held = False
    world.settle()
    assert node.status.snapshot_index >= 40, "one more was taken, for the entries of the meantime"


def test_the_log_is_compacted_only_under_a_durable_snapshot() -> None:
    """m16: the saver has not finished; a power cut now must find everything in the log."""
    world = World(SMALL)
    (node,) = world.found("a")
    fill(world, node)
    first = node.status.first_index
    node.saver.is_held = True
    node.replica.take_snapshot(lambda _: None)
    world.pass_time(500)
    assert node.status.first_index == first
    node.restart()
    world.elect()
    assert node.get("/k/0019") is not None
    assert node.status.snapshot_index == 0


def test_old_files_of_the_log_and_old_snapshots_go() -> None:
    world = World(SMALL)
    (node,) = world.found("a")
    for round_number in range(5):
        fill(world, node, 10, start=10 * round_number)
        snapshot(world, node)
    assert len(node.disk.directory("raft").list()) == 1
    assert len(node.disk.directory("snapshots").list()) == 2


def test_a_snapshot_with_nothing_new_is_the_one_that_is_there() -> None:
    world = World(SMALL)
    (node,) = world.found("a")
    fill(world, node, 3)
    assert snapshot(world, node) == snapshot(world, node)


def test_no_room_for_a_snapshot_is_told_and_tried_again() -> None:
    world = World(replace(SMALL, snapshot_entries=30))
    (node,) = world.found("a")
    fill(world, node, 20)
    node.disk.set_capacity(node.disk.used + 1_000)
    outcome: list[SnapshotMeta | BaseException] = []
    node.replica.take_snapshot(outcome.append)
    world.settle()
    assert isinstance(outcome[0], BaseException)
    node.disk.set_capacity(None)
    world.pass_time(500)
    assert node.status.snapshot_index > 0
    assert node.failures == []


# -- catching up -----------------------------------------------------------------------------------------


def lagging(config: ReplicaConfig = SMALL) -> tuple[World, Machine, Machine]:
    """A leader whose log no longer holds what a follower needs; the follower is down."""
    world = World(config)
    world.found("a", "b", "c")
    fill(world, world.leader(), 3)
    world.pass_time(300)
    leader, follower = world.leader(), world.followers()[0]
    follower.stop()
    fill(world, leader, 30)
    snapshot(world, leader)
    fill(world, leader, 5, start=30)
    return world, leader, follower


def test_a_follower_behind_the_log_gets_snapshot_chunks_then_the_log() -> None:
    """S49."""
    world, leader, follower = lagging()
    follower.start()
    watch = follower.replica.hub.watch("/", 1)
    world.log.clear()
    world.pass_time(1_000)
    chunks = [e for _, _, e in world.log if isinstance(e.message, SnapshotChunk)]
    assert len(chunks) > 5
    assert follower.replica.machine.digest() == leader.replica.machine.digest()
    with pytest.raises(Compacted):
        watch.take()
    follower.restart()
    world.pass_time(2_000)
    assert follower.replica.machine.digest() == leader.replica.machine.digest()


def test_lost_and_damaged_chunks_are_asked_for_again() -> None:
    """S51, S52."""
    world, leader, follower = lagging()
    seen = 0

    def spoil(_: Machine, envelope: Envelope) -> bool:
        nonlocal seen
        if isinstance(envelope.message, SnapshotChunk):
            seen += 1
            return seen % 3 != 0
        return True

    world.tap = spoil
    follower.start()
    world.pass_time(5_000)
    assert follower.replica.machine.digest() == leader.replica.machine.digest()


def test_a_chunk_with_a_wrong_checksum_is_dropped_and_counted() -> None:
    world, leader, follower = lagging()
    follower.start()
    envelope: list[Envelope] = []

    def catch(_: Machine, seen: Envelope) -> bool:
        if isinstance(seen.message, SnapshotChunk):
            envelope.append(seen)
            return False
        return True

    world.tap = catch
    world.run_until(lambda: bool(envelope))
    chunk = envelope[0].message
    assert isinstance(chunk, SnapshotChunk)
    bad = msgspec.structs.replace(chunk, data=b"!" + chunk.data[1:])
    follower.replica.receive(msgspec.structs.replace(envelope[0], message=bad))
    assert follower.replica.status().dropped["checksum"] == 1
    world.tap = None
    world.pass_time(3_000)
    assert follower.replica.machine.digest() == leader.replica.machine.digest()


def test_a_snapshot_that_does_not_verify_is_not_installed() -> None:
    """Chunks that are each intact, but not of one snapshot: the digest of the whole decides."""
    world, leader, follower = lagging()
    spoiled = 0

    def forge(src: Machine, envelope: Envelope) -> bool:
        nonlocal spoiled
        message = envelope.message
        if isinstance(message, SnapshotChunk) and message.offset and not spoiled:
            spoiled += 1
            data = bytes(len(message.data))
            forged = msgspec.structs.replace(message, data=data, crc=google_crc32c.value(data))
            follower.replica.receive(msgspec.structs.replace(envelope, message=forged))
            return False
        return True

    world.tap = forge
    follower.start()
    world.pass_time(3_000)
    assert spoiled == 1
    assert follower.replica.status().dropped["corrupt snapshot"] == 1
    assert follower.replica.machine.digest() == leader.replica.machine.digest()


def test_a_new_node_joins_by_snapshot() -> None:
    world = World(SMALL)
    world.found("a", "b", "c")
    leader = world.leader()
    fill(world, leader)
    snapshot(world, leader)
    joiner = world.machine("d")
    joiner.start()
    cluster = leader.replica.status().cluster
    joiner.replica.bootstrap(Bootstrap(cluster, Membership()), lambda _: None)
    world.settle()
    change = MembershipChange(add_learners=((joiner.id, joiner.address),))
    assert isinstance(world.answer(leader.ask(ChangeMembership(change))), Changed)
    world.pass_time(1_500)
    assert joiner.replica.machine.digest() == leader.replica.machine.digest()
    promote = ChangeMembership(MembershipChange(promote=(joiner.id,)))
    assert isinstance(world.answer(leader.ask(promote)), Changed)
    assert isinstance(world.put(joiner, "/x", "1"), Committed)


# -- power cuts (S54) ------------------------------------------------------------------------------------


def agree(one: Machine, other: Machine) -> bool:
    return one.replica.machine.digest() == other.replica.machine.digest()


def cut_after(machine: Machine, operations: int) -> None:
    left = operations

    def hook(_: str) -> None:
        nonlocal left
        if left == 0:
            raise PowerCut
        left -= 1

    machine.disk.on_operation(hook)


@pytest.mark.parametrize("policy", [CrashPolicy.LOSE, CrashPolicy.KEEP, CrashPolicy.TORN])
def test_a_power_cut_at_any_step_of_an_install_loses_nothing(policy: CrashPolicy) -> None:
    chunky = replace(SMALL, core=replace(SMALL.core, snapshot_chunk_bytes=1_500))
    cuts, seen = 0, set()
    for operation in range(200):
        world, leader, follower = lagging(chunky)
        follower.start()
        held = follower.status.last_index
        cut_after(follower, operation)
        try:
            world.run_until(partial(agree, leader, follower), 5_000)
        except PowerCut:
            cuts += 1
        else:
            break
        follower.disk.on_operation(None)
        follower.restart(policy)
        assert follower.status.last_index >= held, "what it had acknowledged is still there"
        seen.add(follower.status.snapshot_index)
        world.run_until(partial(agree, leader, follower), 5_000)
    assert cuts > 10
    assert len(seen) == 2, "before and after"


@pytest.mark.parametrize("policy", [CrashPolicy.LOSE, CrashPolicy.KEEP, CrashPolicy.TORN])
def test_a_power_cut_at_any_step_of_a_local_compaction_loses_nothing(policy: CrashPolicy) -> None:
    """m16 in its other form: the log trimmed before the checkpoint, the checkpoint before the snapshot."""
    world = World(SMALL)
    (node,) = world.found("a")
    fill(world, node)
    snapshot(world, node)
    fill(world, node, 10, start=20)
    for _ in range(3):
        world.answer(node.propose(txn(AllocateId("/counter"))))
    acknowledged = node.replica.machine.revision, node.get("/counter")
    node.stop()
    pristine = node.disk
    cuts, seen = 0, set()
    for operation in range(200):
        node.disk = pristine.clone()
        node.start()
        world.elect()
        cut_after(node, operation)
        try:
            snapshot(world, node)
        except PowerCut:
            cuts += 1
        else:
            break
        node.disk.on_operation(None)
        node.restart(policy)
        world.elect()
        assert (node.replica.machine.revision, node.get("/counter")) == acknowledged
        seen.add(node.status.snapshot_index)
        node.stop()
    assert cuts > 8
    assert len(seen) == 2, "before and after"


def test_a_joiner_takes_no_snapshot_before_it_knows_the_members() -> None:
    """It replays the log from its beginning, and the founders stand in no entry (tests/sim seed 1147)."""
    world = World(replace(SMALL, core=replace(SMALL.core, max_append_bytes=200)))
    world.found("a", "b", "c")
    leader = world.leader()
    fill(world, leader, 10)
    joiner = world.machine("d")
    joiner.config = replace(world.config, snapshot_entries=2)
    joiner.start()
    bootstrap = Bootstrap(leader.replica.status().cluster, Membership())
    joiner.replica.bootstrap(bootstrap, lambda _: None)
    world.settle()
    change = MembershipChange(add_learners=((joiner.id, joiner.address),))
    world.answer(leader.ask(ChangeMembership(change)))
    world.pass_time(1_000)
    assert joiner.status.snapshot_index > 0
    assert joiner.state is not None
    for meta in joiner.state.snapshots._metas.values():
        assert leader.replica.core is not None
        assert meta.membership == leader.replica.core.membership_at(meta.index)
