"""Consumers that come, go, stop reading, lag behind or vanish: nobody else is harmed and nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
from grpc import StatusCode, aio
from grpc.aio import AioRpcError

from sava.proto import danube_admin_pb2 as admin
from sava.proto import danube_api_pb2 as pb
from sava.proto import streams_pb2, streams_pb2_grpc
from sava.records import RecordBatch
from tests.compat import raw
from tests.compat.programs import Program
from tests.compat.raw import Producer, Stream, open_stream, refused, set_policy, set_window, subscribe
from tests.compat.stubs import Stubs
from tests.support.brokers import Standalone
from tests.support.long import IS_LONG
from tests.support.network import END, Links
from tests.support.waiting import PATIENCE_S

# -- seats ---------------------------------------------------------------------------------------


async def test_subscribing_again_gives_the_same_id(stubs: Stubs, topic: str) -> None:
    await Producer.create(stubs, topic)
    first = await subscribe(stubs, topic)
    assert await subscribe(stubs, topic) == first
    assert await subscribe(stubs, topic, "other", "another") != first


async def test_an_exclusive_subscription_is_free_when_its_stream_is_gone(stubs: Stubs, topic: str) -> None:
    await Producer.create(stubs, topic)
    stream = await open_stream(stubs, topic, "first")
    assert await stream.is_silent()
    assert (await refused(subscribe(stubs, topic, "second")))[0] is StatusCode.PERMISSION_DENIED
    stream.cancel()
    second = await _within(1.0, lambda: open_stream(stubs, topic, "second"))
    await (await Producer.create(stubs, topic)).send("x")
    assert await second.texts(1) == ["x"]


@pytest.mark.parametrize("reliable", [True, False])
async def test_a_consumer_without_a_stream_keeps_nobody_out(stubs: Stubs, topic: str, reliable: bool) -> None:
    producer = await Producer.create(stubs, topic, reliable=reliable)
    absent = await subscribe(stubs, topic, "first")
    stream = await open_stream(stubs, topic, "second")
    await producer.send("x")
    assert await stream.texts(1) == ["x"]
    assert await stream.is_silent(0.1)
    # The first one's stream has to wait, and fails in a way that makes clients come back.
    assert await Stream(stubs, absent).end() is StatusCode.UNAVAILABLE


async def test_a_new_stream_takes_over_with_what_was_in_flight(stubs: Stubs, topic: str) -> None:
    producer = await Producer.create(stubs, topic)
    consumer_id = await subscribe(stubs, topic)
    older = Stream(stubs, consumer_id)
    await producer.send_numbers(range(5))
    assert await older.texts(5, ack=False) == ["0", "1", "2", "3", "4"]
    newer = Stream(stubs, consumer_id)
    assert await newer.texts(5) == ["0", "1", "2", "3", "4"]
    assert await older.is_silent(1.5), "the older one does not take the seat back"
    newer.cancel()
    await producer.send("5")
    assert await older.texts(1) == ["5"], "until it is free"


async def test_a_message_is_kept_for_a_consumer_that_is_about_to_open_its_stream(
    stubs: Stubs, topic: str
) -> None:
    """On a non-reliable topic nobody else would."""
    producer = await Producer.create(stubs, topic, reliable=False)
    consumer_id = await subscribe(stubs, topic)
    await producer.send_numbers(range(100), at_once=1)
    assert await Stream(stubs, consumer_id).texts(100) == [str(number) for number in range(100)]


async def test_a_silent_older_stream_does_not_bring_a_removed_subscription_back(
    stubs: Stubs, topic: str
) -> None:
    await Producer.create(stubs, topic)
    consumer_id = await subscribe(stubs, topic)
    older = Stream(stubs, consumer_id)
    assert await older.is_silent()
    newer = Stream(stubs, consumer_id)
    assert await newer.is_silent()
    await stubs.topics.Unsubscribe(admin.SubscriptionRequest(topic=topic, subscription="subscription"))
    assert await newer.end() is StatusCode.UNAVAILABLE
    assert await older.end() is StatusCode.UNAVAILABLE
    found = await stubs.topics.ListSubscriptions(admin.TopicRequest(name=topic))
    assert list(found.subscriptions) == []


async def test_any_consumer_may_ack_for_another(stubs: Stubs, topic: str) -> None:
    producer = await Producer.create(stubs, topic)
    first = await open_stream(stubs, topic, "first", kind=raw.FAILOVER)
    await producer.send("x")
    message = await first.next(ack=False)
    second = await open_stream(stubs, topic, "second", kind=raw.FAILOVER)
    assert await second.is_silent()
    await second.ack(message)
    first.cancel()
    assert await second.is_silent(0.5)


# -- failover ------------------------------------------------------------------------------------


async def test_failover_within_a_second_of_the_streams_end(stubs: Stubs, topic: str) -> None:
    producer = await Producer.create(stubs, topic)
    active = await open_stream(stubs, topic, "active", kind=raw.FAILOVER)
    await producer.send("0")
    await active.next(ack=False)
    standby = await open_stream(stubs, topic, "standby", kind=raw.FAILOVER)
    assert await standby.is_silent()
    active.cancel()
    assert await standby.texts(1, timeout=1.0) == ["0"]


async def test_failover_within_five_seconds_of_a_stopped_process(
    broker: Standalone, stubs: Stubs, topic: str
) -> None:
    producer = await Producer.create(stubs, topic)
    async with Program(
        "reconnect", "consume", broker.url, topic=topic, name="active", kind=raw.FAILOVER
    ) as active:
        assert await active.line() == "subscribed"
        await producer.send("0")
        assert await active.line() == "0"
        standby = await open_stream(stubs, topic, "standby", kind=raw.FAILOVER)
        assert await standby.is_silent()
        active.pause()
        await producer.send("1")
        assert await standby.texts(1, timeout=5.0) == ["1"]


async def test_failover_within_five_seconds_of_a_dead_link(
    broker: Standalone, stubs: Stubs, topic: str
) -> None:
    producer = await Producer.create(stubs, topic)
    links = Links(dict)
    try:
        port = await links.expose(1, broker.port)
        async with Stubs(broker, f"127.0.0.1:{port}") as far:
            active = await open_stream(far, topic, "active", kind=raw.FAILOVER)
            await producer.send("0")
            assert await active.texts(1) == ["0"]
            standby = await open_stream(stubs, topic, "standby", kind=raw.FAILOVER)
            assert await standby.is_silent()
            links.cut(0, 1)
            await producer.send("1")
            assert await standby.texts(1, timeout=5.0) == ["1"]
            active.cancel()
            links.heal()
    finally:
        await links.close()


# -- slow and late consumers ---------------------------------------------------------------------


@pytest.mark.parametrize("reliable", [True, False])
async def test_a_consumer_that_does_not_read_blocks_nobody(
    broker: Standalone, stubs: Stubs, topic: str, reliable: bool
) -> None:
    producer = await Producer.create(stubs, topic, reliable=reliable)
    async with Stubs(broker) as other:
        asleep = await open_stream(other, topic, "asleep", "asleep")
        neighbour = await open_stream(stubs, topic, "neighbour", "s", raw.SHARED)
        lazy = await open_stream(other, topic, "lazy", "s", raw.SHARED)
        awake = await open_stream(stubs, topic, "awake", "awake")
        await asyncio.sleep(0.3)
        block = "x" * 4000
        began = time.monotonic()
        for _ in range(10):
            await asyncio.gather(*(producer.send(block) for _ in range(100)))
            await awake.texts(100)
        assert time.monotonic() - began < 15.0
        assert await neighbour.texts(100) == [block] * 100, "the lazy one has only its window"
        asleep.cancel()
        lazy.cancel()


async def test_a_consumer_that_is_far_behind_gets_everything(
    broker: Standalone, stubs: Stubs, topic: str
) -> None:
    """Tens of thousands of messages: the first by Danube's protocol, one by one, until the test has no more
    time for that; the others by Sava's, from the same subscription."""
    count, one_by_one = (100_000, 8000) if IS_LONG else (40_000, 2000)
    await Producer.create(stubs, topic)
    stream = await open_stream(stubs, topic)
    assert await stream.is_silent()
    stream.cancel()
    await publish_numbers(broker, topic, count, 5000)
    stream = await open_stream(stubs, topic)
    acks: deque[asyncio.Task[None]] = deque()
    for number in range(one_by_one):
        message = await stream.next(ack=False)
        assert (int(message.payload), message.msg_id.topic_offset) == (number, number)
        acks.append(asyncio.create_task(stream.ack(message)))
        if len(acks) == 500:
            await acks.popleft()
    await asyncio.gather(*acks)
    stream.cancel()
    received = one_by_one
    async for batch in batches(broker, topic):
        assert batch.base_offset == received
        assert [int(payload) for payload in batch.payloads()] == list(range(received, batch.next_offset))
        received = batch.next_offset
        if received == count:
            break


async def test_a_slow_consumer_gets_nothing_twice(stubs: Stubs, topic: str) -> None:
    """What waits in its buffers for longer than the ack timeout would be delivered again. If all were sent at
    once, the last of them would wait for 12 s and more. On a machine that needs much longer for a message
    than its work takes, everything takes longer in the same proportion."""
    for slowness in (1, 4, 12):
        name = f"{topic}-{slowness}"
        producer = await Producer.create(stubs, name)
        consumer_id = await subscribe(stubs, name)
        await set_policy(stubs, name, ack_timeout_ms=4000 * slowness)
        await producer.send_numbers(range(600))
        stream = Stream(stubs, consumer_id)
        received = []
        for _ in range(260):
            message = await stream.next(ack=False)
            await asyncio.sleep(0.02 * slowness)  # its work
            await stream.ack(message)
            received.append(message.msg_id.topic_offset)
        stream.cancel()
        if received == list(range(260)):
            return
    raise AssertionError(received)


async def test_a_message_that_no_client_can_receive_meets_the_failure_policy(
    broker: Standalone, stubs: Stubs, topic: str
) -> None:
    """Sava's own protocol takes larger messages than Danube's clients do."""
    producer = await Producer.create(stubs, topic)
    stream = await open_stream(stubs, topic)
    dead = f"{topic}-dead"
    await set_policy(
        stubs, topic, max_redelivery_count=1, poison_policy=admin.DeadLetter, dead_letter_topic=dead
    )
    await publish(broker, topic, [[b"x" * (5 << 20)]])
    await producer.send("small")
    assert await stream.texts(1) == ["small"]
    async with asyncio.timeout(PATIENCE_S):
        look_up = pb.TopicLookupRequest(topic=dead)
        while not (await stubs.discovery.TopicPartitions(look_up)).partitions:  # noqa: ASYNC110 (no event)
            await asyncio.sleep(0.1)
    assert await stream.is_silent()


async def publish_numbers(broker: Standalone, topic: str, count: int, step: int) -> None:
    """For what Danube's protocol would take minutes."""
    parts = [range(start, start + step) for start in range(0, count, step)]
    await publish(broker, topic, [[str(number).encode() for number in part] for part in parts])


async def publish(broker: Standalone, topic: str, parts: list[list[bytes]]) -> None:
    """Payloads, a batch for each part, by Sava's own protocol."""
    async with aio.insecure_channel(broker.address) as channel:
        streams: Any = streams_pb2_grpc.StreamsStub(channel)
        call = streams.Publish()
        opening = streams_pb2.OpenProducer(topic=topic, producer_name="batches")
        await call.write(streams_pb2.PublishRequest(open=opening))
        producer_id = (await call.read()).opened.producer_id
        sent = 0
        for payloads in parts:
            batch = RecordBatch.encode(payloads, publish_time=0, producer_id=producer_id, base_sequence=sent)
            await call.write(streams_pb2.PublishRequest(batch=batch.to_bytes()))
            sent += len(payloads)
        await call.done_writing()
        receipts = 0
        while receipts < len(parts):
            receipts += len((await call.read()).receipts)


async def batches(broker: Standalone, topic: str) -> AsyncIterator[RecordBatch]:
    """What the subscription still has, acked as it comes."""
    async with aio.insecure_channel(broker.address) as channel:
        streams: Any = streams_pb2_grpc.StreamsStub(channel)
        call = streams.Subscribe()
        opening = streams_pb2.OpenConsumer(
            topic=topic, subscription="subscription", consumer_name="batches", credits=1_000_000
        )
        await call.write(streams_pb2.SubscribeRequest(open=opening))
        while (response := await call.read()) is not END:
            for delivered in response.delivered:
                batch = RecordBatch.parse(delivered.batch)
                acks = streams_pb2.Acks(ranges=(batch.base_offset, batch.next_offset))
                await call.write(streams_pb2.SubscribeRequest(acks=acks))
                yield batch


# -- key-shared ----------------------------------------------------------------------------------


async def test_key_shared_consumers_come_and_go_under_load(stubs: Stubs, topic: str) -> None:
    """Every message arrives, and those of a key in their order, however often it changes its consumer."""
    count, keys = 2000 if IS_LONG else 800, 40
    random = Random(20)
    producer = await Producer.create(stubs, topic)
    await subscribe(stubs, topic, kind=raw.KEY_SHARED)
    received: dict[str, list[int]] = defaultdict(list)
    done = asyncio.Event()

    async def consume(name: str, lifetime: float) -> None:
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError, AioRpcError):
            async with asyncio.timeout(lifetime):
                stream = await open_stream(stubs, topic, name, kind=raw.KEY_SHARED)
                while True:
                    message = await stream.next(ack=False, timeout=60)
                    numbers = received[message.routing_key]
                    if int(message.payload) not in numbers:
                        numbers.append(int(message.payload))
                    if sum(map(len, received.values())) == count:
                        done.set()
                    await stream.ack(message)
        with contextlib.suppress(UnboundLocalError):
            stream.cancel()

    async def churn(name: str) -> None:
        for number in range(1000):
            await consume(f"{name}-{number % 3}", 0.1 + 0.2 * random.random())

    stayer = asyncio.create_task(consume("stayer", 60))
    passing = [asyncio.create_task(churn(name)) for name in ("a", "b")]
    try:
        for start in range(0, count, 50):
            for number in range(start, start + 50):
                await producer.send(str(number), f"key-{number % keys}")
        async with asyncio.timeout(PATIENCE_S):
            await done.wait()
    finally:
        for task in (stayer, *passing):
            task.cancel()
        await asyncio.gather(stayer, *passing, return_exceptions=True)
    for key, numbers in received.items():
        assert numbers == sorted(numbers), f"order of {key}"


# -- settings ------------------------------------------------------------------------------------


async def test_settings_take_effect_at_once(stubs: Stubs, topic: str) -> None:
    """The window of a subscription whose consumer is connected, and its ack timeout."""
    producer = await Producer.create(stubs, topic)
    stream = await open_stream(stubs, topic)
    await set_window(stubs, topic, 3)
    await producer.send_numbers(range(6))
    assert await stream.texts(3, ack=False) == ["0", "1", "2"]
    assert await stream.is_silent(0.3), "three are not acked"
    await set_policy(stubs, topic, ack_timeout_ms=300)
    assert await stream.texts(1, timeout=3.0) == ["0"], "its time is over under the new policy"
    await set_window(stubs, topic, 100)
    seen: set[str] = set()
    async with asyncio.timeout(PATIENCE_S):
        while not seen >= {"1", "2", "3", "4", "5"}:
            seen.add((await stream.next()).payload.decode())


async def _within(seconds: float, attempt: object) -> Stream:
    """Try until it is not refused."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return await attempt()  # type: ignore[operator]
        except AioRpcError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)
