"""A Danube client's stream and health, through a broker that does not have the topic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
from grpc import aio

from sava.api.danube import consumers, wire
from sava.api.danube.consumers import ConsumerService, ConsumerSessions
from sava.api.danube.lookup import HealthService
from sava.api.danube.producers import DanubeProducers
from sava.proto import danube_api_pb2 as pb
from sava.proto import danube_api_pb2_grpc as rpc
from sava.security.quotas import Quotas
from sava.topics.errors import (
    ConsumerClosed,
    ConsumerUnknown,
    NotOwner,
    TopicMoved,
)
from sava.topics.names import TopicName
from tests.support.waiting import PATIENCE_S
from tests.unit.api.brokers import ORDERS, Hosted, brokers

SEAT = 7


class ScriptedSeats(ConsumerSessions):
    """Holds streams back and knows ids as sessions do; what a stream gets is the test's."""

    def __init__(self, broker: int) -> None:
        super().__init__(cast(Any, SimpleNamespace(consumer_by_id=self._consumer)))
        self.broker = broker
        self.serves: Callable[[Any], Awaitable[None]] | None = None
        """None: the topic is elsewhere."""
        self.began = asyncio.Event()
        self.ended = asyncio.Event()
        self.knows = True

    async def serve(self, consumer_id: int, write: Any, broker_url: str) -> None:
        if self.serves is None:
            raise NotOwner(ORDERS, 0)
        self.began.set()
        try:
            await self.serves(write)
        finally:
            self.ended.set()

    async def _consumer(self, consumer_id: int) -> object | None:
        if self.serves is None:
            raise NotOwner(ORDERS, 0)
        return self if self.knows else None


def topics_of(sessions: ScriptedSeats) -> Any:
    """Of one broker, as producers see them: the topic is there, and served or not."""

    async def get(name: TopicName, reliable: bool = True) -> None:
        raise NotOwner(name, 0)

    registry = SimpleNamespace(get_local=lambda name: SimpleNamespace(topic_id=1))
    return SimpleNamespace(get=get, get_or_create=get, registry=registry, loaded={})


class Fleet:
    def __init__(self, hosted: dict[int, Hosted], sessions: dict[int, ScriptedSeats]) -> None:
        self.hosted, self.sessions = hosted, sessions

    def give(self, owner: int, serves: Callable[[Any], Awaitable[None]]) -> None:
        for number, sessions in self.sessions.items():
            sessions.serves = serves if number == owner else None
        self.tell(owner)

    def tell(self, owner: int) -> None:
        for each in self.hosted.values():
            each.view.set_owner(owner)

    def receive(self, broker: int) -> Any:
        stub: Any = rpc.ConsumerServiceStub(self.hosted[broker].channel)
        return stub.ReceiveMessages(pb.ReceiveRequest(consumer_id=SEAT))

    async def health(
        self, broker: int, kind: Any = pb.HealthCheckRequest.Consumer, number: int = SEAT
    ) -> str:
        stub: Any = rpc.HealthCheckStub(self.hosted[broker].channel)
        response = await stub.HealthCheck(pb.HealthCheckRequest(client=kind, id=number))
        return pb.HealthCheckResponse.ClientStatus.Name(response.status)


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    sessions: dict[int, ScriptedSeats] = {}

    def register(hosted: Hosted, server: aio.Server) -> None:
        own = sessions.setdefault(hosted.broker, ScriptedSeats(hosted.broker))
        producers = DanubeProducers(topics_of(own))
        served = hosted.forwarder.serving(server, "client", wire.answer)
        consumers = ConsumerService(topics_of(own), own, hosted.forwarder, "http://here", Quotas())
        rpc.add_ConsumerServiceServicer_to_server(consumers, served)
        rpc.add_HealthCheckServicer_to_server(HealthService(producers, own, hosted.forwarder), served)

    async with brokers(3, register) as hosted, asyncio.timeout(PATIENCE_S):
        yield Fleet(hosted, sessions)


def counting(start: int, count: int, then: BaseException | None = None) -> Callable[[Any], Awaitable[None]]:
    """So many messages, and then an error, or nothing more."""

    async def serves(write: Any) -> None:
        for offset in range(start, start + count):
            await write(pb.StreamMessage(request_id=offset))
        if then is not None:
            raise then
        await asyncio.Event().wait()

    return serves


async def take(call: Any, count: int) -> list[int]:
    return [(await call.read()).request_id for _ in range(count)]


async def test_a_stream_is_served_by_the_owner(fleet: Fleet) -> None:
    fleet.give(2, counting(0, 3))
    call = fleet.receive(1)
    assert await take(call, 3) == [0, 1, 2]
    call.cancel()
    await fleet.sessions[2].ended.wait()


async def test_a_stream_continues_when_its_topic_moves_and_comes_back(fleet: Fleet) -> None:
    """From this broker to 2, from there to 3, and here again: one stream to the client."""
    fleet.give(1, counting(0, 2))
    moves = [asyncio.Event() for _ in range(3)]

    def reading_until(move: asyncio.Event, start: int) -> Callable[[Any], Awaitable[None]]:
        async def serves(write: Any) -> None:
            await write(pb.StreamMessage(request_id=start))
            await move.wait()
            raise TopicMoved(ORDERS)

        return serves

    fleet.give(1, reading_until(moves[0], 0))
    call = fleet.receive(1)
    assert await take(call, 1) == [0]
    for turn, owner in enumerate((2, 3)):
        fleet.give(owner, reading_until(moves[turn + 1], turn + 1))
        moves[turn].set()
        assert await take(call, 1) == [turn + 1]
    fleet.give(1, counting(3, 1))
    moves[2].set()
    assert await take(call, 1) == [3]
    call.cancel()


async def test_a_stream_outlives_its_owner(fleet: Fleet) -> None:
    """The owner dies; nobody has the topic for a moment; then another broker has it."""
    fleet.give(2, counting(0, 1))
    call = fleet.receive(1)
    assert await take(call, 1) == [0]
    fleet.tell(0)
    await fleet.hosted[2].die()
    fleet.give(3, counting(0, 2))
    assert await take(call, 2) == [0, 1]  # the first was not acked
    call.cancel()


async def test_a_stream_that_the_owner_ends_for_a_moment_is_opened_again(fleet: Fleet) -> None:
    fleet.give(2, counting(0, 1, then=ConsumerClosed("the topic is taken up anew")))
    call = fleet.receive(1)
    assert await take(call, 3) == [0, 0, 0]
    call.cancel()


async def test_a_stream_that_nobody_serves_fails_after_a_while(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "PATIENCE_S", 1.0)
    fleet.tell(0)
    with pytest.raises(aio.AioRpcError) as caught:
        await fleet.receive(1).read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert ("sava-code", "not_served") in list[object](caught.value.trailing_metadata() or ())


async def test_a_consumer_unknown_to_the_owner_hears_it_through_another_broker(fleet: Fleet) -> None:
    """Its stream is held back as it would be there, until the health check has told it to subscribe again."""
    fleet.give(2, counting(0, 0, then=ConsumerUnknown("consumer 7 is not known here")))
    fleet.sessions[2].knows = False
    call = fleet.receive(1)
    await fleet.sessions[2].ended.wait()
    while SEAT not in fleet.sessions[1]._held:  # noqa: ASYNC110 (nothing says so)
        await asyncio.sleep(0.01)
    assert await fleet.health(1) == "CLOSE"
    with pytest.raises(aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert ("sava-code", "consumer_unknown") in list[object](caught.value.trailing_metadata() or ())


async def test_health_of_a_consumer_is_the_owners_to_tell_and_unsure_is_well(fleet: Fleet) -> None:
    fleet.give(2, counting(0, 0))
    assert await fleet.health(1) == "OK"
    fleet.sessions[2].knows = False
    assert await fleet.health(1) == "CLOSE"
    await fleet.hosted[2].die()
    assert await fleet.health(1) == "OK"


async def test_health_of_another_brokers_producer_is_asked_there() -> None:
    """By its id alone: so the id is remembered when its calls are forwarded."""
    producers = DanubeProducers(topics_of(ScriptedSeats(1)))
    assert producers.topic_elsewhere(42) is None
    with pytest.raises(NotOwner):
        await producers.recall(42, str(ORDERS), "shop")
    assert producers.topic_elsewhere(42) == ORDERS
    producers._topics.loaded[ORDERS] = None  # type: ignore[index]
    assert producers.topic_elsewhere(42) is None
