"""``ConsumerService``: subscribing, receiving one message at a time on a stream, and an ack for each in a
call.

A stream outlives the broker that serves its topic. When the topic goes elsewhere, or is elsewhere from the
beginning, the stream is served by its owner through this broker (``reception``); acks are forwarded like any
call. What was on its way when the topic moved is delivered again.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

import asyncio
from typing import Any

from sava.api.danube.codes import (
    answer,
    refuse,
    required,
    told,
    topic_name,
)
from sava.api.danube.reception import Reception
from sava.api.danube.seats import HOLD_S, Seats, subscribe_options
from sava.errors import SavaError
from sava.peers.forwarding import Forwarder
from sava.peers.relays import is_forwarded
from sava.proto import danube_api_pb2 as pb
from sava.proto import danube_api_pb2_grpc as rpc
from sava.topics.errors import ConsumerUnknown, MessageInvalid, SubscriptionBusy
from sava.topics.specs import SubscriptionType
from sava.topics.topic import Topic
from sava.topics.topics import ServedTopics


class ConsumerService(rpc.ConsumerServiceServicer):
    def __init__(self, topics: ServedTopics, seats: Seats, forwarder: Forwarder, broker_url: str) -> None:
        self._topics = topics
        self._seats = seats
        self._forwarder = forwarder
        self._broker_url = broker_url

    @told
    async def Subscribe(self, request: pb.ConsumerRequest, context: Any) -> pb.ConsumerResponse:
        options = subscribe_options(
            required(request.subscription, "subscription"),
            _subscription_type(request.subscription_type),
            required(request.consumer_name, "consumer_name"),
            tuple(request.key_filters),
        )
        consumer_id = await self._seats.subscribe(required(request.topic_name, "topic_name"), options)
        return pb.ConsumerResponse(
            request_id=request.request_id, consumer_id=consumer_id, consumer_name=request.consumer_name
        )

    async def ReceiveMessages(  # type: ignore[override]  # the generated type knows only generators
        self, request: pb.ReceiveRequest, context: Any
    ) -> None:
        began = asyncio.get_running_loop().time()
        try:
            if is_forwarded(context):
                await self._seats.serve(request.consumer_id, context.write, self._broker_url)
            else:
                await Reception(self._seats, self._forwarder, self._broker_url, request, context).run()
        except Exception as error:
            lasted = asyncio.get_running_loop().time() - began
            if lasted < HOLD_S and not is_forwarded(context):
                await self._seats.hold(request.consumer_id, HOLD_S - lasted)
            if not isinstance(error, SavaError):
                raise
            if isinstance(error, SubscriptionBusy):
                # Not PERMISSION_DENIED, after which some clients give up for good: the other one may leave.
                error = ConsumerUnknown(str(error))
            await answer(context, error)

    async def Ack(self, request: pb.AckRequest, context: Any) -> pb.AckResponse:
        try:
            topic = await self._load(request)
            offset = request.msg_id.topic_offset
            topic.ack(request.subscription_name, ((offset, offset + 1),))
            self._seats.answered(topic.name, request.subscription_name, offset)
        except SavaError as error:
            await refuse(context, error)
        return pb.AckResponse(request_id=request.request_id)

    @told
    async def Nack(self, request: pb.NackRequest, context: Any) -> pb.NackResponse:
        topic = await self._load(request)
        offset = request.msg_id.topic_offset
        topic.nack(
            request.subscription_name,
            ((offset, offset + 1),),
            delay_ms=request.delay_ms,
            reason=request.reason,
        )
        self._seats.answered(topic.name, request.subscription_name, offset)
        return pb.NackResponse(request_id=request.request_id)

    async def _load(self, request: pb.AckRequest | pb.NackRequest) -> Topic:
        """The topic of an ack. Raises MessageInvalid, TopicUnknown."""
        if not request.HasField("msg_id"):
            raise MessageInvalid("msg_id is missing")
        required(request.subscription_name, "subscription_name")
        return await self._topics.get(topic_name(required(request.msg_id.topic_name, "msg_id.topic_name")))


def _subscription_type(number: int) -> SubscriptionType:
    try:
        return SubscriptionType(number)
    except ValueError:
        known = ", ".join(f"{kind.name} ({kind.value})" for kind in SubscriptionType)
        raise MessageInvalid(f"subscription_type {number} is not one of {known}") from None
