"""LinkJob between clusters that are a few dictionaries: what it asks, plans and reports, and how it ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from sava.client.errors import Refused, TopicUnknown, Unavailable
from sava.pipeline.cluster import ClusterAccess, ClusterClient, PartitionExtent
from sava.pipeline.replicate import rounds
from sava.pipeline.replicate.background import AdminLinkControl
from sava.pipeline.replicate.job import LinkJob
from sava.pipeline.replicate.rounds import CopyEngine
from sava.pipeline.replicate.target import CopyOutcome, CopyShare, Errand, TargetCluster
from sava.proto import replica_pb2
from sava.proto import replication_pb2 as pb
from tests.support.waiting import PATIENCE_S, OwnTime, wait_until
from tests.unit.pipeline.replicate.test_topics import TOPIC

NAMES = (f"{TOPIC}-part-0", f"{TOPIC}-part-1")


class FakeSource:
    """The one that sends: ends of partitions, and what is written down of the link."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ends = dict.fromkeys(NAMES, 10)
        self.starts: dict[str, int] = {}
        self.link = pb.Link(
            remote=pb.Remote(name="west", service="127.0.0.1:2", cluster_name="west", cluster_id="w"),
            cluster_name="east",
            cluster_id="e",
            may_create=True,
            mismatch_policy="pip370",
        )
        self.link.topics.add(
            topic=TOPIC,
            remote="west",
            partition_count=2,
            reliable=True,
            topic_ids=(1, 2),
            policy=pb.ReplicationPolicy(remotes=["west"], start="earliest"),
        )
        self.failure: Exception | None = None
        self.reports: list[pb.ReportLinkRequest] = []
        self.is_closed = False
        self.asked = 0
        self.advanced: list[dict[str, int]] = []
        """Cursors of the link, as they were told to move on."""

    @property
    def let_go_of(self) -> dict[str, int]:
        """Where the cursors are by that, told together or one after the other."""
        return {name: offset for each in list(self.advanced) for name, offset in each.items()}

    def publish(self, name: str, count: int) -> None:
        with self.changed:
            self.ends[name] += count
            self.changed.notify_all()

    # -- as Control ------------------------------------------------------------------------------

    def control_link(self, remote: str) -> pb.Link:
        assert remote == "west"
        if self.failure is not None:
            raise self.failure
        told = pb.Link()
        told.CopyFrom(self.link)
        return told

    def report(self, request: pb.ReportLinkRequest) -> None:
        if self.failure is not None:
            raise self.failure
        self.reports.append(request)
        for each in request.topics:
            for topic in self.link.topics:
                if (topic.topic, topic.generation) == (each.topic, each.generation):
                    topic.remote_topic_ids[:] = each.remote_topic_ids
                    topic.is_tombstone |= each.is_tombstone

    def close(self) -> None:
        self.is_closed = True

    def last(self) -> list[pb.LinkPartition]:
        """As it was last reported."""
        topics = list(self.reports[-1].topics) if self.reports else []
        return list(topics[0].partitions) if topics else []

    def states(self) -> list[str]:
        return [each.state for each in self.last()]

    # -- as Link ---------------------------------------------------------------------------------

    def wait_beyond(self, ends: Mapping[str, int], *, timeout_s: float) -> dict[str, PartitionExtent]:
        self.asked += 1
        with self.changed:
            if any(name not in self.ends for name in ends):
                raise TopicUnknown("a topic does not exist")
            self.changed.wait_for(
                lambda: any(self.ends.get(n, 0) > end for n, end in ends.items()), timeout_s
            )
            return {
                n: PartitionExtent(self.starts.get(n, 0), 0, self.ends[n]) for n in ends if n in self.ends
            }

    def topics(self) -> list[Any]:
        return [replica_pb2.TopicShape(topic=name) for name in self.ends]

    def offset_at(self, name: str, publish_time: int) -> int:
        return 4

    def read(self, name: str, start: int, end: int) -> Iterator[Any]:
        return iter(())

    def read_acks(
        self, request: replica_pb2.ReadAcksRequest, *, timeout_s: float
    ) -> replica_pb2.ReadAcksResponse:
        topic_id = NAMES.index(request.topic) + 1
        return replica_pb2.ReadAcksResponse(exists=True, topic_id=topic_id)

    def advance_all(
        self, subscription: str, offsets: Mapping[str, int], *, timeout_s: float
    ) -> dict[str, Any]:
        self.advanced.append(dict(offsets))
        return {}


class Control(AdminLinkControl):
    def __init__(self, cluster: FakeSource) -> None:
        for name, call in (
            ("link", cluster.control_link),
            ("report", cluster.report),
            ("close", cluster.close),
        ):
            setattr(self, name, call)


class Remote:
    """As Target: topics by name."""

    def __init__(self) -> None:
        self.shapes: dict[str, replica_pb2.TopicShape] = {}
        self.identity = ("west", "w")
        self.failure: Exception | None = None
        self.ensured: list[tuple[str, int, bool]] = []
        self.acks_failure: Exception | None = None
        self.next_id = 70

    def hello(self) -> replica_pb2.HelloResponse:
        if self.failure is not None:
            raise self.failure
        name, cluster_id = self.identity
        return replica_pb2.HelloResponse(cluster_name=name, cluster_id=cluster_id)

    def describe(self, topics: Sequence[str]) -> dict[str, replica_pb2.TopicShape]:
        nothing = replica_pb2.TopicShape(namespace_exists=True)
        return {topic: self.shapes.get(topic, nothing) for topic in topics}

    def ensure_topic(
        self, topic: str, *, partitions: int, cluster: str, reliable: bool = True, grow: bool = False
    ) -> replica_pb2.TopicShape:
        assert cluster == "east"
        self.ensured.append((topic, partitions, grow))
        return self.create(topic, partitions)

    def apply_acks(self, request: replica_pb2.ApplyAcksRequest) -> replica_pb2.ApplyAcksResponse:
        if self.acks_failure is not None and request.topic == NAMES[1]:
            raise self.acks_failure
        return replica_pb2.ApplyAcksResponse()

    def create(self, topic: str, partitions: int) -> replica_pb2.TopicShape:
        ids = range(self.next_id, self.next_id + max(1, partitions))
        self.next_id += 10
        self.shapes[topic] = replica_pb2.TopicShape(
            topic=topic,
            namespace_exists=True,
            exists=True,
            reliable=True,
            partition_count=partitions,
            topic_ids=ids,
        )
        return self.shapes[topic]


class Engine(CopyEngine):
    """Copies at once what it is asked to, unless ordered otherwise. A partition in two shares at a time is a
    failure."""

    cores = 2

    def __init__(self) -> None:
        self.positions: dict[str, int] = {}
        self.outcome: Callable[[Errand], CopyOutcome | None] = lambda errand: None
        """In place of copying."""
        self.before: Callable[[Sequence[CopyShare]], None] = lambda shares: None
        self.errands: list[Errand] = []
        self.twice: list[str] = []
        self.cancelled = threading.Event()
        self._under_way: set[str] = set()
        self._guard = threading.Lock()

    def run(self, group: str, shares: Sequence[CopyShare]) -> list[CopyOutcome]:
        errands = [errand for share in shares for errand in share.errands]
        names = {errand.name for errand in errands}
        with self._guard:
            self.twice += sorted(names & self._under_way)
            self._under_way |= names
            self.errands += errands
        try:
            self.before(shares)
            return [self._copied(errand) for errand in errands]
        finally:
            with self._guard:
                self._under_way -= names

    def _copied(self, errand: Errand) -> CopyOutcome:
        if (ordered := self.outcome(errand)) is not None:
            return ordered
        position = self.positions.get(errand.name, errand.begin)
        if position is None:
            return CopyOutcome(name=errand.name, code="source_position_missing", reason="no copy")
        before = position
        if errand.pieces and errand.pieces[0].start <= position < errand.end:
            position = self.positions[errand.name] = errand.end
        return CopyOutcome(
            name=errand.name,
            is_known=errand.name in self.positions,
            position=position,
            kept_position=position,
            messages=position - before,
            bytes=100 * (position - before),
        )

    def cancel(self, group: str) -> None:
        self.cancelled.set()


class World:
    def __init__(self) -> None:
        self.cluster, self.remote, self.engine = FakeSource(), Remote(), Engine()
        self.jobs: list[LinkJob] = []

    def start(self) -> LinkJob:
        edges = (Control(self.cluster), self.engine, ClusterAccess("127.0.0.1:1"))
        job = LinkJob("replicate-west", "west", "me", *edges)
        self.jobs.append(job)
        return job

    def copied(self) -> None:
        wait_until(lambda: self.engine.positions == self.cluster.ends, "all is copied")

    def stop(self, job: LinkJob) -> None:
        job.stop(now=False)
        wait_until(lambda: job.end is not None, "it ends")


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    made = World()
    monkeypatch.setattr(ClusterClient, "of", lambda access: made.cluster)
    monkeypatch.setattr(TargetCluster, "of", lambda access: made.remote)
    yield made
    for job in made.jobs:
        job.stop(now=True)
    for job in made.jobs:
        wait_until(lambda job=job: job.end is not None, "it ends")  # type: ignore[misc]
    assert made.engine.twice == []


def test_a_topic_is_created_recorded_copied_and_reported(world: World) -> None:
    job = world.start()
    world.copied()
    assert world.remote.ensured == [(TOPIC, 2, False)]
    wait_until(lambda: world.cluster.states() == ["active", "active"], "it is reported")
    wait_until(lambda: job.progress.rows == 20, "it is counted")
    progress = job.progress
    assert (progress.is_running, progress.lag_messages, progress.has_backlog) == (True, 0, False)
    assert progress.has_worked
    # Nothing was copied before the ids were on record.
    recorded = next(each for each in world.cluster.reports if each.topics[0].remote_topic_ids)
    assert all(each.messages == 0 for each in recorded.topics[0].partitions)


def test_what_comes_is_copied_as_it_comes(world: World) -> None:
    world.start()
    world.copied()
    delays = []
    for _ in range(20):
        own = OwnTime()
        world.cluster.publish(NAMES[0], 5)
        world.copied()
        delays.append(own.seconds)
    assert sorted(delays)[10] < 0.5  # there is no interval that it would have to wait for


def test_an_idle_link_asks_seldom(world: World) -> None:
    world.start()
    world.copied()
    asked, errands = world.cluster.asked, len(world.engine.errands)
    began = time.monotonic()
    time.sleep(0.5)  # nothing happens, which has no event
    assert (world.cluster.asked - asked) / (time.monotonic() - began) < 20
    assert len(world.engine.errands) == errands


def test_a_slow_partition_keeps_nobody_waiting(world: World) -> None:
    released = threading.Event()

    def before(shares: Sequence[CopyShare]) -> None:
        if [each.name for share in shares for each in share.errands] == [NAMES[1]]:
            released.wait(PATIENCE_S)

    world.engine.outcome = lambda errand: (
        CopyOutcome(name=errand.name, code="unavailable", reason="slow") if errand.name == NAMES[1] else None
    )
    world.start()
    wait_until(lambda: world.engine.positions.get(NAMES[0]) == 10, "one is copied")
    world.engine.before = before
    for end in range(20, 60, 10):
        world.cluster.publish(NAMES[0], 10)
        wait_until(lambda end=end: world.engine.positions[NAMES[0]] == end, "it goes on")  # type: ignore[misc]
    released.set()


def test_all_partitions_share_the_rate_of_the_link(world: World) -> None:
    world.cluster.link.remote.max_rate = 20
    began = time.monotonic()
    world.start()
    wait_until(lambda: sum(world.engine.positions.values()) == 20, "what may go at once is copied")
    world.cluster.publish(NAMES[0], 5)
    world.cluster.publish(NAMES[1], 5)
    world.copied()
    assert time.monotonic() - began > 0.4, "the rate of a second at once, and half of one more"
    assert max(len(range(*each)) for each in ranges(world)) <= 10
    world.cluster.link.remote.max_rate = 0
    world.cluster.publish(NAMES[0], 1000)
    world.copied()


def ranges(world: World) -> list[tuple[int, int]]:
    return [(piece.start, piece.end) for errand in world.engine.errands for piece in errand.pieces]


def test_the_copy_begins_where_the_policy_says_and_only_once(world: World) -> None:
    world.cluster.link.topics[0].policy.start = "1700000000000000"
    job = world.start()
    world.copied()
    assert {errand.begin for errand in world.engine.errands if errand.pieces} == {4}
    world.cluster.publish(NAMES[0], 1)
    world.copied()
    assert world.engine.errands[-1].begin is None
    world.stop(job)
    assert job.end is not None
    assert not job.end


def test_a_copy_that_was_there_and_is_not_is_no_reason_to_begin_anew(world: World) -> None:
    """The target has lost it, and has the same topic still. A second driver knows from the reports."""
    first = world.start()
    world.copied()
    wait_until(
        lambda: world.cluster.last() and all(each.messages for each in world.cluster.last()), "reported"
    )
    world.stop(first)
    world.cluster.link.topics[0].partitions.extend(world.cluster.last())
    world.engine.positions.clear()
    world.start()
    wait_until(lambda: world.cluster.states() == ["failed", "failed"], "it is noticed")
    assert all("sava replication recreate" in each.reason for each in world.cluster.last())
    assert world.engine.positions == {}

    world.cluster.link.topics[0].generation += 1
    world.cluster.link.topics[0].remote_topic_ids[:] = []
    world.copied()


def test_lost_messages_are_told_and_stop_the_partition(world: World) -> None:
    world.engine.outcome = lambda errand: (
        CopyOutcome(name=errand.name, is_known=True, position=3, code="source_gone", reason="3 to 6 are gone")
        if errand.name == NAMES[0]
        else None
    )
    job = world.start()
    wait_until(lambda: world.cluster.states() == ["data_loss", "active"], "it is told")
    errands = len([each for each in world.engine.errands if each.name == NAMES[0]])
    world.cluster.publish(NAMES[1], 5)
    wait_until(lambda: world.engine.positions[NAMES[1]] == 15, "the other one goes on")
    assert len([each for each in world.engine.errands if each.name == NAMES[0]]) == errands
    wait_until(lambda: job.progress.has_backlog is False, "nothing can be done about it")


def test_a_round_that_breaks_is_tried_again(world: World) -> None:
    failures = iter([RuntimeError("executor lost"), RuntimeError("executor lost")])

    def before(shares: Sequence[CopyShare]) -> None:
        if (error := next(failures, None)) is not None:
            raise error

    world.engine.before = before
    world.start()
    world.copied()
    wait_until(lambda: [each.restarts > 0 for each in world.cluster.last()].count(True) >= 1, "it is counted")


def test_another_cluster_in_the_remote_s_place_gets_nothing(world: World) -> None:
    world.remote.identity = ("west", "another")
    world.start()
    wait_until(lambda: world.cluster.states() == ["failed", "failed"], "it is noticed")
    assert "sava remotes remove west" in world.cluster.last()[0].reason
    assert (world.remote.ensured, world.engine.errands) == ([], [])


def test_a_remote_that_does_not_answer_is_visited_again(world: World) -> None:
    world.start()
    world.copied()
    world.remote.failure = Unavailable("no broker has answered")
    wait_until(lambda: world.cluster.states() == ["unreachable", "unreachable"], "it is noticed")
    world.cluster.publish(NAMES[0], 5)
    wait_until(lambda: world.cluster.last()[0].end == 15, "the backlog grows")
    assert world.cluster.last()[0].oldest_us > 0
    assert world.cluster.last()[0].disconnects == 1
    world.remote.failure = None
    world.copied()


def test_a_subscription_that_cannot_be_copied_is_reported(world: World) -> None:
    """It keeps no message from retention."""
    world.cluster.link.topics[0].policy.subscriptions.append("billing")
    world.remote.acks_failure = Refused("the topic has 1 subscription, and may have 1")
    world.start()
    world.copied()
    wait_until(lambda: [*world.cluster.last()[1].unsynced_subscriptions] == ["billing"], "it is told")
    fine, failing = world.cluster.last()
    assert {fine.state, failing.state} == {"active"}
    assert (fine.reason, [*fine.unsynced_subscriptions]) == ("", [])
    assert failing.reason.startswith("subscription billing is not copied: the topic has 1 subscription")
    world.remote.acks_failure = None
    wait_until(lambda: not world.cluster.last()[1].unsynced_subscriptions, "it has come right")
    assert world.cluster.last()[1].reason == ""


def test_a_deleted_topic_is_reported_and_not_created_again(world: World) -> None:
    world.start()
    world.copied()
    world.remote.shapes.clear()
    wait_until(lambda: world.cluster.link.topics[0].is_tombstone, "it is written down")
    wait_until(lambda: world.cluster.states() == ["remote_deleted"] * 2, "it is told")
    assert len(world.remote.ensured) == 1


def test_what_is_copied_again_is_not_let_go_of_before_it_is(world: World) -> None:
    """The topic is deleted at the remote while an errand is under way, and somebody asks for it again: what
    the old copy had, by the errand's word as well, is no reason to let go of anything."""
    world.start()
    world.copied()
    wait_until(lambda: world.cluster.let_go_of == {NAMES[0]: 10, NAMES[1]: 10}, "it is let go of")
    began, released = threading.Event(), threading.Event()

    def before(shares: Sequence[CopyShare]) -> None:
        began.set()
        released.wait(PATIENCE_S)

    world.engine.before = before
    world.cluster.publish(NAMES[0], 5)
    assert began.wait(PATIENCE_S)
    world.remote.failure = Unavailable("no broker has answered")
    wait_until(lambda: world.cluster.states() == ["unreachable"] * 2, "the remote is away")
    topic = world.cluster.link.topics[0]
    topic.generation += 1
    topic.remote_topic_ids[:] = []
    wait_until(lambda: world.cluster.reports[-1].topics[0].generation == 1, "it has heard of it")
    world.cluster.advanced.clear()
    released.set()
    wait_until(lambda: world.jobs[0].progress.rows == 25, "the errand has ended")
    world.engine.outcome = lambda errand: CopyOutcome(
        name=errand.name, is_known=True, position=3, kept_position=3, code="failed", reason="stays there"
    )
    world.remote.failure = None
    wait_until(lambda: world.cluster.advanced, "what is copied is let go of")
    assert set(world.cluster.advanced[0].values()) == {3}


def test_a_topic_that_is_not_wanted_any_more_is_left(world: World) -> None:
    world.start()
    world.copied()
    with world.cluster.changed:
        del world.cluster.link.topics[:]
        for name in NAMES:
            del world.cluster.ends[name]
    wait_until(lambda: world.jobs[0].progress.rows == 20, "it goes on")
    world.cluster.ends = {"/default/other": 3}
    world.cluster.link.topics.add(topic="/default/other", topic_ids=(9,), reliable=True)
    wait_until(lambda: world.engine.positions.get("/default/other") == 3, "another is copied")


def test_a_cluster_that_elects_a_leader_keeps_nobody_from_copying(world: World) -> None:
    job = world.start()
    world.copied()
    world.cluster.failure = Unavailable("no leader")
    world.cluster.publish(NAMES[0], 5)
    world.copied()
    world.cluster.failure = None
    wait_until(lambda: [each.position for each in world.cluster.last()[:1]] == [15], "it is reported later")
    assert job.end is None


def test_a_link_that_is_refused_has_failed(world: World) -> None:
    world.cluster.failure = Refused("there is no remote west", "remote_unknown")
    job = world.start()
    wait_until(lambda: job.end is not None, "it ends")
    assert job.end is not None
    assert job.end == "there is no remote west"
    wait_until(lambda: world.cluster.is_closed, "nothing is left open")


def test_a_round_that_does_not_end_keeps_no_failed_link_from_ending(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task hangs; the link fails for another reason, and waits for its rounds. Nobody plans any more, so
    nobody else would notice that one of them does not end."""
    begun = threading.Event()

    def before(shares: Sequence[CopyShare]) -> None:
        begun.set()
        assert world.engine.cancelled.wait(2 * PATIENCE_S)
        raise RuntimeError("cancelled")

    job = world.start()
    world.copied()
    world.engine.before = before
    world.cluster.publish(NAMES[0], 5)
    assert begun.wait(PATIENCE_S)
    world.cluster.failure = Refused("there is no remote west", "remote_unknown")
    wait_until(lambda: world.cluster.is_closed, "it has failed")
    assert world.jobs[0].end is None
    monkeypatch.setattr(rounds, "OVERDUE_S", 0.0)
    wait_until(lambda: job.end is not None, "it ends")
    assert job.end is not None
    assert job.end == "there is no remote west"


def test_it_stops_after_the_rounds_that_are_under_way(world: World) -> None:
    begun, released = threading.Event(), threading.Event()

    def before(shares: Sequence[CopyShare]) -> None:
        begun.set()
        assert released.wait(PATIENCE_S)

    job = world.start()
    world.copied()
    world.engine.before = before
    world.cluster.publish(NAMES[0], 5)
    assert begun.wait(PATIENCE_S)
    job.stop(now=False)
    time.sleep(0.3)  # it does not end, which has no event
    assert world.jobs[0].end is None
    released.set()
    wait_until(lambda: job.end is not None, "it ends")
    assert job.end is not None
    assert not job.end
    assert world.cluster.last()[0].position == 15  # the last report knows it


def test_told_to_stop_now_it_cancels_what_is_under_way(world: World) -> None:
    begun = threading.Event()

    def before(shares: Sequence[CopyShare]) -> None:
        begun.set()
        assert world.engine.cancelled.wait(PATIENCE_S)
        raise RuntimeError("cancelled")

    job = world.start()
    world.copied()
    world.engine.before = before
    world.cluster.publish(NAMES[0], 5)
    assert begun.wait(PATIENCE_S)
    job.stop(now=True)
    wait_until(lambda: job.end is not None, "it ends")
    assert job.end is not None
    assert not job.end
