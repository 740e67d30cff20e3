"""One node and three: put, get, restart, elections, initialization."""

from __future__ import annotations

import pytest

from sava.metadata.commands import AllocateId, AllocateResult, CommandRefused, TxnResult
from sava.metadata.errors import IdentityConflict, InvalidRequest
from sava.metadata.identity import cluster_id_of
from sava.metadata.peer import Bootstrap, Committed, Failed, KeepAlive, ReadAt, error_of
from sava.raft.types import Membership, NodeId
from tests.sim.disk import CrashPolicy
from tests.unit.metadata.cluster import World, txn


def test_a_single_node_serves_at_once_and_remembers() -> None:
    world = World()
    (node,) = world.found("a")
    assert isinstance(world.put(node, "/x", "1"), Committed)
    assert node.get("/x") == b"1"
    node.restart()
    world.settle()
    assert node.replica.is_leader, "a lone voter has nobody to wait for"
    assert node.get("/x") == b"1"


def test_a_single_node_applies_each_entry_exactly_once_after_a_restart() -> None:
    """S64, m22: a counter shows what a second application would do."""
    world = World()
    (node,) = world.found("a")
    for expected in range(1, 6):
        reply = world.answer(node.propose(txn(AllocateId("/counter"))))
        assert isinstance(reply, Committed)
        assert isinstance(reply.result, TxnResult)
        assert reply.result.results == (AllocateResult(expected, 1),)
        node.restart()
        world.elect()
        assert node.get("/counter") == b"%d" % expected
        revision = node.replica.machine.revision
        assert revision == expected


def test_after_a_snapshot_only_what_follows_it_is_applied() -> None:
    """m22, with entries kept below the snapshot."""
    world = World()
    (node,) = world.found("a")
    for _ in range(3):
        node.propose_unnamed(txn(AllocateId("/counter")))
        world.settle()
    node.replica.take_snapshot(lambda _: None)
    world.settle()
    assert node.status.snapshot_index > 0
    assert node.status.first_index <= node.status.snapshot_index, "the test needs kept entries"
    for expected in (b"3", b"4"):
        node.restart()
        world.elect()
        assert node.get("/counter") == expected
        node.propose_unnamed(txn(AllocateId("/counter")))
        world.settle()


def test_three_nodes_agree() -> None:
    world = World()
    machines = world.found("a", "b", "c")
    for number, machine in enumerate(machines):
        assert isinstance(world.put(machine, f"/k/{number}", "v"), Committed)
    world.pass_time(300)
    assert len({machine.replica.machine.digest() for machine in machines}) == 1
    assert {machine.replica.machine.revision for machine in machines} == {3}


@pytest.mark.parametrize("policy", [CrashPolicy.LOSE, CrashPolicy.ANY, None])
def test_power_loss_of_all_nodes_keeps_what_was_acknowledged(policy: CrashPolicy | None) -> None:
    """S63."""
    world = World()
    machines = world.found("a", "b", "c")
    for number in range(10):
        assert isinstance(world.put(machines[number % 3], f"/k/{number}", f"{number}"), Committed)
    for machine in machines:
        machine.stop(policy)
    for machine in machines:
        machine.start()
    leader = world.elect()
    assert [leader.get(f"/k/{number}") for number in range(10)] == [b"%d" % number for number in range(10)]


def test_a_leader_that_dies_is_replaced_and_catches_up() -> None:
    world = World()
    world.found("a", "b", "c")
    old = world.leader()
    world.put(old, "/x", "1")
    old.stop()
    new = world.elect()
    assert new is not old
    assert isinstance(world.put(new, "/x", "2"), Committed)
    old.start()
    world.pass_time(1_000)
    assert old.get("/x") == b"2"


def test_what_arrives_between_two_pumps_is_one_batch() -> None:
    """One entry in the log each, one write, one append to each follower."""
    world = World()
    world.found("a", "b", "c")
    leader = world.leader()
    world.put(leader, "/warm", "up")
    world.log.clear()
    before = leader.writer.appends
    boxes = [leader.put(f"/k/{number}", "v") for number in range(64)]
    world.settle()
    assert all(isinstance(box.reply, Committed) for box in boxes)
    assert leader.writer.appends - before == 1
    appends = [envelope.message for src, _, envelope in world.log if hasattr(envelope.message, "entries")]
    assert sum(len(message.entries) for message in appends if message.entries) == 2 * 64


def test_many_reads_share_one_round() -> None:
    """One token per pump, one heartbeat round, however many callers."""
    world = World()
    world.found("a", "b", "c")
    for machine in (world.leader(), world.followers()[0]):
        world.log.clear()
        boxes = [machine.read_index() for _ in range(100)]
        world.settle()
        assert all(isinstance(box.reply, ReadAt) for box in boxes)
        assert len(world.log) < 20


def test_a_request_that_breaks_a_rule_is_refused_before_it_costs_an_entry() -> None:
    world = World()
    (node,) = world.found("a")
    world.put(node, "/x", "1")
    last = node.status.last_index
    reply = world.answer(node.put("no-slash", "1"))
    assert isinstance(reply, Failed)
    assert isinstance(error_of(reply), InvalidRequest)
    assert node.status.last_index == last


def test_a_refused_command_is_an_answer() -> None:
    world = World()
    (node,) = world.found("a")
    reply = world.answer(node.put("/x", "1", lease=99))
    assert isinstance(reply, Committed)
    assert isinstance(reply.result, CommandRefused)


def test_waiting_for_a_revision() -> None:
    world = World()
    (node,) = world.found("a")
    reached: list[str] = []
    world.put(node, "/x", "1")
    revision = node.replica.machine.revision
    node.replica.when_revision(revision, lambda: reached.append("now"))
    node.replica.when_revision(revision + 1, lambda: reached.append("next"))
    ticket = node.replica.when_revision(revision + 1, lambda: reached.append("cancelled"))
    node.replica.cancel(ticket)
    world.settle()
    assert reached == ["now"]
    world.put(node, "/x", "2")
    assert reached == ["now", "next"]


def test_a_cancelled_request_is_never_answered() -> None:
    world = World()
    (node,) = world.found("a")
    box = node.put("/x", "1")
    node.replica.cancel(box.ticket)
    world.pass_time(6_000)
    assert box.replies == []


# -- initialization --------------------------------------------------------------------------------


def test_a_pristine_node_waits_and_says_so() -> None:
    world = World()
    node = world.machine("a")
    node.start()
    box = node.put("/x", "1", timeout_ms=500)
    world.pass_time(400)
    assert box.replies == []
    world.pass_time(200)
    assert isinstance(box.reply, Failed)
    assert box.reply.code == "not_initialized"
    assert "cluster init" in box.reply.message


def test_a_request_made_before_init_is_carried_out_after_it() -> None:
    world = World()
    node = world.machine("a")
    node.start()
    box = node.put("/x", "1")
    world.pass_time(200)
    node.replica.bootstrap(world.bootstrap_of([node]), lambda _: None)
    assert isinstance(world.answer(box), Committed)


def test_the_same_init_twice_is_fine_and_another_one_is_not() -> None:
    world = World()
    machines = [world.machine(name) for name in "abc"]
    for machine in machines:
        machine.start()
    same, other = world.bootstrap_of(machines), world.bootstrap_of(machines[:2])
    outcomes: list[BaseException | None] = []
    node = machines[0].replica
    node.bootstrap(same, outcomes.append)
    node.bootstrap(same, outcomes.append)
    node.bootstrap(other, outcomes.append)
    world.settle()
    node.bootstrap(same, outcomes.append)
    node.bootstrap(other, outcomes.append)
    world.settle()
    assert [type(outcome) for outcome in outcomes] == [
        IdentityConflict,
        type(None),
        type(None),
        type(None),
        IdentityConflict,
    ]
    machines[0].restart()
    outcomes.clear()
    machines[0].replica.bootstrap(same, outcomes.append)
    machines[0].replica.bootstrap(other, outcomes.append)
    world.settle()
    assert outcomes[0] is None
    assert isinstance(outcomes[1], IdentityConflict)


def test_a_node_cannot_found_a_cluster_without_itself() -> None:
    world = World()
    node = world.machine("a")
    node.start()
    outcomes: list[BaseException | None] = []
    founders = (NodeId(5), NodeId(6))
    node.replica.bootstrap(Bootstrap(cluster_id_of(founders), Membership(voters=founders)), outcomes.append)
    world.settle()
    assert isinstance(outcomes[0], IdentityConflict)
    assert node.replica.core is None


def test_an_init_with_one_node_down_is_finished_later() -> None:
    world = World()
    machines = [world.machine(name) for name in "abc"]
    for machine in machines:
        machine.start()
    bootstrap = world.bootstrap_of(machines)
    for machine in machines[:2]:
        machine.replica.bootstrap(bootstrap, lambda _: None)
    leader = world.elect()
    world.put(leader, "/x", "1")
    machines[2].replica.bootstrap(bootstrap, lambda _: None)
    world.pass_time(1_000)
    assert machines[2].get("/x") == b"1"


def test_an_answer_is_given_once_even_when_the_node_stops() -> None:
    world = World()
    (node,) = world.found("a")
    world.put(node, "/x", "1")
    node.writer.is_held = True
    box, read = node.put("/x", "2"), node.ask(KeepAlive(7))
    node.replica.pump(world.now_ms)
    node.disk.fail_next("sync")
    node.writer.is_held = False
    world.settle()
    assert len(node.failures) == 1
    assert isinstance(box.reply, Failed)
    assert box.reply.maybe_applied
    assert isinstance(read.reply, Failed)
    late = node.put("/x", "3")
    node.replica.pump(world.now_ms)
    assert isinstance(late.reply, Failed)
    assert late.reply.code == "unavailable"
