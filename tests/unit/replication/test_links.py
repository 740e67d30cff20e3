"""What is to be copied where: records and pipelines that follow from policies, whatever happens in which
order."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from sava.cluster.pipelines import PipelineForeign, RunnerRecord
from sava.cluster.records import NotController
from sava.metadata.errors import Deposed
from sava.metadata.records import RecordCorrupt
from sava.replication import records
from sava.replication.control import ReplicationMaintenance
from sava.replication.links import Extent, LinkTopic
from sava.replication.policies import Scope
from sava.replication.records import LinkRecord, LinkUnknown, PartitionReport, RemoteUnknown
from sava.supervisor import Supervisor
from sava.topics import specs
from sava.topics.names import TopicName
from tests.support.waiting import PATIENCE_S
from tests.unit.replication.world import NORTH, ORDERS, World, world

SALES = TopicName("shop", "sales")


def link_topic(made: World) -> LinkTopic:
    (found,) = made.links.topics()
    return found


async def forget(made: World) -> None:
    await made.control.clear(Scope.parse("default"))


# -- pipelines -------------------------------------------------------------------------------------


async def test_a_pipeline_is_there_as_long_as_a_topic_needs_it() -> None:
    async with world() as made:
        await made.add_remote()
        await made.replicate()
        assert made.pipeline_names() == []  # the namespace is empty
        await made.create()
        await made.links.settle()
        assert made.pipeline_names() == ["replicate-west"]
        pipeline = await made.pipelines.get("replicate-west")
        assert (pipeline.record.kind, pipeline.record.settings) == ("replicate", {"remote": "west"})
        assert pipeline.record.made_by == "replication"
        await forget(made)
        assert made.pipeline_names() == []


async def test_there_is_one_pipeline_for_each_remote_and_not_for_each_topic() -> None:
    async with world() as made:
        await made.add_remote()
        await made.add_remote("north", NORTH)
        for number in range(5):
            await made.create(TopicName("default", f"t{number}"))
        await made.create(SALES)
        await made.replicate("default", remotes=("west", "north"))
        await made.replicate("shop")
        assert made.pipeline_names() == ["replicate-north", "replicate-west"]
        assert len(made.linked()) == 11
        await made.replicate("default", remotes=("west",))
        assert made.pipeline_names() == ["replicate-west"]


async def test_a_pipeline_that_somebody_deleted_or_changed_comes_back() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate()
        await made.pipelines.delete("replicate-west", made_by="replication")
        await made.links.settle()
        await made.pipelines.apply("replicate-west", "replicate", {"remote": "x"}, made_by="replication")
        await made.links.settle()
        assert (await made.pipelines.get("replicate-west")).record.settings == {"remote": "west"}


async def test_a_pipeline_that_is_stopping_is_made_again_when_it_has_stopped() -> None:
    """The policy is cleared and set again while a runner still has the pipeline: its record is marked until
    the runner lets go, and cannot be made meanwhile."""
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate()
        await made.pipelines.join("runner-1", RunnerRecord(kinds=("replicate",)), ttl_ms=10_000)
        claim = await made.pipelines.claim("replicate-west", "runner-1")
        await forget(made)
        await made.replicate()
        assert made.linked() == ["/default/orders to west"]
        assert not await made.links.settle()
        pipeline = await made.pipelines.get("replicate-west")
        await made.pipelines.release("replicate-west", "runner-1", claim.number, pipeline.reported)
        assert made.pipeline_names() == []
        assert await made.links.settle()
        assert made.pipeline_names() == ["replicate-west"]


async def test_a_policy_is_refused_while_a_pipeline_of_a_person_has_the_name() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.pipelines.apply("replicate-west", "custom", {})
        with pytest.raises(PipelineForeign, match="replicate-west"):
            await made.replicate()
        assert made.linked() == []


async def test_pipelines_of_people_are_left_alone() -> None:
    async with world() as made:
        await made.pipelines.apply("mine", "custom", {})
        await made.links.settle()
        assert made.pipeline_names() == ["mine"]


# -- topics ----------------------------------------------------------------------------------------


async def test_topics_that_keep_no_messages_are_not_replicated() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create(reliable=False)
        await made.replicate()
        assert made.linked() == []


async def test_what_is_known_of_the_remote_outlives_a_policy_but_not_the_topic() -> None:
    """Switched off and on again, replication must still know that the topic was deleted there."""
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate()
        await made.report(is_tombstone=True, remote_topic_ids=(7,))
        await forget(made)
        assert made.linked() == []
        await made.replicate()
        record = made.record()
        assert record is not None
        assert (record.is_wanted, record.is_tombstone, record.remote_topic_ids) == (True, True, (7,))
        await made.report(is_tombstone=False)  # nor by a runner that has not noticed
        assert made.record() == record

        await made.delete()
        await made.links.settle()
        assert made.record() is None
        await made.create()
        await made.links.settle()
        record = made.record()
        assert record is not None
        assert not record.is_tombstone


async def test_a_topic_created_anew_under_the_same_name_begins_with_a_new_record() -> None:
    """Deleted and created between two passes: the name never went away, the topic did."""
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate()
        await made.report(PartitionReport(partition=0, state="active", position=5), remote_topic_ids=(7,))
        before = link_topic(made).wanted.topic_ids
        await made.delete()
        await made.create()
        assert made.linked() == []  # not with the other one's record
        await made.links.settle()
        after = link_topic(made)
        assert after.wanted.topic_ids != before
        assert after.record.remote_topic_ids == ()
        assert made.store.local.get(records.report_key("west", ORDERS)) is None


async def test_a_deleted_topics_record_goes_though_another_took_its_name() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate()
        await forget(made)
        await made.delete()
        await made.create()
        await made.links.settle()
        assert made.record() is None


async def test_the_ids_of_all_partitions_are_told_in_their_order() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create(partitions=12)
        await made.replicate()
        specs_of = await made.registry.list("default")
        expected = tuple(specs_of[ORDERS.partition(number)].topic_id for number in range(12))
        assert link_topic(made).wanted.topic_ids == expected


async def test_a_policy_that_cannot_be_read_leaves_everything_as_it_is() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate()
        await made.store.put(records.namespace_policy_key("default"), b"{")
        with pytest.raises(RecordCorrupt, match="/namespaces/default/replication"):
            await made.links.settle()
        assert made.pipeline_names() == ["replicate-west"]
        assert made.record() is not None
        await made.replicate()  # which puts it right
        assert await made.links.settle()


async def test_a_topic_whose_partition_cannot_be_read_is_not_taken_for_gone() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create(partitions=2)
        await made.replicate()
        await made.report(is_tombstone=True, remote_topic_ids=(7, 8))
        before = made.record()
        part = ORDERS.partition(1)
        await made.store.put(specs.spec_key(part), b"{")
        await made.view.wait(lambda: bool(made.view.fault(part)), timeout=PATIENCE_S)
        await made.links.settle()
        assert made.record() == before
        await made.store.put(specs.spec_key(ORDERS), b"{")
        await made.view.wait(lambda: bool(made.view.fault(ORDERS)), timeout=PATIENCE_S)
        await made.links.settle()
        assert made.record() == before


# -- where to start --------------------------------------------------------------------------------


def ends(*offsets: int) -> dict[TopicName, Extent]:
    return {ORDERS.partition(number): Extent(0, end) for number, end in enumerate(offsets)}


def starts(made: World) -> tuple[int, ...]:
    return link_topic(made).start_offsets


async def test_latest_is_where_partitions_ended_when_the_policy_was_set() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create(partitions=2)
        made.ends = ends(10, 20)
        await made.replicate(start="latest")
        made.ends = ends(100, 200)
        await made.links.settle()
        assert starts(made) == (10, 20)


async def test_a_topic_created_under_a_policy_is_copied_from_its_first_message() -> None:
    """A client created it and published before anybody noticed that it is to be replicated."""
    async with world() as made:
        await made.add_remote()
        await made.replicate(start="latest")
        await made.create(partitions=2)
        made.ends = ends(10, 20)
        await made.links.settle()
        assert starts(made) == (0, 0)


async def test_a_topic_from_before_a_policy_change_is_copied_from_its_start() -> None:
    """The topic looks older than the policy by then, if nobody has settled in between."""
    async with world() as made:
        await made.add_remote()
        await made.replicate(start="latest")
        await made.create(partitions=2)
        made.ends = ends(10, 20)
        await made.replicate(start="latest", forward=True)
        assert starts(made) == (0, 0)


async def test_partitions_added_under_a_policy_are_copied_from_their_start() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create(partitions=1)
        made.ends = ends(10)
        await made.replicate(start="latest")
        await made.grow(3)
        made.ends = ends(11, 12, 13)
        assert starts(made) == (10, 0, 0)  # at once: a runner that asks now is told of the topic
        await made.links.settle()
        assert starts(made) == (10, 0, 0)
        assert len(made.control.link("west").topics) == 1


async def test_a_runner_is_not_told_of_a_topic_until_it_is_known_where_to_start() -> None:
    """One partition is served by nobody at the moment: taking its beginning, or its end later, for the latest
    would both be wrong."""
    async with world() as made:
        await made.add_remote()
        await made.create(partitions=2)
        made.ends = ends(10)
        await made.replicate(start="latest")
        assert made.control.link("west").topics == []
        assert not await made.links.settle()
        assert {each.report.state for each in made.status().partitions} == {"starting"}
        made.ends = ends(10, 20)
        assert await made.links.settle()
        assert starts(made) == (10, 20)
        assert len(made.control.link("west").topics) == 1


async def test_a_policy_switched_off_and_on_again_takes_the_latest_anew() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create(partitions=1)
        made.ends = ends(10)
        await made.replicate(start="latest")
        await forget(made)
        made.ends = ends(50)
        await made.replicate(start="latest")
        assert starts(made) == (50,)
        await made.replicate(start="earliest")
        assert starts(made) == ()


# -- growth ----------------------------------------------------------------------------------------


async def test_partitions_added_here_are_wanted_there_until_they_are_seen() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create(partitions=2)
        await made.replicate()
        await made.report(remote_topic_ids=(7, 8))
        assert link_topic(made).grow_to == 0
        await made.grow(4)
        await made.links.settle()
        assert link_topic(made).grow_to == 4
        await made.report(remote_topic_ids=(7, 8, 9, 10))
        assert link_topic(made).grow_to == 0


async def test_fewer_partitions_there_from_the_beginning_are_no_growth() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create(partitions=2)
        await made.replicate()
        await made.report(remote_topic_ids=(7,))
        assert link_topic(made).grow_to == 0


async def test_a_partition_that_is_missing_there_does_not_count_as_seen() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create(partitions=2)
        await made.replicate()
        await made.grow(3)
        await made.links.settle()
        await made.report(remote_topic_ids=(7, 8, 0))
        assert link_topic(made).grow_to == 3


# -- the leader ------------------------------------------------------------------------------------


async def test_only_the_leader_settles_and_knows_how_far_it_is() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        made.leadership.current = 0
        for ask in (made.links.settle, lambda: made.replicate(), lambda: forget(made)):
            with pytest.raises(NotController):
                await ask()
        for look in (made.control.status, lambda: made.control.link("west")):
            with pytest.raises(NotController):
                look()


async def test_a_leader_that_was_deposed_writes_nothing() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.control.policies.set(Scope.parse("default"), records.PolicyRecord(remotes=("west",)))
        made.leadership.current = 99  # of another term than the store's
        with pytest.raises(Deposed):
            await made.links.settle()
        assert made.record() is None


async def test_tending_finds_what_was_set_while_nobody_led() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.control.policies.set(Scope.parse("default"), records.PolicyRecord(remotes=("west",)))
        tending = ReplicationMaintenance(made.view, made.links, made.reports, made.statuses, made.leadership)
        tending.start(Supervisor())
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not made.pipeline_names():  # noqa: ASYNC110 (no event tells)
                    await asyncio.sleep(0.05)
        finally:
            await tending.close()
        assert made.linked() == ["/default/orders to west"]
        assert made.reports.leading_since_ms > 0


async def test_where_a_copy_begins_is_kept_over_policies_and_silence() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate()
        await made.report(remote_topic_ids=(7,), begins=(5,))
        await made.control.clear(Scope.parse("default"))
        await made.replicate()
        await made.report(remote_topic_ids=(7,))
        record = made.record()
        assert record is not None
        assert record.begins == (5,)


# -- asked for -------------------------------------------------------------------------------------


async def test_a_deleted_topic_is_created_again_when_somebody_asks() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate()
        await made.report(is_tombstone=True, remote_topic_ids=(7,))
        await made.control.recreate(ORDERS, "west")
        record = made.record()
        assert record is not None
        assert (record.is_tombstone, record.remote_topic_ids, record.generation) == (False, (), 1)


async def test_an_uninformed_runner_does_not_mark_the_topic_deleted_again() -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate()
        await made.control.recreate(ORDERS, "west")
        await made.report(is_tombstone=True, remote_topic_ids=(7,), generation=0)
        record = made.record()
        assert record is not None
        assert (record.is_tombstone, record.remote_topic_ids) == (False, ())


@pytest.mark.parametrize(("topic", "remote"), [(SALES, "west"), (ORDERS, "north")])
async def test_what_is_not_replicated_cannot_be_created_again(topic: TopicName, remote: str) -> None:
    async with world() as made:
        await made.add_remote()
        await made.create()
        await made.replicate()
        with pytest.raises(LinkUnknown):
            await made.control.recreate(topic, remote)


async def test_a_link_that_is_not_there_cannot_be_asked_for() -> None:
    async with world() as made:
        with pytest.raises(RemoteUnknown):
            made.control.link("west")
        with pytest.raises(RemoteUnknown):
            made.control.status(remote="west")


def test_records_are_readable_when_fields_are_missing() -> None:
    """What an older broker has written."""
    record = msgspec.json.decode(b'{"topic_id": 3}', type=LinkRecord)
    assert (record.is_wanted, record.generation) == (True, 0)
    assert specs.encode(record) == b'{"topic_id":3}'
