"""Acks: few ranges for many messages, and none of them lost with a stream."""

from __future__ import annotations

from sava.client.subscribe_stream import AckTracker, coalesced


def test_acks_in_order_are_one_range() -> None:
    acks = AckTracker()
    for offset in range(5, 1005):
        acks.add(offset)
    assert acks.take(receipt=False) == ([5, 1005], 0)
    assert acks.is_empty


def test_acks_in_any_order_become_the_fewest_ranges() -> None:
    acks = AckTracker()
    for offset in (3, 0, 1, 9, 2, 8):
        acks.add(offset)
    acks.add_range(20, 30)
    assert acks.take(receipt=False) == ([0, 4, 8, 10, 20, 30], 0)


def test_a_receipt_confirms_everything_before_it() -> None:
    acks = AckTracker()
    acks.add(0)
    acks.take(receipt=False)
    assert not acks.is_confirmed
    acks.add(1)
    assert acks.take(receipt=True) == ([1, 2], 1)
    acks.add(2)
    assert acks.take(receipt=True) == ([2, 3], 2)
    acks.stored(1)
    assert not acks.is_confirmed
    acks.stored(2)
    assert acks.is_confirmed


def test_what_is_not_confirmed_is_sent_again_after_a_break() -> None:
    acks = AckTracker()
    acks.add(0)
    acks.take(receipt=True)
    acks.stored(1)
    acks.add(1)
    acks.take(receipt=True)
    acks.add(2)
    acks.take(receipt=False)
    acks.add(3)
    acks.add(7)
    assert acks.rewind() == [(1, 4), (7, 8)]
    assert acks.take(receipt=True) == ([1, 4, 7, 8], 3)


def test_ranges_that_touch_or_overlap_are_joined() -> None:
    assert coalesced([(5, 6), (0, 2), (2, 4), (3, 5), (8, 9)]) == [(0, 6), (8, 9)]
