"""The topics that a broker serves: finding, creating, loading and deleting them, over several lives."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path

import msgspec
import pytest

from sava.config import Config, PolicySettings
from sava.metadata.errors import Unavailable
from sava.records import Message, RecordBatch
from sava.schemas.registry import SchemaRegistry
from sava.schemas.types import Policy, TopicSchema
from sava.storage import keys, maintenance
from sava.storage.catalog import HOLD_KEY, Hold
from sava.storage.errors import Fenced, ObjectStoreUnavailable
from sava.storage.objectstore import ObjectStore
from sava.storage.orphans import GRACE_MS, NOTES, DeletedTopic
from sava.storage.topic_log import TopicClosed
from sava.topics import specs
from sava.topics.errors import (
    ConsumerClosed,
    NamespaceUnknown,
    NotOwner,
    SchemaRefused,
    TopicExists,
    TopicMismatch,
    TopicUnknown,
)
from sava.topics.maintenance import TopicsOptions
from sava.topics.names import InvalidName, TopicName
from sava.topics.served import ServedTopics
from sava.topics.specs import (
    DeadLetterPolicy,
    FailurePolicy,
    NamespacePolicy,
    Ownership,
)
from sava.topics.topic import Topic
from tests.support.memory_store import MemoryStore
from tests.support.storage import EAGER
from tests.support.topics import ORDERS, SLOW, World, batch_of, crash, options, publish, ranges, received
from tests.support.waiting import until


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def name(topic: str) -> TopicName:
    return TopicName("default", topic)


async def stored(topic: Topic, end: int) -> None:
    await until(lambda: topic.describe().stored_offset == end)


class TestFinding:
    async def test_namespaces_are_there_from_the_start(self, world: World) -> None:
        async with world.topics(Config(bootstrap_namespaces=("shop",))) as topics:
            await topics.ensure(TopicName("shop", "orders"), None)
            assert await topics.namespaces.list() == ["default", "shop", "system"]
            with pytest.raises(NamespaceUnknown):
                await topics.get_or_create(TopicName("nowhere", "orders"), True)

    async def test_a_namespace_that_cannot_be_one_is_found_at_the_start(self, world: World) -> None:
        with pytest.raises(InvalidName):
            async with world.topics(Config(bootstrap_namespaces=("a/b",))):
                pytest.fail("it started")

    async def test_an_unknown_topic_is_created_if_that_is_allowed(self, world: World) -> None:
        async with world.topics(Config(auto_create_topics=False)) as topics:
            for attempt in (
                topics.get(ORDERS),
                topics.get_or_create(ORDERS, True),
                topics.ensure(ORDERS, None),
            ):
                with pytest.raises(TopicUnknown):
                    await attempt
            await topics.create(ORDERS, reliable=True)
            with pytest.raises(TopicMismatch):
                await topics.ensure(ORDERS, False)
            assert (await topics.get_or_create(ORDERS, None)).name == ORDERS

    async def test_another_kind_of_topic_is_refused_whether_loaded_or_not(self, world: World) -> None:
        async with world.topics() as topics:
            await topics.create(ORDERS, reliable=True)
            for _ in range(2):
                with pytest.raises(TopicMismatch):
                    await topics.get_or_create(ORDERS, False)
                await topics.get(ORDERS)

    async def test_a_partitioned_topic_is_served_as_its_partitions(self, world: World) -> None:
        async with world.topics() as topics:
            loaded = await asyncio.gather(
                *(topics.get_or_create(ORDERS.partition(index), True) for index in (2, 0, 3, 1, 2, 0))
            )
            assert [topic.name for topic in loaded[:2]] == [ORDERS.partition(2), ORDERS.partition(0)]
            assert loaded[0] is loaded[4]
            assert len({topic.topic_id for topic in loaded}) == 4
            assert await topics.registry.partitions(ORDERS) == [ORDERS.partition(index) for index in range(4)]
            with pytest.raises(TopicMismatch):
                await topics.get(ORDERS)
            with pytest.raises(TopicExists):
                await topics.create(ORDERS, reliable=True)

    async def test_names_that_are_prefixes_of_each_other_never_mix(self, world: World) -> None:
        names = [name(topic) for topic in ("order", "orders", "orders-x", "o")]
        async with world.topics() as topics:
            for index, each in enumerate(names):
                topic = await topics.get_or_create(each, True)
                await publish(topic, *[f"{each.topic}{n}" for n in range(index + 1)])
                await topic.subscribe(options("s" * (index + 1)))
            await topics.delete(name("order"))
        async with world.topics() as topics:
            with pytest.raises(TopicUnknown):
                await topics.get(name("order"))
            for index, each in list(enumerate(names))[1:]:
                topic = await topics.get(each)
                assert list(topic.subscriptions) == ["s" * (index + 1)]
                consumer = await topic.subscribe(options("s" * (index + 1)))
                found = [text for _, text in await received(consumer, index + 1)]
                assert found == [f"{each.topic}{n}" for n in range(index + 1)]


class _Failing(MemoryStore):
    failures = 0

    async def range(self, prefix: str, **keys: object):
        if self.failures and prefix == specs.subscriptions_prefix(ORDERS):
            self.failures -= 1
            raise Unavailable("no quorum")
        return await super().range(prefix, **keys)  # type: ignore[arg-type]  # only forwards


class TestLoading:
    async def test_many_who_ask_share_one_loading(self, world: World) -> None:
        async with world.topics() as topics:
            await topics.create(ORDERS, reliable=True)
            found = await asyncio.gather(*(topics.get(ORDERS) for _ in range(50)))
            assert len(set(map(id, found))) == 1
            assert found[0].epoch == 2
            assert topics.by_id(found[0].topic_id) is found[0]
            assert list(topics.loaded) == [ORDERS]

    async def test_a_failure_is_told_to_all_and_the_next_call_tries_again(self, world: World) -> None:
        world.metadata = store = _Failing()
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await publish(topic, "a")
            (await topic.subscribe(options())).close()
        topics, storage = await world.start_topics()
        await until(lambda: ORDERS in topics.loaded)
        await crash(topics, storage)
        store.failures = 1
        async with world.topics() as topics:
            outcomes = await asyncio.gather(*(topics.get(ORDERS) for _ in range(5)), return_exceptions=True)
            assert all(isinstance(outcome, Unavailable) for outcome in outcomes)
            topic = await topics.get(ORDERS)
            assert list(topic.subscriptions) == ["s"]
            assert await publish(topic, "b") == [1]

    async def test_a_topic_whose_storage_was_fenced_is_loaded_anew(self, world: World) -> None:
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await publish(topic, "a")
            consumer = await topic.subscribe(options())
            assert topic.log is not None
            topic.log.fence(Fenced(str(ORDERS), topic.epoch, topic.epoch + 1))
            again = await topics.get(ORDERS)
            assert again.epoch > topic.epoch
            assert await publish(again, "b") == [1]
            with pytest.raises(ConsumerClosed):
                await consumer.receive()
            assert await received(await again.subscribe(options()), 2) == [(0, "a"), (1, "b")]

    async def test_what_was_owned_before_is_loaded_again_without_being_asked_for(self, world: World) -> None:
        """So that the journal's leftovers get uploaded, and the backlog is known."""
        async with world.topics() as topics:
            for index in range(20):
                await publish(await topics.get_or_create(name(f"t{index}"), True), "a")
        assert await world.object_count() == 0
        async with world.topics(storage=EAGER) as topics:
            await until(lambda: len(topics.loaded) == 20)
            await until(lambda: all(topic.describe().stored_offset for topic in topics.loaded.values()))

    async def test_another_brokers_topics_are_not_touched(self, world: World) -> None:
        async with world.topics() as topics:
            await topics.get_or_create(ORDERS, True)
        async with world.topics(broker=2) as topics:
            with pytest.raises(NotOwner) as refused:
                await topics.get(ORDERS)
            assert refused.value.owner == 1
            with pytest.raises(NotOwner):
                await topics.delete(ORDERS)
            assert await topics.registry.get(ORDERS) is not None
            mine = await topics.get_or_create(name("mine"), True)
            assert mine.epoch == 2

    async def test_the_store_may_come_later_than_the_broker(self, world: World) -> None:
        world.metadata = store = _Unready()
        async with world.topics() as topics:
            creating = asyncio.create_task(topics.get_or_create(ORDERS, True))
            await asyncio.sleep(0.05)
            assert not creating.done()
            store.is_ready = True
            assert (await creating).name == ORDERS


class _Unready(MemoryStore):
    is_ready = False

    async def txn(self, *args: object, **keys: object):
        if not self.is_ready:
            raise Unavailable("no quorum")
        return await super().txn(*args, **keys)  # type: ignore[arg-type]  # only forwards


class TestEnding:
    async def test_a_broker_that_stops_tells_everybody(self, world: World) -> None:
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            producer = await topic.producers.open("p", takeover=True)
            begun = await producer.begin(batch_of(producer, "a"))
            consumer = await topic.subscribe(options())
        assert await begun == 0
        with pytest.raises(TopicClosed):
            await producer.begin(batch_of(producer, "b", sequence=1))
        with pytest.raises(ConsumerClosed):
            await consumer.receive()
        with pytest.raises(TopicClosed):
            await topics.get(ORDERS)


class TestDeleting:
    async def test_everything_of_it_goes_and_the_next_one_of_the_name_is_new(self, world: World) -> None:
        async with world.topics(storage=EAGER) as topics:
            topic = await topics.get_or_create(ORDERS, True)
            producer = await topic.producers.open("p", takeover=True)
            await (await producer.begin(batch_of(producer, "a", "b")))
            consumer = await topic.subscribe(options(durable_id=True))
            await received(consumer, 2)
            await until(lambda: topic.describe().stored_offset == 2)
            waiting = asyncio.create_task(consumer.receive())
            await asyncio.sleep(0)
            await topics.delete(ORDERS)
            with pytest.raises(ConsumerClosed):
                await waiting
            with pytest.raises(TopicUnknown):
                await producer.begin(batch_of(producer, "c", sequence=2))
            with pytest.raises(TopicUnknown):
                await topics.delete(ORDERS)
            assert await world.object_count() == 0
            for prefix in (specs.TOPICS, keys.TOPICS):
                assert world.metadata.local.range(prefix).kvs == ()
            again = await topics.get_or_create(ORDERS, True)
            assert again.topic_id > topic.topic_id
            assert await publish(again, "new") == [0]
            assert again.subscriptions == {}
        async with world.topics() as topics:
            consumer = await (await topics.get(ORDERS)).subscribe(options())
            assert await received(consumer, 1) == [(0, "new")]

    async def test_all_partitions_go_with_their_topic(self, world: World) -> None:
        async with world.topics() as topics:
            await topics.create(ORDERS, reliable=True, partitions=3)
            for partition in await topics.registry.partitions(ORDERS):
                await publish(await topics.get(partition), "a")
            with pytest.raises(TopicMismatch):
                await topics.delete(ORDERS.partition(1))
            await topics.delete(ORDERS)
            assert dict(topics.loaded) == {}
            assert world.metadata.local.range(specs.TOPICS).kvs == ()

    async def test_two_who_delete_it_both_succeed(self, world: World) -> None:
        async with world.topics() as topics:
            await publish(await topics.get_or_create(ORDERS, True), "a")
            await asyncio.gather(topics.delete(ORDERS), topics.delete(ORDERS))
            assert await topics.registry.get(ORDERS) is None

    async def test_a_deletion_meets_a_loading(self, world: World) -> None:
        async with world.topics() as topics:
            await topics.create(ORDERS, reliable=True)
            outcomes = await asyncio.gather(
                *(topics.get(ORDERS) for _ in range(3)), topics.delete(ORDERS), return_exceptions=True
            )
            assert outcomes[3] is None
            assert dict(topics.loaded) == {}
            with pytest.raises(TopicUnknown):
                await topics.get(ORDERS)
            assert world.metadata.local.range(specs.TOPICS).kvs == ()

    async def test_what_a_crash_left_of_a_deletion_is_finished_at_the_next_start(self, world: World) -> None:
        async with world.topics(storage=EAGER) as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await publish(topic, "a")
            await topic.subscribe(options())
            await until(lambda: topic.describe().stored_offset == 1)
            await publish(topic, "b")
            await topics.registry.begin_delete(ORDERS)
        async with world.topics() as topics:
            await until(lambda: not world.metadata.local.range(specs.TOPICS).kvs)
            assert await world.object_count() == 0
            topic = await topics.get_or_create(ORDERS, True)
            assert await publish(topic, "new") == [0]

    async def test_a_deletion_that_failed_can_be_repeated(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with world.topics(storage=EAGER) as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await publish(topic, "a")
            await until(lambda: topic.describe().stored_offset == 1)

            async def unavailable(keys: object) -> None:
                raise ObjectStoreUnavailable("no answer")

            with monkeypatch.context() as patched:
                patched.setattr(world.store, "delete", unavailable)
                with pytest.raises(ObjectStoreUnavailable):
                    await topics.delete(ORDERS)
            with pytest.raises(TopicUnknown):
                await topics.get(ORDERS)
            await topics.delete(ORDERS)
            assert await world.object_count() == 0
            assert await publish(await topics.get_or_create(ORDERS, True), "new") == [0]

    async def test_what_the_journal_has_of_a_topic_that_is_gone_is_discarded(self, world: World) -> None:
        """Deleted by another broker while this one was down."""
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await publish(topic, "a")
        for records in (specs.TOPICS, keys.TOPICS):
            await world.metadata.delete_prefix(records)
        topics, storage = await world.start_topics()
        try:
            assert storage.leftovers == [topic.topic_id]
            await until(lambda: not storage.leftovers)
        finally:
            await topics.close()
            await storage.close()

    async def test_what_the_journal_has_of_another_cluster_is_left_alone(self, world: World) -> None:
        """The metadata store was set up anew: the journal may be all that is left of the old one."""
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await publish(topic, "a")
        world.metadata = MemoryStore()
        async with world.topics() as topics:
            await topics.namespaces.list()
            await topics._upkeep.release_leftovers()
            assert topics._storage.leftovers == [topic.topic_id]


class TestDeadLetters:
    async def test_they_go_to_a_topic_that_is_made_for_them(self, world: World) -> None:
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await publish(topic, "good", "bad")
            consumer = await topic.subscribe(options())
            await topic.reliable.set_failure_policy(
                "s", FailurePolicy(max_redelivery_count=0, dead_letter=DeadLetterPolicy.DEAD_LETTER)
            )
            await received(consumer, 2)
            consumer.ack(ranges(0))
            consumer.nack(ranges(1), reason="broken")
            await until(lambda: topic.describe().subscriptions[0].backlog == 0)
            letters = await topics.get(name("orders-s-dlq"))
            assert letters.spec.reliable
            reader = await letters.subscribe(options("reader"))
            ((delivery,),) = [await reader.receive()]
            ((offset, letter),) = delivery.messages()
            assert (offset, letter.payload, letter.producer) == (0, b"bad", "p")
            assert letter.attributes["x-original-topic"] == "/default/orders"
            assert letter.attributes["x-failure-reason"] == "broken"

    async def test_they_wait_while_another_broker_has_their_topic(self, world: World) -> None:
        async with world.topics() as topics:
            target = name("letters")
            await topics.ensure(target, True)
            await world.metadata.put(specs.ownership_key(target), specs.encode(Ownership(owner=2, epoch=1)))
            with pytest.raises(NotOwner):
                await topics._dead_letter(str(target), [Message(b"x")])


class TestRetention:
    async def test_what_a_subscription_has_not_acked_stays(self, world: World) -> None:
        async with world.topics(storage=EAGER) as topics:
            topic = await topics.get_or_create(ORDERS, True)
            consumer = await topic.subscribe(options())
            now_ms = time.time_ns() // 1_000_000
            for index in range(4):
                await publish(topic, "x")
                await stored(topic, index + 1)
            await topics.registry.change_policy(ORDERS, lambda _: NamespacePolicy(retention_time_minutes=1))
            assert await topic.enforce_retention(now_ms + 120_000) == 0
            await received(consumer, 4)
            consumer.ack(ranges(0, 1))
            assert await topic.enforce_retention(now_ms + 120_000) == 2
            await topic.unsubscribe("s")
            await topics.registry.change_policy(
                ORDERS, lambda _: NamespacePolicy(retention_time_minutes=0, retention_size_mb=0)
            )
            assert await topic.enforce_retention(now_ms + 120_000) == 0
            await topics.registry.change_policy(ORDERS, lambda _: NamespacePolicy(retention_time_minutes=1))
            assert await topic.enforce_retention(now_ms + 120_000) == 2
            assert topic.describe().start_offset == 4

    async def test_it_happens_by_itself(self, world: World) -> None:
        config = Config(policies=PolicySettings(retention_size_mb=1))
        often = TopicsOptions(retention_interval_s=0.02)
        async with world.topics(config, often, storage=EAGER) as topics:
            topic = await topics.get_or_create(ORDERS, True)
            for end in (1, 2):
                await topic.append(RecordBatch.encode([os.urandom(1 << 20)], publish_time=1))
                await stored(topic, end)
            await until(lambda: topic.describe().start_offset == 1)
            assert await world.object_count() == 1

    async def test_a_clock_that_jumps_a_day_ahead_deletes_nothing_early(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Schedule: two segments are to be kept for an hour. The broker's clock jumps a day ahead; retention
        looks three times. Both must stay until the object store's clock says that the hour is over, too."""
        often = TopicsOptions(retention_interval_s=0.02)
        looks = 0
        real, real_ns = Topic.enforce_retention, time.time_ns

        async def enforce_retention(topic: Topic, now_ms: int) -> int:
            nonlocal looks
            looks += 1
            return await real(topic, now_ms)

        monkeypatch.setattr(Topic, "enforce_retention", enforce_retention)
        async with world.topics(options=often, storage=EAGER) as topics:
            topic = await topics.get_or_create(ORDERS, True)
            for end in (1, 2):
                await publish(topic, "x")
                await stored(topic, end)
            await topics.registry.change_policy(ORDERS, lambda _: NamespacePolicy(retention_time_minutes=60))
            monkeypatch.setattr(time, "time_ns", lambda: real_ns() + 86_400 * 10**9)
            seen = looks
            await until(lambda: looks >= seen + 3)
            assert topic.describe().start_offset == 0

            async def tomorrow(_: ObjectStore) -> int:
                return time.time_ns() // 1_000_000

            monkeypatch.setattr(maintenance, "store_time_ms", tomorrow)
            monkeypatch.setattr(maintenance, "ASK_S", 0.0)
            await until(lambda: topic.describe().start_offset == 2)

    async def test_what_a_broker_with_a_clock_behind_has_stored_lives_its_whole_time(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Schedule: a broker whose clock is a day behind stores a segment, which is to be kept for an hour.
        Its clock is set right. The segment is a minute old and not a day."""
        real_ns = time.time_ns
        async with world.topics(storage=EAGER) as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await topics.registry.change_policy(ORDERS, lambda _: NamespacePolicy(retention_time_minutes=60))
            monkeypatch.setattr(time, "time_ns", lambda: real_ns() - 86_400 * 10**9)
            await publish(topic, "x")
            await stored(topic, 1)
            monkeypatch.undo()
            assert await topic.enforce_retention(time.time_ns() // 1_000_000 + 60_000) == 0
            assert await topic.enforce_retention(time.time_ns() // 1_000_000 + 3_700_000) == 1

    async def test_a_clock_that_jumps_ahead_does_not_end_a_hold(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Schedule: an operator holds segments for ten minutes and copies the object store. A broker's clock
        jumps an hour ahead: if it ended the hold, segments would be merged and deleted under the copy."""
        async with world.topics() as topics:
            real_ns = time.time_ns
            until_ms = real_ns() // 1_000_000 + 600_000
            await world.metadata.put(HOLD_KEY, msgspec.json.encode(Hold(until_ms=until_ms)))
            monkeypatch.setattr(time, "time_ns", lambda: real_ns() + 3600 * 10**9)
            assert await topics._upkeep._is_held()
            assert world.metadata.local.get(HOLD_KEY) is not None


class TestSweeping:
    async def test_what_arrives_of_a_deleted_topic_goes_by_itself(self, world: World) -> None:
        """An object is put while its topic is deleted, and its writer is killed before it finds that out."""
        often = TopicsOptions(sweep_interval_s=0.02)
        async with world.topics(options=often, storage=EAGER) as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await topic.append(RecordBatch.encode([b"x"], publish_time=1))
            await stored(topic, 1)
            assert topic.log is not None
            (segment,) = await topic.log.segments()
            await topics.delete(ORDERS)
            await world.store.put_new(segment.key, b"late")
            await asyncio.sleep(0.1)
            assert await world.object_count() == 1
            (note,) = (await world.metadata.range(NOTES)).kvs
            record = msgspec.json.decode(note.value, type=DeletedTopic)
            an_hour_ago = msgspec.structs.replace(record, at_ms=record.at_ms - GRACE_MS)
            await world.metadata.put(note.key, msgspec.json.encode(an_hour_ago))
            await until(lambda: world.metadata.local.get(note.key) is None)
            assert await world.object_count() == 0


class TestMerging:
    async def test_small_segments_are_merged_by_themselves_unless_they_are_held(self, world: World) -> None:
        often = TopicsOptions(merge_interval_s=0.02)
        await world.metadata.put(HOLD_KEY, msgspec.json.encode(Hold(until_ms=1 << 50)))
        async with world.topics(options=often, storage=EAGER) as topics:
            topic = await topics.get_or_create(ORDERS, True)
            for end in range(1, 9):
                await topic.append(RecordBatch.encode([b"%d" % end], publish_time=1))
                await stored(topic, end)
            await asyncio.sleep(0.1)
            assert (await world.object_count(), topics.merged_segments) == (8, 0)

            await world.metadata.delete(HOLD_KEY)
            await until(lambda: topics.merged_segments == 8)
            assert await world.object_count() == 1
            assert topic.log is not None
            read = [payload async for batch in topic.log.read(0) for payload in batch.payloads()]
            assert read == [b"%d" % end for end in range(1, 9)]

    async def test_topics_without_segments_are_left_alone(self, world: World) -> None:
        async with world.topics() as topics:
            assert await (await topics.get_or_create(ORDERS, False)).merge_segments() == 0


class TestSchemas:
    async def _registered(self, world: World, topics: ServedTopics) -> tuple[SchemaRegistry, int]:
        registry = SchemaRegistry(world.metadata)
        registered = await registry.register("numbers", "json_schema", b'{"type": "integer"}')
        await registry.register("texts", "string", b"string")
        await topics.ensure(ORDERS, True)
        return registry, registered.schema_id

    async def _set(self, world: World, **values: object) -> None:
        schema = TopicSchema(subject="numbers", **values)  # type: ignore[arg-type]
        await world.metadata.put(specs.schema_key(ORDERS), specs.encode(schema))

    async def test_the_first_producer_that_names_a_subject_gives_it_to_the_topic(self, world: World) -> None:
        async with world.topics() as topics:
            await self._registered(world, topics)
            topic = await topics.get(ORDERS)
            with pytest.raises(SchemaRefused):
                await topic.producers.open("p", schema_subject="unheard of", takeover=True)
            await topic.producers.open("p", schema_subject="numbers", takeover=True)
            assert topic.describe().schema_subject == "numbers"
            with pytest.raises(SchemaRefused):
                await topic.producers.open("q", schema_subject="texts", takeover=True)
            await topic.producers.open("q", takeover=True)

    async def test_a_topic_is_created_with_its_subject_or_not_at_all(self, world: World) -> None:
        async with world.topics() as topics:
            await self._registered(world, topics)
            other = name("other")
            with pytest.raises(SchemaRefused):
                await topics.create(other, reliable=True, schema_subject="unheard of")
            assert await topics.registry.get(other) is None
            await topics.create(other, reliable=True, partitions=2, schema_subject="numbers")
            assert (await topics.get(other.partition(1))).describe().schema_subject == "numbers"

    async def test_messages_are_measured_by_what_the_topic_says_now(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        async with world.topics() as topics:
            _, schema_id = await self._registered(world, topics)
            producer = await (await topics.get(ORDERS)).producers.open("p", takeover=True)
            fits = Message(b"1", schema_id=schema_id, schema_version=1)
            misfits = [
                Message(b"1"),
                Message(b"1", schema_id=schema_id + 1, schema_version=1),
                Message(b"1", schema_id=schema_id, schema_version=9),
            ]
            wrong = Message(b'"x"', schema_id=schema_id, schema_version=1)
            for message in (fits, *misfits, wrong):
                await producer.send(message)
            await self._set(world, policy=Policy.WARN, validate_payload=True)
            with caplog.at_level(logging.WARNING, "sava.topics.rules"):
                for message in (fits, *misfits, wrong):
                    await producer.send(message)
            assert len(caplog.records) == 1
            await self._set(world, policy=Policy.ENFORCE)
            for message in (fits, wrong):
                await producer.send(message)
            for message in misfits:
                with pytest.raises(SchemaRefused):
                    await producer.send(message)
            await self._set(world, policy=Policy.ENFORCE, validate_payload=True)
            await producer.send(fits)
            with pytest.raises(SchemaRefused):
                await producer.send(wrong)

    async def test_a_batch_may_name_several_versions(self, world: World) -> None:
        async with world.topics() as topics:
            registry, schema_id = await self._registered(world, topics)
            await registry.set_mode("numbers", "none")
            await registry.register("numbers", "json_schema", b'{"type": "string"}')
            await self._set(world, policy=Policy.ENFORCE, validate_payload=True)
            producer = await (await topics.get(ORDERS)).producers.open("p", takeover=True)

            def batch(*payloads: bytes, versions: list[int | None]) -> RecordBatch:
                return RecordBatch.encode(
                    payloads,
                    publish_time=1,
                    schema_id=schema_id,
                    schema_version=versions,
                    producer_id=producer.producer_id,
                    base_sequence=producer.next_sequence,
                )

            good = batch(b"1", b'"a"', b'"b"', b"2", versions=[1, 2, None, 1])
            assert await (await producer.begin(good)) == 0
            many = batch(*[b"%d" % number for number in range(1000)], versions=[1] * 1000)
            assert await (await producer.begin(many)) == 4
            for bad in (
                batch(b"1", b"2", versions=[1, 2]),
                batch(b"1", b"2", versions=[1, None]),
                batch(b"1", b'"a"', versions=[1, 3]),
            ):
                with pytest.raises(SchemaRefused):
                    await producer.begin(bad)


async def test_positions_survive_when_the_last_consumer_leaves_before_a_crash(world: World) -> None:
    topics, storage = await world.start_topics(SLOW)
    topic = await topics.get_or_create(ORDERS, True)
    await publish(topic, "a", "b")
    consumer = await topic.subscribe(options())
    await received(consumer, 2)
    consumer.ack(ranges(0))
    await topic.acks_stored("s")
    consumer.close()
    await crash(topics, storage)
    async with world.topics() as topics:
        consumer = await (await topics.get(ORDERS)).subscribe(options())
        assert await received(consumer, 1) == [(1, "b")]


async def test_a_bug_in_one_topics_maintenance_leaves_the_others_their_turn(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The first topic has a value that nothing foresaw. The whole pass ended there, each time: the topics
    behind it had no retention, and only the supervisor's log said that something had died."""
    async with world.topics() as topics:
        upkeep, done = topics._upkeep, []

        async def work(name: TopicName) -> None:
            if name.topic == "bad":
                raise KeyError("unforeseen")
            done.append(name.topic)

        names = [TopicName("default", topic) for topic in ("bad", "good", "better")]
        await upkeep.each(names, work, parallel=1)
        assert done == ["good", "better"]
        assert topics.skipped_maintenance["topic"] == 1
        assert "failed of a bug topic=/default/bad" in caplog.text
