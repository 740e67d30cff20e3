"""Replicated subscriptions, as the driver keeps them: what is asked, what is said, and what is said again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import pairwise

import pytest

from sava.client.errors import ClientError, Unavailable
from sava.pipeline.cluster import ClusterAccess
from sava.pipeline.replicate.acks import (
    IDLE_S,
    LONGEST_PAUSE_S,
    AckSync,
    SlotUpdater,
    SubscriptionName,
    joined,
)
from sava.pipeline.replicate.target import LinkEnds
from sava.proto import replica_pb2 as pb

ENDS = LinkEnds(
    source=ClusterAccess("east:1"),
    source_name="east",
    source_id="id-east",
    target=ClusterAccess("west:1"),
    target_name="west",
    target_id="id-west",
)
ORDERS, PAYMENTS = "/default/orders", "/default/payments"
WANTED = {ORDERS: (7, ["s"])}
Ranges = list[tuple[int, int]]


def pairs(flat: object) -> Ranges:
    numbers = list(flat)  # type: ignore[call-overload]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


class FakeAcks:
    """Both: a source of which some messages are acked, and a target that has some of them. They have nothing
    but messages of the source."""

    def __init__(self) -> None:
        self.acked: dict[str, Ranges] = {ORDERS: [], PAYMENTS: []}
        self.missing: set[str] = set()
        self.topic_id = 7
        self.at_once = 1 << 30
        self.trouble: Exception | None = None
        self.target_trouble: Exception | None = None
        self.position = 1 << 30
        self.taken: set[tuple[str, int]] = set()
        self.told: dict[str, int] = {}
        self.reads: list[pb.ReadAcksRequest] = []
        self.applied: list[pb.ApplyAcksRequest] = []

    def read_acks(self, request: pb.ReadAcksRequest, *, timeout_s: float) -> pb.ReadAcksResponse:
        self.reads.append(request)
        if self.trouble is not None:
            raise self.trouble
        if request.topic in self.missing:
            return pb.ReadAcksResponse(exists=False, topic_id=self.topic_id)
        known = {offset for start, end in pairs(request.known) for offset in range(start, min(end, 999))}
        new = [
            offset
            for start, end in self.acked[request.topic]
            for offset in range(start, end)
            if offset not in known
        ]
        covered = joined((offset, offset + 1) for offset in new[: self.at_once])
        flat = [bound for each in covered for bound in each]
        acks = [pb.OriginAcks(cluster_name="east", topic="t", ranges=flat)] if flat else []
        return pb.ReadAcksResponse(
            exists=True,
            type=3,
            topic_id=self.topic_id,
            acks=acks,
            covered=flat,
            more=len(new) > self.at_once,
        )

    def apply_acks(self, request: pb.ApplyAcksRequest) -> pb.ApplyAcksResponse:
        if self.target_trouble is not None:
            raise self.target_trouble
        self.applied.append(request)
        acked = [
            offset
            for each in request.acks
            for start, end in [(0, each.cursor), *pairs(each.ranges)]
            for offset in range(start, end)
        ]
        self.taken |= {(request.topic, offset) for offset in acked if offset < self.position}
        left = [offset for offset in acked if offset >= self.position]
        told = self.told.get(request.topic, 0)
        if told >= request.since:
            told = max(told, min([request.told, *left]))
        self.told[request.topic] = told
        flat = [bound for each in joined((o, o + 1) for o in left) for bound in each]
        acks = [pb.OriginAcks(cluster_name="east", topic="t", ranges=flat)] if flat else []
        return pb.ApplyAcksResponse(position=self.position, left=acks, told=told)

    def offsets(self, topic: str = ORDERS) -> Ranges:
        return joined((offset, offset + 1) for name, offset in self.taken if name == topic)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clusters() -> FakeAcks:
    return FakeAcks()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def subscriptions(clusters: FakeAcks, clock: Clock) -> Iterator[AckSync]:
    made = AckSync(partial(clusters.read_acks, timeout_s=1.0), clusters.apply_acks, ENDS, clock=clock)
    yield made
    made.pool.shutdown()


def test_all_is_said_once_and_then_only_what_is_new(
    clusters: FakeAcks, subscriptions: AckSync, clock: Clock
) -> None:
    clusters.acked[ORDERS] = [(0, 5), (7, 8)]
    subscriptions.sync(WANTED)
    assert clusters.offsets() == [(0, 5), (7, 8)]
    assert clusters.applied[-1].type == 3
    assert clusters.applied[-1].source.topic_id == 7
    said = len(clusters.applied)
    for _ in range(5):
        clock.now += IDLE_S
        subscriptions.sync(WANTED)
    assert len(clusters.applied) == said, "nothing has changed"
    clusters.acked[ORDERS] = [(0, 9)]
    clock.now += IDLE_S
    subscriptions.sync(WANTED)
    assert pairs(clusters.applied[-1].acks[0].ranges) == [(5, 7), (8, 9)]
    assert clusters.applied[-1].told == 9
    assert pairs(clusters.reads[-1].known) == [(0, 5), (7, 8)]


def test_one_without_news_is_asked_less_and_less_often(
    clusters: FakeAcks, subscriptions: AckSync, clock: Clock
) -> None:
    asked = []
    for tenth in range(200):
        before = len(clusters.reads)
        subscriptions.sync(WANTED)
        asked += [tenth / 10] if len(clusters.reads) > before else []
        clock.now += 0.1
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert pauses[-1] == pytest.approx(IDLE_S, abs=0.15)
    assert sorted(pauses) == pytest.approx(pauses, abs=0.11)


def test_a_restarted_driver_continues_where_the_target_has_everything(
    clusters: FakeAcks, subscriptions: AckSync, clock: Clock
) -> None:
    clusters.acked[ORDERS] = [(0, 500), (600, 610)]
    subscriptions.sync(WANTED)
    clusters.acked[ORDERS] = [(0, 505), (600, 610)]
    again = AckSync(partial(clusters.read_acks, timeout_s=1.0), clusters.apply_acks, ENDS, clock=clock)
    again.sync(WANTED)
    assert pairs(clusters.applied[-1].acks[0].ranges) == [(500, 505), (600, 610)]
    again.pool.shutdown()


def test_what_is_acked_before_it_is_copied_is_said_again_when_it_is(
    clusters: FakeAcks, subscriptions: AckSync, clock: Clock
) -> None:
    clusters.acked[ORDERS], clusters.position = [(0, 10)], 4
    subscriptions.sync(WANTED)
    assert clusters.offsets() == [(0, 4)]
    assert clusters.told[ORDERS] == 4
    clusters.position = 20
    clock.now += LONGEST_PAUSE_S
    subscriptions.sync(WANTED)
    assert clusters.offsets() == [(0, 10)]
    said = len(clusters.applied)
    clock.now += LONGEST_PAUSE_S
    subscriptions.sync(WANTED)
    assert len(clusters.applied) == said


def test_a_driver_that_dies_before_that_loses_nothing(
    clusters: FakeAcks, subscriptions: AckSync, clock: Clock
) -> None:
    clusters.acked[ORDERS], clusters.position = [(0, 10)], 4
    subscriptions.sync(WANTED)
    clusters.position = 20
    again = AckSync(partial(clusters.read_acks, timeout_s=1.0), clusters.apply_acks, ENDS, clock=clock)
    again.sync(WANTED)
    assert clusters.offsets() == [(0, 10)]
    again.pool.shutdown()


def test_what_stays_away_is_said_less_and_less_often(
    clusters: FakeAcks, subscriptions: AckSync, clock: Clock
) -> None:
    clusters.acked[ORDERS], clusters.position = [(0, 10)], 4
    for _ in range(120):
        subscriptions.sync(WANTED)
        clock.now += 1.0
    assert len(clusters.applied) < 15


def test_what_the_target_has_lost_is_said_anew(
    clusters: FakeAcks, subscriptions: AckSync, clock: Clock
) -> None:
    """Somebody has deleted the subscription there, or the topic."""
    clusters.acked[ORDERS] = [(0, 10)]
    subscriptions.sync(WANTED)
    clusters.taken.clear()
    clusters.told.clear()
    clusters.acked[ORDERS] = [(0, 11)]
    clock.now += IDLE_S
    subscriptions.sync(WANTED)
    assert clusters.offsets() == [(0, 11)]


def test_much_is_said_in_pieces(clusters: FakeAcks, subscriptions: AckSync) -> None:
    clusters.acked[ORDERS], clusters.at_once = [(0, 95)], 10
    subscriptions.sync(WANTED)
    assert clusters.offsets() == [(0, 95)]


def test_a_failure_of_one_is_remembered_and_tried_again_and_others_go_on(
    clusters: FakeAcks, subscriptions: AckSync, clock: Clock
) -> None:
    wanted = {ORDERS: (7, ["s"]), PAYMENTS: (7, ["s"])}
    clusters.acked = {ORDERS: [(0, 3)], PAYMENTS: [(0, 4)]}
    clusters.target_trouble = Unavailable("west is down")
    subscriptions.sync(wanted)
    assert subscriptions.failures == {SubscriptionName(each, 7, "s"): "west is down" for each in wanted}
    reads = len(clusters.reads)
    subscriptions.sync(wanted)
    assert len(clusters.reads) == reads, "not at once"
    clusters.target_trouble = None
    clock.now += LONGEST_PAUSE_S
    subscriptions.sync(wanted)
    assert not subscriptions.failures
    assert (clusters.offsets(), clusters.offsets(PAYMENTS)) == ([(0, 3)], [(0, 4)])


def test_a_missing_subscription_and_another_topic_say_nothing(
    clusters: FakeAcks, subscriptions: AckSync, clock: Clock
) -> None:
    clusters.missing.add(ORDERS)
    clusters.acked[ORDERS] = [(0, 3)]
    subscriptions.sync(WANTED)
    assert not clusters.applied
    clusters.missing.clear()
    clusters.topic_id = 8
    clock.now += IDLE_S
    subscriptions.sync(WANTED)
    assert not clusters.applied
    subscriptions.sync({ORDERS: (8, ["s"])})
    assert clusters.offsets() == [(0, 3)]


def test_links_are_not_replicated(clusters: FakeAcks, subscriptions: AckSync) -> None:
    subscriptions.sync({ORDERS: (7, ["sava-link.west"])})
    assert not clusters.reads


def test_what_was_not_said_yet_is_kept_at_the_source(clusters: FakeAcks, clock: Clock) -> None:
    class Sent:
        def __init__(self) -> None:
            self.offsets: dict[str, int] = {}

        def advance_all(
            self, subscription: str, offsets: Mapping[str, int], *, timeout_s: float
        ) -> dict[str, ClientError]:
            assert subscription == "sava-link.west"
            self.offsets.update(offsets)
            return {}

    sent = Sent()
    cursors = SlotUpdater(partial(sent.advance_all, timeout_s=1.0), "west", every_s=3600)
    cursors._is_closed.set()  # no thread: the test sends
    subscriptions = AckSync(
        partial(clusters.read_acks, timeout_s=1.0), clusters.apply_acks, ENDS, cursors, clock=clock
    )
    clusters.acked[ORDERS] = [(0, 30)]
    clusters.target_trouble = Unavailable("west is down")
    subscriptions.sync(WANTED)
    cursors.advance(ORDERS, 50)
    cursors.send()
    assert not sent.offsets, "nothing was said yet"
    clusters.target_trouble = None
    clock.now += LONGEST_PAUSE_S
    subscriptions.sync(WANTED)
    cursors.send()
    assert sent.offsets == {ORDERS: 30}
    subscriptions.sync({})
    cursors.send()
    assert sent.offsets == {ORDERS: 50}
    subscriptions.pool.shutdown()
