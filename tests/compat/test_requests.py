"""Single requests, right and wrong: every answer is the one that makes clients do the right thing."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from grpc import StatusCode

from sava.proto import danube_admin_pb2 as admin
from sava.proto import danube_api_pb2 as pb
from tests.compat import raw
from tests.compat.raw import Producer, Stream, health, open_stream, refused, subscribe
from tests.compat.stubs import Stubs
from tests.support.brokers import Standalone

INVALID = StatusCode.INVALID_ARGUMENT


# -- producing ---------------------------------------------------------------------------------


async def test_every_answer_carries_the_number_of_its_request(stubs: Stubs, topic: str) -> None:
    created = await stubs.producer.CreateProducer(
        pb.ProducerRequest(request_id=11, producer_name="p", topic_name=topic, dispatch_strategy=pb.Reliable)
    )
    assert (created.request_id, created.producer_name) == (11, "p")
    message = pb.StreamMessage(
        request_id=12,
        msg_id=pb.MsgID(producer_id=created.producer_id, topic_name=topic),
        payload=b"x",
        producer_name="p",
    )
    assert (await stubs.producer.SendMessage(message)).request_id == 12
    consumer = await stubs.consumer.Subscribe(
        pb.ConsumerRequest(request_id=13, topic_name=topic, consumer_name="c", subscription="s")
    )
    assert (consumer.request_id, consumer.consumer_name) == (13, "c")
    place = pb.MsgID(topic_name=topic, topic_offset=0)
    ack = pb.AckRequest(request_id=14, msg_id=place, subscription_name="s")
    assert (await stubs.consumer.Ack(ack)).request_id == 14
    nack = pb.NackRequest(request_id=15, msg_id=place, subscription_name="s")
    assert (await stubs.consumer.Nack(nack)).request_id == 15
    look = pb.TopicLookupRequest(request_id=16, topic=topic)
    assert (await stubs.discovery.TopicLookup(look)).request_id == 16
    assert (await stubs.discovery.TopicPartitions(look)).request_id == 16


async def test_creating_a_producer_again_gives_the_same_id(stubs: Stubs, topic: str) -> None:
    first = await Producer.create(stubs, topic, "p")
    again = await Producer.create(stubs, topic, "p")
    other = await Producer.create(stubs, topic, "q")
    assert first.producer_id == again.producer_id != other.producer_id


async def test_what_is_missing_or_unknown_in_a_request_is_said(stubs: Stubs, topic: str) -> None:
    create, send = stubs.producer.CreateProducer, stubs.producer.SendMessage
    wrong = [
        create(pb.ProducerRequest()),
        create(pb.ProducerRequest(producer_name="p")),
        create(pb.ProducerRequest(topic_name=topic)),
        create(pb.ProducerRequest(producer_name="p", topic_name="no-slash")),
        create(pb.ProducerRequest(producer_name="p", topic_name="/default/")),
        create(pb.ProducerRequest(producer_name="p", topic_name=f"{topic}/more")),
        create(pb.ProducerRequest(producer_name="p", topic_name=topic, dispatch_strategy=7)),  # type: ignore[arg-type]
        create(pb.ProducerRequest(producer_name="p", topic_name=topic, producer_access_mode=7)),  # type: ignore[arg-type]
        create(pb.ProducerRequest(producer_name="p", topic_name=topic, schema_ref=pb.SchemaReference())),
        send(pb.StreamMessage(payload=b"x")),
    ]
    assert [(await refused(call))[0] for call in wrong] == [INVALID] * len(wrong)


async def test_a_message_that_cannot_be_stored_fails_alone(stubs: Stubs, topic: str) -> None:
    producer = await Producer.create(stubs, topic)
    send = stubs.producer.SendMessage
    impossible = [
        producer.message("x", schema_id=1 << 63),
        producer.message("x", schema_version=1 << 31),
        producer.message(b"x" * ((4 << 20) - 1000)),
    ]
    late = producer.message("x")
    late.publish_time = (1 << 64) - 1
    async with asyncio.TaskGroup() as together:
        refusals = [together.create_task(refused(send(message))) for message in [*impossible, late]]
        together.create_task(producer.send("good"))
    assert [each.result()[0] for each in refusals] == [INVALID] * 4


async def test_calls_that_come_at_once_are_all_answered(stubs: Stubs, topic: str) -> None:
    """A topic was on the move for a few seconds, and all who waited for it come in the same moment. gRPC
    would cancel some of more than a thousand calls that no handler has begun with, which clients do not
    repeat."""
    producer = await Producer.create(stubs, topic)
    await producer.send_numbers(range(5000), at_once=5000)


async def test_an_unknown_producer_is_told_to_come_back(stubs: Stubs, topic: str) -> None:
    producer = await Producer.create(stubs, topic)
    stranger = producer.message("x")
    stranger.msg_id.producer_id = 99
    assert (await refused(stubs.producer.SendMessage(stranger)))[0] is StatusCode.UNAVAILABLE
    nameless = pb.StreamMessage(msg_id=pb.MsgID(producer_id=99), payload=b"x")
    assert (await refused(stubs.producer.SendMessage(nameless)))[0] is StatusCode.UNAVAILABLE


async def test_a_producer_that_was_not_created_here_is_recognized_by_its_id(stubs: Stubs, topic: str) -> None:
    """As after a restart: the id alone proves topic and name."""
    producer = await Producer.create(stubs, topic)
    producer_of_another_topic = await Producer.create(stubs, f"{topic}-other")
    mixed_up = producer.message("x")
    mixed_up.msg_id.topic_name = producer_of_another_topic.topic
    # A known id is enough, and the topic is the producer's own.
    await stubs.producer.SendMessage(mixed_up)
    stream = await open_stream(stubs, topic)
    await producer.send("y")
    assert await stream.texts(1) == ["y"]


async def test_kinds_of_topics_do_not_mix(stubs: Stubs, topic: str) -> None:
    await Producer.create(stubs, topic, reliable=True)
    code, text = await refused(Producer.create(stubs, topic, "other", reliable=False))
    assert code is StatusCode.FAILED_PRECONDITION
    assert "reliable" in text
    await Producer.create(stubs, f"{topic}-x-part-1")
    assert (await refused(Producer.create(stubs, f"{topic}-x")))[0] in (
        StatusCode.ALREADY_EXISTS,
        StatusCode.FAILED_PRECONDITION,
    )


async def test_an_exclusive_producer_is_alone(stubs: Stubs, topic: str) -> None:
    only = await Producer.create(stubs, topic, "only", producer_access_mode=pb.Exclusive)
    again = await Producer.create(stubs, topic, "only", producer_access_mode=pb.Exclusive)
    assert only.producer_id == again.producer_id
    assert (await refused(Producer.create(stubs, topic, "other")))[0] is StatusCode.PERMISSION_DENIED
    await only.send("x")
    await Producer.create(stubs, f"{topic}-b", "first")
    late = Producer.create(stubs, f"{topic}-b", "late", producer_access_mode=pb.Exclusive)
    assert (await refused(late))[0] is StatusCode.PERMISSION_DENIED


async def test_a_namespace_must_exist(stubs: Stubs) -> None:
    assert (await refused(Producer.create(stubs, "/nowhere/topic")))[0] is StatusCode.NOT_FOUND


# -- consuming ---------------------------------------------------------------------------------


async def test_wrong_subscriptions_are_refused(stubs: Stubs, topic: str) -> None:
    ask = stubs.consumer.Subscribe
    await Producer.create(stubs, topic)
    complete: dict[str, Any] = {"topic_name": topic, "consumer_name": "c", "subscription": "s"}
    for field in complete:
        request = pb.ConsumerRequest(**{**complete, field: ""})
        assert (await refused(ask(request)))[0] is INVALID, field
    assert (await refused(subscribe(stubs, topic, kind=9)))[0] is INVALID
    assert (await refused(subscribe(stubs, "bad name")))[0] is INVALID
    assert (await refused(subscribe(stubs, f"{topic}-unknown")))[0] is StatusCode.NOT_FOUND
    await subscribe(stubs, topic, kind=raw.SHARED)
    assert (await refused(subscribe(stubs, topic)))[0] is StatusCode.FAILED_PRECONDITION


async def test_wrong_acks_are_refused(stubs: Stubs, topic: str) -> None:
    await Producer.create(stubs, topic)
    await subscribe(stubs, topic)
    place = pb.MsgID(topic_name=topic, topic_offset=0)
    cases: list[tuple[dict[str, Any], StatusCode]] = [
        ({}, INVALID),
        ({"subscription_name": "subscription"}, INVALID),
        ({"msg_id": place}, INVALID),
        ({"msg_id": pb.MsgID(), "subscription_name": "subscription"}, INVALID),
        ({"msg_id": place, "subscription_name": "unknown"}, StatusCode.NOT_FOUND),
        (
            {"msg_id": pb.MsgID(topic_name=f"{topic}-unknown"), "subscription_name": "subscription"},
            StatusCode.NOT_FOUND,
        ),
    ]
    for fields, expected in cases:
        assert (await refused(stubs.consumer.Ack(pb.AckRequest(**fields))))[0] is expected, fields
        assert (await refused(stubs.consumer.Nack(pb.NackRequest(**fields))))[0] is expected, fields


async def test_late_and_repeated_acks_are_fine(stubs: Stubs, topic: str) -> None:
    producer = await Producer.create(stubs, topic)
    stream = await open_stream(stubs, topic)
    await producer.send("x")
    message = await stream.next()
    await stream.ack(message)
    message.msg_id.topic_offset = 10_000
    await stream.ack(message)


async def test_a_message_arrives_as_it_was_sent(stubs: Stubs, topic: str, broker: Standalone) -> None:
    producer = await Producer.create(stubs, topic, "p")
    stream = await open_stream(stubs, topic)
    payload = bytes(range(256))
    await producer.send(payload, "key", attributes={"a": "1", "ü": "€"}, schema_id=7, schema_version=3)
    await producer.send(b"")
    full, bare = await stream.next(), await stream.next()
    assert full.payload == payload
    assert (full.publish_time, full.producer_name) == (1_700_000_000_123, "p")
    assert dict(full.attributes) == {"a": "1", "ü": "€"}
    assert (full.schema_id, full.schema_version, full.routing_key) == (7, 3, "key")
    assert full.msg_id == pb.MsgID(
        producer_id=producer.producer_id, topic_name=topic, broker_addr=broker.url, topic_offset=0
    )
    assert bare.msg_id.topic_offset == 1
    absent = [bare.HasField(field) for field in ("schema_id", "schema_version", "routing_key")]
    assert (bare.payload, dict(bare.attributes), absent) == (b"", {}, [False] * 3)


async def test_a_stream_with_an_unknown_id_fails_slowly(stubs: Stubs) -> None:
    began = time.monotonic()
    assert await Stream(stubs, 12345).end() is StatusCode.UNAVAILABLE
    assert time.monotonic() - began > 0.5


# -- health ------------------------------------------------------------------------------------


async def test_health_of_producers_and_consumers(stubs: Stubs, topic: str) -> None:
    producer = await Producer.create(stubs, topic)
    consumer_id = await subscribe(stubs, topic)
    assert await health(stubs, producer.producer_id, producer=True) == "OK"
    assert await health(stubs, consumer_id) == "OK"  # before its stream
    stream = Stream(stubs, consumer_id)
    assert await stream.is_silent()
    assert await health(stubs, consumer_id) == "OK"
    stream.cancel()
    assert await health(stubs, consumer_id) == "OK"
    assert await health(stubs, 4711) == "CLOSE"
    assert await health(stubs, 4711, producer=True) == "CLOSE"
    strange = pb.HealthCheckRequest(client=5)  # type: ignore[arg-type]
    assert (await refused(stubs.health.HealthCheck(strange)))[0] is INVALID


async def test_a_consumer_whose_subscription_was_removed_is_closed(stubs: Stubs, topic: str) -> None:
    await Producer.create(stubs, topic)
    consumer_id = await subscribe(stubs, topic)
    stream = Stream(stubs, consumer_id)
    assert await stream.is_silent()
    await stubs.topics.Unsubscribe(admin.SubscriptionRequest(topic=topic, subscription="subscription"))
    assert await stream.end() is StatusCode.UNAVAILABLE
    again = Stream(stubs, consumer_id)  # as the Python client does at once
    await again.is_silent(0.1)
    assert await health(stubs, consumer_id) == "CLOSE"
    began = time.monotonic()
    assert await again.end() is StatusCode.UNAVAILABLE
    assert time.monotonic() - began < 0.5, "the health check's answer ends a stream that is held back"


# -- discovery ---------------------------------------------------------------------------------


async def test_look_up(stubs: Stubs, topic: str, broker: Standalone) -> None:
    look_up = stubs.discovery.TopicLookup
    assert (await refused(look_up(pb.TopicLookupRequest(topic=topic))))[0] is StatusCode.NOT_FOUND
    assert (await refused(look_up(pb.TopicLookupRequest(topic="bad"))))[0] is INVALID
    await Producer.create(stubs, topic)
    found = await look_up(pb.TopicLookupRequest(topic=topic))
    assert found.response_type == pb.TopicLookupResponse.Connect
    assert (found.connect_url, found.broker_url, found.proxy) == (broker.url, broker.url, False)


async def test_names_that_begin_alike_are_different_topics(stubs: Stubs, topic: str) -> None:
    async def partitions(name: str) -> list[str]:
        response = await stubs.discovery.TopicPartitions(pb.TopicLookupRequest(topic=name))
        return list(response.partitions)

    order, orders = f"{topic}-order", f"{topic}-orders"
    await Producer.create(stubs, orders)
    assert await partitions(order) == []
    await Producer.create(stubs, order, reliable=False)
    for index in (2, 0, 1):
        await Producer.create(stubs, f"{order}-b-part-{index}")
    assert await partitions(order) == [order]
    assert await partitions(orders) == [orders]
    assert await partitions(f"{order}-b") == [f"{order}-b-part-{index}" for index in range(3)]
    assert await partitions(f"{order}-b-part-1") == [f"{order}-b-part-1"]


async def test_a_token_is_accepted_where_none_is_needed(stubs: Stubs, topic: str) -> None:
    metadata = (("authorization", "Bearer anything"), ("x-danube-broker-url", "http://elsewhere:1"))
    response = await stubs.discovery.TopicPartitions(pb.TopicLookupRequest(topic=topic), metadata=metadata)
    assert list(response.partitions) == []
