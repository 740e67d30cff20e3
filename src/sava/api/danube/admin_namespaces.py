"""``NamespaceAdmin``: namespaces, their topics and policies."""

# ruff: noqa: N802 (gRPC names the methods)

from __future__ import annotations

from typing import Any, Final

import msgspec

from sava.api.danube.codes import required, told
from sava.proto import danube_admin_pb2 as pb
from sava.proto import danube_admin_pb2_grpc as rpc
from sava.topics.names import TopicName
from sava.topics.topics import ServedTopics

NO_TOPIC: Final = "."
"""A name that no topic can have, hence one that has no policy of its own."""


class NamespaceAdmin(rpc.NamespaceAdminServicer):
    def __init__(self, topics: ServedTopics) -> None:
        self._namespaces = topics.namespaces
        self._registry = topics.registry
        self._limits = topics.limits

    @told
    async def GetNamespaceTopics(self, request: pb.NamespaceRequest, context: Any) -> pb.TopicListResponse:
        """As Danube counts them: the partitions, not the topic that they are of."""
        await self._namespaces.policy(required(request.name, "name"))
        topics = await self._registry.list(request.name)
        return pb.TopicListResponse(
            topics=[str(name) for name, spec in topics.items() if not spec.partitions]
        )

    @told
    async def GetNamespacePolicies(self, request: pb.NamespaceRequest, context: Any) -> pb.PolicyResponse:
        """What holds for topics that have no policy of their own; 0: no limit."""
        await self._namespaces.policy(required(request.name, "name"))
        effective = self._limits.of(TopicName(request.name, NO_TOPIC))
        return pb.PolicyResponse(policies=msgspec.json.encode(effective._asdict()).decode())

    @told
    async def CreateNamespace(self, request: pb.NamespaceRequest, context: Any) -> pb.NamespaceResponse:
        await self._namespaces.create(required(request.name, "name"))
        return pb.NamespaceResponse(success=True)

    @told
    async def DeleteNamespace(self, request: pb.NamespaceRequest, context: Any) -> pb.NamespaceResponse:
        await self._namespaces.delete(required(request.name, "name"))
        return pb.NamespaceResponse(success=True)
