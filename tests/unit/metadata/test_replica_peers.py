"""Who may talk to whom: cluster, addressee, lives and copies of a node; who is a member (S30-S42)."""

from __future__ import annotations

import msgspec
import pytest

from sava.errors import Outcome
from sava.metadata.errors import IdentityConflict, OutcomeUnknown
from sava.metadata.peer import (
    Bootstrap,
    Changed,
    ChangeMembership,
    Committed,
    Envelope,
    Failed,
    TransferLeadership,
    Transferred,
    encode_envelope,
    error_of,
)
from sava.raft.messages import Heartbeat
from sava.raft.types import (
    Membership,
    MembershipBusy,
    MembershipChange,
    MembershipRefused,
    NodeId,
    TransferRefused,
)
from tests.unit.metadata.cluster import Machine, World


def three() -> tuple[World, Machine, Machine]:
    world = World()
    world.found("a", "b", "c")
    world.put(world.leader(), "/warm", "up")
    return world, world.leader(), world.followers()[0]


def heartbeat(world: World, src: Machine, dst: Machine) -> Envelope:
    world.log.clear()
    world.pass_time(100)
    return next(
        e for s, d, e in world.log if (s, d) == (src.name, dst.name) and isinstance(e.message, Heartbeat)
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cluster": "another"}, "cluster"),
        ({"dst": NodeId(99)}, "addressee"),
        ({"incarnation": 0}, "earlier incarnation"),
        ({"nonce": 5}, "conflict"),
    ],
)
def test_what_is_not_meant_for_this_node_is_dropped_and_counted(
    change: dict[str, object], reason: str
) -> None:
    world, leader, follower = three()
    envelope = heartbeat(world, leader, follower)
    follower.replica.receive(msgspec.structs.replace(envelope, **change))
    assert follower.replica.status().dropped[reason] == 1
    assert sum(follower.replica.status().dropped.values()) == 1


def test_a_message_that_speaks_for_somebody_else_is_dropped() -> None:
    world, leader, follower = three()
    envelope = heartbeat(world, leader, follower)
    forged = msgspec.structs.replace(envelope.message, src=NodeId(99))
    follower.replica.receive(msgspec.structs.replace(envelope, message=forged))
    own = msgspec.structs.replace(envelope, src=follower.id)
    follower.replica.receive(own)
    assert follower.replica.status().dropped == {"forged": 1, "self": 1}


def test_a_pristine_node_listens_to_nobody() -> None:
    """Whoever reaches the port of a node that waits must not make it a member of anything."""
    world, leader, follower = three()
    pristine = world.machine("d")
    pristine.start()
    pristine.replica.receive(heartbeat(world, leader, follower))
    assert pristine.replica.status().dropped == {"uninitialized": 1}


def test_two_processes_on_copies_of_one_directory_are_told_apart() -> None:
    """S42: both were started from the same copy, so they have one incarnation and two nonces."""
    world, _leader, follower = three()
    follower.stop()
    copy = world.machine("copy")
    copy.disk = follower.disk.clone()
    copy.address = follower.address
    follower.start()
    world.pass_time(300)
    copy.start()
    assert copy.id == follower.id
    assert copy.state is not None
    assert follower.state is not None
    assert copy.state.incarnation == follower.state.incarnation

    def reach_both(_: Machine, envelope: Envelope) -> bool:
        """Both listen at one address."""
        if envelope.dst == copy.id:
            copy.inbox.append(encode_envelope(envelope))
        return True

    world.tap = reach_both
    assert copy.replica.core is not None
    copy.replica.core.campaign()
    world.pass_time(3_000)
    assert [type(failure) for failure in copy.failures] == [IdentityConflict]
    assert follower.failures == []
    assert world.leader().replica.status().dropped["conflict"] > 0


def test_a_process_that_a_later_copy_has_outnumbered_is_told() -> None:
    """It would otherwise live on as a member that nobody hears."""
    world, leader, follower = three()
    envelope = heartbeat(world, leader, follower)
    later = msgspec.structs.replace(envelope, incarnation=envelope.incarnation + 1, nonce=7)
    follower.replica.receive(later)
    world.pass_time(300)
    assert [type(failure) for failure in leader.failures] == [IdentityConflict]
    assert "two processes" in str(leader.failures[0])


# -- membership ------------------------------------------------------------------------------------------


def join(world: World, name: str) -> Machine:
    joiner = world.machine(name)
    joiner.start()
    cluster = world.leader().replica.status().cluster
    joiner.replica.bootstrap(Bootstrap(cluster, Membership()), lambda _: None)
    world.settle()
    return joiner


def change(world: World, machine: Machine, **what: object) -> object:
    request = ChangeMembership(MembershipChange(**what))  # type: ignore[arg-type]
    return world.answer(machine.ask(request))


def test_a_node_joins_is_promoted_and_another_one_leaves() -> None:
    world, leader, follower = three()
    joiner = join(world, "d")
    assert isinstance(change(world, follower, add_learners=((joiner.id, joiner.address),)), Changed)
    world.pass_time(1_000)
    assert joiner.get("/warm") == b"up"
    assert isinstance(change(world, joiner, promote=(joiner.id,)), Changed)
    assert joiner.id in leader.status.membership.voters
    assert not leader.status.membership.is_joint
    assert leader.replica.address_of(joiner.id) == joiner.address

    assert isinstance(change(world, leader, remove=(follower.id,)), Changed)
    world.pass_time(500)
    assert follower.id not in leader.status.membership.members
    assert isinstance(world.put(joiner, "/x", "1"), Committed)


def test_a_removed_node_learns_it_and_disturbs_nobody() -> None:
    """Cut off from the group, it would campaign with ever higher terms."""
    world, leader, follower = three()
    assert isinstance(change(world, leader, remove=(follower.id,)), Changed)
    world.pass_time(300)
    term = leader.replica.term
    world.pass_time(5_000)
    assert leader.replica.term == term
    assert follower.replica.status().removed
    assert not leader.replica.status().removed


def test_a_leader_that_removes_itself_answers_and_hands_over() -> None:
    world, leader, _ = three()
    reply = change(world, leader, remove=(leader.id,))
    assert isinstance(reply, Changed)
    world.run_until(lambda: world.leader_or_none() not in (None, leader))
    assert leader.replica.status().removed
    assert isinstance(world.put(world.leader(), "/x", "1"), Committed)


def test_changes_that_cannot_be_are_refused_with_their_type() -> None:
    world, leader, follower = three()
    refused = change(world, follower, promote=(NodeId(99),))
    assert isinstance(refused, Failed)
    assert isinstance(error_of(refused), MembershipRefused)
    world.isolate(leader)
    first = leader.ask(
        ChangeMembership(MembershipChange(add_learners=((NodeId(77), "n:1"),))), timeout_ms=600
    )
    second = leader.ask(
        ChangeMembership(MembershipChange(add_learners=((NodeId(78), "n:2"),))), timeout_ms=600
    )
    world.pass_time(300)
    assert isinstance(second.reply, Failed)
    assert isinstance(error_of(second.reply), MembershipBusy)
    world.pass_time(500)
    assert isinstance(first.reply, Failed)
    assert first.reply.maybe_applied


def test_leadership_is_handed_over() -> None:
    world, _leader, follower = three()
    assert world.answer(follower.ask(TransferLeadership(follower.id))) == Transferred(follower.id)
    world.elect()
    assert world.leader() is follower
    reply = world.answer(follower.ask(TransferLeadership(NodeId(0))))
    assert isinstance(reply, Transferred)
    world.elect()
    assert world.leader() is not follower


def test_a_hand_over_that_cannot_be_is_refused() -> None:
    world, _leader, follower = three()
    refused = world.answer(follower.ask(TransferLeadership(NodeId(99))))
    assert isinstance(refused, Failed)
    assert isinstance(error_of(refused), TransferRefused)


def test_a_hand_over_that_did_not_come_about_in_time_may_yet() -> None:
    """Schedule: the leader asks a follower to campaign, and the request is slow. The leader stops waiting
    after an election timeout. Whether the follower takes over is open: it does when the request arrives."""
    world, leader, follower = three()
    follower.stop()
    reply = world.answer(leader.ask(TransferLeadership(follower.id)))
    assert isinstance(reply, Failed)
    assert reply.maybe_applied
    failure = error_of(reply)
    assert (type(failure), failure.outcome) == (OutcomeUnknown, Outcome.UNKNOWN)
    assert "may do so yet" in str(failure)
    assert isinstance(world.put(leader, "/x", "1"), Committed)


def test_proposals_wait_while_leadership_is_handed_over() -> None:
    world, leader, follower = three()
    world.cut = {(leader.name, follower.name)}
    transfer = leader.ask(TransferLeadership(follower.id))
    world.settle()
    box = leader.put("/x", "1")
    world.settle()
    assert box.replies == []
    world.heal()
    assert isinstance(world.answer(box), Committed)
    assert transfer.replies
