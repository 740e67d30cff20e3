"""What of a Danube message is stored, and what a consumer gets of it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from sava.api.danube.wire import MAX_PAYLOAD_BYTES, Composer, message_from
from sava.proto import danube_api_pb2 as pb
from sava.records import Message, RecordBatch
from sava.topics.errors import MessageInvalid, MessageTooLarge
from sava.topics.names import TopicName
from sava.topics.producers import producer_id
from sava.topics.specs import TopicSpec
from sava.topics.topic import Topic

ORDERS = TopicName("default", "orders")


class _Topic:
    """As much of a topic as a composer looks at."""

    name = ORDERS
    spec = TopicSpec(topic_id=5, reliable=True)


def _compose(offset: int, message: Message) -> pb.StreamMessage:
    return Composer(cast(Topic, _Topic()), "http://b:1").compose(offset, message)


def _request(**fields: Any) -> pb.StreamMessage:
    return pb.StreamMessage(request_id=1, payload=b"x", producer_name="p", **fields)


def test_everything_that_is_stored_comes_back() -> None:
    request = _request(
        publish_time=1_700_000_000_123,
        attributes={"a": "1"},
        schema_id=7,
        schema_version=2,
        routing_key="k",
    )
    (stored,) = RecordBatch.from_messages([message_from(request, "p")])
    assert stored.publish_time == 1_700_000_000_123_000
    delivered = _compose(9, stored)
    expected = pb.StreamMessage()
    expected.CopyFrom(request)
    expected.request_id = 9
    expected.msg_id.CopyFrom(
        pb.MsgID(
            producer_id=producer_id(5, "p"),
            topic_name="/default/orders",
            broker_addr="http://b:1",
            topic_offset=9,
        )
    )
    assert delivered == expected


def test_what_was_not_given_stays_absent() -> None:
    delivered = _compose(0, message_from(_request(), "p"))
    given = {field.name for field, _ in delivered.ListFields()}
    assert not given & {"schema_id", "schema_version", "routing_key"}
    assert message_from(pb.StreamMessage(payload=b"x"), "registered").producer == "registered"


@pytest.mark.parametrize(
    "fields",
    [{"publish_time": 1 << 62}, {"schema_id": 1 << 63}, {"schema_version": 1 << 31}],
    ids=lambda fields: next(iter(fields)),
)
def test_numbers_that_cannot_be_stored_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(MessageInvalid):
        message_from(_request(**fields), "p")


def test_a_payload_that_no_client_could_receive_is_refused() -> None:
    request = _request()
    request.payload = b"x" * (MAX_PAYLOAD_BYTES + 1)
    with pytest.raises(MessageTooLarge):
        message_from(request, "p")


def test_what_only_other_producers_can_write_is_delivered_too() -> None:
    message = Message(b"x", publish_time=-5_000_000, schema_id=-1, schema_version=-1)
    delivered = _compose(0, message)
    assert (delivered.publish_time, delivered.producer_name) == (0, "")
    assert not delivered.HasField("schema_id")
