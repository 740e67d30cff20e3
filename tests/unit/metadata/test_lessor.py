"""The leader's half of leases: deadlines that may be late and never early."""

from __future__ import annotations

from random import Random

import pytest

from sava.metadata.commands import CommandRefused, LeaseExpire, LeaseGrant, LeaseRevoke, LeaseTouch, Put, Txn
from sava.metadata.errors import LeaseNotFound, Unavailable
from sava.metadata.lessor import Lessor
from tests.unit.metadata.steps import TERM, Steps

TTL = 9_000
GRACE = 2_000


class Leader(Steps):
    """A state machine and the lessor of the node that leads."""

    def __init__(self, max_batch: int = 64) -> None:
        super().__init__()
        self.lessor = Lessor(self.machine, grace_ms=GRACE, max_batch=max_batch)
        self.lessor.become_leader(0)

    def at(
        self, now_ms: int, command: LeaseGrant | LeaseTouch | LeaseRevoke | LeaseExpire, **fields: int
    ) -> None:
        self.lessor.observe(command, self.apply(command, **fields), now_ms)

    def leases(self, count: int) -> list[int]:
        for _ in range(count):
            self.at(0, LeaseGrant(TTL))
        return [lease.lease for lease in self.machine.leases]

    def due(self, now_ms: int) -> list[int]:
        return [expiry.lease for expiry in self.lessor.due(now_ms)]


def test_a_lease_falls_due_after_its_ttl_and_not_before() -> None:
    leader = Leader()
    (lease,) = leader.leases(1)
    assert leader.due(TTL - 1) == []
    assert leader.lessor.due(TTL) == [LeaseExpire(lease, 1)]


def test_keep_alive_moves_the_deadline() -> None:
    leader = Leader()
    (lease,) = leader.leases(1)
    for now in range(3_000, 60_000, 3_000):
        assert leader.due(now) == []
        assert leader.lessor.keep_alive(lease, now) == TTL
    assert leader.due(57_000 + TTL - 1) == []
    assert leader.due(57_000 + TTL) == [lease]


def test_s67_a_renewal_that_races_an_expiry_keeps_the_lease() -> None:
    """Story: the leader proposes an expiry; before it commits, the holder is heard. From memory the leader
    could only lie, so the keep-alive goes through the log. Here it was ordered first: the expiry that
    follows is void."""
    leader = Leader()
    (lease,) = leader.leases(1)
    leader.put("/r", b"", lease)
    (expiry,) = leader.lessor.due(TTL)
    assert leader.lessor.keep_alive(lease, TTL + 1) is None
    leader.at(TTL + 2, LeaseTouch(lease))
    leader.at(TTL + 3, expiry)
    assert leader.keys() == ["/r"]
    assert leader.lessor.keep_alive(lease, TTL + 4) == TTL
    assert leader.due(2 * TTL) == []
    assert leader.due(2 * TTL + 4) == [lease]


def test_s67_when_the_expiry_comes_first_the_holder_is_told() -> None:
    leader = Leader()
    (lease,) = leader.leases(1)
    (expiry,) = leader.lessor.due(TTL)
    leader.at(TTL + 1, expiry)
    touch = leader.apply(LeaseTouch(lease))
    assert isinstance(touch, CommandRefused)
    assert touch.code == "lease_not_found"
    with pytest.raises(LeaseNotFound):
        leader.lessor.keep_alive(lease, TTL + 2)


def test_s67_a_new_leader_gives_every_lease_its_full_ttl_and_a_grace() -> None:
    """Danger: the new leader does not know when a holder was last heard; guessing early kills live
    brokers."""
    leader = Leader()
    (lease,) = leader.leases(1)
    leader.lessor.step_down()
    assert leader.due(10 * TTL) == []
    with pytest.raises(Unavailable):
        leader.lessor.keep_alive(lease, 10 * TTL)
    leader.lessor.become_leader(10 * TTL)
    assert leader.due(11 * TTL + GRACE - 1) == []
    assert leader.due(11 * TTL + GRACE) == [lease]


def test_s67_a_wall_clock_that_jumps_an_hour_expires_nothing() -> None:
    """Danger: deadlines by wall clock. Stamps carry the wall clock; deadlines do not look at them."""
    leader = Leader()
    leader.leases(1)
    leader.apply(Txn(then=(Put("/a", b""),)), stamp_ms=3_600_000)
    assert leader.machine.clock_ms == 3_600_000
    assert leader.due(TTL - 1) == []


def test_without_a_quorum_nothing_expires_and_then_every_ttl_restarts() -> None:
    """Danger: a leader cut off from the others hears no keep-alives and concludes that they are all dead."""
    leader = Leader()
    (lease,) = leader.leases(1)
    for now in range(1_000, 5 * TTL, 1_000):
        leader.lessor.quorum_lost(now)
        assert leader.due(now) == []
    regained = 5 * TTL - 1_000
    assert leader.due(regained + TTL + GRACE - 1) == []
    assert leader.due(regained + TTL + GRACE) == [lease]


def test_guard_a_mass_expiry_waits_one_more_ttl_and_raises_an_alarm() -> None:
    """Danger: the leader was paused for a minute; on waking, every lease is overdue, and the whole cluster
    fails over."""
    leader = Leader()
    leases = leader.leases(3)
    assert leader.due(60_000) == []
    assert leader.lessor.alarms == 1
    assert leader.lessor.keep_alive(leases[0], 61_000) == TTL
    assert leader.due(60_000 + TTL) == leases[1:]
    assert leader.lessor.alarms == 1


def test_guard_does_not_protect_the_minority_nor_two_leases() -> None:
    leader = Leader()
    leases = leader.leases(4)
    for lease in leases[:2]:
        leader.lessor.keep_alive(lease, 5_000)
    assert leader.due(TTL) == leases[2:]
    pair = Leader()
    assert pair.due(TTL) == []
    assert pair.leases(2) == pair.due(TTL)
    assert leader.lessor.alarms == pair.lessor.alarms == 0


def test_guard_protects_again_after_a_sign_of_life() -> None:
    leader = Leader()
    leases = leader.leases(3)
    assert leader.due(TTL) == []
    for lease in leases:
        leader.lessor.keep_alive(lease, TTL + 1)
    assert leader.due(3 * TTL) == []
    assert leader.lessor.alarms == 2


def test_an_expiry_in_flight_is_proposed_once_and_a_lost_one_again() -> None:
    leader = Leader()
    (lease,) = leader.leases(1)
    assert leader.due(TTL) == [lease]
    assert leader.due(TTL + 1) == leader.due(2 * TTL - 1) == []
    assert leader.due(2 * TTL) == [lease]


def test_an_expiry_that_was_refused_begins_a_new_ttl() -> None:
    leader = Leader()
    (lease,) = leader.leases(1)
    (expiry,) = leader.lessor.due(TTL)
    leader.at(TTL + 100, expiry, fence_term=TERM + 1)
    assert leader.lessor.keep_alive(lease, TTL + 200) == TTL


def test_one_scan_proposes_a_bounded_number_in_order_of_deadline() -> None:
    leader = Leader(max_batch=2)
    leases = leader.leases(10)
    for i, lease in enumerate(leases):
        leader.lessor.keep_alive(lease, 10 - i)
    for lease in leases[4:]:
        leader.lessor.keep_alive(lease, 5_000)
    assert leader.due(TTL + 20) == [leases[3], leases[2]]
    assert leader.due(TTL + 20) == [leases[1], leases[0]]
    assert leader.due(TTL + 20) == []


def test_a_revoked_lease_is_forgotten() -> None:
    leader = Leader()
    (lease,) = leader.leases(1)
    leader.at(5, LeaseRevoke(lease))
    assert leader.due(10 * TTL) == []
    assert leader.lessor.next_deadline_ms is None


def test_a_lease_that_ended_unobserved_is_not_proposed() -> None:
    leader = Leader()
    (lease,) = leader.leases(1)
    leader.apply(LeaseRevoke(lease))
    assert leader.due(10 * TTL) == []


def test_a_follower_keeps_no_deadlines() -> None:
    follower = Leader()
    follower.lessor.step_down()
    follower.leases(3)
    assert follower.lessor.next_deadline_ms is None
    assert not follower.lessor.is_leading


def test_after_a_snapshot_install_the_new_machine_counts() -> None:
    leader = Leader()
    leader.lessor.step_down()
    other = Steps()
    lease = other.grant()
    leader.lessor.become_leader(100, other.machine)
    assert leader.due(100 + TTL + GRACE) == [lease]


@pytest.mark.parametrize("seed", range(5))
def test_never_early_in_a_random_life(seed: int) -> None:
    """Against the plain rule: no lease is proposed within its TTL after its last sign of life, nor of the
    leader's beginning."""
    rng = Random(seed)
    leader = Leader(max_batch=3)
    heard: dict[int, int] = {}
    now = 0
    for _ in range(2_000):
        now += rng.randrange(400)
        roll = rng.random()
        alive = [lease.lease for lease in leader.machine.leases]
        if roll < 0.05 and len(alive) < 12:
            leader.at(now, LeaseGrant(TTL))
            heard[[lease.lease for lease in leader.machine.leases][-1]] = now
        elif roll < 0.55 and alive:
            lease = rng.choice(alive)
            if leader.lessor.keep_alive(lease, now) is None:
                leader.at(now, LeaseTouch(lease))
            heard[lease] = now
        elif roll < 0.56:
            leader.lessor.step_down()
            leader.lessor.become_leader(now)
            heard = dict.fromkeys(heard, now)
        for expiry in leader.lessor.due(now):
            assert now >= heard[expiry.lease] + TTL
            if rng.random() < 0.8:
                leader.at(now, expiry)
