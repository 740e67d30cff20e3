"""Stories of dispatch by itself: what happens while a read is under way, and what is kept."""

from __future__ import annotations

from sava.topics.cursors import SubscriptionCursor
from sava.topics.dispatch.core import MAX_FRAGMENTS, UNLIMITED, Dispatcher, Pace, Page, SliceDispatch
from sava.topics.dispatch.key_shared import KeySharedDispatch
from sava.topics.dispatch.members import DispatchMember, Failures, Flight
from sava.topics.specs import CursorRecord, SubscriptionType
from tests.unit.topics.memory_log import spec_of

FAILOVER, KEY_SHARED = SubscriptionType.FAILOVER, SubscriptionType.KEY_SHARED


def dispatch(kind: SubscriptionType, **options: int) -> Dispatcher:
    made = KeySharedDispatch if kind is KEY_SHARED else SliceDispatch
    return made(spec_of(kind, **options), SubscriptionCursor(CursorRecord(0)), Pace(lambda: 0))  # type: ignore[arg-type]


def page(start: int, end: int, keys: str = "") -> Page:
    """Of messages whose keys are these letters, over and over."""
    return Page(
        start,
        end,
        end - start,
        end - start,
        lambda first, last: [keys[n % len(keys)] for n in range(first, last)],
    )


def offsets(flights: list[Flight]) -> list[int]:
    return [offset for flight in flights for start, end in flight.ranges for offset in range(start, end)]


def test_what_became_ready_during_a_read_comes_first() -> None:
    core = dispatch(FAILOVER)
    first, second = DispatchMember("a", credits=4), DispatchMember("b", credits=100)
    core.attach(first)
    core.attach(second)
    assert offsets(core.offer(page(0, 10), 0.0)) == [0, 1, 2, 3]

    core.detach(first)
    assert core.offer(page(4, 10), 0.0) == [], "a page that was asked for before the first one left"
    assert core.wanted(10, 0.0) == 0
    assert offsets(core.offer(page(0, 10), 0.0)) == list(range(10))


def test_what_is_to_be_sent_again_is_sent_in_order_whatever_was_read() -> None:
    core = dispatch(FAILOVER)
    member = DispatchMember("a", credits=10)
    core.attach(member)
    core.offer(page(0, 10), 0.0)
    core.nack([(1, 2), (6, 7)], 0.0)
    member.credits = 1
    assert core.offer(page(5, 12), 0.0) == []
    assert offsets(core.offer(page(0, 12), 0.0)) == [1]
    member.credits = 100
    assert offsets(core.offer(page(5, 12), 0.0)) == [6, 10, 11]


def test_a_page_read_before_the_subscription_was_blocked_is_not_sent() -> None:
    core = dispatch(FAILOVER, max_redelivery_count=0)
    core.attach(DispatchMember("a", credits=100))
    core.offer(page(0, 4), 0.0)
    core.nack([(0, 1)], 0.0)
    assert core.offer(page(4, 8), 0.0) == []
    core.ack([(0, 1)])
    assert offsets(core.offer(page(4, 8), 0.0)) == [4, 5, 6, 7]


def test_a_blocked_key_keeps_back_what_only_waited_for_credits() -> None:
    core = dispatch(KEY_SHARED, max_redelivery_count=0)
    member = DispatchMember("a", credits=2)
    core.attach(member)
    core.offer(page(0, 4, "xy"), 0.0)
    core.nack([(0, 1)], 0.0)
    member.credits = 100
    assert offsets(core.offer(page(0, 4, "xy"), 0.0)) == [3], "of y, and not 2, which is of x"
    assert core.wanted(4, 0.0) is None
    core.ack([(0, 1)])
    assert offsets(core.offer(page(2, 4, "xy"), 0.0)) == [2]


def test_the_same_for_the_keys_of_a_member() -> None:
    core = dispatch(KEY_SHARED)
    member = DispatchMember("a", credits=2)
    core.attach(member)
    assert offsets(core.offer(page(0, 8, "xy"), 0.0)) == [0, 1]
    member.credits = 100

    assert core.offer(page(4, 8, "xy"), 0.0) == [], "2 and 3 come before"
    core.nack([(0, 1)], 0.0)
    assert core.wanted(8, 0.0) == 0
    assert core.offer(page(2, 8, "xy"), 0.0) == [], "and so does 0, which is to be sent again"
    assert offsets(core.offer(page(0, 8, "xy"), 0.0)) == [0, 3, 5, 7], "of x nothing new until 0 is acked"
    core.ack([(0, 1)])
    assert offsets(core.offer(page(0, 8, "xy"), 0.0)) == [2, 4, 6]


def test_a_page_of_before_a_seek_is_of_no_use() -> None:
    core = dispatch(FAILOVER)
    core.attach(DispatchMember("a", credits=100))
    core.seek(50)
    assert core.offer(page(0, 10), 0.0) == []
    assert offsets(core.offer(page(48, 52), 0.0)) == [50, 51]


def test_scattered_acks_close_the_window() -> None:
    core = dispatch(FAILOVER)
    core.attach(DispatchMember("a", credits=1_000_000))
    core.offer(page(0, 3 * MAX_FRAGMENTS), 0.0)
    core.ack([(n, n + 1) for n in range(1, 3 * MAX_FRAGMENTS, 2)])
    assert core.wanted(1_000_000, 0.0) is None
    core.ack([(0, 2 * MAX_FRAGMENTS)])
    assert core.wanted(1_000_000, 0.0) == 3 * MAX_FRAGMENTS


def test_a_pace_is_kept_and_follows_its_rate() -> None:
    rate = 100
    pace = Pace(lambda: rate)
    assert pace.allowance(0.0) == 10, "a tenth of a second's worth"
    pace.spend(10)
    assert pace.allowance(0.0) == 0
    assert pace.ready_at(0.0) == 0.02, "two messages are worth a turn"
    assert pace.allowance(0.05) == 5
    rate = 0
    assert pace.allowance(0.05) == UNLIMITED
    assert pace.ready_at(0.05) is None


def test_delays_of_messages_that_were_acked_are_not_kept_for_long() -> None:
    failures = Failures()
    for offset in range(10_000):
        failures.wait(offset, offset + 1, 60.0 + offset)
        failures.forget(offset, offset + 1)
    assert len(failures._due) < 100
    failures.wait(5, 8, 1.0)
    failures.wait(6, 7, 2.0)
    assert failures.pop_due(1.0) == [(5, 6), (7, 8)]
    assert failures.pop_due(2.0) == [(6, 7)]
