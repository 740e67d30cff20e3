"""What a broker does with topics that are not its own, or no longer, in a cluster whose controller says who
serves what."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sava.metadata.commands import Put
from sava.metadata.errors import Unavailable
from sava.metadata.records import RecordBusy, unchanged
from sava.records import Message, RecordBatch
from sava.storage.topic_log import TopicClosed
from sava.topics import ownership, specs
from sava.topics.errors import (
    ConsumerClosed,
    NotOwner,
    TopicBeingDeleted,
    TopicMoved,
    TopicUnknown,
)
from sava.topics.names import TopicName
from sava.topics.registry import Registry
from sava.topics.served import ServedTopics
from sava.topics.specs import (
    DeadLetterPolicy,
    FailurePolicy,
    OwnershipState,
    TopicSpec,
)
from tests.support.storage import contents
from tests.support.topics import GIVEN, ORDERS, SLOW, World, crash, options, others, publish, ranges, received
from tests.support.waiting import PATIENCE_S, until
from tests.unit.storage.faults import UNAVAILABLE, FaultyMetadata, before, pass_through, refuse

OTHER = TopicName("default", "other")


class FaultyWorld(World):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.metadata = self.faults = FaultyMetadata()


class Stop:
    """Something that goes on when it is told to."""

    def __init__(self) -> None:
        self.reached, self.over = asyncio.Event(), asyncio.Event()

    async def __call__(self) -> None:
        self.reached.set()
        await self.over.wait()


@pytest.fixture
def world(tmp_path: Path) -> FaultyWorld:
    return FaultyWorld(tmp_path)


class TestNotOurs:
    async def test_a_new_topic_is_nobodys_until_it_is_assigned(self, world: FaultyWorld) -> None:
        async with world.topics(broker=1, **GIVEN) as topics:
            with pytest.raises(NotOwner) as refused:
                await topics.get_or_create(ORDERS, True)
            assert refused.value.owner == 0
            assert await topics.registry.get(ORDERS) is not None
            assert world.metadata.local.get(specs.ownership_key(ORDERS)) is None
            await world.step("assign", owner=1)
            topic = await topics.get(ORDERS)
            assert (topic.epoch, world.ownership().incarnation) == (2, 7)

    async def test_another_brokers_is_refused_at_once_with_its_name(self, world: FaultyWorld) -> None:
        await world.assigned(2)
        async with world.topics(broker=1, **GIVEN) as topics:
            for attempt in (topics.get(ORDERS), topics.get_or_create(ORDERS, True)):
                with pytest.raises(NotOwner) as refused:
                    await attempt
                assert refused.value.owner == 2

    async def test_a_broker_that_is_not_registered_takes_nothing_up(self, world: FaultyWorld) -> None:
        await world.assigned(1)
        incarnation = 0
        given = GIVEN | {"incarnation": lambda: incarnation}
        async with world.topics(broker=1, **given) as topics:
            with pytest.raises(NotOwner) as refused:
                await topics.get(ORDERS)
            assert refused.value.owner == 0
            assert world.ownership().epoch == 1
            incarnation = 9
            assert (await topics.get(ORDERS)).epoch == 2
            assert world.ownership().incarnation == 9

    async def test_what_it_has_is_not_taken_up_before_its_agent_says_so(self, world: FaultyWorld) -> None:
        await world.assigned(1)
        await Registry(world.metadata).begin_delete(ORDERS)
        await world.assigned(1, OTHER)
        async with world.topics(broker=1, **GIVEN) as topics:
            await topics.ready()
            for _ in range(50):
                await asyncio.sleep(0)
            assert not topics.loaded
            assert not len(topics._loading)
            assert await topics.registry.list_all() != {}
            await topics.finish_deletions()
            assert list(await topics.registry.list_all()) == [OTHER]

    async def test_ids_of_consumers_lead_to_the_owner(self, world: FaultyWorld) -> None:
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as first, world.topics(broker=2, **GIVEN) as second:
            consumer = await (await first.get(ORDERS)).subscribe(options(durable_id=True))
            with pytest.raises(NotOwner) as refused:
                await second.consumer_by_id(consumer.consumer_id)
            assert refused.value.owner == 1


class TestDropping:
    async def test_who_uses_it_is_told_and_nothing_is_sealed(self, world: FaultyWorld) -> None:
        await world.assigned(1)
        async with world.topics(broker=1, options=SLOW, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            await publish(topic, "a", "b")
            producer = await topic.producers.open("p", takeover=True)
            consumer = await topic.subscribe(options())
            await received(consumer, 2)
            consumer.ack(ranges(0))
            await topics.drop(ORDERS, "the record names another")
            assert ORDERS not in topics.loaded
            for attempt in (producer.send(Message(b"c")), consumer.receive(), topic.append(_batch("d"))):
                with pytest.raises(TopicMoved):
                    await attempt
            again = await topics.get(ORDERS)
            assert again.epoch == topic.epoch + 1
            assert await received(await again.subscribe(options()), 1) == [(1, "b")]
            await topics.drop(OTHER, "which is not here")

    async def test_whoever_is_told_learns_where_it_is_if_that_is_known(self, world: FaultyWorld) -> None:
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            producer = await topic.producers.open("p", takeover=True)
            await world.step("give_back")
            await world.step("assign", owner=2)
            await topics.drop(ORDERS, "the record names another")
            with pytest.raises(TopicMoved) as moved:
                await producer.send(Message(b"c"))
            assert moved.value.owner == 2

    async def test_all_of_them_those_included_that_are_being_loaded(self, world: FaultyWorld) -> None:
        """The registration is lost. What was being loaded at that moment must not be served afterwards."""
        await world.assigned(1)
        await world.assigned(1, OTHER)
        incarnation = 7
        given = GIVEN | {"incarnation": lambda: incarnation}
        async with world.topics(broker=1, **given) as topics:
            await topics.get(OTHER)
            stop = Stop()
            world.faults.plan("range", before(stop))  # its subscriptions are read
            loading = asyncio.create_task(topics.get(ORDERS))
            await stop.reached.wait()
            incarnation = 0
            dropping = asyncio.create_task(topics.drop_all("its registration is gone"))
            await until(lambda: not topics.loaded)
            assert not dropping.done()
            stop.over.set()
            await dropping
            assert (await loading).name == ORDERS
            assert not topics.loaded
            for name in (ORDERS, OTHER):
                with pytest.raises(NotOwner):
                    await topics.get(name)
            incarnation = 8
            for name in (ORDERS, OTHER):
                await topics.get(name)
                assert world.ownership(name).incarnation == 8

    async def test_a_topic_that_ends_already_is_waited_for(self, world: FaultyWorld) -> None:
        await world.assigned(1)
        async with world.topics(broker=1, options=SLOW, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            await publish(topic, "a")
            consumer = await topic.subscribe(options())
            await received(consumer, 1)
            consumer.ack(ranges(0))
            stop = Stop()
            world.faults.plan("txn", before(stop))  # its position is written
            ending = asyncio.create_task(topics.drop(ORDERS, "first"))
            await stop.reached.wait()
            second = asyncio.create_task(topics.drop_all("second"))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not second.done()
            stop.over.set()
            await second
            assert topic.log is not None
            assert topic.log.status.value == "closed"
            await ending

    async def test_an_owner_that_was_replaced_and_does_not_know_acknowledges_nothing(
        self, world: FaultyWorld
    ) -> None:
        """
        owner   rests with everything in segments ─▶ is cut off
        others  give the topic up, which has nothing that only the owner knows
        owner   comes back, and is asked to publish
        """
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as first, world.topics(broker=2, **GIVEN) as second:
            topic = await first.get(ORDERS)
            await world.step("orphan")
            await world.step("recover")
            await world.step("assign", owner=2)
            with pytest.raises(TopicMoved):
                await publish(topic, "a")
            assert await publish(await second.get(ORDERS), "b") == [0]

    async def test_an_older_tenure_that_ends_late_does_not_end_the_newer_one(
        self, world: FaultyWorld
    ) -> None:
        await world.assigned(1)
        async with world.topics(broker=1, options=SLOW, **GIVEN) as topics:
            older = await topics.get(ORDERS)
            await older.subscribe(options())
            (kept,) = topics._keeper._kept
            await topics.drop(ORDERS, "to be loaded again")
            newer = await topics.get(ORDERS)
            assert not await kept.tenure.still_holds()
            for _ in range(10):
                await asyncio.sleep(0)
            assert topics.loaded[ORDERS] is newer


def _batch(*payloads: str) -> RecordBatch:
    return RecordBatch.from_messages([Message(payload.encode()) for payload in payloads])


class TestDeleting:
    async def test_a_topic_that_another_broker_has_goes_when_it_is_released(self, world: FaultyWorld) -> None:
        await world.assigned(1)
        waited: list[Sequence[TopicName]] = []
        async with world.topics(broker=1, **GIVEN) as first:

            async def released(names: Sequence[TopicName]) -> None:
                """The owner's agent sees the record, and acts."""
                waited.append(names)
                for name in names:
                    assert world.ownership(name).state is OwnershipState.DELETING
                    await first.release(name)
                    assert world.ownership(name).owner == 0

            async with world.topics(broker=2, others=others(released=released), **GIVEN) as second:
                topic = await first.get(ORDERS)
                await publish(topic, "a")
                producer = await topic.producers.open("p", takeover=True)
                consumer = await topic.subscribe(options())
                await second.delete(ORDERS)
                assert waited == [[ORDERS]]
                with pytest.raises(TopicUnknown):
                    await producer.send(Message(b"b"))
                with pytest.raises(ConsumerClosed):
                    await consumer.receive()
                for topics in (first, second):
                    with pytest.raises(TopicUnknown):
                        await topics.get(ORDERS)
                assert world.metadata.local.range(specs.topic_prefix(ORDERS)).kvs == ()
                assert first._storage.leftovers == []
                # And the name is as new.
                await world.assigned(1)
                assert await log_of(first) == []

    async def test_partitions_go_from_wherever_they_are(self, world: FaultyWorld) -> None:
        async with world.topics(broker=1, **GIVEN) as first:

            async def released(names: Sequence[TopicName]) -> None:
                for name in names:
                    await first.release(name)

            async with world.topics(broker=2, others=others(released=released), **GIVEN) as second:
                await second.create(ORDERS, reliable=True, partitions=3)
                for index, broker in ((0, 1), (1, 2)):  # and nobody has the third
                    await world.step("assign", ORDERS.partition(index), owner=broker)
                await publish(await first.get(ORDERS.partition(0)), "a")
                await publish(await second.get(ORDERS.partition(1)), "b")
                await second.delete(ORDERS)
                assert not first.loaded
                assert not second.loaded
                assert world.metadata.local.range(specs.TOPICS).kvs == ()

    async def test_while_the_owner_is_silent_the_name_stays_taken(self, world: FaultyWorld) -> None:
        """Any other broker can finish the deletion."""
        await world.assigned(1)
        is_gone = False

        async def released(names: Sequence[TopicName]) -> None:
            if not is_gone:
                raise Unavailable(f"broker 1 has not released {names[0]}")

        async with world.topics(broker=2, others=others(released=released), **GIVEN) as second:
            with pytest.raises(Unavailable):
                await second.delete(ORDERS)
            with pytest.raises(TopicBeingDeleted):
                await second.create(ORDERS, reliable=True)
            await second.finish_deletions()
            assert _spec(world).deleting
        is_gone = True  # its registration is
        async with world.topics(broker=3, others=others(released=released), **GIVEN) as third:
            await third.finish_deletions()
            assert world.metadata.local.range(specs.TOPICS).kvs == ()
            await third.finish_deletions()

    async def test_an_assignment_that_has_not_seen_the_deletion_is_refused(self, world: FaultyWorld) -> None:
        """The controller decided from what it knew a moment ago: nobody has it, and there was no record."""

        async def released(names: Sequence[TopicName]) -> None: ...

        async with world.topics(broker=1, others=others(released=released), **GIVEN) as topics:
            await topics.create(ORDERS, reliable=True)
            stop = Stop()
            # The transactions of a deletion: the topic's record, the ownership's, then what is removed.
            world.faults.plan("txn", pass_through, pass_through, before(stop))
            deleting = asyncio.create_task(topics.delete(ORDERS))
            await stop.reached.wait()
            key = specs.ownership_key(ORDERS)
            assigned = ownership.after("assign", ORDERS, ownership.UNASSIGNED, owner=1)
            late = (Put(key, specs.encode(assigned)),)
            assert not (await world.metadata.txn((unchanged(key, 0),), late)).succeeded
            stop.over.set()
            await deleting

    async def test_of_two_who_delete_it_the_slower_leaves_nothing_behind(self, world: FaultyWorld) -> None:
        """It would be found by the next topic of the name, which could never be served."""
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as first, world.topics(broker=2, **GIVEN) as second:
            await first.ready()
            await second.ready()
            stop = Stop()
            world.faults.plan("txn", pass_through, before(stop))  # the topic's record is marked
            slower = asyncio.create_task(first.delete(ORDERS))
            await stop.reached.wait()
            await world.step("give_back")
            await second.delete(ORDERS)
            stop.over.set()
            with pytest.raises(RecordBusy):
                await slower
            assert world.metadata.local.range(specs.TOPICS).kvs == ()

    async def test_nobody_lets_go_of_what_is_not_being_deleted(self, world: FaultyWorld) -> None:
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            await publish(topic, "a")
            for step in (None, "move"):
                if step is not None:
                    await world.step(step)
                await topics.release(ORDERS)
                assert topics.loaded[ORDERS] is topic
            await world.step("delete", owner=2)
            await topics.release(ORDERS)
            assert world.ownership().owner == 2
            assert world.metadata.local.range("/storage/").kvs

    async def test_a_record_that_cannot_be_read_is_no_reason_to_let_go(self, world: FaultyWorld) -> None:
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            world.faults.plan("get", refuse(UNAVAILABLE))
            with pytest.raises(Unavailable):
                await topics.release(ORDERS)
            assert topics.loaded[ORDERS] is topic


async def log_of(topics: ServedTopics) -> list[str]:
    log = (await topics.get(ORDERS)).log
    assert log is not None
    return await contents(log)


def _spec(world: FaultyWorld) -> TopicSpec:
    kv = world.metadata.local.get(specs.spec_key(ORDERS))
    assert kv is not None
    return specs.decode(kv, TopicSpec)


class TestJournal:
    async def test_what_moved_away_is_let_go_of(self, world: FaultyWorld) -> None:
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as first, world.topics(broker=2, **GIVEN) as second:
            topic = await first.get(ORDERS)
            await publish(topic, "a", "b")
            await world.step("move", target=2)
            end = await first.hand_over(ORDERS, timeout=PATIENCE_S)
            await world.step("seal", end=end)
            await world.step("assign", owner=2)
            await publish(await second.get(ORDERS), "c")
            await first._upkeep.release_leftovers()
            assert first._storage.leftovers == []
            assert second._storage.leftovers == []
            assert await log_of(second) == ["a", "b", "c"]

    @pytest.mark.parametrize("states", [[], ["orphan"], ["move"]])
    async def test_a_tail_that_only_this_journal_has_is_kept(
        self, world: FaultyWorld, states: list[str]
    ) -> None:
        """The broker starts, and its topic is its own still, or waits for it, or was to be moved away."""
        await world.assigned(1)
        topics, storage = await world.start_topics(broker=1, **GIVEN)
        topic = await topics.get(ORDERS)
        await publish(topic, "a", "b")
        await crash(topics, storage)
        for step in states:
            await world.step(step)
        async with world.topics(broker=1, **GIVEN) as topics:
            await topics._upkeep.release_leftovers()
            assert topics._storage.leftovers == [topic.topic_id]
            if states == ["move"]:
                await world.step("roll_back")
            assert await log_of(topics) == ["a", "b"]

    async def test_it_is_kept_however_often_the_topic_is_dropped(self, world: FaultyWorld) -> None:
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as topics:
            for number in range(3):
                await publish(await topics.get(ORDERS), str(number))
                await topics.drop_all("its registration is gone")
                await topics._upkeep.release_leftovers()
            assert await log_of(topics) == ["0", "1", "2"]


class TestDeadLetters:
    async def test_they_go_to_the_broker_that_has_their_topic(self, world: FaultyWorld) -> None:
        sent: list[tuple[TopicName, list[bytes]]] = []

        async def publish_elsewhere(name: TopicName, batch: RecordBatch) -> None:
            sent.append((name, [bytes(payload) for payload in batch.payloads()]))

        await world.assigned(1)
        await world.assigned(2, OTHER)
        elsewhere = others(publish=publish_elsewhere)
        async with world.topics(broker=1, options=SLOW, others=elsewhere, **GIVEN) as topics:
            topic = await _failing_topic(topics)
            consumer = await topic.subscribe(options())
            await received(consumer, 1)
            consumer.nack(ranges(0), reason="broken")
            await until(lambda: topic.describe().subscriptions[0].backlog == 0)
            assert sent == [(OTHER, [b"bad"])]

    async def test_they_wait_while_nobody_can_be_asked(self, world: FaultyWorld) -> None:
        """And are handed on when their topic has come here."""
        await world.assigned(1)
        await world.assigned(2, OTHER)
        async with world.topics(broker=1, options=SLOW, **GIVEN) as topics:
            topic = await _failing_topic(topics)
            consumer = await topic.subscribe(options())
            await received(consumer, 1)
            consumer.nack(ranges(0), reason="broken")
            subscription: Any = topic.subscriptions["s"]
            await until(lambda: "dead letters wait" in subscription.stats.error)
            assert topic.describe().subscriptions[0].backlog == 1
            await world.step("give_back", OTHER)
            await world.step("assign", OTHER, owner=1)
            await until(lambda: topic.describe().subscriptions[0].backlog == 0)
            letters = (await topics.get(OTHER)).log
            assert letters is not None
            assert await contents(letters) == ["bad"]


async def _failing_topic(topics: ServedTopics) -> Any:
    topic = await topics.get(ORDERS)
    await publish(topic, "bad")
    (await topic.subscribe(options())).close()
    await topic.reliable.set_failure_policy(
        "s",
        FailurePolicy(
            max_redelivery_count=0, dead_letter=DeadLetterPolicy.DEAD_LETTER, dead_letter_topic=str(OTHER)
        ),
    )
    return topic


async def test_a_broker_that_stops_keeps_its_topics_for_its_next_life(world: FaultyWorld) -> None:
    await world.assigned(1)
    async with world.topics(broker=1, **GIVEN) as topics:
        topic = await topics.get(ORDERS)
        producer = await topic.producers.open("p", takeover=True)
    with pytest.raises(TopicClosed):
        await producer.send(Message(b"x"))
    assert (world.ownership().owner, world.ownership().state) == (1, OwnershipState.ASSIGNED)
