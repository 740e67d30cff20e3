"""The replica and its disk: nothing is promised before it is durable, a full disk is survived, a failed one
is not.
"""

from __future__ import annotations

import pytest

from sava.metadata.errors import Unavailable
from sava.metadata.peer import Committed, Failed, ReadAt, TransferLeadership, error_of
from sava.metadata.replica.persister import MAX_WAITING
from sava.metadata.replica.proposals import BATCH_ENTRIES
from sava.raft.messages import Append, AppendReply, VoteReply, VoteRequest
from sava.wal.errors import DiskFailed
from tests.unit.metadata.cluster import Machine, World


def three() -> tuple[World, Machine, Machine]:
    world = World()
    world.found("a", "b", "c")
    world.put(world.leader(), "/warm", "up")
    return world, world.leader(), world.followers()[0]


def sent_entries(world: World) -> list[int]:
    """How many entries each append had, of those that had any."""
    messages = [envelope.message for _, _, envelope in world.log]
    return [len(message.entries) for message in messages if isinstance(message, Append) and message.entries]


def test_a_follower_acknowledges_entries_only_when_they_are_durable() -> None:
    """m3, at the driver: an append reply leaves after the write that it speaks of."""
    world, leader, follower = three()
    follower.writer.is_held = True
    world.log.clear()
    leader.put("/x", "1")
    world.settle()
    last = leader.status.last_index
    replies = [
        envelope.message.index
        for src, _, envelope in world.log
        if src == follower.name and isinstance(envelope.message, AppendReply) and envelope.message.accepted
    ]
    assert last not in replies
    follower.writer.is_held = False
    world.settle()
    assert any(
        isinstance(envelope.message, AppendReply) and envelope.message.index == last
        for src, _, envelope in world.log
        if src == follower.name
    )


def test_a_vote_is_sent_only_when_it_is_durable() -> None:
    """m1: else a crash forgets it, and the node votes again in the same term."""
    world, leader, follower = three()
    third = next(machine for machine in world.followers() if machine is not follower)
    follower.writer.is_held = True
    world.log.clear()
    world.answer(leader.ask(TransferLeadership(third.id)))

    def votes() -> list[VoteReply]:
        sent = [envelope.message for src, _, envelope in world.log if src == follower.name]
        return [message for message in sent if isinstance(message, VoteReply) and message.granted]

    assert any(isinstance(e.message, VoteRequest) for _, dst, e in world.log if dst == follower.name)
    assert votes() == []
    follower.writer.is_held = False
    world.settle()
    assert [vote.dst for vote in votes()] == [third.id]


def test_a_lone_node_counts_itself_only_when_durable() -> None:
    """m2, m3 for the node's own vote and own entries."""
    world = World()
    (node,) = world.found("a")
    world.put(node, "/x", "1")
    node.writer.is_held = True
    box = node.put("/x", "2")
    world.pass_time(300)
    assert box.replies == []
    assert node.get("/x") == b"1"
    node.stop()
    node.start()
    world.elect()
    assert node.get("/x") == b"1"

    node.restart()
    node.writer.is_held = True
    world.pass_time(3_000)
    assert not node.replica.is_leader, "its vote for itself is not durable"


def test_a_slow_disk_on_the_leader_does_not_stop_the_others() -> None:
    """S61: the leader sends before its own disk has the entries, and counts itself later."""
    world, leader, follower = three()
    leader.writer.is_held = True
    box = leader.put("/x", "1")
    world.pass_time(300)
    assert follower.get("/x") == b"1"
    assert box.replies == [], "the leader has not applied it: it is not durable here"
    leader.writer.is_held = False
    world.settle()
    assert isinstance(box.reply, Committed)


def test_requests_that_come_while_the_disk_works_share_a_write() -> None:
    world, leader, _ = three()
    leader.writer.is_held = True
    first = leader.put("/first", "1")
    world.settle()
    world.log.clear()
    boxes = []
    for number in range(BATCH_ENTRIES - 1):
        boxes.append(leader.put(f"/k/{number}", "v"))
        world.settle()
    assert sent_entries(world) == [], "they wait for each other"

    before = leader.writer.appends
    leader.writer.is_held = False
    world.settle()
    assert all(isinstance(box.reply, Committed) for box in (first, *boxes))
    assert sent_entries(world) == [BATCH_ENTRIES - 1] * 2, "one append to each follower"
    assert leader.writer.appends - before == 2


def test_a_full_batch_does_not_wait_for_the_leaders_disk() -> None:
    world, leader, follower = three()
    leader.writer.is_held = True
    leader.put("/first", "1")
    world.settle()
    for number in range(BATCH_ENTRIES):
        leader.put(f"/k/{number}", "v")
        world.settle()
    world.pass_time(300)
    assert follower.get(f"/k/{BATCH_ENTRIES - 1}") == b"v"


def test_a_request_that_waited_past_its_deadline_had_no_effect() -> None:
    world, leader, follower = three()
    leader.writer.is_held = True
    leader.put("/first", "1", timeout_ms=60_000)
    world.settle()
    late = leader.put("/late", "1", timeout_ms=300)
    world.pass_time(500)
    assert isinstance(late.reply, Failed)
    assert not late.reply.maybe_applied
    assert "disk" in late.reply.message

    leader.writer.is_held = False
    assert isinstance(world.put(leader, "/next", "1"), Committed)
    assert follower.get("/late") is None


def test_those_who_gave_up_while_the_disk_worked_are_passed_over() -> None:
    """One write is at the disk, one request waits behind it, its caller goes away, the disk finishes: the
    batch that is due is empty."""
    world, leader, _ = three()
    leader.writer.is_held = True
    first = leader.put("/first", "1")
    world.settle()
    waiting = leader.put("/waiting", "2")
    world.settle()
    leader.replica.cancel(waiting.ticket)
    leader.writer.is_held = False
    world.answer(first)
    assert not leader.failures
    world.put(leader, "/next", "3")
    assert leader.get("/waiting") is None


def test_an_output_without_anything_durable_costs_no_write() -> None:
    world, leader, follower = three()
    world.pass_time(500)
    before = leader.writer.appends, follower.writer.appends
    world.answer(follower.read_index())
    world.pass_time(1_000)
    assert (leader.writer.appends, follower.writer.appends) == before


def test_messages_keep_behind_what_is_being_written() -> None:
    """A reply that needs no write of its own may rest on one that is still under way."""
    world, leader, follower = three()
    follower.writer.is_held = True
    leader.put("/x", "1")
    world.settle()
    world.log.clear()
    world.pass_time(200)
    accepted = [
        e.message.index
        for src, _, e in world.log
        if src == follower.name and isinstance(e.message, AppendReply) and e.message.accepted
    ]
    assert leader.status.last_index not in accepted


# -- no room (S62) ---------------------------------------------------------------------------------------


def test_a_full_disk_refuses_proposals_serves_reads_and_recovers(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    (node,) = world.found("a")
    world.put(node, "/x", "1")
    node.disk.set_capacity(node.disk.used)
    stuck = node.put("/x", "2", timeout_ms=60_000)
    world.pass_time(300)
    assert stuck.replies == [], "it is in the core's log; nobody may say that it is not done"

    refused = world.answer(node.put("/x", "3"))
    assert isinstance(refused, Failed)
    assert isinstance(error_of(refused), Unavailable)
    assert "disk is full" in refused.message
    assert not refused.maybe_applied
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "the disk is full, nothing can be changed" in caplog.text
    assert isinstance(world.answer(node.read_index()), ReadAt)
    assert node.get("/x") == b"1"

    node.disk.set_capacity(None)
    assert isinstance(world.answer(stuck), Committed)
    assert isinstance(world.put(node, "/x", "4"), Committed)
    assert node.failures == []
    node.restart()
    world.elect()
    assert node.get("/x") == b"4"


def test_a_follower_with_a_full_disk_promises_nothing_and_catches_up() -> None:
    world, leader, follower = three()
    follower.disk.set_capacity(follower.disk.used)
    for number in range(5):
        assert isinstance(world.put(leader, f"/k/{number}", "v"), Committed)
    assert follower.get("/k/4") is None
    follower.disk.set_capacity(None)
    world.pass_time(500)
    assert follower.get("/k/4") == b"v"
    follower.restart()
    world.pass_time(3_000)
    assert follower.get("/k/4") == b"v"


@pytest.mark.parametrize("trouble", ["full", "hangs"])
def test_a_leader_with_a_full_disk_hands_over_to_one_with_room(trouble: str) -> None:
    """The leader's disk is full, or its sync does not return. It sends what it cannot write, the others have
    it and commit it, and the leader, which cannot apply it, answers nobody any more. All hear it, so nobody
    campaigns: two good disks of three, and a store that stands still until somebody comes."""
    world, leader, follower = three()
    if trouble == "full":
        leader.disk.set_capacity(leader.disk.used)
    else:
        leader.writer.is_held = True
    stuck = follower.put("/x", "1", timeout_ms=60_000)
    assert isinstance(world.answer(stuck), Committed)
    assert world.leader() is not leader
    assert isinstance(world.put(world.leader(), "/y", "1"), Committed)
    assert leader.get("/x") is None

    leader.disk.set_capacity(None)
    leader.writer.is_held = False
    world.run_until(lambda: leader.get("/y") == b"1")
    assert leader.failures == []


@pytest.mark.parametrize("which", range(4))
def test_a_leader_hands_over_to_nobody_whose_disk_takes_nothing_either(which: int) -> None:
    """Two full disks of five. The other one with a full disk could not take over: it is asked, nothing comes
    of it, and for one election timeout more everything is refused."""
    world = World()
    world.found(*"abcde")
    leader, others = world.leader(), world.followers()
    world.put(leader, "/warm", "up")
    full = others.pop(which)
    for machine in (leader, full):
        machine.disk.set_capacity(machine.disk.used)
    stuck = others[0].put("/x", "1", timeout_ms=60_000)

    def is_deposed() -> bool:
        assert leader.status.transferring_to != full.id
        return world.leader_or_none() not in (leader, None)

    world.run_until(is_deposed)
    assert isinstance(world.answer(stuck), Committed)


@pytest.mark.parametrize("names", ["ab", "abc"])
def test_a_leader_with_a_full_disk_stays_while_nobody_can_do_without_it(names: str) -> None:
    """Of two voters the other cannot be elected; of three with two full disks neither can the third. Handing
    over would leave nobody who leads, and end the reads as well."""
    world = World()
    world.found(*names)
    leader = world.leader()
    world.put(leader, "/x", "1")
    for machine in [leader, *world.followers()[1:]]:
        machine.disk.set_capacity(machine.disk.used)
    leader.put("/x", "2", timeout_ms=60_000)
    for _ in range(10):
        world.pass_time(1_000)
        assert world.leader() is leader
        assert isinstance(world.answer(leader.read_index()), ReadAt)
    leader.disk.set_capacity(None)
    world.pass_time(500)
    assert isinstance(world.put(leader, "/x", "3"), Committed)


def test_what_a_follower_with_a_full_disk_has_to_say_does_not_pile_up() -> None:
    """Its answers wait for the disk. The leader asks again with every heartbeat, and a disk may be full for
    days: at ten answers a second the follower would run out of memory."""
    world, leader, follower = three()
    follower.disk.set_capacity(follower.disk.used)
    world.put(leader, "/x", "1")
    world.pass_time(2 * MAX_WAITING * 100)
    world.log.clear()
    follower.disk.set_capacity(None)
    world.pass_time(2_000)
    assert follower.get("/x") == b"1"
    assert sum(src == follower.name for src, _, _ in world.log) < MAX_WAITING + 200


def test_nothing_passes_a_write_that_did_not_fit() -> None:
    """A smaller output behind it would fit: the log would have a hole, and the next start would find it."""
    world = World()
    (node,) = world.found("a")
    world.put(node, "/x", "1")
    node.disk.set_capacity(node.disk.used + 2_000)
    big, small = node.put("/big", b"b" * 10_000, timeout_ms=60_000), None
    node.replica.pump(world.now_ms)
    small = node.put("/small", b"s", timeout_ms=60_000)
    world.pass_time(500)
    assert big.replies == []
    assert small.replies == []
    node.restart()
    world.elect()
    assert node.get("/small") is None
    assert node.get("/x") == b"1"


@pytest.mark.parametrize("operation", ["write", "sync"])
def test_a_failed_disk_stops_the_node(operation: str) -> None:
    """What is on disk is unknown, so nothing that rests on it may be said any more."""
    world, leader, follower = three()
    follower.disk.fail_next(operation)
    world.log.clear()
    leader.put("/x", "1")
    world.settle()
    assert [type(failure) for failure in follower.failures] == [DiskFailed]
    last = leader.status.last_index
    assert not any(
        isinstance(e.message, AppendReply) and e.message.index >= last
        for src, _, e in world.log
        if src == follower.name
    )
    assert isinstance(world.put(leader, "/y", "1"), Committed), "the others go on"
