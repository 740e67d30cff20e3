"""The published danube-client with a broker that does not have its topic, in a cluster of real processes."""

from __future__ import annotations

import asyncio

from grpc import aio

from sava.proto import danube_api_pb2 as pb
from sava.proto import danube_api_pb2_grpc as rpc
from tests.cluster.test_brokers import at_rest
from tests.compat.programs import Program
from tests.support.brokers import Brokers
from tests.support.waiting import PATIENCE_S

TOPIC = "/default/orders"


async def lines_until(program: Program, last: str) -> list[str]:
    found: list[str] = []
    async with asyncio.timeout(60):
        while not found or found[-1] != last:
            found.append(str(await program.line()))
    return found


async def test_a_client_does_not_notice_moves_of_its_topic(trio: Brokers) -> None:
    """It stays with one broker while its topic goes round all three: each message that was answered arrives,
    and no ack fails."""
    await trio.create(TOPIC)
    near = (await trio.others(TOPIC))[0]
    async with Program("reconnect", "consume", near.client_url, topic=TOPIC) as consumer:
        assert await consumer.line() == "subscribed"
        async with Program("reconnect", "produce", near.client_url, topic=TOPIC) as producer:
            assert await producer.line() == "under way"
            for _ in range(4):
                (move,) = await trio.unload(TOPIC, through=near)
                assert move.error == ""
            producer.tell("stop")
            missing = {str(number) for number in await producer.result()}
        while missing:
            line = str(await consumer.line())
            assert not line.startswith("ack failed")
            missing.discard(line)


async def test_a_client_outlives_the_owner_of_its_topic(trio: Brokers) -> None:
    """The owner is killed while everything that it had is in segments: the client's stream goes on with the
    next owner, and so does its producer, both by the broker that they know."""
    await trio.create(TOPIC)
    owner = await trio.owner(TOPIC)
    owner_id = await trio.id_of(owner)
    near = (await trio.others(TOPIC))[0]
    async with (
        Program("reconnect", "consume", near.client_url, topic=TOPIC) as consumer,
        aio.insecure_channel(near.client_url.removeprefix("http://")) as channel,
    ):
        assert await consumer.line() == "subscribed"
        stub: rpc.ProducerServiceAsyncStub = rpc.ProducerServiceStub(channel)
        opening = pb.ProducerRequest(topic_name=TOPIC, producer_name="p", dispatch_strategy=pb.Reliable)
        producer_id = (await stub.CreateProducer(opening)).producer_id

        async def send(payload: str) -> None:
            msg_id = pb.MsgID(producer_id=producer_id, topic_name=TOPIC)
            message = pb.StreamMessage(msg_id=msg_id, payload=payload.encode(), producer_name="p")
            await stub.SendMessage(message, timeout=PATIENCE_S)

        await send("before")
        assert await lines_until(consumer, "before") == ["before"]

        await at_rest(trio, TOPIC)
        owner.kill()
        await owner.ended()
        await trio.served(TOPIC, by_other_than=owner_id, timeout=PATIENCE_S)
        await send("after")
        assert (await lines_until(consumer, "after"))[-1] == "after"
