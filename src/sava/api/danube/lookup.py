"""``Discovery``, ``HealthCheck`` and ``StorageService``: the small questions of Danube's clients.

``HealthCheck`` says whether a producer or consumer may continue; every client asks every five seconds.
Danube's Python client gives up asking after one error, so nothing here fails. CLOSE is said only when it is
certain that the broker does not know the client (any more): a consumer that got it, and whose stream then
ends, subscribes again. Not knowing for lack of the metadata store is not certainty. Of clients whose topic
another broker has, that broker is asked; as long as it does not answer, they may continue.

``StorageService`` lists the sealed segments of a topic, for tools that read history without a consumer.
Danube's descriptors name the last offset of a segment, not the one after it, and ``after_offset`` is the
last offset that the caller has. 0 stands for a caller that has nothing, so a first segment is never left
out; one that holds offset 0 alone is listed again to a caller who has it.
"""

from __future__ import annotations

from typing import Any, Final

from sava.api.danube.consumers import ConsumerSessions
from sava.api.danube.producers import DanubeProducers
from sava.api.danube.wire import topic_name
from sava.errors import SavaError
from sava.peers.forwarding import Forwarder, is_forwarded
from sava.proto import danube_api_pb2 as pb
from sava.proto import danube_api_pb2_grpc as rpc
from sava.storage.types import Segment
from sava.topics.errors import MessageInvalid, NotOwner, TopicUnknown
from sava.topics.names import TopicName
from sava.topics.registry import Registry
from sava.topics.served import ServedTopics

# ruff: noqa: N802 (gRPC names the methods)


class DiscoveryService(rpc.DiscoveryServicer):
    """``broker_url`` is where clients reach this broker; it must have a scheme, for some clients parse it."""

    def __init__(self, registry: Registry, broker_url: str) -> None:
        self._registry = registry
        self._broker_url = broker_url

    async def TopicLookup(self, request: pb.TopicLookupRequest, context: Any) -> pb.TopicLookupResponse:
        name = topic_name(request.topic)
        if await self._registry.get(name) is None:
            raise TopicUnknown(name)
        return pb.TopicLookupResponse(
            request_id=request.request_id,
            response_type=pb.TopicLookupResponse.Connect,
            connect_url=self._broker_url,
            broker_url=self._broker_url,
        )

    async def TopicPartitions(
        self, request: pb.TopicLookupRequest, context: Any
    ) -> pb.TopicPartitionsResponse:
        """Of an unknown topic: none, which clients take as "does not exist"."""
        partitions = await self._registry.partitions(topic_name(request.topic))
        return pb.TopicPartitionsResponse(request_id=request.request_id, partitions=map(str, partitions))


# -- health ----------------------------------------------------------------------------------------


HEALTH_CHECK: Final = "/danube.HealthCheck/HealthCheck"
ASK_S: Final = 3.0
"""For the other broker's answer: less than the time between two questions."""

_OK = pb.HealthCheckResponse(status=pb.HealthCheckResponse.OK)
_CLOSE = pb.HealthCheckResponse(status=pb.HealthCheckResponse.CLOSE)


class HealthService(rpc.HealthCheckServicer):
    def __init__(self, producers: DanubeProducers, sessions: ConsumerSessions, forwarder: Forwarder) -> None:
        self._producers = producers
        self._sessions = sessions
        self._forwarder = forwarder

    async def HealthCheck(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        try:
            is_known = await self._is_known(request)
        except NotOwner as error:
            topic = TopicName.parse(error.topic)
            is_known = is_forwarded() or await self._is_known_elsewhere(request, topic)
        return _OK if is_known else _CLOSE

    async def _is_known(self, request: pb.HealthCheckRequest) -> bool:
        """Raises NotOwner."""
        match request.client:
            case pb.HealthCheckRequest.Producer:
                if self._producers.get(request.id) is not None:
                    return True
                topic = self._producers.topic_elsewhere(request.id)
                if topic is not None:
                    raise NotOwner(topic, 0)
                return False
            case pb.HealthCheckRequest.Consumer:
                return await self._sessions.is_known(request.id)
            case number:
                raise MessageInvalid(f"client {number} is not one of Producer (0), Consumer (1)")

    async def _is_known_elsewhere(self, request: pb.HealthCheckRequest, topic: TopicName) -> bool:
        try:
            answer = await self._forwarder.ask(
                "client", HEALTH_CHECK, request, pb.HealthCheckResponse, topic=topic, timeout=ASK_S
            )
        except TopicUnknown:
            return False
        except SavaError:
            return True
        if answer.status != pb.HealthCheckResponse.CLOSE:
            return True
        if request.client == pb.HealthCheckRequest.Consumer:
            self._sessions.release(request.id)
        return False


# -- segments --------------------------------------------------------------------------------------


class StorageService(rpc.StorageServiceServicer):
    def __init__(self, topics: ServedTopics) -> None:
        self._topics = topics

    async def ListSegmentDescriptors(
        self, request: pb.ListSegmentDescriptorsRequest, context: Any
    ) -> pb.ListSegmentDescriptorsResponse:
        topic = await self._topics.get(topic_name(request.topic))
        first_wanted = request.after_offset + 1 if request.after_offset else 0
        segments = await topic.log.segments(first_wanted) if topic.log is not None else []
        return pb.ListSegmentDescriptorsResponse(segments=map(_descriptor, segments))


def _descriptor(segment: Segment) -> pb.SegmentDescriptorProto:
    return pb.SegmentDescriptorProto(
        segment_id=segment.key,
        start_offset=segment.start,
        end_offset=segment.end - 1,
        size=segment.size,
        etag=f"crc32c:{segment.crc32c:08x}",
        created_at=segment.created_ms // 1000,
    )
