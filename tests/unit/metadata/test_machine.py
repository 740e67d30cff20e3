"""What applying a command means: keys, revisions, transactions, counters, limits."""

from __future__ import annotations

import pytest

from sava.metadata.commands import (
    AllocateId,
    AllocateResult,
    CommandRefused,
    Compare,
    Delete,
    DeletePrefix,
    DeleteResult,
    Done,
    Get,
    GetResult,
    KeyValue,
    LeaseGrant,
    LeaseTouch,
    Operation,
    Proposal,
    Put,
    PutResult,
    Relation,
    SessionOpen,
    SetVersion,
    Target,
    Txn,
    TxnResult,
    decode_proposal,
    encode,
)
from sava.metadata.errors import InvalidRequest, UnknownCommand, refusal
from sava.metadata.machine.state_machine import Limits, StateMachine, rolling_digest
from tests.unit.metadata.steps import TERM, Steps, absent, unchanged

SMALL = Limits(
    max_key_bytes=16, max_value_bytes=10, max_txn_operations=3, max_txn_bytes=30, max_total_bytes=40
)


def test_a_key_has_its_own_history_and_the_store_has_one_revision() -> None:
    """Danger: one number used as 'version' and as 'revision', rewritten on every put."""
    steps = Steps()
    assert [steps.put("/a"), steps.put("/b"), steps.put("/a", b"2")] == [1, 2, 3]
    assert steps.machine.get("/a") == KeyValue("/a", b"2", create_revision=1, mod_revision=3, version=2)
    steps.delete("/a")
    steps.put("/a", b"3")
    assert steps.machine.get("/a") == KeyValue("/a", b"3", create_revision=5, mod_revision=5, version=1)


def test_the_revision_survives_a_restart_and_never_goes_back() -> None:
    """Danger: a revision derived from the log or from the keys repeats after a snapshot, and watchers skip
    real events."""
    steps = Steps()
    steps.put("/a")
    steps.delete("/a")
    again = steps.restarted()
    assert again.machine.revision == 2
    assert again.put("/a") == 3


def test_force_new_cluster_jumps_ahead_of_what_the_lost_one_gave_out() -> None:
    steps = Steps()
    steps.put("/a")
    lease, session = steps.grant(), steps.session()
    steps.machine.bump_revision(1_000)
    assert steps.put("/a") == 1_002
    assert steps.grant() > lease + 999
    assert steps.session(b"other") > session + 999


def test_deleting_nothing_changes_nothing() -> None:
    """Danger: a revision without a change makes every watcher's gap detection meaningless."""
    steps = Steps()
    assert steps.delete("/a") == TxnResult(True, 0, (DeleteResult(()),))
    assert steps.delete_prefix("/a/").revision == 0
    steps.txn(Put("/a", b""), Delete("/a"))
    assert (steps.machine.revision, steps.events) == (0, [])


@pytest.mark.parametrize("value", [b'{"a": 1, "b": 1.0}', b'{"b":1,"a":1}', b"", b"\0\xff"])
def test_values_are_opaque_bytes(value: bytes) -> None:
    """Danger: values parsed as JSON compare equal or different by spelling."""
    steps = Steps()
    steps.put("/a", value)
    assert steps.restarted().machine.get("/a") == KeyValue("/a", value, 1, 1, 1)


def test_s66_a_value_that_went_a_b_a_does_not_pass() -> None:
    """Danger: compare by value. A reader saw 'free'; meanwhile it was taken and freed again; its swap must
    fail."""
    steps = Steps()
    seen = steps.put("/owner", b"free")
    steps.put("/owner", b"taken")
    steps.put("/owner", b"free")
    swap = steps.txn(Put("/owner", b"mine"), compare=(unchanged("/owner", seen),), otherwise=(Get("/owner"),))
    assert swap == TxnResult(False, 3, (GetResult(steps.machine.get("/owner")),))
    assert steps.machine.get("/owner") == KeyValue("/owner", b"free", 1, 3, 3)


def test_s66_of_two_writers_with_the_same_revision_one_wins() -> None:
    steps = Steps()
    seen = steps.put("/owner", b"free")
    first = steps.txn(Put("/owner", b"1"), compare=(unchanged("/owner", seen),))
    second = steps.txn(Put("/owner", b"2"), compare=(unchanged("/owner", seen),))
    assert (first.succeeded, second.succeeded) == (True, False)
    assert second.revision == first.revision


@pytest.mark.parametrize(
    ("target", "actual"),
    [(Target.VERSION, 2), (Target.CREATE_REVISION, 1), (Target.MOD_REVISION, 2), (Target.LEASE, 0)],
)
@pytest.mark.parametrize("operand", range(4))
def test_each_comparison_reads_its_own_number(target: Target, actual: int, operand: int) -> None:
    steps = Steps()
    steps.put("/a")
    steps.put("/a")
    expected = {
        Relation.EQUAL: actual == operand,
        Relation.NOT_EQUAL: actual != operand,
        Relation.LESS: actual < operand,
        Relation.GREATER: actual > operand,
    }
    for relation, holds in expected.items():
        assert steps.txn(compare=(Compare("/a", target, relation, operand),)).succeeded is holds


def test_absent_means_zero_and_every_comparison_must_hold() -> None:
    steps = Steps()
    steps.put("/a")
    assert steps.txn(Put("/b", b""), compare=(absent("/b"),)).succeeded
    assert not steps.txn(Put("/c", b""), compare=(absent("/c"), absent("/a"))).succeeded
    assert steps.machine.get("/c") is None


def test_comparison_by_lease_tells_whose_registration_it_is() -> None:
    steps = Steps()
    mine, other = steps.grant(), steps.grant()
    steps.put("/r", b"", mine)
    assert steps.txn(compare=(Compare("/r", Target.LEASE, Relation.EQUAL, mine),)).succeeded
    assert not steps.txn(compare=(Compare("/r", Target.LEASE, Relation.EQUAL, other),)).succeeded


def test_a_transaction_is_one_revision_and_one_batch_sorted_by_key() -> None:
    """Danger: create, assign, move touch several keys; a reader or a crash between them sees half."""
    steps = Steps()
    steps.put("/b")
    result = steps.txn(Put("/c", b"1"), Delete("/b"), Put("/a", b"1"))
    assert result.revision == 2
    assert [(event.revision, event.key) for event in steps.events[-1]] == [(2, "/a"), (2, "/b"), (2, "/c")]
    deletion = steps.events[-1][1]
    assert deletion.kv is None
    assert deletion.prev == KeyValue("/b", b"v", 1, 1, 1)


def test_a_refused_operation_refuses_the_whole_transaction() -> None:
    steps = Steps()
    before = steps.machine.digest()
    assert steps.refused(Put("/a", b"1"), Put("/b", b"1", lease=7)) == "lease_not_found"
    assert steps.machine.digest() == before


def test_later_operations_see_earlier_ones_and_a_key_has_one_final_event() -> None:
    steps = Steps()
    result = steps.txn(
        Put("/a", b"1"),
        Get("/a"),
        Put("/a", b"2"),
        AllocateId("/n"),
        AllocateId("/n", 2),
        DeletePrefix("/x/"),
    )
    one, two = KeyValue("/a", b"1", 1, 1, 1), KeyValue("/a", b"2", 1, 1, 2)
    assert result.results == (
        PutResult(None),
        GetResult(one),
        PutResult(one),
        AllocateResult(1, 1),
        AllocateResult(2, 2),
        DeleteResult(()),
    )
    assert [(event.key, event.kv, event.prev) for event in steps.events[0]] == [
        ("/a", two, None),
        ("/n", KeyValue("/n", b"3", 1, 1, 2), None),
    ]


def test_delete_then_put_in_one_transaction_creates_anew() -> None:
    steps = Steps()
    steps.put("/a")
    steps.put("/a")
    steps.txn(Delete("/a"), Put("/a", b"new"))
    assert steps.machine.get("/a") == KeyValue("/a", b"new", 3, 3, 1)


def test_prefix_deletion_stops_at_the_segment_and_is_one_batch() -> None:
    """Danger: deleting '/a' also hits '/ab'; events in the order of a hash table; many revisions for one
    deletion."""
    steps = Steps()
    for key in ("/ab", "/a", "/a/2", "/a/1/x", "/a0", "/a/1"):
        steps.put(key)
    result = steps.txn(Put("/a/0", b"in the same transaction"), DeletePrefix("/a/"))
    gone = result.results[1]
    assert isinstance(gone, DeleteResult)
    assert [kv.key for kv in gone.prev] == ["/a/0", "/a/1", "/a/1/x", "/a/2"]
    assert steps.keys() == ["/a", "/a0", "/ab"]
    assert [(event.revision, event.key) for event in steps.events[-1]] == [
        (7, "/a/1"),
        (7, "/a/1/x"),
        (7, "/a/2"),
    ]


def test_a_prefix_without_slash_is_refused_even_when_it_reached_the_log() -> None:
    steps = Steps()
    steps.put("/ab")
    assert steps.refused(DeletePrefix("/a")) == "invalid"
    assert steps.keys() == ["/ab"]


@pytest.mark.parametrize("limits", [Limits(max_delete_keys=2), Limits(max_delete_bytes=12)])
def test_prefix_deletion_has_a_size_cap(limits: Limits) -> None:
    """Danger: one command whose events are one indivisible batch of any size."""
    steps = Steps(limits)
    for name in "abc":
        steps.put(f"/x/{name}")
    assert steps.refused(DeletePrefix("/x/")) == "invalid"
    assert len(steps.keys("/x/")) == 3
    steps.delete("/x/a")
    steps.delete_prefix("/x/")
    assert steps.keys() == []


def test_ranges_end_at_the_segment_and_page() -> None:
    """Danger: broker 1 sees the keys of broker 12."""
    steps = Steps()
    for key in ("/b/1/x", "/b/12/x", "/b/1/y", "/b/1"):
        steps.put(key)
    assert steps.keys("/b/1/") == ["/b/1/x", "/b/1/y"]
    assert steps.keys("/b/1") == ["/b/1"]
    first, more = steps.machine.range("/", limit=3)
    assert ([kv.key for kv in first], more) == (["/b/1", "/b/1/x", "/b/1/y"], True)
    rest, more = steps.machine.range("/", limit=3, start_after="/b/1/y")
    assert ([kv.key for kv in rest], more) == (["/b/12/x"], False)
    assert steps.machine.range("/b/1", start_after="/b/1") == ((), False)


def test_keys_are_ordered_as_their_encoded_bytes() -> None:
    steps = Steps()
    for key in ("/😀", "/ab", "/\ue000", "/ä"):
        steps.put(key)
    assert steps.keys() == sorted(steps.keys(), key=str.encode)


def test_ids_are_unique_also_across_a_restart_and_a_retry() -> None:
    """Danger: an allocation that is repeated after a lost answer gives two owners of one id, or a counter
    outside the snapshot."""
    steps = Steps()
    session = steps.session()
    command = Txn(then=(AllocateId("/ids/schema"),))
    first = steps.apply(command, session=session, seq=1)
    assert steps.apply(command, session=session, seq=1) == first
    again = steps.restarted()
    assert again.apply(command, session=session, seq=1) == first
    assert again.txn(AllocateId("/ids/schema", 10)).results == (AllocateResult(2, 10),)
    assert again.txn(AllocateId("/ids/schema")).results == (AllocateResult(12, 1),)


@pytest.mark.parametrize("value", [b"x", b"-1", b"", b" 1", b"9" * 30, str((1 << 63) - 1).encode()])
def test_a_counter_that_cannot_count_is_refused(value: bytes) -> None:
    steps = Steps()
    steps.put("/n", value)
    assert steps.refused(AllocateId("/n")) == "invalid"
    assert steps.refused(Put("/m", b""), AllocateId("/m2", 0)) == "invalid"
    assert steps.keys() == ["/n"]


def test_a_full_store_refuses_growth_and_still_deletes() -> None:
    """Danger: a store that is full refuses the very deletes that would make room."""
    steps = Steps(SMALL)
    steps.put("/a", b"x" * 10)
    steps.put("/b", b"x" * 10)
    steps.put("/c", b"x" * 10)
    assert steps.machine.total_bytes == 36
    assert steps.refused(Put("/d", b"xxx")) == "no_space"
    assert steps.refused(Get("/a"), Put("/d", b"xxx")) == "no_space"
    assert steps.refused(Put("/d", b"xxx"), AllocateId("/n")) == "no_space"
    steps.put("/a", b"y" * 10)
    steps.put("/d", b"xx")
    assert steps.machine.total_bytes == 40
    swap = steps.txn(Delete("/a"), Put("/e", b"x" * 10))
    assert swap.succeeded
    steps.delete("/e")
    assert steps.machine.total_bytes == 28


def test_total_bytes_follow_the_content_through_everything() -> None:
    steps = Steps()
    for i in range(50):
        steps.put(f"/k/{i % 7}/ä", b"x" * i)
        steps.txn(Delete(f"/k/{(i * 3) % 7}/ä"), Put("/n", b"y" * (i % 5)))
    expected = sum(len(kv.key.encode()) + len(kv.value) for kv in steps.machine.range("/")[0])
    assert steps.machine.total_bytes == expected == steps.restarted().machine.total_bytes
    assert steps.machine.key_count == len(steps.keys())


def test_a_deposed_leader_cannot_act() -> None:
    """Danger: 'I am the leader' was true when asked and false when the command reached the log."""
    steps = Steps()
    command = Txn(then=(Put("/assign", b""),))
    refused = steps.apply(command, fence_term=TERM - 1)
    assert isinstance(refused, CommandRefused)
    assert (refused.code, refused.detail, steps.machine.revision) == ("deposed", TERM, 0)
    assert isinstance(steps.apply(command, fence_term=TERM), TxnResult)


def test_an_unknown_command_stops_the_node() -> None:
    """Danger: a node of an older version skips what it cannot read and silently differs from then on."""
    known = encode(Proposal(SetVersion(2)))
    with pytest.raises(UnknownCommand):
        decode_proposal(known.replace(b"\x92\x11", b"\x92\x7f", 1))


def test_the_cluster_version_only_rises() -> None:
    steps = Steps()
    assert steps.apply(SetVersion(2)) == Done(True, 0)
    assert steps.apply(SetVersion(1)) == Done(False, 0)
    assert steps.apply(SetVersion(2)) == Done(False, 0)
    assert steps.restarted().machine.version == 2


def test_the_clock_is_the_largest_stamp() -> None:
    """Apply sees no clock; a leader whose clock is behind does not turn it back."""
    steps = Steps()
    for stamp in (10, 30, 20):
        steps.apply(Txn(), stamp_ms=stamp)
    assert steps.machine.clock_ms == 30 == steps.restarted().machine.clock_ms


@pytest.mark.parametrize(
    ("operations", "complaint"),
    [
        ((Put("a", b""),), "key 'a' must begin with '/'"),
        ((Put("/a/", b""),), "key '/a/' must not end in '/'"),
        ((Put("", b""),), "must begin with"),
        ((Put("/", b""),), "must not end"),
        ((Get("/a//b"),), "empty segment"),
        ((Delete("/a\0"),), "NUL"),
        ((Put("/\ud800", b""),), r"key '/\\ud800' is not valid UTF-8"),
        ((Put("/" + "a" * 16, b""),), "has 17 bytes; the limit is 16"),
        ((Put("/" + "ä" * 8, b""),), "has 17 bytes; the limit is 16"),
        ((Put("/a", b"x" * 11),), "value of key '/a' has 11 bytes; the limit is 10"),
        ((DeletePrefix("/a"),), "prefix '/a' must end in '/'"),
        ((AllocateId("/a", 0),), "cannot allocate 0 ids from key '/a'"),
        ((Put("/a", b"", -1),), "lease of key '/a' -1"),
        ((Get("/a"),) * 4, "4 comparisons and operations in one transaction; the limit is 3"),
        ((Put("/a", b"x" * 10), Put("/b", b"x" * 10), Put("/c", b"x" * 5)), "31 bytes; the limit is 30"),
    ],
)
def test_limits_are_checked_before_proposing_and_named(
    operations: tuple[Operation, ...], complaint: str
) -> None:
    """Danger: a value of a gigabyte in the log stalls every heartbeat behind it."""
    machine = StateMachine(SMALL)
    for proposal in (Proposal(Txn(then=operations)), Proposal(Txn(otherwise=operations))):
        with pytest.raises(InvalidRequest, match=complaint):
            machine.check(proposal)


@pytest.mark.parametrize(
    "proposal",
    [
        Proposal(LeaseGrant(499)),
        Proposal(LeaseGrant(3_600_001)),
        Proposal(LeaseTouch(0)),
        Proposal(SessionOpen(b"")),
        Proposal(SessionOpen(b"x" * 65)),
        Proposal(SetVersion(-1)),
        Proposal(Txn(), stamp_ms=-1),
        Proposal(Txn(), session=1),
        Proposal(Txn((Compare("a", Target.VERSION, Relation.EQUAL, 0),))),
        Proposal(Txn((Compare("/a", Target.VERSION, Relation.EQUAL, -1),))),
    ],
)
def test_other_proposals_have_limits_too(proposal: Proposal) -> None:
    with pytest.raises(InvalidRequest):
        StateMachine().check(proposal)


def test_what_is_allowed_passes_the_check() -> None:
    machine = StateMachine(SMALL)
    machine.check(Proposal(Txn((absent("/a"),), (Put("/a", b"x" * 10), DeletePrefix("/"))), session=1, seq=1))
    machine.check(Proposal(LeaseGrant(500)))
    machine.check(Proposal(SessionOpen(b"n")))


def test_every_refusal_has_its_error_type() -> None:
    assert refusal("lease_not_found", "", 7).__dict__ == {"lease": 7}
    assert refusal("compacted", "", 7).__dict__ == {"floor": 7}
    assert type(refusal("no_space", "full")).__name__ == "NoSpace"
    assert type(refusal("request_forgotten", "")).__name__ == "RequestForgotten"
    assert type(refusal("from the future", "")).__name__ == "InvalidRequest"


def test_the_rolling_digest_tells_two_histories_apart() -> None:
    one, other = StateMachine(), StateMachine()
    put = Proposal(Txn(then=(Put("/a", b"1"),)))
    start = b""
    same = rolling_digest(start, one.apply(put, TERM))
    assert same == rolling_digest(start, other.apply(put, TERM))
    different = other.apply(Proposal(Txn(then=(Put("/a", b"2"),))), TERM)
    assert rolling_digest(same, one.apply(put, TERM)) != rolling_digest(same, different)
