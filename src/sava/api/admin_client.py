"""AdminClient: the admin port as the command line and the tests use it. Every call has a deadline; errors
arrive as types.

**An unknown outcome is never called a failure.** A change is sent only over a connection that stands. So an
error before that (refused, no answer to the handshake) says for certain that nothing was done. Once the
request may have gone out, an answer that does not come (the deadline, a broken connection, a broker that
died) is ``OutcomeUnknown``, and its text names the command that shows what happened.

A lost answer to a read means that nothing was learned, and the read can be repeated; after a lost answer to a
change, the change may have been made. ``READS`` and ``CHANGES`` tell the one kind from the other. A method
that stands in neither is taken for a change: a new call that is missing there is at worst called unknown when
it only read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Final, Self, cast

import grpc
from google.protobuf.message import Message
from grpc import aio

from sava.config import Auth
from sava.peers import error_mapping
from sava.proto import admin_pb2 as pb
from sava.proto import admin_pb2_grpc as rpc
from sava.proto import brokers_pb2_grpc as brokers_rpc
from sava.proto import danube_schema_pb2_grpc as schema_rpc
from sava.proto import doctor_pb2_grpc as doctor_rpc
from sava.proto import ledgers_pb2_grpc as ledgers_rpc
from sava.proto import pipelines_pb2_grpc as pipelines_rpc
from sava.proto import replication_pb2_grpc as replication_rpc
from sava.proto import security_pb2 as security_pb
from sava.proto import security_pb2_grpc as security_rpc
from sava.proto import topics_admin_pb2_grpc as topics_rpc
from sava.proto import writers_pb2_grpc as writers_rpc
from sava.security.credentials import PLAIN, Credentials, Metadata, Tls

MAX_MESSAGE_BYTES = 64 << 20
CALL_TIMEOUT_S = 15.0
"""A little longer than the store's own default, so that its answer, and not the transport's, is what people
see."""

_OPTIONS: Final = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


def own_credentials(auth: Auth) -> Credentials:
    """What a broker with these settings shows when it is the client."""
    tls = auth.tls
    return Credentials(tls=None if tls is None else Tls(tls.ca_file, tls.cert_file, tls.key_file))


class Method:
    """One method of a service, which knows its own path."""

    def __init__(self, path: str, call: Any) -> None:
        self.path = path
        self._call = call

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._call(*arguments, **options)


class _NamedMethods:
    """A channel to the generated stubs, whose methods are then ``Method``."""

    def __init__(self, channel: aio.Channel) -> None:
        self._channel = channel

    def unary_unary(self, path: str, *arguments: Any, **options: Any) -> Method:
        return Method(path, self._channel.unary_unary(path, *arguments, **options))

    def unary_stream(self, path: str, *arguments: Any, **options: Any) -> Method:
        return Method(path, self._channel.unary_stream(path, *arguments, **options))


class AdminClient:
    def __init__(self, target: str, credentials: Credentials = PLAIN) -> None:
        """Raises CredentialsInvalid."""
        self.target = target
        self._credentials = credentials
        self._channel = credentials.open_channel(target, _OPTIONS)
        self._name = f"broker {target}"
        self.changes = 0
        """Changes that the broker has confirmed."""
        # The generated stubs type synchronous and asynchronous use at once; here it is asynchronous only.
        channel: Any = _NamedMethods(self._channel)
        self.cluster: Any = rpc.ClusterStub(channel)
        self.meta: Any = rpc.MetaStub(channel)
        self.brokers: Any = brokers_rpc.BrokersStub(channel)
        self.namespaces: Any = topics_rpc.NamespacesStub(channel)
        self.topics: Any = topics_rpc.TopicsStub(channel)
        self.subscriptions: Any = topics_rpc.SubscriptionsStub(channel)
        self.writers: Any = writers_rpc.WritersStub(channel)
        self.ledgers: Any = ledgers_rpc.LedgersStub(channel)
        self.doctor: Any = doctor_rpc.DoctorStub(channel)
        self.pipelines: Any = pipelines_rpc.PipelinesStub(channel)
        self.replication: Any = replication_rpc.ReplicationStub(channel)
        self.security: Any = security_rpc.SecurityStub(channel)
        self.schemas: Any = schema_rpc.SchemaRegistryStub(channel)
        stubs = [each for each in vars(self).values() if type(each).__name__.endswith("Stub")]
        self._methods: dict[str, Method] = {
            name: method for stub in stubs for name, method in vars(stub).items()
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close(None)

    async def call(self, method: Any, request: Any, *, timeout: float = CALL_TIMEOUT_S) -> Any:
        """``await client.call(client.cluster.Status, StatusRequest())``. Raises the error that the broker
        raised; BrokerUnreachable or Unavailable if nothing was sent; OutcomeUnknown if the request is a
        change and its answer got lost."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout
        check = check_of(method.path, request)
        if check is not None:
            await self._connect(timeout)

        async def attempt(shown: Metadata) -> Any:
            return await method(request, timeout=max(deadline - clock(), 0.001), metadata=shown)

        shown = await self._credentials.metadata()
        try:
            try:
                answer = await attempt(shown)
            except aio.AioRpcError as error:
                renewed = await self._renewed(error, shown)
                if renewed is None:
                    raise
                answer = await attempt(renewed)
        except aio.AioRpcError as error:
            raise error_mapping.raised_by(error, target=self._name, check=check) from error
        self.changes += check is not None
        return answer

    async def _renewed(self, error: aio.AioRpcError, shown: Metadata) -> Metadata | None:
        """What to show instead after an error, if that is that the token has ended."""
        if error.code() is not grpc.StatusCode.UNAUTHENTICATED:
            return None
        return await self._credentials.renewed(shown)

    async def ask(self, request: Message, method: str = "", *, timeout: float = CALL_TIMEOUT_S) -> Any:
        """``await client.ask(StatusRequest())``: as ``call``, with the method of this name, or the one that
        the request is named after."""
        named = self._methods[method or type(request).__name__.removesuffix("Request")]
        return await self.call(named, request, timeout=timeout)

    async def is_there(self, timeout: float) -> bool:
        """Whether a connection stands within this time."""
        try:
            async with asyncio.timeout(timeout):
                await self._channel.channel_ready()
        except TimeoutError:
            return False
        return True

    async def _connect(self, timeout: float) -> None:
        """Until a connection stands. A harmless question goes first when none does yet: without it, gRPC
        would send the change itself as soon as it is connected, and a deadline that passes meanwhile would
        leave open whether it was sent. Raises BrokerUnreachable, Unavailable."""
        if self._channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY:
            return
        try:
            shown = await self._credentials.metadata()
            await self.security.WhoAmI(security_pb.WhoAmIRequest(), timeout=timeout, metadata=shown)
        except aio.AioRpcError as error:
            # Any other answer, even a refusal, came over a connection.
            if error.code() in error_mapping.TRANSPORT:
                raise error_mapping.raised_by(error, target=self._name) from error

    async def status(self, *, timeout: float = CALL_TIMEOUT_S) -> pb.StatusResponse:
        return cast(
            pb.StatusResponse, await self.call(self.cluster.Status, pb.StatusRequest(), timeout=timeout)
        )

    async def stream(self, method: Any, request: Any, *, timeout: float | None) -> AsyncGenerator[Any, None]:
        """The answers of a method that has several, until the caller stops or the broker ends it. Raises the
        error that the broker raised, as ``call`` does. Without a timeout it has no end of its own."""
        check = check_of(method.path, request)
        if check is not None:
            await self._connect(CALL_TIMEOUT_S if timeout is None else min(timeout, CALL_TIMEOUT_S))
        call = method(request, timeout=timeout, metadata=await self._credentials.metadata())
        try:
            async for response in call:
                yield response
        except aio.AioRpcError as error:
            raise error_mapping.raised_by(error, target=self._name, check=check) from error
        finally:
            call.cancel()

    def watch(self, request: pb.WatchRequest) -> AsyncGenerator[pb.WatchResponse, None]:
        """Until the caller stops, or the broker ends it with an error."""
        return self.stream(self.meta.Watch, request, timeout=None)


# -- changes, and how to check them ----------------------------------------------------------------


_SERVICES: Final = {
    "/sava.admin.Cluster/": ("Status",),
    "/sava.admin.Meta/": ("Get", "Range", "Watch"),
    "/sava.admin.Brokers/": ("ListBrokers", "GetBalance", "GetHistory"),
    "/sava.admin.Namespaces/": ("ListNamespaces", "DescribeNamespace"),
    "/sava.admin.Topics/": ("ListTopics", "DescribeTopic"),
    "/sava.admin.Subscriptions/": ("DescribeSubscription",),
    "/sava.admin.Ledgers/": ("ListLedgers", "DescribeLedger"),
    "/sava.admin.Doctor/": ("Examine",),
    "/sava.admin.Pipelines/": ("ListPipelines", "ListRunners"),
    "/sava.admin.Security/": (
        *("WhoAmI", "CanI", "ListRoles", "ListBindings", "ListRevocations", "ListQuotas"),
    ),
    "/sava.admin.Replication/": (
        *("ListRemotes", "TestRemote", "GetReplication", "GetReplicationStatus", "GetLink"),
    ),
    "/sava.writers.Writers/": ("Staging", "ListWriters"),
    "/danube_schema.SchemaRegistry/": (
        *("GetSchema", "GetLatestSchema", "ListVersions", "CheckCompatibility"),
        *("GetTopicSchemaConfig", "ListSubjects"),
    ),
}
READS: Final = frozenset(service + method for service, methods in _SERVICES.items() for method in methods)
"""Calls that change nothing."""

_STATUS: Final = "sava cluster status"
_LEASES: Final = "sava meta range /cluster/"
_RUNNERS: Final = "sava pipelines runners"
_PIPELINE: Final = "sava pipelines describe {0.name}"
_TOPIC: Final = "sava topics describe {0.name}"
_SUBSCRIPTION: Final = "sava subscriptions describe {0.topic} {0.subscription}"
_NAMESPACE: Final = "sava namespaces describe {0.namespace}"
_ROLES: Final = "sava auth roles list"
_BINDINGS: Final = "sava auth bindings list"
_REVOCATIONS: Final = "sava auth revocations"
_QUOTAS: Final = "sava auth quotas list"
_SCHEMA_TOPIC: Final = "sava schemas topic {0.topic_name}"

CHANGES: Final[dict[str, str]] = {
    "/sava.admin.Cluster/Init": _STATUS,
    "/sava.admin.Cluster/AddNode": _STATUS,
    "/sava.admin.Cluster/PromoteNode": _STATUS,
    "/sava.admin.Cluster/RemoveNode": _STATUS,
    "/sava.admin.Cluster/TransferLeader": _STATUS,
    "/sava.admin.Cluster/Snapshot": _STATUS,
    "/sava.admin.Meta/Put": "sava meta get {0.key}",
    "/sava.admin.Meta/Delete": "sava meta range {0.key}",
    "/sava.admin.Meta/Txn": "sava meta get KEY",
    "/sava.admin.Meta/AllocateId": "sava meta get {0.key}",
    "/sava.admin.Meta/GrantLease": _LEASES,
    "/sava.admin.Meta/KeepAlive": _LEASES,
    "/sava.admin.Meta/RevokeLease": _LEASES,
    "/sava.admin.Brokers/DrainBroker": "sava brokers list",
    "/sava.admin.Brokers/ActivateBroker": "sava brokers list",
    "/sava.admin.Brokers/Rebalance": "sava brokers balance",
    "/sava.admin.Brokers/ReportLoad": "sava brokers balance",
    "/sava.admin.Brokers/PrepareMove": "sava topics describe {0.topic}",
    "/sava.admin.Namespaces/CreateNamespace": _NAMESPACE,
    "/sava.admin.Namespaces/SetNamespacePolicy": _NAMESPACE,
    "/sava.admin.Namespaces/DeleteNamespace": _NAMESPACE,
    "/sava.admin.Topics/CreateTopic": _TOPIC,
    "/sava.admin.Topics/DeleteTopic": _TOPIC,
    "/sava.admin.Topics/GrowTopic": _TOPIC,
    "/sava.admin.Topics/SetTopicPolicy": _TOPIC,
    "/sava.admin.Topics/UnloadTopic": _TOPIC,
    "/sava.admin.Subscriptions/CreateSubscription": _SUBSCRIPTION,
    "/sava.admin.Subscriptions/DeleteSubscription": _SUBSCRIPTION,
    "/sava.admin.Subscriptions/SeekSubscription": _SUBSCRIPTION,
    "/sava.admin.Subscriptions/ConfigureSubscription": _SUBSCRIPTION,
    "/sava.admin.Ledgers/RecoverLedger": "sava ledgers describe {0.broker_id}/{0.incarnation}",
    "/sava.admin.Pipelines/ApplyPipeline": "sava pipelines describe {0.spec.name}",
    "/sava.admin.Pipelines/PausePipeline": _PIPELINE,
    "/sava.admin.Pipelines/ResumePipeline": _PIPELINE,
    "/sava.admin.Pipelines/DeletePipeline": _PIPELINE,
    "/sava.admin.Pipelines/JoinRunner": _RUNNERS,
    "/sava.admin.Pipelines/LeaveRunner": _RUNNERS,
    "/sava.admin.Pipelines/ClaimPipeline": _PIPELINE,
    "/sava.admin.Pipelines/ReportPipeline": _PIPELINE,
    "/sava.admin.Pipelines/ReleasePipeline": _PIPELINE,
    "/sava.admin.Replication/AddRemote": "sava remotes list",
    "/sava.admin.Replication/RemoveRemote": "sava remotes list",
    "/sava.admin.Replication/SetReplication": "sava replication get {0.scope}",
    "/sava.admin.Replication/ClearReplication": "sava replication get {0.scope}",
    "/sava.admin.Replication/ReportLink": "sava replication status",
    "/sava.admin.Replication/RecreateRemoteTopic": "sava replication status {0.topic}",
    "/sava.admin.Security/SetRole": _ROLES,
    "/sava.admin.Security/DeleteRole": _ROLES,
    "/sava.admin.Security/CreateBinding": _BINDINGS,
    "/sava.admin.Security/DeleteBinding": _BINDINGS,
    "/sava.admin.Security/Revoke": _REVOCATIONS,
    "/sava.admin.Security/DeleteRevocation": _REVOCATIONS,
    "/sava.admin.Security/SetQuota": _QUOTAS,
    "/sava.admin.Security/DeleteQuota": _QUOTAS,
    "/sava.writers.Writers/Commit": "sava writers list",
    "/sava.writers.Writers/PublishStaged": "sava writers list",
    "/sava.writers.Writers/ForgetWriter": "sava writers list",
    "/danube_schema.SchemaRegistry/RegisterSchema": "sava schemas versions {0.subject}",
    "/danube_schema.SchemaRegistry/DeleteSchemaVersion": "sava schemas versions {0.subject}",
    "/danube_schema.SchemaRegistry/SetCompatibilityMode": "sava schemas mode {0.subject}",
    "/danube_schema.SchemaRegistry/ConfigureTopicSchema": _SCHEMA_TOPIC,
    "/danube_schema.SchemaRegistry/UpdateTopicValidationPolicy": _SCHEMA_TOPIC,
}
"""Calls that change something: the command that shows whether one did, with fields of its request."""


def check_of(method: str, request: Any) -> str | None:
    """The command that shows whether the call took effect. None: it changes nothing."""
    if method in READS or getattr(request, "dry_run", False):
        return None
    if method.endswith("/RecoverLedger") and not request.HasField("accepted"):
        return None  # it only says what would be lost
    return CHANGES.get(method, "sava doctor").format(request)
