"""Recovery: who must answer, where the ledger ends, and what is waited for."""

from __future__ import annotations

import pytest

from sava.ledger.protocol.member import (
    Check,
    CheckAnswer,
    CopyState,
    Durable,
    Fence,
    FenceAnswer,
    Read,
    ReadAnswer,
    WriteBack,
)
from sava.ledger.protocol.record import (
    LedgerId,
    LedgerRecord,
    LedgerState,
    Range,
    StorageId,
    WrongStep,
    changed,
    claimed,
    closed,
    opened,
)
from sava.ledger.protocol.recovery import (
    STALLED,
    Loss,
    Phase,
    Recovery,
)

JOURNAL = LedgerId(1, 1)
OWN, A, B, C = (StorageId(name) for name in ("own", "a", "b", "c"))


def recovery(record: LedgerRecord | None = None, spares: tuple[StorageId, ...] = ()) -> Recovery:
    record = record or opened(0, (OWN, A, B), qw=3, qa=2, by="owner")
    core = Recovery(JOURNAL, record, 1, by="me", spares=spares)
    core.stored(2)
    return core


def answer(core: Recovery, storage: StorageId, end: int, *, commit: int = 0, base: int = 0) -> None:
    core.receive(FenceAnswer(JOURNAL, storage, 1, CopyState(base, 0, end, commit)))


def check(core: Recovery, storage: StorageId, end: int, *bad: Range) -> None:
    core.receive(CheckAnswer(JOURNAL, storage, 0, end, bad))


def test_two_of_three_answers_are_enough_and_the_longest_copy_is_the_end() -> None:
    core = recovery()
    assert {message.storage for message in core.poll() if isinstance(message, Fence)} == {OWN, A, B}
    answer(core, A, 100, commit=80)
    assert (core.phase, core.answers_needed, core.waiting_for) == (Phase.FENCE, 1, (OWN, B))
    answer(core, B, 120, commit=90)
    assert len([each for each in core.poll() if isinstance(each, Check)]) >= 2
    check(core, A, 100)
    check(core, B, 120)
    assert (core.phase, core.poll()) == (Phase.WRITE_BACK, [Read(JOURNAL, B, 100, 120, 1 << 20)])
    core.receive(ReadAnswer(JOURNAL, B, 100, bytes(20)))
    assert core.poll() == [WriteBack(JOURNAL, A, 1, 100, bytes(20))]
    assert (core.phase, core.wanted) == (Phase.WRITE_BACK, None)
    core.receive(Durable(JOURNAL, A, 120))
    assert core.wanted is not None
    assert (core.wanted.state, core.wanted.end) == (LedgerState.CLOSED, 120)
    core.stored(3)
    assert core.phase is Phase.CLOSED


def test_an_answer_of_a_disk_that_is_not_listed_does_not_count() -> None:
    core = recovery(spares=(C,))
    answer(core, A, 100)
    core.receive(FenceAnswer(JOURNAL, C, 1, None))
    check(core, A, 100)
    assert core.phase is Phase.FENCE
    assert core.loss() == Loss((), 100, (OWN, B))


def test_a_damaged_record_that_may_be_acknowledged_is_waited_for() -> None:
    core = recovery()
    answer(core, A, 100)
    answer(core, B, 40)
    check(core, A, 100, Range(60, 70))
    check(core, B, 40)
    assert (core.phase, core.loss()) == (Phase.CHECK, Loss((Range(60, 70),), None, (OWN,)))
    answer(core, OWN, 50)
    check(core, OWN, 50)
    assert core.phase is Phase.WRITE_BACK
    core.poll()
    assert core.loss() is None


def test_an_operator_gives_up_exactly_what_was_shown() -> None:
    core = recovery()
    answer(core, A, 100)
    check(core, A, 100, Range(20, 30))
    loss = core.loss()
    assert loss == Loss((Range(20, 30),), 100, (OWN, B))
    assert not core.accept_loss(Loss((), 100, (OWN, B)))
    assert core.accept_loss(loss)
    assert core.wanted is not None
    assert (core.wanted.end, core.wanted.lost) == (100, (Range(20, 30),))


def test_the_journal_ends_where_the_last_fragment_begins_at_least() -> None:
    record = changed(opened(0, (OWN, A, B), qw=3, qa=2, by="owner"), 100, (OWN, B, C), qa=2)
    core = recovery(record)
    answer(core, B, 70)
    core.receive(FenceAnswer(JOURNAL, C, 1, None))
    check(core, B, 70)
    assert core.phase is Phase.CHECK
    answer(core, A, 130)
    check(core, A, 130)
    assert core.wanted is not None
    assert core.wanted.end == 100


def test_a_claim_whose_answer_was_lost_is_known_by_its_name() -> None:
    record = opened(0, (OWN,), qw=1, qa=1, by="owner")
    core = Recovery(JOURNAL, record, 1, by="me")
    core.found(claimed(record, "me"), 2)
    assert core.phase is Phase.FENCE
    core = Recovery(JOURNAL, record, 1, by="me")
    core.found(claimed(record, "another"), 2)
    assert core.phase is Phase.OVERTAKEN


def test_closed_is_final_and_closing_needs_a_claim() -> None:
    record = opened(0, (OWN, A), qw=2, qa=2, by="owner")
    with pytest.raises(WrongStep):
        closed(record, Range(0, 10), (OWN,))
    end = closed(claimed(record, "me"), Range(0, 10), (OWN,))
    for step in (
        lambda: claimed(end, "me"),
        lambda: changed(end, 10, (OWN, B), qa=2),
        lambda: closed(end, Range(0, 20), (OWN,)),
    ):
        with pytest.raises(WrongStep):
            step()


def test_what_no_second_disk_can_take_waits_and_an_operator_may_go_on() -> None:
    """Three of three must have a message, and one of the three is gone: nothing is missing but a third copy.
    That is told after some attempts, and going on without it is accepted like a loss. A disk that has come
    to the cluster ends the waiting by itself."""
    for helper in ("operator", "disk"):
        core = recovery(opened(0, (OWN, A, B), qw=3, qa=3, by="owner"))
        for storage in (A, B):
            answer(core, storage, 100)
            check(core, storage, 100)
        assert (core.phase, core.answers_needed) == (Phase.WRITE_BACK, 1)
        assert core.loss() is None
        for _ in range(STALLED):
            core.retry()
        loss = core.loss()
        assert loss == Loss((), None, (OWN,))
        if helper == "operator":
            assert core.accept_loss(loss)
            assert core.wanted is not None
            assert (core.wanted.end, core.wanted.holders, core.wanted.lost) == (100, (A, B), ())
            continue
        core.poll()
        core.offer((C,))
        core.retry()
        assert Fence(JOURNAL, C, 1) in core.poll()
        core.receive(FenceAnswer(JOURNAL, C, 1, None))
        assert core.loss() is None
        assert Read(JOURNAL, A, 0, 100, 1 << 20) in core.poll()
        core.receive(ReadAnswer(JOURNAL, A, 0, bytes(100)))
        core.receive(Durable(JOURNAL, C, 100))
        assert core.wanted is not None
        assert core.wanted.holders == (A, B, C)


def test_dead_targets_do_not_keep_the_only_source_from_the_live_one() -> None:
    """Of two brokers whose disks are lost each comes back with an empty one, which is fenced as a spare. Then
    these disks go as well, because somebody finds an old one. The owner alone has the last bytes. Whoever
    took the owner for unable together with a target that did not answer wrote to nobody: once one of the
    targets was tried and then the owner could not give, and so on for ever."""
    first, second = StorageId("first"), StorageId("second")
    core = recovery(spares=(first, second))
    for spare in (first, second):
        core.receive(FenceAnswer(JOURNAL, spare, 1, None))
    answer(core, OWN, 120)
    check(core, OWN, 120)
    answer(core, A, 100)
    check(core, A, 100)
    assert core.phase is Phase.WRITE_BACK
    tried: list[StorageId] = []
    for _ in range(8):
        for message in core.poll():
            if isinstance(message, Read):
                assert message.storage in (OWN, A)
                end = 120 if message.storage == OWN else 100
                core.receive(ReadAnswer(JOURNAL, message.storage, message.start, bytes(end - message.start)))
        for message in core.poll():
            if isinstance(message, WriteBack):
                tried.append(message.storage)
                if message.storage == A:
                    core.receive(Durable(JOURNAL, A, message.position + len(message.data)))
        core.retry()
    assert tried == [first, second, A]
    assert core.wanted is not None
    assert (core.wanted.state, core.wanted.end) == (LedgerState.CLOSED, 120)
