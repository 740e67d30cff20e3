"""Messages: from Danube's to what is stored, and back.

On the wire times are in milliseconds and the routing key is the key; everything else passes through
untouched. What the protocol knows of a message's place is made from its offset and its topic.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from sava.proto import danube_api_pb2 as pb
from sava.records import Message
from sava.topics.errors import MessageInvalid, MessageTooLarge
from sava.topics.producers import producer_id
from sava.topics.topic import Topic

MAX_PAYLOAD_BYTES: Final = (4 << 20) - (64 << 10)
"""Danube's clients refuse to receive more than 4 MiB in one piece; the rest of a message needs a little of
it. One that no consumer can take would be delivered again and again."""
MAX_PUBLISH_TIME_MS: Final = (1 << 63) // 1000 - 1
MAX_SCHEMA_ID: Final = (1 << 63) - 1
MAX_SCHEMA_VERSION: Final = (1 << 31) - 1

_NO_ATTRIBUTES: Final[Mapping[str, str]] = {}


def message_from(request: pb.StreamMessage, producer: str) -> Message:
    """What is stored of a message; times are in milliseconds on the wire. Raises MessageInvalid for what the
    store cannot hold: found later, it would fail the messages of others that are stored together with it."""
    payload = request.payload
    publish_time = request.publish_time
    schema_id = request.schema_id if request.HasField("schema_id") else None
    schema_version = request.schema_version if request.HasField("schema_version") else None
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MessageTooLarge(
            f"a payload of {len(payload)} bytes; Danube's clients can receive {MAX_PAYLOAD_BYTES}"
        )
    if publish_time > MAX_PUBLISH_TIME_MS:
        raise MessageInvalid(f"publish_time {publish_time} is not in milliseconds since 1970")
    if (schema_id or 0) > MAX_SCHEMA_ID or (schema_version or 0) > MAX_SCHEMA_VERSION:
        raise MessageInvalid("schema_id or schema_version is out of range")
    return Message(
        payload,
        request.routing_key if request.HasField("routing_key") else None,
        dict(request.attributes) or _NO_ATTRIBUTES,
        publish_time * 1000,
        schema_id,
        schema_version,
        None,
        request.producer_name or producer,
    )


class Composer:
    """Messages as Danube's clients get them from one topic."""

    def __init__(self, topic: Topic, broker_url: str) -> None:
        self._topic_id = topic.spec.topic_id
        self._topic_name = str(topic.name)
        self._broker_url = broker_url
        self._producer: str | None = None
        self._producer_id = 0

    def compose(self, offset: int, message: Message) -> pb.StreamMessage:
        """``request_id`` is the offset as well: the one that the producer gave is not kept."""
        producer = message.producer or ""
        if producer != self._producer:
            self._producer, self._producer_id = producer, producer_id(self._topic_id, producer)
        return pb.StreamMessage(
            request_id=offset,
            msg_id=pb.MsgID(
                producer_id=self._producer_id,
                topic_name=self._topic_name,
                broker_addr=self._broker_url,
                topic_offset=offset,
            ),
            payload=message.payload,
            publish_time=max(message.publish_time, 0) // 1000,
            producer_name=producer,
            attributes=message.attributes,
            schema_id=_unsigned(message.schema_id),
            schema_version=_unsigned(message.schema_version),
            routing_key=message.key,
        )


def _unsigned(value: int | None) -> int | None:
    """The wire has no negative numbers here, and Sava's own producers may write any."""
    return value if value is None or value >= 0 else None
