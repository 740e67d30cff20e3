"""The replicated half of leases: what is attached, what an expiry deletes, and what makes an expiry void."""

from __future__ import annotations

import pytest

from sava.metadata.commands import (
    AllocateId,
    CommandRefused,
    Delete,
    DeletePrefix,
    Done,
    LeaseExpire,
    LeaseGrant,
    LeaseResult,
    LeaseRevoke,
    LeaseTouch,
    Put,
    Txn,
)
from sava.metadata.machine.state_machine import Limits
from tests.unit.metadata.steps import Steps


def test_a_keep_alive_just_before_the_expiry_entry_keeps_the_lease() -> None:
    """Danger: an unconditional expiry deletes what was just renewed, and a live broker is declared dead."""
    steps = Steps()
    lease = steps.grant()
    steps.put("/r", b"", lease)
    seen = steps.generation(lease)
    assert steps.apply(LeaseTouch(lease)) == LeaseResult(lease, 9_000, 1)
    assert steps.apply(LeaseExpire(lease, seen)) == Done(False, 1)
    assert steps.keys() == ["/r"]
    assert steps.apply(LeaseExpire(lease, steps.generation(lease))) == Done(True, 2)
    assert steps.keys() == []


def test_attaching_is_a_sign_of_life() -> None:
    steps = Steps()
    lease = steps.grant()
    seen = steps.generation(lease)
    steps.put("/r", b"", lease)
    assert steps.apply(LeaseExpire(lease, seen)) == Done(False, 1)
    again = steps.generation(lease)
    steps.put("/r", b"again", lease)
    assert steps.apply(LeaseExpire(lease, again)) == Done(False, 2)


def test_the_generation_survives_a_restart() -> None:
    """Danger: generations that begin anew make an old expiry valid again."""
    steps = Steps()
    lease = steps.grant()
    old = steps.generation(lease)
    steps.apply(LeaseTouch(lease))
    again = steps.restarted()
    assert again.apply(LeaseExpire(lease, old)) == Done(False, 0)
    assert again.generation(lease) == old + 1


def test_expiry_deletes_exactly_the_keys_of_the_lease_under_one_revision() -> None:
    """Danger: a second map of deadlines drops keys that the command did not name, on each node different
    ones."""
    steps = Steps()
    mine, other = steps.grant(), steps.grant()
    steps.txn(Put("/b", b"", mine), Put("/c", b"", other), Put("/a", b"", mine), Put("/d", b""))
    steps.apply(LeaseExpire(mine, steps.generation(mine)))
    assert steps.keys() == ["/c", "/d"]
    assert [(event.revision, event.key, event.kv) for event in steps.events[-1]] == [
        (2, "/a", None),
        (2, "/b", None),
    ]
    assert steps.machine.leases.by_id.get(mine) is None
    assert steps.machine.leases.by_id.get(other) is not None


@pytest.mark.parametrize(
    "operation", [Put("/r", b"plain"), Put("/r", b"", 2), Delete("/r"), DeletePrefix("/")]
)
def test_a_key_leaves_its_lease_by_put_without_it_and_by_deletion(
    operation: Put | Delete | DeletePrefix,
) -> None:
    """Danger: an old deadline kills a key that was since written without one."""
    steps = Steps()
    lease, _second = steps.grant(), steps.grant()
    steps.put("/r", b"", lease)
    steps.txn(operation)
    steps.put("/keep", b"")
    steps.txn(AllocateId("/keep/n"))
    expected = steps.keys()
    steps.apply(LeaseExpire(lease, steps.generation(lease)))
    assert steps.keys() == expected
    assert steps.restarted().keys() == expected


def test_delete_and_plain_put_of_the_same_key_is_detached() -> None:
    steps = Steps()
    lease = steps.grant()
    steps.txn(Put("/r", b"", lease), Delete("/r"), Put("/r", b"plain"))
    steps.apply(LeaseRevoke(lease))
    assert steps.keys() == ["/r"]


def test_a_counter_keeps_its_lease() -> None:
    steps = Steps()
    lease = steps.grant()
    steps.put("/n", b"4", lease)
    steps.txn(AllocateId("/n"))
    steps.apply(LeaseRevoke(lease))
    assert steps.keys() == []


def test_an_unknown_lease_refuses_the_whole_transaction() -> None:
    steps = Steps()
    result = steps.apply(Txn(then=(Put("/a", b""), Put("/b", b"", 5))))
    assert isinstance(result, CommandRefused)
    assert (result.code, result.detail) == ("lease_not_found", 5)
    assert steps.keys() == []


@pytest.mark.parametrize("command", [LeaseTouch(5), LeaseRevoke(5)])
def test_an_ended_lease_is_said_to_be_gone(command: LeaseTouch | LeaseRevoke) -> None:
    """Its holder must stop acting on what the lease protected, so it must be told."""
    result = Steps().apply(command)
    assert isinstance(result, CommandRefused)
    assert (result.code, result.detail) == ("lease_not_found", 5)


def test_expiring_an_unknown_lease_does_nothing() -> None:
    assert Steps().apply(LeaseExpire(5, 1)) == Done(False, 0)


def test_ending_an_empty_lease_takes_no_revision() -> None:
    steps = Steps()
    lease = steps.grant()
    assert steps.apply(LeaseRevoke(lease)) == Done(True, 0)
    assert steps.events == []


def test_lease_ids_are_never_reused_even_after_a_restart() -> None:
    """Danger: a holder that slept through its expiry wakes up as the holder of somebody else's lease."""
    steps = Steps()
    lease = steps.grant()
    steps.apply(LeaseRevoke(lease))
    again = steps.restarted()
    assert again.grant() == lease + 1


def test_the_number_of_leases_is_bounded() -> None:
    steps = Steps(Limits(max_leases=1))
    steps.grant()
    result = steps.apply(LeaseGrant(9_000))
    assert isinstance(result, CommandRefused)
    assert result.code == "no_space"


def test_a_lease_holds_its_keys_in_order_also_after_a_restart() -> None:
    steps = Steps()
    lease = steps.grant()
    for name in "cabd":
        steps.put(f"/{name}", b"", lease)
    steps.delete("/b")
    for node in (steps, steps.restarted()):
        found = node.machine.leases.by_id.get(lease)
        assert found is not None
        assert found.keys == ["/a", "/c", "/d"]
