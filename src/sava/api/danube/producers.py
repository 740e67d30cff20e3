"""``ProducerService``: Danube's producers, which send one message in one call.

A producer's id is derived from the topic and the producer's name, so it is the same after a restart of the
broker. Clients do not register again when a broker was restarted; they continue with the id they have. A
message with an id that is not known here, but whose topic and name give this very id, registers its producer
on the way:

    CreateProducer(orders, p) ─▶ id 42      restart      SendMessage(id 42, orders, p) ─▶ registered, stored

Danube has no call that ends a producer, and its Python client stops asking after its producers' health at
the first error. So silence proves nothing. A topic drops a producer that has been idle for long, which then
no longer counts for limits or exclusive access, and its next message registers it as above.

Calls for topics of other brokers are theirs to answer (``forwarding``). Which producers those are is
remembered, as far as there is room: their health is asked for by id alone.
"""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from collections import OrderedDict
from time import perf_counter
from typing import Any, Final

from sava.api.danube.metrics import SendStats
from sava.api.danube.wire import (
    message_from,
    required,
    topic_name,
)
from sava.errors import RetryableError, SavaError
from sava.peers import error_mapping
from sava.peers.guard import require_topic
from sava.proto import danube_api_pb2 as pb
from sava.proto import danube_api_pb2_grpc as rpc
from sava.schemas.errors import SubjectUnknown, VersionUnknown
from sava.schemas.registry import SchemaRegistry
from sava.schemas.types import Reference
from sava.security.permissions import Permission
from sava.security.principal import current
from sava.security.quotas import Quotas
from sava.topics.errors import MessageInvalid, NotOwner, SchemaRefused
from sava.topics.names import TopicName
from sava.topics.producers import AccessMode, ProducerHandle
from sava.topics.producers import producer_id as derived_id
from sava.topics.served import ServedTopics
from sava.topics.topic import Topic

TIDY: Final = 1000
"""With more producers than this, those that have ended are looked for now and then."""
MAX_ELSEWHERE: Final = 100_000
"""Producers of other brokers that are remembered."""


class ProducerUnknown(RetryableError):
    """No producer has this id here. Its client registers again."""


class DanubeProducers:
    """Danube's producers on this broker, by id. Owned by the event loop."""

    def __init__(self, topics: ServedTopics) -> None:
        self._topics = topics
        self._by_id: dict[int, ProducerHandle] = {}
        self._tidy_at = TIDY
        self._elsewhere: OrderedDict[int, TopicName] = OrderedDict()

    def get(self, producer_id: int) -> ProducerHandle | None:
        """None: not known, or its topic is not served here any more."""
        producer = self._by_id.get(producer_id)
        return producer if producer is not None and producer.is_open else None

    async def create(
        self, topic_text: str, name: str, *, reliable: bool, access: AccessMode, schema_subject: str
    ) -> ProducerHandle:
        """Idempotent by topic and name: a client that registers a known name gets the same producer."""
        try:
            topic = await self._topics.get_or_create(topic_name(topic_text), reliable)
            return await self._open(topic, name, access, schema_subject)
        except NotOwner:
            spec = self._topics.registry.get_local(topic_name(topic_text))
            if spec is not None:
                self._remember(derived_id(spec.topic_id, name), topic_name(topic_text))
            raise

    def topic_elsewhere(self, producer_id: int) -> TopicName | None:
        """The topic of a producer that another broker has, or may have by now; None: not known, or the topic
        is here."""
        ended = self._by_id.get(producer_id)
        topic = ended.topic if ended is not None else self._elsewhere.get(producer_id)
        return None if topic in self._topics.loaded else topic

    async def recall(self, producer_id: int, topic_text: str, name: str) -> ProducerHandle:
        """The producer of a message whose id is not known here. Raises ProducerUnknown unless the id is that
        of the topic and name which the message brings."""
        if not topic_text or not name:
            raise ProducerUnknown(f"producer {producer_id} is not known here; create it again")
        try:
            topic = await self._topics.get(topic_name(topic_text))
        except NotOwner:
            self._remember(producer_id, topic_name(topic_text))
            raise
        if derived_id(topic.spec.topic_id, name) != producer_id:
            raise ProducerUnknown(f"producer {producer_id} is not {name} of {topic.name}; create it again")
        return await self._open(topic, name, AccessMode.SHARED, "")

    def _remember(self, producer_id: int, topic: TopicName) -> None:
        self._by_id.pop(producer_id, None)
        self._elsewhere[producer_id] = topic
        self._elsewhere.move_to_end(producer_id)
        if len(self._elsewhere) > MAX_ELSEWHERE:
            self._elsewhere.popitem(last=False)

    async def _open(self, topic: Topic, name: str, access: AccessMode, schema_subject: str) -> ProducerHandle:
        producer = await topic.producers.open(
            name, access=access, schema_subject=schema_subject, takeover=False
        )
        self._by_id[producer.producer_id] = producer
        self._elsewhere.pop(producer.producer_id, None)
        if len(self._by_id) >= self._tidy_at:
            self._by_id = {key: each for key, each in self._by_id.items() if each.is_open}
            self._tidy_at = max(TIDY, 2 * len(self._by_id))
        return producer


class ProducerService(rpc.ProducerServiceServicer):
    def __init__(
        self, producers: DanubeProducers, schemas: SchemaRegistry, sends: SendStats, quotas: Quotas
    ) -> None:
        self._quotas = quotas
        self._producers = producers
        self._schemas = schemas
        self._sends = sends

    async def CreateProducer(self, request: pb.ProducerRequest, context: Any) -> pb.ProducerResponse:
        name = required(request.producer_name, "producer_name")
        subject = ""
        if request.HasField("schema_ref"):
            subject = await self._check_schema(request.schema_ref)
        producer = await self._producers.create(
            required(request.topic_name, "topic_name"),
            name,
            reliable=_is_reliable(request.dispatch_strategy),
            access=_access_mode(request.producer_access_mode),
            schema_subject=subject,
        )
        return pb.ProducerResponse(
            request_id=request.request_id, producer_id=producer.producer_id, producer_name=name
        )

    async def SendMessage(self, request: pb.StreamMessage, context: Any) -> pb.MessageResponse:
        began, producer = perf_counter(), self._producers.get(request.msg_id.producer_id)
        try:
            if producer is None:
                producer = await self._recall(request)
            require_topic(Permission.PRODUCE, producer.topic)
            producer.check_own()
            if self._quotas.is_set:
                await self._quotas.published_by_call(current.get(), len(request.payload))
            await producer.send(message_from(request, producer.name))
        except SavaError as error:
            if producer is not None and not isinstance(error, error_mapping.ELSEWHERE):
                self._sends.failed(producer.topic, error_mapping.code_of(error))
            raise
        self._sends.stored(producer.topic, perf_counter() - began)
        return pb.MessageResponse(request_id=request.request_id)

    async def _recall(self, request: pb.StreamMessage) -> ProducerHandle:
        if not request.HasField("msg_id"):
            raise MessageInvalid("msg_id is missing")
        msg_id = request.msg_id
        return await self._producers.recall(msg_id.producer_id, msg_id.topic_name, request.producer_name)

    async def _check_schema(self, reference: pb.SchemaReference) -> str:
        """The subject, if the version that is asked for exists. Raises SchemaRefused."""
        subject = required(reference.subject, "schema_ref.subject")
        kind = reference.WhichOneof("version_ref")
        wanted = Reference(
            subject,
            pinned_version=reference.pinned_version if kind == "pinned_version" else None,
            min_version=reference.min_version if kind == "min_version" else None,
        )
        try:
            await self._schemas.resolve(wanted)
        except (SubjectUnknown, VersionUnknown) as error:
            raise SchemaRefused(str(error)) from error
        return subject


def _is_reliable(number: int) -> bool:
    if number not in (pb.NonReliable, pb.Reliable):
        raise MessageInvalid(f"dispatch_strategy {number} is not one of NonReliable (0), Reliable (1)")
    return number == pb.Reliable


def _access_mode(number: int) -> AccessMode:
    if number not in (pb.Shared, pb.Exclusive):
        raise MessageInvalid(f"producer_access_mode {number} is not one of Shared (0), Exclusive (1)")
    return AccessMode.EXCLUSIVE if number == pb.Exclusive else AccessMode.SHARED
