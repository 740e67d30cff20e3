"""A member: prefixes only, nothing said before it is durable, and what a restart makes of its disk."""

from __future__ import annotations

from sava.ledger.protocol.member import (
    CopyState,
    Durable,
    Fence,
    FenceAnswer,
    Join,
    JoinAnswer,
    LedgerAppend,
    LedgerMember,
    LedgerRefused,
    MemberNote,
    RefusalReason,
    Trim,
    WriteBack,
    decode,
    encode,
    held_after_restart,
)
from sava.ledger.protocol.record import LedgerId, Range, StorageId

JOURNAL = LedgerId(1, 1)
DISK = StorageId("disk")


def joined(start: int = 0) -> LedgerMember:
    member = LedgerMember(DISK, MemberNote(ledger=JOURNAL))
    assert member.receive(Join(JOURNAL, DISK, 0, start, 0)) == [JoinAnswer(JOURNAL, DISK, start, 0)]
    settle(member)
    return member


def settle(member: LedgerMember) -> list[object]:
    said: list[object] = []
    while (work := member.poll()) is not None:
        said += member.done(work.number)
    return said


def append(position: int, size: int, *, epoch: int = 0) -> LedgerAppend:
    return LedgerAppend(JOURNAL, DISK, epoch, position, bytes(size))


def refused(reason: RefusalReason, *, epoch: int = 0, end: int = 0) -> list[LedgerRefused]:
    return [LedgerRefused(JOURNAL, DISK, reason, epoch, end)]


def test_bytes_are_taken_in_order_and_said_to_be_durable_after_the_sync() -> None:
    member = joined()
    assert member.receive(append(0, 10)) == []
    assert member.receive(append(20, 10)) == refused(RefusalReason.GAP, end=10)
    assert member.receive(append(5, 10)) == []
    work = member.poll()
    assert work is not None
    assert work.writes == ((0, bytes(10)), (10, bytes(5)))
    assert member.done(work.number) == [Durable(JOURNAL, DISK, 15)]


def test_a_fence_is_stored_behind_what_was_taken_and_then_answered() -> None:
    member = joined()
    member.receive(append(0, 10))
    assert member.receive(Fence(JOURNAL, DISK, 1)) == []
    assert member.receive(append(10, 10)) == refused(RefusalReason.FENCED, epoch=1, end=10)
    work = member.poll()
    assert work is not None
    assert work.note is not None
    assert (work.note.fence, work.note.watermark) == (1, 10)
    assert FenceAnswer(JOURNAL, DISK, 1, CopyState(0, 0, 10, 0)) in member.done(work.number)


def test_a_disk_that_never_heard_of_the_journal_is_fenced_too() -> None:
    member = LedgerMember(DISK, MemberNote(ledger=JOURNAL))
    member.receive(Fence(JOURNAL, DISK, 3))
    assert settle(member) == [FenceAnswer(JOURNAL, DISK, 3, None)]
    assert member.receive(Join(JOURNAL, DISK, 0, 0, 0)) == refused(RefusalReason.FENCED, epoch=3)


def test_a_fence_outlives_the_process() -> None:
    note = MemberNote(ledger=JOURNAL, fence=2, base=0, watermark=10)
    member = LedgerMember(DISK, note, end=10)
    assert member.receive(append(10, 10, epoch=1)) == refused(RefusalReason.FENCED, epoch=2, end=10)


def test_a_fenced_disk_keeps_what_it_said_it_has() -> None:
    member = joined()
    member.receive(append(0, 10))
    member.receive(Fence(JOURNAL, DISK, 1))
    settle(member)
    assert member.receive(Trim(JOURNAL, DISK, 0, 10)) == refused(RefusalReason.FENCED, epoch=1, end=10)


def test_nobody_speaks_for_another_disk() -> None:
    message = Fence(JOURNAL, StorageId("the one before"), 1)
    assert joined().receive(message) == refused(RefusalReason.OTHER_DISK)


def test_a_full_disk_takes_back_the_writes_and_keeps_the_fence() -> None:
    member = joined()
    member.receive(append(0, 10))
    settle(member)
    member.receive(append(10, 10))
    member.receive(Fence(JOURNAL, DISK, 1))
    work = member.poll()
    assert work is not None
    assert member.refuse(work.number) == refused(RefusalReason.FULL, epoch=1, end=10)
    assert settle(member) == [FenceAnswer(JOURNAL, DISK, 1, CopyState(0, 0, 10, 0))]


def test_without_room_for_the_note_the_writes_count_and_the_fence_waits() -> None:
    member = joined()
    member.receive(append(0, 10))
    member.receive(Fence(JOURNAL, DISK, 1))
    work = member.poll()
    assert work is not None
    assert member.done(work.number, is_noted=False) == [Durable(JOURNAL, DISK, 10)]
    assert settle(member) == [FenceAnswer(JOURNAL, DISK, 1, CopyState(0, 0, 10, 0))]


def test_a_copy_that_the_owner_cannot_continue_begins_anew() -> None:
    member = joined()
    member.receive(append(0, 10))
    settle(member)
    assert member.receive(Join(JOURNAL, DISK, 0, 50, 40)) == [JoinAnswer(JOURNAL, DISK, 50, 10)]
    work = member.poll()
    assert work is not None
    assert work.base == 50
    # Nothing may follow for long: an owner that heard no more would take the mirror for stuck, and drop it.
    assert member.done(work.number) == [Durable(JOURNAL, DISK, 50)]


def test_a_new_beginning_that_finds_no_room_leaves_the_old_copy_as_it_was() -> None:
    """Else the note would tell a floor behind the end, and a restart take the floor for the end."""
    member = joined()
    member.receive(append(0, 10))
    settle(member)
    member.receive(Join(JOURNAL, DISK, 0, 50, 40))
    work = member.poll()
    assert work is not None
    member.refuse(work.number)
    member.receive(Fence(JOURNAL, DISK, 1))
    work = member.poll()
    assert work is not None
    assert work.note is not None
    assert (work.note.base, work.note.watermark) == (0, 10)
    assert work.note.floor <= 10


def test_writing_back_continues_under_the_epoch_of_the_fence_only() -> None:
    member = joined()
    member.receive(append(0, 10))
    member.receive(Fence(JOURNAL, DISK, 2))
    settle(member)
    stale = WriteBack(JOURNAL, DISK, 1, 10, b"x")
    assert member.receive(stale) == refused(RefusalReason.FENCED, epoch=2, end=10)
    member.receive(WriteBack(JOURNAL, DISK, 2, 4, bytes(2)))
    member.receive(WriteBack(JOURNAL, DISK, 2, 10, bytes(5)))
    assert settle(member) == [Durable(JOURNAL, DISK, 15)]


def test_after_a_restart_bad_bytes_below_the_mark_are_damage() -> None:
    """Bad bytes above the mark are a torn write."""
    note = MemberNote(ledger=JOURNAL, base=0, watermark=50)
    kept = held_after_restart(note, [Range(0, 20), Range(30, 60), Range(70, 80)])
    assert (kept.end, kept.bad) == (60, (Range(20, 30),))
    kept = held_after_restart(note, [Range(0, 20)])
    assert (kept.end, kept.bad) == (50, (Range(20, 50),))


def test_messages_survive_their_encoding() -> None:
    for message in (
        FenceAnswer(JOURNAL, DISK, 1, CopyState(1, 2, 3, 4)),
        FenceAnswer(JOURNAL, DISK, 1, None),
        LedgerAppend(JOURNAL, DISK, 0, 8, b"data", 4, 2),
        LedgerRefused(JOURNAL, DISK, RefusalReason.GAP, 1, 2),
    ):
        assert decode(encode(message)) == message
