"""Requests on their way to the leader and back: forwarded, repeated, answered and applied once."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from sava.metadata.commands import (
    AllocateId,
    AllocateResult,
    Command,
    Put,
    SessionExpire,
    SessionOpen,
    SessionResult,
    TxnResult,
)
from sava.metadata.errors import OutcomeUnknown, Unavailable
from sava.metadata.machine.limits import DEFAULT_LIMITS
from sava.metadata.peer import (
    Ask,
    ChangeMembership,
    Committed,
    Envelope,
    Failed,
    LeaderAnswer,
    Propose,
    ReadAt,
    Reply,
    error_of,
)
from sava.raft.messages import Append
from sava.raft.types import MembershipChange, NodeId
from tests.unit.metadata.cluster import CONFIG, Machine, World, txn

ALLOCATE: Command = txn(AllocateId("/counter"))


def allocated(reply: Reply) -> int:
    assert isinstance(reply, Committed), reply
    assert isinstance(reply.result, TxnResult)
    (result,) = reply.result.results
    assert isinstance(result, AllocateResult)
    return result.first


def three() -> tuple[World, Machine, Machine]:
    """A leader, and a follower whose session is open."""
    world = World()
    world.found("a", "b", "c")
    follower = world.followers()[0]
    world.put(follower, "/warm", "up")
    return world, world.leader(), follower


class Thief:
    """Loses the first messages of a kind."""

    def __init__(self, world: World, kind: type, times: int = 1) -> None:
        self.kind, self.left, self.taken = kind, times, list[Envelope]()
        world.tap = self

    def __call__(self, _: Machine, envelope: Envelope) -> bool:
        if isinstance(envelope.message, self.kind) and self.left:
            self.left -= 1
            self.taken.append(envelope)
            return False
        return True


def test_s70_a_follower_sees_its_own_forwarded_write_at_once() -> None:
    """The leader's answer may overtake the entry on its way to the follower."""
    world, leader, follower = three()
    held: list[Envelope] = []

    def hold_appends(src: Machine, envelope: Envelope) -> bool:
        if isinstance(envelope.message, Append) and envelope.dst == follower.id:
            held.append(envelope)
            return False
        return True

    world.tap = hold_appends
    box = follower.put("/x", "1")
    world.settle()
    assert leader.get("/x") == b"1", "committed by the leader and the third node"
    assert box.replies == []
    world.tap = None
    world.pass_time(500)
    assert isinstance(box.reply, Committed)
    assert follower.get("/x") == b"1"


def test_a_linearizable_read_on_a_follower_waits_for_what_was_acknowledged() -> None:
    world, leader, follower = three()
    world.cut = {(leader.name, follower.name)}
    world.put(leader, "/x", "1")
    box = follower.read_index()
    world.settle()
    assert box.replies == []
    world.heal()
    reply = world.answer(box)
    assert isinstance(reply, ReadAt)
    assert follower.get("/x") == b"1"


def test_a_lost_answer_is_asked_for_again_and_the_request_applied_once() -> None:
    """Kill the link after the request; the copy is answered from the session's memory."""
    world, _, follower = three()
    thief = Thief(world, LeaderAnswer)
    box = follower.propose(ALLOCATE)
    world.settle()
    assert len(thief.taken) == 1
    assert box.replies == []
    assert allocated(world.answer(box)) == 1
    assert allocated(world.answer(follower.propose(ALLOCATE))) == 2


def test_a_lost_request_is_repeated() -> None:
    world, _, follower = three()
    Thief(world, Ask, times=2)
    assert allocated(world.answer(follower.propose(ALLOCATE))) == 1


def test_a_request_whose_leader_dies_is_applied_once() -> None:
    world, leader, follower = three()
    world.tap = lambda _, envelope: not isinstance(envelope.message, LeaderAnswer)
    box = follower.propose(ALLOCATE, timeout_ms=20_000)
    world.settle()
    leader.stop()
    world.tap = None
    assert allocated(world.answer(box)) == 1
    leader.start()
    world.pass_time(2_000)
    assert {machine.get("/counter") for machine in world.up()} == {b"1"}


def test_the_leaders_own_caller_survives_the_loss_of_leadership() -> None:
    """Appended on a leader that is cut off: neither done nor undone. The caller is answered once, the entry
    applied once."""
    world, leader, _ = three()
    world.put(leader, "/warm", "up")
    world.isolate(leader)
    box = leader.propose(ALLOCATE, timeout_ms=30_000)
    world.pass_time(3_000)
    assert world.leader() is not leader
    assert box.replies == [], "not 'failed': the others might hold the entry"
    world.heal()
    assert allocated(world.answer(box)) == 1
    world.pass_time(1_000)
    assert {machine.get("/counter") for machine in world.up()} == {b"1"}


def test_an_entry_of_another_leader_in_its_place_is_not_its_answer() -> None:
    world, leader, _ = three()
    world.put(leader, "/warm", "up")
    world.isolate(leader)
    boxes = [leader.propose(ALLOCATE, timeout_ms=30_000) for _ in range(2)]
    world.pass_time(3_000)
    successor = world.leader()
    assert successor is not leader
    for number in range(3):
        assert isinstance(world.put(successor, "/other", f"{number}"), Committed)
    assert successor.status.commit > leader.status.last_index
    world.heal()
    assert [allocated(world.answer(box)) for box in boxes] == [1, 2]


def test_an_entry_that_survives_its_leader_answers_with_its_own_result() -> None:
    world, leader, _follower = three()
    world.put(leader, "/warm", "up")
    world.tap = lambda src, envelope: src is leader
    box = leader.propose(ALLOCATE, timeout_ms=30_000)
    world.settle()
    world.isolate(leader)
    world.tap = None
    world.pass_time(3_000)
    assert world.leader().get("/counter") == b"1", "its successor had received the entry and commits it"
    world.heal()
    assert allocated(world.answer(box)) == 1
    world.pass_time(1_000)
    assert leader.get("/counter") == b"1"


def test_what_was_sent_and_never_answered_is_unknown() -> None:
    world, leader, follower = three()
    world.cut = {(leader.name, follower.name)}
    box = follower.propose(ALLOCATE, timeout_ms=600)
    world.pass_time(900)
    assert isinstance(box.reply, Failed)
    assert isinstance(error_of(box.reply), OutcomeUnknown)
    assert leader.get("/counter") == b"1", "and here it did take effect"


def test_what_was_never_sent_had_no_effect() -> None:
    world = World()
    machines = world.found("a", "b", "c")
    for machine in machines[1:]:
        machine.stop()
    lonely = machines[0]
    world.pass_time(4_000)
    box, read = lonely.put("/x", "1", timeout_ms=500), lonely.read_index(timeout_ms=500)
    world.pass_time(700)
    for answered in (box, read):
        assert isinstance(answered.reply, Failed)
        assert not answered.reply.maybe_applied
        assert isinstance(error_of(answered.reply), Unavailable)
        assert "no leader is known" in answered.reply.message


def test_a_leader_without_a_majority_says_unknown() -> None:
    world, leader, _ = three()
    world.put(leader, "/warm", "up")
    world.isolate(leader)
    box = leader.put("/x", "1", timeout_ms=300)
    world.pass_time(400)
    assert isinstance(box.reply, Failed)
    assert isinstance(error_of(box.reply), OutcomeUnknown)


def test_a_node_that_does_not_lead_refuses_and_never_passes_on() -> None:
    world, leader, follower = three()
    third = next(machine for machine in world.followers() if machine is not follower)
    world.log.clear()
    ask = Ask(1 << 62, Propose(txn(Put("/x", b"1"))))
    cluster = follower.replica.status().cluster
    third.replica.receive(Envelope(cluster, follower.id, 1, follower.nonce, third.id, ask))
    third.replica.pump(world.now_ms)
    (answer,) = [envelope.message for _, _, envelope in world.log]
    assert isinstance(answer, LeaderAnswer)
    assert isinstance(answer.reply, Failed)
    assert (answer.reply.code, answer.reply.maybe_applied) == ("not_leader", False)
    assert answer.reply.detail == leader.id


def test_a_request_delivered_twice_is_served_once() -> None:
    """The first copy was refused, its sender told; the second must not be carried out behind its back."""
    world, leader, follower = three()
    world.log.clear()
    world.answer(follower.propose(ALLOCATE))
    ask = next(envelope for _, _, envelope in world.log if isinstance(envelope.message, Ask))
    before = leader.status.last_index
    leader.replica.receive(ask)
    world.settle()
    assert leader.status.last_index == before
    assert leader.replica.status().dropped["repeated"] == 1


def test_a_membership_change_is_not_repeated_blindly() -> None:
    world, _leader, follower = three()
    Thief(world, LeaderAnswer, times=100)
    box = follower.ask(
        ChangeMembership(MembershipChange(add_learners=((NodeId(77), "n:1"),))), timeout_ms=3_000
    )
    world.pass_time(2_500)
    asks = [
        e
        for _, _, e in world.log
        if isinstance(e.message, Ask) and isinstance(e.message.request, ChangeMembership)
    ]
    assert len(asks) == 1
    world.pass_time(1_000)
    assert isinstance(box.reply, Failed)
    assert box.reply.maybe_applied


# -- the replica's own session ---------------------------------------------------------------------------


def test_numbers_are_given_out_only_within_the_window() -> None:
    limits = msgspec.structs.replace(DEFAULT_LIMITS, max_session_window=8)
    world = World(replace(CONFIG, limits=limits))
    (node,) = world.found("a")
    world.put(node, "/warm", "up")
    boxes = [node.propose(ALLOCATE) for _ in range(50)]
    world.settle()
    assert [allocated(box.reply) for box in boxes] == list(range(1, 51))


def test_an_expired_session_is_replaced_when_nothing_was_lost() -> None:
    world = World()
    (node,) = world.found("a")
    assert allocated(world.answer(node.propose(ALLOCATE))) == 1
    world.answer(node.ask(Propose(SessionExpire(1 << 60))))
    assert allocated(world.answer(node.propose(ALLOCATE))) == 2


def test_a_copy_that_meets_an_expired_session_is_unknown() -> None:
    """The first copy was applied, its answer lost, the session closed: nobody can tell any more."""
    world, leader, follower = three()
    thief = Thief(world, LeaderAnswer)
    box = follower.propose(ALLOCATE)
    world.settle()
    assert len(thief.taken) == 1
    opened = world.answer(leader.ask(Propose(SessionOpen(b"other"))))
    assert isinstance(opened, Committed)
    assert isinstance(opened.result, SessionResult)
    expire = Propose(SessionExpire(1 << 60), session=opened.result.session, seq=1)
    world.answer(leader.ask(expire))
    reply = world.answer(box)
    assert isinstance(reply, Failed)
    assert isinstance(error_of(reply), OutcomeUnknown)
    assert leader.get("/counter") == b"1"
    assert allocated(world.answer(follower.propose(ALLOCATE))) == 2


def test_a_session_that_was_idle_for_long_is_given_up_before_it_is_used() -> None:
    world = World()
    (node,) = world.found("a")
    world.put(node, "/x", "1")
    world.now_ms += CONFIG.session_idle_ms // 2 + 1000
    world.pass_time(100)
    before = node.status.last_index
    world.put(node, "/x", "2")
    assert node.status.last_index == before + 2, "a new session and the put"


def test_one_session_serves_all_requests_that_come_one_by_one() -> None:
    """The monotonic clock stands far from zero when the node starts. The request that opens the session
    counts as its use; otherwise the session looks idle since time zero, and every request opens another
    one."""
    world = World()
    (node,) = world.found("a")
    world.now_ms += 10 * CONFIG.session_idle_ms
    world.pass_time(100)
    world.put(node, "/x", "0")
    before = node.status.last_index
    for number in range(5):
        world.put(node, "/x", str(number))
    assert node.status.last_index == before + 5


def test_a_callers_own_session_is_passed_on_as_it_is() -> None:
    world, _, follower = three()
    opened = world.answer(follower.ask(Propose(SessionOpen(b"client"))))
    assert isinstance(opened, Committed)
    assert isinstance(opened.result, SessionResult)
    request = Propose(ALLOCATE, opened.result.session, 1)
    first, second = world.answer(follower.ask(request)), world.answer(follower.ask(request))
    assert allocated(first) == allocated(second) == 1


@pytest.mark.parametrize("count", [1, 200])
def test_requests_made_before_the_session_is_open_keep_their_order(count: int) -> None:
    world = World()
    world.found("a", "b", "c")
    follower = world.followers()[0]
    boxes = [follower.propose(ALLOCATE) for _ in range(count)]
    world.settle()
    assert [allocated(box.reply) for box in boxes] == list(range(1, count + 1))


def test_too_many_requests_are_refused_and_the_rest_served() -> None:
    world = World(replace(CONFIG, max_pending=10))
    (node,) = world.found("a")
    world.put(node, "/warm", "up")
    boxes = [node.propose(ALLOCATE) for _ in range(30)]
    world.settle()
    refused = [box for box in boxes if isinstance(box.reply, Failed)]
    assert len(refused) == 20
    assert all(
        isinstance(error_of(box.reply), Unavailable) for box in refused if isinstance(box.reply, Failed)
    )


def test_callers_that_give_up_leave_nothing_behind() -> None:
    """No leader for a long time, and callers that ask again and again: memory must not grow."""
    world = World()
    machines = world.found("a", "b", "c")
    world.put(machines[0], "/warm", "up")
    for machine in machines[1:]:
        machine.stop()
    world.pass_time(3_000)
    lonely = machines[0].replica
    for _ in range(20):
        boxes = [machines[0].put("/x", "1", timeout_ms=100) for _ in range(50)]
        boxes += [machines[0].read_index(timeout_ms=100) for _ in range(50)]
        lonely.cancel(machines[0].put("/x", "2").ticket)
        world.pass_time(200)
        assert all(isinstance(box.reply, Failed) for box in boxes)
    requests = lonely.requests
    assert len(requests._pending) <= 1, "at most the opening of a session"
    assert len(requests.waiting) <= 1
    assert not lonely._router.reads.arrived
    assert not lonely._router._session._backlog
