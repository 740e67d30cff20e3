"""Danube's wire: which error is which status, and messages, from Danube's to what is stored, and back.

**Statuses.** Danube's clients know three kinds of status. UNAVAILABLE and RESOURCE_EXHAUSTED make them wait,
look the topic up, register again and repeat: right for everything that heals. ALREADY_EXISTS makes a producer
register again. Every other status is raised to the application at once. So what a repetition can cure must be
UNAVAILABLE, and what it cannot must never be: a client would repeat a wrong request without end. The text of
a status is for people. Sava's own stable code goes into the trailing metadata as everywhere else.

**Messages.** On the wire times are in milliseconds and the routing key is the key; everything else passes
through untouched. What the protocol knows of a message's place is made from its offset and its topic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final, NoReturn

import grpc

from sava.cluster import records as cluster
from sava.errors import CallerError, HostError, RetryableError, SavaError
from sava.metadata import errors as metadata
from sava.peers import error_mapping
from sava.proto import danube_api_pb2 as pb
from sava.records import Message
from sava.records import errors as records
from sava.schemas import errors as schemas
from sava.security import permissions, quotas
from sava.security import store as security
from sava.storage import errors as storage
from sava.topics import errors as broker
from sava.topics import names
from sava.topics.errors import MessageInvalid, MessageTooLarge
from sava.topics.names import TopicName
from sava.topics.producers import producer_id
from sava.topics.topic import Topic

Status = grpc.StatusCode

STATUSES: Final[dict[type[SavaError], grpc.StatusCode]] = {
    # Whatever is not listed, by whose fault it is.
    RetryableError: Status.UNAVAILABLE,
    CallerError: Status.FAILED_PRECONDITION,
    HostError: Status.INTERNAL,
    SavaError: Status.INTERNAL,
    # The request can never be right.
    names.InvalidName: Status.INVALID_ARGUMENT,
    storage.InvalidStorageName: Status.INVALID_ARGUMENT,
    metadata.InvalidRequest: Status.INVALID_ARGUMENT,
    broker.MessageInvalid: Status.INVALID_ARGUMENT,
    broker.MessageTooLarge: Status.INVALID_ARGUMENT,
    records.InvalidMessage: Status.INVALID_ARGUMENT,
    records.BatchTooLarge: Status.INVALID_ARGUMENT,
    storage.OffsetOutOfRange: Status.OUT_OF_RANGE,
    schemas.SubjectInvalid: Status.INVALID_ARGUMENT,
    schemas.SchemaInvalid: Status.INVALID_ARGUMENT,
    schemas.SchemaTooLarge: Status.INVALID_ARGUMENT,
    schemas.TypeUnknown: Status.INVALID_ARGUMENT,
    schemas.ModeUnknown: Status.INVALID_ARGUMENT,
    schemas.PolicyUnknown: Status.INVALID_ARGUMENT,
    # What it names is not there, or is there already.
    broker.NamespaceUnknown: Status.NOT_FOUND,
    broker.TopicUnknown: Status.NOT_FOUND,
    broker.SubscriptionUnknown: Status.NOT_FOUND,
    cluster.BrokerUnknown: Status.NOT_FOUND,
    schemas.SubjectUnknown: Status.NOT_FOUND,
    schemas.VersionUnknown: Status.NOT_FOUND,
    broker.NamespaceExists: Status.ALREADY_EXISTS,
    broker.TopicExists: Status.ALREADY_EXISTS,
    # What it names is there and is not what the request takes it for.
    broker.TopicMismatch: Status.FAILED_PRECONDITION,
    broker.SubscriptionMismatch: Status.FAILED_PRECONDITION,
    broker.SchemaRefused: Status.FAILED_PRECONDITION,
    broker.NamespaceNotEmpty: Status.FAILED_PRECONDITION,
    cluster.MoveRefused: Status.FAILED_PRECONDITION,
    schemas.SchemaIncompatible: Status.FAILED_PRECONDITION,
    schemas.SubjectTypeMismatch: Status.FAILED_PRECONDITION,
    # The caller is not known, or may not do this.
    permissions.Unauthenticated: Status.UNAUTHENTICATED,
    permissions.PermissionDenied: Status.PERMISSION_DENIED,
    security.SecurityPolicyInvalid: Status.INVALID_ARGUMENT,
    security.RoleUnknown: Status.NOT_FOUND,
    security.BindingUnknown: Status.NOT_FOUND,
    security.SecurityPolicyLimit: Status.RESOURCE_EXHAUSTED,
    # Another client has what is asked for.
    broker.SubscriptionBusy: Status.PERMISSION_DENIED,
    broker.ProducerBusy: Status.PERMISSION_DENIED,
    broker.OwnedByAnother: Status.PERMISSION_DENIED,
    broker.ProducerFenced: Status.PERMISSION_DENIED,
    broker.LimitReached: Status.RESOURCE_EXHAUSTED,
    quotas.QuotaExceeded: Status.RESOURCE_EXHAUSTED,
    schemas.TooManyVersions: Status.RESOURCE_EXHAUSTED,
    metadata.NoSpace: Status.RESOURCE_EXHAUSTED,
    # The topic has another owner by now: looking it up again finds that one.
    storage.Fenced: Status.UNAVAILABLE,
    storage.TopicSealed: Status.UNAVAILABLE,
    storage.NotClaimed: Status.UNAVAILABLE,
    broker.ConsumerReplaced: Status.UNAVAILABLE,
    # It is unknown whether it took effect. A repetition may then be the second one, which at-least-once
    # allows.
    metadata.OutcomeUnknown: Status.UNAVAILABLE,
    metadata.SessionExpired: Status.UNAVAILABLE,
}


def status_of(error: SavaError) -> grpc.StatusCode:
    """The status of the nearest listed type."""
    return next(STATUSES[kind] for kind in type(error).__mro__ if kind in STATUSES)


async def answer(context: Any, error: SavaError) -> NoReturn:
    """End the call with ``error``, whatever it is."""
    if isinstance(error, error_mapping.Relayed):
        await context.abort(error.status, error_mapping.text_of(error), error.trailing)
    await context.abort(status_of(error), error_mapping.text_of(error), error_mapping.trailing_of(error))
    raise AssertionError("abort always raises")


topic_name: Callable[[str], TopicName] = lru_cache(maxsize=4096)(TopicName.parse)
"""``TopicName.parse`` for names that come with every message. Raises InvalidName."""


def required(value: str, what: str) -> str:
    if not value:
        raise broker.MessageInvalid(f"{what} is missing")
    return value


# -- messages --------------------------------------------------------------------------------------


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
