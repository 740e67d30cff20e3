"""Acks: few ranges for many messages, and none of them lost with a stream."""

from __future__ import annotations

from sava.client.acks import AckBook, coalesced


def test_acks_in_order_are_one_range() -> None:
    book = AckBook()
    for offset in range(5, 1005):
        book.add(offset)
    assert book.take(receipt=False) == ([5, 1005], 0)
    assert book.is_empty


def test_acks_in_any_order_become_the_fewest_ranges() -> None:
    book = AckBook()
    for offset in (3, 0, 1, 9, 2, 8):
        book.add(offset)
    book.add_range(20, 30)
    assert book.take(receipt=False) == ([0, 4, 8, 10, 20, 30], 0)


def test_a_receipt_confirms_everything_before_it() -> None:
    book = AckBook()
    book.add(0)
    book.take(receipt=False)
    assert not book.is_confirmed
    book.add(1)
    assert book.take(receipt=True) == ([1, 2], 1)
    book.add(2)
    assert book.take(receipt=True) == ([2, 3], 2)
    book.stored(1)
    assert not book.is_confirmed
    book.stored(2)
    assert book.is_confirmed


def test_what_is_not_confirmed_is_sent_again_after_a_break() -> None:
    book = AckBook()
    book.add(0)
    book.take(receipt=True)
    book.stored(1)
    book.add(1)
    book.take(receipt=True)
    book.add(2)
    book.take(receipt=False)
    book.add(3)
    book.add(7)
    assert book.rewind() == [(1, 4), (7, 8)]
    assert book.take(receipt=True) == ([1, 4, 7, 8], 3)


def test_ranges_that_touch_or_overlap_are_joined() -> None:
    assert coalesced([(5, 6), (0, 2), (2, 4), (3, 5), (8, 9)]) == [(0, 6), (8, 9)]
