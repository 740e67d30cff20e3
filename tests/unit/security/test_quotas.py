"""Quotas of principals: numbers refuse, rates make wait, and nothing is left behind."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sava.security import quotas
from sava.security.principal import Principal
from sava.security.quotas import EVERY, Bucket, Quota, QuotaExceeded, Quotas

ALICE, BOB = Principal("user", "alice"), Principal("user", "bob")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> list[float]:
    """The pauses that were made; the clock is moved by each."""
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return pauses


# -- rates -------------------------------------------------------------------------------------


def test_a_bucket_lets_a_second_through_at_once_and_then_its_rate() -> None:
    bucket = Bucket(1000, 0.0)
    assert bucket.take(600, 0.0) == 0
    assert bucket.take(400, 0.0) == 0
    assert bucket.take(500, 0.0) == 0  # the room is used up, and no more than that
    assert bucket.take(1, 0.0) == pytest.approx(0.5)
    assert bucket.take(1, 2.0) == 0


def test_a_bucket_that_was_idle_has_a_second_of_room_and_no_more() -> None:
    bucket = Bucket(1000, 0.0)
    assert bucket.take(1000, 100.0) == 0
    assert bucket.take(1000, 100.0) == 0
    assert bucket.take(1, 100.0) == pytest.approx(1)


@given(
    st.integers(1, 10_000),
    st.lists(st.tuples(st.integers(1, 50_000), st.floats(0, 3)), min_size=1, max_size=60),
)
def test_a_bucket_never_lets_more_through_than_its_rate(rate: int, steps: list[tuple[int, float]]) -> None:
    """A publisher that waits as the bucket says has in any time no more than the rate allows, one second's
    worth, and the item that went in last."""
    bucket, now, passed = Bucket(rate, 0.0), 0.0, 0
    for size, pause in steps:
        now += pause
        now += bucket.take(size, now)
        assert passed <= rate * (now + 1) + 1e-6 * passed + 1e-6
        passed += size


async def test_a_publisher_waits_and_is_not_refused(clock: Clock, slept: list[float]) -> None:
    each = Quotas(clock=clock)
    each.set([Quota("user:alice", publish_bytes_per_second=1000)])
    with each.stream(ALICE, "p1") as alice, each.stream(BOB, "p2") as bob:
        for _ in range(10):
            await alice.published(1000)
            await bob.published(1_000_000)
            await alice.consumed(1_000_000)
    assert clock.now == pytest.approx(100 + 8)
    assert sum(slept) == pytest.approx(8)
    assert each.waited_s == {("user:alice", "publish_bytes_per_second"): pytest.approx(8)}
    assert not each.refused


async def test_all_streams_of_a_principal_share_its_rate(clock: Clock, slept: list[float]) -> None:
    each = Quotas(clock=clock)
    each.set([Quota(EVERY, consume_bytes_per_second=1000)])
    with each.stream(ALICE, "p1") as first, each.stream(ALICE, "p2") as second:
        assert first is second
        with each.stream(BOB, "p3") as bob:
            await first.consumed(3000)
            await bob.consumed(1000)  # its own second
            assert not slept
            await second.consumed(1)
    assert slept == [pytest.approx(2)]
    assert each.waited_s == {(EVERY, "consume_bytes_per_second"): pytest.approx(2)}


async def test_a_single_call_waits_a_while_and_is_refused_beyond_it(clock: Clock, slept: list[float]) -> None:
    each = Quotas(clock=clock)
    each.set([Quota("user:alice", publish_bytes_per_second=1000)])
    await each.published_by_call(ALICE, 1000 + 11_000)
    with pytest.raises(QuotaExceeded, match="publish_bytes_per_second"):
        await each.published_by_call(ALICE, 1)
    clock.now += 2
    await each.published_by_call(ALICE, 1)
    assert slept == [pytest.approx(9)]
    assert each.refused == {("user:alice", "publish_bytes_per_second"): 1}


async def test_a_new_quota_holds_for_open_streams(clock: Clock, slept: list[float]) -> None:
    each = Quotas(clock=clock)
    with each.stream(ALICE, "p1") as alice:
        await alice.published(1 << 30)
        each.set([Quota("user:alice", publish_bytes_per_second=10)])
        await alice.published(20)
        await alice.published(1)
        assert slept == [pytest.approx(1)]
        each.set([])
        await alice.published(1 << 30)
        assert len(slept) == 1


async def test_a_quota_that_is_read_again_forgives_no_debt(clock: Clock, slept: list[float]) -> None:
    each = Quotas(clock=clock)
    quota = Quota("user:alice", publish_bytes_per_second=10)
    each.set([quota])
    with each.stream(ALICE, "p1") as alice:
        await alice.published(110)
        each.set([quota, Quota("user:bob", max_streams=1)])
        await alice.published(1)
    assert slept == [pytest.approx(10)]


# -- numbers -----------------------------------------------------------------------------------


def test_streams_are_counted_while_they_are_open() -> None:
    each = Quotas()
    each.set([Quota(EVERY, max_streams=2), Quota("user:bob", max_streams=1)])
    with ExitStack() as open_ones:
        open_ones.enter_context(each.stream(ALICE, "p1"))
        with each.stream(ALICE, "p1"):
            with pytest.raises(QuotaExceeded, match=r"the quota of \* allows \(max_streams\)"):
                open_ones.enter_context(each.stream(ALICE, "p1"))
            open_ones.enter_context(each.stream(BOB, "p2"))
            with pytest.raises(QuotaExceeded, match=r"user:bob has the 1 streams that its quota allows"):
                open_ones.enter_context(each.stream(BOB, "p2"))
        open_ones.enter_context(each.stream(ALICE, "p1"))
    assert each.refused == {(EVERY, "max_streams"): 1, ("user:bob", "max_streams"): 1}
    assert each.usage(ALICE).streams == 0


def test_connections_are_counted_by_peer_while_they_have_streams() -> None:
    each = Quotas()
    each.set([Quota("user:alice", max_connections=2)])
    with each.stream(ALICE, "p1"), each.stream(ALICE, "p2"), each.stream(ALICE, "p2"):
        with pytest.raises(QuotaExceeded, match="max_connections"), each.stream(ALICE, "p3"):
            pass
        with each.stream(BOB, "p3"):
            pass
    with each.stream(ALICE, "p3"), each.stream(ALICE, "p4"):
        assert each.usage(ALICE).connections == {"p3": 1, "p4": 1}
    assert not each.usage(ALICE).connections


def test_brokers_have_no_quota() -> None:
    each = Quotas()
    each.set([Quota(EVERY, max_streams=1, max_topics=1)])
    broker = Principal("broker", "7")
    with each.stream(broker, "p1"), each.stream(broker, "p2"):
        each.check(broker, "topics", 1000)


def test_a_stream_that_fails_gives_its_place_back() -> None:
    each = Quotas()
    each.set([Quota("user:alice", max_streams=1)])
    for _ in range(3):
        with pytest.raises(RuntimeError), each.stream(ALICE, "p1"):
            raise RuntimeError
    assert each.usage(ALICE).streams == 0


def test_topics_and_subscriptions_are_counted_by_the_caller() -> None:
    each = Quotas()
    assert not each.counts("topics", ALICE)
    each.check(ALICE, "topics", 1_000_000)
    each.set([Quota("user:alice", max_topics=3, max_subscriptions=2)])
    assert each.counts("topics", ALICE)
    assert not each.counts("topics", BOB)
    each.check(ALICE, "topics", 2)
    with pytest.raises(QuotaExceeded, match=r"3 topics that its quota allows \(max_topics\)"):
        each.check(ALICE, "topics", 3)
    with pytest.raises(QuotaExceeded, match="max_subscriptions"):
        each.check(ALICE, "subscriptions", 2)
    each.check(BOB, "subscriptions", 1000)


# -- bounds ------------------------------------------------------------------------------------


def test_principals_without_streams_are_forgotten(clock: Clock) -> None:
    each = Quotas(clock=clock)
    each.set([Quota(EVERY, publish_bytes_per_second=10)])
    in_debt = Principal("user", "in-debt")
    with each.stream(in_debt, "p") as usage:
        assert usage.publishing is not None
        usage.publishing.take(1000, clock.now)
    for number in range(3 * quotas.TIDY):
        with each.stream(Principal("user", f"u{number}"), "p"):
            pass
    assert len(each._usages) <= quotas.TIDY
    assert each.usage(in_debt) is usage


def test_metrics_name_principals_with_a_quota_of_their_own() -> None:
    each = Quotas()
    own = [Quota(f"user:u{number}", max_streams=1) for number in range(2 * quotas.MAX_SHOWN)]
    each.set([Quota(EVERY, max_streams=1), *own])
    for number in range(3 * quotas.MAX_SHOWN):
        principal = Principal("user", f"u{number}")
        with each.stream(principal, "p"), pytest.raises(QuotaExceeded), each.stream(principal, "p"):
            pass
    labels = {principal for principal, _ in each.refused}
    assert len(labels) == quotas.MAX_SHOWN + 1
    assert EVERY in labels
    assert each.refused.total() == 3 * quotas.MAX_SHOWN
    assert len(each.usages()) <= quotas.MAX_SHOWN
