"""The owner: what is committed, and what a mirror change does to it."""

from __future__ import annotations

import pytest

from sava.ledger.protocol.member import (
    Durable,
    JoinAnswer,
    LedgerRefused,
    RefusalReason,
)
from sava.ledger.protocol.owner import Owner
from sava.ledger.protocol.record import LedgerFenced, LedgerId, Range, StorageId, claimed, opened

JOURNAL = LedgerId(1, 1)
OWN, A, B, C = (StorageId(name) for name in ("own", "a", "b", "c"))


def owner(*, qa: int = 2, window: int = 1 << 20) -> Owner:
    return Owner(JOURNAL, opened(0, (OWN, A, B), qw=3, qa=qa, by="me"), 1, window=window)


def durable(core: Owner, **ends: int) -> None:
    for name, end in ends.items():
        core.receive(Durable(JOURNAL, StorageId(name), end))


def test_committed_is_what_enough_disks_have_the_own_among_them() -> None:
    core = owner()
    core.appended(100)
    durable(core, a=100, b=100)
    assert core.commit == 0
    durable(core, own=80)
    assert core.commit == 80


def test_what_a_broken_connection_said_is_repeated_on_the_next_one() -> None:
    """The mirror's answer is lost; nothing new is written; what waits is committed when it joins again."""
    core = owner()
    core.appended(100)
    durable(core, own=100)
    core.disconnected(A)
    core.join(A)
    core.receive(JoinAnswer(JOURNAL, A, 100, 100))
    assert core.commit == 100


def test_a_change_under_way_needs_the_old_members_and_the_new_ones() -> None:
    """The change may have happened: a recovery would then ask own, b and c, and none of them has 120."""
    core = owner()
    core.appended(120)
    durable(core, own=100, a=100)
    core.change((OWN, B, C), qa=2)
    durable(core, own=120, a=120)
    assert core.commit == 100
    durable(core, c=110)
    assert core.commit == 110
    assert core.wanted is not None
    core.stored(core.wanted, 2)
    durable(core, c=120)
    assert core.commit == 120


def test_a_change_that_was_superseded_may_have_happened_all_the_same() -> None:
    core = owner()
    core.appended(50)
    core.change((OWN, B, C), qa=2)
    first = core.wanted
    core.change((OWN, A, C), qa=2)
    assert core.wanted != first
    core.found(first, 2)
    assert not core.is_fenced
    assert core.record == first


def test_degraded_acknowledges_nothing_before_the_record_says_so() -> None:
    core = owner()
    core.appended(10)
    durable(core, own=10)
    core.change((OWN,), qa=1)
    assert core.commit == 0
    assert core.wanted is not None
    assert core.wanted.is_degraded
    core.stored(core.wanted, 2)
    assert core.commit == 10


def test_a_change_forgets_fragments_of_which_everything_is_in_segments() -> None:
    """The ledger is quiet, and nothing will be trimmed that could tell the record of it later."""
    core = owner()
    core.appended(100)
    durable(core, own=100, a=100)
    core.covered(100)
    assert (core.wanted, core.commit) == (None, 100)
    core.change((OWN, B, C), qa=2)
    assert core.wanted is not None
    assert [part.start for part in core.wanted.fragments] == [100]
    core.stored(core.wanted, 2)
    assert core.floor == 100


def test_a_cluster_that_grew_and_shrank_again_is_degraded() -> None:
    """One broker, then three, then one: the record must not say of the last what it said of the first."""
    core = Owner(JOURNAL, opened(0, (OWN,), qw=1, qa=1, by="me"), 1)
    core.appended(10)
    durable(core, own=10)
    assert not core.record.is_degraded
    core.change((OWN, A, B), qa=2, asked=(3, 2))
    durable(core, a=10, b=10)
    assert core.wanted is not None
    core.stored(core.wanted, 2)
    assert (core.record.qw, core.record.qa, core.record.is_degraded) == (3, 2, False)
    core.appended(20)
    durable(core, own=20)
    core.change((OWN,), qa=1)
    assert core.wanted is not None
    core.stored(core.wanted, 3)
    assert core.commit == 20
    assert (core.record.qw, core.record.qa, core.record.is_degraded) == (3, 2, True)


@pytest.mark.parametrize("by_record", [True, False])
def test_a_fence_is_final(by_record: bool) -> None:
    core = owner()
    core.appended(10)
    if by_record:
        core.found(claimed(core.record, "other"), 2)
    else:
        core.receive(LedgerRefused(JOURNAL, A, RefusalReason.FENCED, 1, 0))
    durable(core, own=10, a=10)
    assert core.is_fenced
    assert core.commit == 0
    with pytest.raises(LedgerFenced):
        core.appended(20)


def test_a_mirror_gets_what_follows_its_copy_and_no_more_than_the_window() -> None:
    core = owner(window=30)
    core.appended(100)
    assert core.next_send(A) is None
    core.receive(JoinAnswer(JOURNAL, A, 40, 40))
    assert core.next_send(A) == Range(40, 70)
    core.append(A, 40, bytes(30))
    assert core.next_send(A) is None
    durable(core, a=70)
    assert core.next_send(A) == Range(70, 100)


def test_a_fragment_leaves_the_record_before_its_last_bytes_are_trimmed() -> None:
    core = owner()
    core.appended(100)
    durable(core, own=60, a=60)
    core.change((OWN, B, C), qa=2)
    assert core.wanted is not None
    core.stored(core.wanted, 2)
    durable(core, own=100, b=100)
    core.covered(90)
    assert core.floor == 60
    assert core.wanted is not None
    assert [part.start for part in core.wanted.fragments] == [60]
    core.stored(core.wanted, 3)
    assert core.floor == 90


def test_a_mirror_that_is_behind_the_floor_joins_anew() -> None:
    """The own log was trimmed over what this mirror would get next: all of it is in segments."""
    core = owner()
    core.appended(100)
    core.receive(JoinAnswer(JOURNAL, B, 10, 10))
    durable(core, own=100, a=100)
    core.covered(80)
    assert core.join(B).start == 80
    assert core.next_send(B) is None


def test_a_new_mirror_begins_where_the_one_that_left_ended() -> None:
    """b dies with 95; own and a acknowledge 100. If they die later, c has what b lacks."""
    core = owner()
    core.appended(100)
    durable(core, own=100, a=100, b=95)
    core.change((OWN, A, C), qa=2)
    assert core.join(C).start == 95
    assert core.wanted is not None
    core.stored(core.wanted, 2)
    assert core.join(C).start == 95


def test_a_new_mirror_does_not_begin_further_back_than_a_window() -> None:
    """It is of no use to an acknowledgement while it catches up."""
    core = owner(window=10)
    core.appended(100)
    durable(core, own=100, a=100, b=80)
    core.change((OWN, A, C), qa=2)
    assert core.join(C).start == 100


def test_a_new_mirror_does_not_begin_before_what_is_in_segments() -> None:
    core = owner()
    core.appended(100)
    durable(core, own=100, a=100, b=60)
    core.covered(90)
    core.change((OWN, A, C), qa=2)
    assert core.join(C).start == 90
