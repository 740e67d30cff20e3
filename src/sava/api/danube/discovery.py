"""``Discovery``: where a topic is served, and which partitions it has."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from typing import Any

from sava.api.danube.codes import told, topic_name
from sava.proto import danube_api_pb2 as pb
from sava.proto import danube_api_pb2_grpc as rpc
from sava.topics.errors import TopicUnknown
from sava.topics.registry import Registry


class DiscoveryService(rpc.DiscoveryServicer):
    """``broker_url`` is where clients reach this broker; it must have a scheme, for some clients parse it."""

    def __init__(self, registry: Registry, broker_url: str) -> None:
        self._registry = registry
        self._broker_url = broker_url

    @told
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

    @told
    async def TopicPartitions(
        self, request: pb.TopicLookupRequest, context: Any
    ) -> pb.TopicPartitionsResponse:
        """Of an unknown topic: none, which clients take as "does not exist"."""
        partitions = await self._registry.partitions(topic_name(request.topic))
        return pb.TopicPartitionsResponse(request_id=request.request_id, partitions=map(str, partitions))
