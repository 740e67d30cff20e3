"""Scenarios of docs/testing.md that need disks, time or several nodes. Each is a short story with
scripted faults; the invariants of the simulator watch every step."""

from __future__ import annotations

import pytest

from sava.metadata.commands import LeaseGrant, LeaseResult, Put, Txn
from sava.metadata.errors import Compacted
from sava.metadata.peer import Alive, Committed, Failed, KeepAlive, Propose
from sava.raft.messages import AppendReply
from tests.sim.disk import CrashPolicy
from tests.sim.scripted import Story

POLICIES = [policy for policy in CrashPolicy if policy is not CrashPolicy.ANY]


@pytest.mark.parametrize("policy", [CrashPolicy.LOSE, CrashPolicy.TORN])
@pytest.mark.parametrize("operation", range(40))
def test_s54_a_crash_at_any_step_of_installing_a_snapshot(operation: int, policy: CrashPolicy) -> None:
    """A follower was away so long that the log it needs is compacted. It dies before the n-th disk operation
    after its return, somewhere between the first chunk and the checkpoint behind the installed snapshot, and
    starts again."""
    story = Story(snapshot_entries=10, file_bytes=4096)
    away = story.followers[0]
    away.crash(policy)
    for number in range(30):
        story.put(f"/k/{number}", b"x" * 100)
    story.world.wait_for(lambda: _first_index(story) > 5, "compaction")
    away.start()
    away.crash_after = operation
    story.world.run(3000)
    away.crash(policy)
    away.start()
    story.wait_for_equal_states()


@pytest.mark.parametrize("operation", range(24))
def test_s54_a_crash_at_any_step_of_compacting(operation: int) -> None:
    """A single node takes a snapshot, compacts and writes its checkpoint; it dies before the n-th disk
    operation of that."""
    story = Story(nodes=1, file_bytes=4096)
    for number in range(12):
        story.put(f"/k/{number}", b"x" * 200)
    node = story.leader
    replica = node.replica
    assert replica is not None
    node.post(lambda: replica.take_snapshot(lambda _: None))
    node.crash_after = operation
    story.world.run(1000)
    node.crash(CrashPolicy.ANY)
    node.start()
    story.wait_for_leader()
    assert [story.read(f"/k/{number}") for number in range(12)] == [b"x" * 200] * 12


def test_s56_building_a_snapshot_blocks_neither_append_nor_apply() -> None:
    story = Story(nodes=1)
    story.put("/before", b"1")
    node = story.leader
    replica = node.replica
    assert replica is not None
    saved: list[object] = []
    node.extra_disk_us = 0
    node.post(lambda: replica.take_snapshot(saved.append))
    story.world.run(1)
    assert not saved
    # The saver has its own thread; give it a slow one while the log's disk stays fast.
    revision = story.put("/during", b"2").revision
    story.world.wait_for(lambda: bool(saved), "the snapshot")
    assert story.read("/during") == b"2"
    assert replica.machine.revision >= revision


@pytest.mark.parametrize("replicated", [False, True])
def test_s58_a_leader_that_sent_before_its_own_sync_and_died(replicated: bool) -> None:
    """The leader's disk hangs. It sends an entry anyway and loses power before its own sync. The entry
    survives exactly when a quorum had it: the two followers are one, the leader alone is none."""
    story = Story()
    leader = story.leader
    story.put("/warm", b"up")
    leader.extra_disk_us = 10_000_000
    if not replicated:
        story.cut_off(leader)
    replies = story.ask(leader, Propose(Txn(then=(Put("/k/1", b"risky"),))), 2000)
    story.world.run(300)
    leader.crash(CrashPolicy.LOSE)
    story.reconnect()
    story.wait_for_leader()
    assert story.read("/k/1") == (b"risky" if replicated else None)
    leader.extra_disk_us = 0
    leader.start()
    story.wait_for_equal_states()
    # It applies nothing that its own disk does not have, so in no case did it say "done".
    assert replies == [None]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("operation", range(12))
def test_s59_a_torn_or_lost_tail_at_any_operation(operation: int, policy: CrashPolicy) -> None:
    """A follower loses power in the middle of its writes, and the disk keeps nothing, a prefix, some sectors
    or half a sector of them. It comes back with what it acknowledged and catches up."""
    story = Story(file_bytes=2048)
    victim = story.followers[0]
    victim.crash_after = operation
    for number in range(8):
        story.put(f"/k/{number}", bytes([65 + number]) * 700)
    victim.crash(policy)
    victim.start()
    story.wait_for_equal_states()


def test_s61_a_slow_disk_on_the_leader_alone() -> None:
    """Commit proceeds through the followers; the leader counts itself later."""
    story = Story()
    leader = story.leader
    story.put("/warm", b"up", story.followers[0])
    leader.extra_disk_us = 2_000_000
    index = story.world.checks.committed.last
    story.ask(story.followers[0], Propose(Txn(then=(Put("/k/1", b"fast"),))), 8000)
    story.world.wait_for(lambda: story.world.checks.committed.last > index, "commit", within_ms=500)
    status = leader.status
    assert status is not None
    assert status.durable_index < status.commit
    leader.extra_disk_us = 0
    story.world.run(4000)
    assert story.read("/k/1") == b"fast"


def test_s62_a_full_disk_refuses_writes_and_recovers() -> None:
    """The only node's disk is full: proposals are refused or wait, reads go on, and with room again
    everything does."""
    story = Story(nodes=1)
    story.put("/k/1", b"before")
    node = story.leader
    node.disk.set_capacity(node.disk.used)
    reply = story.answer(node, Propose(Txn(then=(Put("/k/2", b"no room"),))), 1500)
    assert isinstance(reply, Failed)
    assert story.read("/k/1") == b"before"
    node.disk.set_capacity(None)
    story.world.run(500)  # tried again with the next tick
    story.put("/k/3", b"after")
    assert story.read("/k/3") == b"after"
    node.crash(CrashPolicy.LOSE)
    node.start()
    story.wait_for_leader()
    assert story.read("/k/3") == b"after"


@pytest.mark.parametrize("policy", POLICIES)
def test_s63_the_whole_cluster_loses_power(policy: CrashPolicy) -> None:
    story = Story(nodes=5, snapshot_entries=7)
    for number in range(25):
        story.put(f"/k/{number}", f"value {number}".encode(), story.followers[number % 4])
    for node in story.world.running():
        node.crash(policy)
    for node in story.world.nodes.values():
        node.start()
    story.wait_for_leader()
    assert [story.read(f"/k/{number}") for number in range(25)] == [f"value {n}".encode() for n in range(25)]
    story.wait_for_equal_states()


def test_s67_a_clock_that_jumps_an_hour_expires_nothing() -> None:
    """The wall clock stamps proposals; lease deadlines are on the monotonic clock of the leader."""
    story = Story()
    granted = story.answer(story.leader, Propose(LeaseGrant(3000)))
    assert isinstance(granted, Committed)
    assert isinstance(granted.result, LeaseResult)
    lease = granted.result.lease
    story.answer(story.leader, Propose(Txn(then=(Put("/leased", b"held", lease),))))
    for node in story.world.nodes.values():
        node.wall_offset_ms += 3_600_000
    for _ in range(6):
        story.put("/k/1", b"time passes")
        story.world.run(800)
        assert story.answer(story.followers[0], KeepAlive(lease)) == Alive(3000)
    assert story.read("/leased") == b"held"
    story.world.run(8000)
    assert story.read("/leased") is None


def test_s67_a_new_leader_gives_every_lease_its_full_time_again() -> None:
    story = Story()
    granted = story.answer(story.leader, Propose(LeaseGrant(2000)))
    assert isinstance(granted, Committed)
    assert isinstance(granted.result, LeaseResult)
    story.answer(story.leader, Propose(Txn(then=(Put("/leased", b"held", granted.result.lease),))))
    story.world.run(1500)
    old = story.leader
    old.crash(CrashPolicy.LOSE)
    story.wait_for_leader()
    story.world.run(1800)
    assert story.read("/leased") == b"held"
    story.world.run(6000)
    assert story.read("/leased") is None


def test_s68_a_watch_over_a_snapshot_is_contiguous_or_compacted() -> None:
    """A follower is cut off while its watcher waits; the events it misses arrive as a snapshot. The watcher
    must be told."""
    story = Story(snapshot_entries=10)
    follower = story.followers[0]
    assert follower.replica is not None
    story.put("/k/0", b"seen", follower)
    watch = follower.replica.hub.watch("/k/", follower.replica.machine.revision + 1)
    story.cut_off(follower)
    for number in range(30):
        story.put(f"/k/{number}", b"missed")
    story.world.wait_for(lambda: _first_index(story) > 20, "compaction")
    story.reconnect()
    story.wait_for_equal_states()
    assert story.world.counts["installs"] == 1
    with pytest.raises(Compacted) as told:
        watch.take()
    floor = told.value.floor
    assert 1 < floor <= follower.replica.machine.revision + 1
    again = follower.replica.hub.watch("/k/", floor)
    story.put("/k/1", b"after")
    story.wait_for_equal_states()
    batches = []
    while (batch := again.take()) is not None:
        batches.append(batch.events)
    assert batches == story.world.history.between("/k/", floor, follower.replica.machine.revision)
    assert batches[-1][0].kv is not None
    assert batches[-1][0].kv.value == b"after"


def test_s69_two_watchers_get_everything_and_a_slow_one_a_gap() -> None:
    story = Story(nodes=1)
    replica = story.leader.replica
    assert replica is not None
    first, second = replica.hub.watch("/k/", 1), replica.hub.watch("/k/", 1)
    slow = replica.hub.watch("/k/", 1)
    limit = replica.hub._limits.queue_batches
    seen: list[list[int]] = [[], []]
    for number in range(limit // 512 + 3):
        operations = tuple(Txn(then=(Put(f"/k/{number}", b"x"),)) for _ in range(512))
        replies = [story.ask(story.leader, Propose(operation), 20_000) for operation in operations]
        story.world.wait_for(lambda replies=replies: all(replies), "the writes")  # type: ignore[misc]
        for watch, revisions in zip((first, second), seen, strict=True):
            while (batch := watch.take()) is not None:
                revisions.append(batch.revision)
    assert seen[0] == seen[1] == list(range(1, replica.machine.revision + 1))
    with pytest.raises(Compacted):
        slow.take()


def test_an_acknowledgement_waits_for_the_disk_of_the_follower() -> None:
    """While a follower's sync hangs, no acknowledgement of the new entry leaves it."""
    story = Story()
    slow = story.followers[0]
    story.put("/k/0", b"warm")
    sent: list[int] = []

    def watch(envelope: object) -> bool:
        message = getattr(envelope, "message", None)
        if isinstance(message, AppendReply) and message.src == slow.id and message.accepted:
            sent.append(message.index)
        return True

    slow.extra_disk_us = 1_000_000
    story.world.net.filter = watch
    story.put("/k/1", b"quorum without it")
    index = story.world.checks.committed.last
    story.world.run(200)
    assert not any(acknowledged >= index for acknowledged in sent)
    story.world.run(5000)
    assert any(acknowledged >= index for acknowledged in sent)


def _first_index(story: Story) -> int:
    status = story.leader.status
    return status.first_index if status is not None else 0
