"""Raw stubs of every Danube service, for what no well-behaved client sends."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from grpc import aio

from sava.proto import danube_admin_pb2_grpc as admin_rpc
from sava.proto import danube_api_pb2_grpc as api_rpc
from sava.proto import danube_schema_pb2_grpc as schema_rpc
from tests.support.brokers import Standalone


class Stubs:
    """``async with Stubs(broker)``."""

    def __init__(self, broker: Standalone, address: str = "") -> None:
        self._client = aio.insecure_channel(address or broker.address)
        self._admin = aio.insecure_channel(broker.admin)
        # The generated stubs type synchronous and asynchronous use at once; here it is asynchronous only.
        self.producer: Any = api_rpc.ProducerServiceStub(self._client)
        self.consumer: Any = api_rpc.ConsumerServiceStub(self._client)
        self.discovery: Any = api_rpc.DiscoveryStub(self._client)
        self.health: Any = api_rpc.HealthCheckStub(self._client)
        self.storage: Any = api_rpc.StorageServiceStub(self._client)
        self.schemas: Any = schema_rpc.SchemaRegistryStub(self._client)
        self.brokers: Any = admin_rpc.BrokerAdminStub(self._admin)
        self.cluster: Any = admin_rpc.ClusterAdminStub(self._admin)
        self.namespaces: Any = admin_rpc.NamespaceAdminStub(self._admin)
        self.topics: Any = admin_rpc.TopicAdminStub(self._admin)
        self.security: Any = admin_rpc.SecurityAdminStub(self._admin)
        self.admin_schemas: Any = schema_rpc.SchemaRegistryStub(self._admin)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.close(None)
        await self._admin.close(None)
