"""What the published danube-client does when its broker goes and comes back, or when somebody takes its
place."""

from __future__ import annotations

import asyncio

import pytest

from sava.proto import danube_admin_pb2 as admin
from sava.proto import danube_api_pb2 as pb
from tests.compat.programs import Program, run
from tests.compat.raw import Producer, Stream, health, open_stream, subscribe
from tests.compat.stubs import Stubs
from tests.support.brokers import Standalone
from tests.support.network import LostAnswers
from tests.support.waiting import PATIENCE_S

TOPIC = "/default/topic"


async def restart(broker: Standalone, *, how: str) -> None:
    if how == "kill -9":
        await asyncio.to_thread(broker.kill)
    else:
        await asyncio.to_thread(broker.stop)
    broker.start()
    await asyncio.to_thread(broker.ready)


@pytest.mark.parametrize(("how", "partitions"), [("kill -9", 0), ("SIGTERM", 2)])
async def test_a_producer_goes_on_and_nothing_acked_is_lost(
    own_broker: Standalone, how: str, partitions: int
) -> None:
    names = [f"{TOPIC}-part-{index}" for index in range(partitions)] or [TOPIC]
    async with Stubs(own_broker) as stubs:
        for name in names:
            await Producer.create(stubs, name, "other")
            await subscribe(stubs, name)
    async with Program("reconnect", "produce", own_broker.url, topic=TOPIC, partitions=partitions) as program:
        assert await program.line() == "under way"
        await restart(own_broker, how=how)
        async with Stubs(own_broker) as stubs:
            probe = await open_stream(stubs, names[0], "probe", "probe")
            await probe.next()  # the producer is back
        program.tell("stop")
        answered = await program.result()
    received: set[int] = set()
    async with Stubs(own_broker) as stubs:
        for name in names:
            await (await Producer.create(stubs, name, "other")).send("end")
            stream = await open_stream(stubs, name)
            while (message := await stream.next()).payload != b"end":
                received.add(int(message.payload))
    assert set(answered) <= received
    assert len(answered) > 100


@pytest.mark.parametrize("how", ["kill -9", "SIGTERM"])
async def test_a_consumer_whose_health_loop_died_goes_on_after_a_restart(
    own_broker: Standalone, how: str
) -> None:
    async with Program("reconnect", "without_health", own_broker.url, topic=TOPIC) as program:
        assert await program.line() == "subscribed"
        async with Stubs(own_broker) as stubs:
            await (await Producer.create(stubs, TOPIC, "p")).send("before")
        assert await program.line() == "before"
        await restart(own_broker, how=how)
        async with Stubs(own_broker) as stubs:
            await (await Producer.create(stubs, TOPIC, "p")).send("after")
        line = await program.line()
        while line == "before":  # acked just before the end, and perhaps not stored
            line = await program.line()
        assert line == "after"


async def test_ids_outlive_a_restart(own_broker: Standalone) -> None:
    """Producer and consumer go on with what they have: nobody registers again."""
    async with Stubs(own_broker) as stubs:
        producer = await Producer.create(stubs, TOPIC)
        consumer_id = await subscribe(stubs, TOPIC)
        await producer.send("0")
    await restart(own_broker, how="kill -9")
    async with Stubs(own_broker) as stubs:
        assert await health(stubs, consumer_id) == "OK"
        producer._stubs = stubs
        await producer.send("1")
        assert await health(stubs, producer.producer_id, producer=True) == "OK"
        assert await Stream(stubs, consumer_id).texts(2) == ["0", "1"]


async def test_the_start_of_a_subscription_is_kept_from_its_first_moment(own_broker: Standalone) -> None:
    """Subscribe, leave, produce, restart: the backlog is there."""
    async with Stubs(own_broker) as stubs:
        producer = await Producer.create(stubs, TOPIC)
        await producer.send("before")
        (await open_stream(stubs, TOPIC)).cancel()
        await producer.send_numbers(range(100))
    await restart(own_broker, how="kill -9")
    async with Stubs(own_broker) as stubs:
        stream = await open_stream(stubs, TOPIC)
        assert sorted(map(int, await stream.texts(100))) == list(range(100))


async def test_a_consumer_name_is_taken_over(broker: Standalone, stubs: Stubs, topic: str) -> None:
    """The newest gets the messages, the older one is silent, keeps its peace, and comes back when it goes."""
    producer = await Producer.create(stubs, topic)
    async with Program("reconnect", "consume", broker.url, topic=topic) as older:
        assert await older.line() == "subscribed"
        await producer.send("0")
        assert await older.line() == "0"
        async with Program("reconnect", "consume", broker.url, topic=topic) as newer:
            assert await newer.line() == "subscribed"
            for number in range(1, 40):
                await producer.send(str(number))
                await asyncio.sleep(0.05)
            received = [await newer.line() for _ in range(30)]
            assert received == sorted(received, key=int), "nobody else had any of them"
            assert int(received[-1]) - int(received[0]) == 29
        await producer.send("end")
        line = ""
        while line != "end":
            line = await older.line()


async def test_an_unknown_id_does_not_make_a_client_spin(broker: Standalone, topic: str) -> None:
    opened = await run("reconnect", "impatient", broker.url, topic=topic)
    assert 1 <= opened <= 5, "in three seconds"


async def test_a_client_with_keepalive_leaves_a_broker_that_falls_silent(
    broker: Standalone, stubs: Stubs, topic: str
) -> None:
    """The way out of docs/danube.md: the client's stream stands when its network is cut, and ends with the
    status that makes it connect again. Without keepalive it waits for the kernel, a quarter of an hour."""
    await Producer.create(stubs, topic)
    async with (
        LostAnswers(broker.url.removeprefix("http://")) as line,
        Program("reconnect", "with_keepalive", f"http://{line.address}", topic=topic) as program,
    ):
        assert await program.line() == "subscribed"
        line.forward_nothing()
        assert await program.result() == "UNAVAILABLE"


async def test_a_client_that_is_told_to_close_subscribes_again(
    broker: Standalone, stubs: Stubs, topic: str
) -> None:
    producer = await Producer.create(stubs, topic)
    async with Program("reconnect", "consume", broker.url, topic=topic) as program:
        assert await program.line() == "subscribed"
        await producer.send("before")
        assert await program.line() == "before"
        await stubs.topics.Unsubscribe(admin.SubscriptionRequest(topic=topic, subscription="subscription"))
        request = admin.TopicRequest(name=topic)
        async with asyncio.timeout(PATIENCE_S):
            while not (await stubs.topics.ListSubscriptions(request)).subscriptions:  # noqa: ASYNC110 (no event)
                await asyncio.sleep(0.1)
        await producer.send("after")
        assert await program.line() == "after"


async def test_stopping_ends_streams_in_a_way_that_clients_retry(own_broker: Standalone) -> None:
    async with Stubs(own_broker) as stubs:
        await Producer.create(stubs, TOPIC)
        stream = await open_stream(stubs, TOPIC)
        assert await stream.is_silent()
        ended = asyncio.create_task(stream.end())
        await asyncio.to_thread(own_broker.stop)
        assert (await ended).name in ("UNAVAILABLE", "CANCELLED")
        look = pb.TopicLookupRequest(topic=TOPIC)
        with pytest.raises(Exception, match="UNAVAILABLE"):
            await stubs.discovery.TopicLookup(look, timeout=5)
