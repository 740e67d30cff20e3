"""Leases through the replica: kept alive by whoever leads, ended late but never early (S67)."""

from __future__ import annotations

from sava.metadata.commands import LeaseExpire, LeaseGrant, LeaseResult, LeaseRevoke
from sava.metadata.errors import LeaseNotFound
from sava.metadata.peer import Alive, Committed, Envelope, Failed, KeepAlive, error_of
from sava.raft.messages import Append
from tests.unit.metadata.cluster import Machine, World

TTL = 2_000


def grant(world: World, machine: Machine, ttl_ms: int = TTL) -> int:
    reply = world.answer(machine.propose(LeaseGrant(ttl_ms)))
    assert isinstance(reply, Committed)
    assert isinstance(reply.result, LeaseResult)
    return reply.result.lease


def three() -> tuple[World, Machine, Machine, int]:
    world = World()
    world.found("a", "b", "c")
    follower = world.followers()[0]
    lease = grant(world, follower)
    world.answer(follower.put("/alive", "x", lease=lease))
    return world, world.leader(), follower, lease


def keep(world: World, machine: Machine, lease: int, ms: int) -> None:
    """Keep the lease alive every half second."""
    for _ in range(ms // 500):
        world.pass_time(500)
        reply = world.answer(machine.ask(KeepAlive(lease)))
        assert reply == Alive(TTL)


def test_a_lease_that_is_kept_alive_lives_and_one_that_is_not_ends() -> None:
    world, leader, follower, lease = three()
    last = leader.status.last_index
    keep(world, follower, lease, 10_000)
    assert leader.get("/alive") == b"x"
    assert leader.status.last_index == last, "keep-alives are not log entries"
    world.pass_time(TTL - 200)
    assert leader.get("/alive") == b"x"
    world.pass_time(800)
    assert leader.get("/alive") is None
    assert follower.get("/alive") is None
    reply = world.answer(follower.ask(KeepAlive(lease)))
    assert isinstance(reply, Failed)
    error = error_of(reply)
    assert isinstance(error, LeaseNotFound)
    assert error.lease == lease


def test_a_new_leader_gives_every_lease_its_time_again() -> None:
    world, leader, _follower, lease = three()
    world.pass_time(TTL - 300)
    leader.stop()
    world.elect()
    world.pass_time(TTL - 200)
    assert world.leader().get("/alive") == b"x"
    survivor = next(machine for machine in world.up())
    assert world.answer(survivor.ask(KeepAlive(lease))) == Alive(TTL)
    world.pass_time(5 * TTL)
    assert world.leader().get("/alive") is None


def test_a_deposed_leader_neither_renews_nor_denies() -> None:
    """It cannot confirm that it leads, so it says nothing: 'alive' could be a lie, 'not found' could be one
    too."""
    world, leader, _follower, lease = three()
    world.isolate(leader)
    old = leader.ask(KeepAlive(lease), timeout_ms=800)
    unknown = leader.ask(KeepAlive(lease + 1), timeout_ms=800)
    world.pass_time(1_000)
    for box in (old, unknown):
        assert isinstance(box.reply, Failed)
        assert box.reply.code == "unavailable"


def test_a_lease_granted_by_the_next_leader_is_known_to_whoever_asks() -> None:
    world, leader, _follower, _ = three()
    world.isolate(leader)
    world.pass_time(3_000)
    fresh = grant(world, world.leader())
    box = leader.ask(KeepAlive(fresh), timeout_ms=20_000)
    world.pass_time(300)
    world.heal()
    assert world.answer(box) == Alive(TTL)


def test_the_log_decides_between_a_keep_alive_and_an_expiry() -> None:
    """The expiry was proposed but is not committed; the touch behind it finds no lease."""
    world, leader, _follower, lease = three()
    world.put(leader, "/warm", "up")
    held: list[Envelope] = []

    def hold_appends(src: Machine, envelope: Envelope) -> bool:
        if src is leader and isinstance(envelope.message, Append):
            held.append(envelope)
            return False
        return True

    world.tap = hold_appends
    world.now_ms += TTL
    world.pass_time(500)
    assert held, "the expiry was appended and did not get out"
    box = leader.ask(KeepAlive(lease))
    world.settle()
    assert box.replies == []
    world.tap = None
    reply = world.answer(box)
    assert isinstance(reply, Failed)
    assert isinstance(error_of(reply), LeaseNotFound)
    assert leader.get("/alive") is None


def test_an_expiry_with_an_old_generation_has_no_effect() -> None:
    """m21: proposed by hand with a generation that was touched since."""
    world, leader, _follower, lease = three()
    held = leader.replica.machine.leases.by_id.get(lease)
    assert held is not None
    reply = world.answer(leader.propose(LeaseExpire(lease, held.generation + 1)))
    assert isinstance(reply, Committed)
    assert leader.get("/alive") == b"x"


def test_leases_do_not_end_while_the_leader_has_no_majority() -> None:
    """A leader that hears nobody cannot conclude that they are dead."""
    world = World()
    world.found("a", "b", "c")
    leader = world.leader()
    lease = grant(world, leader, 700)
    world.answer(leader.put("/alive", "x", lease=lease))
    world.isolate(leader)
    world.pass_time(900)  # longer than the TTL, shorter than the leader's patience with its followers
    world.heal()
    world.pass_time(300)
    assert leader.replica.is_leader
    assert leader.get("/alive") == b"x"


def test_a_revoked_lease_is_gone_for_keep_alives_at_once() -> None:
    world, leader, follower, lease = three()
    world.answer(follower.propose(LeaseRevoke(lease)))
    reply = world.answer(leader.ask(KeepAlive(lease)))
    assert isinstance(reply, Failed)
    assert reply.code == LeaseNotFound.code


def test_sessions_that_were_idle_for_long_are_closed_by_the_leader() -> None:
    world = World()
    (node,) = world.found("a")
    world.put(node, "/x", "1")
    hour = world.config.session_idle_ms
    for _ in range(3):
        world.now_ms += hour
        world.pass_time(200)
        last = node.status.last_index
    assert isinstance(world.put(node, "/x", "2"), Committed)
    assert node.status.last_index > last
