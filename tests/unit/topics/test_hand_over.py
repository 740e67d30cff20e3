"""A topic goes from one broker to another while it is used: nothing that was acknowledged is lost, nothing
that was refused is there, and everybody learns that it has moved."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from obstore.store import MemoryStore as MemoryBackend

from sava.metadata.commands import Put
from sava.metadata.errors import Unavailable
from sava.records import Message
from sava.storage import topic_log
from sava.storage.errors import Fenced, ObjectStoreUnavailable
from sava.storage.objectstore import ObjectStore
from sava.topics import specs
from sava.topics.consumer import ConsumerHandle
from sava.topics.errors import NotHandedOver, NotOwner, TopicMoved
from sava.topics.served import ServedTopics
from sava.topics.specs import CursorRecord, OwnershipState
from sava.topics.topic import HOLD_S, Topic
from tests.support.memory_store import MemoryStore
from tests.support.storage import contents
from tests.support.topics import (
    GIVEN,
    ORDERS,
    SLOW,
    World,
    batch_of,
    crash,
    options,
    publish,
    ranges,
    received,
)
from tests.support.waiting import FAR_S, PATIENCE_S, until
from tests.unit.storage.faults import BROKEN, FaultyBackend, before, hang, refuse


@pytest.fixture
def backend() -> FaultyBackend:
    return FaultyBackend(MemoryBackend())


@pytest.fixture
def world(tmp_path: Path, backend: FaultyBackend) -> World:
    world = World(tmp_path)
    world.store = ObjectStore("memory://", backend, attempts=1)
    return world


async def move(world: World, topics: ServedTopics, to: int) -> int:
    """A move as the controller and the owner's agent make it; returns the end that was agreed on."""
    await world.step("move", target=to, timeout_ms=int(PATIENCE_S * 1000))
    end = await topics.hand_over(ORDERS, timeout=PATIENCE_S)
    await world.step("seal", end=end)
    await world.step("assign", owner=to)
    return end


async def log_of(topic: Topic) -> list[str]:
    assert topic.log is not None
    return await contents(topic.log)


def cursor(world: World, subscription: str = "s") -> CursorRecord:
    kv = world.metadata.local.get(specs.cursor_key(ORDERS, subscription))
    assert kv is not None
    return specs.decode(kv, CursorRecord)


class TestUnderWay:
    async def test_acknowledged_messages_are_below_the_end_and_held_ones_nowhere(self, world: World) -> None:
        """Four clients send message by message and two send batches, all without a pause, while the topic is
        handed over. Each goes on until it is told that the topic has moved."""
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as first, world.topics(broker=2, **GIVEN) as second:
            topic = await first.get(ORDERS)
            acknowledged: dict[int, str] = {}
            refused: list[str] = []
            is_busy = asyncio.Event()

            async def send_until_moved(name: str, send: Callable[[str], Awaitable[int]]) -> None:
                for number in range(100_000):
                    text = f"{name}-{number}"
                    try:
                        acknowledged[await send(text)] = text
                    except TopicMoved:
                        refused.append(text)
                        return
                    if len(acknowledged) > 100:
                        is_busy.set()

            async def single(name: str) -> None:
                producer = await topic.producers.open(name, takeover=False)
                await send_until_moved(name, lambda text: producer.send(Message(text.encode())))

            async def batches(name: str) -> None:
                producer = await topic.producers.open(name, takeover=True)

                async def send(text: str) -> int:
                    return await (await producer.begin(batch_of(producer, text)))

                await send_until_moved(name, send)

            clients = [asyncio.create_task(single(f"single{n}")) for n in range(4)]
            clients += [asyncio.create_task(batches(f"batch{n}")) for n in range(2)]
            await is_busy.wait()
            end = await move(world, first, to=2)
            await asyncio.gather(*clients)
            assert len(refused) == 6
            assert sorted(acknowledged) == list(range(end))
            assert await log_of(await second.get(ORDERS)) == [acknowledged[offset] for offset in range(end)]

    async def test_who_comes_meanwhile_is_held_until_it_is_over(
        self, world: World, backend: FaultyBackend
    ) -> None:
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            assert await publish(topic, "a") == [0]
            producer = await topic.producers.open("p", takeover=True)
            late: list[asyncio.Task[Any]] = []

            async def come_late() -> None:
                late.append(asyncio.create_task(publish(await topics.get(ORDERS), "b", name="q")))
                late.append(asyncio.create_task(producer.begin(batch_of(producer, "c"))))
                for _ in range(50):
                    await asyncio.sleep(0)
                assert not any(each.done() for each in late)

            backend.plan("put_async", before(come_late))
            await world.step("move", target=2)
            assert await topics.hand_over(ORDERS, timeout=PATIENCE_S) == 1
            assert backend.is_done
            for each in late:
                with pytest.raises(TopicMoved):
                    await each
            with pytest.raises(TopicMoved):
                await producer.send(Message(b"d"))
            with pytest.raises(NotOwner) as refused:
                await topics.get(ORDERS)
            assert refused.value.owner == 0  # nobody yet

    async def test_consumers_and_whoever_acks_without_one_are_told(self, world: World) -> None:
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            await publish(topic, "a")
            consumer = await topic.subscribe(options())
            waiting = asyncio.create_task(_receive_all(consumer))
            await world.step("move", target=2)
            await topics.hand_over(ORDERS, timeout=PATIENCE_S)
            with pytest.raises(TopicMoved):
                await waiting
            with pytest.raises(TopicMoved):
                topic.ack("s", ranges(0))
            with pytest.raises(TopicMoved):
                await topic.subscribe(options("t"))


async def _receive_all(consumer: ConsumerHandle) -> None:
    while True:
        await consumer.receive()


class TestWhatGoesWithIt:
    async def test_positions_go_with_the_topic(self, world: World) -> None:
        await world.assigned(1)
        async with (
            world.topics(broker=1, options=SLOW, **GIVEN) as first,
            world.topics(broker=2, options=SLOW, **GIVEN) as second,
        ):
            topic = await first.get(ORDERS)
            await publish(topic, "a", "b", "c", "d")
            consumer = await topic.subscribe(options())
            await received(consumer, 3)
            consumer.ack(ranges(0, 2))
            assert await move(world, first, to=2) == 4
            assert cursor(world) == CursorRecord(0 + 1, (2, 3), topic.epoch)
            again = await (await second.get(ORDERS)).subscribe(options())
            assert await received(again, 2) == [(1, "b"), (3, "d")]

    async def test_a_position_that_is_due_while_the_record_becomes_moving_is_written(
        self, world: World
    ) -> None:
        """The keeper's condition is the record's revision of before. It is refused, asks, and goes on under
        the new one: the topic is still this broker's, and is not lost by it."""
        await world.assigned(1)
        async with world.topics(broker=1, options=SLOW, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            await publish(topic, "a", "b")
            consumers = [await topic.subscribe(options(f"s{n}")) for n in range(3)]
            for consumer in consumers:
                await received(consumer, 1)
                consumer.ack(ranges(0))
            await world.step("move", target=2)
            assert await topics._keeper.flush()
            assert [cursor(world, f"s{n}").next_offset for n in range(3)] == [1, 1, 1]
            assert topics.loaded[ORDERS] is topic
            assert await publish(topic, "c") == [2]

    async def test_producers_go_on_with_their_sequences(self, world: World) -> None:
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as first, world.topics(broker=2, **GIVEN) as second:
            producer = await (await first.get(ORDERS)).producers.open("p", takeover=True)
            sent = batch_of(producer, "a", "b")
            assert await (await producer.begin(sent)) == 0
            await move(world, first, to=2)
            again = await (await second.get(ORDERS)).producers.open("p", takeover=True)
            assert again.producer_id == producer.producer_id
            assert again.next_sequence == 2
            assert await (await again.begin(sent)) == 0  # its receipt was lost, and it is sent again
            assert await (await again.begin(batch_of(again, "c"))) == 2

    async def test_there_and_back_again(self, world: World) -> None:
        """What the first broker's journal still has of its first time must not be taken for the topic's end:
        it ended at 2 there, and has 5 messages by the time it comes back."""
        await world.assigned(1)
        async with (
            world.topics(broker=1, options=SLOW, **GIVEN) as first,
            world.topics(broker=2, options=SLOW, **GIVEN) as second,
        ):
            topic = await first.get(ORDERS)
            assert await publish(topic, "a", "b") == [0, 1]
            consumer = await topic.subscribe(options())
            await received(consumer, 2)
            consumer.ack(ranges(0))
            assert await move(world, first, to=2) == 2

            topic = await second.get(ORDERS)
            assert await publish(topic, "c", "d", "e") == [2, 3, 4]
            consumer = await topic.subscribe(options())
            assert await received(consumer, 2) == [(1, "b"), (2, "c")]
            consumer.ack(ranges(1, 2))
            assert await move(world, second, to=1) == 5

            topic = await first.get(ORDERS)
            assert await publish(topic, "f") == [5]
            assert await log_of(topic) == ["a", "b", "c", "d", "e", "f"]
            assert await received(await topic.subscribe(options()), 3) == [(3, "d"), (4, "e"), (5, "f")]
            assert topic.epoch == world.ownership().epoch == 6

    async def test_a_topic_that_keeps_nothing_has_nothing_to_wait_for(self, world: World) -> None:
        await world.assigned(1, reliable=False)
        async with world.topics(broker=1, **GIVEN) as topics:
            await world.step("move", target=2)
            assert await topics.hand_over(ORDERS, timeout=PATIENCE_S) == 0
            await world.step("roll_back")
            topic = await topics.get(ORDERS)
            consumer = await topic.subscribe(options())
            await publish(topic, "a", "b")
            await world.step("move", target=2)
            assert await topics.hand_over(ORDERS, timeout=PATIENCE_S) == 0
            with pytest.raises(TopicMoved):
                await _receive_all(consumer)
            assert ORDERS not in topics.loaded


class TestAhead:
    """What is uploaded before a move, while the topic is served."""

    async def test_publishers_publish_while_it_is_uploaded(
        self, world: World, backend: FaultyBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The put of the segment waits until another message was acknowledged: somebody who holds publishers
        meanwhile waits for ever. What comes meanwhile is uploaded in the next round."""
        monkeypatch.setattr(topic_log, "AHEAD_BYTES", 0)
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            await publish(topic, "a", "b")

            async def publish_meanwhile() -> None:
                assert await publish(topic, "c", name="q") == [2]

            assert topic.log is not None
            topic.log._parts.uploader._saw_store(None)  # so that the put is the segment's
            backend.plan("put_async", before(publish_meanwhile))
            await topics.prepare_move(ORDERS, timeout=PATIENCE_S)
            assert topic.log.stored_offset == 3
            assert topic.is_serving
            assert await publish(topic, "d") == [3]

    async def test_much_is_uploaded_before_publishers_are_held(
        self, world: World, backend: FaultyBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also by a move that nobody prepared."""
        monkeypatch.setattr(topic_log, "AHEAD_BYTES", 0)
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            await publish(topic, "a")

            async def publish_meanwhile() -> None:
                await publish(topic, "b", name="q")

            topic.log._parts.uploader._saw_store(None)  # type: ignore[union-attr]
            backend.plan("put_async", before(publish_meanwhile))
            await world.step("move", target=2)
            assert await topics.hand_over(ORDERS, timeout=PATIENCE_S) == 2

    @pytest.mark.parametrize("fault", [refuse(BROKEN), hang])
    async def test_a_store_that_takes_no_writes_is_said_and_the_topic_is_served_on(
        self, world: World, backend: FaultyBackend, fault: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sava.storage.objectstore.WRITABLE_S", 0.1)
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            await publish(topic, "a")
            backend.plan("put_async", fault)
            with pytest.raises(ObjectStoreUnavailable, match="takes no writes"):
                await topics.prepare_move(ORDERS, timeout=PATIENCE_S)
            assert topic.is_serving
            assert await publish(topic, "b") == [1]

    async def test_an_upload_that_fails_is_said_at_once(
        self, world: World, backend: FaultyBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The store took a write a moment ago, and refuses the segment: nobody waits until the time is
        up."""
        monkeypatch.setattr(topic_log, "AHEAD_BYTES", 0)
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            await publish(topic, "a")
            topic.log._parts.uploader._saw_store(None)  # type: ignore[union-attr]
            backend.plan("put_async", refuse(BROKEN))
            with pytest.raises(ObjectStoreUnavailable):
                await topics.prepare_move(ORDERS, timeout=FAR_S)
            assert await publish(topic, "b") == [1]


class TestFailures:
    async def test_an_object_store_that_refuses(self, world: World, backend: FaultyBackend) -> None:
        """It is tried again until the time is up."""
        backend.plan("put_async", refuse(BROKEN), refuse(BROKEN), hang)
        await self._fails_and_is_taken_up_again(world, NotHandedOver, timeout=1.0)
        assert backend.calls.count("put_async") >= 2

    async def test_an_object_store_that_does_not_answer(self, world: World, backend: FaultyBackend) -> None:
        backend.plan("put_async", hang)
        error = await self._fails_and_is_taken_up_again(world, NotHandedOver, timeout=0.1)
        assert str(ORDERS) in error
        assert "uploading and sealing" in error

    async def test_a_store_that_stalls_holds_publishers_for_two_seconds_at_most(
        self, world: World, backend: FaultyBackend
    ) -> None:
        """The store took writes when it was asked, and stalls when publishers are held. The move has half a
        minute, and they do not wait for that: after ``HOLD_S`` the topic is given up, to be taken up again
        under the next epoch."""
        assert HOLD_S == 2.0
        backend.plan("put_async", hang)
        began = time.monotonic()
        error = await self._fails_and_is_taken_up_again(world, NotHandedOver, timeout=PATIENCE_S)
        assert time.monotonic() - began < PATIENCE_S / 2
        assert "within 2 s of holding its publishers" in error

    async def test_a_topic_that_nobody_loaded_is_not_sealed_for_longer_either(
        self, world: World, backend: FaultyBackend
    ) -> None:
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as topics:
            await publish(await topics.get(ORDERS), "a")
            await topics.drop(ORDERS, "by this test")
            await world.step("move", target=2)
            backend.plan("put_async", hang)
            began = time.monotonic()
            with pytest.raises(NotHandedOver):
                await topics.hand_over(ORDERS, timeout=PATIENCE_S)
            assert time.monotonic() - began < PATIENCE_S / 2

    async def test_a_seal_whose_answer_is_lost(self, world: World) -> None:
        """It took effect, and nobody knows. The next epoch begins where it says."""
        world.metadata = _Losing()
        await self._fails_and_is_taken_up_again(world, Unavailable)

    async def _fails_and_is_taken_up_again(
        self, world: World, expected: type[Exception], *, timeout: float = PATIENCE_S
    ) -> str:
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            await publish(topic, "a", "b")
            producer = await topic.producers.open("p", takeover=True)
            consumer = await topic.subscribe(options())
            if isinstance(world.metadata, _Losing):
                world.metadata.is_losing = True
            await world.step("move", target=2)
            with pytest.raises(expected) as failed:
                await topics.hand_over(ORDERS, timeout=timeout)
            assert ORDERS not in topics.loaded
            with pytest.raises(TopicMoved):
                await producer.send(Message(b"x"))
            with pytest.raises(TopicMoved):
                await _receive_all(consumer)
            if isinstance(world.metadata, _Losing):
                world.metadata.is_losing = False
            await world.step("roll_back", error=str(failed.value))
            again = await topics.get(ORDERS)
            assert again.epoch == topic.epoch + 2
            assert await publish(again, "c") == [2]
            assert await log_of(again) == ["a", "b", "c"]
            return str(failed.value)

    async def test_positions_that_cannot_be_written_do_not_stand_in_the_way(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        world.metadata = store = _Cursorless()
        await world.assigned(1)
        async with (
            world.topics(broker=1, options=SLOW, **GIVEN) as first,
            world.topics(broker=2, options=SLOW, **GIVEN) as second,
        ):
            topic = await first.get(ORDERS)
            await publish(topic, "a", "b")
            consumer = await topic.subscribe(options())
            await received(consumer, 2)
            consumer.ack(ranges(0, 1))
            store.is_failing = True
            with caplog.at_level(logging.WARNING):
                assert await move(world, first, to=2) == 2
            assert "topic=/default/orders subscription=s" in caplog.text
            store.is_failing = False
            again = await (await second.get(ORDERS)).subscribe(options())
            assert await received(again, 2) == [(0, "a"), (1, "b")]

    @pytest.mark.parametrize("payloads", [(), ("a",)])
    async def test_a_metadata_store_that_cannot_be_reached_is_a_failure(
        self, world: World, payloads: tuple[str, ...]
    ) -> None:
        """Whether there is something to be uploaded or only the seal to be written."""
        world.metadata = store = _Unreachable()
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as topics:
            await publish(await topics.get(ORDERS), *payloads)
            await world.step("move", target=2)
            store.is_failing = True
            with pytest.raises((Unavailable, NotHandedOver)):
                await topics.hand_over(ORDERS, timeout=0.3)
            assert ORDERS not in topics.loaded
            store.is_failing = False
            await world.step("roll_back")
            assert await log_of(await topics.get(ORDERS)) == list(payloads)

    @pytest.mark.parametrize("step", ["delete", "roll_back", "orphan"])
    async def test_somebody_else_decides_otherwise_meanwhile(
        self, world: World, backend: FaultyBackend, step: str
    ) -> None:
        """The topic is deleted, or the controller has waited long enough, while the owner uploads: its seal
        is refused, and it has the topic no longer."""
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            await publish(topic, "a")
            backend.plan("put_async", before(lambda: world.step(step)))
            await world.step("move", target=2)
            with pytest.raises((Fenced, TopicMoved)):
                await topics.hand_over(ORDERS, timeout=PATIENCE_S)
            assert ORDERS not in topics.loaded
            if step == "delete":
                await topics.release(ORDERS)
                assert world.ownership().owner == 0
            else:
                assert await log_of(await topics.get(ORDERS)) == ["a"]

    async def test_an_attempt_that_was_given_up_uploads_after_the_next_one_has_begun(
        self, world: World, backend: FaultyBackend
    ) -> None:
        """
        first    uploads 0..1, and its caller goes away
        second   opens under the same epoch: segments end at 0, and 0..1 is in the journal
        first    its upload is done: 0..1 is registered, and the journal lets go of it
        second   finds 0..1 neither in segments, as it knows them, nor in the journal
        """
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as topics:
            await publish(await topics.get(ORDERS), "a")
            is_uploading, may_upload = asyncio.Event(), asyncio.Event()

            async def wait() -> None:
                is_uploading.set()
                await may_upload.wait()

            backend.plan("put_async", before(wait))
            await world.step("move", target=2)
            moving = asyncio.create_task(topics.hand_over(ORDERS, timeout=PATIENCE_S))
            await is_uploading.wait()
            moving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await moving
            assert ORDERS not in topics.loaded
            again = asyncio.create_task(topics.hand_over(ORDERS, timeout=PATIENCE_S))
            for _ in range(50):
                await asyncio.sleep(0)
            may_upload.set()
            assert await again == 1


class TestNotLoaded:
    async def test_a_move_that_was_taken_back_and_begun_anew_unnoticed(self, world: World) -> None:
        """What is loaded is of an epoch that is over; the topic is handed over under the one of the
        record."""
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as topics:
            topic = await topics.get(ORDERS)
            await publish(topic, "a")
            for step in ("move", "roll_back", "move"):
                await world.step(step)
            assert await topics.hand_over(ORDERS, timeout=PATIENCE_S) == 1
            assert ORDERS not in topics.loaded

    async def test_a_broker_that_was_restarted_in_the_middle_finishes_it(self, world: World) -> None:
        await world.assigned(1)
        topics, storage = await world.start_topics(broker=1, **GIVEN)
        topic = await topics.get(ORDERS)
        await publish(topic, "a", "b")
        await world.step("move", target=2)
        await crash(topics, storage)
        async with world.topics(broker=1, **GIVEN) as first, world.topics(broker=2, **GIVEN) as second:
            for _ in range(2):  # the second time it is sealed, and only the record does not say so
                assert await first.hand_over(ORDERS, timeout=PATIENCE_S) == 2
            assert world.ownership().state is OwnershipState.MOVING
            assert world.ownership().epoch == topic.epoch
            await world.step("seal", end=2)
            await world.step("assign", owner=2)
            assert await log_of(await second.get(ORDERS)) == ["a", "b"]

    async def test_one_that_was_never_taken_up(self, world: World) -> None:
        await world.assigned(1)
        await world.step("move", target=2)
        async with world.topics(broker=1, **GIVEN) as topics:
            assert await topics.hand_over(ORDERS, timeout=PATIENCE_S) == 0

    async def test_one_that_is_being_loaded_is_waited_for(self, world: World) -> None:
        await world.assigned(1)
        async with world.topics(broker=1, **GIVEN) as topics:
            await publish(await topics.get(ORDERS), "a")
            await topics.drop(ORDERS, "to be loaded again")
            loading = asyncio.create_task(topics.get(ORDERS))
            await until(lambda: world.ownership().epoch == 3)
            await world.step("move", target=2)
            assert await topics.hand_over(ORDERS, timeout=PATIENCE_S) == 1
            assert (await loading).epoch == 3
            assert ORDERS not in topics.loaded

    async def test_it_is_not_this_brokers_to_hand_over(self, world: World) -> None:
        await world.assigned(2)
        await world.step("move", target=1)
        async with world.topics(broker=1, **GIVEN) as topics:
            with pytest.raises(NotOwner):
                await topics.hand_over(ORDERS, timeout=PATIENCE_S)


class _Unreachable(MemoryStore):
    is_failing = False

    async def txn(self, *args: Any, **more: Any) -> Any:
        if self.is_failing:
            raise Unavailable("no quorum")
        return await super().txn(*args, **more)


class _Cursorless(MemoryStore):
    """Cannot write positions."""

    is_failing = False

    async def txn(self, compare: Any, then: Any, *args: Any, **more: Any) -> Any:
        if self.is_failing and any(isinstance(each, Put) and each.key.endswith("/cursor") for each in then):
            raise Unavailable("no quorum")
        return await super().txn(compare, then, *args, **more)


class _Losing(MemoryStore):
    """Does what it is asked to in storage, and then cannot be asked again."""

    is_losing = False

    async def txn(self, compare: Any, then: Any, *args: Any, **more: Any) -> Any:
        result = await super().txn(compare, then, *args, **more)
        seals = any(isinstance(each, Put) and b'"sealed":true' in each.value for each in then)
        if self.is_losing and seals:
            raise Unavailable("the answer was lost")
        return result
