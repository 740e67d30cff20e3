"""Moving a topic on request: what stays, what goes on, and when it is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest
from grpc import aio

from sava.client import Client, Consumer
from sava.errors import SavaError
from sava.proto import danube_admin_pb2 as danube
from sava.proto import danube_admin_pb2_grpc as danube_rpc
from tests.cluster.workload import Workload
from tests.support.brokers import Brokers
from tests.support.waiting import PATIENCE_S

TOPIC = "/default/orders"
SINGLE = (
    "Cannot unload topic: single broker cluster detected. Unload requires at least 2 brokers. "
    "Use delete if you want to remove the topic."
)


async def take(consumer: Consumer, count: int) -> list[int]:
    """Receive and ack so many; their offsets."""
    offsets: list[int] = []
    async with asyncio.timeout(PATIENCE_S):
        async for message in consumer:
            assert message.offset is not None
            offsets.append(message.offset)
            await consumer.ack(message)
            if len(offsets) == count:
                return offsets
    raise AssertionError("the consumer ended")


async def publish(client: Client, count: int, *, reliable: bool = True, first: int = 0) -> None:
    async with client.producer(TOPIC, reliable=reliable) as producer:
        await producer.send_many([f"{number}".encode() for number in range(first, first + count)])


async def test_a_non_reliable_topic_moves_and_its_clients_follow(trio: Brokers) -> None:
    await trio.create(TOPIC, reliable=False)
    before = await trio.describe(TOPIC)
    async with (
        trio.sava_client() as client,
        client.consumer(TOPIC, subscription="s") as consumer,
        client.producer(TOPIC, reliable=False, linger_ms=0) as producer,
    ):
        for number in range(100):
            await producer.send(b"%d" % number)
        (move,) = await trio.unload(TOPIC)
        assert (move.error, move.from_broker_id) == ("", before.broker_id)
        assert move.to_broker_id not in (0, before.broker_id)
        after = await trio.describe(TOPIC)
        assert (after.broker_id, after.topic_id) == (move.to_broker_id, before.topic_id)

        async def receive() -> None:
            async for message in consumer:
                if message.payload == b"after":
                    return

        receiving = asyncio.create_task(receive())
        async with asyncio.timeout(PATIENCE_S):
            while not receiving.done():  # until both are back, nobody may be there to listen
                await producer.send(b"after")
                await asyncio.sleep(0.02)


async def test_a_reliable_topic_goes_on_where_it_was(trio: Brokers) -> None:
    """Schema, subscriptions, cursors and messages are kept; 1000 messages, of which 500 are acked, move."""
    await trio.create(TOPIC)
    async with trio.sava_client() as client:
        await publish(client, 1000)
        async with client.consumer(TOPIC, subscription="sub1") as consumer:
            assert await take(consumer, 500) == list(range(500))
            await consumer.flush()
        before = await trio.describe(TOPIC)
        (move,) = await trio.unload(TOPIC)
        assert not move.error
        assert move.next_offset == 1000
        after = await trio.describe(TOPIC)
        assert after.broker_id != before.broker_id
        assert after.epoch > before.epoch
        assert (after.start_offset, after.next_offset, after.stored_offset) == (0, 1000, 1000)
        (subscription,) = after.subscriptions
        assert (subscription.subscription, subscription.cursor, subscription.backlog) == ("sub1", 500, 500)
        await publish(client, 10, first=1000)
        async with client.consumer(TOPIC, subscription="sub1") as consumer:
            assert await take(consumer, 510) == list(range(500, 1010))
        async with client.reader(TOPIC, end="latest") as reader:
            assert [int(message.payload) async for message in reader] == list(range(1010))


async def test_every_subscription_keeps_its_own_place(trio: Brokers) -> None:
    await trio.create(TOPIC)
    places = {"none": 0, "some": 10, "all": 50}
    async with trio.sava_client() as client:
        await publish(client, 50)
        for name, count in places.items():
            async with client.consumer(TOPIC, subscription=name) as consumer:
                if count:
                    await take(consumer, count)
                    await consumer.flush()
        await trio.unload(TOPIC)
        cursors = {each.subscription: each.cursor for each in (await trio.describe(TOPIC)).subscriptions}
        assert cursors == places


async def test_a_single_broker_keeps_its_topics(tmp_path: Path) -> None:
    async with Brokers(1, tmp_path) as cluster:
        await cluster.create(TOPIC)
        before = await cluster.describe(TOPIC)
        with pytest.raises(SavaError, match="Cannot unload topic: single broker cluster detected"):
            await cluster.unload(TOPIC)
        async with aio.insecure_channel(cluster.brokers[0].admin) as channel:
            stub = danube_rpc.TopicAdminStub(channel)
            with pytest.raises(aio.AioRpcError) as refused:
                await stub.UnloadTopic(danube.TopicRequest(name=TOPIC), timeout=PATIENCE_S)
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert refused.value.details() == SINGLE
            with pytest.raises(aio.AioRpcError) as unknown:
                await stub.UnloadTopic(danube.TopicRequest(name="/default/nothing"), timeout=PATIENCE_S)
            assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        assert await cluster.describe(TOPIC) == before
        code, _, said = await cluster.command("topics", "unload", TOPIC, check=False)
        assert code != 0
        assert SINGLE in said


async def test_the_partitions_of_a_topic_move_together_or_one_by_one(trio: Brokers) -> None:
    await trio.create(TOPIC, partitions=4)
    async with trio.sava_client() as client:
        async with client.producer(TOPIC) as producer:
            for number in range(200):
                await producer.send(b"%d" % number, key=str(number))
        before = {
            each: (await trio.describe(each)).broker_id for each in (await trio.describe(TOPIC)).partitions
        }
        moves = await trio.unload(TOPIC)
        assert {move.topic: move.from_broker_id for move in moves} == before
        assert all(move.to_broker_id != move.from_broker_id and not move.error for move in moves)
        (one,) = await trio.unload(f"{TOPIC}-part-2")
        assert one.topic == f"{TOPIC}-part-2"
        async with client.reader(TOPIC, end="latest") as reader:
            assert sorted([int(message.payload) async for message in reader]) == list(range(200))


async def test_the_command_says_where_the_topic_went(trio: Brokers) -> None:
    await trio.create(TOPIC)
    target = (await trio.others(TOPIC))[0]
    broker_id = str(await trio.id_of(target))
    _, out, _ = await trio.command("topics", "unload", TOPIC, "--to", broker_id, "-o", "json")
    (move,) = json.loads(out)["moves"] if isinstance(json.loads(out), dict) else json.loads(out)
    assert (move["topic"], move["to_broker_id"]) == (TOPIC, broker_id)
    assert move["downtime_ms"] is not None
    code, _, said = await trio.command("topics", "unload", "/default/nothing", check=False)
    assert code != 0
    assert "/default/nothing does not exist" in said
    code, _, said = await trio.command("topics", "unload", TOPIC, "--to", "12345", check=False)
    assert code != 0
    assert "12345" in said


async def test_back_and_forth_under_load(trio: Brokers) -> None:
    """A→B→A and so on: every message that was acknowledged stays at its offset, in its producer's order."""
    await trio.create(TOPIC)
    async with trio.sava_client() as client, Workload(client, TOPIC) as load:
        await load.progressed(50)
        for _ in range(10):
            (move,) = await trio.unload(TOPIC)
            assert not move.error
            await load.progressed(20)
        await load.finish()


async def test_senders_to_a_non_reliable_topic_do_not_hear_of_its_moves(trio: Brokers) -> None:
    """The topic moves while the client writes: the broker ends the stream, gRPC fails the write with an error
    of its own, and that the batch was not taken is lost with the status. So the broker says it in the stream
    and waits for the client to close it."""
    await trio.create(TOPIC, reliable=False)
    async with (
        trio.sava_client() as client,
        client.producer(TOPIC, reliable=False, linger_ms=1) as producer,
        asyncio.TaskGroup() as group,
    ):
        are_over = False

        async def send() -> None:
            while not are_over:
                await producer.send(b"x" * 100)
                await asyncio.sleep(0.005)

        for _ in range(20):
            group.create_task(send())
        for _ in range(15):
            (move,) = await trio.unload(TOPIC)
            assert not move.error
            await asyncio.sleep(0.1)
        are_over = True
