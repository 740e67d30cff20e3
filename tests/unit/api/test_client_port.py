"""The client port of a broker that does not have the topic: real topics, agents and views, both protocols."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio

from sava.api import danube, streams
from sava.api.danube.metrics import SendStats
from sava.api.streams import StreamsService
from sava.client import Client
from sava.cluster import records
from sava.cluster.records import Registration
from sava.cluster.view import ClusterView, TopicRouter
from sava.metadata.store import MetadataStore
from sava.peers.forwarding import Forwarder
from sava.proto import danube_api_pb2 as pb
from sava.proto import danube_api_pb2_grpc as rpc
from sava.proto import streams_pb2, streams_pb2_grpc
from sava.records import Message, RecordBatch
from sava.schemas.registry import SchemaRegistry
from sava.security.principal import ANONYMOUS
from sava.security.quotas import EVERY, Quota, Quotas
from sava.topics import specs
from sava.topics.names import TopicName
from sava.topics.rules import TopicSchemas
from sava.topics.served import ServedTopics
from sava.topics.subscription import Subscription
from tests.support.waiting import FAR_S, HURRIES, PATIENCE_S, until
from tests.unit.api.site import (
    BrokerAt,
    Director,
    FakeNode,
    Site,
)

ORDERS = TopicName("default", "orders")
TEXT = str(ORDERS)


class ClientSite(Site):
    """Its brokers have the client services too, on the same port."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.quotas: dict[int, Quotas] = {}

    async def register(self, broker: int, *, admin: str = "", incarnation: int = 0) -> None:
        registration = Registration(
            broker=broker,
            incarnation=incarnation or broker,
            client=admin,
            admin=admin,
            raft="",
            http="",
            store_id="s",
        )
        await self.world.metadata.put(records.registration_key(broker), specs.encode(registration))

    def _add_services(
        self,
        server: aio.Server,
        forwarder: Forwarder,
        topics: ServedTopics,
        view: ClusterView,
        router: TopicRouter,
        director: Director,
        node: FakeNode,
    ) -> None:
        super()._add_services(server, forwarder, topics, view, router, director, node)
        store = self.world.metadata
        schemas = SchemaRegistry(store)
        quotas = self.quotas[forwarder.broker] = Quotas()
        streams = StreamsService(
            topics, schemas=schemas, locate=forwarder.locate, store_url="memory://", quotas=quotas
        )
        streams.register(forwarder.serving(server, "client"))
        danube.register_client_services(
            server,
            topics=topics,
            schemas=schemas,
            topic_schemas=TopicSchemas(store),
            forwarder=forwarder,
            sends=SendStats(),
            broker_url=f"http://broker-{forwarder.broker}:6650",
            quotas=quotas,
        )


class Fleet:
    """Three brokers; new topics go to the first."""

    def __init__(
        self, brokers: dict[int, BrokerAt], store: MetadataStore, quotas: Mapping[int, Quotas]
    ) -> None:
        self.brokers = brokers
        self.store = store
        self.quotas = quotas

    def address(self, broker: int) -> str:
        return self.brokers[1].view.brokers[broker].client

    def subscription(self, broker: int, name: str) -> Subscription:
        found = self.brokers[broker].topics.loaded[ORDERS].subscriptions[name]
        assert isinstance(found, Subscription)
        return found

    def danube(self, broker: int) -> Danube:
        return Danube(self.brokers[broker].channel)

    async def move(self, target: int) -> None:
        await self.brokers[1].director.move(ORDERS, target=target, reason="unload", timeout_ms=10_000)
        for each in self.brokers.values():
            await each.view.wait(partial(self._is_known, each.view, target), timeout=PATIENCE_S)

    @staticmethod
    def _is_known(view: ClusterView, owner: int) -> bool:
        held = view.held(ORDERS)
        return held is not None and held.record.owner == owner


class Danube:
    """As its clients call one broker."""

    def __init__(self, channel: aio.Channel) -> None:
        self.producers: Any = rpc.ProducerServiceStub(channel)
        self.consumers: Any = rpc.ConsumerServiceStub(channel)
        self.discovery: Any = rpc.DiscoveryStub(channel)
        self.healths: Any = rpc.HealthCheckStub(channel)
        self.storage: Any = rpc.StorageServiceStub(channel)

    async def create(self, name: str = "shop") -> int:
        request = pb.ProducerRequest(topic_name=TEXT, producer_name=name, dispatch_strategy=pb.Reliable)
        return int((await self.producers.CreateProducer(request)).producer_id)

    async def send(self, producer: int, payload: str, name: str = "shop") -> None:
        await self.producers.SendMessage(
            pb.StreamMessage(
                request_id=1,
                msg_id=pb.MsgID(producer_id=producer, topic_name=TEXT),
                payload=payload.encode(),
                producer_name=name,
            )
        )

    async def subscribe(self) -> int:
        request = pb.ConsumerRequest(
            topic_name=TEXT,
            consumer_name="c",
            subscription="s",
            subscription_type=pb.ConsumerRequest.Exclusive,
        )
        return int((await self.consumers.Subscribe(request)).consumer_id)

    def receive(self, consumer: int) -> Any:
        return self.consumers.ReceiveMessages(pb.ReceiveRequest(consumer_id=consumer))

    async def ack(self, message: pb.StreamMessage) -> None:
        await self.consumers.Ack(pb.AckRequest(msg_id=message.msg_id, subscription_name="s"))

    async def health(self, kind: Any, number: int) -> Any:
        answer = await self.healths.HealthCheck(pb.HealthCheckRequest(client=kind, id=number))
        return answer.status


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    site = ClientSite(tmp_path)
    async with AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        brokers = {number: await stack.enter_async_context(site.broker(number)) for number in (1, 2, 3)}
        for each in brokers.values():
            await each.view.wait(lambda each=each: len(each.view.brokers) == 3, timeout=PATIENCE_S)  # type: ignore[misc]
        assigning = asyncio.create_task(brokers[1].director.assign_new())
        try:
            yield Fleet(brokers, site.world.metadata, site.quotas)
        finally:
            assigning.cancel()


async def test_a_danube_client_works_with_a_broker_that_has_none_of_its_topics(fleet: Fleet) -> None:
    two = fleet.danube(2)
    producer = await two.create()
    found = await two.discovery.TopicLookup(pb.TopicLookupRequest(topic=TEXT))
    assert found.connect_url == "http://broker-2:6650"  # where it will find a broker whoever has the topic
    consumer = await two.subscribe()
    stream = two.receive(consumer)
    assert await two.health(pb.HealthCheckRequest.Producer, producer) == pb.HealthCheckResponse.OK
    assert await two.health(pb.HealthCheckRequest.Consumer, consumer) == pb.HealthCheckResponse.OK
    for number in range(200):
        await two.send(producer, str(number))
        message = await stream.read()
        assert message.payload.decode() == str(number)
        await two.ack(message)
    assert await two.health(pb.HealthCheckRequest.Consumer, consumer + 1) == pb.HealthCheckResponse.CLOSE
    await two.storage.ListSegmentDescriptors(pb.ListSegmentDescriptorsRequest(topic=TEXT))
    assert ORDERS in fleet.brokers[1].topics.loaded
    assert ORDERS not in fleet.brokers[2].topics.loaded
    subscription = fleet.subscription(1, "s")
    assert subscription.backlog == 0
    stream.cancel()


async def test_a_consumer_of_a_new_topic_is_known_through_another_broker(
    fleet: Fleet,
) -> None:
    """Broker 2 lists all topics, for somebody's unknown id; then the topic is created, and subscribed to
    through broker 2, before it would list them again."""
    two = fleet.danube(2)
    assert await two.health(pb.HealthCheckRequest.Consumer, 1 << 40) == pb.HealthCheckResponse.CLOSE
    await two.create()
    consumer = await two.subscribe()
    assert await two.health(pb.HealthCheckRequest.Consumer, consumer) == pb.HealthCheckResponse.OK


async def test_a_danube_client_does_not_notice_that_its_topic_moves(fleet: Fleet) -> None:
    """Its broker has the topic, then has not, then another moves, then it has it again: every call succeeds,
    the stream stays, and nothing is lost."""
    one = fleet.danube(1)
    producer = await one.create()
    consumer = await one.subscribe()
    stream = one.receive(consumer)
    got: set[str] = set()
    sent = 0

    async def consume() -> None:
        async for message in stream:
            await one.ack(message)
            got.add(message.payload.decode())

    async def produce() -> None:
        nonlocal sent
        while not moved.is_set():
            await one.send(producer, str(sent))
            sent += 1

    async def produced(count: int) -> None:
        """So many more."""
        goal = sent + count
        while sent < goal:
            assert not producing.done(), producing.exception()
            await asyncio.sleep(0.01)

    moved = asyncio.Event()
    consuming, producing = asyncio.create_task(consume()), asyncio.create_task(produce())
    for target in (2, 3, 1):
        await produced(5)
        await fleet.move(target)
    await produced(5)
    moved.set()
    await producing
    wanted = {str(number) for number in range(sent)}
    while got != wanted:
        assert not consuming.done(), consuming.exception()
        await asyncio.sleep(0.01)
    stream.cancel()
    await asyncio.gather(consuming, return_exceptions=True)


async def test_sava_s_client_goes_to_the_owner_or_through_another_broker(fleet: Fleet) -> None:
    async with Client(fleet.address(2)) as client:
        async with client.producer(TEXT, name="direct") as producer:
            assert await producer.send(b"0") == 0
        found = await client._connection.look_up(TEXT)
        assert [(each.broker_id, each.address) for each in found.partitions] == [(1, fleet.address(1))]

        # As a client that cannot reach the owner: it takes the broker that answers it.
        stub = client._connection.stub(fleet.address(2))
        call = stub.Publish()
        opening = streams_pb2.OpenProducer(topic=TEXT, producer_name="around")
        await call.write(streams_pb2.PublishRequest(open=opening))
        opened = (await call.read()).opened
        batch = RecordBatch.encode(
            [b"1", b"2"], publish_time=1, producer_id=opened.producer_id, base_sequence=0
        )
        await call.write(streams_pb2.PublishRequest(batch=batch.to_bytes()))
        assert (await call.read()).receipts[0].base_offset == 1
        await call.done_writing()
        assert await call.read() is aio.EOF  # type: ignore[attr-defined]

        read = stub.Read(streams_pb2.ReadRequest(topic=TEXT, end=3))
        batches = [
            RecordBatch.parse(each) for response in [r async for r in read] for each in response.batches
        ]
        assert [message.payload for each in batches for message in each] == [b"0", b"1", b"2"]
        offsets = await stub.Offsets(streams_pb2.OffsetsRequest(topic=TEXT))
        assert offsets.next_offset == 3

        call = stub.Subscribe()
        consumer = streams_pb2.OpenConsumer(topic=TEXT, subscription="s", consumer_name="c")
        consumer.start.earliest = True
        await call.write(streams_pb2.SubscribeRequest(open=consumer))
        assert (await call.read()).opened.reliable
        await call.write(streams_pb2.SubscribeRequest(credits=10))
        offset = 0
        while offset < 3:
            for delivered in (await call.read()).delivered:
                offset = RecordBatch.parse(delivered.batch).next_offset
        acks = streams_pb2.Acks(ranges=[0, 3], receipt=1)
        await call.write(streams_pb2.SubscribeRequest(acks=acks))
        assert (await call.read()).acks_stored == 1
        call.cancel()


@pytest.mark.parametrize(
    ("presented", "status"),
    [(0, None), (1 << 61, None), (1, "producer_fenced"), (1 << 62, "message_invalid")],
)
async def test_a_stream_presents_the_number_of_its_producer_s_open(
    fleet: Fleet, presented: int, status: str | None
) -> None:
    """A number near the end of the range would leave none for the next open."""
    async with Client(fleet.address(1)) as client, client.producer(TEXT, name="p") as producer:
        assert await producer.send(b"0") == 0
        call = client._connection.stub(fleet.address(1)).Publish()
        opening = streams_pb2.OpenProducer(topic=TEXT, producer_name="p", producer_epoch=presented)
        await call.write(streams_pb2.PublishRequest(open=opening))
        if status is None:
            given = (await call.read()).opened.producer_epoch
            assert given == presented or not presented
            assert given > producer._streams[0].producer_epoch
            call.cancel()
        else:
            assert dict(await call.trailing_metadata())["sava-code"] == status


async def test_sava_s_client_follows_its_topic(fleet: Fleet) -> None:
    """It is sent away with a reason, looks the topic up, and finds the next owner; nothing twice, nothing
    lost."""
    async with (
        Client(fleet.address(2)) as client,
        client.producer(TEXT, name="p") as producer,
        client.consumer(TEXT, subscription="s", type="exclusive") as consumer,
    ):
        for turn, target in enumerate((2, 3, 1)):
            for number in range(5):
                assert await producer.send(b"x") == 5 * turn + number
            for number in range(5):
                message = await anext(consumer)
                assert message.offset == 5 * turn + number
                await consumer.ack(message)
            await fleet.move(target)
        assert await producer.send(b"x") == 15
        assert (await anext(consumer)).offset == 15


async def test_a_batch_for_another_brokers_topic_keeps_its_producers(fleet: Fleet) -> None:
    """As dead letters do, which are other producers' messages."""
    await fleet.danube(1).create()
    batch = RecordBatch.from_messages([Message(b"a", producer="x"), Message(b"b", producer="y")])
    await fleet.brokers[2].forwarder.publish_elsewhere(ORDERS, batch)
    log = fleet.brokers[1].topics.loaded[ORDERS].log
    assert log is not None
    stored = [message async for each in log.read(0) for message in each]
    assert [(message.payload, message.producer) for message in stored] == [(b"a", "x"), (b"b", "y")]


async def test_clients_do_not_append(fleet: Fleet) -> None:
    async with Client(fleet.address(1)) as client:
        stub = client._connection.stub(fleet.address(1))
        with pytest.raises(aio.AioRpcError, match="for brokers of this cluster"):
            await stub.Append(streams_pb2.AppendRequest(topic=TEXT))


# -- calls of readers that keep their own position ------------------------------------------------


async def publish(client: Client, *payloads: bytes) -> None:
    async with client.producer(TEXT) as producer:
        await producer.send_many(payloads)


async def test_who_waits_for_more_is_answered_when_there_is_more(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the owner, and through a broker that is not."""
    monkeypatch.setattr(streams, "LONGEST_WAIT_MS", int(FAR_S * 1000))
    async with Client(fleet.address(1)) as client:
        await publish(client, b"0")
        stubs = [client._connection.stub(fleet.address(broker)) for broker in (1, 2)]
        request = streams_pb2.OffsetsRequest(topic=TEXT, beyond=0, wait_ms=int(FAR_S * 1000))
        for stub in stubs:  # there is more already
            assert (await stub.Offsets(request, timeout=PATIENCE_S)).next_offset == 1
        request.beyond = 1
        waiting = [asyncio.ensure_future(stub.Offsets(request, timeout=FAR_S)) for stub in stubs]
        await asyncio.sleep(0.1)
        assert not any(each.done() for each in waiting)
        await publish(client, b"1", b"2")
        async with asyncio.timeout(PATIENCE_S):
            assert [each.next_offset for each in await asyncio.gather(*waiting)] == [3, 3]


async def test_who_waits_for_more_is_told_when_the_time_is_up(fleet: Fleet) -> None:
    """Its own, or what is left of the deadline: then the answer comes a little before gRPC's."""
    async with Client(fleet.address(1)) as client:
        await publish(client, b"0")
        request = streams_pb2.OffsetsRequest(topic=TEXT, beyond=1, wait_ms=100)
        stubs = [client._connection.stub(fleet.address(broker)) for broker in (1, 2)]
        for stub in stubs:
            assert (await stub.Offsets(request, timeout=PATIENCE_S)).next_offset == 1
        request.wait_ms = streams.LONGEST_WAIT_MS
        for seconds in HURRIES:
            with suppress(aio.AioRpcError):
                assert (await stubs[1].Offsets(request, timeout=seconds)).next_offset == 1
                return
        raise AssertionError("no answer within any deadline")


async def test_who_waits_for_more_learns_that_the_topic_goes(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: whoever waits asks its next owner."""
    monkeypatch.setattr(streams, "LONGEST_WAIT_MS", int(FAR_S * 1000))
    async with Client(fleet.address(1)) as client:
        await publish(client, b"0")
        request = streams_pb2.OffsetsRequest(topic=TEXT, beyond=1, wait_ms=int(FAR_S * 1000))
        waiting = [
            asyncio.ensure_future(
                client._connection.stub(fleet.address(broker)).Offsets(request, timeout=FAR_S)
            )
            for broker in (1, 2)
        ]
        await asyncio.sleep(0.1)
        await fleet.move(3)
        async with asyncio.timeout(PATIENCE_S):
            for ended in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(ended, aio.AioRpcError)
                assert ended.code() is grpc.StatusCode.UNAVAILABLE


async def test_any_broker_lists_the_topics(fleet: Fleet) -> None:
    async with Client(fleet.address(1)) as client:
        await publish(client, b"0")
        async with client.producer("/default/many", partitions=3, reliable=False):
            pass
        for broker in (1, 2, 3):
            stub = client._connection.stub(fleet.address(broker))
            for namespace in ("", "default"):
                listed = await stub.ListTopics(streams_pb2.ListTopicsRequest(namespace=namespace))
                assert [(each.topic, each.reliable, each.partition_count) for each in listed.topics] == [
                    ("/default/many", False, 3),
                    (TEXT, True, 0),
                ]
            assert not (await stub.ListTopics(streams_pb2.ListTopicsRequest(namespace="system"))).topics
            with pytest.raises(aio.AioRpcError, match="namespace nowhere does not exist"):
                await stub.ListTopics(streams_pb2.ListTopicsRequest(namespace="nowhere"))


async def test_a_look_up_tells_the_subject(fleet: Fleet) -> None:
    schemas = SchemaRegistry(fleet.store)
    await schemas.register("order", "json_schema", b'{"type": "object"}')
    async with Client(fleet.address(1)) as client:
        async with client.producer("/default/many", partitions=2, schema="order"):
            pass
        for name in ("/default/many", "/default/many-part-1"):
            assert (await client._connection.look_up(name)).schema_subject == "order"
        await publish(client, b"0")
        assert (await client._connection.look_up(TEXT)).schema_subject == ""


async def test_progress_is_acked_in_a_subscription_that_need_not_exist(fleet: Fleet) -> None:
    async with Client(fleet.address(1)) as client:
        await publish(client, *(b"%d" % n for n in range(10)))
        stub = client._connection.stub(fleet.address(2))
        for offset in (0, 4, 4, 2):
            await stub.Advance(streams_pb2.AdvanceRequest(topic=TEXT, subscription="q", offset=offset))
        subscription = fleet.subscription(1, "q")
        assert subscription.backlog == 6

        await fleet.move(3)
        moved = fleet.subscription(3, "q")
        assert moved.backlog == 6
        await stub.Advance(streams_pb2.AdvanceRequest(topic=TEXT, subscription="q", offset=10))
        assert moved.backlog == 0
        async with client.consumer(TEXT, subscription="q") as consumer:
            await publish(client, b"new")
            assert (await anext(consumer)).offset == 10


async def test_progress_beyond_the_end_is_refused(fleet: Fleet) -> None:
    async with Client(fleet.address(1)) as client:
        await publish(client, b"0")
        stub = client._connection.stub(fleet.address(1))
        with pytest.raises(aio.AioRpcError, match=r"outside of 0\.\.1"):
            await stub.Advance(streams_pb2.AdvanceRequest(topic=TEXT, subscription="q", offset=2))
        assert "q" not in fleet.brokers[1].topics.loaded[ORDERS].subscriptions
        with pytest.raises(aio.AioRpcError, match="subscription name"):
            await stub.Advance(streams_pb2.AdvanceRequest(topic=TEXT, subscription="q/q", offset=1))


# -- quotas ------------------------------------------------------------------------------------


async def test_streams_beyond_the_quota_are_refused_where_the_topic_is_served(fleet: Fleet) -> None:
    fleet.quotas[1].set([Quota(EVERY, max_streams=1)])
    async with Client(f"http://{fleet.address(2)}", timeout=PATIENCE_S) as client:
        async with client.producer(TEXT, timeout=2) as producer:
            await producer.send(b"1")
            assert fleet.quotas[1].usage(ANONYMOUS).streams == 1
            call = rpc_of(fleet, 2).Publish()
            opening = streams_pb2.OpenProducer(topic=TEXT, producer_name="other")
            await call.write(streams_pb2.PublishRequest(open=opening))
            assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "max_streams" in await call.details()
            assert await producer.send(b"2") == 1  # the stream that was there works on
        await until(lambda: not fleet.quotas[1].usage(ANONYMOUS).streams, "the stream has ended")


async def test_a_quota_of_bytes_makes_a_publisher_slow_and_refuses_nothing(fleet: Fleet) -> None:
    async with (
        Client(f"http://{fleet.address(1)}", timeout=PATIENCE_S) as client,
        client.producer(TEXT, linger_ms=0, timeout=PATIENCE_S) as producer,
    ):
        await producer.send(bytes(50_000))
        fleet.quotas[1].set([Quota(EVERY, publish_bytes_per_second=100_000)])
        began = time.monotonic()
        for _ in range(4):
            await producer.send(bytes(50_000))
        took = time.monotonic() - began
    # 200 kB: one second's worth at once, and each of the others when those before it are paid for.
    assert took >= 0.45
    ((_, quota),) = fleet.quotas[1].waited_s
    assert quota == "publish_bytes_per_second"


async def test_a_quota_of_bytes_makes_deliveries_wait(fleet: Fleet) -> None:
    async with Client(f"http://{fleet.address(1)}", timeout=PATIENCE_S) as client:
        async with client.producer(TEXT, linger_ms=0, timeout=PATIENCE_S) as producer:
            for _ in range(4):
                await producer.send(bytes(50_000))
        fleet.quotas[1].set([Quota(EVERY, consume_bytes_per_second=50_000)])
        stream = rpc_of(fleet, 1).Read(streams_pb2.ReadRequest(topic=TEXT, end=4, max_bytes=50_000))
        began = time.monotonic()
        assert [len(answer.batches) async for answer in stream]
        assert time.monotonic() - began >= 1.5


async def test_a_danube_client_waits_for_its_rate_and_is_refused_in_the_end(fleet: Fleet) -> None:
    one = fleet.danube(1)
    producer = await one.create()
    fleet.quotas[1].set([Quota(EVERY, publish_bytes_per_second=1000)])
    await one.send(producer, "x" * 1000 * 13)  # passes whole, and is paid for in twelve seconds
    with pytest.raises(aio.AioRpcError) as refused:
        await one.send(producer, "x")
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    fleet.quotas[1].set([])
    await one.send(producer, "x")


def rpc_of(fleet: Fleet, broker: int) -> Any:
    return streams_pb2_grpc.StreamsStub(fleet.brokers[broker].channel)
