"""One topic over several lives of its broker: what it keeps, and what holds for producers and consumers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from sava.metadata.commands import KeyValue
from sava.metadata.errors import Unavailable
from sava.storage.errors import OffsetOutOfRange
from sava.topics import ownership, specs, subscriptions
from sava.topics.consumer import (
    FORGET_S,
    MAX_PER_SUBSCRIPTION,
    ConsumerIds,
    ConsumerRecords,
    KnownConsumer,
)
from sava.topics.errors import (
    ConsumerClosed,
    ConsumerReplaced,
    LimitReached,
    NotOwner,
    SubscriptionBusy,
    SubscriptionMismatch,
    SubscriptionUnknown,
    TopicMismatch,
    TopicMoved,
)
from sava.topics.names import InvalidName, TopicName
from sava.topics.non_reliable import TransientSubscriptions
from sava.topics.specs import (
    EARLIEST,
    LATEST,
    AtOffset,
    AtTime,
    CursorRecord,
    DeadLetterPolicy,
    FailurePolicy,
    NamespacePolicy,
    Ownership,
    Position,
    SubscriptionSpec,
    SubscriptionType,
)
from sava.topics.subscription import Subscription
from tests.support.memory_store import MemoryStore
from tests.support.topics import (
    ORDERS,
    SLOW,
    World,
    assign,
    batch_of,
    crash,
    options,
    publish,
    ranges,
    received,
)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def stored_cursor(world: World, subscription: str = "s") -> CursorRecord:
    kv = world.metadata.local.get(specs.cursor_key(ORDERS, subscription))
    assert kv is not None
    return specs.decode(kv, CursorRecord)


class TestRestarts:
    async def test_offsets_and_positions_go_on_where_they_were(self, world: World) -> None:
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            assert await publish(topic, "a", "b", "c", "d", "e") == [0, 1, 2, 3, 4]
            consumer = await topic.subscribe(options())
            assert [offset for offset, _ in await received(consumer, 5)] == [0, 1, 2, 3, 4]
            consumer.ack(ranges(0, 1, 3))
            first_epoch = topic.epoch
        assert stored_cursor(world) == CursorRecord(2, (3, 4), first_epoch)
        async with world.topics() as topics:
            topic = await topics.get(ORDERS)
            assert topic.epoch > first_epoch
            assert await publish(topic, "f") == [5]
            consumer = await topic.subscribe(options())
            assert await received(consumer, 3) == [(2, "c"), (4, "e"), (5, "f")]

    async def test_a_subscription_begins_where_it_was_made_though_nobody_ever_acked(
        self, world: World
    ) -> None:
        """Subscribe, disconnect, publish, crash: what was published is for the next consumer."""
        topics, storage = await world.start_topics(SLOW)
        topic = await topics.get_or_create(ORDERS, True)
        await publish(topic, "before")
        (await topic.subscribe(options(start=LATEST))).close()
        await publish(topic, "after")
        await crash(topics, storage)
        async with world.topics() as topics:
            topic = await topics.get(ORDERS)
            assert topic.describe().subscriptions[0].backlog == 1
            consumer = await topic.subscribe(options(start=LATEST))
            assert await received(consumer, 1) == [(1, "after")]

    async def test_after_a_crash_what_was_not_stored_is_delivered_again(self, world: World) -> None:
        topics, storage = await world.start_topics(SLOW)
        topic = await topics.get_or_create(ORDERS, True)
        await publish(topic, "a", "b", "c")
        consumer = await topic.subscribe(options())
        await received(consumer, 3)
        consumer.ack(ranges(0))
        await topic.acks_stored("s")
        consumer.ack(ranges(1))
        await crash(topics, storage)
        async with world.topics() as topics:
            consumer = await (await topics.get(ORDERS)).subscribe(options())
            assert await received(consumer, 2) == [(1, "b"), (2, "c")]

    async def test_a_producer_is_the_same_after_a_restart(self, world: World) -> None:
        async with world.topics() as topics:
            producer = await (await topics.get_or_create(ORDERS, True)).producers.open("p", takeover=True)
            batch = batch_of(producer, "a", "b")
            assert await (await producer.begin(batch)) == 0
        async with world.topics() as topics:
            again = await (await topics.get(ORDERS)).producers.open("p", takeover=True)
            assert again.producer_id == producer.producer_id
            assert again.next_sequence == 2
            assert await (await again.begin(batch)) == 0
            assert await (await again.begin(batch_of(again, "c"))) == 2


class TestSubscribing:
    async def test_where_a_new_subscription_begins(self, world: World) -> None:
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            producer = await topic.producers.open("p", takeover=True)
            await (await producer.begin(batch_of(producer, "a", "b", "c")))
            positions: dict[str, Position] = {"e": EARLIEST, "l": LATEST, "o": AtOffset(1), "t": AtTime(2)}
            for name, start in positions.items():
                (await topic.subscribe(options(name, start=start))).close()
            assert {name: stored_cursor(world, name).next_offset for name in positions} == {
                "e": 0,
                "l": 3,
                "o": 1,
                "t": 3,
            }
            with pytest.raises(OffsetOutOfRange):
                await topic.subscribe(options("x", start=AtOffset(4)))
            with pytest.raises(SubscriptionUnknown):
                await topic.unsubscribe("x")

    async def test_many_consumers_at_once_make_one_subscription(self, world: World) -> None:
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            consumers = await asyncio.gather(*(topic.subscribe(options("s", f"c{n}")) for n in range(20)))
            assert len({consumer.consumer_id for consumer in consumers}) == 20
            assert list(topic.subscriptions) == ["s"]
            assert len(topic.subscriptions["s"].consumers) == 20

    async def test_another_type_is_refused(self, world: World) -> None:
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            consumer = await topic.subscribe(options(type=SubscriptionType.SHARED))
            with pytest.raises(SubscriptionMismatch):
                await topic.subscribe(options(consumer="d", type=SubscriptionType.EXCLUSIVE))
            consumer.close()
            with pytest.raises(SubscriptionMismatch):
                await topic.subscribe(options(type=SubscriptionType.EXCLUSIVE))

    async def test_exclusive_is_for_one_until_it_leaves(self, world: World) -> None:
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            exclusive = options(type=SubscriptionType.EXCLUSIVE)
            first = await topic.subscribe(exclusive)
            with pytest.raises(SubscriptionBusy):
                await topic.subscribe(options(consumer="d", type=SubscriptionType.EXCLUSIVE))
            second = await topic.subscribe(exclusive)
            with pytest.raises(ConsumerReplaced):
                await first.receive()
            second.close()
            await topic.subscribe(options(consumer="d", type=SubscriptionType.EXCLUSIVE))

    async def test_an_unsubscribed_name_begins_anew(self, world: World) -> None:
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await publish(topic, "a", "b")
            consumer = await topic.subscribe(options(durable_id=True))
            await received(consumer, 2)
            consumer.ack(ranges(0, 1))
            await topic.unsubscribe("s")
            with pytest.raises(ConsumerClosed):
                await consumer.receive()
            assert world.metadata.local.range(specs.subscriptions_prefix(ORDERS)).kvs == ()
            consumer = await topic.subscribe(options())
            assert await received(consumer, 2) == [(0, "a"), (1, "b")]

    @pytest.mark.parametrize(
        ("subscription", "consumer"), [("", "c"), ("a/b", "c"), ("s", ""), ("s", "x" * 201)]
    )
    async def test_names_are_checked(self, world: World, subscription: str, consumer: str) -> None:
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            with pytest.raises(InvalidName):
                await topic.subscribe(options(subscription, consumer))

    async def test_a_record_of_an_attempt_whose_outcome_was_not_known_is_taken_up(self, world: World) -> None:
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await publish(topic, "a", "b")
            spec = SubscriptionSpec(type=SubscriptionType.SHARED)
            await world.metadata.put(specs.subscription_key(ORDERS, "s"), specs.encode(spec))
            await world.metadata.put(specs.cursor_key(ORDERS, "s"), specs.encode(CursorRecord(1)))
            consumer = await topic.subscribe(options())
            assert await received(consumer, 1) == [(1, "b")]


class TestChanging:
    async def test_a_policy_is_stored_and_holds_at_once(self, world: World) -> None:
        policy = FailurePolicy(
            max_redelivery_count=0, base_redelivery_delay_ms=1, dead_letter=DeadLetterPolicy.DROP
        )
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await publish(topic, "a", "b")
            consumer = await topic.subscribe(options())
            await received(consumer, 2)
            await asyncio.gather(
                topic.reliable.set_failure_policy("s", policy), topic.reliable.set_max_unacked("s", 7)
            )
            consumer.nack(ranges(0))
            await topic.acks_stored("s")
            assert stored_cursor(world).next_offset == 1
            with pytest.raises(SubscriptionUnknown):
                await topic.reliable.set_max_unacked("x", 7)
        async with world.topics() as topics:
            (subscription,) = (await topics.get(ORDERS)).subscriptions.values()
            assert isinstance(subscription, Subscription)
            assert subscription.spec.failure_policy == policy
            assert subscription.spec.max_unacked_messages == 7

    @pytest.mark.parametrize("first", ["creation", "settings"])
    async def test_settings_ahead_and_a_creation_at_once_see_each_other(
        self, world: World, monkeypatch: pytest.MonkeyPatch, first: str
    ) -> None:
        """A consumer's creation of the subscription reads that nothing is set, an operator sets a limit, the
        creation writes; or the operator's call reads, the creation writes, and then the operator's call.
        Each writes on the condition of what it has read, so the limit holds in both schedules."""
        store, key = world.metadata, specs.settings_key(ORDERS, "s")
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            works: dict[str, Callable[[], Awaitable[object]]] = {
                "creation": lambda: topic.subscribe(options()),
                "settings": lambda: topic.reliable.set_max_unacked("s", 7, ahead=True),
            }
            second = works["settings" if first == "creation" else "creation"]
            get = store.get

            async def get_then_let_the_other_write(wanted: str, **how: Any) -> KeyValue | None:
                found = await get(wanted, **how)
                if wanted == key:
                    monkeypatch.setattr(store, "get", get)
                    await second()
                return found

            monkeypatch.setattr(store, "get", get_then_let_the_other_write)
            await works[first]()
            (subscription,) = topic.subscriptions.values()
            assert isinstance(subscription, Subscription)
            assert subscription.spec.max_unacked_messages == 7
            assert world.metadata.local.get(key) is None

    async def test_settings_ahead_end_with_the_subscription_that_took_them(self, world: World) -> None:
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await topic.reliable.set_max_unacked("s", 7, ahead=True)
            await topic.subscribe(options())
            await topic.unsubscribe("s")
            await topic.subscribe(options())
            (subscription,) = topic.subscriptions.values()
            assert isinstance(subscription, Subscription)
            assert subscription.spec.max_unacked_messages != 7

    async def test_settings_ahead_are_bounded(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(subscriptions, "MAX_AHEAD", 2)
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await topic.reliable.set_max_unacked("a", 7, ahead=True)
            await topic.reliable.set_max_unacked("b", 7, ahead=True)
            await topic.reliable.set_max_unacked("b", 8, ahead=True)
            with pytest.raises(LimitReached):
                await topic.reliable.set_max_unacked("c", 7, ahead=True)

    async def test_seeking_back_and_forth(self, world: World) -> None:
        async with world.topics(options=SLOW) as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await publish(topic, "a", "b", "c")
            consumer = await topic.subscribe(options())
            await received(consumer, 3)
            consumer.ack(ranges(0, 1, 2))
            assert await topic.reliable.seek("s", AtOffset(1)) == 1
            assert stored_cursor(world).next_offset == 1
            assert await received(consumer, 2) == [(1, "b"), (2, "c")]
            assert await topic.reliable.seek("s", LATEST) == 3
            with pytest.raises(OffsetOutOfRange):
                await topic.reliable.seek("s", AtOffset(9))


class TestLimits:
    async def test_they_count_who_is_there_and_change_at_once(self, world: World) -> None:
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await topics.registry.change_policy(
                ORDERS,
                lambda _: NamespacePolicy(
                    max_subscriptions_per_topic=2, max_consumers_per_topic=3, max_consumers_per_subscription=2
                ),
            )
            first = await topic.subscribe(options("s", "a"))
            await topic.subscribe(options("s", "b"))
            with pytest.raises(LimitReached):
                await topic.subscribe(options("s", "c"))
            await topic.subscribe(options("s", "b"))
            await topic.subscribe(options("t", "a"))
            with pytest.raises(LimitReached):
                await topic.subscribe(options("t", "b"))
            with pytest.raises(LimitReached):
                await topic.subscribe(options("u", "a"))
            first.close()
            await topic.subscribe(options("s", "c"))
            await topics.registry.change_policy(ORDERS, lambda _: NamespacePolicy())
            await topic.subscribe(options("u", "a"))

    async def test_so_it_is_on_a_topic_that_keeps_nothing(self, world: World) -> None:
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, False)
            policy = NamespacePolicy(max_subscriptions_per_topic=1, max_consumers_per_topic=1)
            await topics.registry.change_policy(ORDERS, lambda _: policy)
            first = await topic.subscribe(options("s", "a"))
            for other in (options("s", "b"), options("t", "a")):
                with pytest.raises(LimitReached):
                    await topic.subscribe(other)
            first.close()
            await topic.subscribe(options("s", "b"))


class TestOwnership:
    async def test_a_replaced_owner_does_not_overwrite_the_newer_owners_cursor(self, world: World) -> None:
        async with world.topics(options=SLOW) as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await publish(topic, "a", "b")
            consumer = await topic.subscribe(options())
            await received(consumer, 2)
            newer = CursorRecord(2, (), 9)
            await world.metadata.put(
                specs.ownership_key(ORDERS), specs.encode(Ownership(owner=2, epoch=topic.epoch + 1))
            )
            await world.metadata.put(specs.cursor_key(ORDERS, "s"), specs.encode(newer))
            consumer.ack(ranges(0))
            with pytest.raises(TopicMoved) as moved:
                await topic.acks_stored("s")
            assert moved.value.owner == 2
            with pytest.raises(TopicMoved):
                await consumer.receive()
            assert stored_cursor(world) == newer
            with pytest.raises(NotOwner):
                await topics.get(ORDERS)

    async def test_nor_does_it_change_subscriptions(self, world: World) -> None:
        async with world.topics(options=SLOW) as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await world.metadata.put(
                specs.ownership_key(ORDERS), specs.encode(Ownership(owner=2, epoch=topic.epoch + 1))
            )
            with pytest.raises(NotOwner) as refused:
                await topic.subscribe(options())
            assert refused.value.owner == 2
            assert world.metadata.local.range(specs.subscriptions_prefix(ORDERS)).kvs == ()

    async def test_a_late_cursor_is_not_that_of_a_new_subscription_of_the_name(self, world: World) -> None:
        async with world.topics(options=SLOW) as topics:
            topic = await topics.get_or_create(ORDERS, True)
            await publish(topic, "a", "b")
            consumer = await topic.subscribe(options())
            await received(consumer, 2)
            consumer.ack(ranges(0, 1))
            (late,) = topics._keeper._kept
            await topic.unsubscribe("s")
            await topic.subscribe(options())
            topics._keeper.add(late)
            assert await topics._keeper.flush()
            assert stored_cursor(world).next_offset == 0


class _Failing(MemoryStore):
    is_failing = False

    async def txn(self, *args: object, **keys: object):
        if self.is_failing:
            raise Unavailable("no quorum")
        return await super().txn(*args, **keys)  # type: ignore[arg-type]  # only forwards


async def test_while_the_store_cannot_be_reached_positions_wait(world: World) -> None:
    world.metadata = store = _Failing()
    async with world.topics() as topics:
        topic = await topics.get_or_create(ORDERS, True)
        await publish(topic, "a", "b")
        consumer = await topic.subscribe(options())
        await received(consumer, 2)
        store.is_failing = True
        consumer.ack(ranges(0))
        assert not await topics._keeper.flush()
        consumer.ack(ranges(1))
        stored = asyncio.create_task(topic.acks_stored("s"))
        with pytest.raises(Unavailable):
            await topic.subscribe(options("t"))
        store.is_failing = False
        await stored
        assert stored_cursor(world).next_offset == 2


async def test_a_consumer_that_leaves_does_not_end_anothers_wait_for_its_acks(
    world: World,
) -> None:
    """Two wait for the same position, and share the event of its being stored. The stream of one ends, which
    cancels its waiting. The other, and whoever asks after that, must still be told."""
    world.metadata = store = _Failing()
    async with world.topics() as topics:
        topic = await topics.get_or_create(ORDERS, True)
        await publish(topic, "a")
        consumer = await topic.subscribe(options())
        await received(consumer, 1)
        store.is_failing = True
        consumer.ack(ranges(0))
        leaving, staying = (asyncio.create_task(topic.acks_stored("s")) for _ in range(2))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait((leaving,))
        late = asyncio.create_task(topic.acks_stored("s"))
        store.is_failing = False
        await asyncio.wait((staying, late))
        assert not staying.cancelled()
        assert not late.cancelled()
        assert stored_cursor(world).next_offset == 1


async def test_many_cursors_are_written_in_few_transactions(world: World) -> None:
    async with world.topics(options=SLOW) as topics:
        topic = await topics.get_or_create(ORDERS, True)
        await publish(topic, "a")
        consumers = [await topic.subscribe(options(f"s{n}")) for n in range(400)]
        for consumer in consumers:
            await received(consumer, 1)
            consumer.ack(ranges(0))
        before = world.metadata.local.revision
        assert await topics._keeper.flush()
        assert world.metadata.local.revision - before <= 3
        assert all(stored_cursor(world, f"s{n}").next_offset == 1 for n in range(400))


class TestNonReliable:
    async def test_messages_go_to_whoever_listens(self, world: World) -> None:
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, False)
            assert topic.log is None
            assert await publish(topic, "nobody") == [0]
            consumer = await topic.subscribe(options())
            producer = await topic.producers.open("q", takeover=True)
            assert not producer.is_reliable
            begun = await producer.begin(batch_of(producer, "a", "b"))
            assert begun.done()
            assert await received(consumer, 2) == [(1, "a"), (2, "b")]
            await topic.acks_stored("s")
            assert world.metadata.local.range(specs.subscriptions_prefix(ORDERS)).kvs == ()
            with pytest.raises(TopicMismatch):
                await topic.resolve(EARLIEST)
            with pytest.raises(TopicMismatch):
                await topic.reliable.seek("s", EARLIEST)

    async def test_a_subscription_that_nobody_listens_to_is_removed_after_a_while(self, world: World) -> None:
        async with world.topics() as topics:
            name = TopicName("default", "x")
            await topics.ensure(name, reliable=False)
            await assign(world.metadata, name, 1)
            held = await ownership.take(topics.registry, world.metadata, name, 1)
            now = 0.0
            transient = TransientSubscriptions(held, topics._parts, clock=lambda: now + 1e9)
            consumer = await transient.subscribe(options())
            await transient.maintain()
            assert list(transient.live) == ["s"]
            consumer.close()
            await transient.maintain()
            assert list(transient.live) == []


class TestDurableIds:
    async def test_an_id_stands_for_its_consumer_after_a_restart(self, world: World) -> None:
        asked = options("s", "a consumer/of mine", key_filters=("a*",), durable_id=True)
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, True)
            consumer = await topic.subscribe(asked)
            assert consumer.consumer_id >> 32 == topic.topic_id
        async with world.topics() as topics:
            known = await topics.consumer_by_id(consumer.consumer_id)
            assert known == KnownConsumer(
                consumer.consumer_id, ORDERS, "s", "a consumer/of mine", SubscriptionType.SHARED, ("a*",)
            )
            assert await topics.consumer_by_id(consumer.consumer_id + 1) is None
            assert await topics.consumer_by_id(999 << 32) is None
            again = await (await topics.get(ORDERS)).subscribe(asked)
            assert again.consumer_id == consumer.consumer_id

    async def test_also_on_a_topic_that_keeps_nothing(self, world: World) -> None:
        async with world.topics() as topics:
            topic = await topics.get_or_create(ORDERS, False)
            consumer = await topic.subscribe(options(durable_id=True))
        async with world.topics() as topics:
            known = await topics.consumer_by_id(consumer.consumer_id)
            assert known is not None
            assert (known.subscription, known.name, known.type) == ("s", "c", SubscriptionType.SHARED)

    async def test_an_id_of_a_topic_that_is_newer_than_the_last_listing(self, world: World) -> None:
        """Somebody asks this broker for an id that nobody has, so it lists all topics; then another broker
        gets a topic and gives out an id, which is brought to this one."""
        async with world.topics(broker=1) as here, world.topics(broker=2) as there:
            assert await here.consumer_by_id(999 << 32) is None
            topic = await there.get_or_create(ORDERS, True)
            consumer = await topic.subscribe(options(durable_id=True))
            with pytest.raises(NotOwner):
                await here.consumer_by_id(consumer.consumer_id)

    async def test_one_without_a_record_is_not_known(self, world: World) -> None:
        async with world.topics() as topics:
            consumer = await (await topics.get_or_create(ORDERS, True)).subscribe(options())
            assert await topics.consumer_by_id(consumer.consumer_id) is None

    def test_two_names_with_one_hash_have_different_ids(self) -> None:
        ids = ConsumerIds(ORDERS, 7)
        first = ids.id_of("s", "a")
        ids.remember(KnownConsumer(first, ORDERS, "other", "b", SubscriptionType.SHARED))
        assert ids.id_of("s", "a") == first + 1
        assert ids.id_of("other", "b") != first  # its own hash is another

    def test_absent_producers_and_the_oldest_of_too_many_are_forgotten(self) -> None:
        now = 0.0
        ids = ConsumerIds(ORDERS, 7, clock=lambda: now)

        def remember(name: str) -> int:
            known = KnownConsumer(ids.id_of("s", name), ORDERS, "s", name, SubscriptionType.SHARED)
            ids.remember(known)
            return known.consumer_id

        first = remember("first")
        now = 1.0
        numbers = [remember(f"c{n}") for n in range(MAX_PER_SUBSCRIPTION)]
        assert ids.get(first) is None
        now = FORGET_S - 100.0
        ids.touch("s", "c0")
        now = FORGET_S + 100.0
        assert len(ids.forget_absent()) == MAX_PER_SUBSCRIPTION - 1
        assert ids.get(numbers[0]) is not None
        assert ids.get(numbers[1]) is None

    def test_a_client_is_known_after_its_broker_was_frozen_for_hours(self) -> None:
        """A client consumes through a broker that is not the owner. That broker is frozen for ten minutes,
        and with it the client's stream; the owner tends its topic. Then the broker is killed, which ends the
        client's health check for good, and is started: the client opens its stream with the id that it has,
        and would do so again and again if that were not known any more."""
        now = 0.0
        ids = ConsumerIds(ORDERS, 7, clock=lambda: now)
        frozen = KnownConsumer(ids.id_of("s", "frozen"), ORDERS, "s", "frozen", SubscriptionType.EXCLUSIVE)
        ids.remember(frozen)
        now = 10 * 3600.0
        assert ids.forget_absent() == []
        assert ids.get(frozen.consumer_id) == frozen

    async def test_records_of_those_that_stay_away_are_removed(self, world: World) -> None:
        async with world.topics() as topics:
            await topics.ensure(ORDERS, True)
            await assign(world.metadata, ORDERS, 1)
            held = await ownership.take(topics.registry, world.metadata, ORDERS, 1)
            now = 0.0
            records = ConsumerRecords(held, clock=lambda: now)
            for consumer in ("here", "away"):
                consumer_id = records.ids.id_of("s", consumer)
                await records.remember(
                    KnownConsumer(consumer_id, ORDERS, "s", consumer, SubscriptionType.SHARED)
                )
            now = FORGET_S + 1.0
            await records.forget_absent([("s", "here")])
            (kept,) = world.metadata.local.range(specs.consumers_prefix(ORDERS, "s")).kvs
            assert specs.consumer_of_key(kept.key) == "here"


async def test_what_there_is_to_say_about_a_topic(world: World) -> None:
    async with world.topics() as topics:
        topic = await topics.get_or_create(ORDERS, True)
        await publish(topic, "a", "b", "c", name="alice")
        consumer = await topic.subscribe(options("s", "bob", credits=2))
        await received(consumer, 2)
        consumer.ack(ranges(0))
        info = topic.describe()
        assert (info.name, info.topic_id, info.reliable, info.epoch) == (ORDERS, topic.topic_id, True, 2)
        assert (info.start_offset, info.next_offset, info.stored_offset, info.state) == (0, 3, 0, "open")
        assert info.producers == ("alice",)
        (subscription,) = info.subscriptions
        assert (subscription.name, subscription.type) == ("s", SubscriptionType.SHARED)
        assert subscription.consumers == ("bob",)
        assert (subscription.cursor, subscription.backlog, subscription.unacked) == (1, 2, 1)
        assert not subscription.is_blocked
