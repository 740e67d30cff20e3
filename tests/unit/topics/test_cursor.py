"""Stories of a cursor: what is acked, and what the metadata store knows of it."""

from __future__ import annotations

import pytest

from sava.topics.cursors import SubscriptionCursor
from sava.topics.errors import ConsumerClosed
from sava.topics.specs import CursorRecord


def test_it_moves_over_what_is_acked_without_a_gap() -> None:
    cursor = SubscriptionCursor(CursorRecord(10))
    assert cursor.ack(12, 14) == 2
    assert (cursor.next_offset, cursor.acked_beyond) == (10, 2)
    assert cursor.unacked(0, 20) == [(10, 12), (14, 20)]

    assert cursor.ack(10, 13) == 2
    assert (cursor.next_offset, cursor.acked_beyond) == (14, 0)


def test_an_ack_of_what_is_acked_changes_nothing() -> None:
    cursor = SubscriptionCursor(CursorRecord(10, (12, 14)))
    assert cursor.ack(3, 9) == 0
    assert cursor.ack(12, 14) == 0
    assert not cursor.is_dirty


def test_a_record_holds_what_lies_beyond_the_gap_and_is_taken_up_again() -> None:
    cursor = SubscriptionCursor(CursorRecord(0))
    cursor.ack(0, 5)
    cursor.ack(7, 9)
    cursor.ack(20, 21)
    record = cursor.record(epoch=3)
    assert record == CursorRecord(5, (7, 9, 20, 21), 3)

    again = SubscriptionCursor(record)
    assert again.unacked(0, 30) == [(5, 7), (9, 20), (21, 30)]
    assert again.is_acked(8)
    assert not again.is_acked(9)


def test_a_record_whose_ranges_begin_at_its_offset_is_one_range() -> None:
    assert SubscriptionCursor(CursorRecord(5, (5, 9))).next_offset == 9


async def test_who_waits_is_told_when_what_it_acked_is_stored() -> None:
    cursor = SubscriptionCursor(CursorRecord(0))
    assert cursor.acks_stored().done()

    cursor.ack(0, 5)
    first = cursor.acks_stored()
    record = cursor.record(1)
    cursor.ack(5, 6)
    second = cursor.acks_stored()
    assert not first.done()

    cursor.mark_stored(record)
    assert first.done()
    assert not second.done()
    assert cursor.is_dirty

    cursor.mark_stored(cursor.record(1))
    assert second.done()
    assert not cursor.is_dirty


async def test_an_older_record_that_is_stored_late_takes_nothing_back() -> None:
    cursor = SubscriptionCursor(CursorRecord(0))
    cursor.ack(0, 1)
    old = cursor.record(1)
    cursor.ack(1, 2)
    cursor.mark_stored(cursor.record(1))
    cursor.mark_stored(old)
    assert not cursor.is_dirty


async def test_a_record_from_elsewhere_says_nothing() -> None:
    cursor = SubscriptionCursor(CursorRecord(0))
    cursor.ack(0, 1)
    cursor.mark_stored(CursorRecord(99, (), 1))
    assert cursor.is_dirty


async def test_a_seek_back_is_a_change_to_be_stored() -> None:
    cursor = SubscriptionCursor(CursorRecord(10, (12, 14)))
    cursor.seek(3)
    stored = cursor.acks_stored()
    assert cursor.is_dirty
    assert cursor.record(1) == CursorRecord(3, (), 1)
    cursor.mark_stored(cursor.record(1))
    assert stored.done()


async def test_who_waits_is_told_when_nobody_stores_any_more() -> None:
    cursor = SubscriptionCursor(CursorRecord(0))
    cursor.ack(0, 1)
    stored = cursor.acks_stored()
    cursor.give_up(ConsumerClosed("the topic moves"))
    with pytest.raises(ConsumerClosed):
        await stored


def test_it_says_when_there_is_something_to_store_and_was_not_before() -> None:
    cursor, told = SubscriptionCursor(CursorRecord(0)), []
    cursor.changed = lambda: told.append(cursor.next_offset)
    cursor.ack(0, 1)
    cursor.ack(1, 2)
    cursor.ack(0, 2)
    assert len(told) == 1
    record = cursor.record(1)
    cursor.ack(5, 6)
    cursor.mark_stored(record)
    assert (cursor.is_dirty, len(told)) == (True, 1), "it has not been clean in between"
    cursor.mark_stored(cursor.record(1))
    cursor.notify(7, 3)
    assert len(told) == 2
    cursor.mark_stored(cursor.record(1))
    cursor.notify(7, 3)
    assert len(told) == 2
    cursor.seek(0)
    assert len(told) == 3
