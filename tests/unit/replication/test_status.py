"""How far replication is: reports, what is written down of them, and what is said when there are none."""

from __future__ import annotations

from typing import Any

import pytest

from sava.api.admin import replication
from sava.cluster.pipelines import PipelineState, PipelineStatus
from sava.proto import replication_pb2 as pb
from sava.replication import records, status
from sava.replication import status as status_module
from sava.replication.links import Extent
from sava.replication.policies import Scope
from sava.replication.records import LinkUnknown, PartitionReport, ReportRecord
from sava.replication.remotes import ClusterIdentity
from sava.replication.status import Reports
from sava.topics import specs
from sava.topics.names import TopicName
from tests.unit.replication.world import ORDERS, World, world

PLAIN = PartitionReport(partition=0, state="active", position=10, end=10)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ms = 1_000_000_000
        monkeypatch.setattr(records, "now_ms", lambda: self.now_ms)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def replicated(made: World, *, partitions: int = 0, **policy: Any) -> None:
    await made.add_remote()
    await made.create(partitions=partitions)
    await made.replicate(**policy)


def active(number: int = 0, **more: Any) -> PartitionReport:
    return PartitionReport(**{"partition": number, "state": "active", **more})


async def test_partitions_that_no_runner_copies_are_disconnected(clock: Clock) -> None:
    async with world() as made:
        await replicated(made, partitions=3)
        shown = made.status()
        assert (shown.connected, shown.disconnected) == (0, 3)
        assert {each.report.state for each in shown.partitions} == {"waiting_runner"}
        assert "sava pipelines run" in shown.partitions[0].report.reason


@pytest.mark.parametrize(
    ("state", "connected"),
    [
        *(("active", 1), ("idle", 1), ("starting", 0), ("paused", 0), ("waiting_remote_topic", 0)),
        *(("partition_mismatch", 0), ("remote_deleted", 0), ("schema_refused", 0), ("denied", 0)),
        *(
            ("unreachable", 0),
            ("source_unreachable", 0),
            ("data_loss", 0),
            ("failed", 0),
            ("of a newer runner", 0),
        ),
    ],
)
async def test_idle_is_connected_and_whatever_keeps_messages_waiting_is_not(
    clock: Clock, state: str, connected: int
) -> None:
    async with world() as made:
        await replicated(made)
        await made.report(PartitionReport(partition=0, state=state, reason="because"))
        assert made.status().connected == connected
        assert made.status().partitions[0].report.reason == "because"


async def test_some_partitions_of_a_topic_may_be_copied_and_others_not(clock: Clock) -> None:
    async with world() as made:
        await replicated(made, partitions=3)
        mismatch = PartitionReport(partition=1, state="partition_mismatch", reason="fewer there")
        await made.report(active(0), mismatch)
        shown = made.status()
        assert (shown.connected, shown.disconnected) == (1, 2)
        states = [each.report.state for each in shown.partitions]
        assert states == ["active", "partition_mismatch", "starting"]


async def test_a_report_holds_for_half_a_minute(clock: Clock) -> None:
    async with world() as made:
        await replicated(made)
        await made.report(active(position=5, end=5, rate=100.0, messages=5))
        clock.now_ms += status_module.STALE_MS
        assert made.status().connected == 1
        clock.now_ms += 1
        (shown,) = made.status().partitions
        assert not shown.is_connected
        assert (shown.report.state, shown.report.rate, shown.report.messages) == ("waiting_runner", 0.0, 5)
        assert "runner-1 has pipeline replicate-west, and was last heard 30 s ago" in shown.report.reason
        assert "sava pipelines run" in shown.report.reason


async def test_without_a_runner_nobody_copies_whatever_was_said_a_moment_ago(clock: Clock) -> None:
    """It was stopped, and two messages are published: not active, and nothing that is 0."""
    async with world() as made:
        await replicated(made)
        await made.report(active(position=10, end=10, rate=9.0))
        clock.now_ms += 100
        await made.pipelines.leave("runner-1")
        (shown,) = made.status().partitions
        assert (shown.report.state, shown.report.rate, shown.is_connected) == ("waiting_runner", 0.0, False)
        assert "start one: `sava pipelines run`" in shown.report.reason
        assert (shown.backlog, shown.backlog_s) == (status.UNKNOWN, status.UNKNOWN)
        made.ends = {ORDERS: Extent(0, 12)}
        await made.statuses.look()
        (shown,) = made.status().partitions
        assert shown.backlog == 2
        assert shown.backlog_s == pytest.approx(0.1)


async def test_nothing_to_copy_is_said_when_somebody_has_looked(clock: Clock) -> None:
    async with world() as made:
        await replicated(made)
        await made.report(active(position=10, end=10))
        await made.pipelines.leave("runner-1")
        made.ends = {ORDERS: Extent(0, 10)}
        await made.statuses.look()
        assert made.status().partitions[0].backlog == 0


async def test_what_a_former_runner_said_does_not_hold_for_the_next(clock: Clock) -> None:
    async with world() as made:
        await replicated(made)
        await made.report(active(position=10, end=10))
        await made.pipelines.leave("runner-1")
        await made.claim("runner-2")
        (shown,) = made.status().partitions
        assert (shown.report.state, shown.backlog) == ("starting", status.UNKNOWN)
        assert "runner runner-2 has pipeline replicate-west" in shown.report.reason


async def test_a_link_that_fails_as_a_whole_has_its_error_as_the_reason(clock: Clock) -> None:
    """Its partitions say that they are starting, since whoever would say more has failed."""
    async with world() as made:
        await replicated(made)
        claim = await made.claim()
        await made.report(PartitionReport(partition=0, state="starting"))
        failing = PipelineStatus(state=PipelineState.FAILING, last_error="ca.pem: no such file")
        await made.pipelines.report("replicate-west", "runner-1", claim, failing)
        (shown,) = made.status().partitions
        assert (shown.report.state, shown.is_connected) == ("failed", False)
        assert shown.report.reason.endswith("ca.pem: no such file")
        clock.now_ms += 2 * status_module.STALE_MS
        assert made.status().partitions[0].report.state == "failed"
        running = PipelineStatus(state=PipelineState.RUNNING)
        await made.pipelines.report("replicate-west", "runner-1", claim, running)
        await made.report(active())
        assert made.status().connected == 1


async def test_a_new_leader_gives_runners_time_to_be_heard_of(clock: Clock) -> None:
    """What was written down is some seconds old, and the first report to the new leader is on its way: no
    alarm."""
    async with world() as made:
        await replicated(made)
        await made.report(active())
        clock.now_ms += status_module.STALE_MS + 5_000
        assert made.status().disconnected == 1
        made.reports.begin()
        assert made.status().connected == 1
        clock.now_ms += status_module.STALE_MS + 1
        assert made.status().disconnected == 1


async def test_a_paused_pipeline_is_told_as_paused(clock: Clock) -> None:
    async with world() as made:
        await replicated(made)
        await made.report(active())
        await made.pipelines.pause("replicate-west", is_paused=True)
        (shown,) = made.status().partitions
        assert (shown.report.state, shown.is_connected) == ("paused", False)
        await made.pipelines.pause("replicate-west", is_paused=False)
        assert made.status().connected == 1


async def test_a_subscription_that_is_not_copied_is_told_of_a_partition_that_is(clock: Clock) -> None:
    async with world() as made:
        await replicated(made, subscriptions=("billing",))
        topic = next(iter(made.links.topics()))
        report = pb.LinkTopic(topic=str(ORDERS), topic_ids=topic.wanted.topic_ids)
        report.partitions.add(state="idle", reason="too many", unsynced_subscriptions=["billing"])
        await made.claim()
        await made.control.report("west", "runner-1", {ORDERS: replication.report_of(report)})
        shown = replication.topic_status_message(made.status(), "")
        assert (shown.connected_count, shown.partitions[0].reason) == (1, "too many")
        assert [*shown.partitions[0].unsynced_subscriptions] == ["billing"]
        assert written(made).partitions[0].unsynced_subscriptions == ("billing",)


# -- backlog ---------------------------------------------------------------------------------------


async def test_the_backlog_grows_while_nobody_copies(clock: Clock) -> None:
    async with world() as made:
        await replicated(made)
        await made.report(active(position=10, end=10))
        assert (made.status().partitions[0].backlog, made.status().partitions[0].backlog_s) == (0, 0.0)
        clock.now_ms += status_module.STALE_MS + 1_000
        made.ends = {ORDERS: Extent(0, 25)}
        await made.statuses.look()
        (shown,) = made.status().partitions
        assert (shown.end, shown.backlog) == (25, 15)
        assert shown.backlog_s == pytest.approx(31.0)  # at most: all that was there was copied then


async def test_a_runner_that_only_repeats_what_it_was_told_makes_nothing_younger(clock: Clock) -> None:
    """A link that fails soon after each start has not seen the end: what was published since it was last seen
    is as old as that."""
    async with world() as made:
        await replicated(made)
        await made.report(active(position=10, end=10))
        seen_ms = clock.now_ms
        made.ends = {ORDERS: Extent(0, 12)}
        for _ in range(3):
            clock.now_ms += 50_000
            await made.report(
                PartitionReport(partition=0, state="starting", position=10, end=10, end_ms=seen_ms)
            )
            await made.statuses.look()
        (shown,) = made.status().partitions
        assert shown.backlog == 2
        assert shown.backlog_s == pytest.approx(150.0)


async def test_of_a_backlog_without_a_time_nobody_knows_how_old_it_is(clock: Clock) -> None:
    async with world() as made:
        await replicated(made)
        await made.report(PartitionReport(partition=0, state="starting", position=10, end=12))
        clock.now_ms += 5_000
        (shown,) = made.status().partitions
        assert (shown.backlog, shown.backlog_s) == (2, status.UNKNOWN)


async def test_an_unreachable_remote_has_the_backlog_of_its_source(clock: Clock) -> None:
    """Its runner reports that it cannot go on, with the end that it saw when it still read."""
    async with world() as made:
        await replicated(made)
        oldest_us = (clock.now_ms - 7_000) * 1000
        await made.report(
            PartitionReport(partition=0, state="unreachable", position=10, end=12, oldest_us=oldest_us)
        )
        made.ends = {ORDERS: Extent(0, 40)}
        await made.statuses.look()
        (shown,) = made.status().partitions
        assert shown.backlog == 30
        assert shown.backlog_s == pytest.approx(7.0)


async def test_a_backlog_that_is_not_known_is_not_nothing(clock: Clock) -> None:
    async with world() as made:
        await replicated(made)
        (shown,) = made.status().partitions
        assert (shown.backlog, shown.backlog_s) == (status.UNKNOWN, status.UNKNOWN)


@pytest.mark.parametrize(("start", "backlog"), [("earliest", 15), ("latest", 10), ("1700000000000000", 15)])
async def test_what_was_never_copied_has_all_that_is_to_be_copied_as_its_backlog(
    clock: Clock, start: str, backlog: int
) -> None:
    """Retention has removed the first five messages."""
    async with world() as made:
        made.ends = {ORDERS: Extent(5, 10)}
        await replicated(made, start=start)
        made.ends = {ORDERS: Extent(5, 20)}
        clock.now_ms += 4_000
        await made.statuses.look()
        (shown,) = made.status().partitions
        assert shown.backlog == backlog
        assert shown.backlog_s == pytest.approx(4.0)


async def test_an_end_that_was_seen_stays_when_its_broker_is_gone(clock: Clock) -> None:
    async with world() as made:
        made.ends = {ORDERS: Extent(0, 10)}
        await replicated(made)
        await made.statuses.look()
        made.ends = {}
        made.statuses._looked = {name: each._replace(at=0.0) for name, each in made.statuses._looked.items()}
        await made.statuses.look()
        assert made.status().partitions[0].backlog == 10


async def test_partitions_that_are_copied_are_not_asked_about(clock: Clock) -> None:
    asked: list[TopicName] = []
    async with world() as made:
        await replicated(made, partitions=2)
        await made.report(active(0), PartitionReport(partition=1, state="denied"))
        extents = made.extents

        async def noted(names: Any) -> Any:
            asked.extend(names)
            return await extents(names)

        made.statuses._extents = noted
        await made.statuses.look()
        assert asked == [ORDERS.partition(1)]


async def test_the_backlog_of_a_rewound_partition_is_unknown(clock: Clock) -> None:
    """It has grown beyond its copy since, with other messages than those that were copied."""
    async with world() as made:
        await replicated(made)
        await made.report(
            PartitionReport(
                partition=0, state="failed", position=100, end=120, rewound_to=50, rewound_from=100
            )
        )
        (shown,) = made.status().partitions
        assert (shown.backlog, shown.backlog_s) == (status.UNKNOWN, status.UNKNOWN)


async def test_the_backlog_of_a_partition_behind_its_copy_is_unknown(clock: Clock) -> None:
    async with world() as made:
        await replicated(made)
        await made.report(active(position=100, end=50))
        assert made.status().partitions[0].backlog == status.UNKNOWN


async def test_a_topic_that_is_not_replicated_has_no_status_which_is_said(clock: Clock) -> None:
    async with world() as made:
        await replicated(made)
        assert len(made.control.status(topic="/default/orders", remote="west")) == 1
        with pytest.raises(LinkUnknown, match="topic /default/typo is not replicated, or does not exist"):
            made.control.status(topic="/default/typo")
        await made.add_remote("north", ClusterIdentity("north", "n"))
        with pytest.raises(LinkUnknown, match="topic /default/orders is not replicated to north"):
            made.control.status(topic="/default/orders", remote="north")
        await made.control.clear(Scope.parse("default"))
        assert made.control.status() == []


# -- what is written down --------------------------------------------------------------------------


def written(made: World) -> ReportRecord:
    kv = made.store.local.get(records.report_key("west", ORDERS))
    assert kv is not None
    return specs.decode(kv, ReportRecord)


async def test_progress_is_written_down_now_and_then_and_a_new_state_at_once(clock: Clock) -> None:
    async with world() as made:
        await replicated(made)
        for position in range(10):
            await made.report(active(position=position))
            clock.now_ms += 500
        assert written(made).partitions[0].position == 0
        assert made.status().partitions[0].report.position == 9
        clock.now_ms += status_module.REWRITE_MS
        await made.report(active(position=20))
        assert written(made).partitions[0].position == 20
        await made.report(PartitionReport(partition=0, state="unreachable", position=21))
        assert written(made).partitions[0].position == 21


async def test_what_the_next_runner_must_know_is_written_down_at_once(clock: Clock) -> None:
    async with world() as made:
        await replicated(made)
        await made.report(active(position=5))
        await made.report(active(position=5, was_seen=True))
        assert written(made).partitions[0].was_seen
        await made.report(active(position=5, was_seen=True, rewound_to=2, rewound_from=5))
        assert written(made).partitions[0].rewound_from == 5


async def test_an_idle_topic_is_not_written_down_again_and_again(clock: Clock) -> None:
    async with world() as made:
        await replicated(made)
        await made.report(PartitionReport(partition=0, state="idle", position=5))
        revision = made.store.local.revision
        for _ in range(10):
            clock.now_ms += status_module.REWRITE_MS
            await made.report(PartitionReport(partition=0, state="idle", position=5))
        assert made.store.local.revision == revision
        assert made.status().connected == 1


async def test_another_leader_begins_with_what_was_written_down(clock: Clock) -> None:
    async with world() as made:
        await replicated(made)
        await made.report(active(position=7, messages=7))
        other = Reports(made.store)
        other.begin()
        (name,) = (each.name for each in made.links.topics())
        found = other.get(name)
        assert found is not None
        assert found.partitions[0].messages == 7


async def test_reports_of_topics_that_are_not_replicated_are_ignored(clock: Clock) -> None:
    """A runner has not noticed yet that the topic was deleted and created anew; or that it is no more
    wanted."""
    async with world() as made:
        await replicated(made)
        await made.report(active(), topic_ids=(999,))
        assert made.status().disconnected == 1
        told = status_module.TopicReport((), 0, (), False, (), (active(),))
        await made.control.report("west", "runner-1", {TopicName("default", "other"): told})
        await made.control.report("nowhere", "runner-1", {ORDERS: told})
        assert made.status().disconnected == 1


async def test_a_runner_that_knows_of_fewer_partitions_is_heard(clock: Clock) -> None:
    async with world() as made:
        await replicated(made, partitions=2)
        ids = next(iter(made.links.topics())).wanted.topic_ids
        await made.grow(4)
        await made.links.settle()
        await made.report(active(0), active(1), topic_ids=ids)
        assert made.status().connected == 2
        assert [each.report.state for each in made.status().partitions[2:]] == ["starting", "starting"]


async def test_reasons_are_kept_short(clock: Clock) -> None:
    async with world() as made:
        await replicated(made)
        await made.report(PartitionReport(partition=0, state="failed", reason="x" * 100_000))
        assert len(made.status().partitions[0].report.reason) == status_module.MAX_REASON
