"""Exactly-once: a request that is sent twice takes effect once and is answered twice the same."""

from __future__ import annotations

from sava.metadata.commands import (
    AllocateId,
    Command,
    CommandRefused,
    Done,
    LeaseGrant,
    Put,
    Result,
    SessionExpire,
    SessionOpen,
    SessionResult,
    SetVersion,
    Txn,
    encode,
)
from sava.metadata.machine.state_machine import Limits
from sava.metadata.machine.tables import Session
from tests.unit.metadata.steps import Steps

COUNT = Txn(then=(AllocateId("/n"),))


def code(result: Result) -> str:
    assert isinstance(result, CommandRefused), result
    return result.code


def test_s65_i13_a_duplicate_returns_the_first_response_and_has_no_effect() -> None:
    """Story: the answer was lost, the client sends the same request again, perhaps to another leader,
    perhaps after a snapshot. Danger: executed twice."""
    steps = Steps()
    session = steps.session()
    first = steps.apply(COUNT, session=session, seq=1, stamp_ms=5)
    before, events = steps.machine.digest(), len(steps.events)
    assert steps.apply(COUNT, session=session, seq=1, stamp_ms=5) == first
    assert (steps.machine.digest(), len(steps.events)) == (before, events)
    again = steps.restarted()
    assert again.apply(COUNT, session=session, seq=1, stamp_ms=5) == first
    assert again.machine.digest() == before
    assert again.events == []


def test_s65_a_refusal_is_remembered_too() -> None:
    """Danger: the copy of a refused request arrives after its cause is gone, and takes effect unnoticed."""
    steps = Steps()
    session = steps.session()
    put = Txn(then=(Put("/a", b"", 1),))
    assert code(steps.apply(put, session=session, seq=1)) == "lease_not_found"
    assert steps.grant() == 1
    assert code(steps.apply(put, session=session, seq=1)) == "lease_not_found"
    assert steps.keys() == []


def test_s65_a_duplicated_grant_is_one_lease() -> None:
    steps = Steps()
    session = steps.session()
    assert steps.apply(LeaseGrant(9_000), session=session, seq=1) == steps.apply(
        LeaseGrant(9_000), session=session, seq=1
    )
    assert len(list(steps.machine.leases)) == 1


def test_requests_of_one_session_may_arrive_out_of_order() -> None:
    steps = Steps()
    session = steps.session()
    second = steps.apply(COUNT, session=session, seq=2)
    first = steps.apply(COUNT, session=session, seq=1)
    assert steps.apply(COUNT, session=session, seq=2) == second != first
    assert steps.machine.revision == 2


def test_opening_twice_with_one_nonce_is_one_session() -> None:
    steps = Steps()
    session = steps.session(b"a")
    assert steps.session(b"a") == session
    assert steps.session(b"b") == session + 1
    assert steps.restarted().session(b"a") == session


def test_an_unknown_session_is_refused_without_effect() -> None:
    steps = Steps()
    assert code(steps.apply(COUNT, session=9, seq=1)) == "session_expired"
    assert steps.machine.revision == 0


def test_below_low_the_answer_is_forgotten_and_never_executed_again() -> None:
    """Danger: a copy that was delayed for minutes looks like a new request once its answer was dropped."""
    steps = Steps()
    session = steps.session()
    for seq in (1, 2, 3):
        steps.apply(COUNT, session=session, seq=seq)
    steps.apply(COUNT, session=session, seq=4, low=3)
    assert code(steps.apply(COUNT, session=session, seq=2)) == "request_forgotten"
    assert code(steps.apply(COUNT, session=session, seq=0)) == "request_forgotten"
    assert steps.apply(COUNT, session=session, seq=3) != steps.apply(COUNT, session=session, seq=4)
    assert steps.machine.revision == 4


def test_low_above_the_request_itself_is_cut_to_it() -> None:
    steps = Steps()
    session = steps.session()
    first = steps.apply(COUNT, session=session, seq=5, low=1 << 62)
    assert steps.apply(COUNT, session=session, seq=5) == first
    assert code(steps.apply(COUNT, session=session, seq=1 << 63)) == "invalid"


def test_the_window_is_bounded_by_number() -> None:
    steps = Steps(Limits(max_session_window=3))
    session = steps.session()
    answers = [steps.apply(COUNT, session=session, seq=seq) for seq in range(1, 6)]
    assert code(steps.apply(COUNT, session=session, seq=2)) == "request_forgotten"
    assert [steps.apply(COUNT, session=session, seq=seq) for seq in (3, 4, 5)] == answers[2:]
    assert steps.machine.revision == 5


def test_the_window_is_bounded_by_bytes_and_keeps_the_highest() -> None:
    limits = Limits(max_session_bytes=100)
    session = Session(1, b"n", 0)
    for seq in (1, 2, 3, 4):
        session.remember(seq, b"x" * 40, limits)
    assert (sorted(session.responses), session.low, session.held_bytes) == ([3, 4], 3, 80)
    session.remember(5, b"x" * 500, limits)
    assert (sorted(session.responses), session.low, session.held_bytes) == ([5], 5, 500)
    session.forget_below(6)
    assert (session.responses, session.low, session.held_bytes) == ({}, 6, 0)


def test_sessions_expire_by_stamp_only() -> None:
    steps = Steps()
    idle, busy = steps.session(b"idle"), steps.session(b"busy")
    steps.apply(COUNT, session=idle, seq=1, stamp_ms=100)
    steps.apply(COUNT, session=busy, seq=1, stamp_ms=200)
    assert steps.apply(SessionExpire(100)) == Done(False, 2)
    assert steps.apply(SessionExpire(101), stamp_ms=10**12) == Done(True, 2)
    assert code(steps.apply(COUNT, session=idle, seq=1)) == "session_expired"
    assert steps.apply(COUNT, session=busy, seq=1) is not None
    assert steps.session(b"idle") not in (idle, busy)


def test_the_number_of_sessions_is_bounded() -> None:
    steps = Steps(Limits(max_sessions=2))
    first = steps.session(b"1")
    steps.session(b"2")
    assert code(steps.apply(SessionOpen(b"3"))) == "unavailable"
    assert steps.session(b"1") == first
    steps.apply(SessionExpire(1))
    assert isinstance(steps.apply(SessionOpen(b"3")), SessionResult)


def test_every_proposal_doubled_gives_the_same_state() -> None:
    single, double = Steps(), Steps()
    commands: list[Command] = [COUNT, Txn(then=(Put("/a", b"1"),)), LeaseGrant(9_000), SetVersion(1), COUNT]
    for steps, copies in ((single, 1), (double, 3)):
        session = steps.session()
        for seq, command in enumerate(commands, 1):
            for _ in range(copies):
                steps.apply(command, session=session, seq=seq, low=seq - 1, stamp_ms=seq)
    assert single.machine.digest() == double.machine.digest()
    assert encode(single.events) == encode(double.events)
