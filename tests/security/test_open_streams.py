"""What is taken away is taken away within a second: from open streams, also those that another broker serves,
and at brokers other than the one that was told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import jwt
import pytest
from grpc import aio

from sava.peers.forwarding import EOF
from sava.proto import danube_api_pb2 as danube
from sava.proto import security_pb2 as pb
from sava.proto import streams_pb2
from tests.security.secured import ISSUER, Secured, secured, status_of
from tests.support.brokers import BrokerProcess
from tests.support.waiting import PATIENCE_S

ORDERS: Final = "/sales/orders"
PUBLISH: Final = "/sava.streams.Streams/Publish"
SUBSCRIBE: Final = "/sava.streams.Streams/Subscribe"
WITHIN_S: Final = 1.0


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Secured]:
    async with secured(2, tmp_path) as cluster:
        await cluster.create_namespace("sales")
        await cluster.create(ORDERS)
        yield cluster


async def published(pair: Secured, broker: BrokerProcess, metadata: Any, name: str) -> Any:
    """An open stream of a producer."""
    opening = streams_pb2.OpenProducer(topic=ORDERS, producer_name=name)
    call = pair.open(broker, PUBLISH, streams_pb2.PublishRequest(), metadata, timeout=PATIENCE_S)
    await call.write(streams_pb2.PublishRequest(open=opening))
    assert (await call.read()).HasField("opened")
    return call


async def subscribed(pair: Secured, broker: BrokerProcess, metadata: Any, name: str) -> Any:
    opening = streams_pb2.OpenConsumer(topic=ORDERS, subscription=name, consumer_name=name)
    call = pair.open(broker, SUBSCRIBE, streams_pb2.SubscribeRequest(), metadata, timeout=PATIENCE_S)
    await call.write(streams_pb2.SubscribeRequest(open=opening))
    assert (await call.read()).HasField("opened")
    return call


async def ended(call: Any) -> tuple[str, str, float]:
    """Its status, what it says, and when it was."""
    with suppress(aio.AioRpcError):
        while await call.read() is not EOF:
            pass
    return (await call.code()).name, await call.details(), time.monotonic()


async def test_a_binding_that_is_deleted_ends_streams_everywhere(pair: Secured) -> None:
    """Through the owner and through the other broker; of ann, and not of bob."""
    binding = await pair.bind("ann", "producer", namespace="sales")
    await pair.bind("ann", "consumer", topic="/sales/or*")
    await pair.bind("bob", "producer", topic=ORDERS)
    anns = [
        await published(pair, broker, pair.headers("ann"), f"a{number}")
        for number, broker in enumerate(pair.brokers)
    ]
    bobs = [
        await published(pair, broker, pair.headers("bob"), f"b{number}")
        for number, broker in enumerate(pair.brokers)
    ]
    consumers = [
        await subscribed(pair, broker, pair.headers("ann"), f"c{number}")
        for number, broker in enumerate(pair.brokers)
    ]
    began = time.monotonic()
    await pair.unbind(binding, through=1)
    for code, text, at in await asyncio.gather(*map(ended, anns)):
        assert code == "PERMISSION_DENIED"
        assert "user:ann has no permission produce on topic /sales/orders" in text
        assert "sava auth bindings create user:ann producer --topic /sales/orders" in text
        assert at - began < WITHIN_S
    look_up = streams_pb2.LookUpRequest(topic=ORDERS, create=True)
    for broker in pair.brokers:
        assert (
            await pair.status(broker, "ann", "/sava.streams.Streams/LookUp", look_up) == "PERMISSION_DENIED"
        )
    assert not any(call.done() for call in (*bobs, *consumers))
    for call in (*bobs, *consumers):
        call.cancel()


async def test_a_role_that_loses_a_permission_ends_streams(pair: Secured) -> None:
    client = pair.brokers[0].client
    await client.call(client.security.SetRole, pb.Role(name="shop", permissions=["lookup", "produce"]))
    await pair.bind("ann", "shop", namespace="sales")
    calls = [
        await published(pair, broker, pair.headers("ann"), f"a{number}")
        for number, broker in enumerate(pair.brokers)
    ]
    began = time.monotonic()
    await client.call(client.security.SetRole, pb.Role(name="shop", permissions=["lookup"]))
    for code, _, at in await asyncio.gather(*map(ended, calls)):
        assert code == "PERMISSION_DENIED"
        assert at - began < WITHIN_S


async def test_a_token_that_is_revoked_or_expires_ends_its_streams(pair: Secured) -> None:
    """Its own, and no other one of the same principal."""
    await pair.bind("ann", "producer", topic=ORDERS)

    def token(token_id: str, ends: float) -> tuple[tuple[str, str], ...]:
        claims = {"iss": ISSUER, "sub": "ann", "jti": token_id, "exp": ends}
        return (("authorization", f"Bearer {jwt.encode(claims, pair.issuer.secret, 'HS256')}"),)

    in_an_hour = time.time() + 3600
    skew_s = 30
    ends_at = time.time() + 3
    revoked = [
        await published(pair, broker, token("leaked", in_an_hour), f"r{number}")
        for number, broker in enumerate(pair.brokers)
    ]
    kept = await published(pair, pair.brokers[0], token("kept", in_an_hour), "k")
    short = [
        await published(pair, broker, token("short", ends_at - skew_s), f"s{number}")
        for number, broker in enumerate(pair.brokers)
    ]
    client = pair.brokers[0].client
    began = time.monotonic()
    await client.call(client.security.Revoke, pb.Revocation(kind="token", id="leaked", reason="stolen"))
    for code, text, at in await asyncio.gather(*map(ended, revoked)):
        assert (code, text) == ("UNAUTHENTICATED", "the token of user:ann was revoked")
        assert at - began < WITHIN_S
    look_up = streams_pb2.LookUpRequest(topic=ORDERS)
    for broker in pair.brokers:
        call = pair.call_with(broker, token("leaked", in_an_hour), "/sava.streams.Streams/LookUp", look_up)
        assert await status_of(call) == "UNAUTHENTICATED"
    for code, text, _ in await asyncio.gather(*map(ended, short)):
        assert (code, text) == ("UNAUTHENTICATED", "the token of user:ann has expired")
    assert abs(time.time() - ends_at) < WITHIN_S
    assert not kept.done()
    kept.cancel()


async def test_danubes_consumer_loses_its_stream_and_its_producer_its_right(pair: Secured) -> None:
    """The calls carry numbers, and are decided by the topic that these are of."""
    producing = await pair.bind("ann", "producer", topic=ORDERS)
    consuming = await pair.bind("ann", "consumer", topic=ORDERS)
    await pair.bind("ann", "producer", topic="/sales/bills")
    owner = await pair.owner(ORDERS)
    (other,) = await pair.others(ORDERS)
    shown = pair.headers("ann")
    made = await pair.call_with(
        other,
        shown,
        "/danube.ProducerService/CreateProducer",
        danube.ProducerRequest(topic_name=ORDERS, producer_name="p", dispatch_strategy=danube.Reliable),
    )
    message = danube.StreamMessage(
        msg_id=danube.MsgID(producer_id=made.producer_id, topic_name="/sales/bills"),
        producer_name="p",
        payload=b"x",
    )
    send = "/danube.ProducerService/SendMessage"
    assert await status_of(pair.call_with(owner, shown, send, message)) == "OK"
    joined = await pair.call_with(
        other,
        shown,
        "/danube.ConsumerService/Subscribe",
        danube.ConsumerRequest(
            topic_name=ORDERS,
            consumer_name="c",
            subscription="s",
            subscription_type=danube.ConsumerRequest.Shared,
        ),
    )
    receive = "/danube.ConsumerService/ReceiveMessages"
    request = danube.ReceiveRequest(consumer_id=joined.consumer_id)
    streams = [pair.open(broker, receive, request, shown, timeout=PATIENCE_S) for broker in (other, owner)]
    assert (await pair.status(owner, "bob", receive, request)) == "PERMISSION_DENIED"
    began = time.monotonic()
    # Where the streams have ended, what was taken away before that is gone, too.
    await pair.unbind(producing)
    await pair.unbind(consuming)
    for code, _, at in await asyncio.gather(*map(ended, streams)):
        assert code == "PERMISSION_DENIED"
        assert at - began < WITHIN_S
    assert await status_of(pair.call_with(owner, shown, send, message)) == "PERMISSION_DENIED"
