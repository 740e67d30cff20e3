"""AdminClient: the admin port as the command line and the tests use it. Every call has a deadline; errors
arrive as types."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self, cast

from grpc import aio

from sava.config import Auth
from sava.proto import admin_pb2 as pb
from sava.proto import admin_pb2_grpc as rpc
from sava.proto import brokers_pb2_grpc as brokers_rpc
from sava.proto import danube_schema_pb2_grpc as schema_rpc
from sava.proto import doctor_pb2_grpc as doctor_rpc
from sava.proto import journals_pb2_grpc as journals_rpc
from sava.proto import pipelines_pb2_grpc as pipelines_rpc
from sava.proto import replication_pb2_grpc as replication_rpc
from sava.proto import topics_admin_pb2_grpc as topics_rpc
from sava.proto import writers_pb2_grpc as writers_rpc
from sava.services import faults, security

MAX_MESSAGE_BYTES = 64 << 20
PLAIN = Auth()
CALL_TIMEOUT_S = 15.0
"""A little longer than the store's own default, so that its answer, and not the transport's, is what people
see."""

_OPTIONS: security.Options = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class AdminClient:
    def __init__(self, target: str, auth: Auth = PLAIN) -> None:
        self.target = target
        self._channel = security.open_channel(target, auth, _OPTIONS)
        # The generated stubs type synchronous and asynchronous use at once; here it is asynchronous only.
        self.cluster: Any = rpc.ClusterStub(self._channel)
        self.meta: Any = rpc.MetaStub(self._channel)
        self.brokers: Any = brokers_rpc.BrokersStub(self._channel)
        self.namespaces: Any = topics_rpc.NamespacesStub(self._channel)
        self.topics: Any = topics_rpc.TopicsStub(self._channel)
        self.subscriptions: Any = topics_rpc.SubscriptionsStub(self._channel)
        self.writers: Any = writers_rpc.WritersStub(self._channel)
        self.journals: Any = journals_rpc.JournalsStub(self._channel)
        self.doctor: Any = doctor_rpc.DoctorStub(self._channel)
        self.pipelines: Any = pipelines_rpc.PipelinesStub(self._channel)
        self.replication: Any = replication_rpc.ReplicationStub(self._channel)
        self.schemas: Any = schema_rpc.SchemaRegistryStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close(None)

    async def call(self, method: Any, request: Any, *, timeout: float = CALL_TIMEOUT_S) -> Any:
        """``await client.call(client.cluster.Status, StatusRequest())``. Raises the error that the broker
        raised."""
        try:
            return await method(request, timeout=timeout)
        except aio.AioRpcError as error:
            raise faults.raised_by(error, target=f"broker {self.target}") from error

    async def status(self, *, timeout: float = CALL_TIMEOUT_S) -> pb.StatusResponse:
        return cast(
            pb.StatusResponse, await self.call(self.cluster.Status, pb.StatusRequest(), timeout=timeout)
        )

    async def stream(self, method: Any, request: Any, *, timeout: float | None) -> AsyncGenerator[Any, None]:
        """The answers of a method that has several, until the caller stops or the broker ends it. Raises the
        error that the broker raised. Without a timeout it may go on for ever."""
        call = method(request, timeout=timeout)
        try:
            async for response in call:
                yield response
        except aio.AioRpcError as error:
            raise faults.raised_by(error, target=f"broker {self.target}") from error
        finally:
            call.cancel()

    def watch(self, request: pb.WatchRequest) -> AsyncGenerator[pb.WatchResponse, None]:
        """Until the caller stops, or the broker ends it with an error."""
        return self.stream(self.meta.Watch, request, timeout=None)
