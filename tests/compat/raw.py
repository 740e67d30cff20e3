"""Danube's protocol spoken by hand, in short words."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Self

import grpc
import pytest
from grpc import aio

from sava.proto import danube_admin_pb2 as admin
from sava.proto import danube_api_pb2 as pb
from tests.compat.stubs import Stubs
from tests.support.network import END
from tests.support.waiting import PATIENCE_S

EXCLUSIVE = pb.ConsumerRequest.Exclusive
SHARED = pb.ConsumerRequest.Shared
FAILOVER = pb.ConsumerRequest.Failover
KEY_SHARED = pb.ConsumerRequest.KeyShared


async def refused(call: Awaitable[Any]) -> tuple[grpc.StatusCode, str]:
    """The status and text with which the call is refused."""
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


class Producer:
    def __init__(self, stubs: Stubs, topic: str, name: str, producer_id: int) -> None:
        self._stubs = stubs
        self.topic = topic
        self.name = name
        self.producer_id = producer_id

    @classmethod
    async def create(
        cls, stubs: Stubs, topic: str, name: str = "producer", *, reliable: bool = True, **fields: Any
    ) -> Self:
        strategy = pb.Reliable if reliable else pb.NonReliable
        request = pb.ProducerRequest(
            request_id=1, producer_name=name, topic_name=topic, dispatch_strategy=strategy, **fields
        )
        response = await stubs.producer.CreateProducer(request, timeout=PATIENCE_S)
        return cls(stubs, topic, name, response.producer_id)

    def message(self, payload: str | bytes, key: str | None = None, **fields: Any) -> pb.StreamMessage:
        return pb.StreamMessage(
            request_id=7,
            msg_id=pb.MsgID(producer_id=self.producer_id, topic_name=self.topic),
            payload=payload.encode() if isinstance(payload, str) else payload,
            publish_time=1_700_000_000_123,
            producer_name=self.name,
            routing_key=key,
            **fields,
        )

    async def send(self, payload: str | bytes, key: str | None = None, **fields: Any) -> None:
        await self._stubs.producer.SendMessage(self.message(payload, key, **fields), timeout=PATIENCE_S)

    async def send_numbers(self, numbers: range, *, at_once: int = 64) -> None:
        """As payloads, in order, ``at_once`` of them under way."""
        for start in range(numbers.start, numbers.stop, at_once):
            part = range(start, min(start + at_once, numbers.stop))
            await asyncio.gather(*(self.send(str(number)) for number in part))


async def subscribe(
    stubs: Stubs,
    topic: str,
    name: str = "consumer",
    subscription: str = "subscription",
    kind: int = EXCLUSIVE,
    filters: tuple[str, ...] = (),
) -> int:
    request = pb.ConsumerRequest(
        request_id=1,
        topic_name=topic,
        consumer_name=name,
        subscription=subscription,
        subscription_type=kind,  # type: ignore[arg-type]
        key_filters=filters,
    )
    return int((await stubs.consumer.Subscribe(request, timeout=PATIENCE_S)).consumer_id)


class Stream:
    """What a consumer id receives."""

    def __init__(self, stubs: Stubs, consumer_id: int, subscription: str = "subscription") -> None:
        self._stubs = stubs
        self._subscription = subscription
        self._call = stubs.consumer.ReceiveMessages(pb.ReceiveRequest(request_id=1, consumer_id=consumer_id))

    async def next(self, *, ack: bool = True, timeout: float = PATIENCE_S) -> pb.StreamMessage:
        async with asyncio.timeout(timeout):
            message = await self._call.read()
            assert isinstance(message, pb.StreamMessage), "the stream has ended"
            if ack:
                await self.ack(message)
        return message

    async def ack(self, message: pb.StreamMessage) -> None:
        await self._stubs.consumer.Ack(
            pb.AckRequest(
                request_id=message.request_id, msg_id=message.msg_id, subscription_name=self._subscription
            ),
            timeout=PATIENCE_S,
        )

    async def texts(self, count: int, *, ack: bool = True, timeout: float = PATIENCE_S) -> list[str]:
        async with asyncio.timeout(timeout):
            return [(await self.next(ack=ack, timeout=timeout)).payload.decode() for _ in range(count)]

    async def is_silent(self, seconds: float = 0.3) -> bool:
        """Does not use the stream up: what comes later is still read."""
        reading = asyncio.ensure_future(self._call.read())
        done, _ = await asyncio.wait((reading,), timeout=seconds)
        if done:
            return False
        self._call = _Resumed(self._call, reading)
        return True

    async def end(self, *, timeout: float = PATIENCE_S) -> grpc.StatusCode:
        """The status that the broker ends the stream with."""
        async with asyncio.timeout(timeout):
            try:
                while await self._call.read() is not END:
                    pass
            except aio.AioRpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    def cancel(self) -> None:
        self._call.cancel()


class _Resumed:
    """A call whose next read is under way already."""

    def __init__(self, call: Any, reading: asyncio.Future[Any]) -> None:
        self._call = call
        self._reading: asyncio.Future[Any] | None = reading

    async def read(self) -> Any:
        if self._reading is not None:
            reading, self._reading = self._reading, None
            return await reading
        return await self._call.read()

    def cancel(self) -> None:
        self._call.cancel()
        if self._reading is not None:
            self._reading.cancel()


async def open_stream(
    stubs: Stubs,
    topic: str,
    name: str = "consumer",
    subscription: str = "subscription",
    kind: int = EXCLUSIVE,
    filters: tuple[str, ...] = (),
) -> Stream:
    return Stream(stubs, await subscribe(stubs, topic, name, subscription, kind, filters), subscription)


async def set_policy(stubs: Stubs, topic: str, subscription: str = "subscription", **fields: Any) -> None:
    policy = {
        "max_redelivery_count": 5,
        "ack_timeout_ms": 30_000,
        "base_redelivery_delay_ms": 10,
        "max_redelivery_delay_ms": 60_000,
        "backoff_strategy": admin.Fixed,
        "poison_policy": admin.Block,
        **fields,
    }
    await stubs.topics.SetSubscriptionFailurePolicy(
        admin.SetSubscriptionFailurePolicyRequest(
            topic=topic,
            subscription=subscription,
            failure_policy=admin.SubscriptionFailurePolicy(**policy),
        ),
        timeout=PATIENCE_S,
    )


async def set_window(stubs: Stubs, topic: str, messages: int, subscription: str = "subscription") -> None:
    await stubs.topics.SetSubscriptionDispatchConfig(
        admin.SetSubscriptionDispatchConfigRequest(
            topic=topic,
            subscription=subscription,
            dispatch_config=admin.SubscriptionDispatchConfig(max_unacked_messages=messages),
        ),
        timeout=PATIENCE_S,
    )


async def health(stubs: Stubs, client_id: int, *, producer: bool = False) -> str:
    request = pb.HealthCheckRequest(
        request_id=1,
        client=pb.HealthCheckRequest.Producer if producer else pb.HealthCheckRequest.Consumer,
        id=client_id,
    )
    response = await stubs.health.HealthCheck(request, timeout=PATIENCE_S)
    return pb.HealthCheckResponse.ClientStatus.Name(response.status)
